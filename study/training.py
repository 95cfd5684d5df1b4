"""One training of a study: done once, gone on with after a stop, and ended where the loss is no number."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..conversion.places import TRAINING_RESULTS_FILE
from ..training import DivergedError, make_recipe, train


@dataclass(frozen=True)
class Outcome:
    """
    Attributes:
        steps: Steps that were made, or the one at which the loss was no number.
        history: What Trainer logged.
        diverged: Whether the loss was no number.
    """

    steps: int
    history: list[dict]
    diverged: bool


def train_once(content: dict[str, Any]) -> Outcome:
    """
    Train as a recipe's keys say, go on from the last checkpoint, or take what is finished in the output folder.

    Its checkpoints stay until [`remove_checkpoints`]: what comes after a training may be stopped too.
    """
    folder = Path(content["output_dir"])
    if (folder / TRAINING_RESULTS_FILE).is_file():
        state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
        return Outcome(state["global_step"], state["log_history"], diverged=False)
    try:
        found = train(make_recipe(content | {"resume_from_checkpoint": "auto"}), echo=lambda line: None, logs=False)
    except DivergedError as error:
        return Outcome(error.step, error.history, diverged=True)
    return Outcome(found.steps, found.history, diverged=False)


def remove_checkpoints(folder: Path) -> None:
    """Remove what a training would go on from, when nothing of it is needed any more."""
    for checkpoint in folder.rglob("checkpoint-*"):
        shutil.rmtree(checkpoint)


def device_of(content: dict[str, Any]) -> str:
    """Where the models of a recipe run when they are measured."""
    return "cuda" if torch.cuda.is_available() and not content.get("use_cpu") else "cpu"
