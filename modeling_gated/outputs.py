# Copyright 2026 The gated_attention authors. All rights reserved.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""What the models return: the outputs of transformers, and the gate scores."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast


# By layer. A layer with several gates has a tuple of them, one without gates an empty tuple.
GateScores = tuple[torch.Tensor | tuple[torch.Tensor, ...], ...]


@dataclass
class GatedModelOutputWithPast(BaseModelOutputWithPast):
    """
    [`~transformers.modeling_outputs.BaseModelOutputWithPast`] with gate scores.

    Args:
        gate_scores (`tuple`, returned with `output_gate_scores=True`):
            For each layer, a tensor of shape `(batch, sequence, heads, channels)`: what the attention output of each head is
            multiplied by. Headwise gates have 1 channel, head-shared ones 1 head, input-independent ones a batch and a
            sequence of 1. Where `config.gate_positions` names several positions it is a tuple in their order, and for a layer
            without gates an empty one.
        router_logits (`tuple`, returned with `output_router_logits=True`):
            For each sparse layer, a tensor of shape `(batch * sequence, num_experts)`: the router's logits.
    """

    gate_scores: GateScores | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None


@dataclass
class GatedCausalLMOutputWithPast(CausalLMOutputWithPast):
    """
    [`~transformers.modeling_outputs.CausalLMOutputWithPast`] with gate scores.

    Args:
        gate_scores (`tuple`, returned with `output_gate_scores=True`): As in [`GatedModelOutputWithPast`].
        router_logits (`tuple`, returned with `output_router_logits=True`): As in [`GatedModelOutputWithPast`].
        aux_loss, z_loss (`torch.Tensor`, returned with `output_router_logits=True`):
            The routers' load-balancing loss and z-loss, without their coefficients; part of `loss` if there are labels.
    """

    gate_scores: GateScores | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None
    aux_loss: torch.Tensor | None = None
    z_loss: torch.Tensor | None = None


def hands_out_gate_scores(forward: Callable) -> Callable:
    """Let the base model's `forward` also append its gate scores to a list, `gate_scores_into`, that a head passes along."""

    @wraps(forward)
    def forward_and_hand_out(self, *args, gate_scores_into: list | None = None, **kwargs):
        outputs = forward(self, *args, **kwargs)
        if gate_scores_into is not None:
            gate_scores_into.append(outputs.gate_scores)
        return outputs

    return forward_and_hand_out


def with_gate_scores(forward: Callable) -> Callable:
    """
    Make the `forward` of a generic head of transformers return the gate scores with `output_gate_scores=True`.

    The generic heads pass on to the base model what they do not know, and drop what they do not know of its output.
    """

    @wraps(forward)
    def forward_with_gate_scores(self, *args, **kwargs):
        if not kwargs.get("output_gate_scores", getattr(self.config, "output_gate_scores", False)):
            return forward(self, *args, **kwargs)
        found = []
        outputs = forward(self, *args, gate_scores_into=found, **kwargs)
        if isinstance(outputs, tuple):
            return (*outputs, found[0])
        outputs["gate_scores"] = found[0]
        return outputs

    return forward_with_gate_scores
