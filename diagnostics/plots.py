"""Draws inspections: one figure a subject, and a sheet with all of them, as PNG and SVG."""

import math
from pathlib import Path

import torch

from .capture import layer_index_of, replaced_attention
from .errors import InspectionError
from .results import Inspection


# Okabe and Ito's palette, told apart by colour-blind readers; line styles and markers tell them apart in print.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_MAP_TOKENS = 40

# A model keeps its number, and so its colour, in figures that show only some of the models.
_Numbered = list[tuple[int, Inspection]]


def check_plots() -> None:
    """Say what is missing before the work rather than after it."""
    load_pyplot()


def load_pyplot():
    """matplotlib's pyplot, drawing into files."""
    try:
        import matplotlib
    except ImportError as error:
        raise InspectionError("plots need matplotlib: pip install 'gated-attention[plots]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def look(number: int) -> dict:
    """Colour and line style of a model, by its number."""
    return {"color": _COLORS[number % len(_COLORS)], "linestyle": _STYLES[number % len(_STYLES)]}


def _mean(values):
    return sum(values) / len(values)


def draw_f_attn(axes, inspections: _Numbered) -> None:
    """Attention on the first token and the largest share of any key, by layer."""
    for number, inspection in inspections:
        layers = [layer for layer in inspection.layers if layer.f_attn]
        index = [layer.layer_idx for layer in layers]
        name = plain_name(inspection.settings.model)
        axes.plot(
            index,
            [_mean(layer.f_attn) for layer in layers],
            label=f"{name}: first token ({inspection.f_attn:.3f})",
            marker=MARKERS[number % len(MARKERS)],
            markersize=4,
            **look(number),
        )
        axes.plot(
            index,
            [_mean(layer.largest_key_share) for layer in layers],
            label=f"{name}: any key ({inspection.largest_key_share:.3f})",
            color=_COLORS[number % len(_COLORS)],
            linewidth=1,
            alpha=0.5,
        )
    axes.set(xlabel="layer", ylabel="share of attention", ylim=(0, 1), title="Attention on the first token")
    _finish(axes)


def draw_heads(axes, inspection: Inspection, figure) -> None:
    """Attention on the first token, layer by head."""
    heads = max(len(layer.f_attn) for layer in inspection.layers if layer.f_attn)
    nothing = float("nan")
    grid = [[*(layer.f_attn or []), *[nothing] * (heads - len(layer.f_attn or []))] for layer in inspection.layers]
    image = axes.imshow(list(zip(*grid, strict=True)), aspect="auto", origin="lower", cmap="cividis", vmin=0, vmax=1)
    axes.set(
        xlabel="layer", ylabel="head", title=f"Attention on the first token\n{plain_name(inspection.settings.model)}"
    )
    _whole_numbers(axes, both=True)
    figure.colorbar(image, ax=axes, label="share of attention")


def draw_activations(axes, inspections: _Numbered) -> None:
    """The three largest activations and the median, by layer, on a logarithmic scale."""
    for number, inspection in inspections:
        index = [layer.layer_idx for layer in inspection.layers]
        color = _COLORS[number % len(_COLORS)]
        for rank in range(3):
            axes.plot(
                index,
                [layer.mean_top_activations[rank] for layer in inspection.layers],
                color=color,
                alpha=1 - 0.3 * rank,
                linestyle=_STYLES[number % len(_STYLES)],
                marker=MARKERS[number % len(MARKERS)] if rank == 0 else None,
                markersize=4,
                label=f"{plain_name(inspection.settings.model)}: largest three (M-Act {inspection.m_act:,.0f})"
                if rank == 0
                else None,
            )
        axes.plot(
            index,
            [layer.median_activation for layer in inspection.layers],
            color=color,
            linestyle=":",
            label=f"{plain_name(inspection.settings.model)}: median",
        )
    axes.set(xlabel="layer", ylabel="|hidden state|", yscale="log", title="Activations after each layer")
    _finish(axes)


def draw_loss_by_position(axes, inspections: _Numbered, bins: int = 48) -> None:
    """Loss by position in the window, averaged in bins of equal ratio."""
    for number, inspection in inspections:
        losses = [
            (position + 1, loss) for position, loss in enumerate(inspection.loss_by_position) if loss is not None
        ]
        edge = max(position for position, _ in losses) ** (1 / bins)
        grouped: dict[int, list] = {}
        for position, loss in losses:
            slot = 0 if position == 1 else min(bins - 1, int(math.log(position, edge)))
            grouped.setdefault(slot, []).append((position, loss))
        points = [(_mean([p for p, _ in group]), _mean([loss for _, loss in group])) for group in grouped.values()]
        label = f"{plain_name(inspection.settings.model)} (perplexity {inspection.perplexity:.2f})"
        axes.plot(*zip(*points, strict=True), label=label, **look(number))
    axes.set(xlabel="position", ylabel="loss, nats a token", xscale="log", title="Loss by position")
    legend_below(axes)


def draw_gate_means(axes, inspections: _Numbered) -> None:
    """Mean gate score by layer, with the range over heads."""
    for number, inspection in inspections:
        layers = [layer for layer in inspection.layers if layer.gate]
        index = [layer.layer_idx for layer in layers]
        color = _COLORS[number % len(_COLORS)]
        axes.fill_between(
            index,
            [min(layer.gate.mean) for layer in layers],
            [max(layer.gate.mean) for layer in layers],
            color=color,
            alpha=0.2,
        )
        axes.plot(
            index,
            [_mean(layer.gate.mean) for layer in layers],
            label=f"{plain_name(inspection.settings.model)} ({inspection.gate_mean:.3f})",
            **look(number),
        )
    axes.set(xlabel="layer", ylabel="gate score", title="Gate scores: mean and range over heads")
    axes.set_ylim(bottom=0)
    _finish(axes)


def draw_gate_histogram(axes, inspections: _Numbered) -> None:
    """Distribution of the gate scores over all layers."""
    for number, inspection in inspections:
        gates = [layer.gate for layer in inspection.layers if layer.gate]
        bins = len(gates[0].histogram)
        shares = [_mean([gate.histogram[position] for gate in gates]) for position in range(bins)]
        edges = [position * gates[0].histogram_end / bins for position in range(bins + 1)]
        axes.stairs(
            shares, edges, label=plain_name(inspection.settings.model), fill=False, **look(number), linewidth=1.5
        )
    axes.set(xlabel="gate score", ylabel="fraction of scores", yscale="log", title="Gate scores, all layers")
    legend_below(axes)


def draw_attention_map(axes, attention, tokens: list[str], title: str):
    """An attention map `(queries, keys)`, averaged over heads, of a short text; returns the image, for a colour bar."""
    image = axes.imshow(attention, cmap="cividis", vmin=0, vmax=1)
    step = max(1, len(tokens) // 20)
    places = range(0, len(tokens), step)
    labels = [tokens[place].strip() or "·" for place in places]
    axes.set_xticks(places, labels, rotation=90, fontsize=6, parse_math=False)
    axes.set_yticks(places, labels, fontsize=6, parse_math=False)
    axes.set(xlabel="key", ylabel="query", title=title)
    return image


def plain_name(name: str) -> str:
    """A name that matplotlib does not take for a formula."""
    return name.replace("$", r"\$")


def _whole_numbers(axes, both: bool = False) -> None:
    axes.xaxis.get_major_locator().set_params(integer=True)
    if both:
        axes.yaxis.get_major_locator().set_params(integer=True)


def _finish(axes) -> None:
    _whole_numbers(axes)
    legend_below(axes)


def legend_below(axes) -> None:
    """Below the panel, where it hides nothing."""
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)


def draw_inspections(
    inspections: list[Inspection], folder: Path, maps: dict[str, list] | None = None
) -> dict[str, Path]:
    """
    Draw every figure that the inspections have data for, and a sheet with all of them.

    Args:
        inspections: One, or several to compare.
        folder: Where the files go.
        maps (*optional*): For each model, what [`attention_maps`] returned.

    Returns:
        `dict[str, Path]`: name of each figure and its SVG file; a PNG lies beside it.
    """
    pyplot = load_pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    numbered = list(enumerate(inspections))
    attended = [entry for entry in numbered if entry[1].f_attn is not None]
    gated = [entry for entry in numbered if entry[1].gate_mean is not None]
    predicted = [entry for entry in numbered if entry[1].perplexity is not None]
    panels = {}
    if attended:
        panels["f_attn"] = lambda axes, figure: draw_f_attn(axes, attended)
        for number, inspection in attended:
            key = "heads" if len(attended) == 1 else f"heads_{number + 1}"
            panels[key] = lambda axes, figure, inspection=inspection: draw_heads(axes, inspection, figure)
    panels["activations"] = lambda axes, figure: draw_activations(axes, numbered)
    if predicted:
        panels["loss_by_position"] = lambda axes, figure: draw_loss_by_position(axes, predicted)
    if gated:
        panels["gate_means"] = lambda axes, figure: draw_gate_means(axes, gated)
        panels["gate_histogram"] = lambda axes, figure: draw_gate_histogram(axes, gated)

    files = {}
    for name, draw in panels.items():
        figure, axes = pyplot.subplots(figsize=(7, 4.8), layout="constrained")
        draw(axes, figure)
        files[name] = save_figure(pyplot, figure, folder / name)
    for model, entries in ((model, entries) for model, entries in (maps or {}).items() if entries):
        figure, all_axes = pyplot.subplots(
            1, len(entries), figsize=(4.6 * len(entries) + 0.8, 5.0), layout="constrained", squeeze=False
        )
        for axes, (layer, attention, tokens) in zip(all_axes[0], entries, strict=True):
            image = draw_attention_map(axes, attention, tokens, f"layer {layer}")
        figure.colorbar(image, ax=all_axes[0].tolist(), label="share of attention", shrink=0.6)
        figure.suptitle(f"Attention, mean over heads: {plain_name(model)}")
        key = "attention_maps" if len(maps) == 1 else f"attention_maps_{list(maps).index(model) + 1}"
        files[key] = save_figure(pyplot, figure, folder / key)

    rows = (len(panels) + 1) // 2
    figure, all_axes = pyplot.subplots(rows, 2, figsize=(13, 4.8 * rows), layout="constrained", squeeze=False)
    for axes, draw in zip(all_axes.flat, panels.values(), strict=False):
        draw(axes, figure)
    for axes in all_axes.flat[len(panels) :]:
        axes.axis("off")
    files["sheet"] = save_figure(pyplot, figure, folder / "sheet")
    return files


def save_figure(pyplot, figure, path: Path) -> Path:
    """Save as PNG and SVG, and return the SVG's path."""
    figure.savefig(path.with_suffix(".png"), dpi=150)
    figure.savefig(path.with_suffix(".svg"))
    pyplot.close(figure)
    return path.with_suffix(".svg")


def attention_maps(
    model, tokenizer, text: str, layers: list[int], bos: bool, tokens: int = _MAP_TOKENS
) -> list[tuple]:
    """
    Attention maps of a short text, averaged over heads: `[(layer, map, tokens), ...]`. The model runs once with eager
    attention and is given back as it was.
    """
    ids = tokenizer(text[: tokens * 64], add_special_tokens=False).input_ids[: tokens - bos]
    ids = ([tokenizer.bos_token_id] if bos else []) + ids
    names = [tokenizer.decode([token]) for token in ids]
    index_of = layer_index_of(model)
    found = {}

    def keep(module, *args, original, **kwargs):
        result = original(module, *args, **kwargs)
        index = index_of.get(id(module))
        if index in layers:
            found[index] = result[1][0].float().mean(0).cpu().numpy()
        return result

    backend = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad(), replaced_attention(model, keep):
            model(torch.tensor([ids], device=model.device), use_cache=False)
    finally:
        model.set_attn_implementation(backend)
    return [(layer, found[layer], names) for layer in layers if layer in found]
