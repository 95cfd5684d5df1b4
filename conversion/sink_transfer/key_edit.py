"""
Changes `k_proj` so that sinks no longer attract, and other tokens keep their keys.

In the span of what `k_proj` can do, the change is the one that moves the sinks' keys to where they are wanted and moves the
other tokens' keys least, in the sense of least squares over the calibration tokens:

    min over D:  mean over other tokens |D x|^2  +  mu * (weighted mean over sinks |(W + D) x - k*|^2),    k* = strength * k

with k the sinks' mean key: strength 1 leaves them, 0 makes them neutral, below 0 they repel. With second moments C of the other
tokens and S of the sinks this is D = mu (k* m^T - W S) (C + mu S)^-1, linear in k*. Projecting the sink's direction out of W instead, as in
W - (1 - strength) W u u^T / |u|^2, changes every token that has a component along u: on SmolLM2 by three to fifty times as much.
"""

from dataclasses import dataclass

import torch


SINK_WEIGHT = 1.0  # mu
# Relative to the mean second moment of a channel: keeps the system solvable where channels are dependent.
RIDGE = 1e-5


@dataclass
class KeyMoments:
    """
    Sums over calibration tokens that the edit is computed from, in float64.

    Attributes:
        others: `(hidden_size, hidden_size)`: second moments of the tokens that are no sinks.
        sinks: `(hidden_size, hidden_size)`: weighted second moments of the sinks.
        sink_mean: `(hidden_size,)`: weighted mean of the sinks' inputs.
        key_mean: `(key_value_heads * head_dim,)`: weighted mean of what `k_proj` returns for sinks.
        value_mean: `(key_value_heads, head_dim)`: weighted mean of the sinks' values.
    """

    others: torch.Tensor
    sinks: torch.Tensor
    sink_mean: torch.Tensor
    key_mean: torch.Tensor
    value_mean: torch.Tensor


@dataclass
class KeyEdit:
    """
    The change of `k_proj.weight` for any strength a key/value head: `neutral + strength * step`.

    Attributes:
        neutral, step: `(key_value_heads * head_dim, hidden_size)`.
    """

    neutral: torch.Tensor
    step: torch.Tensor

    def change(self, strength: torch.Tensor) -> torch.Tensor:
        """Args: strength `(key_value_heads,)`."""
        rows = strength.repeat_interleave(len(self.step) // len(strength))[:, None]
        return self.neutral + rows.to(self.step) * self.step


def key_edit(moments: KeyMoments, weight: torch.Tensor, bias: torch.Tensor | None) -> KeyEdit:
    """
    The edit of `k_proj`.

    Args:
        moments (`KeyMoments`): Of the calibration tokens.
        weight, bias: Of `k_proj`.
    """
    size = len(moments.others)
    ridge = RIDGE * moments.others.trace() / size * torch.eye(size, dtype=torch.float64, device=weight.device)
    system = moments.others + SINK_WEIGHT * moments.sinks + ridge
    current = weight.double() @ moments.sinks
    if bias is not None:
        current += torch.outer(bias.double(), moments.sink_mean)
    wanted = torch.outer(moments.key_mean, moments.sink_mean)
    # The system is symmetric: solving from the left gives the transposed change.
    solved = torch.linalg.solve(system, SINK_WEIGHT * torch.stack([current, wanted]).transpose(1, 2))
    neutral, step = -solved[0].T, solved[1].T
    return KeyEdit(neutral.to(weight.dtype).contiguous(), step.to(weight.dtype).contiguous())
