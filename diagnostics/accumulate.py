"""Adds up what is seen of each layer over many windows of text, in bounded memory."""

import math
from dataclasses import dataclass, field

import torch

from .attention_statistics import AttentionStatistics
from .capture import Batch, Observer
from .results import Activation, GateSummary, LayerInspection


# Bins of the gate histogram, from 0 to the gate's scale (softplus has no upper end: what exceeds 1 falls into the last bin).
GATE_BINS = 50
SINK_THRESHOLD = 0.3  # arXiv 2410.10781
SINK_WINDOW = 64
CLOSED_GATE = 0.1
TOP = 3


@dataclass
class _Layer:
    """Running sums of one layer; sums are in float64 where many numbers are added."""

    counted_queries: int = 0
    sequences: int = 0
    first_share: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    largest_share: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    key_positions: list[int] = field(default_factory=list)
    top: list[Activation] = field(default_factory=list)
    top_sums: torch.Tensor | None = None
    rows: int = 0
    medians: list[float] = field(default_factory=list)
    output_max: list[float] = field(default_factory=list)
    output_moments: torch.Tensor | None = None
    output_center: torch.Tensor | None = None
    output_count: int = 0
    gate_sum: torch.Tensor | None = None
    gate_closed: torch.Tensor | None = None
    gate_count: int = 0
    gate_histogram: torch.Tensor | None = None
    gram: dict[bool, torch.Tensor] = field(default_factory=dict)


def _add(total: torch.Tensor | None, part: torch.Tensor) -> torch.Tensor:
    """Adds in float64 on the CPU: layers may lie on several devices, and not every device has float64."""
    part = part.cpu().double()
    return part if total is None else total + part


