"""Errors of the conversion."""


class ConversionError(ValueError):
    """A checkpoint cannot be converted; the message says what was found, where, and the way out."""
