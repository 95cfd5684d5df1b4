"""Adds gates to a trained checkpoint without changing what it computes."""

import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .certificate import certificate_of, check_copies, file_hashes, write_certificate
from .comparison import Comparison
from .initialisation import fill_gates
from .logits import compare_models
from .places import check_apart, check_target
from .plan import ConversionOptions, ConversionPlan, options_from, plan_conversion
from .sources import find_source_for
from .staging import exclusive, staged_folder
from .verify import audit_headers, compare_numbers
from .write import write_conversion


@dataclass(frozen=True)
class ConversionResult:
    """
    Attributes:
        plan: What was done.
        seconds: Time of each step: `"plan"`, `"write"` and, if done, `"headers"`, `"numbers"`, `"logits"` and `"hashes"`.
        numbers_equal: `True` after every number was compared with the source's, or every copied file by its hash.
        comparison: What was found when source and result ran, if they did.
        reused: Names of the shards that an earlier run, that was stopped, had finished.
    """

    plan: ConversionPlan
    seconds: dict[str, float]
    numbers_equal: bool | None = None
    comparison: Comparison | None = None
    reused: tuple[str, ...] = ()

    @property
    def outputs_equal(self) -> bool | None:
        """`True` after source and result ran, whole or layer by layer, and gave the same bits under the comparison's conditions."""
        return True if self.comparison is not None else None

    @property
    def logits_equal(self) -> bool | None:
        """`True` after both ran whole, with the gates that they have, and gave the same bits."""
        whole = self.comparison is not None and self.comparison.logits == 0
        return True if whole and not self.comparison.gates_set_aside else None

    @property
    def checked(self) -> str:
        """What was found equal, in words."""
        if self.plan.options.verify == "none":
            return "nothing checked"
        numbers = "every number equal to the source's; " if self.numbers_equal else ""
        if self.plan.options.verify == "headers":
            return f"{numbers}headers audited, logits not compared"
        if self.comparison is None:
            return f"{numbers}transformers has no class for the source, so logits were not compared"
        source = "the source's" if self.plan.family.has_stock_class else "those without gates"
        what = "logits" if self.comparison.logits is not None else "every layer's output"
        return f"{numbers}{what} equal to {source}, bit for bit in {self.comparison.dtype}{self.comparison.conditions}"


def convert_checkpoint(
    source: str | os.PathLike, target: str | os.PathLike, options: ConversionOptions | None = None, **fields
) -> ConversionResult:
    """
    Make a gated checkpoint that computes what `source` computes.

    A source without gates keeps its tensors: its shards are copied or linked, and one more shard holds the gates, zero with
    `gate_scale = 2`, so that each is `2 * sigmoid(0) = 1`. A source with gates of its own (Qwen3-Next, Qwen3.5 and LFM3 with
    attention in every layer, the paper's code) keeps those: where they share a projection with the queries, they get one of their
    own. The folder appears under its name only after it was verified.

    Args:
        source (`str` or `os.PathLike`):
            Folder of a checkpoint of a supported family in safetensors format, or a Hub id (`org/name`, `org/name@revision`).
            Never written to.
        target (`str` or `os.PathLike`): Folder to make.
        options (`ConversionOptions`, *optional*): How; or give its fields as keywords (`granularity="elementwise"`).

    Returns:
        [`ConversionResult`]

    Raises:
        [`ConversionError`]: the source cannot be converted, the target is in the way, or the result is not exact. Nothing is
        left at `target` then, and what was there before is untouched.

    ```python
    >>> from gated_attention import convert_checkpoint

    >>> convert_checkpoint("SmolLM2-135M", "SmolLM2-135M-gated", granularity="headwise")
    ```"""
    options = options_from(ConversionOptions, options, fields)
    target = Path(os.path.abspath(target))
    seconds = {}

    found = find_source_for(source, target, options.overwrite)
    check_apart(found.folder, target)
    with exclusive(target):
        started = time.perf_counter()
        plan = plan_conversion(found.folder, target, options)
        seconds["plan"] = time.perf_counter() - started

        again = partial(check_target, target, options.overwrite)  # what may have appeared there meanwhile
        with staged_folder(target, plan.fingerprint, before_placing=again) as folder:
            started = time.perf_counter()
            reused = write_conversion(plan, folder)
            fill_gates(plan, folder)
            seconds["write"] = time.perf_counter() - started

            comparison = None
            if options.verify != "none":
                started = time.perf_counter()
                audit_headers(plan, folder)
                seconds["headers"] = time.perf_counter() - started
                if plan.pieces:
                    started = time.perf_counter()
                    compare_numbers(plan, folder)
                    seconds["numbers"] = time.perf_counter() - started
            if options.verify == "logits":
                started = time.perf_counter()
                comparison = compare_models(plan, folder, options.layer_by_layer)
                seconds["logits"] = time.perf_counter() - started
            numbers_equal = True if "numbers" in seconds else None
            hashes = ({}, {})
            if options.verify == "logits":
                started = time.perf_counter()
                hashes = file_hashes(plan, folder)
                check_copies(plan, folder, *hashes)
                seconds["hashes"] = time.perf_counter() - started
                numbers_equal = True
            write_certificate(folder, certificate_of(plan, found, comparison, numbers_equal, *hashes))
    return ConversionResult(plan, seconds, numbers_equal, comparison, reused)
