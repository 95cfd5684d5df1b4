"""Gated models become stock ones that compute the same, or are refused with the reason."""

import json
import re

import pytest
import torch
from conftest import (
    ON_AMD,
    edit_config,
    edit_tensors,
    logits_of,
    save_source,
    tiny_gated,
    tiny_input_ids,
    tiny_tokenizer,
    tree_hashes,
)
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_random_configs import rope
from test_sink_transfer import TEXT, distinct_windows, planted_sink
from transformers import (
    AutoModelForCausalLM,
    Lfm3ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3NextForCausalLM,
    Trainer,
    TrainingArguments,
)
from typer.testing import CliRunner

from gated_attention import (
    GatedAttentionForCausalLM,
    convert_checkpoint,
    export_checkpoint,
    inspect_model,
    transfer_sinks,
)
from gated_attention.cli import app
from gated_attention.conversion import ConversionError
from gated_attention.conversion.stock.norms import split_query_and_key_weights, split_weight, zero_centered


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
SHARED = {"shared_expert_intermediate_size": 16}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 5}
HEADWISE = {"gate_granularity": "headwise"}
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.4}}
YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
}
BIASES = {"qk_bias": True, "o_bias": True, "gate_bias": True}

# Target, fields of the gated config beside QK-norm, and the stock class.
CASES = {
    "qwen3_5": ("qwen3_5", {}, Qwen3_5ForCausalLM),
    "qwen3_5_of_a_conversion": ("qwen3_5", {"gate_scale": 2.0, "tie_word_embeddings": True}, Qwen3_5ForCausalLM),
    "qwen3_5_some_biases": ("qwen3_5", {**BIASES, **YARN}, Qwen3_5ForCausalLM),
    "qwen3_5_widened": ("qwen3_5", {**HEADWISE, "gate_bias": True, **PARTIAL}, Qwen3_5ForCausalLM),
    "qwen3_5_some_layers": ("qwen3_5", {"gate_layers": [1], "gate_scale": 2.0}, Qwen3_5ForCausalLM),
    "qwen3_5_input_independent": ("qwen3_5", {"gate_input": "none"}, Qwen3_5ForCausalLM),
    "qwen3_5_of_some_channels": ("qwen3_5", {"gate_input_size": 5}, Qwen3_5ForCausalLM),
    "qwen3_5_zero_centered": ("qwen3_5", {"zero_centered_norm": True}, Qwen3_5ForCausalLM),
    "qwen3_5_moe": ("qwen3_5", EXPERTS, Qwen3_5MoeForCausalLM),
    "qwen3_5_moe_shared": ("qwen3_5", {**EXPERTS, **SHARED, "shared_expert_gate": True}, Qwen3_5MoeForCausalLM),
    "qwen3_next": ("qwen3_next", {"gate_scale": 0.5}, Qwen3NextForCausalLM),
    "qwen3_next_moe_and_dense": (
        "qwen3_next",
        {**EXPERTS, "norm_topk_prob": False, "mlp_layer_types": ["dense", "sparse", "dense"]},
        Qwen3NextForCausalLM,
    ),
    "qwen3_next_ungated_shared": ("qwen3_next", {**EXPERTS, **SHARED}, Qwen3NextForCausalLM),
    "lfm3": ("lfm3", HEADWISE, Lfm3ForCausalLM),
    "lfm3_of_a_conversion": (
        "lfm3",
        {**HEADWISE, "gate_scale": 2.0, "tie_word_embeddings": True, **WINDOWS},
        Lfm3ForCausalLM,
    ),
    "lfm3_biases_and_some_layers": (
        "lfm3",
        {**HEADWISE, "qk_bias": True, "v_bias": True, "gate_layers": [0, 2], "gate_input_size": 7},
        Lfm3ForCausalLM,
    ),
}