class Accumulator(Observer):
    """Sums over windows; `batch` is the one being watched."""

    def __init__(self, layers: int, gate_scale: float = 1.0, ranks: bool = True):
        self.layers = [_Layer() for _ in range(layers)]
        self.gate_scale = gate_scale
        self.ranks = ranks
        self.batch: Batch | None = None
        self.windows_before = 0

    def attention(self, layer_idx: int, statistics: AttentionStatistics) -> None:
        layer, batch = self.layers[layer_idx], self.batch.on(statistics.first_share.device)
        counts = batch.counts
        mask = counts[:, None]  # (batch, 1, length)
        layer.first_share = _add(layer.first_share, (statistics.first_share * mask).sum((0, 2)))
        layer.entropy = _add(layer.entropy, (statistics.entropy * mask).sum((0, 2)))
        layer.counted_queries += int(counts.sum())
        # One (document, head) at a time, so that a sink at another position of each document is seen; weighted by queries,
        # as `first_share` is. Before the division by their number a key's share is the sum over its document's queries.
        sums = statistics.key_share * counts.sum(-1)[:, None, None]
        documents = batch.first_token[:, None].expand_as(sums)
        largest = torch.zeros_like(sums).scatter_reduce(-1, documents, sums, "amax")
        layer.largest_share = _add(layer.largest_share, largest.sum((0, 2)))
        for row, row_sums in enumerate(sums.mean(1)):
            beginnings = batch.first_token[row]
            for beginning in beginnings[counts[row]].unique().tolist():
                within = row_sums.masked_fill(beginnings != beginning, -1)
                layer.key_positions.append(int(within.argmax()) - beginning)
        # The sink rate looks at the first 64 tokens of a sequence, the first one included.
        early = batch.first_document(SINK_WINDOW)
        mean = (statistics.first_share * early[:, None]).sum(-1) / early.sum(-1)[:, None]
        layer.sinks = _add(layer.sinks, (mean > SINK_THRESHOLD).sum(0))
        layer.sequences += len(counts)

    def _tokens(self, tensor: torch.Tensor) -> torch.Tensor:
        """`(tokens, ...)` of `(batch, length, ...)`, without padding; no copy where there is none."""
        return tensor.flatten(0, 1) if self.batch.all_valid else tensor[self.batch.on(tensor.device).valid]

    def head_outputs(self, layer_idx: int, outputs: torch.Tensor, gated: bool) -> None:
        if not self.ranks:
            return
        valid = self._tokens(outputs).float().transpose(0, 1)  # (heads, tokens, head_dim)
        gram = self.layers[layer_idx].gram
        gram[gated] = _add(gram.get(gated), torch.matmul(valid.transpose(1, 2), valid))

    def gates(self, layer_idx: int, scores: torch.Tensor) -> None:
        layer = self.layers[layer_idx]
        scores = self._tokens(scores)  # (tokens, heads, 1 or head_dim)
        layer.gate_sum = _add(layer.gate_sum, scores.float().mean(-1).sum(0))
        layer.gate_closed = _add(layer.gate_closed, (scores < CLOSED_GATE).float().mean(-1).sum(0))
        layer.gate_count += len(scores)
        bins = (scores / self.gate_scale * GATE_BINS).long().clamp(0, GATE_BINS - 1)
        layer.gate_histogram = _add(layer.gate_histogram, torch.bincount(bins.flatten(), minlength=GATE_BINS))

    def attention_output(self, layer_idx: int, output: torch.Tensor) -> None:
        layer = self.layers[layer_idx]
        for row, valid in zip(output, self.batch.on(output.device).valid, strict=True):
            per_token = torch.maximum(row.amax(-1), -row.amin(-1))
            layer.output_max.append(per_token[valid].max().item())
        values = self._tokens(output).float()
        if layer.output_center is None:
            layer.output_center = values.mean()
        values = values - layer.output_center  # any fixed centre near the mean keeps float32 moments accurate
        squares = values * values
        moments = [values.sum(), squares.sum(), (squares * values).sum(), squares.square().sum()]
        layer.output_moments = _add(layer.output_moments, torch.stack(moments))
        layer.output_count += values.numel()

    def hidden_states(self, layer_idx: int, hidden_states: torch.Tensor) -> None:
        layer = self.layers[layer_idx]
        for row, (states, valid) in enumerate(
            zip(hidden_states, self.batch.on(hidden_states.device).valid, strict=True)
        ):
            magnitudes = states.float().abs()
            # The three largest of all lie at the three tokens with the largest maxima.
            greatest = magnitudes.amax(-1).masked_fill(~valid, -1)
            positions = greatest.topk(min(TOP, int(valid.sum()))).indices
            values, places = magnitudes[positions].flatten().topk(TOP)
            found = []
            for value, index in zip(values.tolist(), places.tolist(), strict=True):
                slot, channel = divmod(index, magnitudes.shape[-1])
                position = int(positions[slot])
                token = int(self.batch.input_ids[row, position])
                place = position - int(self.batch.first_token[row, position])
                found.append(Activation(value, layer_idx, self.windows_before + row, place, channel, token))
            if not layer.top or found[0].value > layer.top[0].value:
                layer.top = found
            layer.top_sums = _add(layer.top_sums, values)
            layer.rows += 1
            layer.medians.append((magnitudes if self.batch.all_valid else magnitudes[valid]).median().item())

    def finish_batch(self) -> None:
        self.windows_before += len(self.batch.input_ids)

    def layer(self, layer_idx: int, kind: str, weight_ranks: list[float] | None) -> LayerInspection:
        """What was seen of a layer, as numbers."""
        layer = self.layers[layer_idx]
        queries, sequences = layer.counted_queries, layer.sequences

        def per_head(total, count):
            return None if total is None else (total / max(count, 1)).tolist()

        return LayerInspection(
            layer_idx=layer_idx,
            kind=kind,
            f_attn=per_head(layer.first_share, queries),
            largest_key_share=per_head(layer.largest_share, queries),
            largest_key_position=_most_frequent(layer.key_positions),
            sink_rate=per_head(layer.sinks, sequences),
            entropy=per_head(layer.entropy, queries),
            top_activations=layer.top,
            mean_top_activations=(layer.top_sums / layer.rows).tolist(),
            median_activation=sum(layer.medians) / max(len(layer.medians), 1),
            attention_output_max=sum(layer.output_max) / len(layer.output_max) if layer.output_max else None,
            attention_output_kurtosis=_kurtosis(layer.output_moments, layer.output_count),
            gate=self._gate(layer),
            weight_rank=weight_ranks,
            output_rank=_ranks(layer.gram.get(False)),
            gated_output_rank=_ranks(layer.gram.get(True)),
        )

    def _gate(self, layer: _Layer) -> GateSummary | None:
        if layer.gate_sum is None:
            return None
        return GateSummary(
            mean=(layer.gate_sum / layer.gate_count).tolist(),
            closed_fraction=(layer.gate_closed / layer.gate_count).tolist(),
            histogram=(layer.gate_histogram.double() / layer.gate_histogram.sum()).tolist(),
            histogram_end=self.gate_scale,
        )


