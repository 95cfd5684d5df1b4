"""Writes a gated model as a stock architecture of transformers, with its gates or, where they are the identity, without."""

import json
import logging
import os
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch
import transformers

from ..._version import __version__
from ..checkpoint import read_checkpoint
from ..errors import ConversionError
from ..journal import hash_file
from ..places import EXPORT_REPORT_FILE, check_apart, check_target
from ..plan import Link, format_bytes, free_bytes
from ..staging import exclusive, staged_folder
from .check import StockComparison, compare_with_stock
from .plan import StockPlan, Target, plan_export, plan_strip
from .tensors import Changes
from .write import write_stock


logger = logging.getLogger(__name__)

Verify = Literal["none", "headers", "logits"]

# Relative error in float32 that no order of additions explains.
ANOTHER_FUNCTION = 1e-2


@dataclass(frozen=True)
class StockResult:
    """
    Attributes:
        plan: What was done.
        seconds: Time of each step: `"plan"`, `"write"` and, if done, `"headers"` and `"logits"`.
        rounded: The tensors with numbers that were rounded, and the largest relative change in each.
        comparison: How far the logits are apart, if both models ran.
        hashes_match: Of a strip: how many weight files have the hashes that the certificate gives for the source's; `None` without one.
    """

    plan: StockPlan
    seconds: dict[str, float]
    rounded: dict[str, float]
    comparison: StockComparison | None = None
    hashes_match: int | None = None

    def describe(self) -> str:
        """What was found, in a few lines."""
        lines = []
        if self.rounded:
            worst = max(self.rounded, key=self.rounded.get)
            lines.append(
                f"rounded  numbers of {len(self.rounded)} tensors, by up to {self.rounded[worst]:.1e} of a number in {worst}"
            )
        else:
            lines.append("rounded  nothing: every number is the model's, or an exact multiple of it by a power of two")
        if self.comparison is not None:
            lines += [
                f"{'compared ' if not number else ' ' * 9}{line}"
                for number, line in enumerate(self.comparison.describe())
            ]
        if self.hashes_match is not None:
            lines.append(
                f"hashes   {self.hashes_match} of {len(self.plan.files)} weight files are the converted source's, byte for byte"
            )
        return "\n".join(lines)


def export_checkpoint(
    source: str | os.PathLike,
    target: str | os.PathLike,
    to: Target,
    *,
    widen_gates: bool = False,
    max_error: float | None = None,
    verify: Verify = "logits",
    layer_by_layer: bool | None = None,
    overwrite: bool = False,
) -> StockResult:
    """
    Write a gated model as a stock architecture, which transformers and the servers built on it run without custom code.

    The same function in other words: gates go into `q_proj` where the class has them there, `gate_scale` into `o_proj`, norms become
    norms of `1 + weight` where the class has those; missing biases, gates and shared experts are zeros. All that can be is exact:
    rows are moved, and numbers multiplied by powers of two.

    Args:
        source (`str` or `os.PathLike`): Folder of a gated checkpoint. Never written to.
        target (`str` or `os.PathLike`): Folder to make.
        to (`str`): `"qwen3_5"` (with experts its MoE class), `"qwen3_next"` or `"lfm3"`.
        widen_gates (`bool`): Whether headwise gates may become elementwise: each row as often as a head has channels.
        max_error (`float`, *optional*):
            Largest relative error of the logits (root mean square, in the format that is saved) that is let pass. Default: 1e-5 in
            float32; in 16 bits, beside the model's logits in float32, twice the error that the model itself has there.
        verify (`str`):
            `"none"`: check nothing. `"headers"`: names, shapes and formats. `"logits"`: also run both models.
        layer_by_layer (`bool`, *optional*): Whether they run with one layer of each in memory. Default: by the memory that is free.
        overwrite (`bool`): Whether a model folder at the target is replaced, as a whole.

    Returns:
        [`StockResult`]. The folder holds the same as `gated_attention_export.json`.

    Raises:
        [`ConversionError`]: no stock class computes what the model computes (the message says why, and which one could), the logits
        are too far apart, or the target is in the way. Nothing is left at `target` then, and what was there before is untouched.

    ```python
    >>> from gated_attention import export_checkpoint

    >>> export_checkpoint("Qwen3-0.6B-gated", "Qwen3-0.6B-native", to="qwen3_5", widen_gates=True)
    ```"""
    if max_error is not None and not (isinstance(max_error, (int, float)) and max_error >= 0):
        raise ConversionError(f"`max_error` must be a number, 0 or more, got {max_error!r}")
    plan = partial(plan_export, to=to, widen_gates=widen_gates, overwrite=overwrite)
    return _make(source, target, plan, verify, layer_by_layer, overwrite, max_error)


