"""From a gated model's config to that of a stock class: the families' tables, read the other way."""

from collections.abc import Collection
from dataclasses import fields
from functools import lru_cache

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig

from ...configuration import GatedAttentionConfig
from ..families import Family
from ..gated_config import is_same_rope, turned_channels


# Fields that decide what a model computes, and that most stock classes have no switch for. Gates, windows, experts and the form of the
# norms are looked at by themselves.
_STRUCTURE = (
    "hidden_act",
    "qk_bias",
    "v_bias",
    "o_bias",
    "mlp_bias",
    "qk_norm",
    "forget_gate",
    "no_rope_layers",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
    "router_logits_dtype",
    "router_scores_dtype",
    "sdpa_output_nonlinearity",
)

# Width of the expert of zeros that stands where a stock class has a shared expert and the model has none.
EMPTY_EXPERT_WIDTH = 64

_KIND_OF_LAYER = {"full_attention": "full", "sliding_attention": "sliding-window"}


@lru_cache
def _empty_config(model_type: str) -> PreTrainedConfig:
    """A config of the class, which has the fields that the class has."""
    return CONFIG_MAPPING[model_type]()


def stock_class(family: Family) -> type:
    """The class of transformers that runs the family's checkpoints."""
    return getattr(transformers, family.architecture)


def config_problems(
    config: GatedAttentionConfig, family: Family, fill: bool, empty: Collection[str] = ()
) -> list[str]:
    """
    What of a model, its gates apart, a stock class has no counterpart for.

    Args:
        config: Of the gated model.
        family: Of the stock class.
        fill: Whether biases and shared experts that the class has and the model lacks may be filled with zeros.
        empty: Fields that stand for tensors of zeros, and so need no counterpart.

    Returns:
        `list[str]`: a clause for each problem, for a sentence about the model.
    """
    name = family.model_type
    problems = []
    defaults = {field.name: field.default for field in fields(GatedAttentionConfig)}
    for field in _STRUCTURE:
        if field in family.config_fields or field in empty:
            continue
        wanted, found = family.fixed_fields.get(field, defaults[field]), getattr(config, field)
        if field == "no_rope_layers":
            wanted = [1] * config.num_hidden_layers
        if field == "attention_multiplier" and found == config.head_dim**-0.5:
            continue
        if field == "router_scores_dtype" and not config.num_experts:
            continue
        if found != wanted:
            problems.append(f"`{field}` is {found}, where {name} always has {wanted}")
    problems += [] if fill else _switch_problems(config, family)
    problems += _layer_problems(config, family)
    problems += _expert_problems(config, family, fill)
    return problems


def switches(family: Family) -> dict[str, list[str]]:
    """For each field of the stock config: the fields of ours that it stands for, where it stands for several."""
    by_theirs: dict[str, list[str]] = {}
    for ours, theirs in family.config_fields.items():
        by_theirs.setdefault(theirs, []).append(ours)
    return {theirs: names for theirs, names in by_theirs.items() if len(names) > 1}


def _switch_problems(config: GatedAttentionConfig, family: Family) -> list[str]:
    problems = []
    for theirs, names in switches(family).items():
        values = {name: getattr(config, name) for name in names if name != "gate_bias"}
        if len(set(values.values())) > 1:
            shown = ", ".join(f"`{name}` is {value}" for name, value in values.items())
            problems.append(f"{shown}, where {family.model_type} has one `{theirs}` for all")
    return problems


def _layer_problems(config: GatedAttentionConfig, family: Family) -> list[str]:
    kinds = set(config.layer_types)
    name = family.model_type
    has_windows = hasattr(_empty_config(name), "sliding_window") and family.gates != "q_proj_per_head"
    if "sliding_attention" in kinds and not has_windows:
        return [f"it has sliding windows, where {name} has none"]
    if family.windows == "every_layer" and len(kinds) > 1:
        words = " and ".join(sorted(_KIND_OF_LAYER[kind] for kind in kinds))
        return [f"it has {words} layers, where {name} has one kind of layer"]
    return []


