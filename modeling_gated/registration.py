"""Makes the classes known to transformers' Auto classes and to PEFT. Importing `gated_attention` calls it."""

import transformers
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

from ..configuration import GatedAttentionConfig
from . import modeling_gated_attention
from .bundle import AUTO_MAP


def register() -> None:
    """Register config, models and the default LoRA targets; calling it again changes nothing."""
    transformers.AutoConfig.register(GatedAttentionConfig.model_type, GatedAttentionConfig, exist_ok=True)
    for auto_class, reference in AUTO_MAP.items():
        if auto_class != "AutoConfig":
            model_class = getattr(modeling_gated_attention, reference.rpartition(".")[2])
            getattr(transformers, auto_class).register(GatedAttentionConfig, model_class, exist_ok=True)
    # PEFT's own default for Llama.
    TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.setdefault(
        GatedAttentionConfig.model_type, ["q_proj", "v_proj"]
    )
