"""Checkpoints that have gates in another layout are read: the paper's own code, Qwen3-Next, Qwen3.5, LFM3."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import (
    TINY_SHAPE,
    edit_config,
    edit_tensors,
    logits_of,
    randomise,
    tiny_input_ids,
    tiny_llama,
    tree_hashes,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Lfm3Config,
    Lfm3ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from gated_attention import GatedAttentionForCausalLM, convert_checkpoint, inspect_model, predict_transfer
from gated_attention.conversion import ConversionError
from gated_attention.conversion.layouts import query_and_gate_rows
from gated_attention.conversion.logits import compare_models


REFERENCE = Path(__file__).parent / "data" / "reference_checkpoints"
LAYERS = ["full_attention"] * TINY_SHAPE["num_hidden_layers"]
ROPE = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.4}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
NEXT = {**TINY_SHAPE, "layer_types": LAYERS, "rope_parameters": ROPE}


# ---- the paper's own code


@pytest.mark.parametrize("kind", ["headwise", "elementwise", "baseline"])
def test_reference_checkpoints_give_the_logits_of_the_reference_code(target, kind):
    source = REFERENCE / kind
    before = tree_hashes(source)
    result = convert_checkpoint(source, target)
    assert tree_hashes(source) == before
    expected = load_file(source / "expected.safetensors")
    model, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert type(model) is GatedAttentionForCausalLM
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    logits = logits_of(model, expected["input_ids"])
    torch.testing.assert_close(logits, expected["logits"], rtol=0, atol=1e-5)
    assert torch.equal(logits.argmax(-1), expected["logits"].argmax(-1))
    if kind == "baseline":
        assert (model.config.gate_scale, result.logits_equal) == (2.0, True)
    else:
        assert (model.config.gate_granularity, model.config.gate_scale) == (kind, 1.0)
        assert result.numbers_equal and result.comparison is None
        assert "transformers has no class" in result.checked


def reference_logits(tensors: dict[str, torch.Tensor], config: dict, input_ids: torch.Tensor) -> torch.Tensor:
    """What the paper's code computes, token by token and head by head from the tensors as that code stores them."""
    heads, groups, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    per_group = heads // groups
    gate = dim if config["elementwise_attn_output_gate"] else 1

    def linear(name, states):
        bias = tensors.get(f"{name}.bias")
        states = states @ tensors[f"{name}.weight"].T
        return states if bias is None else states + bias

    def norm(states, weight):
        return states / torch.sqrt((states**2).mean(-1, keepdim=True) + config["rms_norm_eps"]) * weight

    def rope(vector, position):
        half = dim // 2
        angles = position / config["rope_theta"] ** (torch.arange(half) / half)
        first, second = vector[:half], vector[half:]
        return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()))

    lm_head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    results = []
    for row in input_ids:
        states = tensors["model.embed_tokens.weight"][row]
        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            normed = norm(states, tensors[f"{prefix}.input_layernorm.weight"])
            fused = linear(f"{prefix}.self_attn.q_proj", normed).view(len(row), groups, -1)
            keys = linear(f"{prefix}.self_attn.k_proj", normed).view(len(row), groups, dim)
            values = linear(f"{prefix}.self_attn.v_proj", normed).view(len(row), groups, dim)
            output = torch.zeros(len(row), heads * dim, dtype=states.dtype)
            for head in range(heads):
                group, index = divmod(head, per_group)
                queries = fused[:, group, index * dim : (index + 1) * dim]
                start = per_group * dim + index * gate
                gates = torch.sigmoid(fused[:, group, start : start + gate])
                mine = keys[:, group]
                if config["use_qk_norm"]:
                    queries = norm(queries, tensors[f"{prefix}.self_attn.q_norm.weight"])
                    mine = norm(mine, tensors[f"{prefix}.self_attn.k_norm.weight"])
                rotated = [torch.stack([rope(v, at) for at, v in enumerate(one)]) for one in (queries, mine)]
                for token in range(len(row)):
                    weights = torch.softmax(rotated[0][token] @ rotated[1][: token + 1].T / dim**0.5, dim=-1)
                    mixed = weights @ values[: token + 1, group] * gates[token]
                    output[token, head * dim : (head + 1) * dim] = mixed
            states = states + linear(f"{prefix}.self_attn.o_proj", output)
            normed = norm(states, tensors[f"{prefix}.post_attention_layernorm.weight"])
            inner = torch.nn.functional.silu(linear(f"{prefix}.mlp.gate_proj", normed))
            states = states + linear(f"{prefix}.mlp.down_proj", inner * linear(f"{prefix}.mlp.up_proj", normed))
        results.append(norm(states, tensors["model.norm.weight"]) @ lm_head.T)
    return torch.stack(results)


