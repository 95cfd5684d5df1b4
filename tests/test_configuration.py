"""A config says what a model is: it round-trips, and refuses what has no meaning with the field, the rule and the value."""

import dataclasses

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from gated_attention import GatedAttentionConfig


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def test_defaults_are_the_gate_of_qwen3_next():
    config = GatedAttentionConfig()
    gate = (
        config.gate_positions,
        config.gate_granularity,
        config.gate_activation,
        config.gate_bias,
        config.gate_scale,
    )
    assert gate == (["sdpa_output"], "elementwise", "sigmoid", False, 1.0)


def test_round_trip_through_auto_config(tmp_path):
    config = GatedAttentionConfig(
        hidden_size=48, num_attention_heads=6, gate_granularity="headwise", gate_scale=2.0, v_bias=True
    )
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is GatedAttentionConfig
    assert {**loaded.to_dict(), "_name_or_path": ""} == config.to_dict()


def test_number_of_experts_by_its_other_name():
    config = GatedAttentionConfig(num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    assert (config.num_experts, config.num_local_experts, set(config.mlp_layer_types)) == (4, 4, {"sparse"})


def test_variants_are_not_changed_through_a_config():
    GatedAttentionConfig.from_variant("baseline").gate_positions.append("value")
    assert GatedAttentionConfig.from_variant("baseline").gate_positions == []


def test_derived_fields():
    config = GatedAttentionConfig(hidden_size=64, num_attention_heads=4)
    assert (config.num_key_value_heads, config.head_dim) == (4, 16)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"gate_granularity": "rowwise"}, ["gate_granularity", "rowwise", "headwise"]),
        ({"gate_positions": ["output"]}, ["gate_positions", "output", "sdpa_output"]),
        ({"gate_positions": [], "gate_granularity": "headwise"}, ["gate_granularity", "gate_positions", "headwise"]),
        ({"gate_positions": [], "gate_layers": [0]}, ["gate_layers", "gate_positions", "[0]"]),
        ({"gate_positions": ["dense_output"], "gate_granularity": "headwise"}, ["gate_granularity", "dense_output"]),
        ({"gate_positions": ["dense_output"], "gate_sharing": "head_shared"}, ["gate_sharing", "dense_output"]),
        ({"gate_input": "none", "gate_initializer_range": 0.0}, ["gate_initializer_range", "gate_input", "0.0"]),
        ({"attention_dropout": 1.5}, ["attention_dropout", "below 1", "1.5"]),
        ({"attention_dropout": -0.1}, ["attention_dropout", "0 or more", "-0.1"]),
        ({"rms_norm_eps": -1.0}, ["rms_norm_eps", "positive", "-1.0"]),
        ({"initializer_range": float("nan")}, ["initializer_range", "finite", "nan"]),
        ({"max_position_embeddings": 0}, ["max_position_embeddings", "at least 1", "0"]),
        ({"pad_token_id": 32000}, ["pad_token_id", "vocab_size", "32000"]),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, ["rope_theta", "positive", "'x'"]),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, ["rope_theta", "positive", "-1.0"]),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0}}, ["rope_theta", "1"]),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": "x"}}, ["factor", "positive", "'x'"]),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "short_factor": [1.0],
                    "long_factor": [1.0],
                }
            },
            ["short_factor", "64", "1"],
        ),
        ({"sdpa_output_nonlinearty": "silu"}, ["sdpa_output_nonlinearty", "sdpa_output_nonlinearity"]),
        ({"qk_nrom": True}, ["qk_nrom", "qk_norm"]),
        ({"gate_sharing": "shared"}, ["gate_sharing", "shared", "head_shared"]),
        ({"gate_operator": "divide"}, ["gate_operator", "divide", "multiply"]),
        ({"gate_input": "tokens"}, ["gate_input", "tokens", "hidden_states"]),
        ({"gate_input": "none", "gate_bias": True}, ["gate_bias", "gate_input", "True"]),
        ({"gate_input": "none", "gate_input_size": 4}, ["gate_input_size", "gate_input", "4"]),
        ({"gate_input": "none", "gate_initializer_range": 0.1}, ["gate_initializer_range", "gate_input", "0.1"]),
        ({"gate_input_size": 0}, ["gate_input_size", "hidden_size", "0"]),
        ({"gate_input_size": 4096}, ["gate_input_size", "2048", "4096"]),
        ({"gate_input_size": 4.0}, ["gate_input_size", "4.0"]),
        ({"gate_layers": []}, ["gate_layers", "[]", "gate_positions"]),
        ({"gate_layers": [3, 1]}, ["gate_layers", "ascending", "[3, 1]"]),
        ({"gate_layers": [1, 1]}, ["gate_layers", "twice", "[1, 1]"]),
        ({"gate_layers": [28]}, ["gate_layers", "27", "[28]"]),
        ({"gate_layers": [-1]}, ["gate_layers", "0", "[-1]"]),
        ({"gate_layers": 3}, ["gate_layers", "3"]),
        ({"gate_initializer_range": -0.1}, ["gate_initializer_range", "-0.1"]),
        ({"gate_initial_bias": 1.0}, ["gate_initial_bias", "gate_bias", "1.0"]),
        ({"gate_initial_bias": float("nan"), "gate_bias": True}, ["gate_initial_bias", "finite", "nan"]),
        ({"sdpa_output_nonlinearity": "gelu"}, ["sdpa_output_nonlinearity", "gelu", "rms_norm"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "28", "1"]),
        ({"layer_types": ["linear_attention"] * 28}, ["layer_types", "linear_attention", "sliding_attention"]),
        ({"layer_types": ["sliding_attention"] * 28}, ["sliding_window", "layer_types", "None"]),
        ({"sliding_window": 0}, ["sliding_window", "0"]),
        ({"no_rope_layers": [1]}, ["no_rope_layers", "28", "1"]),
        ({"no_rope_layers": [2] * 28}, ["no_rope_layers", "RoPE", "2"]),
        ({"residual_multiplier": 0.0}, ["residual_multiplier", "positive", "0.0"]),
        ({"logits_scaling": float("inf")}, ["logits_scaling", "finite", "inf"]),
        ({"attention_multiplier": "small"}, ["attention_multiplier", "small"]),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.5}},
            ["partial_rotary_factor", "1.5"],
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
            ["rope_parameters", "same for all layers"],
        ),
        ({"gate_positions": ["sdpa_output", "sdpa_output"]}, ["gate_positions", "twice"]),
        ({"gate_activation": "tanh"}, ["gate_activation", "tanh", "sigmoid"]),
        ({"gate_scale": 0.0}, ["gate_scale", "positive", "0.0"]),
        ({"gate_scale": float("inf")}, ["gate_scale", "finite", "inf"]),
        ({"gate_bias": "yes"}, ["gate_bias", "yes"]),
        ({"num_attention_heads": 6, "num_key_value_heads": 4, "head_dim": 8}, ["num_key_value_heads", "divide", "4"]),
        ({"head_dim": 7}, ["head_dim", "even", "7"]),
        ({"hidden_size": 30, "num_attention_heads": 4}, ["head_dim", "30", "4"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"hidden_act": "nosuch"}, ["hidden_act", "nosuch"]),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}, ["rope_type", "spiral", "yarn"]),
        ({"hidden_size": "big"}, ["hidden_size", "big"]),
        ({"gate_granularty": "headwise"}, ["gate_granularty", "gate_granularity"]),
        ({"num_experts": -1}, ["num_experts", "0", "-1"]),
        ({"num_experts": 4}, ["num_experts_per_tok", "num_experts", "None"]),
        ({"num_experts": 4, "num_experts_per_tok": 2}, ["moe_intermediate_size", "num_experts", "None"]),
        ({**EXPERTS, "num_experts_per_tok": 5}, ["num_experts_per_tok", "num_experts", "4", "5"]),
        ({**EXPERTS, "num_experts_per_tok": 0}, ["num_experts_per_tok", "at least 1", "0"]),
        ({**EXPERTS, "moe_intermediate_size": 0}, ["moe_intermediate_size", "at least 1", "0"]),
        ({**EXPERTS, "mlp_layer_types": ["sparse"]}, ["mlp_layer_types", "28", "1"]),
        ({**EXPERTS, "mlp_layer_types": ["dense"] * 28}, ["num_experts", "mlp_layer_types", "4"]),
        ({"mlp_layer_types": ["sparse"] * 28}, ["mlp_layer_types", "num_experts", "sparse"]),
        ({"mlp_layer_types": ["moe"] * 28}, ["mlp_layer_types", "moe", "sparse"]),
        ({"num_experts_per_tok": 2}, ["num_experts_per_tok", "num_experts", "2"]),
        ({"norm_topk_prob": True}, ["norm_topk_prob", "num_experts", "True"]),
        ({"output_router_logits": True}, ["output_router_logits", "num_experts", "True"]),
        ({**EXPERTS, "shared_expert_gate": True}, ["shared_expert_gate", "shared_expert_intermediate_size", "True"]),
        ({**EXPERTS, "shared_expert_intermediate_size": 0}, ["shared_expert_intermediate_size", "at least 1", "0"]),
        ({**EXPERTS, "mlp_bias": True}, ["mlp_bias", "sparse", "True"]),
        ({**EXPERTS, "router_aux_loss_coef": -0.1}, ["router_aux_loss_coef", "0 or more", "-0.1"]),
        ({**EXPERTS, "router_z_loss_coef": float("inf")}, ["router_z_loss_coef", "finite", "inf"]),
        ({**EXPERTS, "router_logits_dtype": "float64"}, ["router_logits_dtype", "float64", "float32"]),
        ({**EXPERTS, "router_aux_los_coef": 0.1}, ["router_aux_los_coef", "router_aux_loss_coef"]),
        ({"num_experts": 4, "num_local_experts": 6}, ["num_experts", "num_local_experts", "4", "6"]),
        ({**EXPERTS, "mlp_only_layers": [0]}, ["mlp_only_layers", "mlp_layer_types"]),
        ({**EXPERTS, "n_shared_experts": 1}, ["n_shared_experts", "shared_expert_intermediate_size"]),
        ({"forget_gates": True}, ["forget_gates", "forget_gate"]),
        ({"attention_bias": True}, ["attention_bias", "qk_bias", "v_bias", "o_bias"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_refusals_name_field_rule_and_value(fields, named):
    with pytest.raises((StrictDataclassError, TypeError, ValueError)) as error:
        GatedAttentionConfig(**fields)
    for word in named:
        assert word in str(error.value)


OWN_FIELDS = [
    field.name
    for field in dataclasses.fields(GatedAttentionConfig)
    if field.name in GatedAttentionConfig.__annotations__
]


@pytest.mark.parametrize("name", OWN_FIELDS)
def test_wrong_type_in_any_field_is_refused_with_its_name(name):
    with pytest.raises((StrictDataclassError, TypeError, ValueError), match=name):
        GatedAttentionConfig(**{name: {1, 2}})


def test_dense_models_have_no_factor_on_a_loss_of_experts():
    """TRL takes another value for a sign of experts; dense checkpoints of before have one in their config.json."""
    assert GatedAttentionConfig().router_aux_loss_coef == 0.0
    assert GatedAttentionConfig(**{"router_aux_loss_coef": 0.001}).router_aux_loss_coef == 0.0
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    assert GatedAttentionConfig(**experts).router_aux_loss_coef == 0.001
