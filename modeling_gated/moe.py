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
"""The sparse MLP: a softmax top-k router, experts, and an optional expert that every token goes through."""

import torch
from torch import nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeMLP

from .expert_tensors import load_single_experts


class GatedAttentionTopKRouter(nn.Module):
    """
    Chooses `num_experts_per_tok` experts for each token by the softmax of a projection.

    Families differ in where they leave the model's format: `router_logits_dtype` and `router_scores_dtype` of the config. The
    softmax is taken in float32 in each of them.
    """

    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.logits_in_float32 = config.router_logits_dtype == "float32"
        self.scores_in_float32 = config.router_scores_dtype == "float32"
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size))

    def extra_repr(self) -> str:
        return f"num_experts={self.weight.shape[0]}, top_k={self.top_k}"

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `(tokens, hidden_size)`): What the layer's MLP gets.

        Returns:
            The router's logits, `(tokens, num_experts)`; the scores of the chosen experts, highest first, and their
            indices, both `(tokens, num_experts_per_tok)`.
        """
        if self.logits_in_float32:
            # Autocast would take the product in its own format.
            with torch.autocast(device_type=hidden_states.device.type, enabled=False):
                router_logits = nn.functional.linear(hidden_states.float(), self.weight.float())
        else:
            router_logits = nn.functional.linear(hidden_states, self.weight)
        probabilities = nn.functional.softmax(router_logits, dim=-1, dtype=torch.float32)
        router_scores, router_indices = torch.topk(probabilities, self.top_k, dim=-1)
        if self.norm_topk_prob:
            router_scores = router_scores / router_scores.sum(dim=-1, keepdim=True)
        if not self.scores_in_float32:
            # Under autocast the product has the model's format, the states may not.
            router_scores = router_scores.to(hidden_states.dtype if self.logits_in_float32 else router_logits.dtype)
        return router_logits, router_scores, router_indices


class GatedAttentionSparseMLP(nn.Module):
    """
    A mixture of experts in the place of the MLP. The experts' weights are stacked, `(num_experts, ...)`, and multiplied by
    whichever implementation `config._experts_implementation` names (`"eager"`, `"batched_mm"`, `"grouped_mm"`); on disk each expert
    has tensors of its own ([`register_expert_tensors`]).
    """

    def __init__(self, config):
        super().__init__()
        self.gate = GatedAttentionTopKRouter(config)
        self.experts = Qwen3MoeExperts(config)
        self.experts.register_load_state_dict_pre_hook(load_single_experts)
        if config.shared_expert_intermediate_size is not None:
            self.shared_expert = Qwen3MoeMLP(config, intermediate_size=config.shared_expert_intermediate_size)
            if config.shared_expert_gate:
                self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """From `(batch, sequence, hidden_size)` to the same shape."""
        shape = hidden_states.shape
        hidden_states = hidden_states.reshape(-1, shape[-1])  # (tokens, hidden_size)
        _, router_scores, router_indices = self.gate(hidden_states)
        output = self.experts(hidden_states, router_indices, router_scores)
        if hasattr(self, "shared_expert"):
            shared = self.shared_expert(hidden_states)
            if hasattr(self, "shared_expert_gate"):
                shared = torch.sigmoid(self.shared_expert_gate(hidden_states)) * shared
            output = output + shared
        return output.reshape(shape)


def router_losses(
    config, router_logits: tuple[torch.Tensor, ...], attention_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The two losses of the routers, without their coefficients.

    Args:
        config: Its `num_experts` and `num_experts_per_tok` are read.
        router_logits (`tuple[torch.Tensor]`): Of each sparse layer, of shape `(batch * sequence, num_experts)`.
        attention_mask (`torch.Tensor` of shape `(batch, sequence)`, *optional*):
            1 for tokens that count, 0 for padding; of a longer one, which has what lies in the cache too, the end counts. Masks that
            were prepared for attention do not say what is padding: all tokens count.

    Returns:
        The load-balancing loss over all layers together (Switch Transformer, arXiv 2101.03961, equations 4 to 6) and the
        z-loss (ST-MoE, arXiv 2202.08906, equation 5): the mean over layers and tokens of the squared log of the sum of the
        exponentials of the logits.
    """
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
        attention_mask = attention_mask[:, -(router_logits[0].shape[0] // attention_mask.shape[0]) :]
    else:
        attention_mask = None
    load_balancing = load_balancing_loss_func(
        router_logits, config.num_experts, config.num_experts_per_tok, attention_mask
    )
    device = load_balancing.device
    squares = torch.stack([torch.logsumexp(logits.float(), dim=-1).square().to(device) for logits in router_logits])
    if attention_mask is None:
        return load_balancing, squares.mean()
    counts = attention_mask.reshape(-1).to(squares)  # (batch * sequence)
    return load_balancing, (squares * counts).sum() / (counts.sum().clamp(min=1) * len(router_logits))
