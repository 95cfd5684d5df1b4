"""
Makes massive activations ordinary in size.

They are written into a sink's hidden state by very few neurons of one layer's MLP, and taken out again by a few of a later one (arXiv
2402.17762 found them, 2410.13835 their circuit). What later layers see of them is a direction, since every layer normalises what it reads;
in the source the size matters too, because it is what makes the direction pure, and the sink depends on that. After a transfer
nothing does, and the same few rows of `up_proj` can be made smaller: a SwiGLU neuron's output is linear in its row, so all
other tokens, on which these neurons hardly fire, keep their states. All are multiplied by one factor, so that what is taken out again
still is what was written.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ...modeling_gated.decoder import GatedAttentionDecoderLayer
from .opened_attention import OpenedAttention, sink_shares


# A neuron writes massive activations if it writes so many times what a token's largest activation typically is, and so many times what it
# writes anywhere else. Those that take them out again have less to show, since they need not do it alone.
LEAST_EXCESS = 10.0
LEAST_REMOVED = 1.0
LEAST_CONTRAST = 20.0
# Sizes that are tried, in typical largest activations of the layer that writes: later layers' may be much larger.
SIZES = (2.0, 4.0, 8.0, 16.0, 32.0)
# The smallest one counts that raises the perplexity of the held-out tokens by no more than the first of these; if there is none, the one
# with the lowest perplexity, up to the second: massive activations that stay cost more later on, in eight bits or in training.
LARGEST_RISE = 1.005
LARGEST_RISE_AT_ALL = 1.01


@dataclass(frozen=True)
class ShrunkLayer:
    """A layer's figures on the held-out windows, means over heads."""

    f_attn: float
    largest_key_share: float
    m_act: float