def reference_variant(folder: Path, kind: str, qkv_bias: bool, use_qk_norm: bool) -> Path:
    """A checkpoint of the paper's code with its two other switches, made of one that has them off and on."""
    shutil.copytree(REFERENCE / kind, folder)
    edit_config(folder, qkv_bias=qkv_bias, use_qk_norm=use_qk_norm)
    generator = torch.Generator().manual_seed(5)

    def edit(tensors):
        for name, tensor in list(tensors.items()):
            if "_norm." in name and "self_attn" in name and not use_qk_norm:
                del tensors[name]
            if name.endswith("_proj.weight") and "self_attn" in name and qkv_bias:
                tensors[name.replace("weight", "bias")] = torch.randn(tensor.shape[0], generator=generator) * 0.1

    edit_tensors(folder, edit)
    return folder


@pytest.mark.parametrize("use_qk_norm", [True, False], ids=["qk_norm", "no_qk_norm"])
@pytest.mark.parametrize("qkv_bias", [True, False], ids=["qkv_bias", "no_bias"])
@pytest.mark.parametrize("kind", ["headwise", "elementwise"])
def test_reference_switches(tmp_path, target, kind, qkv_bias, use_qk_norm):
    source = reference_variant(tmp_path / "source", kind, qkv_bias, use_qk_norm)
    convert_checkpoint(source, target)
    model = AutoModelForCausalLM.from_pretrained(target)
    config = json.loads((source / "config.json").read_text())
    tensors = {name: tensor.double() for name, tensor in load_file(source / "model.safetensors").items()}
    input_ids = torch.randint(3, config["vocab_size"], (2, 12), generator=torch.Generator().manual_seed(6))
    expected = reference_logits(tensors, config, input_ids).float()
    torch.testing.assert_close(logits_of(model, input_ids), expected, rtol=1e-5, atol=1e-5)
    assert (model.config.gate_bias, model.config.qk_norm) == (qkv_bias, use_qk_norm)


def test_reference_code_in_this_file_is_the_one_of_the_paper():
    source = REFERENCE / "elementwise"
    tensors = {name: tensor.double() for name, tensor in load_file(source / "model.safetensors").items()}
    expected = load_file(source / "expected.safetensors")
    found = reference_logits(tensors, json.loads((source / "config.json").read_text()), expected["input_ids"][:1])
    torch.testing.assert_close(found.float(), expected["logits"][:1], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("qkv_bias", "use_qk_norm"), [(True, True), (False, False)], ids=["qkv_bias", "no_qk_norm"])
def test_reference_without_gates_gets_some(tmp_path, target, qkv_bias, use_qk_norm):
    """No stock class computes it; without gates ours does, and with identity gates the same."""
    source = reference_variant(tmp_path / "source", "baseline", qkv_bias, use_qk_norm)
    result = convert_checkpoint(source, target, granularity="elementwise")
    assert result.logits_equal
    config = AutoModelForCausalLM.from_pretrained(target).config
    assert (config.qk_bias, config.o_bias, config.qk_norm) == (qkv_bias, qkv_bias, use_qk_norm)
    assert (config.gate_granularity, config.gate_scale) == ("elementwise", 2.0)


# ---- stock architectures


