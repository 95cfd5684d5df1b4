"""Errors of the recipe."""


class RecipeError(ValueError):
    """A recipe cannot be run; the message names the key, the rule, what was found, and the way out."""


class DivergedError(RecipeError):
    """
    The loss of a training is no number any more.

    Attributes:
        step: The step at which it was found, counted from 1.
        history: What Trainer logged before.
    """

    def __init__(self, message: str, step: int, history: list[dict] | None = None):
        super().__init__(message)
        self.step = step
        self.history = history or []
