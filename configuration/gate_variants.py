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
"""Gate variants by name: the rows of the tables of arXiv 2505.06708, and gates of other models."""

from dataclasses import dataclass
from typing import Any


# By position, the module of the attention layer that gives the gate logits. PEFT matches the ends of names: none of these
# ends in another one, nor in the name of a projection that is not a gate.
GATE_PROJECTIONS = {
    "sdpa_output": "g_proj",
    "value": "g_proj_v",
    "key": "g_proj_k",
    "query": "g_proj_q",
    "dense_output": "g_proj_o",
}


@dataclass(frozen=True)
class GateVariant:
    """
    Attributes:
        fields: What the variant sets in [`GatedAttentionConfig`].
        source: The paper's row, or the model that the gate is from.
        perplexity: What the paper reports for the row: its 15A2B mixture of experts after 400B tokens.
    """

    fields: dict[str, Any]
    source: str
    perplexity: float | None = None


GATE_VARIANTS = {
    "baseline": GateVariant({"gate_positions": []}, "baseline", 6.026),
    "g1_elementwise": GateVariant({}, "SDPA elementwise gate (G1)", 5.761),
    "g1_headwise": GateVariant({"gate_granularity": "headwise"}, "SDPA headwise gate (G1)", 5.792),
    "g1_head_shared": GateVariant({"gate_sharing": "head_shared"}, "SDPA head-shared gate (G1)", 5.801),
    "g2_elementwise": GateVariant({"gate_positions": ["value"]}, "value elementwise gate (G2)", 5.820),
    "g2_headwise": GateVariant(
        {"gate_positions": ["value"], "gate_granularity": "headwise"}, "value headwise gate (G2)", 5.808
    ),
    "g3_elementwise": GateVariant({"gate_positions": ["key"]}, "key elementwise gate (G3)", 6.016),
    "g4_elementwise": GateVariant({"gate_positions": ["query"]}, "query elementwise gate (G4)", 5.981),
    "g5_elementwise": GateVariant({"gate_positions": ["dense_output"]}, "dense output gate (G5)", 6.017),
    "g1_additive_silu": GateVariant(
        {"gate_operator": "add", "gate_activation": "silu"}, "SDPA additive gate, SiLU (G1)", 5.821
    ),
    "g1_multiplicative_silu": GateVariant({"gate_activation": "silu"}, "SDPA elementwise gate, SiLU (G1)", 5.822),
    "g1_additive_identity": GateVariant(
        {"gate_operator": "add", "gate_activation": "identity"}, "SDPA additive gate, identity (G1)", 5.882
    ),
    "g1_input_independent": GateVariant({"gate_input": "none"}, "SDPA input-independent gate (G1)", 5.917),
    "g1_ns_sigmoid": GateVariant({"gate_activation": "ns_sigmoid"}, "SDPA gate, non-sparse sigmoid (G1)", 5.900),
    "sdpa_rms_norm": GateVariant(
        {"gate_positions": [], "sdpa_output_nonlinearity": "rms_norm"}, "SDPA GroupNorm: RMSNorm of each head", 5.847
    ),
    "sdpa_silu": GateVariant({"gate_positions": [], "sdpa_output_nonlinearity": "silu"}, "SDPA SiLU", 5.975),
    "qwen3_next": GateVariant(
        {"qk_norm": True, "zero_centered_norm": True},
        "Qwen3-Next and Qwen3.5: G1 elementwise, with QK-norm and zero-centred norms",
    ),
    "lfm3": GateVariant({"gate_granularity": "headwise", "qk_norm": True}, "LFM3: G1 headwise, with QK-norm"),
    "laguna": GateVariant(
        {"gate_granularity": "headwise", "gate_activation": "softplus", "qk_norm": True},
        "Laguna: softplus, with QK-norm",
    ),
    "alphafold2": GateVariant(
        {"gate_bias": True, "gate_initializer_range": 0.0, "gate_initial_bias": 1.0},
        "AlphaFold2 (Jumper et al. 2021): gates of 0.73 at first, whatever the input",
    ),
    "forgetting_transformer": GateVariant(
        {"gate_positions": [], "forget_gate": True},
        "Forgetting Transformer (Lin et al. 2025), LLaMA block: no positions",
    ),
    "forgetting_transformer_pro": GateVariant(
        {"forget_gate": True, "qk_norm": True, "sdpa_output_nonlinearity": "rms_norm"},
        "Forgetting Transformer, Pro block without its shift of keys and values: output gate and norm, QK-norm",
    ),
    "modded_nanogpt": GateVariant(
        {"gate_granularity": "headwise", "gate_input_size": 12}, "modded-nanogpt: reads the first 12 channels"
    ),
}
