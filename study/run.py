"""Runs a study: trains what is not trained yet, measures it, and draws the tables and figures."""

import gc
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from .._version import package_versions
from ..conversion.errors import ConversionError
from ..conversion.staging import exclusive
from ..diagnostics import InspectionError, inspect_model
from ..diagnostics.callback import SPIKES_FILE
from ..diagnostics.plots import check_plots
from ..training import RecipeError
from .corpus import Corpus, build_corpus
from .errors import StudyError
from .extension import STAGES, Stage, finish_stage, stages_of
from .gates import gates_of
from .plan import Run, Study
from .report import write_study_report
from .results import ResultsTable
from .training import device_of, remove_checkpoints, train_once


# Processes that train at once, if nobody says how many.
MOST_JOBS = 8

# What one process does in a row: a training, and what is made of its model.
Unit = list[tuple[str, Run | Stage]]


def run_study(
    study: Study, folder: str | Path, echo: Callable[[str], None] = print, jobs: int = 1
) -> dict[str, list[dict]]:
    """
    Train and measure what a study names, and write its tables and figures.

    Each run is a row of `runs.sqlite` once it is finished, and is not trained again, whichever table it stands in; one that was stopped goes on
    from its last checkpoint. `report.md`, `results.json` and the figures are written anew each time.

    Args:
        study ([`Study`]): What to do.
        folder (`str` or `Path`): Folder of its corpus, its models, its table and its report.
        echo: Where it is said what is done.
        jobs (`int`): Processes that train at once, which share the cores. A model so small gains little from a second core, so that two trainings on
            a core each are sooner done than one after another on both. A script needs the guard that `multiprocessing` asks for.

    Returns:
        The results of each table's runs, in its order.

    Raises:
        [`StudyError`], `RecipeError`, `ConversionError`: something of it cannot be done. What is finished stays. Of several processes it is always
            `StudyError`.
    """
    if jobs < 1:
        raise StudyError(f"`jobs` must be 1 or more, got {jobs}")
    folder = Path(folder).resolve()  # a training that is gone on with must find its rows under the same name
    check_plots()
    with exclusive(folder / "study"), _without_bars_of_datasets():
        corpus = build_corpus(folder / "corpus", study.corpus)
        for length in {study.length, *(length for one in study.extensions for length in one.lengths)}:
            corpus.test_windows(length, study.tests.tokens)  # that there are so many is known before hours of training
        table = ResultsTable(folder)
        runs_of = {
            one.title: [(run.key(corpus), run) for run in study.runs(one)]
            for one in (*study.tables, *study.extensions)
        }
        keys_of_stages = {
            one.title: [(stage.key(corpus), stage) for stage in stages_of(one, study.runs(one))]
            for one in study.extensions
        }
        runs = dict(itertools.chain(*runs_of.values()))
        stages = dict(itertools.chain(*keys_of_stages.values()))
        units: dict[str, Unit] = {key: [(key, run)] for key, run in runs.items()}
        for key, stage in stages.items():
            units[stage.run.key(corpus)].append((key, stage))
        missing = [[(key, one) for key, one in unit if table.find(key) is None] for unit in units.values()]
        missing = [unit for unit in missing if unit]
        total, left = len(runs) + len(stages), sum(map(len, missing))
        echo(f"{study.name}: {total} runs, {total - left} of them finished before")
        lines = _finished(missing, corpus, folder, min(jobs, len(missing)), echo)
        for number, line in enumerate(tqdm(lines, total=left, desc="Runs", unit="run", disable=None), start=1):
            echo(f"{number} of {left}: {line}")
        found = {
            one.title: [table.find(key) | {"name": run.options.name} for key, run in runs_of[one.title]]
            for one in study.tables
        }
        longer = {
            title: [table.find(key) | {"name": stage.name} for key, stage in of_extension]
            for title, of_extension in keys_of_stages.items()
        }
        write_study_report(study, corpus, found, longer, folder)
    echo(f"the tables are in {folder / 'report.md'}")
    return found | longer


def usual_jobs(study: Study) -> int:
    """How many processes a study is best trained by: one a core, and one in all on a GPU."""
    if device_of(study.recipe) == "cuda":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_JOBS)


def _finished(
    units: list[Unit], corpus: Corpus, folder: Path, jobs: int, echo: Callable[[str], None]
) -> Iterator[str]:
    """Train and measure; gives a line about each run that is done."""
    if jobs <= 1:
        for unit in units:
            yield from _finish(unit, corpus, folder)
        return
    threads = max(1, torch.get_num_threads() // jobs)
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_prepare_process, initargs=(threads,))
    waiting, running = iter(units), set()
    try:
        while True:
            # One for each process and none ahead: what is handed over is begun, even if the study is stopped in the meantime.
            for unit in itertools.islice(waiting, jobs - len(running)):
                running.add(pool.submit(_finish_elsewhere, unit, folder))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for lines, error in (future.result() for future in done):
                yield from lines
                if error is not None:
                    if running:
                        echo(f"stopping, when what runs now is done: {error}")
                    raise StudyError(error)
    except BrokenProcessPool as error:
        raise StudyError(
            "a process of the study was killed, perhaps for want of memory: the same command goes on, `--jobs 1` needs the least"
        ) from error
    finally:
        pool.shutdown()


def _prepare_process(threads: int) -> None:
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """If the study is killed, its processes must not go on: the same command would train in the same folders beside them."""
    parent_process().join()
    os._exit(1)


