"""`gated-attention inspect`: loads models, inspects them on one text, prints, draws and saves."""

import gc
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from .. import modeling_gated  # noqa: F401 (registers the gated models with the Auto classes)
from .capture import decoder_layers
from .errors import InspectionError
from .inspection import inspect_text, windows_of
from .page import write_page
from .plots import attention_maps, check_plots, draw_inspections
from .report import aligned, card_section, terminal_report
from .results import Inspection
from .streaming import StreamingResult, streaming_perplexity
from .texts import dataset_text, default_text, read_text


@dataclass(frozen=True)
class TextOptions:
    """
    The text that models run on.

    Attributes:
        text: Text file; None: a data set, or Python's own help pages.
        length: Tokens in a window.
        tokens: Tokens in all.
        bos: Whether windows begin with BOS; None: as the tokenizer does.
        dataset, split, column: A data set instead of a file.
    """

    text: Path | None = None
    length: int = 1024
    tokens: int = 16384
    bos: bool | None = None
    dataset: str | None = None
    split: str = "test"
    column: str = "text"

    def read(self) -> tuple[str, str]:
        """The text, and what to call it."""
        if self.text is not None and self.dataset is not None:
            raise InspectionError("give --text or --dataset, not both")
        if self.text is not None:
            return read_text(self.text), self.text.name
        if self.dataset is not None:
            content = dataset_text(self.dataset, self.tokens, self.split, self.column)
            return content, f"{Path(self.dataset).name} ({self.split})"
        return default_text()


@dataclass(frozen=True)
class LoadOptions:
    """How models are loaded: the arguments of `from_pretrained`, and the device (None: CUDA if there is one)."""

    dtype: str = "auto"
    attn_implementation: str | None = None
    device: str | None = None
    trust_remote_code: bool = False

    def check(self) -> None:
        """Refuse what cannot work before anything is loaded."""
        if self.dtype != "auto" and not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise InspectionError(
                f"`dtype` must be auto or a floating point type of torch such as bfloat16, got {self.dtype!r}"
            )

    def load(self, name: str):
        """The model and its tokenizer."""
        self.check()
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=self.trust_remote_code)
            model = AutoModelForCausalLM.from_pretrained(
                name,
                dtype=self.dtype,
                attn_implementation=self.attn_implementation,
                trust_remote_code=self.trust_remote_code,
            )
        except (ValueError, KeyError, ImportError, SafetensorError) as error:
            raise InspectionError(f"{name} cannot be loaded as a causal language model: {error}") from error
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            return model.to(device), tokenizer
        except (RuntimeError, AssertionError) as error:
            raise InspectionError(f"the model cannot be moved to the device {device!r}: {error}") from error


def run_inspection(
    models: list[str],
    text_options: TextOptions,
    load_options: LoadOptions,
    *,
    attention: bool = True,
    map_layers: list[int] | None = None,
    out: Path | None = None,
    echo: Callable[[str], None] = print,
) -> list[Inspection]:
    """
    Inspect models one after the other on the same text.

    Args:
        models: Folders or Hub ids.
        text_options, load_options: The text, and how models are loaded.
        attention (`bool`): Whether attention is looked at.
        map_layers (`list[int]`, *optional*): Layers whose attention maps are drawn, for a short text; default: one near the
            beginning, one in the middle and one near the end.
        out (`Path`, *optional*): Folder for `inspection.json`, the figures, `inspection.html` and `card.md`.
        echo: Where the report goes.

    Returns:
        `list[Inspection]`, one for each model.

    Raises:
        [`InspectionError`]: a model or the text cannot be inspected.
    """
    if out is not None:
        check_plots()
        out.mkdir(parents=True, exist_ok=True)
    content, text_name = text_options.read()
    inspections, maps = [], {}
    for name, path in zip(short_names(models), models, strict=True):
        model, tokenizer = load_options.load(path)
        number = len(decoder_layers(model))
        for layer in map_layers or ():  # before the work
            if not 0 <= layer < number:
                raise InspectionError(f"layer {layer} has no attention to draw: {name} has layers 0 to {number - 1}")
        inspection = inspect_text(
            model,
            tokenizer,
            content,
            length=text_options.length,
            tokens=text_options.tokens,
            bos=text_options.bos,
            text_name=text_name,
            name=name,
            attention=attention,
        )
        inspections.append(inspection)
        if out is not None:  # before anything is drawn, and before the next model
            inspection.save(out / ("inspection.json" if len(models) == 1 else f"inspection_{len(inspections)}.json"))
        if out is not None and attention:
            layers = _chosen_layers(inspection, map_layers)
            maps[name] = attention_maps(model, tokenizer, content, layers, inspection.settings.bos)
        del model
        gc.collect()

    echo(terminal_report(inspections))
    if out is not None:
        write_report(inspections, out, maps)
        echo(f"\nfigures, inspection.json, inspection.html and card.md are in {out}")
    return inspections


def run_streaming(
    models: list[str],
    text_options: TextOptions,
    load_options: LoadOptions,
    *,
    window: int = 1024,
    kept: int = 4,
    out: Path | None = None,
    echo: Callable[[str], None] = print,
) -> dict[str, dict[str, StreamingResult]]:
    """
    The streaming test on models, one after the other: full cache, last tokens only, last tokens and the first `kept`.

    Args:
        models: Folders or Hub ids.
        text_options, load_options: The text (its first window), and how models are loaded.
        window, kept (`int`): As for [`streaming_perplexity`].
        out (`Path`, *optional*): JSON file to write.
        echo: Where the report goes.

    Returns:
        For each model the results by name of the run.

    Raises:
        [`InspectionError`]: a model or the text cannot be used.
    """
    content, text_name = text_options.read()
    runs = {"full cache": None, f"last {window}": 0, f"first {kept} and last {window - kept}": kept}
    results = {}
    for name, path in zip(short_names(models), models, strict=True):
        model, tokenizer = load_options.load(path)
        length = text_options.length
        (input_ids, *_), with_bos = windows_of(tokenizer, content, length, length, text_options.bos)
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
        dtype = str(model.dtype).removeprefix("torch.")
        echo(f"{name}: {length:,} tokens of {text_name}, {begins}; {dtype}\n{aligned(rows)}\n")
        del model
        gc.collect()
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        found = {name: {label: run.to_dict() for label, run in runs.items()} for name, runs in results.items()}
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return results


def short_names(models: list[str]) -> list[str]:
    """Folder or repository names; whole ones where the short ones are the same."""
    short = [Path(model).resolve().name if Path(model).is_dir() else model for model in models]
    names = short if len(set(short)) == len(short) else models
    return [name if name not in names[:place] else f"{name} ({place + 1})" for place, name in enumerate(names)]


def _chosen_layers(inspection: Inspection, wanted: list[int] | None) -> list[int]:
    measured = [layer.layer_idx for layer in inspection.layers if layer.f_attn]
    if wanted is None:
        return sorted({measured[int(share * (len(measured) - 1))] for share in (0.1, 0.5, 0.9)})
    for layer in wanted:
        if layer not in measured:
            raise InspectionError(
                f"layer {layer} has no attention to draw; {inspection.settings.model} has it in layers "
                f"{', '.join(map(str, measured))}"
            )
    return wanted


def write_report(inspections: list[Inspection], out: Path, maps: dict[str, list] | None = None) -> None:
    """Figures, page and card section of inspections that are shown side by side; `maps` as for [`draw_inspections`]."""
    figures = draw_inspections(inspections, out, maps)
    write_page(inspections, figures, out / "inspection.html")
    (out / "card.md").write_text(card_section(inspections), encoding="utf-8")
