"""The mixture of experts computes what stock models compute, has each expert's tensors on disk, and misses none of them."""

import copy

import pytest
import torch
from conftest import TINY_SHAPE, logits_of, randomise, tiny_gated, tiny_input_ids
from safetensors.torch import load_file, save_file
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
)

from gated_attention import GatedAttentionConfig, GatedAttentionForCausalLM


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED = {"shared_expert_intermediate_size": 20}
LAYER_TYPES = ["dense", "sparse", "sparse"]

FAMILIES = {
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, EXPERTS, {**EXPERTS, "qk_norm": True}),
    "qwen3_moe_renormalised": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {**EXPERTS, "norm_topk_prob": True},
        {**EXPERTS, "norm_topk_prob": True, "qk_norm": True},
    ),
    "qwen3_moe_first_layer_dense": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {**EXPERTS, "mlp_only_layers": [0]},
        {**EXPERTS, "mlp_layer_types": LAYER_TYPES, "qk_norm": True},
    ),
    "qwen2_moe_shared_expert": (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        {**EXPERTS, **SHARED},
        {**EXPERTS, **SHARED, "shared_expert_gate": True, "qk_bias": True, "v_bias": True},
    ),
    "mixtral": (
        MixtralConfig,
        MixtralForCausalLM,
        {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24},
        {
            **EXPERTS,
            "norm_topk_prob": True,
            "router_scores_dtype": "float32",
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
}


def stock_and_gated(family: str, dtype: torch.dtype = torch.float32, **gates):
    config_class, model_class, stock_fields, gated_fields = FAMILIES[family]
    stock = randomise(model_class(config_class(**{**TINY_SHAPE, **stock_fields})))
    gated = tiny_gated(**{"gate_positions": [], **gates}, **gated_fields)
    missing, unexpected = gated.load_state_dict(stock.state_dict(), strict=False)
    assert not unexpected and all("g_proj" in name for name in missing)
    return stock.to(dtype), gated.to(dtype)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_without_gates_equal_to_stock(family, dtype, implementation):
    stock, gated = stock_and_gated(family, dtype)
    for model in (stock, gated):
        model.set_experts_implementation(implementation)
    assert torch.equal(logits_of(gated), logits_of(stock))


@pytest.mark.parametrize("family", FAMILIES)
def test_under_autocast_equal_to_stock(family):
    stock, gated = stock_and_gated(family)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(logits_of(gated), logits_of(stock))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_equal_to_stock(family, dtype):
    stock, gated = stock_and_gated(family, dtype)
    input_ids = tiny_input_ids()
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, -6:] = 0
    arguments = {"labels": input_ids, "attention_mask": attention_mask, "output_router_logits": True}
    expected, found = stock(input_ids, **arguments), gated(input_ids, **arguments)
    assert torch.equal(found.aux_loss, expected.aux_loss)
    gated.config.router_aux_loss_coef = stock.router_aux_loss_coef
    assert torch.equal(gated(input_ids, **arguments).loss, expected.loss)
    for of_layer, stock_layer in zip(found.router_logits, expected.router_logits, strict=True):
        assert torch.equal(of_layer, stock_layer)


def naive_sparse_mlp(mlp, hidden: torch.Tensor, config) -> torch.Tensor:
    """Token by token, expert by expert."""
    result = torch.zeros_like(hidden)
    activation = torch.nn.functional.silu
    for token, state in enumerate(hidden):
        probabilities = torch.exp(mlp.gate.weight @ state)
        probabilities = probabilities / probabilities.sum()
        chosen = sorted(range(config.num_experts), key=lambda expert: -probabilities[expert])
        chosen = chosen[: config.num_experts_per_tok]
        total = sum(probabilities[expert] for expert in chosen) if config.norm_topk_prob else 1
        for expert in chosen:
            width = config.moe_intermediate_size
            gate, up = mlp.experts.gate_up_proj[expert, :width], mlp.experts.gate_up_proj[expert, width:]
            inner = activation(gate @ state) * (up @ state)
            result[token] += probabilities[expert] / total * (mlp.experts.down_proj[expert] @ inner)
        if config.shared_expert_intermediate_size:
            shared = mlp.shared_expert
            output = shared.down_proj.weight @ (
                activation(shared.gate_proj.weight @ state) * (shared.up_proj.weight @ state)
            )
            if config.shared_expert_gate:
                output = output * torch.sigmoid(mlp.shared_expert_gate.weight[0] @ state)
            result[token] += output
    return result


