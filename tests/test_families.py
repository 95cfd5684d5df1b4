"""Every family whose checkpoints get gates computes what it computed: bit for bit, or to rounding where its table says why."""

import json
import shutil

import pytest
import torch
import transformers
from conftest import TINY_SHAPE, edit_config, edit_tensors, logits_of, randomise, tiny_input_ids, tree_hashes
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gated_attention import GatedAttentionForCausalLM, convert_checkpoint, predict_transfer
from gated_attention.conversion import FAMILIES, ConversionError
from gated_attention.conversion.comparison import difference, ulp_distance
from gated_attention.conversion.families import REFUSED_FAMILIES
from gated_attention.conversion.logits import compare_models


LAYERS = TINY_SHAPE["num_hidden_layers"]
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
PHI_SHAPE = {"hidden_size": 40, "head_dim": None, "pad_token_id": 0}  # Phi-3's config knows hidden / heads only
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

# Of each family that gets gates: config class, and fields beside the tiny shape.
CASES = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral_window": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {"head_dim": 8}),
    "qwen2_windows": (
        "Qwen2",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"attention_bias": True}),
    "qwen3_windows": (
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": MIXED, "tie_word_embeddings": True},
    ),
    "smollm3": ("SmolLM3", {"pad_token_id": 0, "head_dim": 8, "no_rope_layers": [1, 0, 1]}),
    "smollm3_windows": (
        "SmolLM3",
        {
            "pad_token_id": 0,
            "head_dim": 8,
            "no_rope_layers": [1, 0, 0],
            "use_sliding_window": True,
            "sliding_window": 5,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "granite": (
        "Granite",
        {
            "head_dim": 8,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.0,
        },
    ),
    "phi3": ("Phi3", {**PHI_SHAPE}),
    "phi3_window_and_partial_rotary": (
        "Phi3",
        {
            **PHI_SHAPE,
            "sliding_window": 5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.4},
        },
    ),
    "phi3_longrope": (
        "Phi3",
        {
            **PHI_SHAPE,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 5000.0,
                "short_factor": [1.0 + index for index in range(5)],
                "long_factor": [2.0 + index for index in range(5)],
            },
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24}),
    "mixtral_window": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "sliding_window": 5},
    ),
    "qwen2_moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 20, "head_dim": 8}),
    "qwen2_moe_without_biases": (
        "Qwen2Moe",
        {
            **EXPERTS,
            "shared_expert_intermediate_size": 20,
            "head_dim": 8,
            "qkv_bias": False,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 5,
        },
    ),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True}),
    "qwen3_moe_every_second_layer": (
        "Qwen3Moe",
        {
            **EXPERTS,
            "decoder_sparse_step": 2,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
        },
    ),
}


def stock(case: str, **overrides):
    name, fields = CASES[case]
    fields = {**TINY_SHAPE, **fields, **overrides}
    config = getattr(transformers, f"{name}Config")(
        **{key: value for key, value in fields.items() if value is not None}
    )
    return randomise(getattr(transformers, f"{name}ForCausalLM")(config))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"]
)
@pytest.mark.parametrize("case", CASES)
def test_same_function(tmp_path, target, case, dtype):
    source = tmp_path / "source"
    stock(case).to(dtype).save_pretrained(source, max_shard_size="30KB")
    before = tree_hashes(source)
    result = convert_checkpoint(source, target, granularity="elementwise", gate_bias=True)
    assert tree_hashes(source) == before
    family = result.plan.family
    assert result.logits_equal
    for backend in ("eager", "sdpa"):
        # Past the window of 5, and past what longrope was trained on.
        for length in (4, 24):
            load = {"attn_implementation": backend, "dtype": torch.float32 if family.tolerance else dtype}
            expected = AutoModelForCausalLM.from_pretrained(source, **load)
            model = AutoModelForCausalLM.from_pretrained(target, **load)
            assert type(model) is GatedAttentionForCausalLM
            found, wanted = (logits_of(one, tiny_input_ids(2, length)) for one in (model, expected))
            if family.tolerance:
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
            else:
                assert torch.equal(found, wanted)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if dtype == torch.float32:
        assert torch.equal(model.generate(tiny_input_ids(), **options), expected.generate(tiny_input_ids(), **options))
    assert model.config.gate_scale == 2.0
    assert load_file(next(target.glob("*.safetensors")))  # safetensors' own reader accepts what was written


