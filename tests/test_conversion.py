"""A converted checkpoint computes what its source computes, holds what its source holds, and leaves the source as it was."""

import json
import os

import pytest
import torch
from conftest import (
    TINY_SHAPE,
    logits_of,
    randomise,
    save_source,
    tiny_input_ids,
    tiny_llama,
    tiny_tokenizer,
    tree_hashes,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, pipeline

from gated_attention import GatedAttentionForCausalLM, convert_checkpoint
from gated_attention.conversion import ConversionOptions, plan_conversion


def assert_same_function(source, target, dtype="auto"):
    for backend in ("eager", "sdpa"):
        expected = AutoModelForCausalLM.from_pretrained(source, attn_implementation=backend, dtype=dtype)
        model = AutoModelForCausalLM.from_pretrained(target, attn_implementation=backend, dtype=dtype)
        assert type(model) is GatedAttentionForCausalLM
        assert model.dtype == expected.dtype
        assert torch.equal(logits_of(model), logits_of(expected))
    return model


@pytest.mark.parametrize("link", ["copy", "hard"])
@pytest.mark.parametrize("sharded", [False, True], ids=["single_file", "sharded"])
@pytest.mark.parametrize("granularity", ["headwise", "elementwise"])
def test_same_function_and_source_untouched(tmp_path, target, granularity, sharded, link):
    source = save_source(tmp_path / "source", sharded=sharded)
    before = tree_hashes(source)
    result = convert_checkpoint(source, target, granularity=granularity, link=link)
    assert result.logits_equal
    assert_same_function(source, target)
    assert tree_hashes(source) == before
    shards = sorted(target.glob("*.safetensors"))
    assert [shard.name for shard in shards] == [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
    ]
    assert all(os.stat(shard).st_nlink == (2 if link == "hard" else 1) for shard in shards[:-1])
    linked = [path for path in target.iterdir() if path.is_file() and path.stat().st_nlink > 1]
    assert linked == [] if link == "copy" else all(path.suffix == ".safetensors" for path in linked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtype_is_kept(tmp_path, target, dtype):
    source = save_source(tmp_path / "source", dtype=dtype)
    convert_checkpoint(source, target, gate_bias=True)
    assert_same_function(source, target)
    with safe_open(target / "model-00002-of-00002.safetensors", framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {dtype}  # noqa: SIM118


def test_mixed_formats_without_a_dtype_in_the_config(tmp_path, target):
    source = save_source(tmp_path / "source", dtype=torch.bfloat16)
    tensors = load_file(source / "model.safetensors")
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"):
        tensors[name] = tensors[name].float()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    del config["dtype"]
    (source / "config.json").write_text(json.dumps(config))
    convert_checkpoint(source, target, gate_bias=True, granularity="elementwise")
    assert_same_function(source, target)


@pytest.mark.parametrize(
    "overrides",
    [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4, "head_dim": None},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ],
    ids=[
        "attention_bias",
        "mlp_bias",
        "tied",
        "one_kv_head",
        "mha",
        "gelu",
        "rope_linear",
        "rope_llama3",
        "rope_yarn",
    ],
)
def test_llama_options(tmp_path, target, overrides):
    source = save_source(tmp_path / "source", tiny_llama(**overrides))
    convert_checkpoint(source, target)
    model = assert_same_function(source, target)
    expected = LlamaForCausalLM.from_pretrained(source)
    assert torch.equal(model.model.rotary_emb.inv_freq, expected.model.rotary_emb.inv_freq)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == expected.config.tie_word_embeddings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("mistral", {"sliding_window": None}),
        ("qwen3", {}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    ],
    ids=["mistral", "qwen3", "qwen3_biases_tied"],
)
def test_other_families(tmp_path, target, model_type, overrides, dtype):
    config = AutoConfig.for_model(model_type, **TINY_SHAPE, **overrides)
    source = save_source(tmp_path / "source", randomise(AutoModelForCausalLM.from_config(config)), dtype=dtype)
    convert_checkpoint(source, target)
    model = assert_same_function(source, target)
    assert model.config.qk_norm == (model_type == "qwen3")


@pytest.mark.parametrize(
    "written",
    [
        {"rope_theta": 300.0},
        {"rope_theta": 300.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 7.0, "rope_parameters": {"rope_theta": 300.0, "rope_type": "default"}},
        {"head_dim": None, "num_key_value_heads": None, "attention_dropout": None},
        {
            "rope_scaling": {"type": "yarn", "factor": 4.0},
            "original_max_position_embeddings": 16,
            "max_position_embeddings": 64,
        },
    ],
    ids=["theta_only", "theta_and_scaling", "both_forms", "null_fields", "yarn_with_its_length_outside"],
)
@pytest.mark.parametrize("verify", ["logits", "headers"])
def test_old_forms_of_the_config(tmp_path, target, written, verify):
    source = save_source(tmp_path / "source", tiny_llama(head_dim=8, num_key_value_heads=4))
    config = json.loads((source / "config.json").read_text())
    del config["rope_parameters"]
    (source / "config.json").write_text(json.dumps(config | written))
    convert_checkpoint(source, target, verify=verify)
    assert_same_function(source, target)


def test_dtype_that_only_the_index_names(tmp_path, target):
    source = save_source(tmp_path / "source", sharded=True, dtype=torch.bfloat16)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["metadata"]["dtype"] = "float16"
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((source / "config.json").read_text())
    del config["dtype"]
    (source / "config.json").write_text(json.dumps(config))
    convert_checkpoint(source, target)
    assert_same_function(source, target)


def test_tied_config_with_another_head_on_disk(tmp_path, target):
    """Case 6: transformers unties such a model on loading; so does the result."""
    source = save_source(tmp_path / "source", tiny_llama(tie_word_embeddings=True))
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn(TINY_SHAPE["vocab_size"], TINY_SHAPE["hidden_size"])
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    convert_checkpoint(source, target)
    assert_same_function(source, target)


def test_leftover_rope_frequencies_pass_through(source, target):
    """Case 22: linked shards keep the tensors that loaders pass over; nothing is unexpected on loading."""
    tensors = load_file(source / "model.safetensors")
    for layer in range(TINY_SHAPE["num_hidden_layers"]):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.arange(5.0)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    result = convert_checkpoint(source, target, link="hard")
    assert any("inv_freq" in note for note in result.plan.notes)
    _, info = GatedAttentionForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not info["missing_keys"]
    assert_same_function(source, target)


def test_other_files_arrive_as_they_are(source, target):
    """Cases 13 and 14: tokenizer, chat template, licence, images, and a generation config that would not validate."""
    generation = '{"temperature": 0.6, "do_sample": false, "_from_model_config": true}'
    (source / "generation_config.json").write_text(generation)
    convert_checkpoint(source, target)
    names = set(tree_hashes(source)) - {"config.json", "model.safetensors"}
    assert {"LICENSE", "README.md", "images/plot.png", "chat_template.jinja", "tokenizer.json"} <= names
    for name in names:
        assert (target / name).read_bytes() == (source / name).read_bytes(), name
    text = "the gate opens and the sink closes"
    chat = [{"role": "user", "content": text}]
    ours, theirs = AutoTokenizer.from_pretrained(target), AutoTokenizer.from_pretrained(source)
    assert ours(text).input_ids == theirs(text).input_ids
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False)
    assert ours.all_special_tokens == theirs.all_special_tokens