def gated(name: str, norms: float | None = None, **overrides) -> GatedAttentionForCausalLM:
    """A random model; with `norms` its norms' weights are of about that size, and of both signs."""
    model = tiny_gated(qk_norm=True, **CASES[name][1], **overrides)
    if norms is not None:
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "norm" in parameter_name:
                    parameter.mul_(torch.randn(parameter.shape, generator=generator) * norms)
    return model


def save_gated(folder, model):
    model.save_pretrained(folder, max_shard_size="40KB")
    tiny_tokenizer().save_pretrained(folder)
    return folder


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).double().norm() / expected.double().norm()).item()


@pytest.mark.parametrize("norms", [None, 0.02, 30.0], ids=["norms_near_1", "small_norms", "large_norms"])
@pytest.mark.parametrize("case", CASES)
def test_stock_class_computes_the_same(tmp_path, target, case, norms):
    to, _, stock_class = CASES[case]
    source = save_gated(tmp_path / "source", gated(case, norms))
    before = tree_hashes(source)
    result = export_checkpoint(source, target, to, widen_gates="widened" in case)
    assert tree_hashes(source) == before
    stock, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert type(stock) is stock_class
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    model = GatedAttentionForCausalLM.from_pretrained(source)
    for length in (4, 40):
        found, expected = (logits_of(one, tiny_input_ids(2, length)) for one in (stock, model))
        assert relative(found, expected) < 1e-5
        # A bias of zeros has the product made by another kernel, which on AMD's processors rounds otherwise.
        if to == "lfm3" and not (ON_AMD and "biases" in case):
            assert torch.equal(found, expected)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(stock.generate(tiny_input_ids(), **options), model.generate(tiny_input_ids(), **options))
    assert result.comparison.saved.relative < 1e-5
    assert not any(path.suffix == ".py" for path in target.iterdir())
    assert "auto_map" not in json.loads((target / "config.json").read_text())

    # And back.
    assert convert_checkpoint(target, tmp_path / "back").logits_equal
    back = GatedAttentionForCausalLM.from_pretrained(tmp_path / "back")
    assert relative(logits_of(back), logits_of(model)) < 1e-5
    assert back.config.gate_granularity == ("headwise" if to == "lfm3" else "elementwise")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("norms", [None, 0.02], ids=["norms_near_1", "small_norms"])
@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_5_widened", "qwen3_next_moe_and_dense", "lfm3_of_a_conversion"])
def test_numbers_of_16_bits_are_kept(tmp_path, target, case, norms, dtype):
    source = save_gated(tmp_path / "source", gated(case, norms).to(dtype))
    result = export_checkpoint(source, target, CASES[case][0], widen_gates="widened" in case)
    assert result.plan.stock_config.dtype == dtype
    assert AutoModelForCausalLM.from_pretrained(target).dtype == dtype
    comparison = result.comparison
    # In float32 nothing is left but what was rounded: norms of queries and keys, which no matrix follows, and in float16 products
    # that are too small for its range.
    of_norms = all("q_norm" in name or "k_norm" in name for name in result.rounded)
    assert of_norms or dtype == torch.float16
    assert comparison.function.relative < (1e-3 if result.rounded else 1e-6)
    assert comparison.exported_to_exact.relative < 2 * comparison.own_to_exact.relative
    assert comparison.saved.relative < 4 * comparison.own_to_exact.relative
    if norms is None:
        assert result.rounded == {}


def test_rounding_norms_would_be_worse(tmp_path, target):
    """The reason for the powers of two: `weight - 1` in bfloat16, of weights around 0.02, is another function."""
    model = gated("qwen3_5", norms=0.02).to(torch.bfloat16)
    source = save_gated(tmp_path / "source", model)
    function = export_checkpoint(source, target, "qwen3_5").comparison.function
    rounded = gated("qwen3_5").to(torch.bfloat16)
    rounded.load_state_dict(model.state_dict())
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + zero_centered(parameter))
    naive = relative(logits_of(rounded.float()), logits_of(model.float()))
    assert function.relative < 1e-3 < 0.03 < naive


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_every_weight_of_a_norm_is_split_exactly(dtype):
    weight = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    weight = weight[weight.isfinite()]
    stored, factors = split_weight(weight)
    assert torch.equal((1 + stored.float()).double() * factors, weight.double())
    sizes = factors[factors != 0].abs()
    assert torch.equal(torch.frexp(sizes).mantissa, torch.full_like(sizes, 0.5))  # powers of two
    assert (factors[(weight >= 0.5) & (weight <= 128)] == 1).all()  # what fits is left alone


