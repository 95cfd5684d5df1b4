"""Model families whose checkpoints can be converted, as data."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Family:
    """
    How a family's checkpoints relate to [`GatedAttentionConfig`] and its tensor names.

    Attributes:
        model_type: The `model_type` of the source's config.
        architecture: The class that the source's config names.
        config_fields: For each field of `GatedAttentionConfig` that is read from the source: the source's name for it.
        fixed_fields: Fields that the family does not have a switch for, with their value.
        config_defaults: Value of a field of the source that its config may lack.
        has_stock_class: Whether transformers has a class that computes what the checkpoint means.
        gates: Where the family's own gates are. `None`: it has none, and gets some. `"q_proj_per_head"`, `"q_proj_per_group"`: in
            `q_proj`, behind the rows of each query head, or of each group that shares a key head. `"g_proj"`: apart.
        renames: Parts of tensor names, and what takes their place in order.
        experts: Whether the config's fields of a mixture of experts are those of Qwen.
        refused_fields: Fields of the source with the one value that can be read.
        ignored: Beginnings of names of tensors that the stock class passes over.
    """

    model_type: str
    architecture: str
    config_fields: dict[str, str]
    fixed_fields: dict[str, object] = field(default_factory=dict)
    config_defaults: dict[str, object] = field(default_factory=dict)
    has_stock_class: bool = True
    gates: Literal["q_proj_per_head", "q_proj_per_group", "g_proj"] | None = None
    renames: tuple[tuple[str, str], ...] = ()
    experts: bool = False
    refused_fields: dict[str, object] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


def _same_name(*names: str) -> dict[str, str]:
    return {name: name for name in names}


_COMMON_FIELDS = _same_name(
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "rope_parameters",
    "attention_dropout",
)


def _without(fields: dict[str, str], *names: str) -> dict[str, str]:
    return {ours: theirs for ours, theirs in fields.items() if ours not in names}


# One switch for all four projections, `o_proj` included.
_ONE_BIAS_SWITCH = {"qk_bias": "attention_bias", "v_bias": "attention_bias", "o_bias": "attention_bias"}

# Of Qwen3-Next and its successors: the gate's rows lie in `q_proj`, so its bias does too.
_NEXT_FIELDS = _COMMON_FIELDS | _ONE_BIAS_SWITCH | {"gate_bias": "attention_bias"}
_NEXT_FIXED = {"qk_norm": True, "zero_centered_norm": True, "gate_granularity": "elementwise"}

# Saved from a model with images, the language model's names have one part more.
_LANGUAGE_MODEL = (("model.language_model.", "model."),)

FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            model_type="llama",
            architecture="LlamaForCausalLM",
            config_fields=_COMMON_FIELDS | _ONE_BIAS_SWITCH | _same_name("mlp_bias"),
        ),
        Family(model_type="mistral", architecture="MistralForCausalLM", config_fields=_COMMON_FIELDS),
        Family(
            model_type="qwen3",
            architecture="Qwen3ForCausalLM",
            config_fields=_COMMON_FIELDS | _ONE_BIAS_SWITCH,
            fixed_fields={"qk_norm": True},
        ),
        Family(
            model_type="qwen3_next",
            architecture="Qwen3NextForCausalLM",
            config_fields=_NEXT_FIELDS,
            fixed_fields=_NEXT_FIXED,
            gates="q_proj_per_head",
            experts=True,
            ignored=("mtp.",),
        ),
        Family(
            model_type="qwen3_5_text",
            architecture="Qwen3_5ForCausalLM",
            config_fields=_NEXT_FIELDS,
            fixed_fields=_NEXT_FIXED,
            gates="q_proj_per_head",
            renames=_LANGUAGE_MODEL,
            ignored=("mtp.", "model.visual."),
        ),
        Family(
            model_type="qwen3_5_moe_text",
            architecture="Qwen3_5MoeForCausalLM",
            config_fields=_without(_NEXT_FIELDS, "intermediate_size"),
            fixed_fields=_NEXT_FIXED | {"norm_topk_prob": True},
            gates="q_proj_per_head",
            renames=_LANGUAGE_MODEL,
            experts=True,
            ignored=("mtp.", "model.visual."),
        ),
        Family(
            model_type="lfm3",
            architecture="Lfm3ForCausalLM",
            config_fields=_without(_COMMON_FIELDS, "hidden_act") | _ONE_BIAS_SWITCH,
            fixed_fields={"qk_norm": True, "gate_granularity": "headwise", "hidden_act": "silu"},
            gates="g_proj",
            renames=(
                (".self_attn.gate_proj.", ".self_attn.g_proj."),
                (".operator_norm.", ".input_layernorm."),
                (".ffn_norm.", ".post_attention_layernorm."),
                (".feed_forward.w1.", ".mlp.gate_proj."),
                (".feed_forward.w3.", ".mlp.up_proj."),
                (".feed_forward.w2.", ".mlp.down_proj."),
                ("model.embedding_norm.", "model.norm."),
            ),
            refused_fields={"use_sandwich_norm": False, "use_attention_gate": True},
        ),
    )
}

# The paper's own code (github.com/qiuzh20/gated_attention) calls its models Qwen3. Its one bias switch stands for the four
# projections and for the gates, whose rows lie in `q_proj`.
_REFERENCE_FIELDS = _COMMON_FIELDS | {
    "qk_bias": "qkv_bias",
    "v_bias": "qkv_bias",
    "o_bias": "qkv_bias",
    "qk_norm": "use_qk_norm",
}
_REFERENCE_DEFAULTS = {"qkv_bias": False, "use_qk_norm": True}
GATE_FLAGS = {"headwise_attn_output_gate": "headwise", "elementwise_attn_output_gate": "elementwise"}

REFERENCE_WITHOUT_GATES = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    config_fields=_REFERENCE_FIELDS,
    config_defaults=_REFERENCE_DEFAULTS,
    has_stock_class=False,
)
REFERENCE = {
    granularity: Family(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        config_fields=_REFERENCE_FIELDS | {"gate_bias": "qkv_bias"},
        fixed_fields={"gate_granularity": granularity},
        config_defaults=_REFERENCE_DEFAULTS,
        has_stock_class=False,
        gates="q_proj_per_group",
    )
    for granularity in GATE_FLAGS.values()
}


def family_for(config: dict) -> Family | None:
    """The family of a checkpoint with this config.json, if there is one. Of two gate flags the first that is set counts."""
    model_type = config.get("model_type")
    if model_type == "qwen3":
        for flag, granularity in GATE_FLAGS.items():
            if config.get(flag):
                return REFERENCE[granularity]
        differs = any(config.get(name, default) != default for name, default in _REFERENCE_DEFAULTS.items())
        if differs:
            return REFERENCE_WITHOUT_GATES
    return FAMILIES.get(model_type)
