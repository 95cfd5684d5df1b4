"""Where models keep their output gate: a table, so that stock models with a native gate show their scores too."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn


@dataclass(frozen=True)
class GateLocation:
    """
    Attributes:
        module: Name of the projection in the attention module whose output holds the gate logits.
        layout: `"separate"`: the output is the logits. `"per_head_halves"`: per query head, the query's channels, then the
            gate's.
        activation: What turns logits into scores.
    """

    module: str
    layout: Literal["separate", "per_head_halves"] = "separate"
    activation: Literal["sigmoid", "softplus"] = "sigmoid"


_ACTIVATIONS = {"sigmoid": torch.sigmoid, "softplus": nn.functional.softplus}

# By the `model_type` of the config that the attention module holds.
GATE_LOCATIONS = {
    "gated_attention": GateLocation("g_proj"),
    "qwen3_next": GateLocation("q_proj", layout="per_head_halves"),
    "qwen3_5_text": GateLocation("q_proj", layout="per_head_halves"),
    "qwen3_5_moe_text": GateLocation("q_proj", layout="per_head_halves"),
    "afmoe": GateLocation("gate_proj"),
    "lfm3": GateLocation("g_proj"),
    "laguna": GateLocation("g_proj", activation="softplus"),
}


def gate_location(attention: nn.Module) -> GateLocation | None:
    """Where this attention module keeps its gate, or None if it has none."""
    config = getattr(attention, "config", None)
    location = GATE_LOCATIONS.get(getattr(config, "model_type", None))
    if location is None or getattr(attention, location.module, None) is None:
        return None
    return location


def gate_scores(location: GateLocation, config, projected: torch.Tensor, heads: int) -> torch.Tensor:
    """
    Gate scores from the projection's output.

    Args:
        location: Where the gate is.
        config: The attention module's config.
        projected (`torch.Tensor` of shape `(batch, sequence, width)`): What the projection returned.
        heads (`int`): Number of query heads.

    Returns:
        `torch.Tensor` of shape `(batch, sequence, heads, 1 or head_dim)`, in float32.
    """
    per_head = projected.float().unflatten(-1, (heads, -1))
    if location.layout == "per_head_halves":
        per_head = per_head.chunk(2, dim=-1)[1]
    return _ACTIVATIONS[location.activation](per_head) * getattr(config, "gate_scale", 1.0)
