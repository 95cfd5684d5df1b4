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
"""The gate: a projection of the layer's input, an activation, and a product with the attention output."""

import torch
from torch import nn


GATE_ACTIVATIONS = {"sigmoid": torch.sigmoid}


def gate_width(config) -> int:
    """Number of gate logits a token: one a head (headwise) or one a channel of a head (elementwise)."""
    if config.gate_granularity == "headwise":
        return config.num_attention_heads
    return config.num_attention_heads * config.head_dim


def gate_projection(config) -> nn.Linear:
    """The projection from the layer's normalised input to the gate logits (W_theta in the paper, section 2.2)."""
    return nn.Linear(config.hidden_size, gate_width(config), bias=config.gate_bias)


def apply_gate(
    attn_output: torch.Tensor, gate_logits: torch.Tensor, activation: str = "sigmoid", scale: float = 1.0
) -> torch.Tensor:
    """
    Gate the output of scaled dot product attention, before `o_proj` (G1 in the paper).

    The product is taken as `x * (scale * activation(g))`. With `scale = 2` and zero logits the bracket is exactly 1 in
    every float format; `(x * activation(g)) * scale` underflows in float16 and `(scale * x) * activation(g)` overflows.

    Args:
        attn_output (`torch.Tensor` of shape `(batch, sequence, heads, head_dim)`): What attention returns.
        gate_logits (`torch.Tensor` of shape `(batch, sequence, heads)` or `(batch, sequence, heads * head_dim)`):
            Headwise or elementwise logits, in the dtype of `attn_output`.
        activation (`str`): A key of `GATE_ACTIVATIONS`.
        scale (`float`): Factor on the gate scores.

    Returns:
        `torch.Tensor` of the shape of `attn_output`.
    """
    gate_scores = GATE_ACTIVATIONS[activation](gate_logits)
    if scale != 1.0:
        gate_scores = scale * gate_scores
    # (batch, sequence, heads, 1) or (batch, sequence, heads, head_dim)
    gate_scores = gate_scores.view(*attn_output.shape[:-1], -1)
    return attn_output * gate_scores
