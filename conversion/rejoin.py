"""
Puts projections that a conversion took apart together again, in a model in memory.

A matrix product of twice the rows may add up its terms in another order than two of half, so a converted model can differ from
its source by rounding, which layers, and routers most of all, make larger. With the same products both compute the same bits:
what is compared then is the conversion.
"""

import torch
from torch import nn

from .layouts import Rows, one_behind_the_other, query_and_gate_rows
from .plan import ConversionPlan


class _Joined:
    """A projection of several, and what it last returned."""

    def __init__(self, parts: list[nn.Linear], rows: list[Rows]):
        self.rows = rows
        count = sum(part.out_features for part in parts)
        self.indices = [torch.tensor([row for first, end in of_part for row in range(first, end)]) for of_part in rows]
        self.weight = torch.empty(count, parts[0].in_features, dtype=parts[0].weight.dtype)
        self.bias = None if parts[0].bias is None else torch.empty(count, dtype=parts[0].bias.dtype)
        for part, indices in zip(parts, self.indices, strict=True):
            self.weight[indices] = part.weight
            if self.bias is not None:
                self.bias[indices] = part.bias
        self.input = self.output = None

    def part(self, index: int, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states is not self.input:
            self.input, self.output = hidden_states, nn.functional.linear(hidden_states, self.weight, self.bias)
        if len(self.rows[index]) == 1:
            # A view, as in the source's class: what is next may add up strided numbers in another order.
            return self.output[..., slice(*self.rows[index][0])]
        return self.output[..., self.indices[index]]


class _Part(nn.Module):
    """Stands in for one of the projections."""

    def __init__(self, joined: _Joined, index: int):
        super().__init__()
        self.joined, self.index = joined, index

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.joined.part(self.index, hidden_states)


def rejoin_projections(model: nn.Module, plan: ConversionPlan) -> None:
    """
    Let the projections of `model`, the result of `plan` or some layers of it, be computed as the source's class does. The
    model's parameters are no longer used for it, so it is good for a comparison only.
    """
    config = plan.config
    for module in list(model.modules()):
        if plan.family.gates_in_q_proj and hasattr(module, "g_proj"):
            rows = query_and_gate_rows(
                plan.family.gates,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                config.gate_granularity,
            )
            _join(module, ("q_proj", "g_proj"), list(rows))
        for names in plan.family.fused.values():
            if all(isinstance(getattr(module, name, None), nn.Linear) for name in names):
                _join(module, names, one_behind_the_other(getattr(module, name).out_features for name in names))


def _join(module: nn.Module, names: tuple[str, ...], rows: list[Rows]) -> None:
    joined = _Joined([getattr(module, name) for name in names], rows)
    for index, name in enumerate(names):
        setattr(module, name, _Part(joined, index))
