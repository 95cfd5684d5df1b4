"""`gated-attention transfer`: transfers sinks, then shows the model before and after on text that took no part."""

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

from ...diagnostics.command import LoadOptions, TextOptions, write_report
from ...diagnostics.errors import InspectionError
from ...diagnostics.inspection import inspect_model, windows_of
from ...diagnostics.plots import check_plots
from ...diagnostics.report import aligned, settings_line, summary_rows
from ...diagnostics.results import Inspection
from ...diagnostics.texts import read_text
from ..errors import ConversionError
from .calibration import calibration_windows
from .report import TransferReport
from .transfer import REPORT_FILE, TransferOptions, load_tokenizer, predict_transfer, transfer_sinks


# Figures that the report keeps of each test.
_KEPT = ("perplexity", "f_attn", "largest_key_share", "sink_rate", "m_act", "largest_activation", "gate_mean")


@dataclass(frozen=True)
class ShowOptions:
    """
    What the result is shown on.

    Attributes:
        texts: Text files of other kinds, beside the end of the calibration text.
        dtype: Format that both models are loaded in.
        out: Folder for figures, page and JSON; None: none are made.
    """

    texts: tuple[Path, ...] = ()
    dtype: str = "auto"
    out: Path | None = None


def run_transfer(
    source: Path,
    target: Path | None,
    calibration_text: Path | None,
    options: TransferOptions,
    tests: ShowOptions,
    *,
    report_only: bool = False,
    echo: Callable[[str], None] = print,
) -> TransferReport:
    """
    Transfer sinks and show what came of it, or only predict it.

    Args:
        source, target: Folders. A prediction needs no target, and does not look at one.
        calibration_text: Text file; None: Python's own help pages.
        options: How sinks are transferred. `test_tokens` is also the number of tokens of each test; for the tests the source
            and then the result are loaded as a whole.
        tests: What the result is shown on.
        report_only: Whether to predict and write nothing.
        echo: Where reports go.

    Raises:
        `ConversionError`, `InspectionError`: something cannot be read, converted or written.
    """
    if target is None and not report_only:
        raise ConversionError("give the folder to make as TARGET, or --report-only")
    if report_only and tests.texts:
        raise ConversionError("--test shows a result, and --report-only makes none: leave one of them out")
    text, text_name = TextOptions(text=calibration_text).read()
    if report_only:
        _make_folder(tests.out, source)
        report = predict_transfer(source, text, options, text_name=text_name)
        echo(report.describe())
        if tests.out is not None:
            report.save(tests.out / REPORT_FILE)
        return report

    # All that can be wrong with the tests is found before the work.
    load = LoadOptions(dtype=tests.dtype, device=options.device)
    load.check()
    windows, bos = (
        windows_of_tests(source, text, text_name, options, tests.texts) if options.test_tokens else ({}, False)
    )
    if tests.out is not None:
        check_plots()
        _make_folder(tests.out, source)

    report = transfer_sinks(source, target, text, options, text_name=text_name)
    echo(report.describe())
    if windows:
        try:
            found = inspect_folders({"before": source, "after": target}, windows, bos, load)
        except InspectionError as error:
            raise InspectionError(f"{target} is complete, but could not be shown: {error}") from error
        for name, inspections in found.items():
            echo(f"\n{name}, {settings_line(inspections[0])}\n{aligned(summary_rows(inspections))}")
        summaries = {
            name: [{key: inspection.summary()[key] for key in _KEPT} for inspection in inspections]
            for name, inspections in found.items()
        }
        report = replace(report, tests=summaries)
        report.save(target / REPORT_FILE)
        if tests.out is not None:
            for number, inspections in enumerate(found.values(), start=1):
                _draw(inspections, tests.out if len(found) == 1 else tests.out / f"test_{number}")
    if tests.out is not None:
        report.save(tests.out / REPORT_FILE)
        echo(f"\nthe report and what was drawn are in {tests.out}")
    return report


def _make_folder(out: Path | None, source: Path) -> None:
    if out is None:
        return
    if source.resolve() in (out.resolve(), *out.resolve().parents):
        raise ConversionError(
            f"the folder for figures {out} lies in the source, which is never written to; give another"
        )
    if out.exists() and not out.is_dir():
        raise ConversionError(f"{out} is a file; give a folder for the figures (--out)")
    out.mkdir(parents=True, exist_ok=True)


def windows_of_tests(
    source: Path, text: str, text_name: str, options: TransferOptions, texts: Iterable[Path]
) -> tuple[dict[str, list[torch.Tensor]], bool]:
    """
    The windows of each test text, by name, and whether they begin with BOS: the end of `text`, which no calibration with these options
    sees, and the files `texts`.
    """
    tokenizer = load_tokenizer(source)
    bos = tokenizer.bos_token_id is not None
    calibration = calibration_windows(
        tokenizer, text, options.tokens, options.length, options.test_tokens, options.bos_share, options.seed
    )
    windows = {f"end of {text_name}": list(calibration.test[:, None])}
    for path in texts:
        name = path.name if path.name not in windows else str(path)
        windows[name] = windows_of(tokenizer, read_text(path), options.length, options.test_tokens, bos)[0]
    return windows, bos


def inspect_folders(
    folders: dict[str, Path], windows: dict[str, list[torch.Tensor]], bos: bool, load: LoadOptions
) -> dict[str, list[Inspection]]:
    """For each test text the inspections of the models in `folders`, by what they are called."""
    found: dict[str, list[Inspection]] = {}
    names = [folder.resolve().name for folder in folders.values()]
    for (place, folder), name in zip(folders.items(), names, strict=True):
        model, tokenizer = load.load(str(folder))
        for text_name, batches in windows.items():
            bar = tqdm(batches, desc=f"Inspecting {place}, {text_name}", unit="window", disable=None)
            inspection = inspect_model(
                model,
                ({"input_ids": window} for window in bar),
                ranks=False,
                tokenizer=tokenizer,
                name=name if len(set(names)) > 1 else place,
                bos=bos,
                text=text_name,
            )
            found.setdefault(text_name, []).append(inspection)
        del model
        gc.collect()
    return found


def _draw(inspections: list[Inspection], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, inspection in enumerate(inspections, start=1):
        inspection.save(folder / f"inspection_{number}.json")
    write_report(inspections, folder)
