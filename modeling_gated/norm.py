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
"""The two forms of RMSNorm that models differ in."""

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm


# Numbers up to which operations are chosen by what calling them takes, and not by how often they go through memory.
FEW = 65536


class GatedAttentionRMSNorm(LlamaRMSNorm):
    """
    Llama's RMSNorm, with the same bits, for where no gradient is wanted on a CPU. The fused operation goes through memory less often; it takes its
    weight separately, since with one it would round once less. A token's few states are quicker in operations that the rest of a layer uses
    too: their code is at hand, where the layer's weights have just pushed all else out of the caches.
    """

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """From `(..., width)` to the same shape and format."""
        if (
            torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or hidden_states.device.type != "cpu"
            or hidden_states.dtype != self.weight.dtype
            or hidden_states.dtype == torch.float64  # of which Llama's norm keeps 24 bits
        ):
            return super().forward(hidden_states)
        if hidden_states.numel() > FEW:
            return torch.rms_norm(hidden_states, self.weight.shape, eps=self.variance_epsilon).mul_(self.weight)
        states = hidden_states if hidden_states.dtype == torch.float32 else hidden_states.float()
        states = states * torch.rsqrt((states * states).mean(-1, keepdim=True) + self.variance_epsilon)
        if states.dtype != hidden_states.dtype:
            states = states.to(hidden_states.dtype)
        return states.mul_(self.weight)


def rms_norm(config, width: int) -> nn.Module:
    """
    An RMSNorm over `width` channels, in the form that `config.zero_centered_norm` names.

    `weight - 1` of one form is no substitute for `weight` of the other: it rounds, and in 16 bits a weight below 0.1 keeps few
    of its digits.
    """
    form = Qwen3NextRMSNorm if config.zero_centered_norm else GatedAttentionRMSNorm
    return form(width, eps=config.rms_norm_eps)


def is_zero_centered(module: nn.Module) -> bool:
    """Whether a module is a norm whose weight is 0 at first, not 1."""
    return isinstance(module, Qwen3NextRMSNorm)
