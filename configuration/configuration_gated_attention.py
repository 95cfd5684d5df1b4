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
from copy import deepcopy
from dataclasses import fields
from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from .gate_variants import GATE_PROJECTIONS, GATE_VARIANTS
from .presets import PRESETS


_POSITIVE_ROPE_VALUES = (
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "partial_rotary_factor",
)


# What says something of experts, and nothing of a dense model.
_EXPERT_FIELDS = (
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "shared_expert_intermediate_size",
    "shared_expert_gate",
    "router_logits_dtype",
    "router_scores_dtype",
    "output_router_logits",
    "router_aux_loss_coef",
    "router_z_loss_coef",
)


def _is_positive(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


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
        zero_centered_norm (`bool`, *optional*, defaults to `False`):
            Whether the RMSNorms multiply by `1 + weight`, with weights that are 0 at first, as in Qwen3-Next.
        forget_gate (`bool`, *optional*, defaults to `False`):
            Whether attention fades with each token, by a factor that a head computes from the layer's input (`f_proj`):
            the forget gate of the Forgetting Transformer (arXiv 2503.02130). Eager and SDPA attention only.
        attention_dropout (`float`, *optional*, defaults to 0.0): Dropout on the attention probabilities.
        layer_types (`list[str]`, *optional*):
            `"full_attention"` or `"sliding_attention"` for each layer. Defaults to `"sliding_attention"` everywhere if
            `sliding_window` is given, and to `"full_attention"` everywhere if not.
        sliding_window (`int`, *optional*):
            How many tokens, its own included, a token sees in layers of `"sliding_attention"`; as in other configs it may
            stand where no layer is of that type.
        no_rope_layers (`list[int]`, *optional*):
            For each layer 1 if it rotates queries and keys and 0 if it has no positions, as in SmolLM3 (where the name
            is from). Defaults to 1 everywhere, and to 0 with a `forget_gate`, which tells near from far.
        embedding_multiplier (`float`, *optional*, defaults to 1.0): Factor on the embeddings (this and the next three as in Granite).
        residual_multiplier (`float`, *optional*, defaults to 1.0): Factor on what attention and MLP add to the residual stream.
        attention_multiplier (`float`, *optional*): Factor on the attention logits. Defaults to `head_dim ** -0.5`.
        logits_scaling (`float`, *optional*, defaults to 1.0): What the language model's logits are divided by.
        num_experts (`int`, *optional*, defaults to 0):
            Number of experts of a sparse layer; 0 is a dense model. This and the next fields are named as in Qwen3-MoE.
        num_experts_per_tok (`int`, *optional*): How many experts a token goes through; must be given with `num_experts`.
        moe_intermediate_size (`int`, *optional*): Width of an expert; must be given with `num_experts`.
        norm_topk_prob (`bool`, *optional*, defaults to `False`):
            Whether the scores of a token's experts are divided by their sum.
        mlp_layer_types (`list[str]`, *optional*):
            `"sparse"` or `"dense"` for each layer. Defaults to `"sparse"` everywhere if there are experts.
        shared_expert_intermediate_size (`int`, *optional*):
            Width of an expert that every token of a sparse layer goes through (Qwen2-MoE, Qwen3-Next). Defaults to none.
        shared_expert_gate (`bool`, *optional*, defaults to `False`):
            Whether the shared expert's output is multiplied by the sigmoid of a projection of its input.
        router_logits_dtype (`str`, *optional*, defaults to `"model"`):
            `"model"`: the router multiplies in the model's format. `"float32"`: in float32.
        router_scores_dtype (`str`, *optional*, defaults to `"model"`):
            Format in which the experts' outputs are weighted: `"model"` (as in Qwen3-MoE) or `"float32"` (as in Mixtral).
        output_router_logits (`bool`, *optional*, defaults to `False`):
            Whether the router's logits are returned, and the two losses below added to that of the language model.
        router_aux_loss_coef (`float`, *optional*):
            Factor on the load-balancing loss. Defaults to 0.001, and to 0 without experts: trainers (TRL's) take another value
            for a sign of experts.
        router_z_loss_coef (`float`, *optional*, defaults to 0.0): Factor on the z-loss, which keeps the router's logits small.
        gate_positions (`list[str]`, *optional*, defaults to `["sdpa_output"]`):
            What is gated (paper, section 2.2), in brackets the projection of the gate logits. `"sdpa_output"`: each head's
            attention output before `o_proj` (G1, the best position; `g_proj`). `"value"`, `"key"`, `"query"`: the result of
            `v_proj` (G2; `g_proj_v`), of `k_proj` (G3; `g_proj_k`) and of `q_proj` (G4; `g_proj_q`), the latter two after
            QK-norm and before RoPE. `"dense_output"`: the result of `o_proj` (G5; `g_proj_o`). Several may be named. `[]` is a
            model without gates: the paper's baseline.
        gate_granularity (`str`, *optional*, defaults to `"elementwise"`):
            `"elementwise"`: one gate a channel, `g_proj` is `hidden_size x (num_attention_heads * head_dim)`.
            `"headwise"`: one gate a head, `g_proj` is `hidden_size x num_attention_heads`.
        gate_sharing (`str`, *optional*, defaults to `"head_specific"`):
            `"head_specific"`: each head has its own scores. `"head_shared"`: all heads get the mean of the heads' scores
            (paper, section 3.2.1); `g_proj` keeps its size.
        gate_operator (`str`, *optional*, defaults to `"multiply"`):
            `"multiply"`: `Y * scores`. `"add"`: `Y + scores`.
        gate_activation (`str`, *optional*, defaults to `"sigmoid"`):
            What turns gate logits into gate scores: `"sigmoid"`, `"silu"`, `"ns_sigmoid"` (non-sparse: `0.5 + 0.5 *
            sigmoid`), `"softplus"` or `"identity"`.
        gate_input (`str`, *optional*, defaults to `"hidden_states"`):
            `"hidden_states"`: the logits are a projection of the layer's normalised input. `"none"`: they are a parameter,
            zero at first, the same for every token (input-independent, paper, table 4).
        gate_input_size (`int`, *optional*):
            How many of the input's first channels the projection reads (modded-nanogpt: 12). Defaults to all.
        gate_layers (`list[int]`, *optional*): Indices of the layers that have gates. Defaults to all.
        gate_bias (`bool`, *optional*, defaults to `False`): Whether the projection of the gate logits has a bias.
        gate_scale (`float`, *optional*, defaults to 1.0): Factor on the gate scores; positive.
        gate_initializer_range (`float`, *optional*):
            Standard deviation of new gate weights; with 0 a new gate does not depend on its input. Defaults to
            `initializer_range`.
        gate_initial_bias (`float`, *optional*, defaults to 0.0): Value of new gate biases (AlphaFold2: 1).
        sdpa_output_nonlinearity (`str`, *optional*):
            What happens to each head's attention output before any gate (paper, section 4.1, non-linearity without a
            gate): `"rms_norm"` over the head's channels, with one weight for all heads as in QK-norm, or `"silu"`.

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
    attribute_map = {"num_local_experts": "num_experts"}

    # The gate's rows belong to heads, so `g_proj` is split as `q_proj` is.
    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.f_proj": "colwise",
        "layers.*.self_attn.g_proj": "colwise",
        "layers.*.self_attn.g_proj_v": "colwise",
        "layers.*.self_attn.g_proj_k": "colwise",
        "layers.*.self_attn.g_proj_q": "colwise",
        "layers.*.self_attn.g_proj_o": "colwise_gather_output",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        "layers.*.mlp.experts.down_proj": "rowwise",
        "layers.*.mlp.experts": "moe_tp_experts",
        "layers.*.mlp.shared_expert.gate_proj": "colwise",
        "layers.*.mlp.shared_expert.up_proj": "colwise",
        "layers.*.mlp.shared_expert.down_proj": "rowwise",
    }
    base_model_ep_plan = {
        "layers.*.mlp.experts.gate_up_proj": "grouped_gemm",
        "layers.*.mlp.experts.down_proj": "grouped_gemm",
        "layers.*.mlp.experts": "ep_dispatch_experts",
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
    zero_centered_norm: bool = False
    forget_gate: bool = False
    attention_dropout: int | float | None = 0.0
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    sliding_window: int | None = None
    no_rope_layers: list[int] | None = None
    embedding_multiplier: int | float = 1.0
    residual_multiplier: int | float = 1.0
    attention_multiplier: int | float | None = None
    logits_scaling: int | float = 1.0

    num_experts: int = 0
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool = False
    mlp_layer_types: list[Literal["dense", "sparse"]] | None = None
    shared_expert_intermediate_size: int | None = None
    shared_expert_gate: bool = False
    router_logits_dtype: Literal["model", "float32"] = "model"
    router_scores_dtype: Literal["model", "float32"] = "model"
    output_router_logits: bool = False
    router_aux_loss_coef: int | float | None = None
    router_z_loss_coef: int | float = 0.0

    gate_positions: list[Literal["sdpa_output", "value", "key", "query", "dense_output"]] | None = None
    gate_granularity: Literal["elementwise", "headwise"] = "elementwise"
    gate_sharing: Literal["head_specific", "head_shared"] = "head_specific"
    gate_operator: Literal["multiply", "add"] = "multiply"
    gate_activation: Literal["sigmoid", "silu", "ns_sigmoid", "softplus", "identity"] = "sigmoid"
    gate_input: Literal["hidden_states", "none"] = "hidden_states"
    gate_input_size: int | None = None
    gate_layers: list[int] | None = None
    gate_bias: bool = False
    gate_scale: int | float = 1.0
    gate_initializer_range: int | float | None = None
    gate_initial_bias: int | float = 0.0
    sdpa_output_nonlinearity: Literal["rms_norm", "silu"] | None = None

    def __post_init__(self, **kwargs):
        self._refuse_foreign_fields(kwargs)
        if "num_local_experts" in kwargs:
            if self.num_experts not in (0, kwargs["num_local_experts"]):
                raise ValueError(
                    f"`num_experts` and `num_local_experts` are one field, got {self.num_experts} and "
                    f"{kwargs['num_local_experts']}"
                )
            self.num_experts = kwargs.pop("num_local_experts")
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
        if self.layer_types is None:
            kind = "full_attention" if self.sliding_window is None else "sliding_attention"
            self.layer_types = [kind] * self.num_hidden_layers
        if self.no_rope_layers is None:
            self.no_rope_layers = [0 if self.forget_gate else 1] * self.num_hidden_layers
        if self.mlp_layer_types is None:
            self.mlp_layer_types = ["sparse" if self.num_experts else "dense"] * self.num_hidden_layers
        if not self.num_experts and self.router_aux_loss_coef in (None, 0.001):
            self.router_aux_loss_coef = 0.0  # dense checkpoints of before have 0.001
        elif self.router_aux_loss_coef is None:
            self.router_aux_loss_coef = 0.001
        self._refuse_rope_values()
        self.base_model_tp_plan = self._tensor_parallel_plan()
        self.base_model_ep_plan = dict(type(self).base_model_ep_plan) if self.num_experts else None
        super().__post_init__(**kwargs)

    @classmethod
    def from_variant(cls, variant: str, **fields) -> "GatedAttentionConfig":
        """
        The config of a named gate variant.

        Args:
            variant (`str`): A key of [`~configuration.GATE_VARIANTS`], such as `"g1_elementwise"`.
            fields: Further fields of the config; where the variant sets the same one, these count.

        Raises:
            `ValueError`: there is no such variant.
        """
        if variant not in GATE_VARIANTS:
            raise ValueError(f"`variant` must be one of {', '.join(GATE_VARIANTS)}; got {variant!r}")
        return cls(**{**deepcopy(GATE_VARIANTS[variant].fields), **fields})

    @classmethod
    def from_preset(
        cls, preset: str, variant: str = "baseline", equal_parameters: bool = False, **fields
    ) -> "GatedAttentionConfig":
        """
        The config of one of the paper's models, with a gate variant.

        Args:
            preset (`str`): A key of [`~configuration.PRESETS`], such as `"15a2b"`.
            variant (`str`): A key of [`~configuration.GATE_VARIANTS`].
            equal_parameters (`bool`):
                Whether the MLP, or each expert, is made narrower by what the gates weigh, as the paper does for its dense
                models (section 3.1). Its width stays a multiple of 8, which matrix products of 16-bit numbers ask for, so the
                number of parameters is that of the baseline to within 4 channels.
            fields: Further fields of the config; where preset or variant set the same one, these count.

        Raises:
            `ValueError`: there is no such preset or variant, or the gates weigh more than the MLP.
        """
        if preset not in PRESETS:
            raise ValueError(f"`preset` must be one of {', '.join(PRESETS)}; got {preset!r}")
        config = cls.from_variant(variant, **PRESETS[preset].fields | fields)
        if equal_parameters:
            name = "moe_intermediate_size" if config.num_experts else "intermediate_size"
            steps = round(config._gate_parameters() / config._mlp_parameters_per_channel() / 8)
            width = getattr(config, name) - 8 * steps
            if width < 1:
                raise ValueError(
                    f"`equal_parameters` must be False for variant {variant!r}: its gates weigh more than the MLP of {preset!r}"
                )
            config = cls.from_variant(variant, **PRESETS[preset].fields | fields | {name: width})
        return config

    def _gate_parameters(self) -> int:
        """Number of parameters of all gates, those of the forget gate included."""
        count = 0
        for position in self.gate_positions:
            inputs = 0 if self.gate_input == "none" else self.gate_input_size or self.hidden_size
            count += self.gate_width(position) * (inputs + (self.gate_bias or self.gate_input == "none"))
        gated = sum(self.layer_has_gate(layer_idx) for layer_idx in range(self.num_hidden_layers))
        forget = self.num_hidden_layers * self.num_attention_heads * (self.hidden_size + 1)
        return gated * count + (forget if self.forget_gate else 0)

    def _mlp_parameters_per_channel(self) -> int:
        """How many parameters the dense layers, or the experts of the sparse ones, lose with a channel less."""
        kind = "sparse" if self.num_experts else "dense"
        return 3 * self.hidden_size * (self.num_experts or 1) * self.mlp_layer_types.count(kind)

    def gate_width(self, position: str) -> int:
        """Number of gate logits a token at a position: one a head (headwise) or one a channel (elementwise)."""
        if position == "dense_output":
            # What `o_proj` returns has no heads; a headwise gate is refused there.
            return self.hidden_size
        heads = self.num_key_value_heads if position in ("value", "key") else self.num_attention_heads
        return heads if self.gate_granularity == "headwise" else heads * self.head_dim

    def layer_has_gate(self, layer_idx: int) -> bool:
        """Whether a layer has the gates that `gate_positions` names."""
        return bool(self.gate_positions) and (self.gate_layers is None or layer_idx in self.gate_layers)

    def _tensor_parallel_plan(self) -> dict[str, str]:
        """The class's plan, less what this config has no modules for: a gate's rows belong to the heads it gates."""
        plan = dict(type(self).base_model_tp_plan)
        attention, mlp = "layers.*.self_attn.", "layers.*.mlp."
        absent = [] if "dense" in self.mlp_layer_types else [f"{mlp}{name}_proj" for name in ("gate", "up", "down")]
        absent += [] if "sparse" in self.mlp_layer_types else [f"{mlp}experts"]
        absent += [] if self.forget_gate else [f"{attention}f_proj"]
        absent += [] if self.shared_expert_intermediate_size else [f"{mlp}shared_expert"]
        plan = {name: style for name, style in plan.items() if not name.startswith(tuple(absent))}
        if self.gate_sharing == "head_shared":
            # The mean over heads needs all of them on every device, forward and backward.
            return {name: style for name, style in plan.items() if not name.startswith(attention)}
        for position, name in GATE_PROJECTIONS.items():
            if position not in self.gate_positions:
                plan.pop(f"{attention}{name}", None)
        # Every device normalises its own heads with the whole weight.
        norms = ["q_norm", "k_norm"] if self.qk_norm else []
        norms += ["sdpa_norm"] if self.sdpa_output_nonlinearity == "rms_norm" else []
        return plan | {f"{attention}{name}": "replicated_with_grad_allreduce" for name in norms}

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
        of_layers = ("mlp_only_layers", "decoder_sparse_step", "first_k_dense_replace")
        of_experts = ("n_routed_experts", "n_shared_experts")
        # A config that was saved has the fields in which these are said here.
        if self.mlp_layer_types is None:
            for name in (*of_layers, *of_experts):
                if name in unknown:
                    instead = (
                        "`mlp_layer_types`"
                        if name in of_layers
                        else "`num_experts` or `shared_expert_intermediate_size`"
                    )
                    raise TypeError(f"`{name}` is not a field of GatedAttentionConfig: set {instead}")
        for name in unknown:
            prefix = name.partition("_")[0]
            if prefix in (
                "gate",
                "sdpa",
                "qk",
                "router",
                "shared",
                "forget",
            ):  # not the prefixes of anything that every config has
                known = [field.name for field in fields(self) if field.name.startswith(f"{prefix}_")]
                closest = difflib.get_close_matches(name, known, n=1) or known
                raise TypeError(
                    f"`{name}` is not a field of GatedAttentionConfig: did you mean {' or '.join(closest)}?"
                )

    def _refuse_rope_values(self) -> None:
        """transformers computes with them before its own checks, most of which warn."""
        for name, value in (self.rope_parameters or {}).items():
            named = f"`rope_parameters.{name}`"
            if name in ("short_factor", "long_factor"):
                if not (isinstance(value, list) and value and all(_is_positive(factor) for factor in value)):
                    raise ValueError(f"{named} must be a list of positive numbers, got {value!r}")
            elif name in _POSITIVE_ROPE_VALUES and value is not None and not _is_positive(value):
                raise ValueError(f"{named} must be a positive finite number, got {value!r}")

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
        if self.max_position_embeddings < 1:
            raise ValueError(f"`max_position_embeddings` must be at least 1, got {self.max_position_embeddings}")
        if not 0 <= self.attention_dropout < 1:
            raise ValueError(f"`attention_dropout` must be 0 or more and below 1, got {self.attention_dropout}")
        if not _is_positive(self.rms_norm_eps):
            raise ValueError(f"`rms_norm_eps` must be a positive finite number, got {self.rms_norm_eps}")
        if not (math.isfinite(self.initializer_range) and self.initializer_range >= 0):
            raise ValueError(f"`initializer_range` must be a finite number, 0 or more, got {self.initializer_range}")
        if self.pad_token_id is not None and self.pad_token_id >= self.vocab_size:
            raise ValueError(f"`pad_token_id` must be below `vocab_size` ({self.vocab_size}), got {self.pad_token_id}")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"`hidden_act` must be an activation of transformers, got {self.hidden_act!r}")
        for name in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"):
            value = getattr(self, name)
            if value is not None and not _is_positive(value):
                raise ValueError(f"`{name}` must be a positive finite number, got {value}")
        self._validate_rotary_dimensions()
        self._validate_layer_lists()
        self._validate_experts()
        self._validate_gates()

    def _validate_rotary_dimensions(self) -> None:
        rope_types = ("default", *ROPE_INIT_FUNCTIONS)
        if self.rope_parameters.get("rope_type") not in rope_types:
            raise ValueError(
                f"`rope_parameters` must have a `rope_type` among {rope_types}, and be the same for all layers, got "
                f"{self.rope_parameters}"
            )
        factor = self.rope_parameters.get("partial_rotary_factor", 1.0)
        if not (isinstance(factor, (int, float)) and 0 < factor <= 1):
            raise ValueError(f"`rope_parameters.partial_rotary_factor` must be above 0 and at most 1, got {factor}")
        if self.rope_parameters["rope_theta"] == 1.0:
            raise ValueError("`rope_parameters.rope_theta` must not be 1: all channels would turn at one speed; got 1")
        rotated = int(self.head_dim * factor)
        for name in ("short_factor", "long_factor"):
            if name in self.rope_parameters and len(self.rope_parameters[name]) != rotated // 2:
                raise ValueError(
                    f"`rope_parameters.{name}` must have a factor for each of the {rotated // 2} rotated pairs of channels, got "
                    f"{len(self.rope_parameters[name])}"
                )
        if rotated % 2 != 0 or rotated == 0:
            raise ValueError(
                "`head_dim` times `partial_rotary_factor` must be even and not 0, since RoPE rotates pairs of channels, "
                f"got {self.head_dim} times {factor}"
            )

    def _validate_layer_lists(self) -> None:
        for name in ("layer_types", "no_rope_layers", "mlp_layer_types"):
            if len(getattr(self, name)) != self.num_hidden_layers:
                raise ValueError(
                    f"`{name}` must have one entry for each of the {self.num_hidden_layers} layers "
                    f"(`num_hidden_layers`), got {len(getattr(self, name))}"
                )
        if not set(self.no_rope_layers) <= {0, 1}:
            raise ValueError(
                f"`no_rope_layers` must hold 1 (with RoPE) or 0 (without) for each layer, got {self.no_rope_layers}"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"`sliding_window` must be at least 1, got {self.sliding_window}")
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError(
                "`sliding_window` must be given where `layer_types` has a layer of 'sliding_attention'; got None and "
                f"{self.layer_types}"
            )

    def _validate_experts(self) -> None:
        if self.num_experts < 0:
            raise ValueError(f"`num_experts` must be 0 (a dense model) or more, got {self.num_experts}")
        if self.num_experts == 0:
            if "sparse" in self.mlp_layer_types:
                raise ValueError(
                    f"`mlp_layer_types` must not name 'sparse' layers where `num_experts` is 0; got {self.mlp_layer_types}"
                )
            for field in fields(self):
                default = 0.0 if field.name == "router_aux_loss_coef" else field.default
                if field.name in _EXPERT_FIELDS and getattr(self, field.name) != default:
                    raise ValueError(
                        f"`{field.name}` must be left out where `num_experts` is 0, a dense model; got "
                        f"{getattr(self, field.name)!r}"
                    )
            return
        if "sparse" not in self.mlp_layer_types:
            raise ValueError(
                f"`num_experts` must be 0 where `mlp_layer_types` has no 'sparse' layer; got {self.num_experts}"
            )
        for name in ("num_experts_per_tok", "moe_intermediate_size"):
            if getattr(self, name) is None or getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}` must be given, at least 1, where `num_experts` is {self.num_experts}; got {getattr(self, name)}"
                )
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"`num_experts_per_tok` must be at most `num_experts` ({self.num_experts}): a token cannot go through more "
                f"experts than there are; got {self.num_experts_per_tok}"
            )
        if self.shared_expert_intermediate_size is not None and self.shared_expert_intermediate_size < 1:
            raise ValueError(
                f"`shared_expert_intermediate_size` must be at least 1, got {self.shared_expert_intermediate_size}; leave it "
                "out for none"
            )
        if self.shared_expert_gate and self.shared_expert_intermediate_size is None:
            raise ValueError(
                "`shared_expert_gate` needs a shared expert: give `shared_expert_intermediate_size`; got True"
            )
        if self.mlp_bias and "dense" not in self.mlp_layer_types:
            raise ValueError("`mlp_bias` must be False where every layer is sparse: experts have no biases; got True")
        for name in ("router_aux_loss_coef", "router_z_loss_coef"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"`{name}` must be a finite number, 0 or more, got {getattr(self, name)}")

    def _validate_gates(self) -> None:
        if len(self.gate_positions) != len(set(self.gate_positions)):
            raise ValueError(f"`gate_positions` must not name a position twice, got {self.gate_positions}")
        if not self.gate_positions:
            defaults = {field.name: field.default for field in fields(self) if field.name.startswith("gate_")}
            for name, default in defaults.items():
                if name != "gate_positions" and getattr(self, name) != default:
                    raise ValueError(
                        f"`{name}` must be left out where `gate_positions` is [], a model without gates; got "
                        f"{getattr(self, name)!r}"
                    )
        if not _is_positive(self.gate_scale):
            raise ValueError(f"`gate_scale` must be a positive finite number, got {self.gate_scale}")
        deviation = self.gate_initializer_range
        if deviation is not None and not (math.isfinite(deviation) and deviation >= 0):
            raise ValueError(f"`gate_initializer_range` must be a finite number, 0 or more, got {deviation}")
        if not math.isfinite(self.gate_initial_bias):
            raise ValueError(f"`gate_initial_bias` must be a finite number, got {self.gate_initial_bias}")
        if "dense_output" in self.gate_positions:
            # o_proj has mixed the heads.
            for name, value in (("gate_granularity", "headwise"), ("gate_sharing", "head_shared")):
                if getattr(self, name) == value:
                    raise ValueError(
                        f"`{name}` must not be {value!r} where `gate_positions` names 'dense_output', which has no heads; "
                        f"got {self.gate_positions}"
                    )
        if self.gate_input == "none":
            for name in ("gate_bias", "gate_input_size", "gate_initializer_range"):
                if getattr(self, name) is not None and getattr(self, name) is not False:
                    raise ValueError(
                        f"`{name}` must be left out where `gate_input` is 'none': nothing is projected; got "
                        f"{getattr(self, name)!r}"
                    )
        elif self.gate_initial_bias and not self.gate_bias:
            raise ValueError(
                f"`gate_initial_bias` needs `gate_bias=True` (or `gate_input='none'`), got {self.gate_initial_bias}"
            )
        if self.gate_input_size is not None and not 1 <= self.gate_input_size <= self.hidden_size:
            raise ValueError(
                f"`gate_input_size` must be between 1 and `hidden_size` ({self.hidden_size}), got {self.gate_input_size}"
            )
        if self.gate_layers is not None:
            layers = range(self.num_hidden_layers)
            if not self.gate_layers or sorted(set(self.gate_layers)) != self.gate_layers:
                raise ValueError(
                    f"`gate_layers` must be ascending layer indices, at least one, none twice, got {self.gate_layers}; a "
                    "model without gates has `gate_positions=[]`"
                )
            if self.gate_layers[0] < 0 or self.gate_layers[-1] not in layers:
                raise ValueError(
                    f"`gate_layers` must be within 0 and {layers[-1]} (`num_hidden_layers` - 1), got {self.gate_layers}"
                )


__all__ = ["GatedAttentionConfig"]
