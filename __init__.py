"""
Gated attention for Hugging Face models.

Importing the package registers its classes with transformers, so that `AutoModelForCausalLM.from_pretrained` knows them.
"""

import sys
from importlib import import_module
from pathlib import Path


if __name__ != "gated_attention":
    # The checkout is the package. Imported under its folder's name (pytest started in the root does that), it would bring
    # a second, incompatible copy of every class.
    raise ImportError(
        f"the gated_attention checkout was imported as {__name__!r}; install it (`pip install -e .`), write "
        "`import gated_attention`, and run the tests with `make test` or `pytest tests`"
    )

from ._version import __version__


_EXPORTS = {
    "GatedAttentionConfig": "configuration",
    "GATE_VARIANTS": "configuration",
    "PRESETS": "configuration",
    "GatedAttentionForCausalLM": "modeling_gated",
    "GatedAttentionForQuestionAnswering": "modeling_gated",
    "GatedAttentionForSequenceClassification": "modeling_gated",
    "GatedAttentionForTokenClassification": "modeling_gated",
    "GatedAttentionModel": "modeling_gated",
    "GatedAttentionPreTrainedModel": "modeling_gated",
    "ConversionError": "conversion",
    "ConversionOptions": "conversion",
    "ConversionResult": "conversion",
    "TransferOptions": "conversion",
    "convert_checkpoint": "conversion",
    "export_checkpoint": "conversion",
    "predict_transfer": "conversion",
    "strip_checkpoint": "conversion",
    "transfer_sinks": "conversion",
    "verify_conversion": "conversion",
    "UploadError": "hub.errors",
    "push_folder": "hub.push",
    "inspect_model": "diagnostics",
    "inspect_text": "diagnostics",
}

__all__ = ["__version__", *sorted(_EXPORTS)]


def __getattr__(name: str):
    if name in _EXPORTS:
        return getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# The command line registers when a command runs, so that `--help` need not wait for torch and transformers.
if Path(sys.argv[0] if sys.argv else "").name not in ("gated-attention", "gated-attention.exe"):
    import_module(".modeling_gated", __name__)
