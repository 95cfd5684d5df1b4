"""What an inspection finds: plain numbers, one object a layer, ready for JSON."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Activation:
    """A large activation: where it was found, and the token there. `position` counts from the document's first token."""

    value: float
    layer_idx: int
    window: int
    position: int
    channel: int
    token_id: int
    token: str | None = None


@dataclass(frozen=True)
class GateSummary:
    """
    Attributes:
        mean: Mean gate score of each head, the gate's scale included.
        closed_fraction: Of each head, the fraction of scores below 0.1.
        histogram: Fraction of the scores in equal bins from 0 to `histogram_end`, over all heads; scores beyond, which only
            gates without an upper end have (softplus), are in the last bin.
        histogram_end: Upper end of the histogram.
    """

    mean: list[float]
    closed_fraction: list[float]
    histogram: list[float]
    histogram_end: float


@dataclass(frozen=True)
class LayerInspection:
    """
    One layer; lists hold one number a query head. None: not measured, as in layers without softmax attention.

    Attributes:
        layer_idx: Index of the layer, from 0.
        kind: `"attention"`, or what the layer is instead, such as `"linear_attention"`.
        f_attn: Mean attention on the first token, over the queries from the second on.
        largest_key_share: The same for whichever key of a document gets most; so it is never less than `f_attn`.
        largest_key_position: The position, from the document's first token, that most often gets most.
        sink_rate: Share of sequences whose mean attention on the first token, over the first 64 tokens, exceeds 0.3.
        entropy: Mean entropy of the attention, in nats.
        top_activations: The three largest |hidden states| after the layer, in the sequence that has the largest of all.
        mean_top_activations: The largest, the second and the third of each sequence, averaged over sequences.
        median_activation: Median |hidden state| after the layer, averaged over sequences.
        attention_output_max: Largest |output| of the attention module in a sequence, averaged over sequences.
        attention_output_kurtosis: Kurtosis of the attention module's output (3 for a normal distribution).
        gate: Gate scores, in models with an output gate.
        weight_rank: Effective rank of W_V W_O.
        output_rank, gated_output_rank: Effective rank of the head's outputs over the data, before and after the gate.
    """

    layer_idx: int
    kind: str
    f_attn: list[float] | None
    largest_key_share: list[float] | None
    largest_key_position: int | None
    sink_rate: list[float] | None
    entropy: list[float] | None
    top_activations: list[Activation]
    mean_top_activations: list[float]
    median_activation: float
    attention_output_max: float | None
    attention_output_kurtosis: float | None
    gate: GateSummary | None
    weight_rank: list[float] | None
    output_rank: list[float] | None
    gated_output_rank: list[float] | None


@dataclass(frozen=True)
class InspectionSettings:
    """What a result depends on, and so has to be said with it."""

    model: str
    dtype: str
    attn_implementation: str
    length: int
    windows: int
    tokens: int
    bos: bool | None
    text: str | None
    versions: dict[str, str]


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


@dataclass(frozen=True)
class Inspection:
    """
    What was found in a model on a text.

    Attributes:
        settings: What the figures depend on.
        perplexity: exp(mean negative log-likelihood) over all predicted tokens.
        loss_by_position: Mean negative log-likelihood of the token after each position; None where none is predicted.
        layers: One entry a layer.
    """

    settings: InspectionSettings
    perplexity: float | None
    loss_by_position: list[float | None]
    layers: list[LayerInspection]

    def _over_heads(self, field: str) -> list[float]:
        """Mean over heads in each layer that has the figure."""
        return [_mean(values) for layer in self.layers if (values := getattr(layer, field))]

    @property
    def f_attn(self) -> float | None:
        """Attention on the first token, averaged over queries, heads, then layers."""
        return _mean(self._over_heads("f_attn"))

    @property
    def largest_key_share(self) -> float | None:
        return _mean(self._over_heads("largest_key_share"))

    @property
    def sink_rate(self) -> float | None:
        return _mean(self._over_heads("sink_rate"))

    @property
    def entropy(self) -> float | None:
        return _mean(self._over_heads("entropy"))

    @property
    def m_act(self) -> float:
        """The largest |hidden state| of each layer, averaged over layers."""
        return _mean([layer.top_activations[0].value for layer in self.layers])

    @property
    def largest_activation(self) -> Activation:
        return max((layer.top_activations[0] for layer in self.layers), key=lambda activation: activation.value)

    @property
    def attention_output_max(self) -> float | None:
        return _mean([layer.attention_output_max for layer in self.layers if layer.attention_output_max is not None])

    @property
    def attention_output_kurtosis(self) -> float | None:
        known = [layer.attention_output_kurtosis for layer in self.layers]
        return _mean([value for value in known if value is not None])

    @property
    def gate_mean(self) -> float | None:
        return _mean([_mean(layer.gate.mean) for layer in self.layers if layer.gate])

    @property
    def gate_closed_fraction(self) -> float | None:
        return _mean([_mean(layer.gate.closed_fraction) for layer in self.layers if layer.gate])

    @property
    def skipped_layers(self) -> dict[int, str]:
        """Layers whose attention could not be measured, with what they are."""
        return {layer.layer_idx: layer.kind for layer in self.layers if layer.f_attn is None}

    def summary(self) -> dict[str, float | None]:
        """The figures of the whole model."""
        return {
            "perplexity": self.perplexity,
            "f_attn": self.f_attn,
            "largest_key_share": self.largest_key_share,
            "sink_rate": self.sink_rate,
            "entropy": self.entropy,
            "m_act": self.m_act,
            "largest_activation": self.largest_activation.value,
            "attention_output_max": self.attention_output_max,
            "attention_output_kurtosis": self.attention_output_kurtosis,
            "weight_rank": _mean(self._over_heads("weight_rank")),
            "output_rank": _mean(self._over_heads("output_rank")),
            "gated_output_rank": _mean(self._over_heads("gated_output_rank")),
            "gate_mean": self.gate_mean,
            "gate_closed_fraction": self.gate_closed_fraction,
        }

    def to_dict(self) -> dict:
        return {"summary": self.summary(), **asdict(self)}

    def save(self, path: Path) -> None:
        """Write the result as JSON."""
        path.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Inspection":
        """Read a result that `save` wrote."""
        content = json.loads(path.read_text(encoding="utf-8"))
        layers = []
        for layer in content["layers"]:
            layer["top_activations"] = [Activation(**entry) for entry in layer["top_activations"]]
            layer["gate"] = GateSummary(**layer["gate"]) if layer["gate"] else None
            layers.append(LayerInspection(**layer))
        kept = {field.name: content[field.name] for field in fields(cls)}
        return cls(**{**kept, "settings": InspectionSettings(**content["settings"]), "layers": layers})
