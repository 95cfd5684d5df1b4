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
"""Decoder-only language models with gated attention: the base model and its heads."""

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_utils import PreTrainedModel, slice_logits_to_keep
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ..configuration.configuration_gated_attention import GatedAttentionConfig
from .attention import GatedAttention
from .bundle import AUTO_MAP, BUNDLED_MODULES, remove_stale_weights, weight_file_states, write_code_bundle
from .decoder import GatedAttentionDecoderLayer
from .expert_tensors import register_expert_tensors
from .forget_gate import refuse_other_backends
from .gate import is_gate_tensor
from .moe import GatedAttentionTopKRouter, router_losses
from .norm import is_zero_centered, rms_norm
from .outputs import GatedCausalLMOutputWithPast, GatedModelOutputWithPast, hands_out_gate_scores, with_gate_scores


# Here rather than where the package registers its classes, since the code also travels without the package.
register_expert_tensors(GatedAttentionConfig.model_type)

# Modules whose parameters must come from the checkpoint. Random ones ruin a model, and transformers merely warns of them.
_ESSENTIAL_PARTS = ("experts", "shared_expert", "shared_expert_gate", "f_proj")


def _is_essential(name: str) -> bool:
    parts = name.split(".")
    is_router = name.endswith(".mlp.gate.weight")
    return is_gate_tensor(name) or is_router or any(part in _ESSENTIAL_PARTS for part in parts)


class GatedAttentionPreTrainedModel(PreTrainedModel):
    """
    What the base model and its heads share: loading that insists on the gates, and saving that carries the code along.
    """

    config: GatedAttentionConfig
    config_class = GatedAttentionConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["GatedAttentionDecoderLayer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _can_record_outputs = {
        "hidden_states": GatedAttentionDecoderLayer,
        "attentions": GatedAttention,
        "gate_scores": OutputRecorder(GatedAttention, index=2),
        "router_logits": OutputRecorder(GatedAttentionTopKRouter, index=0),
    }

    def _check_and_adjust_attn_implementation(self, *args, **kwargs):
        chosen = super()._check_and_adjust_attn_implementation(*args, **kwargs)
        if self.config.forget_gate:
            refuse_other_backends(chosen)
        return chosen

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # transformers looks for a decorator in this file; the experts are in another one.
        return True

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, GatedAttentionTopKRouter):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
        elif isinstance(module, Qwen3MoeExperts):
            init.normal_(module.gate_up_proj, mean=0.0, std=self.config.initializer_range)
            init.normal_(module.down_proj, mean=0.0, std=self.config.initializer_range)
        elif is_zero_centered(module):
            init.zeros_(module.weight)
        # A mark, since this hook does not see names.
        if not getattr(module, "is_gate_projection", False):
            return
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if weight is not None and self.config.gate_initializer_range is not None:
            init.normal_(weight, mean=0.0, std=self.config.gate_initializer_range)
        if bias is not None:
            init.constant_(bias, self.config.gate_initial_bias)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, output_loading_info=False, **kwargs):
        """
        As [`~transformers.PreTrainedModel.from_pretrained`], except that a gate, a router or an expert which the checkpoint
        lacks is an error: transformers would fill it with random numbers, which ruins the model, and merely warn. Where nothing
        at all was loaded (an empty `state_dict`), the model is a new one, as everywhere in transformers.

        Raises:
            `ValueError`: the checkpoint has no tensor, or one of another shape, for one of them.
        """
        model, loading_info = super().from_pretrained(
            pretrained_model_name_or_path, *model_args, output_loading_info=True, **kwargs
        )
        all_missing = set(loading_info.get("missing_keys", ()))
        loaded_something = any(name not in all_missing for name, _ in model.named_parameters())
        missing = {name for name in all_missing if _is_essential(name) and loaded_something}
        # A mismatched key comes as (name, shape on disk, shape in the model).
        missing |= {entry[0] for entry in loading_info.get("mismatched_keys", ()) if _is_essential(entry[0])}
        gates = sorted(name for name in missing if is_gate_tensor(name))
        if gates:
            raise ValueError(
                f"{pretrained_model_name_or_path or 'the state_dict'} does not fill these gates: {', '.join(gates)}. A checkpoint "
                "without gates gets them with `gated-attention convert SOURCE TARGET`; one that had them is damaged and "
                "should be fetched or converted again"
            )
        if missing:
            raise ValueError(
                f"{pretrained_model_name_or_path or 'the state_dict'} does not fill these parts: {', '.join(sorted(missing))}. It is "
                "damaged, or the config is another model's, or a field of it was given anew: fetch it again, or load it with its own "
                "config"
            )
        return (model, loading_info) if output_loading_info else model

    def save_pretrained(
        self,
        save_directory,
        is_main_process: bool = True,
        state_dict: dict | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = "50GB",
        variant: str | None = None,
        token: str | bool | None = None,
        **kwargs,
    ):
        """
        As [`~transformers.PreTrainedModel.save_pretrained`], and the folder is self-contained: it holds the model's code
        and an `auto_map`, so that `trust_remote_code=True` loads it where this package is not installed. Weight files of
        an earlier save that transformers would leave, and then load instead of the new ones, are removed.
        """
        # Of an adapter only the adapter is saved; its code is the base model's.
        bundles = self.should_save_on_this_rank(is_main_process) and not getattr(self, "_hf_peft_config_loaded", False)
        before = weight_file_states(save_directory, variant)
        if bundles:
            self.config.auto_map = dict(AUTO_MAP)
            # Before the weights: `push_to_hub=True` uploads from within the parent's method.
            write_code_bundle(save_directory)
        super().save_pretrained(
            save_directory,
            is_main_process=is_main_process,
            state_dict=state_dict,
            push_to_hub=push_to_hub,
            max_shard_size=max_shard_size,
            variant=variant,
            token=token,
            **kwargs,
        )
        if bundles:
            remove_stale_weights(save_directory, variant, before)

    def _get_files_timestamps(self, working_dir):
        # By these `save_pretrained(push_to_hub=True)` tells what is new and to be uploaded. The code is there by then.
        code = {f"{name}.py" for name in BUNDLED_MODULES.values()}
        timestamps = super()._get_files_timestamps(working_dir)
        return {name: time for name, time in timestamps.items() if name not in code}


