"""Model families whose checkpoints can be converted, as data."""

from dataclasses import dataclass, field
from textwrap import wrap
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
        aliases: As `renames`, of names that a checkpoint may have, and does not have where transformers saves it.
        stacks_experts: Whether all experts of a layer are one tensor where transformers saves them.
        fused: Projections of the source that are several of ours, one behind the other.
        windows: Where `sliding_window` counts: in `"every_layer"`, or in those that `layer_types` names.
        expert_fields: As `config_fields`, for sources with experts.
        names_dense_layers: Whether `mlp_only_layers` and `decoder_sparse_step` say which layers have no experts.
        dropped_in_training: Fields of the source that only training has a use for; said if they are set.
        tolerance: Why a converted checkpoint computes its source's logits to rounding only, where it does.
        compared_in: The format in which source and result compute the same bits; by default the checkpoint's own.
        refused_fields: Fields of the source with the one value that can be read.
        ignored: Beginnings of names of tensors that the stock class passes over.
        turns_a_part: Whether the stock class can turn a part of a head's channels and leave the others as they are.
    """

    model_type: str
    architecture: str
    config_fields: dict[str, str]
    fixed_fields: dict[str, object] = field(default_factory=dict)
    config_defaults: dict[str, object] = field(default_factory=dict)
    has_stock_class: bool = True
    gates: Literal["q_proj_per_head", "q_proj_per_group", "g_proj"] | None = None
    renames: tuple[tuple[str, str], ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    stacks_experts: bool = False
    fused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    windows: Literal["every_layer", "layer_types"] = "layer_types"
    expert_fields: dict[str, str] = field(default_factory=dict)
    names_dense_layers: bool = False
    dropped_in_training: tuple[str, ...] = ()
    tolerance: str | None = None
    compared_in: Literal["float32"] | None = None
    refused_fields: dict[str, object] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    turns_a_part: bool = False

    @property
    def gates_in_q_proj(self) -> bool:
        """Whether the gates' rows lie in `q_proj`, beside the queries'."""
        return self.gates in ("q_proj_per_head", "q_proj_per_group")

    @property
    def takes_projections_apart(self) -> bool:
        """Whether a projection of the source becomes several of ours."""
        return bool(self.fused) or self.gates_in_q_proj


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

_EXPERT_FIELDS = _same_name(
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "output_router_logits", "router_aux_loss_coef"
)
_SHARED_EXPERT = {"shared_expert_intermediate_size": "shared_expert_intermediate_size"}
_TOPK = {"norm_topk_prob": "norm_topk_prob"}

_GATES_SPLIT = "queries and gates are two matrix products where there was one, which may round otherwise"

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
        Family(
            model_type="mistral",
            architecture="MistralForCausalLM",
            config_fields=_COMMON_FIELDS,
            windows="every_layer",
        ),
        Family(
            model_type="qwen2",
            architecture="Qwen2ForCausalLM",
            config_fields=_COMMON_FIELDS,
            config_defaults={"head_dim": None},
            fixed_fields={"qk_bias": True, "v_bias": True},
        ),
        Family(
            model_type="qwen3",
            architecture="Qwen3ForCausalLM",
            config_fields=_COMMON_FIELDS | _ONE_BIAS_SWITCH,
            fixed_fields={"qk_norm": True},
        ),
        Family(
            model_type="smollm3",
            architecture="SmolLM3ForCausalLM",
            config_fields=_COMMON_FIELDS | _ONE_BIAS_SWITCH | _same_name("mlp_bias", "no_rope_layers"),
            config_defaults={"head_dim": None},
        ),
        Family(
            model_type="granite",
            architecture="GraniteForCausalLM",
            config_fields=_COMMON_FIELDS
            | _ONE_BIAS_SWITCH
            | _same_name(
                "mlp_bias",
                "embedding_multiplier",
                "residual_multiplier",
                "attention_multiplier",
                "logits_scaling",
            ),
            config_defaults={"head_dim": None},
        ),
        Family(
            model_type="phi3",
            architecture="Phi3ForCausalLM",
            config_fields=_COMMON_FIELDS,
            config_defaults={"head_dim": None},
            fused={"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")},
            windows="every_layer",
            turns_a_part=True,
            dropped_in_training=("resid_pdrop", "embd_pdrop"),
            tolerance="qkv_proj and gate_up_proj are several matrix products where they were one, which may round otherwise",
        ),
        Family(
            model_type="mixtral",
            architecture="MixtralForCausalLM",
            config_fields=_without(_COMMON_FIELDS, "intermediate_size"),
            fixed_fields={"norm_topk_prob": True, "router_scores_dtype": "float32"},
            renames=(
                (".block_sparse_moe.", ".mlp."),
                (".w1.", ".gate_proj."),
                (".w3.", ".up_proj."),
                (".w2.", ".down_proj."),
            ),
            windows="every_layer",
            expert_fields=_same_name("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef")
            | {"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
            dropped_in_training=("router_jitter_noise",),
        ),
        Family(
            model_type="qwen2_moe",
            architecture="Qwen2MoeForCausalLM",
            config_fields=_COMMON_FIELDS | {"qk_bias": "qkv_bias", "v_bias": "qkv_bias"},
            config_defaults={"head_dim": None},
            names_dense_layers=True,
            expert_fields=_EXPERT_FIELDS | _SHARED_EXPERT | _TOPK,
        ),
        Family(
            model_type="qwen3_moe",
            architecture="Qwen3MoeForCausalLM",
            config_fields=_COMMON_FIELDS | _ONE_BIAS_SWITCH,
            config_defaults={"head_dim": None},
            fixed_fields={"qk_norm": True},
            windows="every_layer",
            expert_fields=_EXPERT_FIELDS | _TOPK,
            names_dense_layers=True,
        ),
        Family(
            model_type="qwen3_next",
            architecture="Qwen3NextForCausalLM",
            config_fields=_NEXT_FIELDS,
            fixed_fields=_NEXT_FIXED,
            gates="q_proj_per_head",
            turns_a_part=True,
            expert_fields=_EXPERT_FIELDS | _SHARED_EXPERT | _TOPK,
            names_dense_layers=True,
            ignored=("mtp",),
            tolerance=_GATES_SPLIT,
        ),
        Family(
            model_type="qwen3_5_text",
            architecture="Qwen3_5ForCausalLM",
            config_fields=_NEXT_FIELDS,
            fixed_fields=_NEXT_FIXED,
            gates="q_proj_per_head",
            turns_a_part=True,
            aliases=_LANGUAGE_MODEL,
            tolerance=_GATES_SPLIT,
            ignored=("mtp", "model.visual"),
        ),
        Family(
            model_type="qwen3_5_moe_text",
            architecture="Qwen3_5MoeForCausalLM",
            config_fields=_without(_NEXT_FIELDS, "intermediate_size"),
            fixed_fields=_NEXT_FIXED | {"norm_topk_prob": True},
            gates="q_proj_per_head",
            turns_a_part=True,
            aliases=_LANGUAGE_MODEL,
            stacks_experts=True,
            expert_fields=_EXPERT_FIELDS | _SHARED_EXPERT,
            tolerance=_GATES_SPLIT,
            ignored=("mtp", "model.visual"),
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
            tolerance="in 16 bits, since LFM3 takes RoPE in float32 whatever the model's format",
            compared_in="float32",
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
        tolerance=_GATES_SPLIT,
    )
    for granularity in GATE_FLAGS.values()
}


# Why a family that one might expect is not there.
REFUSED_FAMILIES = {
    "qwen3_5": "it is a model with images, of which the language model alone could be read (Qwen3_5ForCausalLM); in the released "
    "ones it has layers of linear attention",
    "qwen3_5_moe": "it is a model with images, of which the language model alone could be read (Qwen3_5MoeForCausalLM); in the "
    "released ones it has layers of linear attention",
    "gemma2": "it has norms behind attention and MLP as well, and caps its logits",
    "gemma3_text": "it has norms behind attention and MLP as well, and two kinds of RoPE",
    "olmo2": "it has no norm before attention, so a gate would have no normalised input to read",
    "olmo3": "it has no norm before attention, so a gate would have no normalised input to read",
    "gpt_oss": "it has learned sinks, which do what a gate would do, and experts with biases and clamped activations",
}


def families_table() -> str:
    """What can be converted, and what is exact, as text."""
    rows = [("model_type", "its tensors", "its gates", "logits")]
    reasons: dict[str, int] = {}
    reference = (REFERENCE["headwise"], REFERENCE["elementwise"])
    for family in (*FAMILIES.values(), REFERENCE_WITHOUT_GATES, *reference):
        changes = [
            word
            for word, applies in (
                ("split", family.takes_projections_apart),
                ("renamed", family.renames or family.aliases),
            )
            if applies
        ]
        name = family.model_type
        if not family.has_stock_class:
            granularity = family.fixed_fields.get("gate_granularity")
            name += f" of the paper's code, {granularity or 'no'} gates"
        own = family.fixed_fields.get("gate_granularity")
        if family.tolerance is not None:
            reasons.setdefault(family.tolerance, len(reasons) + 1)
        exact = "bit for bit" if family.tolerance is None else f"to rounding ({reasons[family.tolerance]})"
        rows.append((name, " and ".join(changes) or "stay", f"{own}, read" if family.gates else "new", exact))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows
    ]
    notes = [f"({number}) {reason}" for reason, number in reasons.items()]
    refused = [f"not {name}: {reason}" for name, reason in REFUSED_FAMILIES.items()]
    return "\n".join(
        [*lines, "", *(line for text in (*notes, *refused) for line in wrap(text, 100, subsequent_indent="    "))]
    )


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
