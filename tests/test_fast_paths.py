"""What is written for speed or memory has the bits of the plain formula, and its gradients."""

import pytest
import torch
from conftest import logits_of, tiny_gated, tiny_input_ids
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as apply_partial_rotary_pos_emb

from gated_attention import GatedAttentionConfig
from gated_attention.modeling_gated.gate import gate_scores
from gated_attention.modeling_gated.norm import FEW, rms_norm
from gated_attention.modeling_gated.rotary import rotate, rotate_together


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def states_and_angles(dtype, rotated: int, length: int = 7, head_dim: int = 12):
    generator = torch.Generator().manual_seed(0)
    # As a projection leaves them: heads and sequence transposed.
    states = torch.randn(2, length, 3, head_dim, generator=generator).to(dtype).transpose(1, 2)
    angles = torch.randn(2, length, rotated // 2, generator=generator).repeat(1, 1, 2)
    return states, angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize("rotated", [12, 4], ids=["all_channels", "first_channels"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_has_the_bits_of_transformers(dtype, rotated, length):
    states, cos, sin = states_and_angles(dtype, rotated, length)
    stock = apply_rotary_pos_emb if rotated == 12 else apply_partial_rotary_pos_emb
    results, gradients = [], []
    for function in (lambda x: stock(x, x, cos, sin)[0], lambda x: rotate(x, cos.unsqueeze(1), sin.unsqueeze(1))):
        leaf = states.clone().requires_grad_()
        result = function(leaf)
        result.backward(torch.linspace(-1, 1, result.numel()).to(dtype).view(result.shape))
        results.append(result.detach())
        gradients.append(leaf.grad)
    assert torch.equal(*results)
    assert torch.equal(*gradients)
    before = states.clone()
    with torch.no_grad():
        assert torch.equal(rotate(states, cos.unsqueeze(1), sin.unsqueeze(1)), results[0])
    assert torch.equal(states, before)


@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize("rotated", [12, 4], ids=["all_channels", "first_channels"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotating_together_has_the_bits_of_two_rotations(dtype, rotated, length):
    queries, cos, sin = states_and_angles(dtype, rotated, length)
    keys = queries.flip(-1)[:, :1]
    arguments = (queries, keys, cos.unsqueeze(1), sin.unsqueeze(1))
    before = [states.clone() for states in arguments]
    apart = [rotate(states, *arguments[2:]) for states in (queries, keys)]
    with torch.no_grad():
        together = rotate_together(*arguments)
    for states, expected in zip(together, apart, strict=True):
        assert torch.equal(states, expected)
    assert all(torch.equal(*pair) for pair in zip(arguments, before, strict=True))
    leaves = [states.clone().requires_grad_() for states in (queries, keys)]
    with_gradient = rotate_together(*leaves, *arguments[2:])
    sum(states.sum() for states in with_gradient).backward()
    assert all(leaf.grad is not None for leaf in leaves)


@pytest.mark.parametrize("rotated", [12, 4], ids=["all_channels", "first_channels"])
def test_rotation_gradient_is_that_of_its_function(rotated):
    states, cos, sin = states_and_angles(torch.float64, rotated, length=2)
    arguments = (cos.unsqueeze(1), sin.unsqueeze(1))
    leaf = states.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotate(x, *arguments), leaf, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda x: rotate(x, *arguments).pow(3), leaf)


@pytest.mark.parametrize("rotated", [12, 4], ids=["all_channels", "first_channels"])
def test_function_transforms_go_through_rotation_and_gate(rotated):
    states, cos, sin = states_and_angles(torch.float64, rotated, length=2)
    arguments = (cos.unsqueeze(1), sin.unsqueeze(1))
    config = GatedAttentionConfig(gate_scale=2.0)

    def loss(x, rotation):
        scores = gate_scores(config, x.flatten(-2), 2)
        return rotation(x).pow(2).mul(scores.sum()).sum()

    def fast(x):
        return loss(x, lambda y: rotate(y, *arguments))

    def plain(x):
        stock = apply_rotary_pos_emb if rotated == 12 else apply_partial_rotary_pos_emb
        return loss(x, lambda y: stock(y, y, cos, sin)[0])

    for transform in (torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f)), torch.func.hessian):
        x = torch.stack([states, states + 1]) if "lambda" in transform.__name__ else states
        torch.testing.assert_close(transform(fast)(x), transform(plain)(x))


@pytest.mark.parametrize("heads", [3, FEW // 480 + 1], ids=["few", "many"])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=["one_format", "float32_weight"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_has_the_bits_of_transformers_with_and_without_gradients(dtype, weight_dtype, heads):
    config = GatedAttentionConfig(rms_norm_eps=1e-5)
    norm, stock = rms_norm(config, 48).to(weight_dtype or dtype), LlamaRMSNorm(48, eps=1e-5).to(weight_dtype or dtype)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, generator=generator)
    for module in (norm, stock):
        module.weight.data.copy_(weight)
    states = torch.randn(2, 5, heads, 48, generator=generator) * torch.logspace(-8, 4, 5).view(5, 1, 1)
    states = states.to(dtype).transpose(1, 2)
    states[0, 0, 0] = 0
    before, expected = states.clone(), stock(states)
    with torch.no_grad():
        found = norm(states)
    assert found.dtype == expected.dtype and torch.equal(found, expected)
    assert torch.equal(norm(states), expected)
    assert torch.equal(states, before)


def test_a_penalty_on_gradients_can_be_trained():
    model = tiny_gated(gate_scale=2.0, attn_implementation="eager").train()
    loss = model(tiny_input_ids(), labels=tiny_input_ids(), use_cache=False).loss
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    sum(gradient.square().sum() for gradient in gradients).backward()
    assert model.model.layers[0].self_attn.g_proj.weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    "fields",
    [
        {"gate_positions": ["value"], "gate_input": "none"},
        {"gate_positions": ["key", "query"], "gate_activation": "softplus"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.4}},
        {"gate_positions": ["key"], "no_rope_layers": [0, 0, 0]},
    ],
    ids=str,
)
def test_gates_leave_the_formats_of_autocast_alone(fields):
    seen = []

    def recording(module, query, key, value, *arguments, **options):
        seen.append((query.dtype, key.dtype, value.dtype))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, *arguments, **options)

    AttentionInterface.register("recording_formats", recording)
    AttentionMaskInterface.register("recording_formats", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    decoder = {key: value for key, value in fields.items() if not key.startswith("gate_")}
    for model in (tiny_gated(**fields), tiny_gated(**decoder, gate_positions=[])):
        expected = logits_of(model)
        model.set_attn_implementation("recording_formats")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = logits_of(model)
        # bfloat16 has 8 bits: 2 ** -8 of the largest logit, over three layers.
        assert (found.float() - expected).abs().max() < 0.05 * expected.abs().max()
    assert len(seen) == 6 and seen[:3] == seen[3:]


@pytest.mark.parametrize("scale", [2.0, 0.25, 0.7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scaled_sigmoid_equals_the_product(dtype, scale):
    config = GatedAttentionConfig(gate_scale=scale, gate_granularity="headwise")
    logits = torch.linspace(-9, 9, 24).to(dtype).view(2, 3, 4)
    fast, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    scores = gate_scores(config, fast, 4)
    expected = scale * torch.sigmoid(plain)
    assert torch.equal(scores[..., 0], expected)
    for result in (scores, expected):
        result.backward(torch.linspace(-1, 1, 24).to(dtype).view(result.shape))
    # Of a power of two the sigmoid comes back exactly; other scales take the product.
    torch.testing.assert_close(fast.grad, plain.grad, rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_scaled_sigmoid_keeps_one_tensor_for_the_backward_pass():
    config = GatedAttentionConfig(gate_scale=2.0)
    projection = nn.Linear(8, 8)
    kept = []

    def pack(tensor):
        kept.append(tensor.untyped_storage().data_ptr())
        return tensor

    states = torch.randn(1, 5, 2, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        scores = gate_scores(config, projection(torch.randn(1, 5, 8)), 2)
        product = states * scores
    own = {projection.weight.untyped_storage().data_ptr(), states.untyped_storage().data_ptr()}
    # The projection's input, and the scores: once for their own derivative and once for the product's.
    assert len(set(kept) - own) == 2
    product.sum().backward()
    assert projection.weight.grad.abs().max() > 0