def strip_checkpoint(
    source: str | os.PathLike,
    target: str | os.PathLike,
    *,
    link: Link = "auto",
    verify: Verify = "logits",
    layer_by_layer: bool | None = None,
    overwrite: bool = False,
) -> StockResult:
    """
    Give back the model that gates were added to, while they are the identity, as the stock class that it was.

    No number changes (but for zero-centred norms, which no ungated class has: 1 + weight is rounded), and files without gates are copied or linked as they are: of a conversion those are the source's own, byte for
    byte. Also for models without gates (`gate_positions=[]`).

    Args:
        source (`str` or `os.PathLike`): Folder of a gated checkpoint. Never written to.
        target (`str` or `os.PathLike`): Folder to make.
        link (`str`): How files get there of which no tensor changes: `"auto"`, `"copy"`, `"reflink"` or `"hard"`, as for a conversion.
        verify, layer_by_layer, overwrite: As for [`export_checkpoint`].

    Returns:
        [`StockResult`]

    Raises:
        [`ConversionError`]: the gates do something, or no stock class has what is left. Nothing is left at `target` then.
    """
    plan = partial(plan_strip, link=link, overwrite=overwrite)
    return _make(source, target, plan, verify, layer_by_layer, overwrite, max_error=None)


def _make(source, target, planned, verify, layer_by_layer, overwrite, max_error) -> StockResult:
    if verify not in get_args(Verify):
        raise ConversionError(f"`verify` must be one of {get_args(Verify)}, got {verify!r}")
    source, target = Path(source), Path(os.path.abspath(target))
    check_apart(source, target)
    seconds = {}
    with exclusive(target):
        started = time.perf_counter()
        plan = planned(source, target)
        seconds["plan"] = time.perf_counter() - started
        free = free_bytes(target)
        if plan.bytes_to_write > free and plan.link == "copy":
            raise ConversionError(
                f"{target} needs {format_bytes(plan.bytes_to_write)}, {format_bytes(free)} are free there; make room"
            )
        with staged_folder(target, before_placing=partial(check_target, target, overwrite)) as folder:
            started = time.perf_counter()
            changes = Changes()
            changes.rounded |= plan.changes.rounded
            write_stock(plan, folder, changes)
            seconds["write"] = time.perf_counter() - started
            comparison = None
            if verify != "none":
                started = time.perf_counter()
                _audit(plan, folder)
                seconds["headers"] = time.perf_counter() - started
            if verify == "logits":
                started = time.perf_counter()
                comparison = compare_with_stock(plan, folder, layer_by_layer)
                seconds["logits"] = time.perf_counter() - started
                _refuse_error(plan, comparison, max_error, changes.rounded)
            result = StockResult(plan, seconds, changes.rounded, comparison, _matching_hashes(plan, folder))
            if plan.family.gates is not None:
                (folder / EXPORT_REPORT_FILE).write_text(
                    json.dumps(_report(result), indent=2) + "\n", encoding="utf-8"
                )
    return result


def _audit(plan: StockPlan, folder: Path) -> None:
    """What was written is what was planned, by its headers."""
    found, expected = read_checkpoint(folder).tensors, {output.name: output.header for output in plan.outputs}
    different = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    if different:
        raise ConversionError(f"{folder} was not written as planned: {', '.join(different[:4])}. Please report this")


def _refuse_error(
    plan: StockPlan, comparison: StockComparison, max_error: float | None, rounded: dict[str, float]
) -> None:
    limit = comparison.largest_error if max_error is None else max_error
    if comparison.error <= limit:
        return
    worst = max(rounded, key=rounded.get) if rounded else None
    beside = " in float32" if comparison.is_in_16_bits else ""
    found = (
        f"the logits of {plan.family.architecture} in {comparison.dtype} would differ from the model's{beside} by {comparison.error:.1e} "
        f"of their size, more than {limit:.1e}, and with both in float32 by {comparison.function.relative:.1e}"
    )
    if comparison.function.relative > ANOTHER_FUNCTION and not rounded:
        raise ConversionError(
            f"{found}, although no number was rounded: that is another function. Please report this with its config.json"
        )
    reason = (
        f"numbers of {len(rounded)} tensors were rounded, by up to {rounded[worst]:.1e} of a number in {worst}"
        if worst is not None
        else "no number was rounded, so the two classes round otherwise while they compute"
    )
    let_pass = "" if plan.family.gates is None else ", or let it pass with --max-error (max_error)"
    raise ConversionError(f"{found}: {reason}. Save the model in a wider format first{let_pass}")


def _matching_hashes(plan: StockPlan, folder: Path) -> int | None:
    """How many files of a stripped model are its source's, by the certificate of the conversion."""
    if plan.family.gates is not None or plan.model.certificate is None:
        return None
    certified = set(plan.model.certificate["source"]["files"].values())
    if not certified:
        return None
    return sum(hash_file(folder / name) in certified for name in plan.files)


def _report(result: StockResult) -> dict:
    plan = result.plan
    untouched = {output.name for output in plan.untouched}
    return {
        "tool": {
            "gated_attention": __version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
        "architecture": plan.family.architecture,
        "tensors_as_they_were": len(untouched),
        "comparison": None if result.comparison is None else asdict(result.comparison),
        # What is not equal, bit for bit, to a tensor of the gated model.
        "changed": {
            output.name: {"how": output.how, "rounded_by": result.rounded.get(output.name, 0.0)}
            for output in plan.outputs
            if output.name not in untouched
        },
        "notes": list(plan.notes),
    }
