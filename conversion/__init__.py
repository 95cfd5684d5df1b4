"""Conversion of checkpoints: read, plan, write, verify."""

from .convert import ConversionResult, convert_checkpoint
from .errors import ConversionError
from .families import FAMILIES, Family
from .plan import ConversionOptions, ConversionPlan, plan_conversion


__all__ = [
    "FAMILIES",
    "ConversionError",
    "ConversionOptions",
    "ConversionPlan",
    "ConversionResult",
    "Family",
    "convert_checkpoint",
    "plan_conversion",
]
