"""What a distillation may be asked to keep small: attention on first tokens, and the largest activations."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..diagnostics.capture import Batch, decoder_layers, first_tensor, layer_index_of, replaced_attention
from .divergence import at_least_float32


class FirstTokenShare:
    """
    The attention that a model's queries give the first token of their document, with its gradient and without a T x T map.

    Keys and queries get channels of zeros, which leave the scores alone, and values one channel that is 1 for first tokens and 0 for
    others: what attention makes of that channel is the share.

    Args:
        model (`nn.Module`): A causal language model of transformers, with any attention backend that differentiates.

    Attributes:
        begins (`torch.BoolTensor` of shape `(batch, length)`): The first tokens of the batch that is about to run.
        counts (`torch.BoolTensor` of shape `(batch, length)`): The queries that count.
    """

    # Kernels like their head dimensions in eights.
    _CHANNELS = 8

    def __init__(self, model: nn.Module):
        self.model = model
        self.index_of = layer_index_of(model)
        self.begins: torch.Tensor | None = None
        self.counts: torch.Tensor | None = None
        self._means: dict[int, torch.Tensor] = {}
        self._is_open = False

    def expect(self, batch: Batch) -> None:
        """Make ready for a batch."""
        index = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)
        self.begins, self.counts = batch.valid & (batch.first_token == index), batch.counts
        self._means.clear()
        self._is_open = True

    def take(self) -> torch.Tensor:
        """The mean over layers, heads and queries of the forward pass since [`expect`], a scalar."""
        means = [mean for _, mean in sorted(self._means.items())]
        self._means.clear()
        self._is_open = False
        return torch.stack([mean.to(means[0].device) for mean in means]).mean()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block, forward passes in training mode are watched, those that activation checkpointing repeats included."""
        with replaced_attention(self.model, self._attend):
            yield

    def _attend(self, module, query, key, value, attention_mask, original, **kwargs):
        index = self.index_of.get(id(module))
        if index is None or not module.training or self.begins is None:
            return original(module, query, key, value, attention_mask, **kwargs)
        width = value.shape[-1]
        query, key = (nn.functional.pad(states, (0, self._CHANNELS)) for states in (query, key))
        # (batch, key_value_heads, length, channels)
        marks = value.new_zeros(*value.shape[:-1], self._CHANNELS)
        marks[..., 0] = self.begins[:, None].to(value)
        output, weights = original(
            module, query, key, torch.cat((value, marks), dim=-1), attention_mask, **kwargs
        )  # (batch, length, heads, head_dim and channels)
        counts = self.counts.to(output.device)[..., None]
        share = at_least_float32(output[..., width])
        # Not by indices, of which there would be another number each time.
        mean = (share * counts).sum() / (counts.sum() * share.shape[-1]).clamp(min=1)
        # Activation checkpointing comes here again in the backward pass, and wants the same operations; kept, their results would hold
        # what it is to free.
        if self._is_open:
            self._means[index] = mean
        return output[..., :width], weights


class LargestActivations:
    """
    How far each layer's largest activation lies above a threshold: the logarithm of their ratio, 0 below. Massive activations are
    thousands of times as large as others, and their logarithm is what a step can follow.

    Args:
        model (`nn.Module`): A causal language model of transformers.
        threshold (`float`): What is not too much.
    """

    def __init__(self, model: nn.Module, threshold: float):
        self.model, self.threshold = model, threshold
        self._excess: dict[int, torch.Tensor] = {}

    def expect(self) -> None:
        """Make ready for a batch."""
        self._excess.clear()

    def take(self) -> torch.Tensor:
        """The mean over layers and rows of the batch, a scalar."""
        excess = [one for _, one in sorted(self._excess.items())]
        self._excess.clear()
        return torch.stack([one.to(excess[0].device) for one in excess]).mean()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block, forward passes in training mode are watched."""
        handles = [
            layer.register_forward_hook(self._hook(index)) for index, layer in enumerate(decoder_layers(self.model))
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, index: int):
        def hook(layer, inputs, output):
            if layer.training:
                # (batch, length, hidden_size) -> (batch,)
                largest = at_least_float32(first_tensor(output).abs().flatten(1).amax(-1))
                self._excess[index] = (largest / self.threshold).log().clamp(min=0).mean()

        return hook
