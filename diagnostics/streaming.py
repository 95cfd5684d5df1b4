"""
Does a model need its first tokens? Perplexity with a cache of the last tokens only, and with the first few kept.

The protocol is that of StreamingLLM (arXiv 2309.17453): each token attends to the `kept` first tokens and the last
`window - kept` tokens before it, and positions are those in the cache, so that a kept token is never further away than the
window. What a token computed at its own step stays in the cache. All steps are computed at once, layer by layer: a token's
keys and values depend only on what it attended to itself.
"""

from dataclasses import asdict, dataclass

import torch
from torch import nn

from .capture import Batch, decoder_layers, evaluating, layer_index_of, replaced_attention
from .errors import InspectionError
from .inspection import token_losses


_QUERY_ROWS = 256


@dataclass(frozen=True)
class StreamingResult:
    """
    Attributes:
        window: Tokens in the cache; None: all.
        kept: First tokens that are kept.
        length: Tokens of the text.
        perplexity: Over all predicted tokens.
        perplexity_past_window: Over the tokens that are predicted after something was dropped (for the full cache: the same
            tokens).
        loss_by_position: Negative log-likelihood of the token after each position.
    """

    window: int | None
    kept: int
    length: int
    perplexity: float
    perplexity_past_window: float
    loss_by_position: list[float]

    def to_dict(self) -> dict:
        return asdict(self)


@torch.no_grad()
def streaming_perplexity(
    model: nn.Module, input_ids: torch.Tensor, window: int, kept: int | None = 0
) -> StreamingResult:
    """
    Perplexity of a text with a cache of `window` tokens, the first `kept` of them never dropped.

    Args:
        model: A decoder with full causal attention and rotary positions.
        input_ids (`torch.LongTensor` of shape `(1, length)`): The text, longer than the window.
        window (`int`): Tokens that a token may look back on, besides itself.
        kept (`int`, *optional*): First tokens that stay; None: nothing is dropped (the reference).

    Raises:
        [`InspectionError`]: the window is not smaller than the text, or the model's attention or positions are of another kind.
    """
    length = input_ids.shape[1]
    if not 0 < window < length - 1:
        raise InspectionError(f"`window` must be between 1 and the text's length - 2 ({length - 2}), got {window}")
    if kept is not None and not 0 <= kept < window:
        raise InspectionError(f"`kept` must be at least 0 and less than the window ({window}), got {kept}")
    input_ids = input_ids.to(model.device)
    decoder_layers(model)  # refuses what is no decoder, also for the reference
    if len(input_ids) != 1:
        raise InspectionError(f"`input_ids` must be one text, of shape (1, length), got {tuple(input_ids.shape)}")
    with evaluating(model):
        if kept is None:
            logits = model(input_ids, use_cache=False).logits
        else:
            logits = _streamed_logits(model, input_ids, window, kept)
    losses = token_losses(logits[0], Batch.of(input_ids), row=0)
    past = losses[window + 1 :] if len(losses) > window + 1 else losses[-1:]
    return StreamingResult(
        window=None if kept is None else window,
        kept=kept or 0,
        length=length,
        perplexity=losses.double().mean().exp().item(),
        perplexity_past_window=past.double().mean().exp().item(),
        loss_by_position=losses.tolist(),
    )


def _streamed_logits(model: nn.Module, input_ids: torch.Tensor, window: int, kept: int) -> torch.Tensor:
    rotate = _Rotation(model) if kept else None
    if kept:
        rotate.check(input_ids[:, :8])
    index_of, reached = layer_index_of(model), set()
    with replaced_attention(model, _streaming_attention(window, kept, rotate, index_of, reached)):
        logits = model(input_ids, use_cache=False).logits
    missed = sorted(set(index_of.values()) - reached)
    if missed:
        raise InspectionError(
            f"layers {', '.join(map(str, missed))} of {type(model).__name__} have no softmax attention that goes through "
            "transformers' attention interface, so their window cannot be set and the figure would mean nothing"
        )
    return logits


