"""Two processes that share a model compute what one process computes, whatever the gates: by heads, by parameters, by layers."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import TINY_SHAPE, randomise, tiny_input_ids
from torch.distributed.tensor import DTensor
from transformers.distributed.configuration_utils import DistributedConfig

from gated_attention import GatedAttentionConfig, GatedAttentionForCausalLM
from gated_attention.training import resolve_groups
from gated_attention.training.parameter_groups import drop_gradients, freeze, optimizer_groups
from gated_attention.training.recipe import ParameterGroup


VARIANTS = {
    "elementwise": {"gate_bias": True},
    "headwise": {"gate_granularity": "headwise"},
    "head_shared": {"gate_sharing": "head_shared"},
    "input_independent": {"gate_input": "none"},
    "every_position": {
        "gate_positions": ["sdpa_output", "value", "key", "query", "dense_output"],
        "gate_bias": True,
        "gate_input_size": 20,
        "qk_norm": True,
    },
    "input_independent_everywhere": {
        "gate_positions": ["sdpa_output", "value", "key", "query", "dense_output"],
        "gate_input": "none",
        "gate_operator": "add",
    },
    "head_shared_values_and_keys": {"gate_positions": ["value", "key"], "gate_sharing": "head_shared"},
    "normalised_heads": {"sdpa_output_nonlinearity": "rms_norm", "gate_layers": [1]},
    "no_gates": {"gate_positions": []},
    "windows": {
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
    },
    "experts": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "shared_expert_intermediate_size": 16,
        "shared_expert_gate": True,
    },
    "forgetting": {"forget_gate": True},
}
# What must not be whole on each device, or the plan has not been applied.
SHARDED = {
    "elementwise": ["q_proj", "g_proj", "o_proj"],
    "headwise": ["g_proj"],
    "head_shared": ["gate_proj"],
    "input_independent": ["g_proj"],
    "every_position": ["g_proj", "g_proj_v", "g_proj_k", "g_proj_q", "g_proj_o"],
    "input_independent_everywhere": ["g_proj", "g_proj_v", "g_proj_k", "g_proj_q", "g_proj_o"],
    "head_shared_values_and_keys": ["gate_proj"],
    "normalised_heads": ["g_proj"],
    "no_gates": ["q_proj"],
    "windows": ["g_proj"],
    "experts": ["experts", "gate_proj", "g_proj"],
    "forgetting": ["f_proj", "g_proj"],
}


def train_in_groups(model, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Three steps with a rate of their own for the gates, which wait for one step, and frozen MLPs; the parameters after."""
    groups = resolve_groups(
        model, [ParameterGroup("gates", learning_rate=10.0, from_step=1), ParameterGroup("mlp", frozen=True)]
    )
    freeze(model, groups)
    decayed = {name for name, _ in model.named_parameters() if not name.endswith(("bias", "norm.weight"))}
    optimizer = torch.optim.AdamW(optimizer_groups(model, groups, 1e-3, 0.1, decayed))
    for step in range(3):
        optimizer.zero_grad()
        model(input_ids, labels=input_ids, use_cache=False).loss.backward()
        drop_gradients(model, groups, step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return {
        name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        for name, parameter in model.named_parameters()
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
    for variant in ("every_position", "windows"):
        whole = GatedAttentionForCausalLM.from_pretrained(folders[variant])
        expected = whole(input_ids, labels=input_ids, use_cache=False)
        expected.loss.backward()

        # FSDP2: every parameter in two parts, gathered when it is needed.
        shared = GatedAttentionForCausalLM.from_pretrained(
            folders[variant], distributed_config=DistributedConfig(fsdp_size=2)
        )
        found = shared(input_ids, labels=input_ids, use_cache=False)
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
        found.loss.backward()
        for (name, parameter), (_, own) in zip(shared.named_parameters(), whole.named_parameters(), strict=True):
            assert isinstance(parameter, DTensor), name
            torch.testing.assert_close(parameter.grad.full_tensor(), own.grad, rtol=1e-3, atol=1e-5)
        before = {name: parameter.detach().clone() for name, parameter in whole.named_parameters()}
        expected_parameters = train_in_groups(whole, input_ids)
        for name, tensor in train_in_groups(shared, input_ids).items():
            # A step of Adam is as long as the rate, whatever the gradient's last bits say.
            torch.testing.assert_close(tensor, expected_parameters[name], rtol=1e-3, atol=2e-4)
            assert torch.equal(tensor, before[name]) == (".mlp." in name), name
        whole.load_state_dict(before)

        # Pipeline: two layers here and one there.
        staged = GatedAttentionForCausalLM.from_pretrained(
            folders[variant], distributed_config=DistributedConfig(pp_size=2)
        )
        assert [type(layer).__name__ == "PipelineIdentityLayer" for layer in staged.model.layers] == (
            [False, False, True] if rank == 0 else [True, True, False]
        )
        with torch.no_grad():
            torch.testing.assert_close(
                staged(input_ids, use_cache=False).logits, expected.logits, rtol=1e-4, atol=1e-4
            )
        options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        assert torch.equal(staged.generate(input_ids, **options), whole.generate(input_ids, **options))
    dist.destroy_process_group()


def test_model_shared_by_two_processes_equals_the_whole_one(tmp_path):
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
