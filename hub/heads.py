"""The heads that a model can have: which Auto class loads it, what the Hub calls its task, and what it gives out."""

from dataclasses import dataclass

from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto

from ..configuration import GatedAttentionConfig
from ..modeling_gated.bundle import AUTO_MAP
from .errors import UploadError


@dataclass(frozen=True)
class Head:
    """
    One kind of head.

    Attributes:
        auto_class: Name of the Auto class that loads it.
        pipeline_tag: The Hub's name of the task.
        outputs: Names of the outputs that are compared.
        mapping: transformers' table from `model_type` to the class.
    """

    auto_class: str
    pipeline_tag: str
    outputs: tuple[str, ...]
    mapping: str

    def class_names(self, model_type: str) -> tuple[str, ...]:
        """The classes that have this head in a model family."""
        if model_type == GatedAttentionConfig.model_type:
            return (AUTO_MAP[self.auto_class].rpartition(".")[2],)
        names = getattr(modeling_auto, self.mapping).get(model_type, ())
        return (names,) if isinstance(names, str) else tuple(names)


HEADS = (
    Head("AutoModelForCausalLM", "text-generation", ("logits",), "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    Head(
        "AutoModelForSequenceClassification",
        "text-classification",
        ("logits",),
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    ),
    Head(
        "AutoModelForTokenClassification",
        "token-classification",
        ("logits",),
        "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    ),
    Head(
        "AutoModelForQuestionAnswering",
        "question-answering",
        ("start_logits", "end_logits"),
        "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    ),
    Head("AutoModel", "feature-extraction", ("last_hidden_state",), "MODEL_MAPPING_NAMES"),
)


def head_of(config: PreTrainedConfig) -> Head:
    """
    The head that a config's `architectures` names; without that field a causal language model's.

    Raises:
        `UploadError`: it names a class that no Auto class loads for this `model_type`.
    """
    architectures = config.architectures or []
    if not architectures:
        return HEADS[0]
    for head in HEADS:
        if architectures[0] in head.class_names(config.model_type):
            return head
    known = [name for head in HEADS for name in head.class_names(config.model_type)]
    raise UploadError(
        f"config.json: architectures must name one of {', '.join(known)} for model_type {config.model_type!r}, got "
        f"{architectures}; save the model with `save_pretrained`"
    )
