"""`gated-attention low-bit`: what eight bits cost models, side by side, and which of their layers cost most."""

import importlib.util
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tqdm import tqdm

from .command import LoadOptions, TextOptions
from .comparison_plots import draw_input_ranges, draw_low_bit
from .comparisons import loaded_models, model_settings, prepare_folder, write_results
from .errors import InspectionError
from .inspection import windows_of
from .low_bit import SCHEMES, LowBitResult, check_torchao, linear_layers, low_bit_perplexity, torchao_perplexity
from .low_bit_layers import LayerCosts, layer_costs
from .report import aligned, begins
from .smoothing import check_smoothing, smooth_model


# Parts and linear layers that are listed for each model; the JSON file has them all.
_LISTED = 10

_RUN_LABELS = {
    None: "not rounded",
    **SCHEMES,
    "smoothed": "one scale a tensor, smoothed",
    "torchao": "torchao's dynamic int8",
}
# Windows that a smoothing is found on.
_SMOOTHED_ON = 16


@dataclass(frozen=True)
class LowBitOptions:
    """
    Attributes:
        torchao: Whether torchao's own int8 is run too; None: if it is installed.
        lm_head: Whether the output head is rounded too.
        keep: Patterns (of `re.search`) for the names of linear layers that are left as they are.
        by_layer: Tokens to find on which layers cost most; 0: they are not looked for.
        smoothing: Strength of a smoothing ([`smooth_model`]) that is tried too, found on the windows that follow those of the test; 0: none.
    """

    torchao: bool | None = None
    lm_head: bool = False
    keep: tuple[str, ...] = ()
    by_layer: int = 0
    smoothing: float = 0.0


@dataclass(frozen=True)
class LowBitComparison:
    """One model's results: by scheme (None: not rounded), and what its layers cost, if asked for."""

    settings: dict
    runs: dict[str | None, LowBitResult]
    layers: LayerCosts | None = None

    def ratio(self, scheme: str | None) -> float:
        """Perplexity over that of the model with nothing rounded."""
        return self.runs[scheme].perplexity / self.runs[None].perplexity

    def to_dict(self) -> dict:
        runs = {
            scheme or "not_rounded": {**run.to_dict(), "ratio": self.ratio(scheme)}
            for scheme, run in self.runs.items()
        }
        return {"settings": self.settings, "runs": runs, "layers": self.layers and self.layers.to_dict()}


