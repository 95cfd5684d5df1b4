"""Diagnostics: what sinks, activations and gates do, in any decoder-only model of transformers."""

from .copying import CopyingResult, copying_accuracy
from .errors import InspectionError
from .inspection import inspect_model, inspect_text
from .low_bit import LowBitResult, low_bit_perplexity
from .low_bit_layers import LayerCosts, layer_costs
from .prompts import Answer, answer_prompts
from .results import Activation, GateSummary, Inspection, InspectionSettings, LayerInspection
from .smoothing import smooth_model
from .streaming import StreamingResult, streaming_perplexity


__all__ = [
    "Activation",
    "Answer",
    "CopyingResult",
    "DiagnosticsCallback",
    "GateSummary",
    "Inspection",
    "InspectionError",
    "InspectionSettings",
    "LayerCosts",
    "LayerInspection",
    "LowBitResult",
    "StreamingResult",
    "answer_prompts",
    "copying_accuracy",
    "inspect_model",
    "inspect_text",
    "layer_costs",
    "low_bit_perplexity",
    "smooth_model",
    "streaming_perplexity",
]


def __getattr__(name: str):
    # It brings Trainer and datasets along, which take longer to import than all of the rest.
    if name == "DiagnosticsCallback":
        from .callback import DiagnosticsCallback

        return DiagnosticsCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
