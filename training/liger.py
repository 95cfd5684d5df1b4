"""Liger's kernels in gated models: norms, gated MLPs, and a loss that never holds the logits."""

from functools import wraps
from types import MethodType

import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from ..modeling_gated import GatedAttentionForCausalLM
from ..modeling_gated.norm import is_zero_centered
from ..modeling_gated.outputs import GatedCausalLMOutputWithPast
from .errors import RecipeError


def allow_liger(model: PreTrainedModel) -> None:
    """
    Make Liger know gated models, so that Trainer's `use_liger_kernel` reaches them. It passes over what it does not know.

    Raises:
        [`RecipeError`]: Liger is missing, or has no kernels for a model of this type.
    """
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise RecipeError("`use_liger_kernel` needs Liger: pip install liger-kernel") from error
    MODEL_TYPE_TO_APPLY_LIGER_FN["gated_attention"] = apply_liger_kernel_to_gated_attention
    model_type = model.config.model_type
    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise RecipeError(
            f"`use_liger_kernel` must be false for a model of type {model_type!r}: Liger has no kernels for it, and would do nothing"
        )


def apply_liger_kernel_to_gated_attention(
    rms_norm: bool = True,
    swiglu: bool = True,
    fused_linear_cross_entropy: bool = True,
    model: PreTrainedModel | None = None,
) -> None:
    """
    What Liger has for other model types, for a gated model. RoPE is left alone: ours turns part of the channels too.

    Args:
        rms_norm (`bool`): Norms in one kernel.
        swiglu (`bool`): The product of SiLU and the other half in one kernel, in dense layers.
        fused_linear_cross_entropy (`bool`): Loss and gradients of the head a few rows at a time, while training.
        model: The model, changed in place; its parameters stay as they are.
    """
    for module in model.modules():
        # Both kinds of norm; a zero-centered one is multiplied by 1 + weight, in float32.
        if rms_norm and (isinstance(module, LlamaRMSNorm) or is_zero_centered(module)):
            module.forward = MethodType(_norm, module)
        if swiglu and isinstance(module, LlamaMLP) and model.config.hidden_act in ("silu", "swish"):
            module.forward = MethodType(_mlp, module)
    if fused_linear_cross_entropy and isinstance(model, GatedAttentionForCausalLM):
        model.forward = MethodType(_with_fused_loss(type(model).forward), model)


def _norm(self, hidden_states: torch.Tensor) -> torch.Tensor:
    from liger_kernel.transformers.functional import liger_rms_norm

    zero_centered = is_zero_centered(self)
    eps = self.eps if zero_centered else self.variance_epsilon
    options = (1.0, "gemma") if zero_centered else (0.0, "llama")
    # Not in place: queries and keys are views, and the residual stream is read again.
    return liger_rms_norm(hidden_states, self.weight, eps, *options, False)


def _mlp(self, hidden_states: torch.Tensor) -> torch.Tensor:
    from liger_kernel.transformers.functional import liger_swiglu

    return self.down_proj(liger_swiglu(self.gate_proj(hidden_states), self.up_proj(hidden_states)))


def _with_fused_loss(forward):
    @wraps(forward)
    def forward_with_fused_loss(self, *args, labels=None, output_router_logits=None, **kwargs):
        routers_lose = self.config.output_router_logits if output_router_logits is None else output_router_logits
        plain = labels is None or not self.training or not isinstance(self.lm_head, torch.nn.Linear)
        if plain or args or routers_lose or "logits_to_keep" in kwargs or kwargs.get("return_dict") is False:
            kwargs |= {"labels": labels, "output_router_logits": output_router_logits}
            return forward(self, *args, **kwargs)
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        count, shifted = kwargs.pop("num_items_in_batch", None), kwargs.pop("shift_labels", None)
        outputs = self.model(**kwargs)
        if shifted is None:
            shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
        states = outputs.last_hidden_state / self.config.logits_scaling
        loss = liger_fused_linear_cross_entropy(
            states.flatten(0, 1),  # (batch * sequence, hidden_size)
            self.lm_head.weight,
            shifted.flatten().to(states.device),
            reduction="mean" if count is None else "sum",
        )
        return GatedCausalLMOutputWithPast(
            loss=loss if count is None else loss / count,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            gate_scores=outputs.gate_scores,
        )

    return forward_with_fused_loss
