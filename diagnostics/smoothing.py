"""
Takes outlier channels out of the inputs of linear layers and into their weights, without changing what the model computes.

The idea of SmoothQuant (arXiv 2211.10438): a channel of a linear layer's input is divided by a factor, and the column of the weight that reads it
multiplied. Here every factor is a power of two, with which products in floating point are exact: the model gives the same logits, bit for bit, in
the same format. What writes a channel is a norm's weight (before attention and MLP), a row of `v_proj` (before `o_proj`; an output gate multiplies, and
lets a factor pass) or of `up_proj` (before `down_proj`).
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from .capture import attention_modules, decoder_layers, evaluating
from .errors import InspectionError


# Those that were tried: others may read a norm elsewhere, or norm in another way.
FAMILIES = ("gated_attention", "llama", "mistral", "qwen2", "qwen3", "smollm3")
# Factors beyond would leave the range of float16 long before they help.
_LARGEST_EXPONENT = 12
_LEAST = 1e-5


@dataclass(frozen=True)
class _Place:
    """
    A tensor that linear layers read.

    Attributes:
        writers: Parameters with a number, or a row, for each channel.
        readers: The linear layers.
        repeat: Channels of the readers for each of the writers', as query heads share a value head.
        heads: Value heads; the channels that share a writer's lie `head_dim` apart within the group.
    """

    writers: list[nn.Parameter]
    readers: list[nn.Linear]
    repeat: int = 1
    heads: int = 1

    def narrowed(self, values: torch.Tensor) -> torch.Tensor:
        """The largest over the channels that share a writer's, `(channels of the writers,)`."""
        return values.view(self.heads, self.repeat, -1).amax(1).flatten()

    def widened(self, factors: torch.Tensor) -> torch.Tensor:
        """A factor for each channel of the readers."""
        return factors.view(self.heads, 1, -1).expand(-1, self.repeat, -1).flatten()


@torch.no_grad()
def smooth_model(model: nn.Module, windows: Iterable[torch.Tensor], strength: float = 0.7) -> int:
    """
    Smooth a model in place. Its logits stay the same to the last bit, its weights do not: do it before rounding, not before training.

    Args:
        model: A causal language model of this package or of a family with the same modules (Llama, Mistral, Qwen2, Qwen3, ...).
        windows: Token ids of shape `(1, length)` each, of the kind of text that the model is for.
        strength (`float`): How much of the inputs' range goes into the weights, from 0 (what makes weights alike) to 1 (what makes inputs alike).

    Returns:
        How many channels were changed.

    Raises:
        [`InspectionError`]: the model has layers of which the function would change.
    """
    if not 0 <= strength <= 1:
        raise InspectionError(f"`strength` must lie between 0 and 1, got {strength}")
    places = check_smoothing(model)
    largest: list[torch.Tensor | None] = [None] * len(places)
    with evaluating(model), _watched(places, largest):
        for window in windows:
            model(input_ids=window.to(model.device), use_cache=False)
    if any(one is None for one in largest):
        raise InspectionError("give at least one window to smooth a model on")
    return sum(_smooth(place, found, strength) for place, found in zip(places, largest, strict=True))


def check_smoothing(model: nn.Module) -> list[_Place]:
    """
    What would be smoothed.

    Raises:
        [`InspectionError`]: the model has layers of which the function would change.
    """
    _refuse_other_functions(model)
    return [place for layer in decoder_layers(model) for place in _places(model, layer)]


@contextmanager
def _watched(places: list[_Place], largest: list[torch.Tensor | None]) -> Iterator[None]:
    with ExitStack() as hooks:
        for number, place in enumerate(places):

            def see(module, inputs, number=number):
                found = inputs[0].flatten(0, -2).abs().amax(0).float()
                known = largest[number]
                largest[number] = found if known is None else torch.maximum(known, found)

            hooks.callback(place.readers[0].register_forward_pre_hook(see).remove)
        yield


