"""Inspections as text: a table for the terminal, one column a model, and a section for a model card."""

from .results import Inspection


_ROWS = (
    ("perplexity", "perplexity", "{:.3f}"),
    ("attention on the first token (F-Attn)", "f_attn", "{:.4f}"),
    ("largest share of any key", "largest_key_share", "{:.4f}"),
    ("sink rate", "sink_rate", "{:.1%}"),
    ("attention entropy, nats", "entropy", "{:.3f}"),
    ("mean over layers of the largest activation (M-Act)", "m_act", "{:,.1f}"),
    ("largest activation", "largest_activation", "{:,.1f}"),
    ("attention output, largest (mean)", "attention_output_max", "{:.2f}"),
    ("attention output, kurtosis", "attention_output_kurtosis", "{:.1f}"),
    ("effective rank of W_V W_O", "weight_rank", "{:.1f}"),
    ("effective rank of head outputs", "output_rank", "{:.1f}"),
    ("effective rank of head outputs after the gate", "gated_output_rank", "{:.1f}"),
    ("gate score, mean", "gate_mean", "{:.4f}"),
    ("gate scores below 0.1", "gate_closed_fraction", "{:.1%}"),
)


def summary_rows(inspections: list[Inspection]) -> list[list[str]]:
    """The figures of whole models: a header and one row a figure; figures that no model has are left out."""
    rows = [["", *(inspection.settings.model for inspection in inspections)]]
    for label, key, form in _ROWS:
        values = [inspection.summary()[key] for inspection in inspections]
        if any(value is not None for value in values):
            rows.append([label, *("-" if value is None else form.format(value) for value in values)])
    rows.append(["largest activation at", *(_place(inspection) for inspection in inspections)])
    return rows


def layer_rows(inspection: Inspection) -> list[list[str]]:
    """One row a layer: means over heads."""
    gated = any(layer.gate for layer in inspection.layers)
    header = ["layer", "F-Attn", "largest key", "at", "entropy", "|h| top 3", "|h| median"]
    rows = [header + (["gate"] if gated else [])]
    for layer in inspection.layers:
        if layer.f_attn is None:
            attention = [layer.kind, "", "", ""]
        else:
            attention = [
                f"{_mean(layer.f_attn):.3f}",
                f"{_mean(layer.largest_key_share):.3f}",
                str(layer.largest_key_position),
                f"{_mean(layer.entropy):.2f}",
            ]
        top = " ".join(f"{value:,.0f}" for value in layer.mean_top_activations)
        row = [str(layer.layer_idx), *attention, top, f"{layer.median_activation:.2f}"]
        rows.append(row + ([f"{_mean(layer.gate.mean):.3f}" if layer.gate else "-"] if gated else []))
    return rows


def begins(bos: bool) -> str:
    """How windows begin."""
    return "BOS first" if bos else "no BOS"


def settings_line(inspection: Inspection) -> str:
    settings = inspection.settings
    bos = "" if settings.bos is None else f", {begins(settings.bos)}"
    text = f" of {settings.text}" if settings.text else ""
    return (
        f"{settings.model}: {settings.tokens:,} tokens{text} in {settings.windows} windows of {settings.length:,}{bos}; "
        f"{settings.dtype}, {settings.attn_implementation}"
    )


def terminal_report(inspections: list[Inspection], layers: bool = True) -> str:
    """Settings, the figures side by side, and, for each model, its layers."""
    parts = ["\n".join(settings_line(inspection) for inspection in inspections), aligned(summary_rows(inspections))]
    for inspection in inspections:
        if layers:
            parts.append(f"{inspection.settings.model}\n{aligned(layer_rows(inspection))}")
    parts += [note for inspection in inspections if (note := skipped_note(inspection))]
    return "\n\n".join(parts)


def skipped_note(inspection: Inspection) -> str | None:
    """Which layers' attention is not in the figures, and why; nothing if none was asked for."""
    skipped = inspection.skipped_layers
    if not skipped or "not asked for" in skipped.values():
        return None
    listed = ", ".join(f"{index} ({kind})" for index, kind in skipped.items())
    return f"{inspection.settings.model}: attention is not measured in layers {listed}"


def card_section(inspections: list[Inspection]) -> str:
    """A section of a model card: the figures, and what they depend on, in Markdown."""
    lines = ["## Attention sinks, activations and gates", "", *markdown_table(summary_rows(inspections))]
    lines += ["", *(f"{settings_line(inspection)}." for inspection in inspections), ""]
    lines += [f"{note}." for inspection in inspections if (note := skipped_note(inspection))]
    versions = ", ".join(f"{name} {version}" for name, version in inspections[0].settings.versions.items())
    lines.append(f"Measured with `gated-attention inspect` ({versions}).")
    return "\n".join(lines) + "\n"


def markdown_table(rows: list[list[str]]) -> list[str]:
    """Rows, the first of them the header, as the lines of a table in Markdown."""
    header, *others = [f"| {' | '.join(map(markdown_text, row))} |" for row in rows]
    return [header, "|" + "---|" * len(rows[0]), *others]


def markdown_text(text: str) -> str:
    """Text that neither ends a cell of a table nor opens a tag, as tokens such as <|begin_of_text|> would."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", "<br>")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _place(inspection: Inspection) -> str:
    activation = inspection.largest_activation
    token = f" {activation.token!r}" if activation.token is not None else ""
    return f"layer {activation.layer_idx}, position {activation.position}{token}, channel {activation.channel}"


def aligned(rows: list[list[str]]) -> str:
    """Rows as text, the first column to the left and the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