def save_stock(folder: Path, model, **save) -> Path:
    randomise(model).save_pretrained(folder, **save)
    return folder


STOCK = {
    "qwen3_next": (Qwen3NextForCausalLM, Qwen3NextConfig, {"num_experts": 0, "mlp_only_layers": [0, 1, 2]}),
    "qwen3_next_moe": (Qwen3NextForCausalLM, Qwen3NextConfig, EXPERTS),
    "qwen3_next_moe_first_layer_dense": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig,
        {**EXPERTS, "mlp_only_layers": [0], "norm_topk_prob": False, "tie_word_embeddings": True},
    ),
    "qwen3_next_biases": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig,
        {"num_experts": 0, "mlp_only_layers": [0, 1, 2], "attention_bias": True},
    ),
    "qwen3_5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, {}),
    "qwen3_5_mrope": (
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig,
        {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 0], "mrope_interleaved": True}},
    ),
    "qwen3_5_moe": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, EXPERTS),
    "lfm3": (
        Lfm3ForCausalLM,
        Lfm3Config,
        {
            "use_sandwich_norm": False,
            "pad_token_id": 0,
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5000.0}},
        },
    ),
    "lfm3_windows": (
        Lfm3ForCausalLM,
        Lfm3Config,
        {
            "use_sandwich_norm": False,
            "pad_token_id": 0,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 5000.0}
                for kind in ("full_attention", "sliding_attention")
            },
        },
    ),
    "lfm3_proportional_rope_and_biases": (
        Lfm3ForCausalLM,
        Lfm3Config,
        {
            "use_sandwich_norm": False,
            "pad_token_id": 0,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 5000.0,
                    "partial_rotary_factor": 0.4,
                }
            },
        },
    ),
}


def stock(name: str, **overrides):
    model_class, config_class, fields = STOCK[name]
    return model_class(config_class(**{**NEXT, **fields, **overrides}))


@pytest.mark.parametrize("shards", ["5GB", "20KB"], ids=["single_file", "sharded"])
@pytest.mark.parametrize("name", STOCK)
def test_stock_checkpoints_with_attention_in_every_layer(tmp_path, target, name, shards):
    source = save_stock(tmp_path / "source", stock(name), max_shard_size=shards)
    before = tree_hashes(source)
    result = convert_checkpoint(source, target)
    assert tree_hashes(source) == before
    assert result.numbers_equal and result.logits_equal
    expected = AutoModelForCausalLM.from_pretrained(source)
    model, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert type(model) is GatedAttentionForCausalLM
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    input_ids = tiny_input_ids(2, 40)
    torch.testing.assert_close(logits_of(model, input_ids), logits_of(expected, input_ids), rtol=1e-5, atol=1e-5)
    assert model.config.gate_scale == 1.0
    assert model.config.tie_word_embeddings == expected.config.tie_word_embeddings
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(model.generate(input_ids, **options), expected.generate(input_ids, **options))
    names = [name for path in target.glob("*.safetensors") for name in load_file(path)]
    assert not any("gate_up_proj" in name for name in names)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["qwen3_next_moe", "qwen3_5", "lfm3"])
def test_16_bits_are_kept_number_by_number(tmp_path, target, name, dtype):
    """Norms around 0.05 too: in the other form of RMSNorm they would be 1.05 or -0.95, and rounded."""
    model = randomise(stock(name))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.mul_(0.05)
    model.to(dtype).save_pretrained(tmp_path / "source")
    result = convert_checkpoint(tmp_path / "source", target)
    assert result.numbers_equal
    converted = AutoModelForCausalLM.from_pretrained(target)
    assert converted.dtype == dtype
    norms = {name: t for name, t in converted.named_parameters() if "norm" in name}
    stored = {
        t.float().sum().item()
        for name, t in load_file(tmp_path / "source" / "model.safetensors").items()
        if "norm" in name
    }
    assert {t.float().sum().item() for t in norms.values()} == stored
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    found, wanted = (logits_of(model).float() for model in (converted, expected))
    # Two products in the place of one, and in LFM3 a RoPE in float32: a few steps of the format, against the largest logit.
    assert (found - wanted).abs().max() < 20 * torch.finfo(dtype).eps * wanted.abs().max()