def run_low_bit(
    models: list[str],
    text_options: TextOptions,
    load_options: LoadOptions,
    options: LowBitOptions,
    *,
    out: Path | None = None,
    echo: Callable[[str], None] = print,
) -> dict[str, LowBitComparison]:
    """
    Perplexity of models with simulated W8A8 linear layers, one model after the other on the same text.

    Args:
        models: Folders or Hub ids.
        text_options, load_options: The text, and how models are loaded.
        options: What is run.
        out (`Path`, *optional*): Folder for `low_bit.json` and the figures. The file is written after each model.
        echo: Where the report goes.

    Returns:
        What was found for each model.

    Raises:
        [`InspectionError`]: a model, the text or an option cannot be used.
    """
    torchao = importlib.util.find_spec("torchao") is not None if options.torchao is None else options.torchao
    if torchao:
        check_torchao()
    prepare_folder(out)
    content, text_name = text_options.read()
    results: dict[str, LowBitComparison] = {}
    for name, model, tokenizer in loaded_models(models, load_options):
        if options.smoothing:
            check_smoothing(model)  # before the work
        windows, bos, others = _windows(tokenizer, content, text_options, options)
        rounded = _not_kept(model, options)
        runs = {}
        schemes = [None, *SCHEMES, *(["torchao"] if torchao else [])]
        for scheme in tqdm(schemes, desc=f"Rounding {name}", unit="run", disable=None):
            if scheme == "torchao":
                runs[scheme] = torchao_perplexity(model, windows)
            else:
                runs[scheme] = low_bit_perplexity(model, windows, scheme, only=rounded, lm_head=options.lm_head)
        layers = None
        if options.by_layer:
            some = windows[: max(1, options.by_layer // text_options.length)]
            layers = layer_costs(model, some, only=rounded, name=name)
        if options.smoothing:  # last: it changes the weights
            smooth_model(model, others, options.smoothing)
            run = low_bit_perplexity(model, windows, "per_tensor", only=rounded, lm_head=options.lm_head)
            runs["smoothed"] = replace(run, scheme="smoothed")
        settings = model_settings(
            model,
            text=text_name,
            bos=bos,
            length=text_options.length,
            tokens=len(windows) * text_options.length,
            **asdict(options),
        )
        results[name] = LowBitComparison(settings, runs, layers)
        del model
        write_results(out, "low_bit.json", {name: result.to_dict() for name, result in results.items()})
    echo(low_bit_report(results))
    if options.torchao is None and not torchao:
        echo(f"\n{_RUN_LABELS['torchao']} was left out; it needs torchao: pip install torchao")
    if out is not None:
        draw_low_bit(results, _RUN_LABELS, out)
        draw_input_ranges({name: result.layers for name, result in results.items() if result.layers}, out)
        echo(f"\nlow_bit.json and figures are in {out}")
    return results


def _windows(tokenizer, content: str, text_options: TextOptions, options: LowBitOptions):
    """The windows of the test, whether they begin with BOS, and those that follow on them."""
    length, tokens = text_options.length, text_options.tokens
    if not options.smoothing:
        return *windows_of(tokenizer, content, length, tokens, text_options.bos), []
    found, bos = windows_of(tokenizer, content, length, tokens + _SMOOTHED_ON * length, text_options.bos)
    number = max(1, tokens // length)
    if len(found) <= number:
        raise InspectionError(
            f"the text has no windows of {length} tokens after the {number} of the test to find a smoothing on; give a longer text, or fewer --tokens"
        )
    return found[:number], bos, found[number:]


def low_bit_report(results: dict[str, LowBitComparison]) -> str:
    """Perplexities side by side, what was rounded, and the parts that cost most."""
    parts = ["\n".join(_settings_line(name, result) for name, result in results.items())]
    first = next(iter(results.values()))
    rows = [["linear layers in 8 bits, inputs with", *results]]
    for scheme in first.runs:
        cells = [
            f"{result.runs[scheme].perplexity:,.3f} (x {result.ratio(scheme):.3f})" for result in results.values()
        ]
        rows.append([_RUN_LABELS[scheme], *cells])
    parts.append(aligned(rows))
    for name, result in results.items():
        if result.layers is not None:
            parts.append(f"{name}: what costs most, {result.layers.tokens:,} tokens\n{_layers_report(result.layers)}")
    return "\n\n".join(parts)


def _settings_line(name: str, result: LowBitComparison) -> str:
    settings, run = result.settings, result.runs["per_tensor"]
    line = (
        f"{name}: {settings['tokens']:,} tokens of {settings['text']} in windows of {settings['length']:,}, {begins(settings['bos'])}; "
        f"{settings['dtype']}; {run.linears} linear layers rounded, {run.coverage:.1%} of the decoder layers' matrix weights"
    )
    return line + (f"; not {', '.join(run.not_covered)}" if run.not_covered else "")


def _layers_report(costs: LayerCosts) -> str:
    def costliest(perplexities: dict, label: str) -> list[list[str]]:
        ordered = sorted(perplexities.items(), key=lambda item: -item[1])[:_LISTED]
        return [[f"{label}{unit}", f"x {perplexity / costs.perplexity:.4f}"] for unit, perplexity in ordered]

    alone = [["rounded alone, one scale a tensor", "perplexity"]]
    alone += costliest(costs.layers, "layer ") + costliest(costs.projections, "every ")
    rows = [["input of", "bits lost", "largest", "typical", "by the first token", "largest at position"]]
    for entry in sorted(costs.ranges, key=lambda entry: -entry.bits_lost)[:_LISTED]:
        rows.append(
            [
                f"layer {entry.layer_idx} {entry.projection}",
                f"{entry.bits_lost:.1f}",
                f"{entry.largest:,.1f}",
                f"{entry.typical:,.2f}",
                f"{entry.first_token_share:.0%}",
                str(entry.position),
            ]
        )
    return f"{aligned(alone)}\n\n{aligned(rows)}"


def _not_kept(model, options: LowBitOptions) -> Callable[[str], bool]:
    """Which linear layers are rounded; each pattern must leave something out, or it is a slip."""
    names = linear_layers(model, options.lm_head)
    for pattern in options.keep:
        try:
            found = any(re.search(pattern, name) for name in names)
        except re.error as error:
            raise InspectionError(f"`keep` must be regular expressions, got {pattern!r}: {error}") from error
        if not found:
            raise InspectionError(
                f"`keep` {pattern!r} is in the name of no linear layer of {type(model).__name__}; names are like {next(iter(names))}"
            )
    return lambda name: not any(re.search(pattern, name) for pattern in options.keep)
