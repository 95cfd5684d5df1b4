"""What cannot be converted is refused with what was found, where, and the way out; nothing is written, nothing is lost."""

import json
import re

import pytest
import torch
from conftest import edit_config, edit_tensors, save_source, tiny_gated, tiny_llama, tree_hashes

from gated_attention import GatedAttentionForCausalLM, convert_checkpoint
from gated_attention.conversion import ConversionError


def assert_refused(source, target, *words, **options):
    before = tree_hashes(source.parent)
    with pytest.raises(ConversionError) as error:
        convert_checkpoint(source, target, **options)
    for word in words:
        assert re.search(word, str(error.value)), f"{word!r} not in: {error.value}"
    assert tree_hashes(source.parent) == before


def unsupported_model_type(source):
    edit_config(source, model_type="gpt2", architectures=["GPT2LMHeadModel"])


def another_head(source):
    edit_config(source, architectures=["LlamaForSequenceClassification"])


def already_gated_config(source):
    tiny_gated().save_pretrained(source)


def already_gated_tensors(source):
    edit_tensors(
        source / "model.safetensors",
        lambda tensors: tensors.update({"model.layers.0.self_attn.g_proj.weight": torch.zeros(4, 32)}),
    )


def untied_without_head(source):
    edit_tensors(source / "model.safetensors", lambda tensors: tensors.pop("lm_head.weight"))


def missing_layer_tensor(source):
    edit_tensors(source / "model.safetensors", lambda tensors: tensors.pop("model.layers.1.self_attn.q_proj.weight"))


def config_of_another_model(source):
    edit_config(source, intermediate_size=40)


def quantised_by_config(source):
    edit_config(source, quantization_config={"quant_method": "fp8"})


def quantised_by_tensors(source):
    name = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(
        source / "model.safetensors", lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)})
    )


def packed_int4_without_config(source):
    name = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(source / "model.safetensors", lambda tensors: tensors.update({name: torch.zeros(4, 4).int()}))


