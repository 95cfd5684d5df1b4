"""Where models keep their output gate: a table, so that stock models with a native gate show their scores too."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from ..modeling_gated.gate import gate_scores as config_gate_scores


@dataclass(frozen=True)
class GateLocation:
    """
    Attributes:
        module: Name of the projection in the attention module whose output holds the gate logits.
        layout: `"separate"`: the output is the logits. `"per_head_halves"`: per query head, the query's channels, then the
            gate's.
        activation: What turns logits into scores; None: what the config says.
    """

    module: str
    layout: Literal["separate", "per_head_halves"] = "separate"
    activation: Literal["sigmoid", "softplus"] | None = "sigmoid"


_ACTIVATIONS = {"sigmoid": torch.sigmoid, "softplus": nn.functional.softplus}

# By the `model_type` of the config that the attention module holds.
GATE_LOCATIONS = {
    "gated_attention": GateLocation("g_proj", activation=None),
    "qwen3_next": GateLocation("q_proj", layout="per_head_halves"),
    "qwen3_5_text": GateLocation("q_proj", layout="per_head_halves"),
    "qwen3_5_moe_text": GateLocation("q_proj", layout="per_head_halves"),
    "afmoe": GateLocation("gate_proj"),
    "lfm3": GateLocation("g_proj"),
    "laguna": GateLocation("g_proj", activation="softplus"),
}


def gate_location(attention: nn.Module) -> GateLocation | None:
    """Where this attention module keeps the gate on its output (G1 in the paper), or None if it has none."""
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
    if location.activation is None:
        # The scores of a gate that all heads share count for each of them.
        return config_gate_scores(config, projected.float(), heads).expand(-1, -1, heads, -1)
    per_head = projected.float().unflatten(-1, (heads, -1))
    if location.layout == "per_head_halves":
        per_head = per_head.chunk(2, dim=-1)[1]
    return _ACTIVATIONS[location.activation](per_head)


@dataclass(frozen=True)
class GateProjection:
    """
    The projection that holds a gate.

    Attributes:
        name: Name of the projection in the model.
        module: The projection; with PEFT, its wrapper.
        head_dim: Channels of a head if the gate's rows lie among the query's (`"per_head_halves"`), else None.
    """

    name: str
    module: nn.Module
    head_dim: int | None

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The gate's part of a tensor whose first dimension is the projection's output."""
        if self.head_dim is None:
            return tensor
        return tensor.unflatten(0, (-1, 2 * self.head_dim))[:, self.head_dim :]

    def effective_weights(self) -> list[torch.Tensor]:
        """
        Weight and, if there is one, bias of the gate as the model uses them, adapters included, in float32 on the CPU.

        Of a quantised projection only the adapters' part, and nothing without one: nothing else of it is trained.
        """
        module = self.module
        if hasattr(module, "modules_to_save"):  # PEFT keeps a frozen copy of what it trains in full
            module = module.modules_to_save[module.active_adapters[0]]
        base = module.get_base_layer() if hasattr(module, "get_base_layer") else module
        weight = getattr(base, "weight", None)  # an input-independent gate is a bias
        parts = [weight] if weight is not None and weight.is_floating_point() else []
        if hasattr(module, "get_delta_weight") and not module.merged:
            parts += [module.get_delta_weight(adapter) for adapter in module.active_adapters]
        bias = [] if base.bias is None or (weight is not None and not parts) else [_whole(base.bias)]
        weights = [sum(_whole(part) for part in parts)] if parts else []
        return [self.rows(tensor).contiguous() for tensor in (*weights, *bias)]

    def square_sums(self) -> tuple[float, float]:
        """Sum of squared gradients of the gate, and of what else the projection holds (the query's rows)."""
        gate, rest = 0.0, 0.0
        for parameter in self.module.parameters():
            if parameter.grad is None:
                continue
            square = parameter.grad.float().square()
            whole = square.sum().item()
            width = getattr(self.module, "out_features", len(square))
            # Of an adapter on a shared projection the first factor serves both: it counts as the rest.
            own = self.rows(square).sum().item() if len(square) == width else (whole if self.head_dim is None else 0.0)
            gate, rest = gate + own, rest + whole - own
        return gate, rest


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A detached copy in float32 on the CPU; sharded parameters (FSDP2) are gathered."""
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().float().cpu().clone()


def gate_projections(model: nn.Module) -> list[GateProjection]:
    """Every gate of a model, in order; empty for a model without gates."""
    found = []
    for name, attention in model.named_modules():
        location = gate_location(attention)
        if location is not None:
            head_dim = attention.head_dim if location.layout == "per_head_halves" else None
            found.append(GateProjection(f"{name}.{location.module}", getattr(attention, location.module), head_dim))
    return found
