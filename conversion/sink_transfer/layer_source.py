"""Reads a checkpoint one decoder layer at a time, so that a model larger than memory can be calibrated."""

from copy import deepcopy

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from ...configuration import GatedAttentionConfig
from ...modeling_gated.decoder import GatedAttentionDecoderLayer
from ..checkpoint import Checkpoint


class LayerSource:
    """
    The parts of a model, read from its checkpoint when they are asked for, in float32; gates and biases that the checkpoint
    lacks are zero, so that each layer computes what the source's does.

    Args:
        checkpoint (`Checkpoint`): An ungated checkpoint, or the result of a transfer.
        config (`GatedAttentionConfig`): Its gated config; of an ungated one with `gate_scale = 2`, with which zero gates are 1.
        device: Where the layers are made.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: GatedAttentionConfig,
        device: torch.device | str = "cpu",
    ):
        self.config = deepcopy(config)
        self.config._attn_implementation = "sdpa"  # causal without a mask
        self.device = torch.device(device)
        self.files = {}
        for shard in checkpoint.shards:
            file = shard.open()
            self.files |= dict.fromkeys(shard.tensors, file)
        self.rotary = LlamaRotaryEmbedding(config).to(self.device)

    def tensor(self, name: str) -> torch.Tensor:
        return self.files[name].get_tensor(name).to(self.device, torch.float32)

    def layer(self, index: int) -> GatedAttentionDecoderLayer:
        """A decoder layer in evaluation mode."""
        with torch.device("meta"):
            layer = GatedAttentionDecoderLayer(self.config, index)
        prefix = f"model.layers.{index}."
        tensors = {
            name: self.tensor(prefix + name)
            if prefix + name in self.files
            else torch.zeros(parameter.shape, device=self.device)
            for name, parameter in layer.named_parameters()
        }
        layer.load_state_dict(tensors, assign=True)
        return layer.eval().requires_grad_(False)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """`(..., hidden_size)`, on the CPU."""
        table = self.files["model.embed_tokens.weight"].get_tensor("model.embed_tokens.weight")
        return table[input_ids].float()

    def head(self) -> nn.Module:
        """The final norm and the head."""
        norm = LlamaRMSNorm(self.config.hidden_size, eps=self.config.rms_norm_eps)
        norm.weight = nn.Parameter(self.tensor("model.norm.weight"), requires_grad=False)
        # A head on disk is used even where the config says it is tied, as transformers does.
        name = "lm_head.weight" if "lm_head.weight" in self.files else "model.embed_tokens.weight"
        head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False, device="meta")
        head.weight = nn.Parameter(self.tensor(name), requires_grad=False)
        return nn.Sequential(norm, head)

    def position_embeddings(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of RoPE, each `(1, length, head_dim)`."""
        position_ids = torch.arange(length, device=self.device)[None]
        return self.rotary(torch.zeros(1, device=self.device), position_ids=position_ids)
