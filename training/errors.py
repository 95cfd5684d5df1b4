"""Errors of the recipe."""


class RecipeError(ValueError):
    """A recipe cannot be run; the message names the key, the rule, what was found, and the way out."""