class _Rotation:
    """Moves queries to other positions by turning them further, with the angles of the model's own rotary embedding."""

    def __init__(self, model: nn.Module):
        found = [module for module in model.modules() if hasattr(module, "inv_freq")]
        if len(found) != 1:
            raise InspectionError(
                f"{type(model).__name__} has {len(found)} rotary embeddings; the streaming test is for models with one"
            )
        self.model, self.embedding = model, found[0]

    def __call__(self, query: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        """Query `(..., length, head_dim)`, moved by `shift` of shape `(length,)` positions."""
        cos, sin = self.embedding(query.float(), shift[None])
        # Some RoPE types scale cos and sin; the query has had that once already.
        scaling = getattr(self.embedding, "attention_scaling", 1.0)
        cos, sin = cos[0].float() / scaling, sin[0].float() / scaling
        width = cos.shape[-1]
        turned, rest = query[..., :width].float(), query[..., width:].float()
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
        return torch.cat([turned, rest], dim=-1)

    def check(self, input_ids: torch.Tensor) -> None:
        """In the first layer a query at position p + 5 must be the one at p, moved by 5: its input is the same."""
        rope_type = (getattr(self.model.config, "rope_parameters", None) or {}).get("rope_type")
        if rope_type in ("dynamic", "longrope"):
            raise InspectionError(
                f"the angles of {rope_type!r} RoPE change with the length of the text, so kept tokens cannot be moved along; "
                "--kept 0 needs no moving"
            )
        queries = []
        for start in (0, 5):

            def keep(module, query, *args, original, **kwargs):
                queries.append(query)
                return original(module, query, *args, **kwargs)

            positions = torch.arange(start, start + input_ids.shape[1], device=input_ids.device)[None]
            with replaced_attention(self.model, keep):
                self.model(input_ids, position_ids=positions, use_cache=False)
        if not queries:
            raise InspectionError(
                f"no attention of {type(self.model).__name__} went through transformers' attention interface, so its window "
                "cannot be set"
            )
        before, after = queries[0].float(), queries[len(queries) // 2].float()
        moved = self(before, torch.full((before.shape[-2],), 5, device=before.device))
        if (moved - after).abs().max() > 0.02 * after.abs().max():
            raise InspectionError(
                f"positions of {type(self.model).__name__} are not those of plain rotary embeddings, so kept tokens cannot be "
                "moved along; --kept 0 needs no moving"
            )


def _streaming_attention(window: int, kept: int, rotate, index_of: dict[int, int], reached: set[int]):
    """The attention of the test; `reached` gets the layers that came by."""

    def attention(module, query, key, value, attention_mask, original, scaling=None, softcap=None, **kwargs):
        reached.add(index_of[id(module)])
        own_window = kwargs.get("sliding_window") or getattr(module, "sliding_window", None)
        if (own_window is not None and own_window < query.shape[2]) or kwargs.get("s_aux") is not None:
            raise InspectionError(
                f"{type(module).__name__} has a window or sinks of its own; the streaming test is for full attention"
            )
        _, heads, length, head_dim = query.shape
        dtype = query.dtype
        scaling = head_dim**-0.5 if scaling is None else scaling
        group = heads // key.shape[1]
        key, value = (tensor.repeat_interleave(group, dim=1).float() for tensor in (key, value))
        query = query.float() * scaling
        index = torch.arange(length, device=query.device)
        # A layer without RoPE has no positions to move.
        moves = kept and getattr(module, "use_rope", True)
        far = rotate(query, index.clamp(max=window) - index) if moves else query
        outputs = []
        for start in range(0, length, _QUERY_ROWS):
            end = min(start + _QUERY_ROWS, length)
            low = max(kept, start - (window - kept))
            queries, recent = index[start:end, None], index[None, low:end]
            hidden = (recent > queries) | (queries - recent > window - kept)
            scores = query[:, :, start:end] @ key[:, :, low:end].transpose(2, 3)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(hidden, float("-inf"))
            values = value[:, :, low:end]
            if kept:
                first = far[:, :, start:end] @ key[:, :, :kept].transpose(2, 3)
                if softcap is not None:
                    first = softcap * torch.tanh(first / softcap)
                first = first.masked_fill(index[None, :kept] > queries, float("-inf"))
                scores = torch.cat([first, scores], dim=-1)
                values = torch.cat([value[:, :, :kept], values], dim=2)
            outputs.append(scores.softmax(-1) @ values)
        # (batch, length, heads, head_dim)
        return torch.cat(outputs, dim=2).transpose(1, 2).to(dtype).contiguous(), None

    return attention
