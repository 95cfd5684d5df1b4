"""
Watches a model's forward pass: its attention, through the attention interface, and its activations and gates, through hooks.

The model computes what it always computes: each attention function is called with its own arguments and its result is passed
on. What was seen goes to an observer.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention_statistics import AttentionStatistics, attention_statistics
from .errors import InspectionError
from .gate_locations import gate_location, gate_scores
from .masks import mask_block_reader


@dataclass
class Batch:
    """
    What the watched forward pass is about.

    Attributes:
        input_ids: `(batch, length)`.
        valid: `(batch, length)`: tokens, as opposed to padding.
        first_token: `(batch, length)`: index at which each position's document begins.
    """

    input_ids: torch.Tensor
    valid: torch.Tensor
    first_token: torch.Tensor

    @classmethod
    def of(cls, input_ids, attention_mask=None, position_ids=None) -> "Batch":
        valid = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        index = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        if not valid.any(-1).all():
            raise InspectionError("a row of the batch is padding only; leave it out")
        begins = valid & ~torch.cat([torch.zeros_like(valid[:, :1]), valid[:, :-1]], dim=1)
        if position_ids is not None and attention_mask is None:
            # Packed documents: positions that do not go on from the one before.
            position_ids = position_ids.expand_as(input_ids)
            begins[:, 1:] |= position_ids[:, 1:] != position_ids[:, :-1] + 1
        first_token = torch.where(begins, index, 0).cummax(dim=1).values
        return cls(input_ids, valid, first_token)

    def on(self, device: torch.device) -> "Batch":
        """The same batch on the device of a layer; a model may be spread over several."""
        if device == self.input_ids.device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = Batch(*(t.to(device) for t in (self.input_ids, self.valid, self.first_token)))
        return self._elsewhere[device]

    @cached_property
    def _elsewhere(self) -> dict[torch.device, "Batch"]:
        return {}

    @cached_property
    def all_valid(self) -> bool:
        return bool(self.valid.all())

    @cached_property
    def counts(self) -> torch.Tensor:
        """The queries that count: tokens from the second of their document on (the first sees only itself)."""
        index = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        return self.valid & (index > self.first_token)

    def first_document(self, length: int) -> torch.Tensor:
        """`(batch, length)`: the first `length` tokens of each sequence's first document."""
        index = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        beginning = self.first_token.masked_fill(~self.valid, len(index)).amin(-1, keepdim=True)
        return self.valid & (self.first_token == beginning) & (index - beginning < length)


class Observer:
    """Receives what is seen of each layer, in the order of the forward pass. Override what is of interest."""

    def attention(self, layer_idx: int, statistics: AttentionStatistics) -> None: ...

    def head_outputs(self, layer_idx: int, outputs: torch.Tensor, gated: bool) -> None:
        """`(batch, length, heads, head_dim)`, before the gate and, in models that have one, after it."""

    def gates(self, layer_idx: int, scores: torch.Tensor) -> None:
        """`(batch, length, heads, 1 or head_dim)`."""

    def attention_output(self, layer_idx: int, output: torch.Tensor) -> None:
        """`(batch, length, hidden_size)`: what the attention module adds to the residual stream."""

    def hidden_states(self, layer_idx: int, hidden_states: torch.Tensor) -> None:
        """`(batch, length, hidden_size)`: what the decoder layer returns."""


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """
    The decoder layers of a model, in order.

    Raises:
        `InspectionError`: the model has no list of layers where decoders keep theirs.
    """
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise InspectionError(
            f"{type(model).__name__} is an encoder-decoder; the diagnostics are for decoder-only causal language models"
        )
    number = config.get_text_config(decoder=True).num_hidden_layers
    # The decoder first: a vision tower may have as many layers.
    roots = [model.get_decoder()] if hasattr(model, "get_decoder") else []
    modules = [module for root in (*roots, model) if isinstance(root, nn.Module) for module in root.modules()]
    for candidate in (module for module in modules if isinstance(module, nn.ModuleList) and len(module) == number):
        if all(hasattr(child, "forward") and len(list(child.children())) > 1 for child in candidate):
            return list(candidate)
    raise InspectionError(
        f"{type(model).__name__} has no list of {number} decoder layers; give a causal language model of transformers"
    )


def layer_index_of(model: nn.Module) -> dict[int, int]:
    """Index of the decoder layer that a module belongs to, by the module's `id`."""
    return {id(module): index for index, layer in enumerate(decoder_layers(model)) for module in layer.modules()}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode within the block; each module gets its own mode back, since parts may be frozen in another."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def attention_modules(layer: nn.Module) -> list[nn.Module]:
    """The attention modules of a layer: in transformers they are called so, and know their place."""
    return [m for m in layer.modules() if hasattr(m, "layer_idx") and "Attention" in type(m).__name__]


