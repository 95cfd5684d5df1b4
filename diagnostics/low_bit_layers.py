"""Which linear layers cost most when one scale serves a whole tensor: the perplexity that each costs alone, and why."""

import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import torch
from torch import nn
from tqdm import tqdm

from .capture import evaluating, layer_index_of
from .low_bit import linear_layers, low_bit_perplexity


@dataclass(frozen=True)
class InputRange:
    """
    How the input of a linear layer fills one scale a tensor. All but the place is a mean over windows.

    Attributes:
        name: Of the linear layer in the model.
        layer_idx, projection: Its decoder layer, and its name within it.
        largest: Largest magnitude in a window, which sets the scale.
        typical: Median over the window's tokens of a token's own largest magnitude.
        bits_lost: log2(largest / typical): by so many bits a typical token is coarser than with a scale of its own.
        first_token_share: Share of windows in which the first token holds the largest magnitude.
        position: Where the largest magnitude of all windows is.
    """

    name: str
    layer_idx: int
    projection: str
    largest: float
    typical: float
    bits_lost: float
    first_token_share: float
    position: int


@dataclass(frozen=True)
class LayerCosts:
    """
    Attributes:
        tokens: Tokens that were looked at.
        perplexity: With nothing rounded.
        layers: Perplexity with one decoder layer rounded alone, by its index.
        projections: Perplexity with one kind of linear layer rounded alone in all decoder layers, by its name.
        ranges: Of each linear layer.
    """

    tokens: int
    perplexity: float
    layers: dict[int, float]
    projections: dict[str, float]
    ranges: list[InputRange]

    def to_dict(self) -> dict:
        return asdict(self)


def layer_costs(
    model: nn.Module,
    windows: Iterable[torch.Tensor],
    *,
    only: Callable[[str], bool] | None = None,
    name: str | None = None,
) -> LayerCosts:
    """
    Round each decoder layer alone, and each kind of linear layer alone, with one scale a tensor.

    Args:
        model: A decoder-only causal language model of transformers; it is given back as it was.
        windows: Token ids of shape `(1, length)` each. There is a run for each decoder layer and each kind: few tokens serve.
        only (*optional*): Which linear layers are looked at, told by their full names.
        name (*optional*): Said beside the progress bar.

    Raises:
        [`InspectionError`]: the model has no linear layer to round.
    """
    windows = list(windows)
    ranges = [entry for entry in input_ranges(model, windows) if only is None or only(entry.name)]
    place = {entry.name: (entry.layer_idx, entry.projection) for entry in ranges}
    units = list(dict.fromkeys(unit for pair in place.values() for unit in pair))
    found = {}
    for unit in tqdm(units, desc=f"Rounding parts of {name or type(model).__name__}", unit="part", disable=None):
        alone = low_bit_perplexity(model, windows, only=lambda linear, unit=unit: unit in place.get(linear, ()))
        found[unit] = alone.perplexity
    return LayerCosts(
        tokens=sum(window.numel() for window in windows),
        perplexity=low_bit_perplexity(model, windows, None).perplexity,
        layers={unit: value for unit, value in found.items() if isinstance(unit, int)},
        projections={unit: value for unit, value in found.items() if isinstance(unit, str)},
        ranges=ranges,
    )


@torch.no_grad()
def input_ranges(model: nn.Module, windows: Iterable[torch.Tensor]) -> list[InputRange]:
    """The range of every linear layer's input in the decoder layers, nothing rounded; windows as for [`layer_costs`]."""
    linears, index_of = linear_layers(model), layer_index_of(model)
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in linears}
    with ExitStack() as cleanup, evaluating(model):
        for name, linear in linears.items():

            def keep(module, inputs, name=name):
                # (tokens): each token's largest magnitude
                seen[name].append(inputs[0].flatten(0, -2).abs().amax(-1).float().cpu())

            cleanup.callback(linear.register_forward_pre_hook(keep).remove)
        for window in windows:
            model(window.to(model.device), use_cache=False)
    # A linear layer that no token came by, such as an expert's, has no range.
    return [
        _input_range(name, index_of[id(linear)], seen[name])
        for name, linear in linears.items()
        if any(map(len, seen[name]))
    ]


def _input_range(name: str, layer_idx: int, magnitudes: list[torch.Tensor]) -> InputRange:
    magnitudes = [window for window in magnitudes if len(window)]
    largest = torch.stack([window.max() for window in magnitudes])
    typical = torch.stack([window.median() for window in magnitudes])
    places = [int(window.argmax()) for window in magnitudes]
    return InputRange(
        name=name,
        layer_idx=layer_idx,
        projection=projection_of(name),
        largest=largest.mean().item(),
        typical=typical.mean().item(),
        bits_lost=(largest / typical.clamp(min=torch.finfo(torch.float32).tiny)).log2().mean().item(),
        first_token_share=places.count(0) / len(places),
        position=places[int(largest.argmax())],
    )


def projection_of(name: str) -> str:
    """Name of a linear layer within its decoder layer, the same for all of its kind: `model.layers.3.mlp.down_proj` → `mlp.down_proj`."""
    within = re.split(r"\.\d+\.", name, maxsplit=1)[-1]
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", within)