def test_norms_that_fit_change_no_matrix(tmp_path, target):
    model = tiny_gated(qk_norm=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.clamp_(0.5, 2).copy_(parameter.bfloat16())
    source = save_gated(tmp_path / "source", model.to(torch.bfloat16))
    plan = export_checkpoint(source, target, "qwen3_5").plan
    changed = {output.name for output in plan.outputs} - {output.name for output in plan.untouched}
    assert all("norm" in name or "q_proj" in name for name in changed)


def test_queries_and_keys_share_what_their_norms_cannot_hold():
    generator = torch.Generator().manual_seed(0)
    query = (torch.rand(12, generator=generator) * 0.02 + 0.01).bfloat16()
    key = (torch.rand(12, generator=generator) * 20 + 30).bfloat16()
    stored = split_query_and_key_weights(query, key, turned=8)
    products = (1 + stored[0].double()) * (1 + stored[1].double())
    assert torch.equal(products, query.double() * key.double())
    ratio = (1 + stored[0].double()) / query.double()
    assert torch.equal(ratio[:4], ratio[4:8])  # RoPE turns these together
    naive = (1 + zero_centered(query).double()) * key.double()
    assert not torch.equal(naive, query.double() * key.double())


def test_report_says_what_is_not_bit_equal(tmp_path, target):
    source = save_gated(tmp_path / "source", gated("lfm3_biases_and_some_layers"))
    export_checkpoint(source, target, "lfm3")
    report = json.loads((target / "gated_attention_export.json").read_text())
    ours = {name: tensor for path in source.glob("*.safetensors") for name, tensor in load_file(path).items()}
    theirs = {name: tensor for path in target.glob("*.safetensors") for name, tensor in load_file(path).items()}
    kept = [tensor for name, tensor in theirs.items() if name not in report["changed"]]
    assert len(kept) == report["tensors_as_they_were"]
    for tensor in kept:
        assert any(tensor.shape == other.shape and torch.equal(tensor, other) for other in ours.values())
    changes = {name.rpartition("self_attn.")[2]: change["how"] for name, change in report["changed"].items()}
    assert changes == {
        "gate_proj.weight": "columns of zeros, for channels that the gate does not read",
        "o_proj.weight": "x 2, gate_scale",  # of the layer without a gate
        "o_proj.bias": "zeros",
    } | {"gate_proj.weight": changes["gate_proj.weight"]}
    assert report["comparison"]["function"]["equal"] or ON_AMD  # as above
    assert not any(change["rounded_by"] for change in report["changed"].values())


def test_head_is_untied_where_the_final_norm_needs_it(tmp_path, target):
    source = save_gated(tmp_path / "source", gated("qwen3_5_of_a_conversion", norms=0.02).to(torch.bfloat16))
    result = export_checkpoint(source, target, "qwen3_5")
    assert any("head becomes a matrix of its own" in note for note in result.plan.notes)
    stock = AutoModelForCausalLM.from_pretrained(target)
    assert not stock.config.tie_word_embeddings
    assert stock.lm_head.weight is not stock.model.embed_tokens.weight
    kept = export_checkpoint(
        save_gated(tmp_path / "other", gated("qwen3_5_of_a_conversion")), target, "qwen3_5", overwrite=True
    )
    assert kept.plan.stock_config.tie_word_embeddings or kept.plan.notes


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_5_moe", "qwen3_next_moe_and_dense", "lfm3_of_a_conversion"])
def test_layer_by_layer_as_whole(tmp_path, target, case):
    source = save_gated(tmp_path / "source", gated(case).to(torch.bfloat16))
    comparison = export_checkpoint(source, target, CASES[case][0], layer_by_layer=True).comparison
    assert comparison.method == "layer by layer" and comparison.saved.same_token is None
    assert comparison.function.equal
    assert 0 < comparison.saved.relative < 4 * comparison.own_to_exact.relative


def test_tensors_are_written_in_parts(tmp_path, target, monkeypatch):
    source = save_gated(tmp_path / "source", gated("qwen3_5_widened", norms=0.02))
    export_checkpoint(source, target, "qwen3_5", widen_gates=True)
    monkeypatch.setattr("gated_attention.conversion.stock.tensors._CHUNK_BYTES", 200)
    export_checkpoint(source, tmp_path / "in_parts", "qwen3_5", widen_gates=True)
    for path in target.glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "in_parts" / path.name).read_bytes()


