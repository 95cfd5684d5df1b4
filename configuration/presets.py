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
"""The models of arXiv 2505.06708 by name: their shapes, without gates."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """
    Attributes:
        fields: What the preset sets in [`GatedAttentionConfig`]; no gates among it.
        source: What the paper calls the model.
        perplexity: What the paper reports for it without gates, after 400B tokens (mixture of experts only).
    """

    fields: dict[str, Any]
    source: str
    perplexity: float | None = None


_COMMON = {
    "vocab_size": 151936,  # of Qwen's tokenizer
    "head_dim": 128,
    "qk_norm": True,
    "max_position_embeddings": 4096,
}

_DENSE = _COMMON | {"num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True}

_SPARSE = _COMMON | {
    "num_hidden_layers": 24,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    # The paper names a load-balancing loss and a z-loss, without coefficients; the one here is ST-MoE's.
    "norm_topk_prob": True,
    "output_router_logits": True,
    "router_z_loss_coef": 0.001,
}

PRESETS = {
    "1.7b_28_layers": Preset(
        _DENSE | {"num_hidden_layers": 28, "hidden_size": 2048, "intermediate_size": 6144}, "1.7B dense, 28 layers"
    ),
    # Hidden size and MLP width follow from the paper's parameters of the gate and its 1.7B.
    "1.7b_48_layers": Preset(
        _DENSE | {"num_hidden_layers": 48, "hidden_size": 1536, "intermediate_size": 4608}, "1.7B dense, 48 layers"
    ),
    "15a2b": Preset(_SPARSE, "15A2B mixture of experts", 6.026),
    # The paper's baselines with more parameters, against which the gates' are to be held.
    "15a2b_more_key_value_heads": Preset(_SPARSE | {"num_key_value_heads": 8}, "15A2B with 8 key/value heads", 5.979),
    "15a2b_more_query_heads": Preset(_SPARSE | {"num_attention_heads": 48}, "15A2B with 48 query heads", 5.953),
    "15a2b_more_experts": Preset(_SPARSE | {"num_experts": 132}, "15A2B with 4 more experts", 5.964),
}
