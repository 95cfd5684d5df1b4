"""Writes what a study found: tables with the paper's figures beside them, the figures, and all numbers as JSON."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

from ..conversion.staging import whole_file
from .corpus import Corpus
from .extension import STAGES
from .figures import draw_study
from .figures_of_paper import FIGURES, PAPER_LENGTHS
from .plan import MEASURES, ExtensionOptions, Study, TableOptions
from .results import grouped


REPORT_FILE, RESULTS_FILE = "report.md", "results.json"


def write_study_report(
    study: Study,
    corpus: Corpus,
    found: dict[str, list[dict[str, Any]]],
    longer: dict[str, list[dict[str, Any]]],
    folder: Path,
) -> None:
    """
    Write `report.md`, `results.json` and the figures.

    Args:
        study ([`Study`]): What was asked.
        corpus ([`Corpus`]): What was trained on.
        found (`dict[str, list[dict]]`): By title of a table the results of its runs, each with its line's `name`.
        longer (`dict[str, list[dict]]`): By title of an extension the results of its stages.
        folder (`Path`): Where they go.
    """
    drawn = draw_study(study, found, longer, folder)
    parts = [f"# {study.name}", study.about.strip(), _corpus_line(study, corpus)]
    for table in study.tables:
        parts += [f"## {table.title}", "\n".join(table_lines(table, found[table.title], list(corpus.options.tasks)))]
        parts += [note for note in (_void(table, found[table.title]), table.note) if note]
        if table.paper is not None:
            parts.append(f"The paper's figures: {FIGURES[table.paper]['source']}.")
        parts += [f"![{table.title}: {what}]({name})" for name, what in drawn.get(table.title, {}).items()]
    for one in study.extensions:
        results = longer[one.title]
        parts += [f"## {one.title}", "\n".join(extension_lines(one, results, list(corpus.options.tasks)))]
        parts += [note for note in (_void_extension(one, results), _missing(results)) if note]
        parts.append(PAPER_LENGTHS)
        parts += [f"![{one.title}: {what}]({name})" for name, what in drawn.get(one.title, {}).items()]
    versions = versions_of([result for results in (found | longer).values() for result in results])
    described = " or ".join(", ".join(f"{name} {version}" for name, version in one.items()) for one in versions)
    parts.append(f"Versions: {described}.")
    with whole_file(folder / REPORT_FILE) as file:
        file.write("\n\n".join(parts) + "\n")
    content = {
        "study": study.name,
        "corpus": corpus.manifest,
        "versions": versions,
        "tables": found | longer,
    }
    with whole_file(folder / RESULTS_FILE) as file:
        file.write(json.dumps(content, indent=1) + "\n")


def versions_of(results: list[dict[str, Any]]) -> list[dict[str, str]]:
    """With which versions of which packages runs were made, each once."""
    found: list[dict[str, str]] = []
    for result in results:
        if result["versions"] not in found:
            found.append(result["versions"])
    return found


def _corpus_line(study: Study, corpus: Corpus) -> str:
    sources = ", ".join(
        f"{name} ({one['characters']:,} characters, {one['licence']})"
        for name, one in corpus.manifest["sources"].items()
    )
    tasks = ", ".join(f"{share:.0%} {name}" for name, share in corpus.options.tasks.items())
    return (
        f"Corpus: {sources}; of the rows {tasks}; vocabulary of {corpus.options.vocab_size} tokens. Tested on "
        f"{study.tests.tokens:,} tokens of documents, and {study.tests.answers} rows of each task with keys, that were not trained on; windows of "
        f"{study.length} tokens. ± is the standard deviation over seeds."
    )


def table_lines(table: TableOptions, results: list[dict[str, Any]], tasks: list[str]) -> list[str]:
    """A table in Markdown: a line for each name and learning rate, mean and spread over seeds, and in brackets the paper's figure."""
    columns: list[tuple[str, str, str]] = []  # heading, measure, format
    for measure in table.measures:
        if measure == "accuracy":
            columns += [(f"{task}, right", f"accuracy {task}", "{:.1%}") for task in tasks]
        else:
            columns.append((MEASURES[measure][0], measure, MEASURES[measure][1]))
    paper = FIGURES[table.paper]["rows"] if table.paper else {}
    rates = len(table.learning_rates or ()) > 1
    lines = ["| | " + ("learning rate | " if rates else "") + " | ".join(heading for heading, *_ in columns) + " |"]
    lines.append("|---" * (len(columns) + 1 + rates) + "|")
    for (name, rate), of_line in grouped(results, "name", "learning_rate").items():
        cells = [name] + ([f"{rate:g}"] if rates else [])
        for _, measure, form in columns:
            cell = spread([value_of(result, measure) for result in of_line], form)
            theirs = paper.get(of_line[0]["variant"], {}).get(measure)
            cells.append(cell + ("" if theirs is None else f" ({form.format(theirs)})"))
        lines.append("| " + " | ".join(cells) + " |")
    if paper:
        lines += ["", "In brackets: the paper."]
    return lines