class GatedAttentionModel(GatedAttentionPreTrainedModel):
    """The decoder without a head: `config.num_hidden_layers` layers of [`GatedAttentionDecoderLayer`]."""

    def __init__(self, config: GatedAttentionConfig):
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size

        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(
            [GatedAttentionDecoderLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
        )
        self.norm = rms_norm(config, config.hidden_size)
        # Phi-3's reads `partial_rotary_factor` and is otherwise Llama's.
        self.rotary_emb = Phi3RotaryEmbedding(config=config)
        self.gradient_checkpointing = False

        self.post_init()

    @hands_out_gate_scores
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> GatedModelOutputWithPast:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(batch, sequence)`): Token ids; or give `inputs_embeds`.
            attention_mask (`torch.Tensor` of shape `(batch, sequence)`): 1 for tokens, 0 for padding.
            position_ids (`torch.LongTensor` of shape `(batch, sequence)`):
                Positions; restarting ones, without a mask and without a cache, separate packed documents.
            cache (`Cache`): Keys and values of the tokens before these.
            inputs_embeds (`torch.Tensor` of shape `(batch, sequence, hidden_size)`): Instead of `input_ids`.
            use_cache (`bool`): Whether to return a cache.
            kwargs: Among them `output_gate_scores`, which returns the gate scores of each layer, and those that every model
                of transformers knows (`output_attentions`, `output_hidden_states`, ...).

        Returns:
            `GatedModelOutputWithPast` with `last_hidden_state` of shape `(batch, sequence, hidden_size)`.
        """
        if (input_ids is None) ^ (inputs_embeds is not None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")

        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if self.config.embedding_multiplier != 1.0:
            # A later pipeline stage gets hidden states in place of embeddings; transformers has emptied its first layer.
            later_stage = type(self.layers[0]).__name__ == "PipelineIdentityLayer"
            if not later_stage:
                inputs_embeds = inputs_embeds * self.config.embedding_multiplier

        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)

        if position_ids is None:
            past_seen_tokens = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_seen_tokens
            position_ids = position_ids.unsqueeze(0)

        # `generate` may have prepared the masks already, one for each type of layer.
        if not isinstance(masks := attention_mask, dict):
            mask_of = {
                "full_attention": create_causal_mask,
                "sliding_attention": create_sliding_window_causal_mask,
            }
            masks = {
                layer_type: mask_of[layer_type](
                    config=self.config,
                    inputs_embeds=inputs_embeds,
                    attention_mask=attention_mask,
                    cache=cache,
                    position_ids=position_ids,
                    # Decay is added to the mask, so there has to be one.
                    allow_is_causal_skip=not self.config.forget_gate,
                )
                for layer_type in dict.fromkeys(self.config.layer_types)
            }

        hidden_states = inputs_embeds
        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)

        layer_types = self.config.layer_types
        for layer_idx, decoder_layer in enumerate(self.layers[: self.config.num_hidden_layers]):
            hidden_states = decoder_layer(
                hidden_states,
                attention_mask=masks[layer_types[layer_idx]],
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                cache=cache,
                use_cache=use_cache,
                **kwargs,
            )

        hidden_states = self.norm(hidden_states)
        return GatedModelOutputWithPast(last_hidden_state=hidden_states, cache=cache)


class GatedAttentionForCausalLM(GatedAttentionPreTrainedModel, GenerationMixin):
    """The decoder with a language modelling head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: GatedAttentionConfig):
        super().__init__(config)
        self.model = GatedAttentionModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> GatedCausalLMOutputWithPast:
        """
        Args are those of [`GatedAttentionModel.forward`], and:
            labels (`torch.LongTensor` of shape `(batch, sequence)`):
                Token ids to predict, shifted inside; -100 is ignored.
            output_router_logits (`bool`):
                Whether to return the routers' logits and losses, and to add the losses, times their coefficients in the
                config, to `loss`. Defaults to the config's `output_router_logits`.
            logits_to_keep (`int` or `torch.Tensor`): Compute the last so many logits only (0: all), or those at indices.

        Returns:
            `GatedCausalLMOutputWithPast` with `logits` of shape `(batch, sequence, vocab_size)`.
        """
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits

        outputs: GatedModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_router_logits=output_router_logits,
            **kwargs,
        )

        hidden_states = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
        logits = self.lm_head(hidden_states)
        if self.config.logits_scaling != 1.0:
            logits = logits / self.config.logits_scaling

        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)

        aux_loss = z_loss = None
        if output_router_logits and outputs.router_logits:
            aux_loss, z_loss = router_losses(self.config, outputs.router_logits, attention_mask)
            for coefficient, of_routers in (
                (self.config.router_aux_loss_coef, aux_loss),
                (self.config.router_z_loss_coef, z_loss),
            ):
                if loss is not None and coefficient:
                    loss = loss + coefficient * of_routers.to(loss.device)

        return GatedCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            gate_scores=outputs.gate_scores,
            router_logits=outputs.router_logits,
            aux_loss=aux_loss,
            z_loss=z_loss,
        )


class GatedAttentionForSequenceClassification(GenericForSequenceClassification, GatedAttentionPreTrainedModel):
    """The decoder with a head that reads the last token of each sequence."""

    def __init__(self, config: GatedAttentionConfig):
        # Not the generic head's: it asks AutoModel, which knows the class only where this package is installed.
        super(GenericForSequenceClassification, self).__init__(config)
        self.num_labels = config.num_labels
        self.model = GatedAttentionModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)

        self.post_init()

    forward = with_gate_scores(GenericForSequenceClassification.forward)


class GatedAttentionForTokenClassification(GenericForTokenClassification, GatedAttentionPreTrainedModel):
    """The decoder with a head that classifies each token."""

    def __init__(self, config: GatedAttentionConfig):
        super(GenericForTokenClassification, self).__init__(config)
        self.num_labels = config.num_labels
        self.model = GatedAttentionModel(config)
        dropout = getattr(config, "classifier_dropout", None)
        self.dropout = nn.Dropout(0.1 if dropout is None else dropout)
        self.score = nn.Linear(config.hidden_size, config.num_labels)

        self.post_init()

    forward = with_gate_scores(GenericForTokenClassification.forward)


class GatedAttentionForQuestionAnswering(GenericForQuestionAnswering, GatedAttentionPreTrainedModel):
    """The decoder with a head that finds the first and the last token of an answer."""

    def __init__(self, config: GatedAttentionConfig):
        super(GenericForQuestionAnswering, self).__init__(config)
        self.model = GatedAttentionModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)

        self.post_init()

    forward = with_gate_scores(GenericForQuestionAnswering.forward)


__all__ = [
    "GatedAttentionForCausalLM",
    "GatedAttentionForQuestionAnswering",
    "GatedAttentionForSequenceClassification",
    "GatedAttentionForTokenClassification",
    "GatedAttentionModel",
    "GatedAttentionPreTrainedModel",
]