def _most_frequent(positions: list[int]) -> int | None:
    return max(sorted(set(positions)), key=positions.count) if positions else None


def _kurtosis(moments: torch.Tensor | None, count: int) -> float | None:
    """Fourth central moment over the square of the second (3 for a normal distribution)."""
    if moments is None:
        return None
    mean, second, third, fourth = (moments / count).tolist()
    variance = second - mean**2
    if variance <= 0:
        return math.nan
    return (fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4) / variance**2


def effective_rank(singular_values: torch.Tensor) -> torch.Tensor:
    """exp(entropy of the normalised singular values), over the last dimension (Roy & Vetterli, 2007)."""
    shares = singular_values / singular_values.sum(-1, keepdim=True).clamp(min=1e-300)
    return torch.special.entr(shares).sum(-1).exp()


def _ranks(gram: torch.Tensor | None) -> list[float] | None:
    if gram is None:
        return None
    eigenvalues = torch.linalg.eigvalsh(gram).clamp(min=0)
    # What float32 sums leave where there is nothing.
    eigenvalues = eigenvalues.where(eigenvalues > 1e-6 * eigenvalues.amax(-1, keepdim=True), 0)
    return effective_rank(eigenvalues.sqrt()).tolist()


def weight_ranks(attention: torch.nn.Module) -> list[float] | None:
    """Effective rank of each query head's product W_V W_O: the map from a token's input to what it adds where it is seen."""
    head_dim = getattr(attention, "head_dim", None)
    value, output = getattr(attention, "v_proj", None), getattr(attention, "o_proj", None)
    for projection in (value, output):
        # Quantised weights and adapters are not the plain matrices that the product is made of.
        plain = type(projection) is torch.nn.Linear and projection.weight.is_floating_point()
        if not plain or projection.weight.device.type == "meta":
            return None
    if head_dim is None or output.in_features % head_dim or value.out_features % head_dim:
        return None
    heads = output.in_features // head_dim
    value_weights = _float64(value.weight).unflatten(0, (-1, head_dim))  # (kv heads, head_dim, hidden)
    output_weights = (
        _float64(output.weight).unflatten(1, (heads, head_dim)).transpose(0, 1)
    )  # (heads, hidden, head_dim)
    # The singular values of O V are those of R_O R_V^T, which is only head_dim x head_dim.
    value_factor = torch.linalg.qr(value_weights.transpose(1, 2)).R.repeat_interleave(
        heads // len(value_weights), dim=0
    )
    output_factor = torch.linalg.qr(output_weights).R
    return effective_rank(torch.linalg.svdvals(output_factor @ value_factor.transpose(1, 2))).tolist()


def _float64(weight: torch.Tensor) -> torch.Tensor:
    """On the weight's own device where that has float64; Apple's has not."""
    weight = weight.detach()
    return (weight.cpu() if weight.device.type == "mps" else weight).double()
