"""`gated-attention copying`: how well models copy from their context, side by side."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from .command import LoadOptions
from .comparison_plots import draw_copying
from .comparisons import loaded_models, model_settings, prepare_folder, write_results
from .copying import CopyingResult, copying_accuracy
from .inspection import begins_with_bos
from .report import aligned, begins


@dataclass(frozen=True)
class CopyingOptions:
    """Arguments of [`copying_accuracy`]."""

    distances: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    segment: int = 32
    sequences: int = 16
    seed: int = 0
    bos: bool | None = None


def run_copying(
    models: list[str],
    load_options: LoadOptions,
    options: CopyingOptions,
    *,
    out: Path | None = None,
    echo: Callable[[str], None] = print,
) -> dict[str, list[CopyingResult]]:
    """
    In-context copying of models, side by side; models with the same tokenizer get the same sequences.

    Args:
        models: Folders or Hub ids.
        load_options: How models are loaded.
        options: The sequences.
        out (`Path`, *optional*): Folder for `copying.json` and the figure. The file is written after each model.
        echo: Where the report goes.

    Returns:
        The results of each model, by distance.

    Raises:
        [`InspectionError`]: a model or an option cannot be used.
    """
    prepare_folder(out)
    results, settings = {}, {}
    for name, model, tokenizer in loaded_models(models, load_options):
        results[name] = copying_accuracy(model, tokenizer, **asdict(options), name=name)
        settings[name] = model_settings(model, bos=begins_with_bos(tokenizer, options.bos), seed=options.seed)
        del model
        found = {
            name: {"settings": settings[name], "distances": [result.to_dict() for result in runs]}
            for name, runs in results.items()
        }
        write_results(out, "copying.json", found)
    lines = [
        f"{name}: {options.sequences} sequences a distance, {options.segment} tokens repeated, {begins(settings[name]['bos'])}; "
        f"{settings[name]['dtype']}"
        for name in results
    ]
    echo("\n".join(lines) + "\n\n" + aligned(copying_rows(results)))
    if out is not None:
        draw_copying(results, out)
        echo(f"\ncopying.json and the figure are in {out}")
    return results


def copying_rows(results: dict[str, list[CopyingResult]]) -> list[list[str]]:
    """Accuracy, then loss, by distance: a header and one row a figure, one column a model."""
    rows = [["", *results]]
    for label, figure in (
        ("accuracy", _accuracy),
        ("loss", lambda result: f"{result.loss:.3f}"),
        ("loss where they come first", lambda result: f"{result.first_loss:.3f}"),
    ):
        for results_at in zip(*results.values(), strict=True):
            rows.append([f"{label}, distance {results_at[0].distance:,}", *map(figure, results_at)])
    return rows


def _accuracy(result: CopyingResult) -> str:
    error = "" if result.accuracy_error is None else f" ± {result.accuracy_error:.1%}"
    return f"{result.accuracy:.1%}{error}"
