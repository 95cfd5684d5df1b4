"""Gates that are the identity can be taken off again: what comes back is the source."""

import json
import re

import pytest
import torch
from conftest import (
    edit_config,
    edit_tensors,
    logits_of,
    save_source,
    tiny_gated,
    tiny_input_ids,
    tiny_llama,
    tree_hashes,
)
from safetensors.torch import load_file
from test_families import CASES, stock
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from typer.testing import CliRunner

from gated_attention import GatedAttentionForCausalLM, convert_checkpoint, strip_checkpoint
from gated_attention.cli import app
from gated_attention.conversion import FAMILIES, ConversionError
from gated_attention.conversion.certificate import CERTIFICATE_FILE


def weights(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_source_comes_back(tmp_path, target, case, dtype):
    source = tmp_path / "source"
    stock(case).to(dtype).save_pretrained(source, max_shard_size="30KB")
    convert_checkpoint(source, target, granularity="elementwise", gate_bias=True)
    before = tree_hashes(target)
    result = strip_checkpoint(target, tmp_path / "back")
    assert tree_hashes(target) == before
    # Byte for byte, those that were rewritten for the gates included.
    assert weights(tmp_path / "back") == weights(source)
    assert result.hashes_match == len(weights(source)) > 1
    assert result.rounded == {}
    found, expected = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "back", source))
    assert type(found) is type(expected)
    for length in (4, 24):
        assert torch.equal(logits_of(found, tiny_input_ids(2, length)), logits_of(expected, tiny_input_ids(2, length)))
    index = "model.safetensors.index.json"
    maps = [json.loads((folder / index).read_text())["weight_map"] for folder in (tmp_path / "back", source)]
    assert maps[0] == maps[1]
    files = {path.name for path in (tmp_path / "back").iterdir()}
    assert files == {path.name for path in source.iterdir()}


@pytest.mark.parametrize("case", ["llama", "qwen3_windows", "mixtral", "phi3"])
def test_without_a_certificate_the_family_is_found(tmp_path, target, case):
    """A model that was loaded and saved has no certificate; what it computes names a family."""
    source = tmp_path / "source"
    stock(case).save_pretrained(source)
    convert_checkpoint(source, tmp_path / "converted", verify="headers")
    AutoModelForCausalLM.from_pretrained(tmp_path / "converted").save_pretrained(target)
    assert not (target / CERTIFICATE_FILE).exists()
    result = strip_checkpoint(target, tmp_path / "back")
    assert result.hashes_match is None
    found, expected = (logits_of(AutoModelForCausalLM.from_pretrained(one)) for one in (tmp_path / "back", source))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    if case != "phi3":  # which is a Llama with other names
        assert result.plan.family.model_type == json.loads((source / "config.json").read_text())["model_type"]


def test_other_files_come_back(source, target, tmp_path):
    convert_checkpoint(source, target)
    strip_checkpoint(target, tmp_path / "back")
    before, after = tree_hashes(source), tree_hashes(tmp_path / "back")
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} <= {"config.json"}
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "back")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("link", ["copy", "hard"])
def test_shards_may_be_linked(sharded_source, target, tmp_path, link):
    convert_checkpoint(sharded_source, target)
    strip_checkpoint(target, tmp_path / "back", link=link)
    inodes = {path.stat().st_ino for path in target.glob("*.safetensors")}
    for path in (tmp_path / "back").glob("*.safetensors"):
        assert (path.stat().st_ino in inodes) == (link == "hard")


def test_gates_among_the_other_tensors(source, target, tmp_path):
    """Saved by transformers, gates and weights share their files."""
    convert_checkpoint(source, tmp_path / "converted")
    AutoModelForCausalLM.from_pretrained(tmp_path / "converted").save_pretrained(target)
    assert len(list(target.glob("*.safetensors"))) == 1
    result = strip_checkpoint(target, tmp_path / "back")
    assert result.comparison.saved.equal
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == load_file(source / "model.safetensors").keys()


def test_models_without_gates(tmp_path, target):
    model = tiny_gated(gate_positions=[], qk_norm=True)
    model.save_pretrained(tmp_path / "source")
    result = strip_checkpoint(tmp_path / "source", target)
    assert result.plan.family.model_type == "qwen3"
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(target)), logits_of(model))


def test_a_family_whose_class_refuses_the_shape_is_passed_over(tmp_path, target):
    """Llama's config wants the hidden size to be a multiple of the heads; Mistral's does not."""
    model = tiny_gated(gate_positions=[], num_attention_heads=3, num_key_value_heads=3, head_dim=8)
    model.save_pretrained(tmp_path / "source")
    result = strip_checkpoint(tmp_path / "source", target)
    assert result.plan.family.model_type == "mistral" and result.comparison.saved.equal


