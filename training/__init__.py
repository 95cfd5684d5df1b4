"""Continue pretraining or adapt a model, from one recipe."""

from .errors import DivergedError, RecipeError
from .heal import HealingOptions, heal, healing_recipe
from .parameter_groups import gate_parameters, groups_table, optimizer_groups, resolve_groups
from .recipe import DataSource, Diagnostics, Distillation, Lora, ParameterGroup, Recipe, load_recipe, make_recipe
from .run import TrainingResult, train


__all__ = [
    "DataSource",
    "Diagnostics",
    "Distillation",
    "DivergedError",
    "HealingOptions",
    "Lora",
    "ParameterGroup",
    "Recipe",
    "RecipeError",
    "TrainingResult",
    "gate_parameters",
    "groups_table",
    "heal",
    "healing_recipe",
    "load_recipe",
    "make_recipe",
    "optimizer_groups",
    "resolve_groups",
    "train",
]
