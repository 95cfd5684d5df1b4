"""One self-contained HTML page with the figures, the tables and the settings of an inspection."""

from html import escape
from pathlib import Path

from .report import layer_rows, settings_line, skipped_note, summary_rows
from .results import Inspection


_STYLE = """
body { font-family: system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.7rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1.5rem 0; }
figure svg { max-width: 100%; height: auto; }
.wide { grid-column: 1 / -1; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(32rem, 1fr)); gap: 0 1.5rem; }
"""


def write_page(inspections: list[Inspection], figures: dict[str, Path], path: Path) -> None:
    """
    Write the page.

    Args:
        inspections: What was found.
        figures: Name and SVG file of each figure, as [`draw_inspections`] returns them; they are put into the page.
        path: File to write.
    """
    names = ", ".join(inspection.settings.model for inspection in inspections)
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>Inspection: {escape(names)}</title>',
        f"<style>{_STYLE}</style></head><body>",
        "<h1>Attention sinks, activations and gates</h1>",
        *(f"<p>{escape(settings_line(inspection))}</p>" for inspection in inspections),
        _table(summary_rows(inspections)),
        *(f"<p>{escape(note)}</p>" for inspection in inspections if (note := skipped_note(inspection))),
        '<div class="figures">',
        *(_figure(name, file) for name, file in figures.items() if name != "sheet"),
        "</div>",
        *(
            f"<details><summary>Layers of {escape(inspection.settings.model)}</summary>{_table(layer_rows(inspection))}</details>"
            for inspection in inspections
        ),
        f"<p>{escape(_versions(inspections[0]))}</p>",
        "</body></html>",
    ]
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def _table(rows: list[list[str]]) -> str:
    header, *body = rows
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in body]
    return f"<table><tr>{head}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _figure(name: str, file: Path) -> str:
    wide = ' class="wide"' if name.startswith("attention_maps") else ""
    return f"<figure{wide}>{_inline_svg(file, name)}</figure>"


def _inline_svg(file: Path, name: str) -> str:
    """The drawing without its XML prologue. Ids are made unique, since figures that share a page share its names."""
    content = file.read_text(encoding="utf-8")
    content = content[content.index("<svg") :]
    for attribute in ('id="', 'xlink:href="#', "url(#"):
        content = content.replace(attribute, f"{attribute}{name}-")
    return content


def _versions(inspection: Inspection) -> str:
    return ", ".join(f"{package} {version}" for package, version in inspection.settings.versions.items())