def test_generation_settings_inside_the_config(source, target):
    """Old checkpoints keep them in config.json, where transformers still reads them."""
    (source / "generation_config.json").unlink()
    config = json.loads((source / "config.json").read_text())
    config |= {"max_length": 7, "repetition_penalty": 5.0, "do_sample": True, "temperature": 0.5}
    (source / "config.json").write_text(json.dumps(config))
    convert_checkpoint(source, target)
    expected = LlamaForCausalLM.from_pretrained(source).generation_config
    ours = AutoModelForCausalLM.from_pretrained(target).generation_config
    assert ours.repetition_penalty == 5.0
    assert ours.to_diff_dict() == expected.to_diff_dict()


def test_tokenizer_with_code_of_its_own(source, target):
    (source / "tokenization_own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\nfrom .own_parts import SUFFIX\n\n\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n    suffix = SUFFIX\n"
    )
    (source / "own_parts.py").write_text("SUFFIX = 'own'\n")
    config = json.loads((source / "tokenizer_config.json").read_text())
    config |= {
        "auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]},
        "tokenizer_class": "OwnTokenizer",
    }
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    convert_checkpoint(source, target)
    ours, theirs = (AutoTokenizer.from_pretrained(folder, trust_remote_code=True) for folder in (target, source))
    assert ours.suffix == theirs.suffix == "own"
    assert ours("the gate opens").input_ids == theirs("the gate opens").input_ids