@pytest.mark.parametrize("name", STOCK)
def test_layer_by_layer_as_whole(tmp_path, target, name):
    source = save_stock(tmp_path / "source", stock(name))
    plan = convert_checkpoint(source, target, verify="headers").plan
    whole, layers = (compare_models(plan, target, layer_by_layer) for layer_by_layer in (False, True))
    assert whole.logits == 0 and layers.method == "layer by layer"
    for one, other in zip(whole.layers, layers.layers, strict=True):
        assert one.magnitude == other.magnitude


def test_names_of_a_model_with_images(tmp_path, target):
    """Qwen3.5 keeps the language model of a model with images under a longer name, and drafts tokens beside it."""
    source = save_stock(tmp_path / "source", stock("qwen3_5"))

    def edit(tensors):
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        tensors["mtp.layers.0.mlp.gate_proj.weight"] = torch.zeros(3, 3)

    edit_tensors(source, edit)
    result = convert_checkpoint(source, target)
    assert result.numbers_equal
    assert any("1 tensors that loaders pass over are left out (mtp." in note for note in result.plan.notes)
    assert "mtp.layers.0.mlp.gate_proj.weight" not in load_file(next(target.glob("*.safetensors")))


def test_converted_layout_loads_without_the_package(tmp_path, target, without_package):
    source = save_stock(tmp_path / "source", stock("qwen3_next_moe"))
    convert_checkpoint(source, target)
    save_file({"input_ids": tiny_input_ids()}, tmp_path / "inputs.safetensors")
    without_package("""
model = AutoModelForCausalLM.from_pretrained("target", trust_remote_code=True)
source = AutoModelForCausalLM.from_pretrained("source")
input_ids = load_file("inputs.safetensors")["input_ids"]
torch.testing.assert_close(model(input_ids).logits, source(input_ids).logits, rtol=1e-5, atol=1e-5)
""")


@pytest.mark.parametrize("granularity", ["headwise", "elementwise"])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 2), (4, 1)])
def test_the_two_fused_layouts_agree_only_where_each_query_head_has_its_own_key_head(heads, groups, granularity):
    rows = {
        layout: query_and_gate_rows(layout, heads, groups, 3, granularity)
        for layout in ("q_proj_per_head", "q_proj_per_group")
    }
    flat = {
        layout: [[row for first, end in part for row in range(first, end)] for part in parts]
        for layout, parts in rows.items()
    }
    for queries, gates in flat.values():
        assert len(queries) == heads * 3 and len(gates) == heads * (3 if granularity == "elementwise" else 1)
        assert sorted(queries + gates) == list(range(len(queries) + len(gates)))
    assert (flat["q_proj_per_head"] == flat["q_proj_per_group"]) == (heads == groups)


# ---- what cannot be read


def hybrid(name: str):
    fields = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    if name == "lfm3":
        return stock(name, layer_types=["conv", "full_attention", "conv"])
    return stock(name, **fields, **linear)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_next_moe", "qwen3_5", "qwen3_5_moe", "lfm3"])
def test_hybrids_stay_stock_classes_and_can_be_inspected(tmp_path, target, name):
    model = hybrid(name)
    source = save_stock(tmp_path / "source", model)
    with pytest.raises(ConversionError) as error:
        convert_checkpoint(source, target)
    kind = "conv" if name == "lfm3" else "linear_attention"
    for word in ("layer_types", kind, type(model).__name__, "gated-attention inspect"):
        assert word in str(error.value)
    assert not target.exists()
    inspection = inspect_model(model.eval(), [{"input_ids": tiny_input_ids(2, 24)}])
    assert [layer.kind for layer in inspection.layers] == [kind, "attention", kind]
    attention = inspection.layers[1]
    assert len(attention.f_attn) == 4 and all(0 < share < 1 for share in attention.f_attn)
    assert len(attention.gate.mean) == 4 and all(0 < mean < 1 for mean in attention.gate.mean)
    assert inspection.perplexity > 1


