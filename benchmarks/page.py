"""
Runs the benchmarks and writes docs/benchmarks.md from what they gave: ratios with intervals, against named peers.

    python benchmarks/page.py [--run NAME ...] [--results FOLDER] [--page FILE.md] [--agree FOLDER]

Without `--run` the page is written from the results that are there; `--run` alone runs all of them (about an hour on two cores), with names those. `--agree` compares with the results
of another run of the same machine, and fails if an interval of one does not meet the other's.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGE = HERE.parent / "docs" / "benchmarks.md"


@dataclass(frozen=True)
class Ratio:
    """
    Attributes:
        what: What was measured, and beside what.
        median, low, high: The ratio and its interval.
    """

    what: str
    median: float
    low: float
    high: float

    def meets(self, other: "Ratio") -> bool:
        """Whether the two intervals have a point in common."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Benchmark:
    """
    Attributes:
        title: Of its section.
        about: What was done.
        interval: What its intervals are.
        command: Script and arguments; `--output` follows.
        file: Of its results.
        ratios: Reads them.
    """

    title: str
    about: str
    interval: str
    command: tuple[str, ...]
    file: str
    ratios: Callable[[dict], Iterator[Ratio]]


def _ordered(values: dict) -> tuple[float, float, float]:
    return values["median"], values["least"], values["greatest"]


def conversion(found: dict) -> Iterator[Ratio]:
    for job, values in found["copying"]["time_over_copy"].items():
        yield Ratio(f"time of a conversion ({job}) over `shutil.copytree`", *_ordered(values))
    for family, peers in found["peers"].items():
        for measure, name in (("seconds_over_convert", "time"), ("peak_bytes_over_convert", "peak memory")):
            for peer, values in peers[measure].items():
                yield Ratio(f"{family}: {name} of {peer} over `convert`", *_ordered(values))


def attention(found: dict) -> Iterator[Ratio]:
    for cell in found["results"]:
        place = f"{cell['unit']}, {cell['shape']}, {cell['mode']}, {cell['dtype']}, {cell['job']}"
        for kind, other in (
            ("headwise", "ungated"),
            ("elementwise", "ungated"),
            ("elementwise", "Qwen3NextAttention"),
        ):
            ratio = cell[kind].get(f"over_{other}")
            if ratio is not None:
                yield Ratio(f"{place}: {kind} over {other}", ratio["median"], ratio["low"], ratio["high"])


def diagnostics(found: dict) -> Iterator[Ratio]:
    yield Ratio(
        f"{found['model']}, {found['length']:,} tokens: time of an inspection over a forward pass",
        *_ordered(found["time_ratio"]),
    )
    memory = found["peak_memory_ratio"]
    yield Ratio("peak memory of an inspection over a forward pass (one process each)", memory, memory, memory)


def export(found: dict) -> Iterator[Ratio]:
    for row in found["rows"]:
        over = row["over_copy"]
        what = f"{row['gates']} gates as {row['to']}, {row['format']}: time of writing over `shutil.copytree`"
        yield Ratio(what, statistics.median(over), min(over), max(over))


def training(found: dict) -> Iterator[Ratio]:
    low, median, high = sorted(found["ratio"])
    what = f"{found['model']}, {found['granularity']} gates, {found['batch']} rows of {found['length']} tokens: a step over TRL's SFTTrainer on the source"
    yield Ratio(what, median, low, high)


