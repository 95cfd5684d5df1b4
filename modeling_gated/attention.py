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
"""Grouped-query attention whose output is gated."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs

from ..configuration.gate_variants import GATE_PROJECTIONS
from .forget_gate import (
    forgetting_mask,
    keys_with_gates,
    log_forget_gates,
    refuse_other_backends,
    split_gates,
)
from .gate import apply_gate, gate_projection, gate_scores
from .norm import rms_norm
from .rotary import rotate_together


# Fields of the config that every step reads.
STEP_FIELDS = (
    "forget_gate",
    "gate_activation",
    "gate_input_size",
    "gate_operator",
    "gate_scale",
    "gate_sharing",
    "qk_norm",
    "sdpa_output_nonlinearity",
)


class GatedAttention(nn.Module):
    """
    Grouped-query attention with RoPE and gates (paper, equation 5; by default at G1, on the attention output).

    The gate at G1 works on what the attention interface returns, so eager, SDPA, Flex and FlashAttention need no change, and
    every gate has a projection of its own, so that PEFT and optimizers can name it and no source tensor has to change.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.config = config
        # A config looks each attribute up among its other names, which takes a microsecond; a decoded token would pay a dozen a layer.
        self.step_settings = SimpleNamespace(**{name: getattr(config, name) for name in STEP_FIELDS})
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5 if config.attention_multiplier is None else config.attention_multiplier
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        self.layer_type = config.layer_types[layer_idx]
        self.sliding_window = config.sliding_window if self.layer_type == "sliding_attention" else None
        self.use_rope = bool(config.no_rope_layers[layer_idx])
        self.gate_positions = tuple(config.gate_positions) if config.layer_has_gate(layer_idx) else ()
        self.gates_before_attention = not {"query", "key", "value"}.isdisjoint(self.gate_positions)

        query_width = config.num_attention_heads * self.head_dim
        key_value_width = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=config.qk_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_value_width, bias=config.qk_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_value_width, bias=config.v_bias)
        if config.qk_norm:
            self.q_norm = rms_norm(config, self.head_dim)
            self.k_norm = rms_norm(config, self.head_dim)
        if config.sdpa_output_nonlinearity == "rms_norm":
            self.sdpa_norm = rms_norm(config, self.head_dim)
        if config.forget_gate:
            self.f_proj = nn.Linear(config.hidden_size, config.num_attention_heads)
        for position in self.gate_positions:
            setattr(self, GATE_PROJECTIONS[position], gate_projection(config, position))
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=config.o_bias)

    def gate_logits(self, position: str, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """
        From the layer's normalised input, `(batch, sequence, hidden_size)`, to the logits of the gate at a position, `(batch, sequence, heads *
        channels)`; None if this layer has no gate there.
        """
        if position not in self.gate_positions:
            return None
        if self.step_settings.gate_input_size is not None:
            hidden_states = hidden_states[..., : self.step_settings.gate_input_size]
        return getattr(self, GATE_PROJECTIONS[position])(hidden_states)

    def gate(
        self, position: str, states: torch.Tensor, gate_logits: torch.Tensor | None, scores: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """
        Gate what is at a position, if there are logits for it.

        Args:
            position (`str`): Where it is.
            states (`torch.Tensor` of shape `(batch, sequence, heads, channels)`): What is gated.
            gate_logits (`torch.Tensor`, *optional*): What [`GatedAttention.gate_logits`] returned.
            scores (`dict[str, torch.Tensor]`): Gets the gate's scores, of shape `(batch, sequence, heads or 1, channels or 1)`.

        Returns:
            `torch.Tensor` of the shape of `states`.
        """
        if gate_logits is None:
            return states
        scores[position] = gate_scores(self.step_settings, gate_logits, states.shape[-2])
        return apply_gate(states, scores[position], self.step_settings.gate_operator)

    def project_queries_and_keys(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys before gates and RoPE, of shape `(batch, sequence, heads, head_dim)`, normalised if `qk_norm` says so."""
        hidden_shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query_states = self.q_proj(hidden_states).view(hidden_shape)
        key_states = self.k_proj(hidden_states).view(hidden_shape)
        if self.step_settings.qk_norm:
            query_states, key_states = self.q_norm(query_states), self.k_norm(key_states)
        return query_states, key_states

    def rotate(
        self, query_states: torch.Tensor, key_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """RoPE on queries and keys `(batch, heads, sequence, head_dim)`, on all channels or on the first ones, or none."""
        if not self.use_rope:
            return query_states, key_states
        return rotate_together(query_states, key_states, cos.unsqueeze(1), sin.unsqueeze(1))

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | tuple[torch.Tensor, ...]]:
        """
        Returns:
            What the layer adds to the residual stream, `(batch, sequence, hidden_size)`; the attention probabilities if the
            backend has them; and the gate scores, `(batch, sequence, heads or 1, channels or 1)`: a tensor where there is one
            gate, else a tuple in the order of `config.gate_positions`, empty for a layer without gates.
        """
        input_shape = hidden_states.shape[:-1]  # (batch, sequence)
        scores = {}

        # With the other products of the input: after one that goes through large weights, all that follows comes from memory again, code too.
        output_gate_logits = self.gate_logits("sdpa_output", hidden_states)
        query_states, key_states = self.project_queries_and_keys(hidden_states)
        value_states = self.v_proj(hidden_states).view(*input_shape, -1, self.head_dim)
        if self.gates_before_attention:
            query_states = self.gate("query", query_states, self.gate_logits("query", hidden_states), scores)
            key_states = self.gate("key", key_states, self.gate_logits("key", hidden_states), scores)
            value_states = self.gate("value", value_states, self.gate_logits("value", hidden_states), scores)
        # (batch, heads, sequence, head_dim)
        query_states, key_states = query_states.transpose(1, 2), key_states.transpose(1, 2)
        value_states = value_states.transpose(1, 2)

        query_states, key_states = self.rotate(query_states, key_states, *position_embeddings)

        if self.step_settings.forget_gate:
            refuse_other_backends(self.config._attn_implementation)
            log_forget = log_forget_gates(self.f_proj(hidden_states), self.num_key_value_groups)
            key_states = key_states if cache is None else keys_with_gates(key_states, log_forget)

        if cache is not None:
            key_states, value_states = cache.update(key_states, value_states, self.layer_idx, kwargs=kwargs)

        if self.step_settings.forget_gate:
            if cache is not None:
                key_states, log_forget = split_gates(key_states, self.head_dim)
            attention_mask = forgetting_mask(attention_mask, log_forget, query_states.shape[-2], query_states.dtype)

        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        # attn_output: (batch, sequence, heads, head_dim)
        attn_output, attn_weights = attention_interface(
            self,
            query_states,
            key_states,
            value_states,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )

        if self.step_settings.sdpa_output_nonlinearity == "rms_norm":
            attn_output = self.sdpa_norm(attn_output)
        elif self.step_settings.sdpa_output_nonlinearity == "silu":
            attn_output = nn.functional.silu(attn_output)
        attn_output = self.gate("sdpa_output", attn_output, output_gate_logits, scores)
        attn_output = attn_output.reshape(*input_shape, -1).contiguous()  # (batch, sequence, heads * head_dim)
        attn_output = self.o_proj(attn_output)
        if "dense_output" in self.gate_positions:
            dense_logits = self.gate_logits("dense_output", hidden_states)
            attn_output = self.gate("dense_output", attn_output.unsqueeze(-2), dense_logits, scores).squeeze(-2)

        ordered = tuple(scores[position] for position in self.gate_positions)
        return attn_output, attn_weights, ordered[0] if len(ordered) == 1 else ordered