def _finish_elsewhere(unit: Unit, folder: Path) -> tuple[list[str], str | None]:
    """[`_finish`] in a process of its own, whose errors need not be picklable."""
    lines = []
    try:
        with _without_bars_of_datasets():
            for line in _finish(unit, Corpus.load(folder / "corpus"), folder):
                lines.append(line)
    except (StudyError, RecipeError, ConversionError, InspectionError, OSError) as error:
        return lines, str(error)
    return lines, None


def _finish(unit: Unit, corpus: Corpus, folder: Path) -> Iterator[str]:
    table, models = ResultsTable(folder), folder / "models"
    for key, one in unit:
        if isinstance(one, Run):
            folder_of_models = models / key
            result = finish_run(one, corpus, folder_of_models)
        else:
            trained = one.run.key(corpus)
            folder_of_models = models / one.settings_key(corpus)
            result = finish_stage(one, corpus, table.find(trained), models / trained, folder_of_models)
        table.add(key, result)
        remove_checkpoints(folder_of_models)
        yield _described(result)


@contextmanager
def _without_bars_of_datasets() -> Iterator[None]:
    """Each training reads its rows; a study has many."""
    try:
        import datasets
    except ImportError as error:
        raise StudyError("a study needs datasets: pip install 'gated_attention[train]'") from error
    were_on = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if were_on:
            datasets.enable_progress_bars()


def finish_run(run: Run, corpus: Corpus, folder: Path) -> dict[str, Any]:
    """
    Train a model, or go on with it, and measure it.

    Returns:
        What the table keeps. A training that diverged is a result too: its row says so, and has no figures.
    """
    content = run.recipe(corpus, folder)
    started = time.perf_counter()
    outcome = train_once(content)
    result = {
        "study": run.study.name,
        "variant": run.options.variant,
        "seed": run.seed,
        "learning_rate": content.get("learning_rate"),
        "diverged": outcome.diverged,
        "steps": outcome.steps,
        # Nobody looks for spikes without the diagnostics.
        "spikes": _spikes(folder) if content.get("diagnostics", {}).get("every", 1) else None,
        "loss": [[entry["step"], entry["loss"]] for entry in outcome.history if "loss" in entry],
    }
    if not outcome.diverged:
        try:
            found = _measured(run, corpus, folder, content)
        except InspectionError:  # the last step may have broken the weights, which no loss shows
            found = None
        if found is None or not _is_finite(found):
            result["diverged"] = True
        else:
            result |= found
    return result | {"seconds": round(time.perf_counter() - started, 1), "versions": package_versions()}


def _is_finite(found: dict[str, Any]) -> bool:
    try:
        json.dumps(found, allow_nan=False)
    except ValueError:
        return False
    return True


def _spikes(folder: Path) -> int:
    """Loss spikes, each counted once: a run that was stopped writes those after its last checkpoint again."""
    path = folder / SPIKES_FILE
    if not path.is_file():
        return 0
    return len({json.loads(line)["step"] for line in path.read_text(encoding="utf-8").splitlines()})


def _measured(run: Run, corpus: Corpus, folder: Path, content: dict[str, Any]) -> dict[str, Any]:
    tests, length = run.study.tests, content["length"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device_of(content)).eval()
    windows = corpus.test_windows(length, tests.tokens)
    batches = ({"input_ids": torch.tensor(windows[start : start + 8])} for start in range(0, len(windows), 8))
    inspection = inspect_model(model, batches, ranks=False, bos=True, text="held-out documents")
    kept = ("perplexity", "f_attn", "largest_key_share", "sink_rate", "m_act", "largest_activation")
    summary = inspection.summary()
    found = {name: summary[name] for name in kept}
    found["parameters"] = model.num_parameters()
    found["accuracy"] = corpus.accuracies(model, length, tests.answers)
    gates = gates_of(model, inspection, windows)
    known = [gate.mean for gate in gates if gate is not None]
    found["gate_mean"] = _mean(known)
    found["layers"] = [
        {
            "f_attn": _mean(layer.f_attn),
            "largest_activation": layer.top_activations[0].value,
            "gate_mean": None if gate is None else gate.mean,
            "gate_histogram": None if gate is None else gate.histogram,
            "gate_histogram_end": None if gate is None else gate.histogram_end,
        }
        for layer, gate in zip(inspection.layers, gates, strict=True)
    ]
    del model
    gc.collect()
    return found


def _mean(values: list[float] | None) -> float | None:
    return sum(values) / len(values) if values else None


def _described(result: dict[str, Any]) -> str:
    if "stage" in result and result["lengths"] is None:
        return f"{result['name']}, seed {result['seed']}, {STAGES[result['stage']]}: no result, {result['reason']}"
    if "stage" in result:
        perplexities = ", ".join(f"{length}: {one['perplexity']:.2f}" for length, one in result["lengths"].items())
        return f"{result['name']}, seed {result['seed']}, {STAGES[result['stage']]}: perplexity at {perplexities}"
    rate = result["learning_rate"]
    text = f"{result['variant']}, seed {result['seed']}" + (f", learning rate {rate:g}" if rate else "")
    if result["diverged"]:
        return f"{text}: diverged at step {result['steps']}"
    text += f": perplexity {result['perplexity']:.2f}, F-Attn {result['f_attn']:.3f}, M-Act {result['m_act']:,.1f}"
    for task, found in result["accuracy"].items():
        text += f", {task} {found['accuracy']:.0%}"
    return text + f", {result['seconds'] / 60:.1f} min"
