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


def _comes_back(weight: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Where `1 + stored` is the weight. In float32, as the stock classes take the sum, or wider."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return 1 + stored.to(wide) == weight.to(wide)


def split_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    What a zero-centred norm stores for a weight, and what goes into the columns of the matrices behind it.

    Args:
        weight (`torch.Tensor` of shape `(channels,)`): Weight of a norm that multiplies by it.

    Returns:
        The weight of a norm that multiplies by 1 + weight, and a factor for each channel, 0 or plus or minus a power of two
        (float64): `(1 + stored) * factor` is the weight, exactly. `None` if all factors are 1.
    """
    stored = zero_centered(weight)
    rounded = ~_comes_back(weight, stored)
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
    query: torch.Tensor, key: torch.Tensor, rotary_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    What zero-centred norms of queries and keys store.

    No matrix follows these norms that could take a factor. But a power of two may move from the keys to the queries: a channel's products do
    not change, if the channel that RoPE turns together with it gets the same one. It is chosen for the least rounding.

    Args:
        query, key (`torch.Tensor` of shape `(head_dim,)`): Weights of `q_norm` and `k_norm`.
        rotary_dim (`int`): How many channels RoPE turns: the first half of them with the second.

    Returns:
        The two weights to store.
    """
    half = rotary_dim // 2
    partner = torch.arange(query.shape[0])
    partner[:rotary_dim] = (partner[:rotary_dim] + half) % rotary_dim if rotary_dim else partner[:rotary_dim]
    best_error = torch.full(query.shape, torch.inf, dtype=torch.float64)
    best = [torch.zeros_like(query), torch.zeros_like(key)]
    for exponent in _EXPONENTS:
        moved = [query.double() * 2.0**exponent, key.double() * 2.0**-exponent]
        stored = [zero_centered(one.to(weight.dtype)) for one, weight in zip(moved, (query, key), strict=True)]
        errors = torch.stack(
            [
                torch.where(one == 0, (1 + kept.double()).abs(), ((1 + kept.double()) / one - 1).abs())
                for one, kept in zip(moved, stored, strict=True)
            ]
        ).amax(0)
        errors = torch.maximum(errors, errors[partner])
        better = errors < best_error
        best_error = torch.where(better, errors, best_error)
        best = [torch.where(better, kept, before) for kept, before in zip(stored, best, strict=True)]
    return best[0], best[1]
