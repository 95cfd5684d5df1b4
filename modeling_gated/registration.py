"""Makes the classes known to transformers' Auto classes and to PEFT. Importing `gated_attention` calls it."""

from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from ..configuration import GatedAttentionConfig
from .modeling_gated_attention import (
    GatedAttentionForCausalLM,
    GatedAttentionForQuestionAnswering,
    GatedAttentionForSequenceClassification,
    GatedAttentionForTokenClassification,
    GatedAttentionModel,
)


_MODELS = {
    AutoModel: GatedAttentionModel,
    AutoModelForCausalLM: GatedAttentionForCausalLM,
    AutoModelForQuestionAnswering: GatedAttentionForQuestionAnswering,
    AutoModelForSequenceClassification: GatedAttentionForSequenceClassification,
    AutoModelForTokenClassification: GatedAttentionForTokenClassification,
}


def register() -> None:
    """Register config, models and the default LoRA targets; calling it again changes nothing."""
    AutoConfig.register(GatedAttentionConfig.model_type, GatedAttentionConfig, exist_ok=True)
    for auto_class, model_class in _MODELS.items():
        auto_class.register(GatedAttentionConfig, model_class, exist_ok=True)
    # PEFT's own default for Llama.
    TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.setdefault(
        GatedAttentionConfig.model_type, ["q_proj", "v_proj"]
    )
