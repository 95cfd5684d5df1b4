"""Reads the mask that a backend was given, whatever its form, block by block."""

import torch

from .attention_statistics import MaskBlock


def mask_block_reader(attention_mask, key_length: int, starts: torch.Tensor | None, device) -> MaskBlock:
    """
    A function that gives the mask of a block of queries and keys.

    Args:
        attention_mask: What the attention function of the backend got: None (causal), a boolean or additive tensor of shape
            `(batch or 1, heads or 1, queries, keys)` (SDPA, eager), a `BlockMask` (Flex), or a tensor of shape
            `(batch, keys)` with 1 for tokens (FlashAttention).
        key_length (`int`): Number of keys.
        starts (`torch.LongTensor` of shape `(batch, length)`, *optional*): Beginning of each position's document. Given for
            backends that take packed documents from the positions, not from a mask (FlashAttention).
        device: Where blocks are made.
    """
    if attention_mask is None:
        read = _nothing_hidden
    elif hasattr(attention_mask, "mask_mod"):  # BlockMask; its class is not there on every build of torch
        read = _from_mask_function(attention_mask.mask_mod, attention_mask.shape[0], device)
    elif attention_mask.ndim == 4:
        tensor = attention_mask[..., :key_length]

        def read(start, end, low, high):
            return tensor[:, :, start:end, low:high]
    else:
        padding = attention_mask.bool()

        def read(start, end, low, high):
            return padding[:, None, None, low:high].expand(-1, -1, end - start, -1)

    if starts is None:
        return read

    def read_within_documents(start, end, low, high):
        same = (torch.arange(low, high, device=device)[None, None] >= starts[:, start:end, None])[:, None]
        block = read(start, end, low, high)
        return same if block is None else same & block

    return read_within_documents


def _nothing_hidden(start, end, low, high):
    return None


def _from_mask_function(mask_function, batch: int, device) -> MaskBlock:
    def read(start, end, low, high):
        queries = torch.arange(start, end, device=device)[:, None]
        keys = torch.arange(low, high, device=device)[None]
        head = torch.zeros((), dtype=torch.long, device=device)
        rows = [mask_function(torch.tensor(row, device=device), head, queries, keys) for row in range(batch)]
        return torch.stack([row.expand(end - start, high - low) for row in rows])[:, None]

    return read
