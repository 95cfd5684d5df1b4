"""Adds gates to a trained checkpoint without changing what it computes."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from .places import check_reserved_names
from .plan import ConversionOptions, ConversionPlan, options_from, plan_conversion
from .staging import exclusive, staged_folder
from .verify import audit_headers, compare_logits
from .write import write_conversion


@dataclass(frozen=True)
class ConversionResult:
    """
    Attributes:
        plan: What was done.
        seconds: Time of each step: `"plan"`, `"write"`, `"headers"` and, if done, `"logits"`.
        logits_equal: `True` after the logits were compared and found equal, `None` if that was not asked for.
    """

    plan: ConversionPlan
    seconds: dict[str, float]
    logits_equal: bool | None


def convert_checkpoint(
    source: str | os.PathLike, target: str | os.PathLike, options: ConversionOptions | None = None, **fields
) -> ConversionResult:
    """
    Make a gated checkpoint that computes exactly what `source` computes.

    The source's tensors are not changed: its shards are copied or linked, and one more shard holds the gates, zero with
    `gate_scale = 2`, so that each is `2 * sigmoid(0) = 1`. The folder appears under its name only after it was verified.

    Args:
        source (`str` or `os.PathLike`): Folder of a Llama, Mistral or Qwen3 checkpoint in safetensors format. Never written to.
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

    check_reserved_names(Path(source), target)
    with exclusive(target):
        started = time.perf_counter()
        plan = plan_conversion(Path(source), target, options)
        seconds["plan"] = time.perf_counter() - started

        with staged_folder(target) as folder:
            started = time.perf_counter()
            write_conversion(plan, folder)
            seconds["write"] = time.perf_counter() - started

            started = time.perf_counter()
            audit_headers(plan, folder)
            seconds["headers"] = time.perf_counter() - started

            if options.verify == "logits":
                started = time.perf_counter()
                compare_logits(plan, folder)
                seconds["logits"] = time.perf_counter() - started
    return ConversionResult(plan, seconds, logits_equal=True if options.verify == "logits" else None)
