"""`gated-attention inspect`: loads models, inspects them on one text, prints, draws and saves."""

import gc
import json
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from .. import modeling_gated  # noqa: F401 (registers the gated models with the Auto classes)
from .errors import InspectionError
from .inspection import inspect_text, windows_of
from .page import write_page
from .plots import attention_maps, draw_inspections
from .report import aligned, card_section, terminal_report
from .results import Inspection
from .streaming import StreamingResult, streaming_perplexity
from .texts import dataset_text, default_text, read_text


def run_inspection(
    models: list[str],
    *,
    text: Path | None = None,
    dataset: str | None = None,
    split: str = "test",
    column: str = "text",
    length: int = 1024,
    tokens: int = 16384,
    bos: bool | None = None,
    dtype: str = "auto",
    attn_implementation: str | None = None,
    attention: bool = True,
    device: str | None = None,
    trust_remote_code: bool = False,
    out: Path | None = None,
    echo: Callable[[str], None] = print,
) -> list[Inspection]:
    """
    Inspect models one after the other on the same text.

    Args:
        models: Folders or Hub ids.
        text, dataset: A text file, or a data set; default: Python's own help pages.
        out (`Path`, *optional*): Folder for `inspection.json`, the figures, `inspection.html` and `card.md`.
        echo: Where the report goes.
        The rest: see the command's help and [`inspect_text`].

    Returns:
        `list[Inspection]`, one for each model.

    Raises:
        [`InspectionError`]: a model or the text cannot be inspected.
    """
    if text is not None and dataset is not None:
        raise InspectionError("give --text or --dataset, not both")
    if text is not None:
        content, text_name = read_text(text), text.name
    elif dataset is not None:
        content, text_name = dataset_text(dataset, tokens, split, column), f"{Path(dataset).name} ({split})"
    else:
        content, text_name = default_text()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")

    inspections, maps = [], {}
    for name in _short_names(models):
        model, tokenizer = _load(models[len(inspections)], dtype, attn_implementation, device, trust_remote_code)
        inspection = inspect_text(
            model,
            tokenizer,
            content,
            length=length,
            tokens=tokens,
            bos=bos,
            text_name=text_name,
            name=name,
            attention=attention,
        )
        inspections.append(inspection)
        if out is not None and attention:
            maps[name] = attention_maps(model, tokenizer, content, _chosen_layers(inspection), inspection.settings.bos)
        del model
        gc.collect()

    echo(terminal_report(inspections))
    if out is not None:
        _write(inspections, maps, out)
        echo(f"\nfigures, inspection.json, inspection.html and card.md are in {out}")
    return inspections


def run_streaming(
    models: list[str],
    *,
    text: Path | None = None,
    length: int = 8192,
    window: int = 1024,
    kept: int = 4,
    bos: bool | None = None,
    dtype: str = "auto",
    device: str | None = None,
    trust_remote_code: bool = False,
    out: Path | None = None,
    echo: Callable[[str], None] = print,
) -> dict[str, dict[str, StreamingResult]]:
    """
    The streaming test on models, one after the other: full cache, last tokens only, last tokens and the first `kept`.

    Returns:
        For each model the results by name of the run.

    Raises:
        [`InspectionError`]: a model or the text cannot be used.
    """
    content, text_name = (read_text(text), text.name) if text is not None else default_text()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    runs = {"full cache": None, f"last {window}": 0, f"first {kept} and last {window - kept}": kept}
    results = {}
    for name, path in zip(_short_names(models), models, strict=True):
        model, tokenizer = _load(path, dtype, None, device, trust_remote_code)
        (input_ids, *_), with_bos = windows_of(tokenizer, content, length, length, bos)
        results[name] = {
            label: streaming_perplexity(model, input_ids, window, first)
            for label, first in tqdm(runs.items(), desc=f"Streaming {name}", unit="run", disable=None)
        }
        begins = "BOS first" if with_bos else "no BOS"
        rows = [["", "perplexity", "past the window"]]
        rows += [
            [label, f"{result.perplexity:.3f}", f"{result.perplexity_past_window:.3f}"]
            for label, result in results[name].items()
        ]
        echo(
            f"{name}: {length:,} tokens of {text_name}, {begins}; {str(model.dtype).removeprefix('torch.')}\n{aligned(rows)}\n"
        )
        del model
        gc.collect()
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        content = {
            name: {label: result.to_dict() for label, result in found.items()} for name, found in results.items()
        }
        out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return results


def _load(name: str, dtype: str, attn_implementation: str | None, device: str, trust_remote_code: bool):
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise InspectionError(
            f"`dtype` must be auto or a floating point type of torch such as bfloat16, got {dtype!r}"
        )
    options = {"trust_remote_code": trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, attn_implementation=attn_implementation, **options
        )
    except (ValueError, KeyError, ImportError) as error:
        raise InspectionError(f"{name} cannot be loaded as a causal language model: {error}") from error
    return model.to(device), tokenizer


def _short_names(models: list[str]) -> list[str]:
    """Folder or repository names; whole ones where the short ones are the same."""
    short = [Path(model).resolve().name if Path(model).is_dir() else model for model in models]
    return short if len(set(short)) == len(short) else models


def _chosen_layers(inspection: Inspection, number: int = 3) -> list[int]:
    """A layer near the beginning, one in the middle and one near the end, of those with attention."""
    measured = [layer.layer_idx for layer in inspection.layers if layer.f_attn]
    picks = [measured[int(share * (len(measured) - 1))] for share in (0.1, 0.5, 0.9)]
    return sorted(set(picks))[:number]


def _write(inspections: list[Inspection], maps: dict[str, list], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    if len(inspections) == 1:
        inspections[0].save(out / "inspection.json")
    else:
        for number, inspection in enumerate(inspections, start=1):
            inspection.save(out / f"inspection_{number}.json")
    figures = draw_inspections(inspections, out, maps)
    write_page(inspections, figures, out / "inspection.html")
    (out / "card.md").write_text(card_section(inspections), encoding="utf-8")