def both_flags(source):
    edit_config(source, elementwise_attn_output_gate=True)


def wrong_flag(source):
    edit_config(source, headwise_attn_output_gate=False, elementwise_attn_output_gate=True)


def no_flag(source):
    edit_config(source, headwise_attn_output_gate=False)


REFERENCE_REFUSALS = {
    "both_flags": (both_flags, ["headwise_attn_output_gate and elementwise_attn_output_gate", "102 rows (headwise"]),
    "other_flag": (wrong_flag, ["elementwise gates", "192 rows", "has 102"]),
    "no_flag": (no_flag, ["102 rows (headwise gates)", "set headwise_attn_output_gate to true"]),
}


@pytest.mark.parametrize("case", REFERENCE_REFUSALS)
def test_flags_that_contradict_the_shapes_are_refused_with_both_facts(tmp_path, target, case):
    edit, words = REFERENCE_REFUSALS[case]
    source = tmp_path / "source"
    shutil.copytree(REFERENCE / "headwise", source)
    edit(source)
    with pytest.raises(ConversionError) as error:
        convert_checkpoint(source, target)
    for word in words:
        assert word in str(error.value)
    assert not target.exists()


def fewer_experts(source):
    edit_config(source, num_experts=3)


def more_experts(source):
    edit_config(source, num_experts=6)


def too_many_a_token(source):
    edit_config(source, num_experts_per_tok=5)


def expert_missing(source):
    edit_tensors(source, lambda tensors: tensors.pop("model.layers.1.mlp.experts.2.up_proj.weight"))


def fused_and_single(source):
    stacked = torch.zeros(4, 32, 24)
    edit_tensors(source, lambda tensors: tensors.update({"model.layers.1.mlp.experts.down_proj": stacked}))


def shared_expert_missing(source):
    edit_tensors(source, lambda tensors: tensors.pop("model.layers.0.mlp.shared_expert.up_proj.weight"))


def odd_width(source):
    def edit(tensors):
        for name in [name for name in tensors if "layers.1.mlp.experts." in name]:
            del tensors[name]
        tensors["model.layers.1.mlp.experts.gate_up_proj"] = torch.zeros(4, 49, 32)
        tensors["model.layers.1.mlp.experts.down_proj"] = torch.zeros(4, 32, 24)

    edit_tensors(source, edit)


EXPERT_REFUSALS = {
    "fewer_in_the_config": (fewer_experts, ["experts.3.", "of no expert that", "the 3 that"]),
    "more_in_the_config": (more_experts, ["lacks 4.gate_proj.weight", "the 6 that"]),
    "more_a_token_than_there_are": (too_many_a_token, ["num_experts_per_tok", "num_experts", "4", "5"]),
    "one_missing": (expert_missing, ["layers.1", "lacks 2.up_proj.weight"]),
    "fused_and_single": (fused_and_single, ["(all experts) stands beside", "(one expert)"]),
    "shared_expert_missing": (shared_expert_missing, ["shared_expert.up_proj.weight is missing"]),
    "stacked_of_odd_width": (odd_width, ["gate_up_proj", "(4, 49, 32)", "(4, 48, 32)"]),
}