@pytest.mark.parametrize(
    "fields",
    [{}, {"norm_topk_prob": True}, SHARED, {**SHARED, "shared_expert_gate": True}, {"num_experts_per_tok": 6}],
    ids=["plain", "renormalised", "shared_expert", "gated_shared_expert", "all_experts"],
)
def test_sparse_mlp_equals_naive_reference(fields):
    model = tiny_gated(**{**EXPERTS, **fields}, experts_implementation="eager").double()
    hidden = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(4)).double()
    mlp = model.model.layers[1].mlp
    with torch.no_grad():
        expected = naive_sparse_mlp(mlp, hidden.view(10, 32), model.config)
        # The router's softmax is taken in float32.
        torch.testing.assert_close(mlp(hidden).view(10, 32), expected, rtol=1e-5, atol=1e-5)


def test_router_in_float32_keeps_what_bfloat16_rounds_away():
    """Two experts whose logits bfloat16 cannot tell apart."""
    fields = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    hidden = torch.full((1, 32), 1.0, dtype=torch.bfloat16)
    chosen = {}
    for dtype in ("model", "float32"):
        router = tiny_gated(**fields, router_logits_dtype=dtype).to(torch.bfloat16).model.layers[0].mlp.gate
        with torch.no_grad():
            router.weight.fill_(1.0)
            router.weight[1, 0] = 1 + 2**-7  # exact in bfloat16; the sum over 32 channels is not
        logits, _, indices = router(hidden)
        chosen[dtype] = int(indices[0, 0])
        assert logits.dtype == (torch.float32 if dtype == "float32" else torch.bfloat16)
    assert chosen == {"model": 0, "float32": 1}


def test_float32_router_is_not_lowered_by_autocast():
    router = tiny_gated(**EXPERTS, router_logits_dtype="float32").model.layers[0].mlp.gate
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert router(torch.randn(3, 32))[0].dtype == torch.float32


@pytest.mark.parametrize("padded", [False, True], ids=["no_padding", "padding"])
def test_z_loss_is_the_mean_squared_log_partition_over_real_tokens(padded):
    model = tiny_gated(**EXPERTS, mlp_layer_types=LAYER_TYPES, router_z_loss_coef=0.5, router_aux_loss_coef=0.25)
    input_ids = tiny_input_ids(2, 6)
    attention_mask = torch.ones_like(input_ids)
    if padded:
        attention_mask[1, 4:] = 0
    arguments = {"labels": input_ids, "attention_mask": attention_mask}
    found = model(input_ids, **arguments, output_router_logits=True)
    squares = [
        float(torch.log(torch.exp(of_layer[row * 6 + column]).sum())) ** 2
        for of_layer in found.router_logits
        for row in range(2)
        for column in range(6)
        if attention_mask[row, column]
    ]
    assert found.z_loss.item() == pytest.approx(sum(squares) / len(squares), rel=1e-5)
    language = model(input_ids, **arguments).loss
    expected = language + 0.25 * found.aux_loss + 0.5 * found.z_loss
    torch.testing.assert_close(found.loss, expected, rtol=1e-6, atol=1e-6)


def test_router_logits_are_one_tensor_a_sparse_layer():
    model = tiny_gated(**EXPERTS, mlp_layer_types=LAYER_TYPES)
    found = model(tiny_input_ids(2, 5), output_router_logits=True)
    assert [tuple(of_layer.shape) for of_layer in found.router_logits] == [(10, 6), (10, 6)]
    assert model(tiny_input_ids(2, 5)).router_logits is None
    dense = tiny_gated()(tiny_input_ids(2, 5), output_router_logits=True)
    assert not dense.router_logits and dense.aux_loss is None


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("beams", [1, 2])
def test_generation_with_router_logits_in_the_config(beams, cache):
    """Masks then are longer than what is routed, or prepared for attention; the presets have router logits on."""
    shape = {**TINY_SHAPE, **EXPERTS, "head_dim": 8}
    model = randomise(GatedAttentionForCausalLM(GatedAttentionConfig.from_preset("15a2b", "g1_headwise", **shape)))
    assert model.config.output_router_logits
    input_ids = tiny_input_ids(2, 8)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, :3] = 0
    options = {"attention_mask": attention_mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    options |= {"num_beams": beams, "eos_token_id": None}
    expected = model.generate(input_ids, **options, output_router_logits=False)
    assert torch.equal(model.generate(input_ids, **options, cache_implementation=cache), expected)


def test_losses_of_a_continued_text_are_of_its_new_tokens():
    model = tiny_gated(**EXPERTS)
    input_ids = tiny_input_ids(2, 10)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, :3] = 0
    cache = model(input_ids[:, :6], attention_mask=attention_mask[:, :6]).cache
    rest = {"attention_mask": attention_mask, "cache": cache, "output_router_logits": True}
    found = model(input_ids[:, 6:], **rest)
    squares = torch.stack([torch.logsumexp(of_layer, dim=-1).square() for of_layer in found.router_logits])
    torch.testing.assert_close(found.z_loss, squares.mean())


