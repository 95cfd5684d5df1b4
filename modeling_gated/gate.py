# Copyright 2026 The gated_attention authors. All rights reserved.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Gates: logits from the layer's input, scores from the logits, and their product or sum with what is gated."""

import math

import torch
from torch import nn

from ..configuration.gate_variants import GATE_PROJECTIONS


def _non_sparse_sigmoid(logits: torch.Tensor) -> torch.Tensor:
    return 0.5 + 0.5 * torch.sigmoid(logits)


def _identity(logits: torch.Tensor) -> torch.Tensor:
    return logits


GATE_ACTIVATIONS = {
    "sigmoid": torch.sigmoid,
    "silu": nn.functional.silu,
    "ns_sigmoid": _non_sparse_sigmoid,
    "softplus": nn.functional.softplus,
    "identity": _identity,
}


def _scaled_sigmoid(logits: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.sigmoid(logits).mul_(scale)


class _ScaledSigmoid(torch.autograd.Function):
    """
    `scale * sigmoid(logits)` for a power of two, of which the derivative needs the result alone: the sigmoid comes back from
    it exactly. Written as a product, autograd would keep both the sigmoid and the scaled one: a tensor more a layer.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: torch.Tensor, scale: float) -> torch.Tensor:
        return _scaled_sigmoid(logits, scale)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.scale = inputs[1]
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (scores,) = ctx.saved_tensors
        return torch.ops.aten.sigmoid_backward(grad * ctx.scale, scores / ctx.scale), None

    @staticmethod
    def jvp(ctx, tangent: torch.Tensor, _) -> torch.Tensor:
        (scores,) = ctx.saved_tensors
        return torch.ops.aten.sigmoid_backward(tangent * ctx.scale, scores / ctx.scale)


class InputIndependentGate(nn.Module):
    """
    Gate logits that are the same for every token: a projection without a weight (paper, table 4).

    Args:
        out_features (`int`): Number of logits.
    """

    def __init__(self, out_features: int):
        super().__init__()
        self.out_features = out_features
        self.bias = nn.Parameter(torch.zeros(out_features))

    def extra_repr(self) -> str:
        return f"out_features={self.out_features}"

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """From `(batch, sequence, hidden_size)`, of which only the number of dimensions matters, to `(1, 1, out_features)`."""
        return self.bias.view(*(1,) * (hidden_states.ndim - 1), -1)


def gate_projection(config, position: str) -> nn.Module:
    """The projection from the layer's normalised input to the gate logits (W_theta in the paper, section 2.2)."""
    width = config.gate_width(position)
    if config.gate_input == "none":
        projection = InputIndependentGate(width)
    else:
        projection = nn.Linear(config.gate_input_size or config.hidden_size, width, bias=config.gate_bias)
    projection.is_gate_projection = True
    return projection


def is_gate_tensor(name: str) -> bool:
    """Whether a tensor of this name belongs to a gate."""
    return any(part in GATE_PROJECTIONS.values() for part in name.split("."))


def gate_scores(config, gate_logits: torch.Tensor, heads: int) -> torch.Tensor:
    """
    Scores from logits.

    Args:
        config: Anything with `gate_activation`, `gate_scale` and `gate_sharing`.
        gate_logits (`torch.Tensor` of shape `(batch, sequence, heads * channels)`): What the projection returned.
        heads (`int`): Number of heads at the gate's position (on this device).

    Returns:
        `torch.Tensor` of shape `(batch, sequence, heads or 1, channels)`, where channels is 1 for headwise gates.
    """
    if config.gate_scale == 1.0:
        scores = GATE_ACTIVATIONS[config.gate_activation](gate_logits)
    elif (
        config.gate_activation == "sigmoid"
        and math.frexp(config.gate_scale)[0] == 0.5
        and not torch.compiler.is_compiling()
    ):
        needs_grad = torch.is_grad_enabled() and gate_logits.requires_grad
        scores = (_ScaledSigmoid.apply if needs_grad else _scaled_sigmoid)(gate_logits, config.gate_scale)
    else:
        scores = config.gate_scale * GATE_ACTIVATIONS[config.gate_activation](gate_logits)
    scores = scores.view(*scores.shape[:-1], heads, -1)
    if config.gate_sharing == "head_shared":
        scores = scores.mean(dim=-2, keepdim=True)
    return scores


def apply_gate(states: torch.Tensor, scores: torch.Tensor, operator: str = "multiply") -> torch.Tensor:
    """
    Gate `states`.

    The product is taken as `x * (scale * activation(g))`. With `scale = 2` and zero logits the bracket is exactly 1 in
    every float format; `(x * activation(g)) * scale` underflows in float16 and `(scale * x) * activation(g)` overflows.

    Args:
        states (`torch.Tensor` of shape `(batch, sequence, heads, channels)`): What is gated.
        scores (`torch.Tensor`): What [`gate_scores`] returned; broadcasts to the shape of `states`.
        operator (`str`): `"multiply"` or `"add"`.

    Returns:
        `torch.Tensor` of the shape and format of `states`, whatever format autocast gave the scores: attention needs queries, keys
        and values in one.
    """
    if scores.dtype != states.dtype:
        scores = scores.to(states.dtype)
    return states * scores if operator == "multiply" else states + scores