def _places(model: nn.Module, layer: nn.Module) -> Iterator[_Place]:
    attention = next(iter(attention_modules(layer)), None)
    mlp = getattr(layer, "mlp", None)
    norms = [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm")]
    needed = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    needed += [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    plain = all(type(one) is nn.Linear for one in needed) and all(
        getattr(one, "weight", None) is not None for one in norms
    )
    if not plain:
        raise InspectionError(
            f"{type(model).__name__} cannot be smoothed: its layers must have q_proj, k_proj, v_proj, o_proj and an MLP of gate_proj, up_proj and down_proj, "
            "each a torch.nn.Linear of its own, behind input_layernorm and post_attention_layernorm"
        )
    heads = model.config.num_key_value_heads
    repeat = model.config.num_attention_heads // heads
    gate = getattr(attention, "g_proj", None)
    yield _Place([norms[0].weight], [attention.q_proj, attention.k_proj, attention.v_proj, *([gate] if gate else [])])
    yield _Place([norms[1].weight], [mlp.gate_proj, mlp.up_proj])
    yield _Place(_rows(attention.v_proj), [attention.o_proj], repeat, heads)
    yield _Place(_rows(mlp.up_proj), [mlp.down_proj])


def _refuse_other_functions(model: nn.Module) -> None:
    config = model.config
    if config.model_type not in FAMILIES:
        raise InspectionError(
            f"{type(model).__name__} cannot be smoothed: it is made for {', '.join(FAMILIES)}, got {config.model_type}"
        )
    reasons = {
        "`zero_centered_norm`": getattr(config, "zero_centered_norm", False),
        "`gate_positions` other than sdpa_output": bool(
            set(getattr(config, "gate_positions", None) or ()) - {"sdpa_output"}
        ),
        "`gate_operator: add`": getattr(config, "gate_operator", "multiply") == "add",
        "`gate_input_size`": getattr(config, "gate_input_size", None) is not None,
        "`gate_input: none`": getattr(config, "gate_input", None) == "none",
        "`forget_gate`": getattr(config, "forget_gate", False),
        "`sdpa_output_nonlinearity`": getattr(config, "sdpa_output_nonlinearity", None) is not None,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise InspectionError(f"{type(model).__name__} cannot be smoothed with {', '.join(found)}")


def _rows(linear: nn.Linear) -> list[nn.Parameter]:
    return [linear.weight] if linear.bias is None else [linear.weight, linear.bias]


def _smooth(place: _Place, largest: torch.Tensor, strength: float) -> int:
    inputs = place.narrowed(largest).clamp(min=_LEAST)
    columns = torch.stack([reader.weight.abs().amax(0) for reader in place.readers]).amax(0).float()
    weights = place.narrowed(columns).clamp(min=_LEAST)
    exponents = (strength * inputs.log2() - (1 - strength) * weights.log2()).round()
    # What all channels have in common changes neither inputs nor weights among each other.
    exponents = (exponents - exponents.median()).clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    factors = torch.exp2(exponents)
    exact = torch.ones_like(factors, dtype=torch.bool)
    for parameter in place.writers:
        exact &= _exact_rows(parameter, 1 / factors)
    for reader in place.readers:
        kept = _exact_rows(reader.weight.T, place.widened(factors))
        exact &= place.narrowed((~kept).float()) == 0
    factors = torch.where(exact, factors, 1.0)
    for parameter in place.writers:
        parameter.div_(_beside(factors, parameter).to(parameter.dtype))
    for reader in place.readers:
        reader.weight.mul_(place.widened(factors).to(reader.weight.dtype))
    return int((factors != 1).sum())


def _beside(factors: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    return factors.view(-1, *(1,) * (parameter.ndim - 1))


def _exact_rows(parameter: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Which rows come back when they are multiplied by their factors and divided again: no number leaves its format's range."""
    factors = _beside(factors, parameter).to(parameter.dtype)
    same = parameter * factors / factors == parameter
    return same.view(len(same), -1).all(1)
