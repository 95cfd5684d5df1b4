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
"""Rotary position embedding with fewer passes over memory than transformers' own, and the same bits."""

import torch
from transformers.models.llama.modeling_llama import rotate_half


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """
    Rotate the first `cos.shape[-1]` channels: `x * cos + rotate_half(x) * sin`, the rest passes through.

    Args:
        states (`torch.Tensor` of shape `(batch, heads, sequence, head_dim)`): Queries or keys.
        cos, sin (`torch.Tensor` of shape `(batch, 1, sequence, rotated channels)`): They get no gradient.

    Returns:
        `torch.Tensor` of the shape of `states`, bit-equal to what `apply_rotary_pos_emb` of transformers gives.
    """
    # A compiler fuses the plain formula. Autocast mixes formats, which in-place operations would not promote.
    if torch.compiler.is_compiling() or states.dtype != cos.dtype:
        return _plain_rotation(states, cos, sin)
    if torch.is_grad_enabled() and states.requires_grad:
        return _Rotation.apply(states, cos, sin, False)
    return _rotated(states, cos, sin, back=False)


def rotate_together(
    query_states: torch.Tensor, key_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    [`rotate`] of queries and keys, at one token a step in half as many operations: calling them takes longer than they do. The plain formula is the
    quicker one then: it has fewer kinds of them, whose code the layer's weights push out of the caches.

    Args:
        query_states, key_states (`torch.Tensor` of shape `(batch, heads, sequence, head_dim)`).
        cos, sin (`torch.Tensor` of shape `(batch, 1, sequence, rotated channels)`): They get no gradient.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]` of the shapes of `query_states` and `key_states`, with the bits of two rotations.
    """
    if (
        query_states.shape[-2] != 1
        or torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or not query_states.dtype == key_states.dtype == cos.dtype
    ):
        return rotate(query_states, cos, sin), rotate(key_states, cos, sin)
    states = _plain_rotation(torch.cat((query_states, key_states), dim=1), cos, sin)
    return states[:, : query_states.shape[1]], states[:, query_states.shape[1] :]


def _plain_rotation(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rotated, rest = states[..., : cos.shape[-1]], states[..., cos.shape[-1] :]
    rotated = rotated * cos + rotate_half(rotated) * sin
    return rotated if rest.shape[-1] == 0 else torch.cat((rotated, rest), dim=-1)


def _rotated(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool) -> torch.Tensor:
    """
    As `_plain_rotation`, in place on a new tensor; `back` gives the product with the rotation's transpose.

    a - b * c has the bits of a + (-b) * c, so nothing has to be negated or concatenated.
    """
    if cos.shape[-1] == states.shape[-1]:
        result = states * cos
        rotated, source = result, states
    else:
        result = states.clone()
        rotated, source = result[..., : cos.shape[-1]], states[..., : cos.shape[-1]]
        rotated.mul_(cos)
    first, second = source.chunk(2, dim=-1)
    sin_first, sin_second = sin.chunk(2, dim=-1)
    rotated_first, rotated_second = rotated.chunk(2, dim=-1)
    if back:
        rotated_first.add_(second * sin_second)
        rotated_second.sub_(first * sin_first)
    else:
        rotated_first.sub_(second * sin_first)
        rotated_second.add_(first * sin_second)
    return result


class _Rotation(torch.autograd.Function):
    """
    The backward pass of slices and a concatenation fills and adds whole tensors. The transpose of a rotation is the rotation
    back, so this is its own derivative, as often as one likes.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool) -> torch.Tensor:
        return _rotated(states, cos, sin, back)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, cos, sin, ctx.back = inputs
        ctx.save_for_backward(cos, sin)
        ctx.save_for_forward(cos, sin)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _Rotation.apply(grad, *ctx.saved_tensors, not ctx.back), None, None, None

    @staticmethod
    def jvp(ctx, tangent: torch.Tensor, *_) -> torch.Tensor:
        return _Rotation.apply(tangent, *ctx.saved_tensors, ctx.back)