class ShrinkTrial:
    """
    Follows the held-out windows through the converted layers once more, with the neurons that write massive activations made smaller by
    each of a few factors.

    Args:
        allocate: Makes a copy of states, which may lie in a file of a given name.

    Attributes:
        neurons: Indices of the MLP neurons that write massive activations or take them out again, by layer, as far as layers were seen.
        states: For each factor the held-out windows, `(windows, length, hidden_size)`; empty until a layer writes.
        layers: For each factor the layers' figures, from the first one that writes on.
    """

    def __init__(self, allocate: Callable[[torch.Tensor, str], torch.Tensor]):
        self._allocate = allocate
        self.neurons: dict[int, list[int]] = {}
        self.states: dict[float, torch.Tensor] = {}
        self.layers: dict[float, dict[int, ShrunkLayer]] = {}

    @contextmanager
    def watching(self, layer: GatedAttentionDecoderLayer) -> Iterator[None]:
        """Within the block, what runs through the layer is looked at; at its end the layer's neurons are known."""
        watch = LayerWatch(layer)
        handles = [
            layer.mlp.down_proj.register_forward_pre_hook(watch.see_neurons),
            layer.register_forward_hook(watch.see_states),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._watch = watch

    def follow(
        self,
        index: int,
        layer: GatedAttentionDecoderLayer,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        entering: torch.Tensor | None,
        dtypes: dict[str, torch.dtype],
        run: Callable[[GatedAttentionDecoderLayer, torch.Tensor], float],
    ) -> None:
        """
        Take the windows through a layer that was watched.

        Args:
            index, layer: The converted layer; left as it is.
            position_embeddings: Cosines and sines of RoPE.
            entering (`torch.Tensor` of shape `(windows, length, hidden_size)`): What the layer gets with nothing made smaller; not
                needed once there are `states`.
            dtypes: Format that the checkpoint keeps each tensor in, by its name in the layer.
            run: Takes states through a layer, in place, and returns the largest |state|.
        """
        found = self._watch.neurons(after_writer=bool(self.neurons))
        if found:
            self.neurons[index] = found
            if not self.states:
                ratio = self._watch.on_massive[found].max().item() / self._watch.typical_size
                self.states = {
                    factor: self._allocate(entering, f"shrunk_{factor}.bin") for factor in factors_for(ratio)
                }
                self.layers = {factor: {} for factor in self.states}
        for factor, states in self.states.items():
            with self._shrunk(index, layer, factor, dtypes):
                shares = sink_shares(OpenedAttention(layer, position_embeddings), states)
                m_act = run(layer, states)
            self.layers[factor][index] = ShrunkLayer(shares.first.mean().item(), shares.largest.mean().item(), m_act)

    @contextmanager
    def _shrunk(
        self, index: int, layer: GatedAttentionDecoderLayer, factor: float, dtypes: dict[str, torch.dtype]
    ) -> Iterator[None]:
        changed = shrunk_tensors(layer, self.neurons.get(index, []), factor, dtypes)
        kept = {name: layer.get_parameter(name).clone() for name in changed}
        try:
            layer.load_state_dict(changed, strict=False)
            yield
        finally:
            layer.load_state_dict(kept, strict=False)


def factors_for(ratio: float) -> list[float]:
    """
    What neurons could be multiplied by that write `ratio` typical activations, the greatest change first. Powers of two, with which a
    product of float32 or bfloat16 is exact.
    """
    exponents = {math.floor(math.log2(ratio / size)) for size in SIZES}
    return [2.0**-exponent for exponent in sorted(exponents, reverse=True) if exponent > 0]


class LayerWatch:
    """What the neurons of a layer's MLP write on tokens with massive activations and on all others."""

    def __init__(self, layer: GatedAttentionDecoderLayer):
        # A neuron's largest effect on a single channel, for an activation of 1.
        self.reach = layer.mlp.down_proj.weight.abs().amax(0)  # (intermediate_size,)
        self.on_massive = torch.zeros_like(self.reach)
        self.elsewhere = torch.zeros_like(self.reach)
        self.typical: list[float] = []
        self._activations: torch.Tensor | None = None

    def see_neurons(self, module, inputs) -> None:
        self._activations = inputs[0][0]  # (length, intermediate_size)

    def see_states(self, layer, inputs, output) -> None:
        sizes = torch.maximum(inputs[0][0].abs().amax(-1), output[0].abs().amax(-1))  # (length,)
        typical = sizes.median().item()
        massive = sizes > LEAST_EXCESS * typical
        written = self._activations.abs() * self.reach
        for rows, largest in ((massive, self.on_massive), (~massive, self.elsewhere)):
            if rows.any():
                torch.maximum(largest, written[rows].amax(0), out=largest)
        self.typical.append(typical)

    @property
    def typical_size(self) -> float:
        """The largest activation of a typical token of a typical window."""
        return max(sorted(self.typical)[len(self.typical) // 2], 1e-12)

    def neurons(self, after_writer: bool) -> list[int]:
        """Those that qualify; before the first layer that writes, none can take anything out."""
        least = LEAST_REMOVED if after_writer else LEAST_EXCESS
        contrast = self.on_massive > LEAST_CONTRAST * self.elsewhere
        return torch.nonzero(contrast & (self.on_massive > least * self.typical_size)).flatten().tolist()


def shrunk_tensors(
    layer: GatedAttentionDecoderLayer, neurons: list[int], factor: float, dtypes: dict[str, torch.dtype]
) -> dict[str, torch.Tensor]:
    """The tensors of a layer that change when neurons are multiplied by a factor, by their name in it, as their formats keep them."""
    if not neurons:
        return {}
    changed = {"mlp.up_proj.weight": layer.mlp.up_proj.weight.clone()}
    if layer.mlp.up_proj.bias is not None:
        changed["mlp.up_proj.bias"] = layer.mlp.up_proj.bias.clone()
    for name, tensor in changed.items():
        tensor[neurons] = (tensor[neurons] * factor).to(dtypes[name]).to(tensor.dtype)
    return changed
