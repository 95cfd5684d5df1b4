"""Adds gates to a trained checkpoint without changing what it computes."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from .certificate import certificate_of, weight_hashes, write_certificate
from .initialisation import fill_gates
from .logits import Comparison, compare_models
from .places import check_reserved_names
from .plan import ConversionOptions, ConversionPlan, options_from, plan_conversion
from .sources import find_source
from .staging import exclusive, staged_folder
from .verify import audit_headers, compare_numbers
from .write import WrittenFiles, write_conversion


@dataclass(frozen=True)
class ConversionResult:
    """
    Attributes:
        plan: What was done.
        seconds: Time of each step: `"plan"`, `"write"` and, if done, `"headers"`, `"numbers"`, `"logits"` and `"hashes"`.
        numbers_equal: `True` after every number of a rewritten checkpoint was compared with the source's.
        comparison: What was found when source and result ran, if they did.
        written: Hashes of the shards, and which of them an earlier run, that was killed, had finished.
    """

    plan: ConversionPlan
    seconds: dict[str, float]
    numbers_equal: bool | None = None
    comparison: Comparison | None = None
    written: WrittenFiles = field(default_factory=lambda: WrittenFiles({}, ()))

    @property
    def logits_equal(self) -> bool | None:
        """`True` after source and result ran and gave the same bits."""
        return True if self.comparison is not None else None

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
        if self.plan.options.init != "identity":
            source += " where the gates are set aside"
        what = "logits" if self.comparison.logits is not None else "every layer's output"
        rejoined = ", with the projections put together that were taken apart" if self.comparison.rejoined else ""
        return f"{numbers}{what} equal to {source}, bit for bit in {self.comparison.dtype}{rejoined}"


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

    found = find_source(source)
    check_reserved_names(found.folder, target)
    with exclusive(target):
        started = time.perf_counter()
        plan = plan_conversion(found.folder, target, options)
        seconds["plan"] = time.perf_counter() - started

        with staged_folder(target, plan.fingerprint) as folder:
            started = time.perf_counter()
            written = write_conversion(plan, folder)
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
                comparison = compare_models(plan, folder)
                seconds["logits"] = time.perf_counter() - started
            numbers_equal = True if "numbers" in seconds else None
            hashes = ({}, {})
            if options.verify == "logits":
                started = time.perf_counter()
                hashes = weight_hashes(plan, folder, written.hashes)
                seconds["hashes"] = time.perf_counter() - started
            write_certificate(folder, certificate_of(plan, found, comparison, numbers_equal, *hashes))
    return ConversionResult(plan, seconds, numbers_equal, comparison, written)
