"""Scores of the gates of a study's models, at whichever of the paper's positions they have them."""

from dataclasses import dataclass

import torch
from torch import nn

from ..diagnostics import Inspection
from ..diagnostics.accumulate import GATE_BINS


# Activations whose values lie between 0 and 1: of others a histogram up to the scale says nothing.
BOUNDED = ("sigmoid", "ns_sigmoid")


@dataclass(frozen=True)
class LayerGate:
    """
    Attributes:
        mean: Mean score over tokens, heads and channels.
        histogram: Share of the scores in equal bins from 0 to `histogram_end`; None where scores may lie outside.
        histogram_end: The gate's scale.
    """

    mean: float
    histogram: list[float] | None
    histogram_end: float


def gates_of(model: nn.Module, inspection: Inspection, windows: list[list[int]]) -> list[LayerGate | None]:
    """
    The gate of each layer, None for a layer without one, or with several.

    Args:
        model (`nn.Module`): A model of the package.
        inspection ([`Inspection`]): What was found of it, in which gates on the attention's output are already.
        windows (`list[list[int]]`): What it was inspected on.
    """
    config = model.config
    bounded = config.gate_activation in BOUNDED
    if config.gate_positions == ["sdpa_output"]:
        return [
            gate
            and LayerGate(sum(gate.mean) / len(gate.mean), gate.histogram if bounded else None, gate.histogram_end)
            for gate in (layer.gate for layer in inspection.layers)
        ]
    means: list[list[float]] = [[] for _ in inspection.layers]
    bins = torch.zeros(len(inspection.layers), GATE_BINS, dtype=torch.double)
    for window in windows:
        with torch.no_grad():
            found = model(torch.tensor([window], device=model.device), output_gate_scores=True).gate_scores
        for index, scores in enumerate(found):
            if isinstance(scores, torch.Tensor):
                means[index].append(scores.double().mean().item())
                if bounded:
                    bins[index] += torch.histc(scores.float().cpu(), GATE_BINS, 0, config.gate_scale)
    return [
        LayerGate(sum(one) / len(one), (counts / counts.sum()).tolist() if bounded else None, config.gate_scale)
        if one
        else None
        for one, counts in zip(means, bins, strict=True)
    ]
