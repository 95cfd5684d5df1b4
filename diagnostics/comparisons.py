"""What `gated-attention low-bit`, `copying` and `prompts` share: models one after the other, and what is said and saved of them."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path

from .._version import package_versions
from .command import LoadOptions, short_names
from .plots import check_plots


def loaded_models(models: list[str], load_options: LoadOptions) -> Iterator[tuple]:
    """Name, model and tokenizer of each, with one model in memory, if the caller lets go of each too."""
    load_options.check()
    for name, path in zip(short_names(models), models, strict=True):
        yield name, *load_options.load(path)
        gc.collect()


def model_settings(model, **settings) -> dict:
    """What figures depend on besides the model."""
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        **settings,
        "versions": package_versions(),
    }


def prepare_folder(out: Path | None, plots: bool = True) -> None:
    """What can fail does so before the work: the folder, and figures if any are to be drawn."""
    if out is not None:
        if plots:
            check_plots()
        out.mkdir(parents=True, exist_ok=True)


def write_results(out: Path | None, name: str, content: dict) -> None:
    """A JSON file; written again after each model, so that an interruption costs one model's time."""
    if out is not None:
        (out / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
