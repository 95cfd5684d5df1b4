"""Two processes that share each layer's heads compute what one process computes, forward and backward, whatever the gates."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import TINY_SHAPE, randomise, tiny_input_ids
from torch.distributed.tensor import DTensor
from transformers.distributed.configuration_utils import DistributedConfig

from gated_attention import GatedAttentionConfig, GatedAttentionForCausalLM


VARIANTS = {
    "elementwise": {"gate_bias": True},
    "headwise": {"gate_granularity": "headwise"},
    "head_shared": {"gate_sharing": "head_shared"},
    "input_independent": {"gate_input": "none"},
    "every_position": {"gate_positions": ["sdpa_output", "value", "key", "query", "dense_output"], "qk_norm": True},
    "normalised_heads": {"sdpa_output_nonlinearity": "rms_norm", "gate_layers": [1]},
    "no_gates": {"gate_positions": []},
}
# What must not be whole on each device, or the plan has not been applied.
SHARDED = {
    "elementwise": ["q_proj", "g_proj", "o_proj"],
    "headwise": ["g_proj"],
    "head_shared": ["gate_proj"],
    "input_independent": ["g_proj"],
    "every_position": ["g_proj", "v_g_proj", "k_g_proj", "q_g_proj", "o_g_proj"],
    "normalised_heads": ["g_proj"],
    "no_gates": ["q_proj"],
}


def one_rank(rank: int, port: int, folders: dict[str, str]) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2"
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    input_ids = tiny_input_ids()
    for variant, folder in folders.items():
        whole = GatedAttentionForCausalLM.from_pretrained(folder)
        shared = GatedAttentionForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))
        results = []
        for model in (whole, shared):
            with torch.no_grad():
                logits = model(input_ids, use_cache=False).logits
            model(input_ids, labels=input_ids, use_cache=False).loss.backward()
            results.append(logits)
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4, msg=lambda m, v=variant: f"{v}: {m}")
        expected = dict(whole.named_parameters())
        sharded = set()
        for name, parameter in shared.named_parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                if gradient.to_local().shape != gradient.shape:
                    sharded.add(name.split(".")[-2])
                gradient = gradient.full_tensor()
            torch.testing.assert_close(
                gradient, expected[name].grad, rtol=1e-3, atol=1e-5, msg=lambda m, v=variant, n=name: f"{v}, {n}: {m}"
            )
        assert sharded >= set(SHARDED[variant]), (variant, sharded)
    dist.destroy_process_group()


def test_sharded_model_equals_whole_one(tmp_path):
    folders = {}
    for variant, fields in VARIANTS.items():
        folders[variant] = str(tmp_path / variant)
        randomise(GatedAttentionForCausalLM(GatedAttentionConfig(**{**TINY_SHAPE, **fields}))).save_pretrained(
            folders[variant]
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(one_rank, args=(port, folders), nprocs=2)
