"""Model families whose checkpoints can be given gates, as data."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Family:
    """
    How a family's checkpoints relate to [`GatedAttentionConfig`] and its tensor names.

    Attributes:
        model_type: The `model_type` of the source's config.
        architecture: The class in transformers that the source is loaded with.
        config_fields: For each field of `GatedAttentionConfig` that is read from the source: the source's name for it.
        fixed_fields: Fields that the family does not have a switch for, with their value.
    """

    model_type: str
    architecture: str
    config_fields: dict[str, str]
    fixed_fields: dict[str, object] = field(default_factory=dict)


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

# Tensor names are those of `GatedAttentionForCausalLM` in each of them: nothing is rewritten.
FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            model_type="llama",
            architecture="LlamaForCausalLM",
            config_fields=_COMMON_FIELDS
            # In Llama the one switch stands for all four projections, `o_proj` included.
            | {"qk_bias": "attention_bias", "v_bias": "attention_bias", "o_bias": "attention_bias"}
            | _same_name("mlp_bias"),
        ),
        Family(model_type="mistral", architecture="MistralForCausalLM", config_fields=_COMMON_FIELDS),
        Family(
            model_type="qwen3",
            architecture="Qwen3ForCausalLM",
            config_fields=_COMMON_FIELDS
            | {"qk_bias": "attention_bias", "v_bias": "attention_bias", "o_bias": "attention_bias"},
            fixed_fields={"qk_norm": True},
        ),
    )
}
