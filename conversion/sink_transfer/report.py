"""What a sink transfer found and did, as numbers and as text."""

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path


# What the prediction calls a good candidate: F-Attn below, and perplexity less than so many times the source's.
SINK_FREE = 0.06
GOOD_RATIO = 1.15
USABLE_RATIO = 1.5


@dataclass(frozen=True)
class TransferSettings:
    """
    What the figures depend on.

    Attributes:
        source: Name of the source.
        dtype: Format of the source's weights; the calibration itself computes in float32.
        granularity: Of the gates.
        text: Name of the calibration text.
        tokens, length, held_out_tokens: Calibration tokens, tokens in a window, and those that are not fitted to.
        bos_windows, windows: Windows that begin with BOS, and windows in all.
        seed: For the choice of windows.
        attention_weight: What attention that is left on sinks costs against error.
        versions: Of the packages.
        keep_massive: Whether massive activations were to stay as large as they are.
    """

    source: str
    dtype: str
    granularity: str
    text: str | None
    tokens: int
    length: int
    held_out_tokens: int
    bos_windows: int
    windows: int
    seed: int
    attention_weight: float
    versions: dict[str, str]
    keep_massive: bool = False


@dataclass(frozen=True)
class LayerReport:
    """
    One layer, on the held-out windows unless said otherwise.

    Attributes:
        layer_idx: Its index.
        outcome: `"transferred"`, `"no sink"`, or why a sink was left: `"error"` (it is no sink in the sense of the identity),
            `"rare"` (it is in too few windows to fit to).
        sinks: The groups of tokens that draw attention, on all calibration windows: their attention, how many there are in a
            window, how often the first token is one, and which others are (text and number of the most frequent ones).
        strengths: Strength of the sinks' keys for each key/value head, where 1 leaves them as they are.
        error: Squared error of what the attention adds to the residual stream, relative to what it should add (the sinks'
            constant part left out).
        r2: For each head the share of the variance of 1 - (attention on sinks) that the gate explains.
        sink_attention: For each head the share of attention that goes to sinks, before and after.
        f_attn, largest_key_share: Before and after, means over heads.
        m_act: Largest |hidden state| of the layer's output, before and after.
    """

    layer_idx: int
    outcome: str
    sinks: list[dict]
    strengths: list[float] | None
    error: float | None
    r2: list[float] | None
    sink_attention: tuple[list[float], list[float]] | None
    f_attn: tuple[float, float]
    largest_key_share: tuple[float, float]
    m_act: tuple[float, float]


@dataclass(frozen=True)
class MassiveReport:
    """
    The neurons that write massive activations and take them out again.

    Attributes:
        neurons: Indices in the layers' MLPs, by layer.
        factor: What their rows of `up_proj` were multiplied by; None if each that was tried cost too much perplexity.
        tried: Perplexity on the held-out windows for each factor.
    """

    neurons: dict[int, list[int]]
    factor: float | None
    tried: dict[float, float]

    @classmethod
    def of(
        cls, neurons: dict[int, list[int]], tried: dict[float, float], wanted: float, largest: float
    ) -> "MassiveReport":
        """With the smallest factor that keeps to the perplexity wanted; else the one with the lowest, if it keeps to the largest allowed."""
        factor = min((factor for factor, found in tried.items() if found <= wanted), default=None)
        if factor is None:
            cheapest = min(tried, key=tried.get)
            factor = cheapest if tried[cheapest] <= largest else None
        return cls(neurons, factor, tried)

    def describe(self) -> str:
        number = sum(map(len, self.neurons.values()))
        what = f"{number} neuron{'s' * (number > 1)} in layer{'s' * (len(self.neurons) > 1)} {', '.join(map(str, self.neurons))}"
        if self.factor is None:
            return f"massive activations are left: making {what} smaller would cost perplexity"
        return f"massive activations are written by {what}: made smaller, x {self.factor:g}"

    @classmethod
    def from_dict(cls, content: dict) -> "MassiveReport":
        """Of what JSON makes of it, whose keys are text."""
        neurons = {int(index): found for index, found in content["neurons"].items()}
        return cls(neurons, content["factor"], {float(factor): found for factor, found in content["tried"].items()})


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