@contextmanager
def watching(model: nn.Module, batch: Batch, observer: Observer, attention: bool = True) -> Iterator[None]:
    """
    Report to `observer` what happens in forward passes of `model` on `batch` within the block.

    Args:
        model: A causal language model of transformers, or one that calls attention through its interface.
        batch: What the forward passes are about.
        observer: Gets what is seen.
        attention: Whether attention probabilities are reduced; the rest costs little.
    """
    layers = decoder_layers(model)
    index_of = layer_index_of(model)
    name = model.config._attn_implementation or "eager"

    def watched(module, query, key, value, attention_mask, original, **kwargs):
        result = original(module, query, key, value, attention_mask, **kwargs)
        index = index_of.get(id(module))
        if index is not None:
            observer.head_outputs(index, result[0], gated=False)
            if attention:
                observer.attention(index, _statistics(module, query, key, attention_mask, batch, name, kwargs))
        return result

    with ExitStack() as cleanup:

        def hooked(handle) -> None:
            cleanup.callback(handle.remove)

        for index, layer in enumerate(layers):
            hooked(layer.register_forward_hook(_hidden_states_hook(observer, index)))
            for module in attention_modules(layer):
                hooked(module.register_forward_hook(_attention_output_hook(observer, index)))
                location = gate_location(module)
                if location is not None:
                    heads = _number_of_heads(module)
                    projection = getattr(module, location.module)
                    hooked(projection.register_forward_hook(_gate_hook(observer, index, location, module, heads)))
                    hooked(module.o_proj.register_forward_pre_hook(_gated_outputs_hook(observer, index, heads)))
        with replaced_attention(model, watched):
            yield


@contextmanager
def replaced_attention(model: nn.Module, function: Callable) -> Iterator[None]:
    """
    Send the model's attention through `function(module, query, key, value, attention_mask, original=..., **kwargs)` within
    the block; `original` is the attention function that would have been called.
    """
    name = model.config._attn_implementation or "eager"
    registered = ALL_ATTENTION_FUNCTIONS.get(name)
    own = {id(module) for module in model.modules()}

    def replacement(module, *args, **kwargs):
        original = registered or _eager_attention_of(module)
        if id(module) not in own:  # the interface is shared by all models of the process
            return original(module, *args, **kwargs)
        return function(module, *args, original=original, **kwargs)

    # A local entry of the mapping: an existing one (of a caller who replaces it too) is put back afterwards.
    before = ALL_ATTENTION_FUNCTIONS._local_mapping.get(name)
    ALL_ATTENTION_FUNCTIONS[name] = replacement
    try:
        yield
    finally:
        if before is None:
            del ALL_ATTENTION_FUNCTIONS[name]
        else:
            ALL_ATTENTION_FUNCTIONS[name] = before


def _eager_attention_of(module: nn.Module):
    """Each model file brings its own eager attention, which the interface gets as a default, not by name."""
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise InspectionError(
        f"the eager attention of {type(module).__name__} is not to be found; load the model with attn_implementation='sdpa'"
    )


def _number_of_heads(module: nn.Module) -> int:
    head_dim = getattr(module, "head_dim", None) or module.config.head_dim
    return module.o_proj.in_features // head_dim


def _statistics(module, query, key, attention_mask, batch: Batch, name: str, kwargs) -> AttentionStatistics:
    if query.shape[2] != key.shape[2] or query.shape[2] != batch.input_ids.shape[1]:
        raise InspectionError(
            f"attention of {type(module).__name__} got {query.shape[2]} queries and {key.shape[2]} keys for "
            f"{batch.input_ids.shape[1]} tokens; the diagnostics watch whole sequences: call the model without a cache"
        )
    batch = batch.on(query.device)
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if not causal and _sees_the_future(mask_block_reader(attention_mask, key.shape[2], None, query.device), batch):
        raise InspectionError(f"{type(module).__name__} is not causal; the diagnostics are for causal language models")
    # SDPA and eager get the window as part of their mask; FlashAttention as a number.
    window = kwargs.get("sliding_window") if "flash" in name else None
    starts = batch.first_token if "flash" in name else None
    scaling = kwargs.get("scaling")
    return attention_statistics(
        query,
        key,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        first_token=batch.first_token,
        counts=batch.counts,
        mask_block=mask_block_reader(attention_mask, key.shape[2], starts, query.device),
        window=window,
        softcap=kwargs.get("softcap"),
        sink_logits=kwargs.get("s_aux"),
    )


def _sees_the_future(read, batch: Batch) -> bool:
    """Whether the first token of the first sequence may look at what comes after it."""
    length = batch.input_ids.shape[1]
    query = int(batch.valid[0].int().argmax())
    block = read(query, query + 1, 0, length)
    if block is None:
        return True
    seen = block if block.dtype == torch.bool else block > -1e4
    return bool(seen[0, 0, 0, query + 1 :].any())


def first_tensor(output):
    return output[0] if isinstance(output, tuple) else output


def _hidden_states_hook(observer: Observer, index: int):
    def hook(module, inputs, output):
        hidden_states = first_tensor(output)
        # One NaN or infinity makes the sum one; in float32 a sum of finite states does not overflow.
        if not torch.isfinite(hidden_states.sum(dtype=torch.float32)):
            way_out = (
                "look at its weights"
                if hidden_states.dtype == torch.float32
                else "load the model in float32, or look at its weights"
            )
            raise InspectionError(
                f"the output of layer {index} holds NaN or infinity in {hidden_states.dtype}; {way_out}"
            )
        observer.hidden_states(index, hidden_states)

    return hook


def _attention_output_hook(observer: Observer, index: int):
    def hook(module, inputs, output):
        observer.attention_output(index, first_tensor(output))

    return hook


def _gate_hook(observer: Observer, index: int, location, module, heads: int):
    def hook(projection, inputs, output):
        # An input-independent gate gives one set of logits for all tokens.
        logits = output.expand(*inputs[0].shape[:-1], -1)
        observer.gates(index, gate_scores(location, module.config, logits, heads))

    return hook


def _gated_outputs_hook(observer: Observer, index: int, heads: int):
    def hook(projection, inputs):
        observer.head_outputs(index, inputs[0].unflatten(-1, (heads, -1)), gated=True)

    return hook
