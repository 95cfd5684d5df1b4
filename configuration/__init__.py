"""Configuration of gated attention models."""

if __name__ != "gated_attention.configuration":
    # A second import of this folder under another name would make a second, incompatible `GatedAttentionConfig`.
    raise ImportError(
        f"this folder was imported as {__name__!r}; install the project (`pip install -e .`) and write "
        "`from gated_attention import GatedAttentionConfig` instead"
    )

from .configuration_gated_attention import GatedAttentionConfig
from .gate_variants import GATE_VARIANTS, GateVariant
from .presets import PRESETS, Preset


__all__ = ["GATE_VARIANTS", "PRESETS", "GateVariant", "GatedAttentionConfig", "Preset"]