@pytest.mark.parametrize("case", EXPERT_REFUSALS)
def test_experts_that_do_not_fit_the_config_are_refused(tmp_path, target, case):
    edit, words = EXPERT_REFUSALS[case]
    source = save_stock(tmp_path / "source", stock("qwen3_next_moe"))
    edit(source)
    with pytest.raises(ConversionError) as error:
        convert_checkpoint(source, target, verify="headers")
    for word in words:
        assert word in str(error.value)
    assert not target.exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"use_sandwich_norm": True}, ["use_sandwich_norm", "False", "True"]),
        ({"use_attention_gate": False}, ["use_attention_gate", "True", "False"]),
        (
            {
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
                "rope_parameters": {
                    kind: {"rope_type": "default", "rope_theta": theta}
                    for kind, theta in (("full_attention", 100.0), ("sliding_attention", 50.0))
                },
            },
            ["sliding_attention", "a RoPE of its own"],
        ),
    ],
    ids=["sandwich_norm", "no_gate", "window"],
)
def test_lfm3_with_other_parts_is_refused(tmp_path, target, overrides, words):
    source = save_stock(tmp_path / "source", stock("lfm3", **overrides))
    with pytest.raises(ConversionError) as error:
        convert_checkpoint(source, target)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"granularity": "headwise"}, ["granularity", "elementwise gates of its own", "headwise"]),
        ({"gate_bias": True}, ["gate_bias", "gates of its own", "True"]),
        ({"link": "hard"}, ["link", "--link copy", "rewritten", "hard"]),
    ],
    ids=["granularity", "gate_bias", "link"],
)
def test_options_for_new_gates_are_refused_where_there_are_gates(tmp_path, target, options, words):
    source = save_stock(tmp_path / "source", stock("qwen3_5"))
    with pytest.raises(ConversionError) as error:
        convert_checkpoint(source, target, **options)
    for word in words:
        assert word in str(error.value)
    assert not target.exists()


def test_the_sources_granularity_may_be_named(tmp_path, target):
    source = save_stock(tmp_path / "source", stock("qwen3_5"))
    assert convert_checkpoint(source, target, granularity="elementwise").numbers_equal


def test_sink_transfer_refuses_gated_sources(tmp_path):
    source = save_stock(tmp_path / "source", stock("qwen3_5"))
    with pytest.raises(ConversionError, match="already has gates"):
        predict_transfer(source, "text")


def test_a_source_that_changes_meanwhile_is_noticed(tmp_path, target, monkeypatch):
    from gated_attention.conversion import convert

    source = save_stock(tmp_path / "source", stock("qwen3_5"))
    real_write = convert.write_conversion

    def write_then_change(plan, folder):
        real_write(plan, folder)
        edit_tensors(source, lambda tensors: tensors["model.layers.1.self_attn.q_proj.weight"][-1].add_(1))

    monkeypatch.setattr(convert, "write_conversion", write_then_change)
    with pytest.raises(ConversionError, match=r"g_proj\.weight as written differs"):
        convert_checkpoint(source, target)
    assert not target.exists()


def test_large_tensors_are_copied_in_parts(tmp_path, target, monkeypatch):
    monkeypatch.setattr("gated_attention.conversion.layouts._CHUNK_BYTES", 300)
    source = save_stock(tmp_path / "source", stock("qwen3_5_moe"))
    plan = convert_checkpoint(source, target).plan
    largest = max(plan.pieces, key=lambda piece: piece.header.nbytes)
    with safe_open(source / "model.safetensors", "pt") as file:
        parts = [part.nbytes for part in largest.read(file)]
    assert max(parts) <= 300 and sum(parts) == largest.header.nbytes


def test_stock_qwen3_is_still_stock(tmp_path, target):
    """The flags of the paper's code, all at their defaults, say nothing."""
    source = save_stock(tmp_path / "source", Qwen3ForCausalLM(Qwen3Config(**TINY_SHAPE)))
    edit_config(source, headwise_attn_output_gate=False, use_qk_norm=True, qkv_bias=False)
    result = convert_checkpoint(source, target, link="hard")
    assert result.logits_equal and result.plan.pieces == ()
    with safe_open(target / "model-00002-of-00002.safetensors", "pt") as file:
        assert all("g_proj" in name for name in file.keys())  # noqa: SIM118


DOUBLES = {
    "two_prefixes": ("qwen3_5", "model.language_model.norm.weight", "model.norm.weight"),
    "two_names_of_a_gate": (
        "lfm3",
        "model.layers.0.self_attn.gate_proj.weight",
        "model.layers.0.self_attn.g_proj.weight",
    ),
}


