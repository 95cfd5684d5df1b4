"""A layer's attention, opened up: what the sink takes of it, head by head."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...modeling_gated.decoder import GatedAttentionDecoderLayer
from ...modeling_gated.rotary import rotate


@dataclass
class Projections:
    """
    Of one window.

    Attributes:
        inputs: `(length, hidden_size)`: what q, k, v and the gate are computed from.
        query: `(heads, length, head_dim)`, after RoPE.
        raw_key: `(length, key_value_heads * head_dim)`: what `k_proj` returns.
        key: `(key_value_heads, length, head_dim)`, after the norm, if there is one, and RoPE.
        value: `(key_value_heads, length, head_dim)`.
    """

    inputs: torch.Tensor
    query: torch.Tensor
    raw_key: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class OpenedAttention:
    """
    The attention of a decoder layer, for one window at a time.

    Args:
        layer (`GatedAttentionDecoderLayer`): The layer.
        position_embeddings: Cosines and sines of RoPE, each `(1, length, head_dim)`.
    """

    def __init__(self, layer: GatedAttentionDecoderLayer, position_embeddings: tuple[torch.Tensor, torch.Tensor]):
        self.layer = layer
        self.attention = layer.self_attn
        self.cos, self.sin = position_embeddings
        length = self.cos.shape[1]
        self.future = torch.ones(length, length, dtype=torch.bool, device=self.cos.device).triu(1)
        self.group = self.attention.num_key_value_groups
        self.key_value_heads = self.attention.config.num_key_value_heads
        # (heads, head_dim, hidden_size): what a head's output adds to the residual stream
        head_dim = self.attention.head_dim
        self.output_weight = self.attention.o_proj.weight.T.unflatten(0, (-1, head_dim)).contiguous()

    def project(self, hidden_states: torch.Tensor) -> Projections:
        """Args: hidden_states `(length, hidden_size)`: what the layer gets."""
        inputs = self.layer.input_layernorm(hidden_states)
        query, _ = self.attention.project_queries_and_keys(inputs[None])
        query = rotate(query.transpose(1, 2), self.cos[:, None], self.sin[:, None])  # (1, heads, length, head_dim)
        raw_key = self.attention.k_proj(inputs)
        value = self.attention.v_proj(inputs).unflatten(-1, (-1, self.attention.head_dim)).transpose(0, 1)
        return Projections(inputs, query[0], raw_key, self.keys(raw_key), value)

    def keys(self, raw_key: torch.Tensor) -> torch.Tensor:
        """`(key_value_heads, length, head_dim)` of what `k_proj` returns."""
        key = raw_key.unflatten(-1, (-1, self.attention.head_dim))
        if self.attention.config.qk_norm:
            key = self.attention.k_norm(key)
        key = key.transpose(0, 1)[None]
        return rotate(key, self.cos[:, None], self.sin[:, None])[0]

    def probabilities(self, query: torch.Tensor, key: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """For each key/value head the query heads that share it, and their probabilities, `(group, length, length)`."""
        for head in range(self.key_value_heads):
            heads = slice(head * self.group, (head + 1) * self.group)
            yield heads, self.attend(query[heads], key[head])

    def attend(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Probabilities `(group, length, length)` of the query heads that share one key head `(length, head_dim)`."""
        scores = torch.matmul(query, key.T).mul_(self.attention.scaling)
        return scores.masked_fill_(self.future, -torch.inf).softmax(-1)

    def to_residual(self, head_outputs: torch.Tensor, heads: slice = slice(None)) -> torch.Tensor:
        """What each head's output, `(heads, length, head_dim)`, adds to the residual stream: `(heads, length, hidden_size)`."""
        return torch.matmul(head_outputs, self.output_weight[heads])


@dataclass
class SinkShares:
    """
    Where a layer's attention goes, averaged over windows and queries (from the second on).

    Attributes:
        first: `(heads,)`: on the first token.
        largest: `(heads,)`: on whichever key gets most, window by window.
    """

    first: torch.Tensor
    largest: torch.Tensor


def sink_shares(opened: OpenedAttention, windows: torch.Tensor) -> SinkShares:
    """Args: windows `(windows, length, hidden_size)`: hidden states that the layer gets."""
    first, largest = [], []
    for hidden_states in windows:
        projections = opened.project(hidden_states.to(opened.cos.device))
        shares = torch.cat(
            [p[:, 1:].mean(1) for _, p in opened.probabilities(projections.query, projections.key)]
        )  # (heads, keys)
        first.append(shares[:, 0])
        largest.append(shares.amax(-1))
    return SinkShares(torch.stack(first).mean(0), torch.stack(largest).mean(0))
