"""The Kullback-Leibler divergence of a model's predictions from its teacher's."""

import torch


# Numbers of logits that are turned into probabilities at a time.
_BLOCK = 2**23


def divergence(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    counts: torch.Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> torch.Tensor:
    """
    Sum over tokens of `temperature ** 2 * KL(teacher || model)`, in nats; in float32, or float64 if the logits are.

    Args:
        logits (`torch.Tensor` of shape `(batch, length, vocab_size)`): The model's.
        teacher_logits (`torch.Tensor` of the same shape): The teacher's; they get no gradient.
        counts (`torch.BoolTensor` of shape `(batch, length)`): The tokens that count.
        temperature (`float`): Logits are divided by it.
        top_k (`int`, *optional*): Compare the teacher's `top_k` most likely tokens one by one, and all others as one outcome.

    Returns:
        A scalar.
    """
    logits, teacher_logits, counts = logits.flatten(0, 1), teacher_logits.flatten(0, 1), counts.flatten()
    if top_k is not None and top_k < logits.shape[-1]:
        return _of_most_likely(logits, teacher_logits, counts, temperature, top_k)
    return _Divergence.apply(logits, teacher_logits, counts, temperature)


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """In float32, or in float64 as it is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class _Divergence(torch.autograd.Function):
    """
    A block of tokens at a time: probabilities of all of them, for both models, would take several times the memory of the logits.
    The gradient, the difference of the two, is made on the way.
    """

    @staticmethod
    def forward(ctx, logits, teacher_logits, counts, temperature):
        rows = max(1, _BLOCK // logits.shape[-1])
        total = torch.zeros((), dtype=at_least_float32(logits[:0]).dtype, device=logits.device)
        grad = torch.empty_like(logits)
        for start in range(0, len(logits), rows):
            block = slice(start, start + rows)
            counted = counts[block, None]
            log_p = torch.log_softmax(at_least_float32(teacher_logits[block]) / temperature, dim=-1)
            log_q = torch.log_softmax(at_least_float32(logits[block]) / temperature, dim=-1)
            p = log_p.exp()
            total += ((log_p - log_q) * p).sum(-1, keepdim=True).mul_(counted).sum()
            grad[block] = log_q.exp_().sub_(p).mul_(counted * temperature)
        ctx.save_for_backward(grad)
        return total * temperature**2

    @staticmethod
    def backward(ctx, upstream):
        (grad,) = ctx.saved_tensors
        return grad * upstream.to(grad.dtype), None, None, None


def _of_most_likely(logits, teacher_logits, counts, temperature, top_k):
    found, ids = teacher_logits.topk(top_k, dim=-1)
    log_p = at_least_float32(found) / temperature - torch.logsumexp(
        at_least_float32(teacher_logits) / temperature, -1, keepdim=True
    )
    log_q = at_least_float32(logits.gather(-1, ids)) / temperature - torch.logsumexp(
        at_least_float32(logits) / temperature, -1, keepdim=True
    )
    p, q = log_p.exp(), log_q.exp()
    tiny = torch.finfo(p.dtype).tiny
    rest_p, rest_q = ((1 - one.sum(-1)).clamp(min=tiny) for one in (p, q))
    each = (p * (log_p - log_q)).sum(-1) + rest_p * (rest_p.log() - rest_q.log())
    return (each * counts).sum() * temperature**2