@pytest.mark.parametrize("case", CASES)
def test_layer_by_layer_as_whole(tmp_path, target, case):
    source = tmp_path / "source"
    stock(case).to(torch.bfloat16).save_pretrained(source)
    plan = convert_checkpoint(source, target, verify="headers").plan
    whole, layers = (compare_models(plan, target, layer_by_layer) for layer_by_layer in (False, True))
    assert (whole.method, layers.method) == ("whole models", "layer by layer")
    assert whole.logits == 0 and layers.logits is None
    for comparison in (whole, layers):
        assert [layer.layer for layer in comparison.layers] == list(range(LAYERS))
        assert comparison.dtype == "bfloat16" and len(set(comparison.lengths)) >= 2
    # The source's own outputs: each layer got what the one before gave.
    for one, other in zip(whole.layers, layers.layers, strict=True):
        assert one.magnitude == other.magnitude


@pytest.mark.parametrize("layer_by_layer", [False, True], ids=["whole", "layer_by_layer"])
@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("llama", "model.layers.1.self_attn.g_proj.weight"),
        ("qwen3_moe", "model.layers.2.mlp.experts.3.down_proj.weight"),
        ("mixtral", "model.norm.weight"),
        ("phi3", "model.layers.0.self_attn.k_proj.weight"),
        ("llama", "model.embed_tokens.weight"),
    ],
)
def test_a_changed_number_is_found(tmp_path, target, case, name, layer_by_layer):
    source = tmp_path / "source"
    stock(case).save_pretrained(source)
    plan = convert_checkpoint(source, target, verify="headers").plan
    path = target / plan.weight_map[name]
    tensors = load_file(path)
    tensors[name] += 0.01
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ConversionError, match="differ from the source's"):
        compare_models(plan, target, layer_by_layer)


def test_large_models_are_compared_layer_by_layer(tmp_path, target, monkeypatch):
    source = tmp_path / "source"
    stock("qwen3").save_pretrained(source)
    memory = type("Memory", (), {"available": 1000})
    monkeypatch.setattr("gated_attention.conversion.logits.psutil.virtual_memory", lambda: memory)
    result = convert_checkpoint(source, target)
    assert result.comparison.method == "layer by layer"
    assert result.outputs_equal and result.logits_equal is None
    assert convert_checkpoint(source, target, layer_by_layer=False, overwrite=True).logits_equal
    assert "every layer's output equal to the source's, bit for bit in float32" in result.checked


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("layer_by_layer", [False, True], ids=["whole", "layer_by_layer"])
def test_a_copy_that_went_wrong_is_found(tmp_path, target, monkeypatch, name, layer_by_layer):
    """Also in a row of the embedding that no token of the comparison has, and in a head that did not run."""
    source = tmp_path / "source"
    stock("llama").save_pretrained(source)
    real_copyfile = shutil.copyfile

    def copy_with_an_error(path, destination):
        real_copyfile(path, destination)
        if str(destination).endswith(".safetensors"):
            tensors = load_file(destination)
            tensors[name][0, 0] += (
                1  # the comparison's tokens begin at 0, too: any row will do where hashes are compared
            )
            save_file(tensors, destination, metadata={"format": "pt"})

    monkeypatch.setattr(shutil, "copyfile", copy_with_an_error)
    with pytest.raises(ConversionError, match="differ"):
        convert_checkpoint(source, target, layer_by_layer=layer_by_layer)
    assert not target.exists()


def test_a_difference_is_said_in_units_in_the_last_place():
    with pytest.raises(ConversionError, match=r"by up to 0.0078125, 1 units in the last place"):
        difference(
            "logits", torch.tensor([1.0078125], dtype=torch.bfloat16), torch.tensor([1.0], dtype=torch.bfloat16)
        )
    nan = torch.tensor([float("nan"), 1.0])
    assert difference("logits", nan, nan) == (0.0, 0, 1.0)