def test_a_batch_of_padding_alone_has_a_finite_z_loss_and_unwanted_losses_are_left_out():
    model = tiny_gated(**EXPERTS, router_aux_loss_coef=0.0, router_z_loss_coef=0.1)
    input_ids = tiny_input_ids(1, 6)
    nothing = torch.zeros_like(input_ids)
    found = model(input_ids, labels=input_ids, attention_mask=nothing, output_router_logits=True)
    assert found.z_loss == 0 and found.loss.isfinite()


def test_training_with_a_frozen_identity_gate_gives_the_loss_curve_of_stock_qwen3_moe():
    fields = {**EXPERTS, "norm_topk_prob": True, "output_router_logits": True, "router_aux_loss_coef": 0.01}
    torch.manual_seed(0)
    stock = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**TINY_SHAPE, **fields}))
    gated = GatedAttentionForCausalLM(GatedAttentionConfig(**TINY_SHAPE, **fields, qk_norm=True, gate_scale=2.0))
    gated.load_state_dict(stock.state_dict(), strict=False)
    for name, parameter in gated.named_parameters():
        if "g_proj" in name:
            parameter.requires_grad_(False).zero_()
    # Something to learn: tokens that follow one another in a fixed order, from random starts.
    order = torch.randperm(TINY_SHAPE["vocab_size"], generator=torch.Generator().manual_seed(1))
    curves = []
    for model in (stock, gated):
        generator = torch.Generator().manual_seed(2)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=3e-3)
        losses = []
        for _ in range(200):
            rows = [torch.randint(TINY_SHAPE["vocab_size"], (4,), generator=generator)]
            for _ in range(11):
                rows.append(order[rows[-1]])
            input_ids = torch.stack(rows, dim=1)
            loss = model(input_ids, labels=input_ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        curves.append(losses)
    # Our RoPE's backward pass leaves another memory layout, so the gradients of the QK-norms are summed in another order.
    assert max(abs(ours - theirs) for ours, theirs in zip(*curves, strict=True)) < 1e-5
    assert curves[0][-1] < 0.5 * curves[0][0]


def saved(tmp_path, **fields):
    model = tiny_gated(**EXPERTS, **fields)
    model.save_pretrained(tmp_path / "saved")
    return model, load_file(tmp_path / "saved" / "model.safetensors")


def test_each_expert_has_its_own_tensors_on_disk(tmp_path):
    model, tensors = saved(tmp_path, mlp_layer_types=LAYER_TYPES, **SHARED)
    assert not any("gate_up_proj" in name for name in tensors)
    mlp = model.model.layers[2].mlp
    for expert in range(6):
        prefix = f"model.layers.2.mlp.experts.{expert}."
        assert torch.equal(tensors[f"{prefix}gate_proj.weight"], mlp.experts.gate_up_proj[expert, :24])
        assert torch.equal(tensors[f"{prefix}up_proj.weight"], mlp.experts.gate_up_proj[expert, 24:])
        assert torch.equal(tensors[f"{prefix}down_proj.weight"], mlp.experts.down_proj[expert])
    assert "model.layers.0.mlp.gate_proj.weight" in tensors


@pytest.mark.parametrize("max_shard_size", ["5GB", "30KB"], ids=["single", "sharded"])
def test_save_load_save_is_byte_equal_tensor_by_tensor(tmp_path, max_shard_size):
    model = tiny_gated(**EXPERTS, **SHARED, mlp_layer_types=LAYER_TYPES).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "first", max_shard_size=max_shard_size)
    loaded, info = GatedAttentionForCausalLM.from_pretrained(
        tmp_path / "first", dtype="auto", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    loaded.save_pretrained(tmp_path / "second", max_shard_size=max_shard_size)
    first, second = (
        {
            name: tensor
            for path in (tmp_path / folder).glob("*.safetensors")
            for name, tensor in load_file(path).items()
        }
        for folder in ("first", "second")
    )
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype
        assert torch.equal(tensor.view(torch.uint8), second[name].view(torch.uint8)), name


@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"], ids=["single", "sharded"])
def test_trainer_resumes_with_the_experts_of_the_checkpoint(tmp_path, max_shard_size):
    """Trainer loads checkpoints file by file without the mapping of names; experts of one layer may lie in several files."""
    trained = tiny_gated(**EXPERTS, **SHARED)
    trained.save_pretrained(tmp_path / "checkpoint-1", max_shard_size=max_shard_size)
    fresh = tiny_gated(seed=7, **EXPERTS, **SHARED)
    trainer = Trainer(fresh, TrainingArguments(tmp_path / "out", use_cpu=True, report_to="none"))
    trainer._load_from_checkpoint(str(tmp_path / "checkpoint-1"))
    for (name, parameter), (_, expected) in zip(fresh.named_parameters(), trained.named_parameters(), strict=True):
        assert torch.equal(parameter, expected), name
    other = tiny_gated(seed=8, **EXPERTS, **SHARED)
    other.load_state_dict(trained.state_dict())  # stacked, as before
    assert torch.equal(logits_of(other), logits_of(trained))
    assert torch.equal(logits_of(copy.deepcopy(other)), logits_of(trained))


MISSING = {
    "one_projection": (["experts.3.gate_proj"], "lacks 3.gate_proj.weight"),
    "one_expert": (["experts.3."], "lacks 3.down_proj.weight"),
    "last_expert": (["experts.5."], "lacks 5.down_proj.weight"),
    "all_experts": (["experts."], "model.layers.1.mlp.experts.down_proj"),
    "router": (["mlp.gate."], "model.layers.1.mlp.gate.weight"),
    "shared_expert": (["shared_expert."], "model.layers.1.mlp.shared_expert.down_proj.weight"),
}


@pytest.mark.parametrize("case", MISSING)
def test_missing_expert_is_an_error_that_names_it(tmp_path, case):
    parts, named = MISSING[case]
    _, tensors = saved(tmp_path, **SHARED)
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if not ("layers.1." in name and any(part in name for part in parts))
    }
    save_file(kept, tmp_path / "saved" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError) as error:
        GatedAttentionForCausalLM.from_pretrained(tmp_path / "saved")
    assert named in str(error.value)


