"""Smoothing changes no logit, and takes outlier channels out of what linear layers read."""

import pytest
import torch
from conftest import logits_of, tiny_gated, tiny_input_ids, tiny_llama
from test_diagnostics_maps import from_config

from gated_attention.diagnostics import InspectionError, low_bit_perplexity, smooth_model


WINDOWS = [tiny_input_ids(1, 24, seed) for seed in (1, 2)]
MODELS = {
    "llama": tiny_llama,
    "llama_biases": lambda: tiny_llama(attention_bias=True, mlp_bias=True),
    "qwen2": lambda: from_config("qwen2", head_dim=8),
    "qwen3": lambda: from_config("qwen3", head_dim=8),
    "mistral": lambda: from_config("mistral", head_dim=8),
    "headwise": lambda: tiny_gated(gate_granularity="headwise", gate_bias=True, v_bias=True, o_bias=True),
    "elementwise": lambda: tiny_gated(gate_granularity="elementwise"),
    "gates_on_some_layers": lambda: tiny_gated(gate_layers=[0]),
    "qk_norm": lambda: tiny_gated(qk_norm=True),
}


@torch.no_grad()
def with_outliers(model):
    """A channel of every kind of input is far larger than the others, and what reads it smaller, as in trained models."""
    for layer in model.model.layers:
        layer.input_layernorm.weight[3] *= 64
        layer.post_attention_layernorm.weight[5] *= 64
        layer.self_attn.v_proj.weight[2] *= 64
        layer.mlp.up_proj.weight[7] *= 64
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            linear.weight[:, 3] /= 64
        layer.mlp.gate_proj.weight[:, 5] /= 64
        layer.mlp.up_proj.weight[:, 5] /= 64
        layer.mlp.down_proj.weight[:, 7] /= 64
    return model.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_stay_the_same(name, dtype):
    model = with_outliers(MODELS[name]()).to(dtype)
    before = logits_of(model, WINDOWS[0])
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    changed = smooth_model(model, WINDOWS)
    assert changed > 0
    assert any(not torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())
    assert torch.equal(logits_of(model, WINDOWS[0]), before)


@pytest.mark.parametrize("name", ["llama", "headwise", "elementwise", "qwen3"])
def test_eight_bits_cost_less(name):
    model = with_outliers(MODELS[name]())
    exact = logits_of(model, WINDOWS[0])

    def error() -> float:
        from gated_attention.diagnostics.low_bit import linear_layers, low_bit_linears

        with low_bit_linears(linear_layers(model), "per_tensor"):
            return (logits_of(model, WINDOWS[0]) - exact).square().mean().sqrt().item()

    before = error()
    smooth_model(model, WINDOWS)
    assert error() < 0.6 * before


def test_largest_inputs_become_alike():
    """With all of the range in the weights, the largest input of each channel is a power of two from the others'."""
    model, seen = with_outliers(tiny_llama()), {}

    def look():
        largest = []
        module = model.model.layers[0].mlp.down_proj
        hook = module.register_forward_pre_hook(lambda module, inputs: largest.append(inputs[0].abs().amax((0, 1))))
        for window in WINDOWS:
            logits_of(model, window)
        hook.remove()
        return torch.stack(largest).amax(0)

    seen["before"] = look()
    smooth_model(model, WINDOWS, strength=1.0)
    seen["after"] = look()
    assert (seen["before"].max() / seen["before"].median()) > 16
    assert (seen["after"].max() / seen["after"].min()) <= 2.0001


def test_numbers_that_would_leave_their_format_keep_their_channel():
    model = tiny_llama().to(torch.float16)
    mlp = model.model.layers[0].mlp
    with torch.no_grad():
        # Wants a factor below 1, which would make zeros of these.
        mlp.up_proj.weight[7] /= 4096
        mlp.down_proj.weight[:, 7] = 6e-8
    before = mlp.down_proj.weight.clone()
    smooth_model(model, WINDOWS, strength=1.0)
    assert torch.equal(mlp.down_proj.weight[:, 7], before[:, 7])
    assert not torch.equal(mlp.down_proj.weight, before)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tiny_gated(gate_positions=["value"]), "`gate_positions` other than sdpa_output"),
        (lambda: tiny_gated(gate_operator="add", gate_activation="silu"), "`gate_operator: add`"),
        (lambda: tiny_gated(gate_input_size=4), "`gate_input_size`"),
        (lambda: tiny_gated(zero_centered_norm=True), "`zero_centered_norm`"),
        (lambda: tiny_gated(sdpa_output_nonlinearity="silu", gate_positions=[]), "`sdpa_output_nonlinearity`"),
        (lambda: from_config("phi3", pad_token_id=0, head_dim=8), "it is made for gated_attention, llama"),
    ],
    ids=["value", "add", "input", "norm", "silu", "phi3"],
)
def test_other_functions_are_refused_and_left_alone(make, message):
    model = make()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(InspectionError, match=message):
        smooth_model(model, WINDOWS)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_bad_arguments():
    with pytest.raises(InspectionError, match="`strength` must lie between 0 and 1, got 2"):
        smooth_model(tiny_llama(), WINDOWS, strength=2)
    with pytest.raises(InspectionError, match="at least one window"):
        smooth_model(tiny_llama(), [])


def test_model_keeps_its_modes_and_hooks():
    model = tiny_llama().train()
    smooth_model(model, WINDOWS)
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert low_bit_perplexity(model, WINDOWS, None).perplexity > 0
