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
"""Configuration of decoder-only language models with gated attention."""

import difflib
import math
from dataclasses import fields
from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters


@strict
class GatedAttentionConfig(PreTrainedConfig):
    r"""
    Configuration of [`GatedAttentionModel`]: a pre-norm decoder whose attention output is multiplied by a gate that is
    computed from the layer's input (Qiu et al., "Gated Attention for Large Language Models", arXiv 2505.06708).

    With the defaults the gate is that of Qwen3-Next: elementwise, a sigmoid, no bias. `gate_scale=2.0` is what the
    conversion of trained checkpoints uses: with zero weights the gate is then `2 * sigmoid(0) = 1`, exactly.

    Args:
        vocab_size (`int`, *optional*, defaults to 32000): Number of tokens.
        hidden_size (`int`, *optional*, defaults to 2048): Width of the residual stream.
        intermediate_size (`int`, *optional*, defaults to 6144): Width of the MLP.
        num_hidden_layers (`int`, *optional*, defaults to 28): Number of decoder layers.
        num_attention_heads (`int`, *optional*, defaults to 16): Number of query heads.
        num_key_value_heads (`int`, *optional*):
            Number of key/value heads; must divide `num_attention_heads`. Defaults to `num_attention_heads`.
        head_dim (`int`, *optional*):
            Width of a head; even, since RoPE rotates pairs. Defaults to `hidden_size // num_attention_heads`.
        hidden_act (`str`, *optional*, defaults to `"silu"`): Activation of the MLP.
        max_position_embeddings (`int`, *optional*, defaults to 4096): Longest sequence the model is meant for.
        initializer_range (`float`, *optional*, defaults to 0.02):
            Standard deviation of new weights, those of the gate included (paper, section 3.1).
        rms_norm_eps (`float`, *optional*, defaults to 1e-6): Epsilon of the RMSNorms.
        use_cache (`bool`, *optional*, defaults to `True`): Whether the model returns its key/value cache.
        pad_token_id, bos_token_id, eos_token_id (`int`, *optional*): Special tokens; `eos_token_id` may be a list.
        tie_word_embeddings (`bool`, *optional*, defaults to `False`): Whether the head shares the embedding's weight.
        rope_parameters (`dict`, *optional*): RoPE settings as in transformers (`rope_theta`, `rope_type`, ...).
        qk_bias, v_bias, o_bias (`bool`, *optional*, defaults to `False`):
            Whether `q_proj` and `k_proj`, `v_proj`, `o_proj` have a bias. They replace the one `attention_bias` of
            other configs, which means different projections in different families.
        mlp_bias (`bool`, *optional*, defaults to `False`): Whether the MLP's projections have a bias.
        qk_norm (`bool`, *optional*, defaults to `False`):
            Whether queries and keys go through an RMSNorm over each head's channels before RoPE, as in Qwen3. The gate
            does not.
        attention_dropout (`float`, *optional*, defaults to 0.0): Dropout on the attention probabilities.
        gate_positions (`list[str]`, *optional*, defaults to `["sdpa_output"]`):
            What is gated. `"sdpa_output"`: each head's attention output before `o_proj` (G1 in the paper, its best
            position).
        gate_granularity (`str`, *optional*, defaults to `"elementwise"`):
            `"elementwise"`: one gate a channel of a head, `g_proj` is `hidden_size x (num_attention_heads * head_dim)`.
            `"headwise"`: one gate a head, `g_proj` is `hidden_size x num_attention_heads`.
        gate_activation (`str`, *optional*, defaults to `"sigmoid"`): What turns gate logits into gate scores.
        gate_bias (`bool`, *optional*, defaults to `False`): Whether `g_proj` has a bias.
        gate_scale (`float`, *optional*, defaults to 1.0): Factor on the gate scores; positive.

    Raises:
        `StrictDataclassError`: a field has the wrong type, a value outside its set, or contradicts another field.
        `TypeError`: an unknown `gate_*` field, or `attention_bias`.
        `ValueError`: the fields are those of another model's config.

    ```python
    >>> from gated_attention import GatedAttentionConfig, GatedAttentionForCausalLM

    >>> config = GatedAttentionConfig(num_hidden_layers=2, gate_granularity="headwise")
    >>> model = GatedAttentionForCausalLM(config)
    ```"""

    model_type = "gated_attention"

    # The gate's rows belong to heads, so `g_proj` is split as `q_proj` is.
    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.g_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 32000
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 4096
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False
    rope_parameters: RopeParameters | dict | None = None
    qk_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_dropout: int | float | None = 0.0

    gate_positions: list[Literal["sdpa_output"]] | None = None
    gate_granularity: Literal["elementwise", "headwise"] = "elementwise"
    gate_activation: Literal["sigmoid"] = "sigmoid"
    gate_bias: bool = False
    gate_scale: int | float = 1.0

    def __post_init__(self, **kwargs):
        self._refuse_foreign_fields(kwargs)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads != 0:
                raise ValueError(
                    f"`head_dim` must be given when `hidden_size` ({self.hidden_size}) is not a multiple of "
                    f"`num_attention_heads` ({self.num_attention_heads})"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.attention_dropout is None:
            self.attention_dropout = 0.0
        if self.gate_positions is None:
            self.gate_positions = ["sdpa_output"]
        if self.qk_norm:
            # Every device normalises its own heads with the whole weight.
            norms = (f"layers.*.self_attn.{name}" for name in ("q_norm", "k_norm"))
            self.base_model_tp_plan = self.base_model_tp_plan | dict.fromkeys(norms, "replicated_with_grad_allreduce")
        super().__post_init__(**kwargs)

    def _refuse_foreign_fields(self, unknown: dict) -> None:
        """`PreTrainedConfig` keeps unknown arguments as attributes; a misspelt gate field would silently do nothing."""
        if unknown.get("model_type", self.model_type) != self.model_type:
            raise ValueError(
                f"a config with model_type {unknown['model_type']!r} describes another model than {self.model_type!r}: add "
                "gates to the checkpoint with `gated-attention convert SOURCE TARGET` and load TARGET"
            )
        if "attention_bias" in unknown:
            raise TypeError(
                "`attention_bias` is not a field of GatedAttentionConfig, since it means different projections in "
                "different model families: set `qk_bias`, `v_bias` and `o_bias`"
            )
        for name in unknown:
            if name.startswith("gate_"):
                known = [field.name for field in fields(self) if field.name.startswith("gate_")]
                closest = difflib.get_close_matches(name, known, n=1) or known
                raise TypeError(
                    f"`{name}` is not a field of GatedAttentionConfig: did you mean {' or '.join(closest)}?"
                )

    def validate_architecture(self):
        """Part of `@strict`-powered validation: the rules that involve more than a field's type."""
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}")
        if self.num_attention_heads % self.num_key_value_heads != 0:
            raise ValueError(
                f"`num_key_value_heads` must divide `num_attention_heads` ({self.num_attention_heads}), "
                f"got {self.num_key_value_heads}"
            )
        if self.head_dim % 2 != 0:
            raise ValueError(f"`head_dim` must be even, since RoPE rotates pairs of channels, got {self.head_dim}")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"`hidden_act` must be an activation of transformers, got {self.hidden_act!r}")
        rope_types = ("default", *ROPE_INIT_FUNCTIONS)
        if self.rope_parameters["rope_type"] not in rope_types:
            raise ValueError(f"`rope_parameters.rope_type` must be one of {rope_types}, got {self.rope_parameters}")
        if len(self.gate_positions) != len(set(self.gate_positions)):
            raise ValueError(f"`gate_positions` must not name a position twice, got {self.gate_positions}")
        if not self.gate_positions:
            raise ValueError(
                "`gate_positions` must name at least one position, got []; a model without gates is better served by "
                "its stock class in transformers"
            )
        if not (math.isfinite(self.gate_scale) and self.gate_scale > 0):
            raise ValueError(f"`gate_scale` must be a positive finite number, got {self.gate_scale}")


__all__ = ["GatedAttentionConfig"]
