"""Inspects a model on text: perplexity, attention sinks, activations and gates, per layer and head."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from tqdm import tqdm

from .._version import package_versions
from .accumulate import Accumulator, weight_ranks
from .capture import Batch, attention_modules, decoder_layers, evaluating, watching
from .errors import InspectionError
from .results import Activation, Inspection, InspectionSettings, LayerInspection


# Rows of logits that are turned into losses at a time: few, so that their wide float32 copies stay in the cache.
_LOSS_ROWS = 64

# More than a token of any tokenizer has on average.
_CHARACTERS_A_TOKEN = 16


# Not inference mode: what a model caches in a forward pass may be needed for training later.
@torch.no_grad()
def inspect_model(
    model: nn.Module,
    batches: Iterable[dict[str, torch.Tensor]],
    *,
    attention: bool = True,
    ranks: bool = True,
    tokenizer=None,
    name: str | None = None,
    bos: bool | None = None,
    text: str | None = None,
) -> Inspection:
    """
    Run a model over batches of tokens and reduce what its layers do.

    No attention map is held: each is reduced in blocks (see [`attention_statistics`]). The model's outputs are untouched.

    Args:
        model: A decoder-only causal language model of transformers, with any attention implementation.
        batches: Dictionaries with `input_ids` of shape `(batch, length)` and, if need be, `attention_mask` of the same shape
            (padding on either side), or `position_ids` that restart at each packed document.
        attention (`bool`): Whether to reduce attention probabilities. Without it the rest can be had from models whose
            attention cannot be watched.
        ranks (`bool`): Whether to compute effective ranks.
        tokenizer (*optional*): To show the token at the largest activations.
        name, bos, text (*optional*): Said in the result's settings.

    Returns:
        [`Inspection`]

    Raises:
        [`InspectionError`]: an encoder, attention that cannot be watched, or NaN or infinity in a layer's output.
    """
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        model = model.module
    layers = decoder_layers(model)
    config = model.config.get_text_config(decoder=True)
    accumulator = Accumulator(len(layers), gate_scale=float(getattr(config, "gate_scale", 1.0)), ranks=ranks)
    losses = _Losses()
    sizes, tokens = [], 0
    with evaluating(model):
        for inputs in batches:
            inputs = _model_inputs(inputs, model.device)
            batch = Batch.of(**inputs)
            accumulator.batch = batch
            with watching(model, batch, accumulator, attention=attention):
                # Without a mask where it would say nothing: an all-ones mask hides packed documents from transformers.
                logits = model(**inputs, use_cache=False).logits
            losses.add(logits, batch.on(logits.device))
            del logits
            accumulator.finish_batch()
            sizes.append(tuple(batch.input_ids.shape))
            tokens += int(batch.valid.sum())
            if attention and all(layer.first_share is None for layer in accumulator.layers):
                raise InspectionError(
                    f"no attention of {type(model).__name__} went through transformers' attention interface, so it cannot be "
                    "watched; activations, gates and perplexity can be had with attention=False (--no-attention)"
                )
    if not sizes:
        raise InspectionError("there is nothing to inspect: no batch was given")

    if losses.perplexity is not None and math.isnan(losses.perplexity):
        raise InspectionError(
            "the logits hold NaN although no layer's output does: look at the final norm and the head"
        )
    found = []
    for index, layer in enumerate(layers):
        modules = attention_modules(layer)
        kind = _kind(config, index, accumulator.layers[index].first_share is not None, attention)
        layer_ranks = weight_ranks(modules[0]) if ranks and modules else None
        found.append(_with_tokens(accumulator.layer(index, kind, layer_ranks), tokenizer))
    return Inspection(
        settings=InspectionSettings(
            model=name or type(model).__name__,
            dtype=str(model.dtype).removeprefix("torch."),
            attn_implementation=model.config._attn_implementation,
            length=max(length for _, length in sizes),
            windows=sum(rows for rows, _ in sizes),
            tokens=tokens,
            bos=bos,
            text=text,
            versions=package_versions(),
        ),
        perplexity=losses.perplexity,
        loss_by_position=losses.by_position,
        layers=found,
    )


def inspect_text(
    model: nn.Module,
    tokenizer,
    text: str,
    *,
    length: int = 1024,
    tokens: int = 16384,
    bos: bool | None = None,
    text_name: str | None = None,
    name: str | None = None,
    attention: bool = True,
    ranks: bool = True,
    progress: bool = True,
) -> Inspection:
    """
    Inspect a model on windows of a text.

    Args:
        model: As for [`inspect_model`].
        tokenizer: The model's tokenizer.
        text (`str`): Text; it is cut into windows that follow each other.
        length (`int`): Tokens in a window, the BOS token included.
        tokens (`int`): Tokens to look at in all; rounded down to whole windows.
        bos (`bool`, *optional*): Whether each window begins with the BOS token; default: whether the tokenizer adds one.
        text_name, name (`str`, *optional*): Said in the result's settings.
        attention, ranks (`bool`): As for [`inspect_model`].
        progress (`bool`): Whether to show a progress bar, on a terminal.

    Raises:
        [`InspectionError`]: the text is shorter than one window, or the tokenizer has no BOS token.
    """
    batches, bos = windows_of(tokenizer, text, length, tokens, bos)
    batches = tqdm(
        batches, desc=f"Inspecting {name or type(model).__name__}", unit="window", disable=None if progress else True
    )
    return inspect_model(
        model,
        ({"input_ids": window} for window in batches),
        attention=attention,
        ranks=ranks,
        tokenizer=tokenizer,
        name=name,
        bos=bos,
        text=text_name,
    )


def windows_of(
    tokenizer, text: str, length: int, tokens: int, bos: bool | None = None
) -> tuple[list[torch.Tensor], bool]:
    """Windows of shape `(1, length)` that follow each other in the text, and whether they begin with BOS."""
    if length < 2:
        raise InspectionError(
            f"`length` must be at least 2, since the first token attends to itself only; got {length}"
        )
    bos = begins_with_bos(tokenizer, bos)
    # Of a long text only the beginning is needed; the cut lies well behind the last token that is used.
    ids = tokenizer(text[: tokens * _CHARACTERS_A_TOKEN], add_special_tokens=False).input_ids
    if len(ids) < tokens + length:
        ids = tokenizer(text, add_special_tokens=False).input_ids
    fill = length - bos
    number = min(tokens // length, len(ids) // fill)
    if tokens < length:
        raise InspectionError(f"`tokens` ({tokens}) must be at least one window of `length` ({length})")
    if number == 0:
        raise InspectionError(
            f"the text has {len(ids)} tokens, a window of length {length} needs {fill}; give a longer text or a smaller length"
        )
    start = [tokenizer.bos_token_id] if bos else []
    return [torch.tensor([start + ids[i * fill : (i + 1) * fill]]) for i in range(number)], bos


def begins_with_bos(tokenizer, bos: bool | None) -> bool:
    """Whether a text begins with BOS: as asked for, or (None) as the tokenizer does."""
    if bos is None:
        with_special = tokenizer("a").input_ids
        return tokenizer.bos_token_id is not None and with_special[:1] == [tokenizer.bos_token_id]
    if bos and tokenizer.bos_token_id is None:
        raise InspectionError("the tokenizer has no BOS token; leave it out with bos=False (--no-bos)")
    return bos


def token_losses(logits: torch.Tensor, batch: Batch, row: int) -> torch.Tensor:
    """Negative log-likelihood `(length - 1,)` of each token after the first, from logits `(length, vocab_size)` of a row."""
    targets = batch.input_ids[row, 1:]
    # One result made beforehand: small ones made between the wide blocks would keep the allocator from reusing their room.
    losses = torch.empty(len(targets), device=logits.device)
    for start in range(0, len(targets), _LOSS_ROWS):
        end = min(start + _LOSS_ROWS, len(targets))
        losses[start:end] = nn.functional.cross_entropy(
            logits[start:end].float(), targets[start:end], reduction="none"
        )
    return losses


class _Losses:
    """Negative log-likelihoods, summed by position in the document."""

    def __init__(self):
        self.sums = torch.zeros(0, dtype=torch.float64)
        self.counts = torch.zeros(0, dtype=torch.float64)

    def add(self, logits: torch.Tensor, batch: Batch) -> None:
        batch_size, length = batch.input_ids.shape
        if len(self.sums) < length:
            grown = torch.zeros(length - len(self.sums), dtype=torch.float64)
            self.sums, self.counts = torch.cat([self.sums, grown]), torch.cat([self.counts, grown])
        index = torch.arange(length, device=batch.input_ids.device)
        position = index - batch.first_token
        # A token is predicted from the one before it if both belong to the same document.
        predicted = batch.valid[:, :-1] & batch.valid[:, 1:] & (batch.first_token[:, 1:] == batch.first_token[:, :-1])
        for row in range(batch_size):
            losses = token_losses(logits[row], batch, row)
            keep = predicted[row]
            where = position[row, :-1][keep].cpu()
            self.sums.index_add_(0, where, losses[keep].double().cpu())
            self.counts.index_add_(0, where, torch.ones(len(where), dtype=torch.float64))

    @property
    def perplexity(self) -> float | None:
        if self.counts.sum() == 0:
            return None
        return (self.sums.sum() / self.counts.sum()).exp().item()

    @property
    def by_position(self) -> list[float | None]:
        means = (self.sums / self.counts.clamp(min=1)).tolist()
        return [mean if count else None for mean, count in zip(means, self.counts.tolist(), strict=True)]


def _model_inputs(inputs: dict[str, torch.Tensor], device) -> dict[str, torch.Tensor]:
    """The inputs that say what the tokens are; labels, which data sets have too, are left out."""
    known = ("input_ids", "attention_mask", "position_ids")
    if not isinstance(inputs, Mapping):
        raise InspectionError(f"a batch must be a dictionary with input_ids; got a {type(inputs).__name__}")
    unknown = set(inputs) - {*known, "labels"}
    if unknown or "input_ids" not in inputs:
        raise InspectionError(
            f"a batch must have input_ids, and may have {', '.join(known[1:])}; got {', '.join(inputs)}"
        )
    return {key: inputs[key].to(device) for key in known if key in inputs}


def _kind(config, index: int, measured: bool, wanted: bool) -> str:
    """What a layer is, or why its attention was not measured."""
    if measured:
        return "attention"
    layer_type = (getattr(config, "layer_types", None) or ["full_attention"] * (index + 1))[index]
    if "attention" not in layer_type or layer_type == "linear_attention":
        return layer_type
    return "not reached through the attention interface" if wanted else "not asked for"


def _with_tokens(layer: LayerInspection, tokenizer) -> LayerInspection:
    if tokenizer is None:
        return layer
    named = [
        Activation(**{**vars(activation), "token": tokenizer.decode([activation.token_id])})
        for activation in layer.top_activations
    ]
    return LayerInspection(**{**vars(layer), "top_activations": named})