BENCHMARKS = {
    "conversion": Benchmark(
        "Conversion",
        "Synthetic checkpoints in bfloat16, converted without running the models, beside a copy of the folder, and beside transformers' loading and saving and mergekit where it was "
        "there.",
        "least to greatest of the repetitions",
        ("conversion.py", "--gigabytes", "4", "--kills", "4"),
        "conversion.json",
        conversion,
    ),
    "attention_eager": Benchmark(
        "Attention, eager",
        "One attention layer: ungated, headwise, elementwise, and transformers' `Qwen3NextAttention`, taking turns with their weights at new addresses each round.",
        "95 % interval of the median",
        ("attention.py", "--units", "layer", "--modes", "eager", "--rounds", "200", "--budget", "8"),
        "attention_eager.json",
        attention,
    ),
    "attention_compiled": Benchmark(
        "Attention, compiled",
        "The same with `torch.compile`, and four-layer models.",
        "95 % interval of the median",
        ("attention.py", "--modes", "compiled", "--dtypes", "float32", "--jobs", "train", "decode", "--rounds", "100"),
        "attention_compiled.json",
        attention,
    ),
    "diagnostics": Benchmark(
        "Diagnostics",
        "An inspection of attention, activations and gates beside a plain forward pass of the same tokens.",
        "least to greatest of the repetitions",
        ("diagnostics.py",),
        "diagnostics.json",
        diagnostics,
    ),
    "export": Benchmark(
        "Export",
        "A gated model of Qwen3-0.6B's shape, written in the layout of a stock architecture.",
        "least to greatest of the repetitions",
        ("export.py",),
        "export.json",
        export,
    ),
    "training": Benchmark(
        "Training step",
        "All parameters in float32 with AdamW; the two trainers take turns, a step each.",
        "95 % interval of the median",
        ("training.py",),
        "training.json",
        training,
    ),
}


def ratios_of(name: str, results: Path) -> list[Ratio]:
    """What a benchmark gave, or nothing where it was not run."""
    path = results / BENCHMARKS[name].file
    if not path.is_file():
        return []
    return list(BENCHMARKS[name].ratios(json.loads(path.read_text(encoding="utf-8"))))


def where_and_with_what(found: dict) -> str:
    """The machine and the versions that a file of results names."""
    found = {**found, **found.get("settings", {})}
    machine = found.get("device") or found.get("machine")
    if isinstance(machine, dict):
        machine = machine.get("processor")
    cores = found.get("threads") or found.get("cores")
    if isinstance(found.get("machine"), dict):
        cores = cores or found["machine"].get("cores")
    versions = ", ".join(f"{name} {version}" for name, version in found.get("versions", {}).items())
    return f"{machine}" + (f", {cores} cores" if cores else "") + f"; {versions}"


def page(results: Path) -> str:
    """The page, in Markdown."""
    parts = [
        "# Benchmarks",
        "Written by `make bench`, which runs the scripts in `benchmarks/`. Everything is a ratio of two things that were measured side by side in one run: times alone would say more of the machine "
        "than of the code. A ratio below 1 is in favour of what stands first.",
    ]
    for name, benchmark in BENCHMARKS.items():
        ratios = ratios_of(name, results)
        if not ratios:
            continue
        found = json.loads((results / benchmark.file).read_text(encoding="utf-8"))
        rows = [f"| {one.what} | {one.median:.3f} | {one.low:.3f} to {one.high:.3f} |" for one in ratios]
        parts += [
            f"## {benchmark.title}",
            f"{benchmark.about} `python benchmarks/{' '.join(benchmark.command)}`; {where_and_with_what(found)}.",
            "\n".join([f"| | ratio | {benchmark.interval} |", "|---|---|---|", *rows]),
        ]
    return "\n\n".join(parts) + "\n"


def disagreements(one: Path, other: Path) -> list[str]:
    """What two runs say differently: intervals that have no point in common."""
    lines = []
    for name in BENCHMARKS:
        others = {ratio.what: ratio for ratio in ratios_of(name, other)}
        for ratio in ratios_of(name, one):
            if ratio.what in others and not ratio.meets(others[ratio.what]):
                there = others[ratio.what]
                lines.append(
                    f"{name}, {ratio.what}: {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f}) and "
                    f"{there.median:.3f} ({there.low:.3f} to {there.high:.3f})"
                )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="*", choices=BENCHMARKS, help="benchmarks to run; none named: all")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--agree", type=Path, help="folder with the results of another run")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    for name in [] if arguments.run is None else arguments.run or BENCHMARKS:
        script, *options = BENCHMARKS[name].command
        print(f"{name}: {script} {' '.join(options)}", flush=True)
        output = arguments.results / BENCHMARKS[name].file
        subprocess.run([sys.executable, str(HERE / script), *options, "--output", str(output)], check=True)
    arguments.page.write_text(page(arguments.results), encoding="utf-8")
    print(f"the page is {arguments.page}")
    if arguments.agree is not None:
        differing = disagreements(arguments.results, arguments.agree)
        print("\n".join(differing) or "the two runs agree: all intervals meet")
        sys.exit(bool(differing))


if __name__ == "__main__":
    main()