# ---- what users do with it


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_next_ungated_shared", "lfm3_of_a_conversion"])
def test_loads_without_the_package(tmp_path, target, without_package, case):
    model = gated(case)
    export_checkpoint(save_gated(tmp_path / "source", model), target, CASES[case][0])
    input_ids = tiny_input_ids(2, 24)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = model.generate(input_ids, **options)
    inputs = {"input_ids": input_ids, "logits": logits_of(model, input_ids), "tokens": tokens}
    save_file(inputs, tmp_path / "inputs.safetensors")
    without_package(f"""
model = AutoModelForCausalLM.from_pretrained("target")
found = load_file("inputs.safetensors")
logits = model(found["input_ids"]).logits
difference = (logits - found["logits"]).norm() / found["logits"].norm()
assert difference < 1e-5, difference
assert {case.startswith("lfm3")!r} <= torch.equal(logits, found["logits"])
tokens = model.generate(found["input_ids"], max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
assert torch.equal(tokens, found["tokens"])
from transformers import AutoTokenizer
assert AutoTokenizer.from_pretrained("target")("the gate opens")["input_ids"]
""")


@pytest.mark.parametrize("case", ["qwen3_5_of_a_conversion", "lfm3_of_a_conversion"])
def test_trains_and_takes_adapters(tmp_path, target, case):
    export_checkpoint(save_gated(tmp_path / "source", gated(case)), target, CASES[case][0])
    model = AutoModelForCausalLM.from_pretrained(target)
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    input_ids = tiny_input_ids(8, 16)
    before = model(input_ids, labels=input_ids).loss.item()
    arguments = TrainingArguments(
        tmp_path / "trained", max_steps=12, learning_rate=0.03, report_to="none", disable_tqdm=True, use_cpu=True
    )
    rows = Dataset.from_dict({"input_ids": input_ids.tolist(), "labels": input_ids.tolist()})
    Trainer(model, arguments, train_dataset=rows).train()
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert type(loaded) is CASES[case][2]
    assert torch.equal(logits_of(loaded), logits_of(merged.eval()))
    with torch.no_grad():
        assert loaded(input_ids, labels=input_ids).loss.item() < before - 0.1


@pytest.mark.parametrize("granularity", ["headwise", "elementwise"])
def test_after_a_sink_transfer(tmp_path, target, granularity):
    source = save_source(tmp_path / "source", planted_sink("qwen3"))
    gated_folder = tmp_path / "gated"
    transfer_sinks(source, gated_folder, TEXT, granularity=granularity, tokens=1024, length=32, progress=False)
    result = export_checkpoint(gated_folder, target, "qwen3_5", widen_gates=True)
    assert result.comparison.saved.relative < 1e-5
    stock, model = (AutoModelForCausalLM.from_pretrained(folder) for folder in (target, gated_folder))
    assert type(stock) is Qwen3_5ForCausalLM and stock.config.attention_bias
    windows = [{"input_ids": distinct_windows(4, seed=7)}]
    found, expected = inspect_model(stock, windows), inspect_model(model, windows)
    assert expected.f_attn < 0.02
    for key, value in expected.summary().items():
        # Elementwise gates have rank, share and histogram by channel; headwise ones by head.
        if value is not None and not ("gate" in key or "rank" in key):
            assert found.summary()[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    assert found.gate_mean == pytest.approx(expected.gate_mean, rel=1e-5)


# ---- RoPE, formats and files


SCALED = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 32},
    "llama3": {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "proportional": {},
    "default": {},
}