@pytest.mark.parametrize("case", DOUBLES)
def test_two_tensors_for_one_place_are_refused_by_name(tmp_path, target, case):
    name, extra, present = DOUBLES[case]
    source = save_stock(tmp_path / "source", stock(name))

    def edit(tensors):
        for one in (extra, present):
            tensors.setdefault(one, torch.zeros(2, 2))

    edit_tensors(source, edit)
    with pytest.raises(ConversionError) as error:
        convert_checkpoint(source, target)
    assert extra in str(error.value) and present in str(error.value)
    assert not target.exists()


def test_a_gate_projection_beside_a_fused_one_is_refused(tmp_path, target):
    source = save_stock(tmp_path / "source", stock("qwen3_5"))
    edit_tensors(source, lambda t: t.update({"model.layers.0.self_attn.g_proj.weight": torch.zeros(40, 32)}))
    with pytest.raises(ConversionError, match="already has gates"):
        convert_checkpoint(source, target)


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_a_single_number_has_no_place(tmp_path, target, name):
    model = tiny_llama() if name == "llama" else stock("qwen3_5")
    source = save_stock(tmp_path / "source", model)
    edit_tensors(source, lambda tensors: tensors.update({"model.scale": torch.tensor(1.0)}))
    with pytest.raises(ConversionError, match=r"model\.scale .* is a single number"):
        convert_checkpoint(source, target)


def test_what_the_stock_class_passes_over_may_be_of_any_shape_and_takes_no_room(tmp_path, target):
    source = save_stock(tmp_path / "source", stock("qwen3_next_moe"), max_shard_size="30KB")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    extra = {
        "mtp.layers.0.self_attn.q_proj.weight": torch.zeros(8, 4),
        "mtp.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(2, 2),
        "mtp_head.weight": torch.zeros(500, 500),
    }
    save_file(extra, source / "model-mtp.safetensors", metadata={"format": "pt"})
    index["weight_map"] |= dict.fromkeys(extra, "model-mtp.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    plan = convert_checkpoint(source, target).plan
    written = sum(path.stat().st_size for path in target.iterdir())
    assert written <= plan.bytes_to_write * 1.05 and plan.bytes_to_write < written + 300_000
    shards = sorted(path.name for path in target.glob("*.safetensors"))
    weight_map = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(shards) == set(weight_map.values())


def test_fields_that_the_stock_class_does_not_know_are_passed_over(tmp_path, target):
    source = save_stock(tmp_path / "source", stock("qwen3_5_moe"))
    edit_config(source, mlp_only_layers=[0], decoder_sparse_step=2)
    assert convert_checkpoint(source, target).logits_equal


def test_lfm3_turns_all_channels_with_the_default_rope(tmp_path, target):
    rope = {"full_attention": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.4}}
    source = save_stock(tmp_path / "source", stock("lfm3", rope_parameters=rope))
    assert convert_checkpoint(source, target).logits_equal


def test_a_source_that_its_class_cannot_run_is_said_to_be_one(tmp_path, target):
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0, "partial_rotary_factor": 0.4}
    source = save_stock(tmp_path / "source", stock("lfm3", rope_parameters={"full_attention": rope}))
    with pytest.raises(ConversionError, match=r"its RoPE .* could not be carried over"):
        convert_checkpoint(source, target)
    source = save_stock(tmp_path / "other", stock("qwen3_5"))

    def broken(*arguments, **options):
        raise RuntimeError("the class is broken")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen3_5ForCausalLM, "forward", broken)
        with pytest.raises(ConversionError, match=r"Qwen3_5ForCausalLM cannot run the source .*the class is broken"):
            convert_checkpoint(source, target)


def test_a_full_disk_is_not_told_to_link(tmp_path, target, monkeypatch):
    source = save_stock(tmp_path / "source", stock("qwen3_5"))
    monkeypatch.setattr("gated_attention.conversion.write.free_bytes", lambda folder: 10)
    with pytest.raises(ConversionError, match=r"make room$"):
        convert_checkpoint(source, target)