def test_smollm3_may_list_more_layers_than_it_has(tmp_path, target):
    source = tmp_path / "source"
    stock("smollm3").save_pretrained(source)
    edit_config(source, no_rope_layers=[1, 0, 1, 1, 0])
    assert convert_checkpoint(source, target).logits_equal


def test_ulps_are_counted_between_neighbours():
    one = torch.tensor([1.0, -1.0, 2.0, 0.0], dtype=torch.bfloat16)
    next_ones = torch.tensor([1.0078125, -1.0, 2.0, 0.0], dtype=torch.bfloat16)
    assert (ulp_distance(one, one), ulp_distance(one, next_ones)) == (0, 1)
    assert ulp_distance(torch.tensor([1.0, 1e-30]), torch.tensor([1.0, 2e-30])) == 0  # tiny beside the largest
    above, below = torch.tensor([1.0]), torch.tensor([1.0])
    assert ulp_distance(torch.nextafter(above, above + 1), torch.nextafter(below, below - 1)) == 2


def test_every_family_that_gets_gates_is_tested():
    tested = {stock(case).config.model_type for case in CASES}
    assert tested == {name for name, family in FAMILIES.items() if family.gates is None}


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe"])
def test_saving_back_gives_one_tensor_an_expert(tmp_path, target, case):
    """Case 2: every expert arrives, and leaves again."""
    source = tmp_path / "source"
    stock(case).save_pretrained(source)
    convert_checkpoint(source, target)
    model, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    model.save_pretrained(tmp_path / "again")
    converted = {name for path in target.glob("*.safetensors") for name in load_file(path)}
    assert set(load_file(tmp_path / "again" / "model.safetensors")) == converted
    assert sum(".experts." in name for name in converted) == LAYERS * 4 * 3


def test_what_only_training_has_is_said(tmp_path, target):
    source = tmp_path / "source"
    stock("phi3", resid_pdrop=0.1).save_pretrained(source)
    result = convert_checkpoint(source, target)
    assert any("resid_pdrop 0.1" in note and "training" in note for note in result.plan.notes)


def test_fused_projection_of_another_size_is_refused(tmp_path, target):
    source = tmp_path / "source"
    stock("phi3").save_pretrained(source)
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.1.self_attn.qkv_proj.weight"
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConversionError, match=r"layers\.1\.self_attn\.qkv_proj\.weight .* 79 rows, the config implies 80"
    ):
        convert_checkpoint(source, target)
    assert not target.exists()


@pytest.mark.parametrize("model_type", REFUSED_FAMILIES)
def test_families_that_do_not_fit_are_refused_with_the_reason(tmp_path, target, model_type):
    source = tmp_path / "source"
    stock("llama", attention_bias=False, mlp_bias=False).save_pretrained(source)
    edit_config(source, model_type=model_type)
    with pytest.raises(ConversionError) as error:
        convert_checkpoint(source, target)
    assert REFUSED_FAMILIES[model_type] in str(error.value)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("mistral_window", ["sliding_window 5", "slides out of sight"]),
        ("qwen3_moe", ["llama, mistral, qwen3", "qwen3_moe", "gated-attention convert"]),
        ("phi3", ["llama, mistral, qwen3", "phi3"]),
    ],
)
def test_sink_transfer_says_what_it_is_not_made_for(tmp_path, case, words):
    source = tmp_path / "source"
    stock(case).save_pretrained(source)
    with pytest.raises(ConversionError) as error:
        predict_transfer(source, "text")
    for word in words:
        assert word in str(error.value)


# ---- the cases that any family can meet

BASE = [name for name, family in FAMILIES.items() if family.gates is None]


def assert_converts(source, target):
    result = convert_checkpoint(source, target)
    assert result.logits_equal
    model, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


@pytest.mark.parametrize("case", BASE)
def test_tied_head_stays_tied(tmp_path, target, case):
    """Case 4: no head on disk."""
    source = tmp_path / "source"
    stock(case, tie_word_embeddings=True).save_pretrained(source)
    assert "lm_head.weight" not in load_file(source / "model.safetensors")
    model = assert_converts(source, target)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("case", BASE)