@pytest.mark.parametrize("part", [{}, {"partial_rotary_factor": 0.5}], ids=["whole", "part"])
@pytest.mark.parametrize("kind", SCALED)
def test_rope_of_every_type(tmp_path, target, kind, part):
    """With small norms of queries and keys, between which powers of two move by the pairs that RoPE turns."""
    rope_parameters = {"rope_type": kind, "rope_theta": 100.0, **SCALED[kind], **part}
    model = tiny_gated(qk_norm=True, head_dim=16, rope_parameters=rope_parameters, **HEADWISE)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) * 1.5 + 0.05)
    source = save_gated(tmp_path / "source", model.to(torch.bfloat16))
    function = export_checkpoint(source, target, "qwen3_5", widen_gates=True).comparison.function
    assert function.relative < 1e-2  # of weights in 8 bits; with other pairs it is 0.4
    if part and kind != "proportional":
        with pytest.raises(ConversionError, match=r"its RoPE .* turns a part of the channels, where lfm3 turns all"):
            export_checkpoint(source, target, "lfm3", overwrite=True)
    else:
        assert export_checkpoint(source, target, "lfm3", overwrite=True).comparison.function.equal


@pytest.mark.parametrize("wide", ["norms", "all"])
def test_numbers_wider_than_the_model_loads_them(tmp_path, target, wide):
    """In float32 on disk and bfloat16 in use: what a norm holds has to fit the narrower one."""
    source = save_gated(tmp_path / "source", gated("qwen3_5", norms=0.02).to(torch.bfloat16))
    for path in source.glob("*.safetensors"):
        edit_tensors(
            path,
            lambda tensors: tensors.update(
                {name: tensor.float() for name, tensor in tensors.items() if wide == "all" or "norm" in name}
            ),
        )
    comparison = export_checkpoint(source, target, "qwen3_5").comparison
    assert comparison.dtype == "bfloat16"
    assert comparison.exported_to_exact.relative < 1.5 * comparison.own_to_exact.relative


def test_reports_and_foreign_files_stay_behind(tmp_path, target):
    source = save_gated(tmp_path / "source", gated("qwen3_5"))
    (source / "model.onnx").write_text("x")
    (source / "mine.py").write_text("x = 1")
    plan = export_checkpoint(source, target, "qwen3_5").plan
    assert any("mine.py" in note for note in plan.notes) and any("model.onnx" in note for note in plan.notes)
    assert not any("gated_attention_gate.py" in note for note in plan.notes)
    convert_checkpoint(target, tmp_path / "back")
    assert not (tmp_path / "back" / "gated_attention_export.json").exists()


def test_a_class_that_does_not_run_is_said_to_be_one(tmp_path, target, monkeypatch):
    source = save_gated(tmp_path / "source", gated("qwen3_5"))
    with monkeypatch.context() as patch:
        patch.setattr(Qwen3_5ForCausalLM, "forward", lambda *arguments, **options: 1 / 0)
        with pytest.raises(ConversionError, match=r"does not run in float32 \(ZeroDivisionError.*cannot be compared"):
            export_checkpoint(source, target, "qwen3_5")
    edit_config(source, dtype="float8_e4m3fn")
    with pytest.raises(ConversionError, match="dtype must be one of"):
        export_checkpoint(source, target, "qwen3_5")
    assert not target.exists()


# ---- what has no place


