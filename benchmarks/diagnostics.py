"""
Time and peak memory of an inspection, beside a plain forward pass of the same model on the same tokens.

    python benchmarks/diagnostics.py [--model FOLDER] [--length 4096] [--repetitions 5] [--output FILE.json]

Default model: SmolLM2-135M-Instruct, dequantised from Q4_1, in float32. Forward pass and inspection alternate in one process;
the peak of the resident memory is that of a process for each, over what it holds when the model is loaded.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conversion import _processor
from gated_attention import __version__, inspect_text
from gated_attention.demo import demo_checkpoint
from gated_attention.diagnostics.inspection import windows_of
from gated_attention.diagnostics.texts import default_text


def load(model: Path, length: int):
    tokenizer = AutoTokenizer.from_pretrained(model)
    (input_ids, *_), bos = windows_of(tokenizer, default_text()[0], length, length, bos=True)
    return AutoModelForCausalLM.from_pretrained(model, dtype="float32"), tokenizer, input_ids, bos


def forward(model, tokenizer, input_ids) -> None:
    with torch.no_grad():
        model(input_ids, use_cache=False)


def inspection(model, tokenizer, input_ids):
    length = input_ids.shape[1]
    return inspect_text(model, tokenizer, default_text()[0], length=length, tokens=length, bos=True, progress=False)


JOBS = {"forward": forward, "inspection": inspection}


def resident_peak() -> int:
    """Largest resident set of this process so far, in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def measure_memory(model: Path, length: int, job: str) -> None:
    """Run in a process of its own: prints the bytes by which the peak grows over the loaded model."""
    loaded, tokenizer, input_ids, _ = load(model, length)
    with torch.no_grad():
        loaded(input_ids[:, :8], use_cache=False)  # pages of the weights are touched
    before = resident_peak()
    JOBS[job](loaded, tokenizer, input_ids)
    print(before, resident_peak())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder; default: the demo model")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output", type=Path, help="JSON file to write the figures to")
    parser.add_argument("--memory-of", choices=JOBS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    model = options.model or demo_checkpoint()
    if options.memory_of:
        measure_memory(model, options.length, options.memory_of)
        return

    loaded, tokenizer, input_ids, _ = load(model, options.length)
    seconds: dict[str, list[float]] = {job: [] for job in JOBS}
    for repetition in range(options.repetitions + 1):
        for job, run in JOBS.items():
            started = time.perf_counter()
            found = run(loaded, tokenizer, input_ids)
            if repetition > 0:  # the first round warms up
                seconds[job].append(time.perf_counter() - started)
    ratios = [b / a for a, b in zip(seconds["forward"], seconds["inspection"], strict=True)]
    del loaded

    peaks = {}
    for job in JOBS:
        command = [
            sys.executable,
            __file__,
            "--model",
            str(model),
            "--length",
            str(options.length),
            "--memory-of",
            job,
        ]
        before, peak = map(
            int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-2:]
        )
        peaks[job] = {"loaded_bytes": before, "peak_bytes": peak}
    report = {
        "model": model.name,
        "length": options.length,
        "repetitions": options.repetitions,
        "median_seconds": {job: statistics.median(values) for job, values in seconds.items()},
        "time_ratio": {"median": statistics.median(ratios), "least": min(ratios), "greatest": max(ratios)},
        "peak_memory": peaks,
        "peak_memory_ratio": peaks["inspection"]["peak_bytes"] / peaks["forward"]["peak_bytes"],
        "summary": found.summary(),
        "machine": {"processor": _processor(), "cores": os.cpu_count()},
        "versions": {"gated_attention": __version__, "torch": torch.__version__},
    }
    ratio = report["time_ratio"]
    print(
        f"{model.name}, {options.length} tokens, {options.repetitions} interleaved repetitions\n"
        f"forward {report['median_seconds']['forward']:.2f} s, inspection {report['median_seconds']['inspection']:.2f} s: "
        f"{ratio['median']:.2f} x ({ratio['least']:.2f} to {ratio['greatest']:.2f})\n"
        f"peak memory {peaks['forward']['peak_bytes'] / 2**30:.2f} GiB and {peaks['inspection']['peak_bytes'] / 2**30:.2f} GiB: "
        f"{report['peak_memory_ratio']:.2f} x"
    )
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
