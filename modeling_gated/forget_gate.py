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
"""
The forget gate of the Forgetting Transformer (Lin et al., "Forgetting Transformer: Softmax Attention with a Forget Gate",
ICLR 2025, arXiv 2503.02130): each head lets the past fade by a factor that each token decides on.

The logit of query i and key j gets the sum of `log f_l` over the tokens l after j up to i, with `f = sigmoid(w x + b)` a head.
"""

import torch
from torch import nn


# Backends that take a mask with a number for each head, query and key.
FORGETTING_BACKENDS = ("eager", "sdpa")


def refuse_other_backends(attn_implementation: str | None) -> None:
    """
    Raises:
        `ValueError`: the attention backend cannot add to the logits what the forget gate asks for.
    """
    if attn_implementation not in FORGETTING_BACKENDS:
        raise ValueError(
            f"`attn_implementation` must be one of {FORGETTING_BACKENDS} where the config has `forget_gate`: other backends cannot "
            f"add a decay to the attention logits; got {attn_implementation!r}"
        )


def log_forget_gates(logits: torch.Tensor, groups: int) -> torch.Tensor:
    """
    From the projection's logits to `log f`, in float32: sums of many small numbers are taken of it.

    Args:
        logits (`torch.Tensor` of shape `(batch, sequence, num_attention_heads)`): What `f_proj` returned.
        groups (`int`): Number of query heads that share a key head.

    Returns:
        `torch.Tensor` of shape `(batch, num_key_value_heads, sequence, groups)`.
    """
    log_forget = nn.functional.logsigmoid(logits.float())
    return log_forget.view(*logits.shape[:-1], -1, groups).transpose(1, 2)


def keys_with_gates(key_states: torch.Tensor, log_forget: torch.Tensor) -> torch.Tensor:
    """
    Append `log f` to the keys as further channels. Whatever a cache does to keys (grow, slide, reorder, crop, offload), it then
    does to the gates; only a cache that was made for keys of `head_dim` channels before it saw some (`early_initialization`, which
    `torch.export` uses) has no room for them. In 16 bits two channels, a number and what it lacks, keep 16 bits or more of the float32.

    Args:
        key_states (`torch.Tensor` of shape `(batch, num_key_value_heads, sequence, head_dim)`): The keys.
        log_forget (`torch.Tensor` of shape `(batch, num_key_value_heads, sequence, groups)`): What [`log_forget_gates`] returned.

    Returns:
        `torch.Tensor` of the shape of the keys, but for the channels.
    """
    rounded = log_forget.to(key_states.dtype)
    parts = [key_states, rounded]
    if key_states.dtype.itemsize < 4:
        parts.append((log_forget - rounded.float()).to(key_states.dtype))
    return torch.cat(parts, dim=-1)


def split_gates(key_states: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of [`keys_with_gates`], on all keys of a cache."""
    keys, gates = key_states[..., :head_dim], key_states[..., head_dim:]
    if key_states.dtype.itemsize < 4:
        rounded, rest = gates.float().chunk(2, dim=-1)
        return keys, rounded + rest
    return keys, gates


def forgetting_mask(
    attention_mask: torch.Tensor | None, log_forget: torch.Tensor, query_length: int, dtype: torch.dtype
) -> torch.Tensor:
    """
    The mask with which attention forgets.

    Args:
        attention_mask (`torch.Tensor` of shape `(batch, 1, queries, keys)`, *optional*):
            What is visible: booleans, or numbers to add to the logits. Without one every key is, to a single query, and to several
            the ones up to their own, counted from the first.
        log_forget (`torch.Tensor` of shape `(batch, num_key_value_heads, keys, groups)`): `log f` of every key.
        query_length (`int`): Number of queries.
        dtype (`torch.dtype`): Of the queries.

    Returns:
        `torch.Tensor` of shape `(batch, num_attention_heads, queries, keys)`: what is added to the logits.
    """
    batch, _, key_length, _ = log_forget.shape
    # (batch, heads, keys): query heads that share a key head are neighbours
    log_forget = log_forget.transpose(2, 3).reshape(batch, -1, key_length)
    until = log_forget.cumsum(dim=-1)
    if attention_mask is None:
        visible = torch.ones(1, 1, query_length, key_length, dtype=torch.bool, device=log_forget.device)
        visible = visible.tril() if query_length > 1 else visible
    else:
        attention_mask = attention_mask[..., :key_length]
        if attention_mask.is_floating_point():
            visible = attention_mask > torch.finfo(attention_mask.dtype).min / 2
        else:
            visible = attention_mask = attention_mask.bool()
    # A query's own key is the last that it sees. Of slots behind it a cache may hold anything.
    slots = torch.arange(key_length, device=log_forget.device, dtype=torch.int32)
    own = (visible * slots).amax(dim=-1).long()  # (batch, 1, queries)
    until_own = until.gather(-1, own.expand(batch, until.shape[1], -1))
    # The difference first, in float32: the sums grow with the text, the differences that matter do not.
    decay = until_own[..., None] - until[..., None, :]
    if attention_mask is not None and attention_mask.is_floating_point():
        decay = decay + attention_mask
    smallest = torch.finfo(dtype).min
    if dtype == torch.float16:
        decay = decay.clamp(min=smallest)  # in other formats no sum of logarithms gets that far
    return decay.masked_fill(~visible, smallest).to(dtype)
