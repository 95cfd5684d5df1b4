"""Diagnostics: what sinks, activations and gates do, in any decoder-only model of transformers."""

from .callback import DiagnosticsCallback
from .errors import InspectionError
from .inspection import inspect_model, inspect_text
from .results import Activation, GateSummary, Inspection, InspectionSettings, LayerInspection
from .streaming import StreamingResult, streaming_perplexity


__all__ = [
    "Activation",
    "DiagnosticsCallback",
    "GateSummary",
    "Inspection",
    "InspectionError",
    "InspectionSettings",
    "LayerInspection",
    "StreamingResult",
    "inspect_model",
    "inspect_text",
    "streaming_perplexity",
]
