"""Errors of the conversion."""


class ConversionError(ValueError):
    """A checkpoint cannot be converted; the message says what was found, where, and the way out."""


class NothingToTransferError(ConversionError):
    """The model has no attention sink whose work gates could do; the message says what it has instead."""