def test_what_is_left_behind_is_said(source, target):
    save_file({"a": torch.zeros(1)}, source / "consolidated.safetensors")
    (source / "onnx").mkdir()
    (source / "onnx" / "model.onnx").write_bytes(b"onnx")
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text("{}")
    result = convert_checkpoint(source, target)
    assert any("consolidated.safetensors" in note for note in result.plan.notes)
    assert (target / "1_Pooling" / "config.json").exists()  # another config than the model's
    assert not (target / "onnx").exists()


def test_chat_template_inside_the_tokenizer_config(source, target):
    (source / "chat_template.jinja").unlink()
    config = json.loads((source / "tokenizer_config.json").read_text())
    template = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
    (source / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    convert_checkpoint(source, target)
    chat = [{"role": "user", "content": "the gate"}]
    assert AutoTokenizer.from_pretrained(target).apply_chat_template(chat, tokenize=False) == "[the gate]"


def test_nothing_of_the_sources_custom_code_is_left(source, target):
    """Case 18: the files say what the model is, and nothing of the source's own `auto_map` is left."""
    config = json.loads((source / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_other.Other", "AutoConfig": "configuration_other.Other"}
    (source / "config.json").write_text(json.dumps(config))
    (source / "modeling_other.py").write_text("raise RuntimeError('must not run')\n")
    result = convert_checkpoint(source, target)
    assert any("modeling_other.py" in note for note in result.plan.notes)
    written = json.loads((target / "config.json").read_text())
    assert written["model_type"] == "gated_attention"
    assert written["architectures"] == ["GatedAttentionForCausalLM"]
    assert all(
        name.split(".")[0] in {"configuration_gated_attention", "modeling_gated_attention"}
        for name in written["auto_map"].values()
    )
    assert not (target / "modeling_other.py").exists()
    assert type(AutoConfig.from_pretrained(target)).__name__ == "GatedAttentionConfig"


def test_source_of_links_into_a_cache(tmp_path, target):
    """Case 15: a Hub cache's snapshot is a folder of links to blobs; the blobs stay as they are."""
    blobs = save_source(tmp_path / "blobs", sharded=True)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    before = tree_hashes(blobs)
    convert_checkpoint(snapshot, target, link="hard")
    assert not any(path.is_symlink() for path in target.rglob("*"))
    model = assert_same_function(snapshot, target)
    model.save_pretrained(target)
    tiny_tokenizer().save_pretrained(target)
    assert tree_hashes(blobs) == before


def test_loading_saving_and_loading_again(source, target, tmp_path):
    convert_checkpoint(source, target)
    model = AutoModelForCausalLM.from_pretrained(target)
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), logits_of(model))


def test_generate_and_pipeline(source, target):
    convert_checkpoint(source, target)
    expected = LlamaForCausalLM.from_pretrained(source).generate(tiny_input_ids(), max_new_tokens=8, do_sample=False)
    model = AutoModelForCausalLM.from_pretrained(target)
    assert torch.equal(model.generate(tiny_input_ids(), max_new_tokens=8, do_sample=False), expected)
    generator = pipeline("text-generation", model=str(target))
    assert generator("the gate", max_new_tokens=4, do_sample=False)[0]["generated_text"].startswith("the gate")


def test_plan_says_what_will_be_written(sharded_source, target):
    plan = plan_conversion(sharded_source, target, ConversionOptions(link="hard", granularity="elementwise"))
    convert_checkpoint(sharded_source, target, plan.options)
    written = sum(path.stat().st_size for path in target.rglob("*") if path.is_file() and path.stat().st_nlink == 1)
    # The plan counts tensors and files, not the headers, the index and the config (a few kB).
    assert 0 <= written - plan.bytes_to_write < 20_000
    assert plan.new_bytes == 3 * 32 * 40 * 4
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == plan.weight_map


def test_index_total_size_counts_every_tensor(sharded_source, target):
    convert_checkpoint(sharded_source, target)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(target)
    assert index["metadata"]["total_size"] == sum(parameter.nbytes for parameter in model.parameters())


def test_overwrite_replaces_the_folder_as_a_whole(source, target):
    convert_checkpoint(source, target, granularity="elementwise")
    (target / "notes.txt").write_text("old")
    convert_checkpoint(source, target, overwrite=True)
    assert not (target / "notes.txt").exists()
    assert AutoConfig.from_pretrained(target).gate_granularity == "headwise"
    assert [path.name for path in target.parent.iterdir() if path.name.startswith(".")] == []
    assert_same_function(source, target)
