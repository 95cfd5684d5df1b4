"""`gated-attention transfer`: transfers sinks, then shows the model before and after on text that took no part."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

from ...diagnostics.command import LoadOptions
from ...diagnostics.inspection import inspect_model, windows_of
from ...diagnostics.page import write_page
from ...diagnostics.plots import check_plots, draw_inspections
from ...diagnostics.report import aligned, card_section, settings_line, summary_rows
from ...diagnostics.results import Inspection
from ...diagnostics.texts import default_text, read_text
from ..errors import ConversionError
from .calibration import calibration_windows
from .report import TransferReport
from .transfer import REPORT_FILE, TransferOptions, predict_transfer, transfer_sinks


# Figures that the report keeps of each test.
_KEPT = ("perplexity", "f_attn", "largest_key_share", "sink_rate", "m_act", "largest_activation", "gate_mean")


@dataclass(frozen=True)
class TestOptions:
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
    tests: TestOptions,
    *,
    report_only: bool = False,
    echo: Callable[[str], None] = print,
) -> TransferReport:
    """
    Transfer sinks and show what came of it, or only predict it.

    Args:
        source, target: Folders.
        calibration_text: Text file; None: Python's own help pages.
        options: How sinks are transferred. `test_tokens` is also the number of tokens of each test.
        tests: What the result is shown on.
        report_only: Whether to predict and write nothing.
        echo: Where reports go.

    Raises:
        `ConversionError`, `InspectionError`: something cannot be read, converted or written.
    """
    if target is None and not report_only:
        raise ConversionError("give the folder to make as TARGET, or --report-only")
    if tests.out is not None and not report_only:
        check_plots()
    text, text_name = (
        default_text() if calibration_text is None else (read_text(calibration_text), calibration_text.name)
    )
    others = {path.name: read_text(path) for path in tests.texts}  # before the work
    if report_only:
        report = predict_transfer(source, text, options, text_name=text_name)
        echo(report.describe())
        if tests.out is not None:
            tests.out.mkdir(parents=True, exist_ok=True)
            report.save(tests.out / REPORT_FILE)
        return report

    report = transfer_sinks(source, target, text, options, text_name=text_name)
    echo(report.describe())
    if options.test_tokens:
        found = _inspect(source, target, text, text_name, others, options, tests)
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
            report.save(tests.out / REPORT_FILE)
            echo(f"\nfigures, inspections and {REPORT_FILE} are in {tests.out}")
    return report


def _inspect(
    source: Path, target: Path, text: str, text_name: str, others: dict[str, str], options: TransferOptions, tests
) -> dict[str, list[Inspection]]:
    """For each test text the inspections of the source and of the result."""
    load = LoadOptions(dtype=tests.dtype, device=options.device)
    found: dict[str, list[Inspection]] = {}
    for place, folder in (("before", source), ("after", target)):
        model, tokenizer = load.load(str(folder))
        calibration = calibration_windows(
            tokenizer, text, options.tokens, options.length, options.test_tokens, options.bos_share, options.seed
        )
        bos = tokenizer.bos_token_id is not None
        windows = {f"end of {text_name}": calibration.test[:, None]}
        for name, other in others.items():
            windows[name] = windows_of(tokenizer, other, options.length, options.test_tokens, bos)[0]
        for name, batches in windows.items():
            bar = tqdm(batches, desc=f"Inspecting {place}, {name}", unit="window", disable=None)
            inspection = inspect_model(
                model,
                ({"input_ids": torch.as_tensor(window)} for window in bar),
                ranks=False,
                tokenizer=tokenizer,
                name=f"{folder.resolve().name}" if source.resolve().name != target.resolve().name else place,
                bos=bos,
                text=name,
            )
            found.setdefault(name, []).append(inspection)
        del model
        gc.collect()
    return found


def _draw(inspections: list[Inspection], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, inspection in enumerate(inspections, start=1):
        inspection.save(folder / f"inspection_{number}.json")
    write_page(inspections, draw_inspections(inspections, folder), folder / "inspection.html")
    (folder / "card.md").write_text(card_section(inspections), encoding="utf-8")
