"""Figures of the comparisons: what low bits cost, where, and how well models copy."""

import math
from pathlib import Path

from .plots import MARKERS, legend_below, load_pyplot, look, plain_name, save_figure


# Bars that reach further are cut off there, with their figure beside them.
_LARGEST_RATIO = 20


def draw_low_bit(results: dict, labels: dict, folder: Path) -> Path:
    """
    Perplexity over that of the model as it is, by scheme, and, where it was looked for, by layer and by kind of linear layer.

    Args:
        results: [`LowBitComparison`] of each model.
        labels: What schemes are called.
        folder: Where `low_bit.png` and `low_bit.svg` go.
    """
    pyplot = load_pyplot()
    with_layers = {name: result.layers for name, result in results.items() if result.layers is not None}
    figure, all_axes = pyplot.subplots(
        1, 3 if with_layers else 1, figsize=(18 if with_layers else 7, 5), layout="constrained", squeeze=False
    )
    schemes = [scheme for scheme in next(iter(results.values())).runs if scheme is not None]
    ratios = {name: [result.ratio(scheme) for scheme in schemes] for name, result in results.items()}
    _bars(all_axes[0][0], [labels[scheme] for scheme in schemes], ratios)
    all_axes[0][0].set_title("Linear layers in eight bits")
    if with_layers:
        _by_layer(all_axes[0][1], with_layers, {name: number for number, name in enumerate(results)})
        projections = list(dict.fromkeys(unit for costs in with_layers.values() for unit in costs.projections))
        alone = {
            name: [costs.projections.get(unit, float("nan")) / costs.perplexity for unit in projections]
            for name, costs in with_layers.items()
        }
        _bars(all_axes[0][2], projections, alone)
        all_axes[0][2].set_title("One kind of linear layer alone, one scale a tensor")
    return save_figure(pyplot, figure, folder / "low_bit")


def _bars(axes, groups: list[str], ratios: dict[str, list[float]]) -> None:
    """Horizontal bars from 1 on, a group for each of `groups`, a bar for each model."""
    height = 0.8 / len(ratios)
    for number, (name, values) in enumerate(ratios.items()):
        # A model need not have every group: no gate, no bar.
        bars = [(group + number * height, value) for group, value in enumerate(values) if not math.isnan(value)]
        places = [place for place, _ in bars]
        shown = [min(value, _LARGEST_RATIO) - 1 for _, value in bars]
        axes.barh(places, shown, height, left=1, color=look(number)["color"], label=plain_name(name))
        for place, value in bars:
            axes.text(max(1, min(value, _LARGEST_RATIO)), place, f" {value:,.3f}", va="center", fontsize="small")
    axes.set_yticks([group + (len(ratios) - 1) * height / 2 for group in range(len(groups))], groups)
    axes.invert_yaxis()
    axes.set_axisbelow(True)
    axes.margins(x=0.2)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("perplexity / that of the model as it is")
    legend_below(axes)


def _by_layer(axes, with_layers: dict, numbers: dict[str, int]) -> None:
    for name, costs in with_layers.items():
        number = numbers[name]
        axes.plot(
            list(costs.layers),
            [perplexity / costs.perplexity for perplexity in costs.layers.values()],
            marker=MARKERS[number % len(MARKERS)],
            markersize=4,
            label=plain_name(name),
            **look(number),
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(
        xlabel="layer", ylabel="perplexity / that of the model as it is", title="One layer alone, one scale a tensor"
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    legend_below(axes)


def draw_input_ranges(costs_by_model: dict, folder: Path) -> Path | None:
    """
    How many bits a typical token loses to the largest in one scale, kind of linear layer by layer, a panel for each model.

    Args:
        costs_by_model: [`LayerCosts`] of each model; for none, nothing is drawn.
        folder: Where `input_ranges.png` and `input_ranges.svg` go.
    """
    if not costs_by_model:
        return None
    pyplot = load_pyplot()
    number = len(costs_by_model)
    figure, all_axes = pyplot.subplots(
        number, 1, figsize=(10, 0.6 + 3.2 * number), layout="constrained", squeeze=False
    )
    most = max(entry.bits_lost for costs in costs_by_model.values() for entry in costs.ranges)
    for axes, (name, costs) in zip(all_axes[:, 0], costs_by_model.items(), strict=True):
        projections = list(dict.fromkeys(entry.projection for entry in costs.ranges))
        layers = sorted({entry.layer_idx for entry in costs.ranges})
        grid = [[float("nan")] * len(layers) for _ in projections]
        for entry in costs.ranges:
            grid[projections.index(entry.projection)][layers.index(entry.layer_idx)] = entry.bits_lost
        image = axes.imshow(grid, aspect="auto", cmap="cividis", vmin=0, vmax=most)
        axes.set_yticks(range(len(projections)), projections, fontsize="small", parse_math=False)
        step = max(1, len(layers) // 15)
        axes.set_xticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
        axes.set(xlabel="layer", title=plain_name(name))
    figure.colorbar(image, ax=all_axes[:, 0].tolist(), label="bits that a typical token loses")
    figure.suptitle("Inputs of linear layers: log2(largest / typical token's largest)")
    return save_figure(pyplot, figure, folder / "input_ranges")


def draw_copying(results: dict, folder: Path) -> Path:
    """
    Accuracy and loss of copying by distance.

    Args:
        results: List of [`CopyingResult`] of each model.
        folder: Where `copying.png` and `copying.svg` go.
    """
    pyplot = load_pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 4.8), layout="constrained")
    for number, (name, runs) in enumerate(results.items()):
        distances = [run.distance for run in runs]
        mark = {"marker": MARKERS[number % len(MARKERS)], "markersize": 4, **look(number)}
        errors = [run.accuracy_error or 0 for run in runs]
        left.errorbar(
            distances, [run.accuracy for run in runs], yerr=errors, capsize=3, label=plain_name(name), **mark
        )
        right.plot(distances, [run.loss for run in runs], label=f"{plain_name(name)}: repeat", **mark)
        right.plot(
            distances,
            [run.first_loss for run in runs],
            color=mark["color"],
            linewidth=1,
            alpha=0.5,
            label=f"{plain_name(name)}: at first",
        )
    left.set(ylabel="accuracy on the repeat", ylim=(-0.02, 1.02), title="Copying random tokens (± standard error)")
    right.set(ylabel="loss, nats a token", title="Loss of the repeated tokens")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set(xlabel="distance, tokens", xscale="log")
        axes.set_xticks(distances, [f"{distance:,}" for distance in distances])
        axes.minorticks_off()
        legend_below(axes)
    return save_figure(pyplot, figure, folder / "copying")
