"""Errors of the diagnostics."""


class InspectionError(ValueError):
    """A model or a text cannot be inspected; the message says why and what is possible instead."""
