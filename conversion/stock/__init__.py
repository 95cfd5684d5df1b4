"""Out again: a gated model as a stock architecture of transformers."""

from .check import LARGEST_ERROR, LARGEST_RATIO, LogitError, StockComparison
from .export import StockResult, export_checkpoint, strip_checkpoint
from .plan import StockPlan, plan_export, plan_strip


__all__ = [
    "LARGEST_ERROR",
    "LARGEST_RATIO",
    "LogitError",
    "StockComparison",
    "StockPlan",
    "StockResult",
    "export_checkpoint",
    "plan_export",
    "plan_strip",
    "strip_checkpoint",
]