def _expert_problems(config: GatedAttentionConfig, family: Family, fill: bool) -> list[str]:
    name = family.model_type
    if not config.num_experts:
        return (
            []
            if not family.expert_fields or family.names_dense_layers
            else [f"it has no experts, where {name} has some"]
        )
    if not family.expert_fields:
        return [f"it has experts, where {name} has none"]
    problems = []
    if "dense" in config.mlp_layer_types and not family.names_dense_layers:
        problems.append(f"some of its layers are dense, where {name} has experts in each")
    if "norm_topk_prob" not in family.expert_fields and not config.norm_topk_prob:
        problems.append(f"`norm_topk_prob` is False, where {name} always has True")
    has_shared = "shared_expert_intermediate_size" in family.expert_fields
    if not has_shared and config.shared_expert_intermediate_size is not None:
        problems.append(f"it has a shared expert, where {name} has none")
    if has_shared and not fill and not (config.shared_expert_intermediate_size and config.shared_expert_gate):
        problems.append(f"it has no shared expert with a gate, where {name} has one")
    return problems


def stock_config(
    config: GatedAttentionConfig, family: Family, dtype: torch.dtype, biases: dict[str, bool], tied: bool
) -> PreTrainedConfig:
    """
    The stock class's config of a model that has none of [`config_problems`].

    Args:
        config: Of the gated model.
        family: Of the stock class.
        dtype: That the checkpoint loads in.
        biases: Values of the bias switches, by their name in the stock config.
        tied: Whether the head is the embedding.
    """
    values = {theirs: getattr(config, ours) for ours, theirs in family.config_fields.items() if ours != "gate_bias"}
    values |= biases | {"tie_word_embeddings": tied}
    values |= _window_values(config, family) | _expert_values(config, family)
    values["rope_parameters"] = _rope_values(config, family)
    values |= dict(family.refused_fields)
    class_fields = _empty_config(family.model_type)
    if family.gates == "q_proj_per_head":
        values["full_attention_interval"] = 1  # for software that does not read `layer_types`
    if hasattr(class_fields, "original_max_position_embeddings"):
        # Phi-3 reads it there.
        original = values["rope_parameters"].get("original_max_position_embeddings")
        values |= {} if original is None else {"original_max_position_embeddings": original}
    if not hasattr(class_fields, "head_dim") and config.head_dim * config.num_attention_heads == config.hidden_size:
        del values["head_dim"]
    if getattr(config, "tokenizer_class", None):
        values["tokenizer_class"] = config.tokenizer_class
    return CONFIG_MAPPING[family.model_type](**values, dtype=dtype, architectures=[family.architecture])


def _window_values(config: GatedAttentionConfig, family: Family) -> dict:
    names = _empty_config(family.model_type)
    window = config.sliding_window if "sliding_attention" in config.layer_types else None
    values: dict = {}
    if hasattr(names, "sliding_window"):
        values["sliding_window"] = window
    if hasattr(names, "use_sliding_window"):
        values["use_sliding_window"] = window is not None
    if hasattr(names, "layer_types") and family.windows == "layer_types":
        values["layer_types"] = list(config.layer_types)
    return values


def _expert_values(config: GatedAttentionConfig, family: Family) -> dict:
    if not family.expert_fields:
        return {}
    dense = [layer for layer, kind in enumerate(config.mlp_layer_types) if kind == "dense"]
    values: dict = {"mlp_only_layers": dense, "decoder_sparse_step": 1} if family.names_dense_layers else {}
    if not config.num_experts:
        return values | {family.expert_fields["num_experts"]: 0}
    values |= {theirs: getattr(config, ours) for ours, theirs in family.expert_fields.items()}
    if values.get("shared_expert_intermediate_size", 0) is None:
        values["shared_expert_intermediate_size"] = EMPTY_EXPERT_WIDTH
    return values


def _rope_values(config: GatedAttentionConfig, family: Family) -> dict:
    parameters = dict(config.rope_parameters)
    if family.gates == "q_proj_per_head":
        # Left out, it would be the class's own: a quarter.
        parameters.setdefault("partial_rotary_factor", 1.0)
    if family.model_type == "lfm3":
        if parameters["rope_type"] == "default" and parameters.get("partial_rotary_factor") == 1.0:
            del parameters["partial_rotary_factor"]
        return {kind: dict(parameters) for kind in ("full_attention", "sliding_attention")}
    return parameters


def rope_problems(config: GatedAttentionConfig, stock: PreTrainedConfig, family: Family) -> list[str]:
    """Whether queries and keys turn the same; of what is left unsaid, classes differ in what they take."""
    if turned_channels(config) != config.head_dim and not family.turns_a_part:
        return [
            f"its RoPE ({config.rope_parameters}) turns a part of the channels, where {family.model_type} turns all"
        ]
    if is_same_rope(stock, config):
        return []
    return [f"its RoPE ({config.rope_parameters}) is none that {family.model_type} has"]
