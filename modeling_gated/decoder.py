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
"""The decoder layer: pre-norm gated attention and a pre-norm gated MLP, dense or sparse."""

import torch
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs

from .attention import GatedAttention
from .moe import GatedAttentionSparseMLP
from .norm import rms_norm


class GatedAttentionDecoderLayer(GradientCheckpointingLayer):
    """
    One layer. `hidden_states` goes in and out with shape `(batch, sequence, hidden_size)`; the gate reads what q, k and
    v read: the output of `input_layernorm`.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.hidden_size = config.hidden_size
        self.residual_multiplier = config.residual_multiplier
        self.self_attn = GatedAttention(config, layer_idx)
        sparse = config.mlp_layer_types[layer_idx] == "sparse"
        self.mlp = GatedAttentionSparseMLP(config) if sparse else LlamaMLP(config)
        self.input_layernorm = rms_norm(config, config.hidden_size)
        self.post_attention_layernorm = rms_norm(config, config.hidden_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _, _ = self.self_attn(
            hidden_states=hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        hidden_states = residual + self._scaled(hidden_states)

        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        return residual + self._scaled(hidden_states)

    def _scaled(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states if self.residual_multiplier == 1.0 else hidden_states * self.residual_multiplier