@pytest.mark.parametrize(
    ("to", "fields", "words"),
    [
        ("qwen3_5", {"qk_norm": False}, ["`qk_norm` is False", "No stock class could", "trust_remote_code"]),
        ("lfm3", {"qk_norm": False, **HEADWISE}, ["`qk_norm` is False", "No stock class could"]),
        (
            "qwen3_5",
            HEADWISE,
            ["headwise", "--widen-gates", "Qwen3_5 with|qwen3_5 with --widen-gates or .*lfm3 could"],
        ),
        ("lfm3", {}, ["elementwise", "Qwen3_5 or qwen3_next could hold it|qwen3_5 or qwen3_next could hold it"]),
        ("lfm3", {**HEADWISE, "gate_bias": True}, ["a bias that is not zero", "with --widen-gates could hold it"]),
        ("qwen3_5", {"gate_activation": "silu"}, ["`gate_activation` is 'silu'", "No stock class"]),
        ("qwen3_5", {"gate_operator": "add"}, ["`gate_operator` is 'add'"]),
        ("qwen3_5", {"gate_sharing": "head_shared"}, ["`gate_sharing` is 'head_shared'"]),
        ("qwen3_5", {"gate_positions": ["value"]}, ["gates are on value", "sdpa_output"]),
        ("qwen3_5", {"gate_positions": []}, ["gates are on nothing"]),
        ("qwen3_next", WINDOWS, ["sliding windows"]),
        ("qwen3_next", {**WINDOWS, **HEADWISE}, ["sliding windows", "Lfm3 could|lfm3 could"]),
        ("lfm3", {**HEADWISE, **EXPERTS}, ["it has experts", "qwen3_next with --widen-gates could hold it"]),
        (
            "qwen3_5",
            {**EXPERTS, "mlp_layer_types": ["dense", "sparse", "sparse"]},
            ["layers are dense", "wen3_next could hold it"],
        ),
        ("qwen3_5", {**EXPERTS, "norm_topk_prob": False}, ["`norm_topk_prob` is False", "wen3_next could hold it"]),
        ("qwen3_5", {"no_rope_layers": [1, 0, 1]}, [r"`no_rope_layers` is \[1, 0, 1\]"]),
        ("qwen3_5", {"forget_gate": True}, ["`forget_gate` is True"]),
        ("qwen3_5", {"mlp_bias": True}, ["`mlp_bias` is True"]),
        ("qwen3_5", {"sdpa_output_nonlinearity": "rms_norm"}, ["`sdpa_output_nonlinearity` is rms_norm"]),
        ("qwen3_5", {"residual_multiplier": 0.5}, ["`residual_multiplier` is 0.5"]),
        ("lfm3", {**HEADWISE, "hidden_act": "gelu"}, ["`hidden_act` is gelu", "widen-gates could hold it"]),
        ("lfm3", {**HEADWISE, **PARTIAL}, ["its RoPE", "partial_rotary_factor", "widen-gates could hold it"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_no_stock_class_has_is_refused(tmp_path, target, to, fields, words):
    source = save_gated(tmp_path / "source", tiny_gated(**{"qk_norm": True, **fields}))
    before = tree_hashes(tmp_path)
    with pytest.raises(ConversionError) as error:
        export_checkpoint(source, target, to)
    for word in words:
        assert re.search(word, str(error.value)), (word, str(error.value))
    assert tree_hashes(tmp_path) == before


@pytest.mark.parametrize("zero", [".g_proj.bias", "mlp"])
def test_biases_of_zeros_need_no_place(tmp_path, target, zero):
    model = tiny_gated(qk_norm=True, **HEADWISE, gate_bias=True, mlp_bias=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") and ("g_proj" in name or "mlp" in name) and (zero in name or zero == "mlp"):
                parameter.zero_()
    source = save_gated(tmp_path / "source", model)
    if zero == "mlp":
        assert export_checkpoint(source, target, "lfm3").comparison.saved.equal
    else:
        with pytest.raises(ConversionError, match="`mlp_bias` is True"):
            export_checkpoint(source, target, "lfm3")


def half_written(source):
    path = sorted(source.glob("*.safetensors"))[1]
    tensors = load_file(path)
    name = min(tensors)
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    index = json.loads((source / "model.safetensors.index.json").read_text())
    del index["weight_map"][name]
    (source / "model.safetensors.index.json").write_text(json.dumps(index))


def shard_missing(source):
    min(source.glob("*.safetensors")).unlink()


def foreign(source):
    edit_config(source, model_type="llama", architectures=["LlamaForCausalLM"])


def another_head(source):
    edit_config(source, architectures=["GatedAttentionForSequenceClassification"])


def config_of_another_model(source):
    edit_config(source, intermediate_size=40)


def contradiction(source):
    edit_config(source, gate_granularity="sometimes")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (half_written, ["is missing", "half-written"]),
        (shard_missing, ["is missing, although model.safetensors.index.json names it"]),
        (foreign, ["model_type must be 'gated_attention', got 'llama'", "gated-attention convert"]),
        (another_head, ["architectures", "GatedAttentionForSequenceClassification"]),
        (config_of_another_model, ["has shape", "the config implies"]),
        (contradiction, ["config.json", "gate_granularity"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_damaged_and_foreign_sources_are_refused(tmp_path, target, damage, words):
    source = save_gated(tmp_path / "source", gated("qwen3_5"))
    damage(source)
    before = tree_hashes(tmp_path)
    with pytest.raises(ConversionError) as error:
        export_checkpoint(source, target, "qwen3_5")
    assert all(word in str(error.value) for word in words), str(error.value)
    assert tree_hashes(tmp_path) == before


def test_a_target_in_the_way_is_left_alone(tmp_path, target):
    source = save_gated(tmp_path / "source", gated("qwen3_5"))
    export_checkpoint(source, target, "qwen3_5")
    before = tree_hashes(tmp_path)
    with pytest.raises(ConversionError, match="not empty"):
        export_checkpoint(source, target, "qwen3_next")
    with pytest.raises(ConversionError, match="the source itself"):
        export_checkpoint(source, source, "qwen3_next", overwrite=True)
    assert tree_hashes(tmp_path) == before
    assert export_checkpoint(source, target, "qwen3_next", overwrite=True).plan.family.model_type == "qwen3_next"


def test_errors_above_the_bound_are_refused(tmp_path, target):
    source = save_gated(tmp_path / "source", gated("qwen3_5", norms=0.02).to(torch.bfloat16))
    with pytest.raises(
        ConversionError,
        match=r"would differ .* more than 1\.0e-05, and .*: numbers of 6 tensors were rounded.*--max-error",
    ):
        export_checkpoint(source, target, "qwen3_5", max_error=1e-5)
    assert not target.exists()
    assert export_checkpoint(source, target, "qwen3_5", max_error=0.5).rounded


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"to": "qwen4"}, "`to` must be one of qwen3_5, qwen3_next, lfm3; got 'qwen4'"),
        ({"max_error": -1}, "`max_error` must be a number, 0 or more, got -1"),
        ({"verify": "all"}, "`verify` must be one of .* got 'all'"),
    ],
    ids=["to", "max_error", "verify"],
)
def test_bad_options_are_named(tmp_path, target, options, words):
    source = save_gated(tmp_path / "source", gated("qwen3_5"))
    with pytest.raises(ConversionError, match=words):
        export_checkpoint(source, target, **{"to": "qwen3_5", **options})


def test_a_number_that_does_not_fit_is_refused(tmp_path, target):
    model = gated("qwen3_5_of_a_conversion").half()
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[3, 4] = 60000.0
    source = save_gated(tmp_path / "source", model)
    with pytest.raises(
        ConversionError, match=r"layers\.1\.self_attn\.o_proj\.weight has numbers that do not fit into torch\.float16"
    ):
        export_checkpoint(source, target, "qwen3_5")
    assert not target.exists()


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=["interrupted", "disk_full"]
)
def test_a_run_that_stops_leaves_nothing(tmp_path, target, monkeypatch, error):
    source = save_gated(tmp_path / "source", gated("qwen3_5"))
    before = tree_hashes(tmp_path)

    def stop(*_):
        raise error

    monkeypatch.setattr("gated_attention.conversion.stock.export.compare_with_stock", stop)
    with pytest.raises(type(error)):
        export_checkpoint(source, target, "qwen3_5")
    assert tree_hashes(tmp_path) == before


def test_command(tmp_path, target):
    source = save_gated(tmp_path / "source", gated("lfm3_of_a_conversion"))

    def run(*arguments):
        return CliRunner().invoke(app, ["export", str(source), str(target), *arguments])

    dry = run("--to", "lfm3", "--dry-run")
    assert dry.exit_code == 0 and "Lfm3ForCausalLM" in dry.output and not target.exists()
    refused = run("--to", "qwen3_5")
    assert refused.exit_code == 1 and "sliding windows" in refused.output
    result = run("--to", "lfm3")
    assert result.exit_code == 0, result.output
    assert "3: x 2, gate_scale" in result.output
    assert "rounded  nothing" in result.output and "equal bit for bit" in result.output
    assert AutoModelForCausalLM.from_pretrained(target).config.model_type == "lfm3"


# ---- whatever the model


@st.composite
def exportable_fields(draw) -> dict:
    """Mostly what a stock class has."""
    head_dim = draw(st.sampled_from([8, 12]))
    fields = {
        "num_hidden_layers": 2,
        "hidden_size": 24,
        "num_attention_heads": draw(st.sampled_from([2, 4])),
        "num_key_value_heads": draw(st.sampled_from([1, 2])),
        "head_dim": head_dim,
        "max_position_embeddings": 64,
        "qk_norm": draw(st.integers(0, 9)) != 7,
        "rope_parameters": draw(rope(head_dim)),
        "gate_granularity": draw(st.sampled_from(["headwise", "elementwise"])),
        "gate_scale": draw(st.sampled_from([0.5, 1, 2.0, 3.0])),
        "gate_layers": draw(st.sampled_from([None, None, [0], [1]])),
        "gate_input": draw(st.sampled_from(["hidden_states", "hidden_states", "none"])),
    }
    for name in ("tie_word_embeddings", "zero_centered_norm", "qk_bias", "v_bias", "o_bias"):
        fields[name] = draw(st.booleans())
    if fields["gate_input"] == "hidden_states":
        fields |= {"gate_bias": draw(st.booleans()), "gate_input_size": draw(st.sampled_from([None, 3]))}
    if draw(st.booleans()):
        fields |= EXPERTS | {"num_experts_per_tok": 3, "norm_topk_prob": draw(st.booleans())}
        fields["mlp_layer_types"] = draw(st.sampled_from([None, ["dense", "sparse"]]))
        fields["shared_expert_intermediate_size"] = draw(st.sampled_from([None, 16]))
        fields["shared_expert_gate"] = fields["shared_expert_intermediate_size"] is not None and draw(st.booleans())
    return fields


def test_random_models_are_exported_or_refused(tmp_path_factory):
    counts = {"exported": 0, "refused": 0}

    @settings(
        max_examples=60,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(fields=exportable_fields(), to=st.sampled_from(["qwen3_5", "qwen3_next", "lfm3"]))
    def check(fields, to):
        folder = tmp_path_factory.mktemp("model")
        model = tiny_gated(**fields)
        model.save_pretrained(folder / "source")
        try:
            result = export_checkpoint(folder / "source", folder / "target", to, widen_gates=True)
        except ConversionError as error:
            counts["refused"] += 1
            assert "cannot become" in str(error)
            return
        counts["exported"] += 1
        assert result.comparison.saved.relative < 1e-5

    check()
    assert counts["exported"] >= 25
    assert counts["refused"] >= 5
