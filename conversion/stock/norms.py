"""
From norms that multiply by `weight` to norms that multiply by `1 + weight`, without a number being rounded where that can be.

`weight - 1` is a number of the same format if `weight` is between 1/2 and some hundreds; below 1/2 it rounds, and in bfloat16 a weight of
0.01 comes back as 0.0117. But each weight is a power of two times a number between 1/2 and 1. That number fits. The power of two
goes into the columns of the matrices that read the norm's output, which changes the exponents of their numbers and nothing else.
"""

import torch


def zero_centered(weight: torch.Tensor) -> torch.Tensor:
    """`weight - 1` in the weight's own format, rounded where it has to be."""
    return (weight.double() - 1).to(weight.dtype)


def narrower(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """Of two formats that with fewer bits."""
    return min(first, second, key=lambda dtype: dtype.itemsize)


def _comes_back(weight: torch.Tensor, stored: torch.Tensor, loaded: torch.dtype) -> torch.Tensor:
    """Where `1 + stored` is the weight, as the file has both and as a model of another format loads them."""
    same = torch.ones_like(weight, dtype=torch.bool)
    for dtype in {weight.dtype, loaded}:
        # In float32, as the stock classes take the sum, or wider.
        wide = torch.promote_types(dtype, torch.float32)
        same &= 1 + stored.to(dtype).to(wide) == weight.to(dtype).to(wide)
    return same


def split_weight(weight: torch.Tensor, loaded: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    What a zero-centred norm stores for a weight, and what goes into the columns of the matrices behind it.

    Args:
        weight (`torch.Tensor` of shape `(channels,)`): Weight of a norm that multiplies by it.
        loaded (`torch.dtype`, *optional*): Format that the model loads in, if it is another one than the weight's.

    Returns:
        The weight of a norm that multiplies by 1 + weight, and a factor for each channel, 0 or plus or minus a power of two
        (float64): `(1 + stored) * factor` is the weight, exactly. `None` if all factors are 1.
    """
    stored = zero_centered(weight)
    rounded = ~_comes_back(weight, stored, weight.dtype if loaded is None else loaded)
    if not rounded.any():
        return stored, None
    mantissa, exponent = torch.frexp(weight.double())  # 1/2 <= |mantissa| < 1, or 0
    factors = torch.ldexp(mantissa.sign(), exponent)
    magnitude = torch.where(mantissa == 0, 1.0, mantissa.abs())
    return (
        torch.where(rounded, (magnitude - 1).to(weight.dtype), stored),
        torch.where(rounded, factors, 1.0),
    )


# Powers of two that are tried between queries and keys.
_EXPONENTS = sorted(range(-16, 17), key=abs)


def split_query_and_key_weights(
    query: torch.Tensor, key: torch.Tensor, turned: int, loaded: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    What zero-centred norms of queries and keys store.

    No matrix follows these norms that could take a factor. But a power of two may move from the keys to the queries: a channel's products do
    not change, if the channel that RoPE turns together with it gets the same one. It is chosen for the least rounding.

    Args:
        query, key (`torch.Tensor` of shape `(head_dim,)`): Weights of `q_norm` and `k_norm`.
        turned (`int`): How many channels RoPE turns: the first half of them with the second.
        loaded (`torch.dtype`, *optional*): Format that the model loads in, if it is another one than the weights'.

    Returns:
        The two weights to store.
    """
    partner = torch.arange(query.shape[0])
    partner[:turned] = (partner[:turned] + turned // 2) % max(1, turned)
    formats = [narrower(weight.dtype, loaded or weight.dtype) for weight in (query, key)]
    best_error = torch.full(query.shape, torch.inf, dtype=torch.float64)
    best = [torch.zeros_like(query), torch.zeros_like(key)]
    for exponent in _EXPONENTS:
        moved = [query.double() * 2.0**exponent, key.double() * 2.0**-exponent]
        stored = [zero_centered(one.to(weight.dtype)) for one, weight in zip(moved, (query, key), strict=True)]
        errors = []
        for one, kept, dtype in zip(moved, stored, formats, strict=True):
            found = 1 + kept.to(dtype).double()
            errors.append(torch.where(one == 0, found.abs(), (found / one - 1).abs()))
        error = torch.stack(errors).amax(0)
        error = torch.maximum(error, error[partner])
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best = [torch.where(better, kept, before) for kept, before in zip(stored, best, strict=True)]
    return best[0], best[1]