def test_untied_head_that_is_missing_is_refused(tmp_path, target, case):
    """Case 5."""
    source = tmp_path / "source"
    stock(case, tie_word_embeddings=False).save_pretrained(source)
    edit_tensors(source, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ConversionError, match=r"lm_head\.weight is missing.*tie_word_embeddings false"):
        convert_checkpoint(source, target)


@pytest.mark.parametrize("case", BASE)
def test_another_head_on_disk_than_a_tied_one_is_kept(tmp_path, target, case):
    """Case 6: the function is that of the source as transformers loads it."""
    source = tmp_path / "source"
    stock(case, tie_word_embeddings=False).save_pretrained(source)
    edit_config(source, tie_word_embeddings=True)
    model = assert_converts(source, target)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize("heads", [1, 4], ids=["one_key_head", "a_key_head_for_each"])
@pytest.mark.parametrize("case", BASE)
def test_numbers_of_key_heads(tmp_path, target, case, heads):
    """Case 9."""
    source = tmp_path / "source"
    stock(case, num_key_value_heads=heads).save_pretrained(source)
    assert assert_converts(source, target).config.num_key_value_heads == heads


@pytest.mark.parametrize("case", BASE)
def test_rope_base_in_the_old_form(tmp_path, target, case):
    """Case 11."""
    source = tmp_path / "source"
    stock(case).save_pretrained(source)
    config = json.loads((source / "config.json").read_text())
    del config["rope_parameters"]
    (source / "config.json").write_text(json.dumps(config | {"rope_theta": 77.0, "rope_scaling": None}))
    assert assert_converts(source, target).config.rope_parameters["rope_theta"] == 77.0


@pytest.mark.parametrize("case", BASE)
def test_rope_frequencies_of_old_checkpoints_are_passed_over(tmp_path, target, case):
    """Case 22."""
    source = tmp_path / "source"
    stock(case).save_pretrained(source)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(source, lambda tensors: tensors.update({name: torch.ones(4)}))
    model = assert_converts(source, target)
    assert name not in model.state_dict()


@pytest.mark.parametrize("part", ["o_proj", "input_layernorm"])
@pytest.mark.parametrize("case", BASE)
def test_missing_tensors_are_refused_by_name(tmp_path, target, case, part):
    source = tmp_path / "source"
    stock(case).save_pretrained(source)
    names = [
        name
        for name in load_file(source / "model.safetensors")
        if f"layers.1.{part}" in name or f".1.self_attn.{part}" in name
    ]
    edit_tensors(source, lambda tensors: [tensors.pop(name) for name in names])
    with pytest.raises(ConversionError, match=rf"layers\.1\..*{part}\.weight is missing"):
        convert_checkpoint(source, target)
    assert names and not target.exists()


@pytest.mark.parametrize("case", BASE)
def test_a_missing_gate_is_an_error_on_loading(tmp_path, target, case):
    """Case 3."""
    source = tmp_path / "source"
    stock(case).save_pretrained(source)
    plan = convert_checkpoint(source, target, verify="headers").plan
    path = target / plan.new_shard
    tensors = load_file(path)
    del tensors["model.layers.2.self_attn.g_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    index = json.loads((target / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.layers.2.self_attn.g_proj.weight"]
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"layers\.2\.self_attn\.g_proj\.weight"):
        AutoModelForCausalLM.from_pretrained(target)


@pytest.mark.parametrize("case", BASE)
def test_quantised_sources_are_refused(tmp_path, target, case):
    """Case 8: with its quantization_config, and without it but with numbers that are no plain floats."""
    source = tmp_path / "source"
    stock(case).save_pretrained(source)
    edit_config(source, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ConversionError, match=r"quantised \(fp8\); dequantise it first"):
        convert_checkpoint(source, target)
    edit_config(source, quantization_config=None)
    name = "model.layers.0.self_attn.o_proj.weight"
    edit_tensors(source, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(ConversionError, match=r"o_proj\.weight has the format F8_E4M3"):
        convert_checkpoint(source, target)
