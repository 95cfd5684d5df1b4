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

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb, eager_attention_forward
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs

from .gate import apply_gate, gate_projection


class GatedAttention(nn.Module):
    """
    Grouped-query attention with RoPE and a gate on its output (paper, equation 5 at position G1).

    The gate works on what the attention interface returns, so eager, SDPA, Flex and FlashAttention need no change, and
    it is a projection of its own, so that PEFT and optimizers can name it and no source tensor has to change.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True

        query_width = config.num_attention_heads * self.head_dim
        key_value_width = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=config.qk_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_value_width, bias=config.qk_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_value_width, bias=config.v_bias)
        if config.qk_norm:
            self.q_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.g_proj = gate_projection(config)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=config.o_bias)

    def project_queries_and_keys(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys before RoPE, of shape `(batch, heads, sequence, head_dim)`, normalised if `qk_norm` says so."""
        hidden_shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query_states = self.q_proj(hidden_states).view(hidden_shape)
        key_states = self.k_proj(hidden_states).view(hidden_shape)
        if self.config.qk_norm:
            query_states, key_states = self.q_norm(query_states), self.k_norm(key_states)
        return query_states.transpose(1, 2), key_states.transpose(1, 2)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        input_shape = hidden_states.shape[:-1]  # (batch, sequence)
        hidden_shape = (*input_shape, -1, self.head_dim)

        query_states, key_states = self.project_queries_and_keys(hidden_states)
        # (batch, heads, sequence, head_dim)
        value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)

        cos, sin = position_embeddings
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)

        if cache is not None:
            key_states, value_states = cache.update(key_states, value_states, self.layer_idx, kwargs=kwargs)

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
            **kwargs,
        )

        attn_output = apply_gate(
            attn_output, self.g_proj(hidden_states), self.config.gate_activation, self.config.gate_scale
        )
        attn_output = attn_output.reshape(*input_shape, -1).contiguous()  # (batch, sequence, heads * head_dim)
        return self.o_proj(attn_output), attn_weights