def test_surplus_and_misnumbered_experts_are_errors(tmp_path):
    _, tensors = saved(tmp_path)
    path = tmp_path / "saved" / "model.safetensors"
    surplus = {f"model.layers.1.mlp.experts.6.{name}_proj.weight" for name in ("gate", "up", "down")}
    more = tensors | {name: tensors[name.replace("experts.6", "experts.5")].clone() for name in surplus}
    save_file(more, path, metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"experts\.6\.\w+\.weight is of no expert that the config knows.*num_experts` = 6"
    ):
        GatedAttentionForCausalLM.from_pretrained(tmp_path / "saved")
    # As many tensors as the config says, but one has a wrong number: stacked in order, experts would change places.
    renamed = {name.replace("layers.1.mlp.experts.2.", "layers.1.mlp.experts.7."): t for name, t in tensors.items()}
    save_file(renamed, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 2\.\w+\.weight"):
        GatedAttentionForCausalLM.from_pretrained(tmp_path / "saved")


def test_stacked_experts_load_and_stacked_beside_single_ones_are_an_error(tmp_path):
    model, tensors = saved(tmp_path)
    path = tmp_path / "saved" / "model.safetensors"
    stacked = {name: t.clone() for name, t in model.state_dict().items()}
    save_file(stacked, path, metadata={"format": "pt"})
    assert torch.equal(logits_of(GatedAttentionForCausalLM.from_pretrained(tmp_path / "saved")), logits_of(model))
    both = tensors | {name: t for name, t in stacked.items() if "layers.1.mlp.experts" in name}
    save_file(both, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"experts\.\w+_proj \(all experts\) stands beside .*\(one expert\)"):
        GatedAttentionForCausalLM.from_pretrained(tmp_path / "saved")


def test_experts_travel_in_the_bundle(tmp_path, without_package):
    """Loaded and saved by the code in the folder alone: per-expert tensors both ways, and a missing one is an error."""
    model, tensors = saved(tmp_path, **SHARED)
    save_file({"input_ids": tiny_input_ids()}, tmp_path / "inputs.safetensors")
    without_package("""
model = AutoModelForCausalLM.from_pretrained("saved", trust_remote_code=True)
with torch.no_grad():
    logits = model(load_file("inputs.safetensors")["input_ids"], use_cache=False).logits
save_file({"logits": logits}, "logits.safetensors")
model.save_pretrained("again")
""")
    assert torch.equal(load_file(tmp_path / "logits.safetensors")["logits"], logits_of(model))
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())

    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, tmp_path / "saved" / "model.safetensors", metadata={"format": "pt"})
    process = without_package('AutoModelForCausalLM.from_pretrained("saved", trust_remote_code=True)', check=False)
    assert process.returncode != 0
    assert "lacks 3.up_proj.weight" in process.stderr
