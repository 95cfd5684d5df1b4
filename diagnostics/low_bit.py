"""
What do eight bits cost a model? Perplexity with the inputs and the weights of its linear layers rounded to nearest (W8A8).

Every weight gets one scale an output channel. What differs is how the input of a linear layer gets its scale: one for the whole
tensor, which is what the fastest kernels want and what a massive activation spoils (LLM.int8(), arXiv 2208.07339; SmoothQuant,
arXiv 2211.10438); one for each token; or one for the tensor without its first token, which stays as it is, the idea of CushionCache
(arXiv 2406.12016). All are symmetric and dynamic: a scale is that of the largest magnitude at hand, nothing is calibrated.

The integers are multiplied in float32 and scaled afterwards, as an int8 kernel does with exact sums. No parameter is touched.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import nn

from .capture import Batch, decoder_layers, evaluating
from .errors import InspectionError
from .inspection import token_losses


# The largest magnitude of a symmetric int8: -128 is not used.
_LARGEST = 127

# Scales of the inputs, by name, and what they are called in tables.
SCHEMES = {
    "per_tensor": "one scale a tensor",
    "first_token_kept": "one scale a tensor, first token kept",
    "per_token": "one scale a token",
}


# The first token of (batch, length, channels), or of (tokens, channels), as sparse MLPs flatten one text.
_FIRST_TOKEN = (..., slice(0, 1), slice(None))


@dataclass(frozen=True)
class LowBitResult:
    """
    Attributes:
        scheme: Key of `SCHEMES`; `"torchao"`; or None: nothing was rounded.
        perplexity: Over all predicted tokens.
        tokens: Tokens of the text.
        linears: Linear layers that were rounded.
        coverage: Share of the weights of the decoder layers' matrices that these hold.
        not_covered: Matrices of the decoder layers that are no linear layer's and cannot be rounded, such as stacked experts, by
            their names without the layer's number.
    """

    scheme: str | None
    perplexity: float
    tokens: int
    linears: int = 0
    coverage: float = 0.0
    not_covered: tuple[str, ...] = ()

    def to_dict(self) -> dict:
        return asdict(self)


@torch.no_grad()
def low_bit_perplexity(
    model: nn.Module,
    windows: Iterable[torch.Tensor],
    scheme: str | None = "per_tensor",
    *,
    only: Callable[[str], bool] | None = None,
    lm_head: bool = False,
) -> LowBitResult:
    """
    Perplexity with simulated W8A8 linear layers. The model is given back as it was.

    Args:
        model: A decoder-only causal language model of transformers.
        windows: Token ids of shape `(1, length)` each; dynamic scales are those of one window.
        scheme (`str`, *optional*): One of `SCHEMES`; None: nothing is rounded.
        only (*optional*): Which linear layers are rounded, told by their full names; default: all of the decoder layers.
        lm_head (`bool`): Whether the output head is rounded too; common recipes leave it as it is.

    Returns:
        [`LowBitResult`]

    Raises:
        [`InspectionError`]: there is no such scheme, or the model has no linear layer to round.
    """
    windows = list(windows)
    if scheme is None:
        return LowBitResult(None, perplexity_of(model, windows), sum(window.numel() for window in windows))
    linears = linear_layers(model, lm_head)
    _, rest = coverage_of(model, linears)
    if only is not None:
        linears = {name: linear for name, linear in linears.items() if only(name)}
    coverage, _ = coverage_of(model, linears)
    with low_bit_linears(linears, scheme):
        perplexity = perplexity_of(model, windows)
    return LowBitResult(scheme, perplexity, sum(window.numel() for window in windows), len(linears), coverage, rest)


@torch.no_grad()
def perplexity_of(model: nn.Module, windows: Iterable[torch.Tensor]) -> float:
    """Perplexity over windows of token ids, of shape `(1, length)` each."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    with evaluating(model):
        for window in windows:
            input_ids = window.to(model.device)
            losses = token_losses(model(input_ids, use_cache=False).logits[0], Batch.of(input_ids), row=0)
            total += losses.double().sum().cpu()
            count += len(losses)
    # Infinity, where eight bits have done more to a model than a float holds.
    return (total / count).exp().item()


def linear_layers(model: nn.Module, lm_head: bool = False) -> dict[str, nn.Linear]:
    """
    The linear layers of the decoder layers by their names in the model, and the output head if asked for.

    Raises:
        [`InspectionError`]: the decoder layers have none.
    """
    inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    if lm_head:
        inside.add(id(model.get_output_embeddings()))
    found = {
        name: module
        for name, module in model.named_modules()
        if id(module) in inside and isinstance(module, nn.Linear) and module.weight.is_floating_point()
    }
    if not found:
        raise InspectionError(
            f"the decoder layers of {type(model).__name__} have no linear layer (torch.nn.Linear, in floating point) to round; "
            "give a model that is neither quantised nor built of other modules"
        )
    return found