def truncated(source):
    content = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(content[: len(content) // 2])


def truncated_header(source):
    (source / "model.safetensors").write_bytes(b"\x10\x00\x00")


def no_weights(source):
    (source / "model.safetensors").unlink()


def no_config(source):
    (source / "config.json").unlink()


def broken_config(source):
    (source / "config.json").write_text('{"model_type": "llama",')


def invalid_config(source):
    edit_config(source, hidden_size="large")


def unknown_activation(source):
    edit_config(source, hidden_act="nosuch")


def unknown_rope(source):
    edit_config(source, rope_parameters={"rope_type": "zzz", "rope_theta": 1e4})


def heads_that_do_not_divide(source):
    edit_config(source, num_key_value_heads=3)


def unknown_dtype(source):
    edit_config(source, dtype="floatish")


def quantised_by_a_word(source):
    edit_config(source, quantization_config="fp8")


def git_lfs_pointer(source):
    (source / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")


def only_a_variant(source):
    (source / "model.safetensors").rename(source / "model.fp16.safetensors")


def link_to_nothing(source):
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.json").symlink_to(source / "not" / "there")


def integers(source):
    edit_tensors(source / "model.safetensors", lambda tensors: tensors.update({"model.position_ids": torch.arange(3)}))


def weights_of_nan(source):
    edit_tensors(
        source / "model.safetensors",
        lambda tensors: tensors.update({"model.norm.weight": torch.full((32,), torch.nan)}),
    )


def adapter_beside_the_weights(source):
    (source / "adapter_config.json").write_text('{"peft_type": "LORA"}')


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (unsupported_model_type, ["config.json", "model_type 'gpt2'", "supported: granite, lfm3, llama, mistral"]),
        (another_head, ["architectures", "LlamaForCausalLM", "LlamaForSequenceClassification"]),
        (already_gated_config, ["already has gates", "gated_attention"]),
        (already_gated_tensors, ["already has gates", r"layers\.0\.self_attn\.g_proj\.weight"]),
        (untied_without_head, [r"lm_head\.weight is missing", "not tied"]),
        (missing_layer_tensor, [r"model\.layers\.1\.self_attn\.q_proj\.weight is missing"]),
        (config_of_another_model, [r"mlp\.down_proj\.weight has shape \(32, 48\), the config implies \(32, 40\)"]),
        (quantised_by_config, ["quantised", "fp8", "dequantise"]),
        (quantised_by_tensors, [r"model\.safetensors", r"up_proj\.weight", "F8_E4M3", "dequantise"]),
        (packed_int4_without_config, [r"up_proj\.weight", "I32", "dequantise"]),
        (truncated, [r"model\.safetensors", "damaged or cut short"]),
        (truncated_header, [r"model\.safetensors", "damaged or cut short"]),
        (no_weights, [r"neither model\.safetensors nor"]),
        (no_config, [r"no config\.json"]),
        (broken_config, [r"config\.json is not valid JSON"]),
        (invalid_config, [r"config\.json", "hidden_size"]),
        (unknown_activation, [r"config\.json", "hidden_act", "nosuch"]),
        (unknown_rope, [r"config\.json", "rope", "zzz"]),
        (heads_that_do_not_divide, [r"config\.json", "num_key_value_heads"]),
        (unknown_dtype, [r"config\.json", "floatish"]),
        (quantised_by_a_word, ["quantised", "fp8"]),
        (git_lfs_pointer, [r"model\.safetensors", "git lfs pull"]),
        (only_a_variant, [r"neither model\.safetensors", r"model\.fp16\.safetensors"]),
        (link_to_nothing, [r"tokenizer\.json", "link to nothing"]),
        (integers, ["position_ids", "I64", "floating point"]),
        (weights_of_nan, ["NaN", "--verify headers"]),
        (adapter_beside_the_weights, [r"adapter_config\.json", "merge"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_source_is_refused(source, target, damage, words):
    damage(source)
    assert_refused(source, target, *words)


def index_names_a_tensor_its_shard_lacks(source, index):
    index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = min(index["weight_map"].values())


def shard_holds_a_tensor_the_index_lacks(source, index):
    del index["weight_map"]["model.layers.0.mlp.up_proj.weight"]


def metadata_is_a_list(source, index):
    index["metadata"] = []


def file_names_are_numbers(source, index):
    index["weight_map"]["model.norm.weight"] = 3


def both_at_once(source, index):
    index["weight_map"]["model.extra.weight"] = index["weight_map"].pop("model.norm.weight")


def shard_is_missing(source, index):
    (source / max(index["weight_map"].values())).unlink()


def index_leads_out_of_the_folder(source, index):
    index["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (index_names_a_tensor_its_shard_lacks, [r"index places model\.layers\.9", "does not hold it"]),
        (shard_holds_a_tensor_the_index_lacks, [r"holds model\.layers\.0\.mlp\.up_proj\.weight", "index does not"]),
        (metadata_is_a_list, ["metadata must be an object"]),
        (file_names_are_numbers, ["must give a file name"]),
        (both_at_once, [r"model\.extra\.weight", r"model\.norm\.weight"]),
        (shard_is_missing, ["is missing", "fetch it again"]),
        (index_leads_out_of_the_folder, [r"elsewhere\.safetensors", "in the folder itself"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_index_and_shards_must_agree(sharded_source, target, damage, words):
    index_file = sharded_source / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    damage(sharded_source, index)
    index_file.write_text(json.dumps(index))
    assert_refused(sharded_source, target, *words)


def test_older_checkpoint_in_the_target_is_neither_mixed_nor_lost(source, target):
    """Case 1: an older single-file or differently sharded checkpoint lies in the output folder."""
    save_source(target, tiny_llama(seed=9), sharded=True)
    assert_refused(source, target, "not empty", "--overwrite")


def test_overwrite_spares_a_folder_that_holds_no_model(source, target):
    target.mkdir()
    (target / "thesis.tex").write_text("years of work")
    assert_refused(source, target, "does not look like a model", overwrite=True)


@pytest.mark.parametrize(
    "content",
    [
        {"config.json": '{"port": 80}'},
        {"config.json": '{"model_type": "llama"}'},
        {"config.json": "[1]", "a.bin": "x"},
    ],
    ids=["another_programs_config", "no_weights", "no_object"],
)
def test_overwrite_spares_what_only_resembles_a_model(source, target, content):
    target.mkdir()
    for name, text in content.items():
        (target / name).write_text(text)
    assert_refused(source, target, "does not look like a model", overwrite=True)


def test_overwrite_spares_a_git_repository(source, target):
    save_source(target, tiny_llama())
    (target / ".git").mkdir()
    (target / ".git" / "HEAD").write_text("ref: refs/heads/main")
    assert_refused(source, target, "git repository", overwrite=True)


@pytest.mark.parametrize("name", [".target.partial", ".target.replaced"])
def test_source_under_a_name_that_is_used_meanwhile(source, target, name):
    source = source.rename(source.parent / name)
    assert_refused(source, target, "rename it")


def test_target_below_a_file(source, tmp_path):
    (tmp_path / "file").write_text("")
    assert_refused(source, tmp_path / "file" / "target", "is a file")


@pytest.mark.parametrize(
    ("place", "word"),
    [
        (lambda source: source, "source itself"),
        (lambda source: source / "gated", "within each other"),
        (lambda source: source.parent, "within each other"),
    ],
    ids=["the_source", "inside_the_source", "around_the_source"],
)
@pytest.mark.parametrize("overwrite", [False, True], ids=["", "overwrite"])
def test_target_must_lie_apart_from_the_source(source, place, word, overwrite):
    assert_refused(source, place(source), word, overwrite=overwrite)


def test_target_that_is_a_link_to_the_source(source, target):
    target.symlink_to(source)
    assert_refused(source, target, "source itself", overwrite=True)


def test_target_that_is_a_link_elsewhere_or_a_file(source, target, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target.symlink_to(tmp_path / "elsewhere")
    assert_refused(source, target, "symbolic link")
    target.unlink()
    target.write_text("a file")
    assert_refused(source, target, "is a file")


@pytest.mark.parametrize("field", ["granularity", "link", "verify", "gate_bias", "overwrite"])
def test_unknown_option_values(source, target, field):
    assert_refused(source, target, field, "nonsense", **{field: "nonsense"})


def test_gate_missing_from_a_gated_checkpoint_is_an_error_on_loading(source, target):
    """Case 3: a hard error that names the tensor, not a random gate."""
    convert_checkpoint(source, target)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    name = "model.layers.1.self_attn.g_proj.weight"
    shard = index["weight_map"].pop(name)
    edit_tensors(target / shard, lambda tensors: tensors.pop(name))
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=re.escape(name)):
        GatedAttentionForCausalLM.from_pretrained(target)


def test_ungated_checkpoint_loaded_as_gated_points_to_convert(source):
    with pytest.raises(ValueError, match="gated-attention convert"):
        GatedAttentionForCausalLM.from_pretrained(source)


def test_gate_of_another_shape_is_an_error_even_if_mismatches_are_ignored(source, target):
    convert_checkpoint(source, target, granularity="elementwise")
    edit_config(target, gate_granularity="headwise")
    with pytest.raises(ValueError, match="g_proj"):
        GatedAttentionForCausalLM.from_pretrained(target, ignore_mismatched_sizes=True)
