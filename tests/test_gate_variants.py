"""Every gate of the paper computes what its equation says, alone and together with what else a decoder layer can have."""

import pytest
import torch
from conftest import TINY_SHAPE, randomise, tiny_gated, tiny_input_ids
from naive_attention import PROJECTIONS, naive_gated_attention
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from gated_attention import GATE_VARIANTS, GatedAttentionConfig, GatedAttentionModel, inspect_model
from gated_attention.modeling_gated.gate import apply_gate, gate_scores


POSITIONS = list(PROJECTIONS)
LAYER = 1

COMBINATIONS = {
    "all_biases": {"gate_bias": True, "qk_bias": True, "v_bias": True, "o_bias": True},
    "scale": {"gate_scale": 2.0, "gate_granularity": "headwise"},
    "five_positions": {"gate_positions": POSITIONS},
    "qk_norm_and_gated_queries_and_keys": {"gate_positions": ["query", "key"], "qk_norm": True},
    "headwise_keys": {"gate_positions": ["key"], "gate_granularity": "headwise", "qk_norm": True},
    "headwise_queries": {"gate_positions": ["query"], "gate_granularity": "headwise"},
    "headwise_shared_by_heads": {"gate_granularity": "headwise", "gate_sharing": "head_shared"},
    "values_shared_by_heads": {"gate_positions": ["value"], "gate_sharing": "head_shared"},
    "input_independent_headwise": {"gate_input": "none", "gate_granularity": "headwise", "gate_scale": 2.0},
    "input_independent_dense_output": {"gate_input": "none", "gate_positions": ["dense_output"]},
    "additive_headwise_softplus": {
        "gate_operator": "add",
        "gate_granularity": "headwise",
        "gate_activation": "softplus",
    },
    "first_channels_only": {"gate_input_size": 5, "gate_bias": True},
    "this_layer_is_gated": {"gate_layers": [LAYER]},
    "other_layers_are_gated": {"gate_layers": [0, 2]},
    "norm_and_gate": {"sdpa_output_nonlinearity": "rms_norm", "gate_positions": ["sdpa_output", "value"]},
    "silu_and_gate": {"sdpa_output_nonlinearity": "silu"},
    "sliding_window": {"sliding_window": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "no_rope": {"no_rope_layers": [1, 0, 1], "gate_positions": ["query", "sdpa_output"]},
    "partial_rotary": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.4}},
    "attention_multiplier": {"attention_multiplier": 0.7, "gate_positions": ["key", "query"]},
}
CASES = {name: variant.fields for name, variant in GATE_VARIANTS.items()} | COMBINATIONS


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_layer_equals_naive_reference(fields):
    config = GatedAttentionConfig(**{**TINY_SHAPE, "rms_norm_eps": 1e-3, **fields}, attn_implementation="eager")
    model = randomise(GatedAttentionModel(config)).double()
    attention = model.layers[LAYER].self_attn
    length = 7
    hidden = torch.randn(1, length, config.hidden_size, generator=torch.Generator().manual_seed(3)).double()
    positions = torch.arange(length)[None]
    cos, sin = model.rotary_emb(hidden, positions)
    make_mask = create_sliding_window_causal_mask if attention.sliding_window else create_causal_mask
    mask = make_mask(config, hidden, None, cache=None, position_ids=positions)
    with torch.no_grad():
        output = attention(hidden, position_embeddings=(cos, sin), attention_mask=mask)[0]
        expected = naive_gated_attention(attention, hidden[0], cos[0], sin[0])
    # Softmax and norms of transformers run in float32 whatever the model's format, hence not float64's own precision.
    torch.testing.assert_close(output[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_output_gate_scores_has_an_entry_for_each_layer(fields):
    model = tiny_gated(**fields)
    config = model.config
    with torch.no_grad():
        scores = model(tiny_input_ids(2, 5), output_gate_scores=True).gate_scores
    assert len(scores) == config.num_hidden_layers
    for layer_idx, of_layer in enumerate(scores):
        gated = config.gate_layers is None or layer_idx in config.gate_layers
        positions = config.gate_positions if gated else []
        of_layer = (of_layer,) if isinstance(of_layer, torch.Tensor) else of_layer
        assert len(of_layer) == len(positions)
        for position, tensor in zip(positions, of_layer, strict=True):
            heads = {"value": 2, "key": 2, "dense_output": 1}.get(position, 4)
            heads = 1 if config.gate_sharing == "head_shared" else heads
            channels = config.hidden_size if position == "dense_output" else config.head_dim
            channels = 1 if config.gate_granularity == "headwise" else channels
            tokens = (1, 1) if config.gate_input == "none" else (2, 5)
            assert tensor.shape == (*tokens, heads, channels)


def test_output_gate_scores_are_what_the_attention_output_is_multiplied_by():
    model = tiny_gated(gate_granularity="headwise", gate_scale=2.0)
    inputs = {}
    attention = model.model.layers[1].self_attn
    attention.g_proj.register_forward_hook(lambda module, args, output: inputs.update(logits=output))
    with torch.no_grad():
        outputs = model(tiny_input_ids(), output_gate_scores=True, output_hidden_states=True)
    expected = 2 / (1 + torch.exp(-inputs["logits"]))
    torch.testing.assert_close(outputs.gate_scores[1][..., 0], expected, rtol=1e-6, atol=1e-6)
    assert model(tiny_input_ids()).gate_scores is None
    assert len(outputs.hidden_states) == model.config.num_hidden_layers + 1


def test_unknown_variant_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"g1_headwise.*got 'g7'"):
        GatedAttentionConfig.from_variant("g7")


def test_from_variant_takes_further_fields_and_overrides():
    config = GatedAttentionConfig.from_variant("alphafold2", gate_initial_bias=2.0, num_hidden_layers=3)
    assert (config.gate_bias, config.gate_initial_bias, config.num_hidden_layers) == (True, 2.0, 3)


def test_alphafold2_gates_start_at_sigmoid_of_1_whatever_the_input():
    config = GatedAttentionConfig.from_variant("alphafold2", **TINY_SHAPE)
    scores = GatedAttentionModel(config)(tiny_input_ids(), output_gate_scores=True).gate_scores
    for of_layer in scores:
        torch.testing.assert_close(of_layer, torch.full_like(of_layer, 0.7310585786300049))


def test_new_gates_are_initialised_like_every_linear_layer_and_as_the_config_says():
    shape = {**TINY_SHAPE, "hidden_size": 64, "initializer_range": 0.05}
    projection = GatedAttentionModel(GatedAttentionConfig(**shape)).layers[0].self_attn.g_proj
    assert 0.04 < projection.weight.std() < 0.06
    config = GatedAttentionConfig(**shape, gate_initializer_range=0.5, gate_bias=True)
    projection = GatedAttentionModel(config).layers[0].self_attn.g_proj
    assert 0.4 < projection.weight.std() < 0.6
    assert not projection.bias.any()
    parameter = GatedAttentionModel(GatedAttentionConfig(**shape, gate_input="none")).layers[0].self_attn.g_proj.bias
    assert not parameter.any()


@pytest.mark.parametrize("fields", [{}, {"gate_positions": POSITIONS}, {"gate_input": "none"}], ids=str)
def test_baseline_has_the_same_parameters_but_the_gates(fields):
    names = {name for name, _ in tiny_gated(**fields).named_parameters()}
    baseline = {name for name, _ in tiny_gated(gate_positions=[]).named_parameters()}
    gates = {name for name in names if any(part in PROJECTIONS.values() for part in name.split("."))}
    assert gates and names - gates == baseline


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_zero_logits_with_scale_2_are_exactly_one_at_any_magnitude(dtype):
    info = torch.finfo(dtype)
    values = torch.tensor([info.max, -info.max, info.smallest_normal, info.smallest_normal * 2**-5, 0.1, -3.0, 0.0])
    states = values.to(dtype).view(1, 1, 1, -1)
    config = GatedAttentionConfig(gate_granularity="headwise", gate_scale=2.0)
    assert torch.equal(apply_gate(states, gate_scores(config, torch.zeros(1, 1, 1, dtype=dtype), 1)), states)


@pytest.mark.parametrize(
    "variant", ["g1_headwise", "g1_head_shared", "g1_input_independent", "g1_ns_sigmoid", "g1_additive_silu", "laguna"]
)
def test_inspection_shows_the_scores_that_the_model_returns(variant):
    model = tiny_gated(**GATE_VARIANTS[variant].fields, gate_scale=2.0)
    input_ids = tiny_input_ids(2, 12)
    inspection = inspect_model(model, [{"input_ids": input_ids}], ranks=False)
    with torch.no_grad():
        scores = model(input_ids, output_gate_scores=True).gate_scores
    for layer, of_layer in zip(inspection.layers, scores, strict=True):
        expected = of_layer.expand(2, 12, 4, -1).mean((0, 1, 3))
        torch.testing.assert_close(torch.tensor(layer.gate.mean), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", ["baseline", "g2_elementwise", "g5_elementwise"])
def test_inspection_of_a_model_without_output_gate_shows_none(variant):
    model = tiny_gated(**GATE_VARIANTS[variant].fields)
    inspection = inspect_model(model, [{"input_ids": tiny_input_ids(2, 12)}], ranks=False)
    assert all(layer.gate is None for layer in inspection.layers)