def coverage_of(model: nn.Module, linears: dict[str, nn.Linear]) -> tuple[float, tuple[str, ...]]:
    """Share of the decoder layers' matrix weights that `linears` hold, and the names of the others without the layer's number."""
    rounded = {id(linear.weight) for linear in linears.values()}
    held = total = 0
    rest = {}
    for layer in decoder_layers(model):
        for name, parameter in layer.named_parameters():
            if parameter.ndim < 2:
                continue
            total += parameter.numel()
            if id(parameter) in rounded:
                held += parameter.numel()
            else:
                rest[name] = None
    return held / total, tuple(rest)


@contextmanager
def low_bit_linears(linears: dict[str, nn.Linear], scheme: str) -> Iterator[None]:
    """
    Round the inputs and weights of linear layers within the block, by standing in for their `forward`.

    Args:
        linears: Linear layers by name. Their inputs have shape `(batch, length, in_features)` or `(tokens, in_features)`.
        scheme: One of `SCHEMES`.

    Raises:
        [`InspectionError`]: there is no such scheme.
    """
    if scheme not in SCHEMES:
        raise InspectionError(f"`scheme` must be one of {', '.join(SCHEMES)}, got {scheme!r}")
    with ExitStack() as cleanup:
        for linear in linears.values():
            before = vars(linear).get("forward")  # accelerate may have put one there
            linear.forward = _low_bit_forward(linear, scheme)
            cleanup.callback(_give_back, linear, before)
        yield


def _give_back(linear: nn.Linear, forward) -> None:
    if forward is None:
        del linear.forward
    else:
        linear.forward = forward


def _low_bit_forward(linear: nn.Linear, scheme: str):
    weight, weight_scale = rounded(linear.weight, dim=-1)
    weight_scale = weight_scale[:, 0]
    # A quarter of the room that float32 takes, for as long as the block lasts.
    weight = weight.to(torch.int8)

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        values, scale = rounded_input(hidden_states, scheme)
        output = nn.functional.linear(values, weight.to(values.dtype)) * scale * weight_scale
        if scheme == "first_token_kept":
            first = hidden_states[_FIRST_TOKEN].to(values.dtype)
            output[_FIRST_TOKEN] = nn.functional.linear(first, weight.to(values.dtype)) * weight_scale
        if linear.bias is not None:
            output += linear.bias
        return output.to(hidden_states.dtype)

    return forward


def rounded_input(hidden_states: torch.Tensor, scheme: str) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The input of a linear layer as integers, and their scale.

    With `"first_token_kept"` the scale is that of the other tokens; the first one's integers mean nothing.

    Args:
        hidden_states (`torch.Tensor` of shape `(..., in_features)`): The input.
        scheme: One of `SCHEMES`.

    Returns:
        Integers as floats, of the input's shape, and the scale, which multiplies them: one a token, of shape `(..., 1)`, or one.
    """
    if scheme == "per_token":
        return rounded(hidden_states, dim=-1)
    if scheme == "first_token_kept":
        others = hidden_states.clone()
        others[_FIRST_TOKEN] = 0
        return rounded(others)
    return rounded(hidden_states)


def rounded(tensor: torch.Tensor, dim: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Round to nearest, symmetric, eight bits.

    Args:
        tensor: In any float format; what is returned is in float32, or in float64 as it is.
        dim (*optional*): Dimension over which a scale is shared; default: one scale for all.

    Returns:
        Integers from -127 to 127 and the scale that multiplies them, largest magnitude / 127.
    """
    tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    largest = tensor.abs().amax() if dim is None else tensor.abs().amax(dim, keepdim=True)
    # Zeros stay zeros, whatever their scale.
    scale = torch.where(largest > 0, largest, 1.0) / _LARGEST
    return (tensor / scale).round().clamp(-_LARGEST, _LARGEST), scale


def torchao_perplexity(model: nn.Module, windows: Iterable[torch.Tensor]) -> LowBitResult:
    """
    Perplexity with torchao's dynamic int8 as its users apply it: `quantize_(model, Int8DynamicActivationInt8WeightConfig())`, one
    scale a token, on every linear layer with the output head. It works on a copy of the model.

    Raises:
        [`InspectionError`]: torchao is not installed.
    """
    check_torchao()
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    windows = list(windows)
    quantised = copy.deepcopy(model)
    quantize_(quantised, Int8DynamicActivationInt8WeightConfig())
    linears = sum(isinstance(module, nn.Linear) for module in quantised.modules())
    coverage, rest = coverage_of(model, linear_layers(model))
    tokens = sum(window.numel() for window in windows)
    return LowBitResult("torchao", perplexity_of(quantised, windows), tokens, linears, coverage, rest)


def check_torchao() -> None:
    """Say what is missing before the work rather than after it."""
    try:
        import torchao  # noqa: F401
    except ImportError as error:
        raise InspectionError("torchao's own int8 needs torchao: pip install torchao, or leave it out") from error
