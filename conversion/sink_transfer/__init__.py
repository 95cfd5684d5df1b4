"""Sink transfer: the conversion that hands the attention sink's work to the gates."""

from .report import LayerReport, TransferReport, TransferSettings
from .transfer import TransferOptions, predict_transfer, transfer_sinks


__all__ = [
    "LayerReport",
    "TransferOptions",
    "TransferReport",
    "TransferSettings",
    "predict_transfer",
    "transfer_sinks",
]
