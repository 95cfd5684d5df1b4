"""Draws what a study found: perplexities, losses, attention and activations by layer, gate scores, and stability over learning rates."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..diagnostics.plots import MARKERS, load_pyplot, look
from .extension import POSITIONS_A_POINT, STAGES
from .plan import ExtensionOptions, Study, TableOptions
from .results import grouped


# Between values so many times apart an axis is logarithmic.
WIDE = 5


def draw_study(
    study: Study, found: dict[str, list[dict[str, Any]]], longer: dict[str, list[dict[str, Any]]], folder: Path
) -> dict[str, dict[str, str]]:
    """
    Draw the figures of each table and each extension into `figures`.

    Returns:
        By title of a table, of each figure its file and what it shows.
    """
    drawn: dict[str, dict[str, str]] = {}
    (folder / "figures").mkdir(exist_ok=True)

    def save(figure, title: str, name: str, what: str) -> None:
        path = f"figures/{name}.png"
        figure.savefig(folder / path, dpi=130)
        load_pyplot().close(figure)
        drawn.setdefault(title, {})[path] = what

    for number, table in enumerate(study.tables, start=1):
        results = [result for result in found[table.title] if not result["diverged"]]
        wanted: list[tuple[str, str, Callable, list]] = []
        if len(table.learning_rates or ()) > 1:
            wanted.append(("stability", "perplexity and loss spikes by learning rate", _stability, found[table.title]))
        elif results:
            wanted.append(("perplexity", "perplexity", _perplexities, results))
            wanted.append(("layers", "attention on the first token and largest activation by layer", _layers, results))
            if any(layer["gate_histogram"] for result in results for layer in result["layers"]):
                wanted.append(("gates", "gate scores", _gates, results))
        if any(result["loss"] for result in found[table.title]):
            wanted.append(("loss", "loss over training", _losses, found[table.title]))
        for name, what, draw, of in wanted:
            save(draw(table, of), table.title, f"{number}-{name}", what)
    for number, extension in enumerate(study.extensions, start=1):
        results = [result for result in longer[extension.title] if result["lengths"]]
        if not results:
            continue
        what = "accuracy by length, and loss by position"
        save(_by_length(extension, results), extension.title, f"length-{number}-lengths", what)
        if study.corpus.tasks:
            what = "accuracy by length and depth"
            save(_by_depth(extension, results), extension.title, f"length-{number}-depths", what)
    return drawn


def _perplexities(table: TableOptions, results: list[dict[str, Any]]):
    named = grouped(results, "name")
    figure, axis = load_pyplot().subplots(figsize=(7, 0.8 + 0.36 * len(named)), layout="constrained")
    for place, of in enumerate(named.values()):
        values = [result["perplexity"] for result in of]
        axis.plot(values, [place] * len(values), "o", color="#56B4E9", markersize=4)
        axis.plot(statistics.mean(values), place, "|", color="black", markersize=14, markeredgewidth=2)
    axis.set_yticks(range(len(named)), [name for (name,) in named])
    axis.invert_yaxis()
    axis.set(xlabel="perplexity on held-out documents (points: seeds; bars: means)")
    axis.grid(axis="x", alpha=0.3)
    return figure


def _layers(table: TableOptions, results: list[dict[str, Any]]):
    figure, (left, right) = load_pyplot().subplots(1, 2, figsize=(11, 4), layout="constrained")
    for number, ((name,), of) in enumerate(grouped(results, "name").items()):
        for axis, measure in ((left, "f_attn"), (right, "largest_activation")):
            means = [
                statistics.mean(one[measure] for one in layers)
                for layers in zip(*(result["layers"] for result in of), strict=True)
            ]
            axis.plot(means, label=name, marker=MARKERS[number % len(MARKERS)], markersize=4, **look(number))
    left.set(title="attention on the first token", xlabel="layer", ylim=(0, None))
    right.set(title="largest activation", xlabel="layer", yscale="log")
    for axis in (left, right):
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
    _legend_below(figure, left)
    return figure


def _gates(table: TableOptions, results: list[dict[str, Any]]):
    figure, axis = load_pyplot().subplots(figsize=(7, 4), layout="constrained")
    for number, ((name,), of) in enumerate(grouped(results, "name").items()):
        histograms = [
            (layer["gate_histogram"], layer["gate_histogram_end"])
            for result in of
            for layer in result["layers"]
            if layer["gate_histogram"] is not None
        ]
        if not histograms:
            continue
        bins, end = len(histograms[0][0]), histograms[0][1]
        means = [statistics.mean(one[index] for one, _ in histograms) for index in range(bins)]
        centres = [(index + 0.5) * end / bins for index in range(bins)]
        mean = statistics.mean(result["gate_mean"] for result in of)
        axis.plot(centres, means, label=f"{name}: mean {mean:.2f}", **look(number))
    axis.set(title="gate scores, all layers and heads", xlabel="score", ylabel="share", ylim=(0, None))
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize="small")
    return figure


def _losses(table: TableOptions, results: list[dict[str, Any]]):
    figure, axis = load_pyplot().subplots(figsize=(8, 4.5), layout="constrained")
    several_rates = len(table.learning_rates or ()) > 1
    names = list(dict.fromkeys(result["name"] for result in results))
    rates = list(dict.fromkeys(result["learning_rate"] for result in results))
    labelled = set()
    for result in results:
        if not result["loss"]:
            continue
        label = result["name"] + (f", {result['learning_rate']:g}" if several_rates else "")
        style = look(names.index(result["name"]))
        if several_rates:  # a variant keeps its colour, a learning rate its line
            style |= {"linestyle": look(rates.index(result["learning_rate"]))["linestyle"]}
        steps, values = zip(*result["loss"], strict=True)
        axis.plot(steps, values, linewidth=0.9, alpha=0.8, label=None if label in labelled else label, **style)
        labelled.add(label)
        if result["diverged"]:
            axis.plot(steps[-1], values[-1], "x", color=style["color"], markersize=8)
    if any(result["diverged"] and result["loss"] for result in results):
        axis.plot([], [], "x", color="black", label="diverged")
    axis.set(title="training loss", xlabel="step", ylabel="loss")
    axis.grid(alpha=0.3)
    _legend_below(figure, axis)
    return figure


def _stability(table: TableOptions, results: list[dict[str, Any]]):
    figure, (left, right) = load_pyplot().subplots(1, 2, figsize=(11, 4), layout="constrained")
    for number, ((name,), of) in enumerate(grouped(results, "name").items()):
        rates = sorted({result["learning_rate"] for result in of})
        style = {"marker": MARKERS[number % len(MARKERS)], "markersize": 5, **look(number)}
        known = [
            (rate, [one["perplexity"] for one in of if one["learning_rate"] == rate and not one["diverged"]])
            for rate in rates
        ]
        known = [(rate, values) for rate, values in known if values]
        left.plot([rate for rate, _ in known], [statistics.mean(values) for _, values in known], label=name, **style)
        counted = [
            (rate, [one["spikes"] for one in of if one["learning_rate"] == rate and one["spikes"] is not None])
            for rate in rates
        ]
        counted = [(rate, statistics.mean(values)) for rate, values in counted if values]
        right.plot([rate for rate, _ in counted], [mean for _, mean in counted], **style)
        for rate in rates:
            if count := sum(one["diverged"] for one in of if one["learning_rate"] == rate):
                right.annotate(f"{name}: {count} diverged", (rate, 0), rotation=90, fontsize="x-small", va="bottom")
    right.set(title="loss spikes a run", xscale="log", xlabel="learning rate", ylim=(0, None))
    left.set(title="perplexity of the runs that did not diverge", xlabel="learning rate", xlim=right.get_xlim())
    left.set_xscale(right.get_xscale())
    perplexities = [value for line in left.lines for value in line.get_ydata()]
    if perplexities and max(perplexities) > WIDE * min(perplexities):
        left.set_yscale("log")
    every_rate = sorted({result["learning_rate"] for result in results})
    for axis in (left, right):
        axis.set_xticks(every_rate, [f"{rate:g}" for rate in every_rate])
        axis.set_xticks([], minor=True)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    _legend_below(figure, left)
    return figure


def _look_of_stage(names: list[str], name: str, stage: str) -> dict:
    """A model keeps its colour, a stage its line and marker."""
    place = list(STAGES).index(stage)
    return look(names.index(name)) | {"linestyle": look(place)["linestyle"], "marker": MARKERS[place], "markersize": 4}


def _by_length(options: ExtensionOptions, results: list[dict[str, Any]]):
    tasks = list(results[0]["lengths"][str(options.lengths[0])]["accuracy"])
    names = list(dict.fromkeys(result["name"] for result in results))
    figure, all_axes = load_pyplot().subplots(
        1, len(tasks) + 1, figsize=(4.2 * (len(tasks) + 1), 4), layout="constrained", squeeze=False
    )
    axes = all_axes[0]
    for (name, stage), of in grouped(results, "name", "stage").items():
        style = _look_of_stage(names, name, stage)
        for axis, task in zip(axes, tasks, strict=False):
            values = [
                statistics.mean(one["lengths"][str(length)]["accuracy"][task]["accuracy"] for one in of)
                for length in options.lengths
            ]
            axis.plot(options.lengths, values, **style)
        losses = zip(*(one["lengths"][str(options.lengths[-1])]["loss_by_position"] for one in of), strict=True)
        means = [statistics.mean(part) for part in losses]
        positions = [(place + 0.5) * POSITIONS_A_POINT for place in range(len(means))]
        label = f"{name}, {STAGES[stage]}"
        axes[-1].plot(positions, means, label=label, **style | {"marker": None})
    for axis, task in zip(axes, tasks, strict=False):
        axis.set(title=f"{task}: share right", xlabel="tokens", ylim=(-0.02, 1.02), xticks=options.lengths)
    axes[-1].set(title=f"loss by position, windows of {options.lengths[-1]:,}", xlabel="position")
    axes[-1].axvline(options.lengths[0], color="grey", linewidth=0.8)
    for axis in axes:
        axis.grid(alpha=0.3)
    _legend_below(figure, axes[-1], columns=3)
    return figure


def _by_depth(options: ExtensionOptions, results: list[dict[str, Any]]):
    tasks = list(results[0]["lengths"][str(options.lengths[0])]["accuracy"])
    staged = grouped(results, "name", "stage")
    figure, axes = load_pyplot().subplots(
        len(tasks),
        len(staged),
        figsize=(2.1 * len(staged) + 1, 2.1 * len(tasks) + 0.6),
        layout="constrained",
        squeeze=False,
    )
    image = None
    for line, (row, task) in enumerate(zip(axes, tasks, strict=True)):
        for axis, ((name, stage), of) in zip(row, staged.items(), strict=True):
            grid = []
            for length in options.lengths:
                depths = zip(*(one["lengths"][str(length)]["accuracy"][task]["by_depth"] for one in of), strict=True)
                known = [[value for value in values if value is not None] for values in depths]
                grid.append([statistics.mean(values) if values else float("nan") for values in known])
            image = axis.imshow(grid, vmin=0, vmax=1, aspect="auto", cmap="viridis")
            axis.set_xticks([0, len(grid[0]) - 1], ["begin", "end"], fontsize="x-small")
            axis.set_yticks(range(len(options.lengths)), options.lengths, fontsize="x-small")
            if line == 0:
                axis.set_title(f"{name},\n{STAGES[stage]}", fontsize="x-small")
        row[0].set_ylabel(task)
    figure.colorbar(image, ax=axes, label="share right", shrink=0.6)
    return figure


def _legend_below(figure, axis, columns: int = 4) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(columns, max(1, len(labels))),
        frameon=False,
        fontsize="small",
    )
