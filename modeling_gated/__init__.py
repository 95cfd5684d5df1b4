"""Models with gated attention; importing this registers them with transformers' Auto classes."""

from .modeling_gated_attention import (
    GatedAttentionForCausalLM,
    GatedAttentionForQuestionAnswering,
    GatedAttentionForSequenceClassification,
    GatedAttentionForTokenClassification,
    GatedAttentionModel,
    GatedAttentionPreTrainedModel,
)
from .registration import register


register()

__all__ = [
    "GatedAttentionForCausalLM",
    "GatedAttentionForQuestionAnswering",
    "GatedAttentionForSequenceClassification",
    "GatedAttentionForTokenClassification",
    "GatedAttentionModel",
    "GatedAttentionPreTrainedModel",
]
