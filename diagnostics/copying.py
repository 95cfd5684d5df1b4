"""
Does a model copy from its context? Random tokens, other random tokens, and the first ones again.

Nothing but the context tells what comes in the repeat, so predicting it is the work of induction heads (arXiv 2209.11895), at a
distance that is known. No token occurs twice in a sequence other than by the repeat, so that one token says where to look.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn
from tqdm import tqdm

from .capture import Batch, decoder_layers, evaluating
from .errors import InspectionError
from .inspection import begins_with_bos, token_losses


@dataclass(frozen=True)
class CopyingResult:
    """
    How well the repeat is predicted, from its second token on: the first has no cue. Means over sequences.

    Attributes:
        distance: Tokens from a token to its repeat.
        sequences, segment: Sequences, and tokens that are repeated in each.
        accuracy: Share of the predicted tokens that the largest logit is right about.
        accuracy_error: Standard error of the accuracy over sequences; None for a single one.
        loss: Negative log-likelihood of the repeat, nats a token.
        first_loss: That of the same tokens where they come first, and nothing tells them.
    """

    distance: int
    sequences: int
    segment: int
    accuracy: float
    accuracy_error: float | None
    loss: float
    first_loss: float

    def to_dict(self) -> dict:
        return asdict(self)


def ordinary_tokens(tokenizer) -> torch.Tensor:
    """
    Ids of the tokens that are pieces of text: no special or added token, no blank, no part of a character.

    Raises:
        [`InspectionError`]: the tokenizer has none.
    """
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ids = [index for index in sorted(tokenizer.get_vocab().values()) if index not in special]
    texts = tokenizer.batch_decode([[index] for index in ids])
    ordinary = [
        index
        for index, text in zip(ids, texts, strict=True)
        if text.strip() and "\N{REPLACEMENT CHARACTER}" not in text
    ]
    if not ordinary:
        raise InspectionError("the tokenizer has no token that is a piece of text, so there is nothing to copy")
    return torch.tensor(ordinary)


def copying_sequences(
    vocabulary: torch.Tensor,
    distance: int,
    segment: int,
    sequences: int,
    seed: int = 0,
    bos_token_id: int | None = None,
) -> torch.Tensor:
    """
    Random sequences that end with a repeat of their beginning.

    Args:
        vocabulary (`torch.LongTensor` of shape `(tokens,)`): Ids to draw from, each at most once in a sequence.
        distance (`int`): Tokens from a token to its repeat, at least `segment`.
        segment (`int`): Tokens that are repeated, at least 2.
        sequences (`int`): How many.
        seed (`int`): The same seed gives the same sequences.
        bos_token_id (`int`, *optional*): Put before each sequence.

    Returns:
        `torch.LongTensor` of shape `(sequences, distance + segment)`, one longer with BOS.

    Raises:
        [`InspectionError`]: a number is out of its range, or the vocabulary has fewer tokens than a distance needs.
    """
    if segment < 2:
        raise InspectionError(
            f"`segment` must be at least 2, since the first token of a repeat has no cue; got {segment}"
        )
    if sequences < 1:
        raise InspectionError(f"`sequences` must be at least 1, got {sequences}")
    if distance < segment:
        raise InspectionError(
            f"`distance` must be at least `segment` ({segment}), where the repeat follows at once; got {distance}"
        )
    if distance > len(vocabulary):
        raise InspectionError(
            f"`distance` must be at most the {len(vocabulary)} ordinary tokens of the vocabulary, since none is drawn twice; got {distance}"
        )
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(sequences):
        drawn = vocabulary[torch.randperm(len(vocabulary), generator=generator)[:distance]]
        begin = [] if bos_token_id is None else [torch.tensor([bos_token_id])]
        rows.append(torch.cat([*begin, drawn, drawn[:segment]]))
    return torch.stack(rows)


@torch.no_grad()
def copying_accuracy(
    model: nn.Module,
    tokenizer,
    distances: Sequence[int] = (32, 64, 128, 256, 512, 1024),
    *,
    segment: int = 32,
    sequences: int = 16,
    seed: int = 0,
    bos: bool | None = None,
    name: str | None = None,
) -> list[CopyingResult]:
    """
    Accuracy and loss of in-context copying by distance.

    Args:
        model: A decoder-only causal language model of transformers.
        tokenizer: The model's tokenizer; tokens are drawn from its ordinary vocabulary ([`ordinary_tokens`]).
        distances: Tokens from a token to its repeat.
        segment, sequences, seed: As for [`copying_sequences`]; the same segments stand at every distance.
        bos (`bool`, *optional*): Whether sequences begin with BOS; default: whether the tokenizer adds one.
        name (*optional*): Said beside the progress bar.

    Raises:
        [`InspectionError`]: as [`copying_sequences`] does, or the tokenizer has no BOS token.
    """
    decoder_layers(model)  # refuses what is no decoder
    vocabulary = ordinary_tokens(tokenizer)
    start = tokenizer.bos_token_id if begins_with_bos(tokenizer, bos) else None
    batches = [copying_sequences(vocabulary, distance, segment, sequences, seed, start) for distance in distances]
    progress = tqdm(
        total=sum(map(len, batches)), desc=f"Copying {name or type(model).__name__}", unit="sequence", disable=None
    )
    results = []
    with evaluating(model), progress:
        for distance, rows in zip(distances, batches, strict=True):
            found = []
            for row in rows:
                found.append(_copied(model, row[None].to(model.device), distance, segment))
                progress.update()
            results.append(_result(distance, segment, found))
    return results


def _copied(model, input_ids: torch.Tensor, distance: int, segment: int) -> tuple[float, float, float]:
    """Accuracy on the repeat, its loss, and the loss of the same tokens at first, from the second token of the segment on."""
    begin = input_ids.shape[1] - distance - segment  # 1 behind BOS
    logits = model(input_ids, use_cache=False).logits[0]  # (length, vocab_size)
    losses = token_losses(logits, Batch.of(input_ids), row=0)  # (length - 1): at each token that of the next
    right = logits[begin + distance : -1].argmax(-1) == input_ids[0, begin + distance + 1 :].to(logits.device)
    first_losses = losses[begin : begin + segment - 1]
    return right.double().mean().item(), losses[begin + distance :].mean().item(), first_losses.mean().item()


def _result(distance: int, segment: int, found: list[tuple[float, float, float]]) -> CopyingResult:
    accuracy, loss, first_loss = torch.tensor(found, dtype=torch.float64).T
    error = accuracy.std().item() / math.sqrt(len(found)) if len(found) > 1 else None
    return CopyingResult(
        distance, len(found), segment, accuracy.mean().item(), error, loss.mean().item(), first_loss.mean().item()
    )