@dataclass(frozen=True)
class TransferReport:
    """
    Attributes:
        settings: What the figures depend on.
        layers: One entry a layer.
        perplexity: Before and after, on the held-out windows.
        seconds: Time of the calibration.
        massive: What was done about massive activations; None if nothing: there are none that few neurons write, they were to stay, or no
            sink was transferred.
        tests: Figures of the written checkpoint on texts that took no part, if they were asked for: by name of the text a
            list of the source's and the result's summary.
    """

    settings: TransferSettings
    layers: list[LayerReport]
    perplexity: tuple[float, float]
    seconds: float
    massive: MassiveReport | None = None
    tests: dict[str, list[dict]] = field(default_factory=dict)

    def _both(self, name: str) -> tuple[float, float]:
        return tuple(_mean([getattr(layer, name)[place] for layer in self.layers]) for place in (0, 1))

    @property
    def f_attn(self) -> tuple[float, float]:
        """Attention on the first token before and after, averaged over heads and layers."""
        return self._both("f_attn")

    @property
    def largest_key_share(self) -> tuple[float, float]:
        return self._both("largest_key_share")

    @property
    def m_act(self) -> tuple[float, float]:
        return self._both("m_act")

    @property
    def transferred(self) -> list[int]:
        return [layer.layer_idx for layer in self.layers if layer.outcome == "transferred"]

    @property
    def perplexity_ratio(self) -> float:
        return self.perplexity[1] / self.perplexity[0]

    @property
    def verdict(self) -> str:
        """Whether the model is a good candidate, in a sentence."""
        if not all(math.isfinite(value) for value in self.perplexity):
            return "not a candidate: the perplexity is no finite number"
        if not self.transferred:
            if any(layer.outcome == "error" for layer in self.layers):
                return (
                    "not a candidate: what draws attention here has no constant value, so gates cannot stand in for it; "
                    "`gated-attention convert` adds gates that training can use"
                )
            return (
                f"not a candidate: no attention sink was found (F-Attn {self.f_attn[0]:.3f}), so there is nothing to transfer; "
                "`gated-attention convert` adds gates that training can use"
            )
        rise = f"perplexity x {self.perplexity_ratio:.3f}"
        left = f"F-Attn {self.f_attn[0]:.3f} -> {self.f_attn[1]:.3f}"
        if self.perplexity_ratio > USABLE_RATIO:
            return f"a poor candidate: {rise}, {left}; the gates cannot follow its sinks, and much would have to be healed"
        if self.perplexity_ratio > GOOD_RATIO or self.f_attn[1] > SINK_FREE:
            return f"a usable candidate: {rise}, {left}; some training should follow"
        return f"a good candidate: {rise}, {left}"

    def describe(self) -> str:
        """The report as text."""
        settings = self.settings
        header = [
            "layer",
            "sink tokens",
            "attention",
            "strength",
            "error",
            "R2 (least)",
            "F-Attn",
            "largest key",
            "M-Act",
        ]
        rows = [header]
        for layer in self.layers:
            done = layer.outcome == "transferred"
            groups = layer.sinks
            named = " + ".join(f"{group['tokens_per_window']:.1f}" for group in groups) or "-"
            rows.append(
                [
                    f"{layer.layer_idx}" + ("" if done or not groups else " left"),
                    named,
                    f"{sum(group['attention'] for group in groups):.3f}" if groups else "-",
                    _few(layer.strengths),
                    f"{layer.error:.3f}" if layer.error is not None else "-",
                    f"{_mean(layer.r2):.2f} ({min(layer.r2):.2f})" if done else "-",
                    _arrow(layer.f_attn, "{:.3f}"),
                    _arrow(layer.largest_key_share, "{:.3f}"),
                    _arrow(layer.m_act, "{:,.0f}"),
                ]
            )
        bos = f"{settings.bos_windows} of {settings.windows} windows with BOS" if settings.bos_windows else "no BOS"
        text = f" of {settings.text}" if settings.text else ""
        return "\n".join(
            [
                f"{settings.source} ({settings.dtype}): {settings.tokens:,} calibration tokens{text}, length "
                f"{settings.length}, {bos}, seed {settings.seed}; {settings.granularity} gates; {self.seconds:.0f} s",
                "",
                *_aligned(rows),
                *self._left_layers(),
                *self._further_tokens(),
                *(["", self.massive.describe()] if self.massive else []),
                "",
                f"on {settings.held_out_tokens:,} held-out tokens:",
                f"  perplexity         {_arrow(self.perplexity, '{:.3f}')} (x {self.perplexity_ratio:.3f})",
                f"  F-Attn             {_arrow(self.f_attn, '{:.4f}')}",
                f"  largest key share  {_arrow(self.largest_key_share, '{:.4f}')}",
                f"  M-Act              {_arrow(self.m_act, '{:,.0f}')}",
                "",
                self.verdict[0].upper() + self.verdict[1:] + ".",
            ]
        )

    def _left_layers(self) -> list[str]:
        """Why sinks were left, if any were."""
        why = {
            "error": "what draws attention there has no constant value",
            "rare": "what draws attention there is in too few windows",
        }
        return [
            f"left as it is: layer {layer.layer_idx} ({why[layer.outcome]})"
            for layer in self.layers
            if layer.outcome in why
        ]

    def _further_tokens(self) -> list[str]:
        """A line on sinks that are not the first token, if there are any."""
        layers = [layer.layer_idx for layer in self.layers if any(group["further_tokens"] for group in layer.sinks)]
        if not layers:
            return []
        counts: dict[str, int] = {}
        for layer in self.layers:
            for group in layer.sinks:
                for token, number in group["further_tokens"]:
                    counts[str(token)] = max(counts.get(str(token), 0), number)
        most = sorted(counts, key=counts.get, reverse=True)[:5]
        named = ", ".join(f"{token!r}" for token in most)
        return ["", f"sinks beside the first token in layers {_ranges(layers)}; most often {named}"]

    def to_dict(self) -> dict:
        summary = {
            "perplexity": self.perplexity,
            "f_attn": self.f_attn,
            "largest_key_share": self.largest_key_share,
            "m_act": self.m_act,
            "transferred_layers": self.transferred,
            "verdict": self.verdict,
        }
        return {"summary": summary, **asdict(self)}

    def save(self, path: Path) -> None:
        """Write the report as JSON."""
        path.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "TransferReport":
        """Read a report that `save` wrote."""
        content = json.loads(path.read_text(encoding="utf-8"))
        pairs = ("f_attn", "largest_key_share", "m_act", "sink_attention")
        layers = [
            LayerReport(**{name: tuple(value) if name in pairs and value else value for name, value in layer.items()})
            for layer in content["layers"]
        ]
        # Reports of earlier versions know nothing of massive activations.
        kept = {entry.name: content[entry.name] for entry in fields(cls) if entry.name in content}
        if kept.get("massive"):
            kept["massive"] = MassiveReport.from_dict(kept["massive"])
        kept |= {"perplexity": tuple(kept["perplexity"]), "settings": TransferSettings(**content["settings"])}
        return cls(**{**kept, "layers": layers})


def _few(values: list[float] | None) -> str:
    """Strengths, one for each key/value head; of many only the range."""
    if not values:
        return "-"
    if len(values) > 4:
        return f"{min(values):g} to {max(values):g}"
    return " ".join(f"{value:g}" for value in values)


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers, neighbours put together: `3-10, 12`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _arrow(pair: tuple[float, float], form: str) -> str:
    before, after = (form.format(value) for value in pair)
    return before if before == after else f"{before} -> {after}"


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
