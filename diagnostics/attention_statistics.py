"""
What a head's attention looks like, without ever holding its T x T map.

One pass over chunks of queries computes each chunk's scores against all its keys, reduces them, and forgets them. Memory is
that of one chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


# Elements of the score block that is held at a time. On a CPU it should stay in the cache, on a GPU launches should be few.
CPU_BLOCK_ELEMENTS = 2**21
GPU_BLOCK_ELEMENTS = 2**26

# A masked score. Finite, since exp(-inf) * -inf is not a number.
MASKED = -1e30

# What a query may see: (first query, end of queries, first key, end of keys) -> a block of shape (batch or 1, heads or 1,
# queries, keys); boolean (True: may see), or a number to add to the score; None: everything.
MaskBlock = Callable[[int, int, int, int], torch.Tensor | None]


@dataclass
class AttentionStatistics:
    """
    Reductions of one layer's attention probabilities `p[batch, head, query, key]`, in float32.

    Attributes:
        first_share: `(batch, heads, queries)`: probability on the first token of the query's document.
        entropy: `(batch, heads, queries)`: entropy of the query's distribution over keys, in nats.
        key_share: `(batch, heads, keys)`: probability on each key, averaged over the queries that count.
    """

    first_share: torch.Tensor
    entropy: torch.Tensor
    key_share: torch.Tensor


def attention_statistics(
    query: torch.Tensor,
    key: torch.Tensor,
    scaling: float,
    first_token: torch.Tensor,
    counts: torch.Tensor,
    mask_block: MaskBlock,
    window: int | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    block_elements: int | None = None,
) -> AttentionStatistics:
    """
    Reduce softmax(scaling * query key^T) blockwise.

    Args:
        query (`torch.Tensor` of shape `(batch, heads, length, head_dim)`): Queries, after RoPE.
        key (`torch.Tensor` of shape `(batch, key_value_heads, length, head_dim)`): Keys, after RoPE.
        scaling (`float`): Factor on the scores.
        first_token (`torch.LongTensor` of shape `(batch, length)`): For each query, where its document begins.
        counts (`torch.BoolTensor` of shape `(batch, length)`): The queries that enter `key_share`.
        mask_block (`MaskBlock`): What a query may see, beyond causality, which is always applied.
        window (`int`, *optional*): Keys further back than this many positions (the query's own included) are hidden.
        softcap (`float`, *optional*): Scores are `softcap * tanh(score / softcap)`.
        sink_logits (`torch.Tensor` of shape `(heads,)`, *optional*): Learned sinks: one more logit a head in each softmax.
        block_elements (`int`, *optional*): Size of the block of scores that is held at a time.

    Returns:
        [`AttentionStatistics`]
    """
    batch, heads, length, _ = query.shape
    key_value_heads = key.shape[1]
    group = heads // key_value_heads
    device = query.device
    if block_elements is None:
        block_elements = CPU_BLOCK_ELEMENTS if device.type == "cpu" else GPU_BLOCK_ELEMENTS
    rows = max(1, min(length, block_elements // (group * length)))

    # (batch, key_value_heads, group, length, head_dim): a group of query heads shares each key head
    query = (query.float() * scaling).unflatten(1, (key_value_heads, group))
    key = key.float()
    shape = (batch, key_value_heads, group, length)
    first_share, weighted, total = (torch.zeros(shape, device=device) for _ in range(3))
    key_share = torch.zeros(shape, device=device)
    weights = counts.float() / counts.sum(-1, keepdim=True).clamp(min=1)
    sinks = None if sink_logits is None else sink_logits.float().view(key_value_heads, group, 1, 1)
    scores_buffer = torch.empty(group * rows * length, device=device)
    exp_buffer = torch.empty(group * rows * length, device=device)
    future = torch.full((rows, rows), MASKED, device=device).triu(1)

    for row in range(batch):
        for start in range(0, length, rows):
            end = min(start + rows, length)
            low = 0 if window is None else max(0, start - window + 1)
            hidden = _hidden(mask_block, row, start, end, low, window, device)
            firsts = first_token[row, start:end] - low
            first = int(firsts[0]) if bool((firsts == firsts[0]).all()) else None
            for head in range(key_value_heads):
                block = (group, end - start, end - low)  # queries of a group of heads, keys
                size = block[0] * block[1] * block[2]
                scores = scores_buffer[:size].view(block)
                exponentials = exp_buffer[:size].view(block)
                torch.matmul(query[row, head, :, start:end], key[row, head, low:end].T, out=scores)
                if softcap is not None:
                    scores.div_(softcap).tanh_().mul_(softcap)
                scores[:, :, start - low :].add_(future[: end - start, : end - start])
                if hidden is not None:
                    scores.add_(hidden if hidden.shape[0] == 1 else hidden[head * group : (head + 1) * group])
                greatest = scores.amax(-1, keepdim=True)
                if sinks is not None:
                    greatest = torch.maximum(greatest, sinks[head])
                scores.sub_(greatest)
                torch.exp(scores, out=exponentials)
                block_total = exponentials.sum(-1)
                if sinks is not None:
                    sink_score = (sinks[head] - greatest).squeeze(-1)
                    block_total += sink_score.exp()
                    # As an outcome, the learned sink belongs to the entropy too.
                    weighted[row, head, :, start:end] = sink_score.exp() * sink_score
                total[row, head, :, start:end] = block_total
                key_share[row, head, :, low:end] += torch.matmul(
                    (weights[row, start:end] / block_total).unsqueeze(1), exponentials
                ).squeeze(1)
                if first is None:
                    places = firsts.clamp(min=0).expand(group, -1).unsqueeze(-1)
                    first_share[row, head, :, start:end] = exponentials.gather(-1, places).squeeze(-1) * (firsts >= 0)
                elif first >= 0:
                    first_share[row, head, :, start:end] = exponentials[:, :, first]
                weighted[row, head, :, start:end] += exponentials.mul_(scores).sum(-1)
    first_share /= total
    # H = log Z - sum_j p_j s_j, with each score s relative to the greatest of its query
    entropy = total.log() - weighted / total
    return AttentionStatistics(first_share.flatten(1, 2), entropy.flatten(1, 2), key_share.flatten(1, 2))


def _hidden(mask_block: MaskBlock, row: int, start: int, end: int, low: int, window: int | None, device):
    """What to add to a block of scores: `(1 or heads, queries, keys)`, or None for nothing."""
    block = mask_block(start, end, low, end)
    hidden = None
    if block is not None:
        block = block[row if block.shape[0] > 1 else 0]
        hidden = (
            torch.zeros(block.shape, device=device).masked_fill_(~block, MASKED)
            if block.dtype == torch.bool
            else block
        )
        hidden = hidden.float().clamp(min=MASKED)
    if window is not None and end - low > window:
        distance = torch.arange(start, end, device=device)[:, None] - torch.arange(low, end, device=device)[None]
        outside = torch.zeros(distance.shape, device=device).masked_fill_(distance >= window, MASKED)[None]
        hidden = outside if hidden is None else hidden + outside
    return hidden