def value_of(result: dict[str, Any], measure: str) -> float | None:
    """A figure of a run; None where a run that diverged has none, or a model without gates no gate."""
    if measure.startswith("accuracy "):
        return result.get("accuracy", {}).get(measure.removeprefix("accuracy "), {}).get("accuracy")
    value = result.get(measure)
    return None if value is None else float(value)


def spread(values: list[float | None], form: str) -> str:
    """Mean and standard deviation; how many there are of how many, where some are missing."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    text = form.format(statistics.mean(known))
    if len(known) > 1 and not math.isclose(min(known), max(known)):
        text += f" ± {form.format(statistics.stdev(known))}"
    return text if len(known) == len(values) else f"{text} ({len(known)} of {len(values)} runs)"


def _void(table: TableOptions, results: list[dict[str, Any]]) -> str | None:
    """What is to be said if the first line has no sink."""
    if table.least_f_attn is None:
        return None
    first = results[0]["name"]
    known = [value_of(result, "f_attn") for result in results if result["name"] == first]
    known = [value for value in known if value is not None]
    if known and statistics.mean(known) >= table.least_f_attn:
        return None
    found = f"{statistics.mean(known):.3f}" if known else "not known"
    return (
        f"**Void as far as sinks go**: F-Attn of {first} is {found}, below {table.least_f_attn}: these models are too small, or trained too briefly, to "
        "have a sink that a gate could take away."
    )


def extension_lines(options: ExtensionOptions, results: list[dict[str, Any]], tasks: list[str]) -> list[str]:
    """A table in Markdown: a line for each model and stage, perplexity and accuracies at each length."""
    headings = [f"{what} at {length:,}" for what in ("perplexity", *tasks) for length in options.lengths]
    lines = ["| | | " + " | ".join(headings) + " |", "|---" * (len(headings) + 2) + "|"]
    for (name, stage), of in grouped(results, "name", "stage").items():
        cells = []
        for what in ("perplexity", *tasks):
            for length in options.lengths:
                at = [result["lengths"] and result["lengths"][str(length)] for result in of]
                if what == "perplexity":
                    cells.append(spread([one and one["perplexity"] for one in at], "{:.2f}"))
                else:
                    cells.append(spread([one and one["accuracy"][what]["accuracy"] for one in at], "{:.0%}"))
        lines.append(f"| {name} | {STAGES[stage]} | " + " | ".join(cells) + " |")
    return lines


def _missing(results: list[dict[str, Any]]) -> str | None:
    """What is to be said where there was no model to measure."""
    reasons = dict.fromkeys(
        f"{result['name']}, seed {result['seed']}: {result['reason']}"
        for result in results
        if result["lengths"] is None
    )
    return f"No result: {'; '.join(reasons)}." if reasons else None


def _void_extension(options: ExtensionOptions, results: list[dict[str, Any]]) -> str | None:
    """What is to be said if nothing is solved where the models were trained."""
    first = str(options.lengths[0])
    best: dict[str, float] = {}
    for result in results:
        if result["stage"] == "plain" and result["lengths"]:
            for task, found in result["lengths"][first]["accuracy"].items():
                best[task] = max(best.get(task, 0.0), found["accuracy"])
    unsolved = [f"{task} ({accuracy:.0%})" for task, accuracy in best.items() if accuracy < options.least_accuracy]
    if not unsolved:
        return None
    return (
        f"**Void for {', '.join(unsolved)}**: no model answers {options.least_accuracy:.0%} at {first} tokens, where it was trained, so what it does "
        "at greater lengths says nothing."
    )