def test_a_family_that_turns_all_channels_is_passed_over(tmp_path, target):
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.4}
    model = tiny_gated(gate_positions=[], hidden_size=40, rope_parameters=rope, head_dim=10)
    model.save_pretrained(tmp_path / "source")
    result = strip_checkpoint(tmp_path / "source", target)
    assert result.plan.family.model_type == "phi3" and result.comparison.saved.relative < 1e-5


def trained(folder):
    path = sorted(folder.glob("*.safetensors"))[-1]
    edit_tensors(path, lambda tensors: tensors["model.layers.1.self_attn.g_proj.weight"][0].add_(1e-3))


def another_scale(folder):
    edit_config(folder, gate_scale=1.0)


def without_rope(folder):
    edit_config(folder, no_rope_layers=[1, 1, 0], qk_norm=False, residual_multiplier=0.5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (trained, ["not the identity", "not zero", "gated-attention export"]),
        (another_scale, ["not the identity", "`gate_scale` is 1.0"]),
        (without_rope, ["no class of transformers", "nearest is", "`residual_multiplier` is 0.5|no_rope_layers"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_cannot_be_taken_off_is_refused(source, target, tmp_path, change, words):
    convert_checkpoint(source, target)
    change(target)
    before = tree_hashes(tmp_path)
    with pytest.raises(ConversionError) as error:
        strip_checkpoint(target, tmp_path / "back")
    assert all(re.search(word, str(error.value)) for word in words), str(error.value)
    assert tree_hashes(tmp_path) == before


@pytest.mark.parametrize("init", ["normal", "open", "zeros"])
def test_gates_that_began_otherwise_are_not_the_identity(source, target, tmp_path, init):
    convert_checkpoint(source, target, init=init, verify="headers")
    with pytest.raises(ConversionError, match="not the identity"):
        strip_checkpoint(target, tmp_path / "back")


def test_foreign_and_half_written_models_are_refused(source, target, tmp_path):
    with pytest.raises(ConversionError, match="model_type must be 'gated_attention', got 'llama'"):
        strip_checkpoint(source, target)
    convert_checkpoint(source, target)
    edit_tensors(
        target / "model-00002-of-00002.safetensors",
        lambda tensors: tensors.pop("model.layers.1.self_attn.g_proj.weight"),
    )
    with pytest.raises(ConversionError, match=r"layers\.1\.self_attn\.g_proj\.weight"):
        strip_checkpoint(target, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_what_the_certificate_names_is_said_where_it_no_longer_fits(tmp_path, target):
    source = save_source(tmp_path / "source", stock("mistral_window"), tokenizer=False)
    convert_checkpoint(source, target)
    edit_config(target, layer_types=["full_attention"] * 3, sliding_window=None)
    assert strip_checkpoint(target, tmp_path / "back").plan.family.model_type == "mistral"
    edit_config(target, layer_types=["full_attention", "sliding_attention", "full_attention"], sliding_window=5)
    result = strip_checkpoint(target, tmp_path / "other")
    assert result.plan.family.model_type != "mistral" and FAMILIES[result.plan.family.model_type].gates is None
    assert any("it was mistral" in note and "one kind of layer" in note for note in result.plan.notes)


def test_command(source, target, tmp_path):
    convert_checkpoint(source, target)

    def run(*arguments):
        return CliRunner().invoke(app, ["strip", str(target), str(tmp_path / "back"), *arguments])

    dry = run("--dry-run")
    assert dry.exit_code == 0 and "LlamaForCausalLM" in dry.output and not (tmp_path / "back").exists()
    result = run()
    assert result.exit_code == 0, result.output
    assert "equal bit for bit" in result.output
    assert "1 of 1 weight files are the converted source's, byte for byte" in result.output
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "back")) is LlamaForCausalLM
    again = run()
    assert again.exit_code == 1 and "not empty" in again.output


def test_round_trip_of_a_changed_model(tmp_path, target):
    """The other way about: gates off, the weights trained, gates on again."""
    model = tiny_llama()
    source = save_source(tmp_path / "source", model, tokenizer=False)
    convert_checkpoint(source, target)
    strip_checkpoint(target, tmp_path / "back")
    edit_tensors(tmp_path / "back", lambda tensors: tensors["model.norm.weight"].mul_(2))
    assert convert_checkpoint(tmp_path / "back", target, overwrite=True).logits_equal
    assert type(AutoModelForCausalLM.from_pretrained(target)) is GatedAttentionForCausalLM
