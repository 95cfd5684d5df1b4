"""Simulated W8A8 equals the formula written out in loops, covers what it says, and leaves the model as it was."""

import math

import pytest
import torch
from conftest import TINY_SHAPE, logits_of, tiny_gated, tiny_input_ids, tiny_llama
from test_diagnostics_maps import FAMILIES, MOE, from_config
from transformers import GPT2Config, GPT2LMHeadModel

from gated_attention.diagnostics import InspectionError, layer_costs, low_bit_perplexity
from gated_attention.diagnostics.low_bit import SCHEMES, linear_layers, low_bit_linears, torchao_perplexity
from gated_attention.diagnostics.low_bit_layers import input_ranges, projection_of


WINDOWS = [tiny_input_ids(1, 24, seed) for seed in (1, 2)]
MODELS = {
    "llama": tiny_llama,
    "gated": tiny_gated,
    "phi3_fused": lambda: from_config("phi3", pad_token_id=0, head_dim=8),
    "biases": lambda: tiny_llama(attention_bias=True, mlp_bias=True),
}


def naive_linear(x: torch.Tensor, weight: torch.Tensor, bias, scheme: str) -> torch.Tensor:
    """One output number after the other: round, multiply integers, scale; `x` is `(length, in_features)`."""
    length = len(x)
    scales = [float(x.abs().max()) / 127] * length
    if scheme == "per_token":
        scales = [float(token.abs().max()) / 127 or 1.0 for token in x]
    if scheme == "first_token_kept":
        scales = [None] + [float(x[1:].abs().max()) / 127] * (length - 1)
    output = torch.zeros(length, len(weight))
    for row, weights in enumerate(weight):
        weight_scale = float(weights.abs().max()) / 127
        integers = [round(float(w) / weight_scale) for w in weights]
        for token in range(length):
            if scales[token] is None:
                total = sum(float(value) * integer for value, integer in zip(x[token], integers, strict=True))
            else:
                inputs = [max(-127, min(127, round(float(value) / scales[token]))) for value in x[token]]
                total = sum(a * b for a, b in zip(inputs, integers, strict=True)) * scales[token]
            output[token, row] = total * weight_scale + (0 if bias is None else float(bias[row]))
    return output


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_linear_equals_the_formula(scheme, bias):
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(6, 5, bias=bias), torch.randn(7, 6)
    x[0] *= 50
    x[3] = 0
    with torch.no_grad():
        linear.weight[2] = 0
        linear.weight[2, 1] = 1e-3
        expected = naive_linear(x, linear.weight, linear.bias, scheme)
        exact = linear(x)
        with low_bit_linears({"linear": linear}, scheme):
            torch.testing.assert_close(linear(x), expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(linear(x[None])[0], expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(linear(x), exact)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("model", MODELS)
def test_perplexity_equals_hooks_that_round(model, scheme):
    """
    Inputs through pre-hooks, weights written over in a model of its own: another way to the same figure. In float64, where
    no number lies so near to a half that the other way rounds it elsewhere.
    """
    found = low_bit_perplexity(MODELS[model]().double(), WINDOWS, scheme)
    other = MODELS[model]().double()

    def rounded_to(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (values / scale).round().clamp(-127, 127) * scale

    def round_input(module, inputs):
        (x,) = inputs
        if scheme == "per_token":
            return rounded_to(x, x.abs().amax(-1, keepdim=True) / 127)
        if scheme == "first_token_kept":
            return torch.cat([x[:, :1], rounded_to(x[:, 1:], x[:, 1:].abs().amax() / 127)], dim=1)
        return rounded_to(x, x.abs().amax() / 127)

    for linear in linear_layers(other).values():
        linear.weight.data = rounded_to(linear.weight.data, linear.weight.data.abs().amax(-1, keepdim=True) / 127)
        linear.register_forward_pre_hook(round_input)
    with torch.no_grad():
        losses = [other(window, labels=window, use_cache=False).loss.double() for window in WINDOWS]
    assert found.perplexity == pytest.approx(torch.stack(losses).mean().exp().item(), rel=1e-5)
    assert (found.tokens, found.coverage, found.not_covered) == (48, 1.0, ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_model_is_given_back_as_it_was(dtype):
    model = tiny_gated().to(dtype).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    logits = logits_of(model)
    for scheme in (None, *SCHEMES):
        low_bit_perplexity(model, WINDOWS, scheme, lm_head=True)
    layer_costs(model, WINDOWS)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(logits_of(model), logits)
    assert model.training
    assert not [m for m in model.modules() if "forward" in vars(m) or m._forward_pre_hooks or m._forward_hooks]


def test_model_is_given_back_when_interrupted():
    model = tiny_llama()
    logits = logits_of(model)

    def windows():
        yield WINDOWS[0]
        raise KeyboardInterrupt

    linears = linear_layers(model)
    kept = linears["model.layers.0.self_attn.q_proj"]
    kept.forward = own = kept.forward  # as accelerate puts one there
    with pytest.raises(KeyboardInterrupt), low_bit_linears(linears, "per_tensor"):
        for window in windows():
            model(window)
    assert torch.equal(logits_of(model), logits)
    assert kept.forward is own


def test_what_is_rounded():
    model = tiny_gated()
    everything = low_bit_perplexity(model, WINDOWS)
    assert everything.linears == 8 * 3
    assert low_bit_perplexity(model, WINDOWS, lm_head=True).linears == 8 * 3 + 1
    some = low_bit_perplexity(model, WINDOWS, only=lambda name: "layers.1." in name)
    assert some.linears == 8
    assert (some.coverage, some.not_covered) == (pytest.approx(1 / 3), ())
    nothing = low_bit_perplexity(model, WINDOWS, only=lambda name: False)
    plain = low_bit_perplexity(model, WINDOWS, None)
    assert nothing.perplexity == plain.perplexity
    assert len({everything.perplexity, some.perplexity, plain.perplexity}) == 3
    with torch.no_grad():
        losses = [model(window, labels=window).loss.double() for window in WINDOWS]
    assert plain.perplexity == pytest.approx(torch.stack(losses).mean().exp().item(), rel=1e-5)


def test_stacked_experts_are_said_not_to_be_rounded():
    model = from_config("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    result = low_bit_perplexity(model, WINDOWS)
    assert result.not_covered == ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight")
    layers = list(model.model.layers[0].self_attn.named_parameters())
    attention = sum(parameter.numel() for _, parameter in layers if parameter.ndim == 2)
    experts = 4 * 3 * 16 * TINY_SHAPE["hidden_size"] + 4 * TINY_SHAPE["hidden_size"]
    assert result.coverage == pytest.approx(attention / (attention + experts))


def test_what_cannot_be_rounded():
    with pytest.raises(
        InspectionError, match="`scheme` must be one of per_tensor, first_token_kept, per_token, got 'x'"
    ):
        low_bit_perplexity(tiny_llama(), WINDOWS, "x")
    without = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4))
    with pytest.raises(InspectionError, match="no linear layer"):
        low_bit_perplexity(without, WINDOWS)


def test_ranges_equal_plain_loops():
    model = tiny_llama()
    seen = {}
    for name, linear in linear_layers(model).items():
        linear.register_forward_pre_hook(
            lambda module, inputs, name=name: seen.setdefault(name, []).append(inputs[0][0])
        )
    for window in WINDOWS:
        logits_of(model, window)
    kept = {name: list(tensors) for name, tensors in seen.items()}
    for entry in input_ranges(model, WINDOWS):
        largest, typical, bits, places = [], [], [], []
        for x in kept[entry.name]:
            by_token = [max(abs(float(value)) for value in token) for token in x]
            largest.append(max(by_token))
            typical.append(sorted(by_token)[(len(by_token) - 1) // 2])
            bits.append(math.log2(largest[-1] / typical[-1]))
            places.append(by_token.index(max(by_token)))
        assert entry.largest == pytest.approx(sum(largest) / 2)
        assert entry.typical == pytest.approx(sum(typical) / 2)
        assert entry.bits_lost == pytest.approx(sum(bits) / 2, rel=1e-5)
        assert entry.first_token_share == places.count(0) / 2
        assert entry.position == places[largest.index(max(largest))]
        assert entry.name == f"model.layers.{entry.layer_idx}.{entry.projection}"


def test_layers_that_cost_most_are_found():
    """A first token that is huge in one layer's down_proj costs there and in that projection, and its range says why."""
    model = tiny_llama()

    def blow_up(module, inputs):
        x = inputs[0].clone()
        x[:, 0] *= 1e4
        return (x,)

    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(blow_up)
    costs = layer_costs(model, WINDOWS)
    distance = {unit: abs(value - costs.perplexity) for unit, value in {**costs.layers, **costs.projections}.items()}
    assert list(costs.layers) == [0, 1, 2]
    assert max(costs.layers, key=distance.get) == 1
    assert max(costs.projections, key=distance.get) == "mlp.down_proj"
    worst = max(costs.ranges, key=lambda entry: entry.bits_lost)
    assert (worst.layer_idx, worst.projection, worst.first_token_share) == (1, "mlp.down_proj", 1.0)
    alone = low_bit_perplexity(model, WINDOWS, only=lambda name: "layers.1." in name)
    assert costs.layers[1] == alone.perplexity
    assert layer_costs(model, WINDOWS, only=lambda name: "down_proj" not in name).projections.keys() == {
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "projection"),
    [
        ("model.layers.3.mlp.down_proj", "mlp.down_proj"),
        ("transformer.h.0.mlp.experts.12.w1", "mlp.experts.*.w1"),
    ],
)
def test_names_of_projections(name, projection):
    assert projection_of(name) == projection


@pytest.mark.parametrize("family", ["gemma2_softcap", "gpt_oss_learned_sinks", "mixtral"])
def test_other_families(family):
    model = from_config("mixtral", **MOE) if family == "mixtral" else FAMILIES[family]()
    result = low_bit_perplexity(model, WINDOWS, "per_token")
    assert 1 < result.perplexity < math.inf


def test_torchao_is_missed_by_name(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchao", None)
    with pytest.raises(InspectionError, match="pip install torchao"):
        torchao_perplexity(tiny_llama(), WINDOWS)


def test_torchao_works_on_a_copy():
    pytest.importorskip("torchao")
    model = tiny_llama()
    logits = logits_of(model)
    found = torchao_perplexity(model, WINDOWS)
    assert torch.equal(logits_of(model), logits)
    rounded = low_bit_perplexity(model, WINDOWS, "per_token", lm_head=True)
    assert found.linears == rounded.linears
    assert found.perplexity == pytest.approx(rounded.perplexity, rel=0.02)
