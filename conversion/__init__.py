"""Conversion of checkpoints: read, plan, write, verify."""

from .convert import ConversionResult, convert_checkpoint
from .errors import ConversionError, NothingToTransferError
from .families import FAMILIES, Family
from .plan import ConversionOptions, ConversionPlan, plan_conversion
from .reverify import Verification, verify_conversion
from .sink_transfer import TransferOptions, TransferReport, predict_transfer, transfer_sinks
from .stock import StockResult, export_checkpoint, strip_checkpoint


__all__ = [
    "FAMILIES",
    "ConversionError",
    "ConversionOptions",
    "ConversionPlan",
    "ConversionResult",
    "Family",
    "NothingToTransferError",
    "StockResult",
    "TransferOptions",
    "TransferReport",
    "Verification",
    "convert_checkpoint",
    "export_checkpoint",
    "plan_conversion",
    "predict_transfer",
    "strip_checkpoint",
    "transfer_sinks",
    "verify_conversion",
]
