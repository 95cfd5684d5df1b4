"""What `save_pretrained` writes loads anywhere: with the package, without it, and over whatever lay in the folder before."""

import json

import pytest
import torch
from conftest import logits_of, save_source, tiny_gated, tiny_input_ids, tiny_llama, tree_hashes
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gated_attention import GatedAttentionForCausalLM, convert_checkpoint
from gated_attention.modeling_gated.bundle import BUNDLED_MODULES


@pytest.mark.parametrize("granularity", ["headwise", "elementwise"])
def test_saved_folder_loads_without_the_package_and_saves_again(tmp_path, without_package, granularity):
    model = tiny_gated(gate_granularity=granularity, gate_bias=True, gate_scale=2.0)
    model.save_pretrained(tmp_path / "saved")
    save_file({"input_ids": tiny_input_ids()}, tmp_path / "inputs.safetensors")
    without_package("""
import transformers
model = AutoModelForCausalLM.from_pretrained("saved", trust_remote_code=True)
base = AutoModel.from_pretrained("saved", trust_remote_code=True)
assert type(base).__name__ == "GatedAttentionModel"
input_ids = load_file("inputs.safetensors")["input_ids"]
with torch.no_grad():
    logits = model(input_ids, use_cache=False).logits
    assert torch.equal(model.lm_head(base(input_ids, use_cache=False).last_hidden_state), logits)
model.generate(input_ids, max_new_tokens=3)
for head in ("SequenceClassification", "TokenClassification", "QuestionAnswering"):
    headed = getattr(transformers, "AutoModelFor" + head).from_pretrained("saved", trust_remote_code=True).eval()
    assert type(headed).__name__ == "GatedAttentionFor" + head
    hidden = headed.model(input_ids, use_cache=False).last_hidden_state
    assert torch.equal(hidden, base(input_ids, use_cache=False).last_hidden_state)
save_file({"logits": logits}, "logits.safetensors")
model.save_pretrained("again")
""")
    assert torch.equal(load_file(tmp_path / "logits.safetensors")["logits"], logits_of(model))
    # A model that was loaded from a bundle saves a complete one: a second stranger can go on from there.
    assert tree_hashes(tmp_path / "again") == tree_hashes(tmp_path / "saved")
    without_package('AutoModelForCausalLM.from_pretrained("again", trust_remote_code=True)')
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), logits_of(model))


def test_converted_folder_loads_without_the_package(source, target, tmp_path, without_package):
    convert_checkpoint(source, target)
    save_file({"input_ids": tiny_input_ids()}, tmp_path / "inputs.safetensors")
    without_package("""
model = AutoModelForCausalLM.from_pretrained("target", trust_remote_code=True)
source = AutoModelForCausalLM.from_pretrained("source")
input_ids = load_file("inputs.safetensors")["input_ids"]
assert torch.equal(model(input_ids).logits, source(input_ids).logits)
""")


def test_without_the_package_and_without_trust_nothing_opens(source, target, without_package):
    """Case 18: never as the source's stock class, which would drop the gates."""
    convert_checkpoint(source, target)
    for name in ("AutoConfig", "AutoModel", "AutoModelForCausalLM"):
        process = without_package(f'{name}.from_pretrained("target", trust_remote_code=False)', check=False)
        assert process.returncode != 0
        assert "trust_remote_code" in process.stderr


def test_missing_gate_is_an_error_without_the_package_too(tmp_path, without_package):
    tiny_gated().save_pretrained(tmp_path / "saved")
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    del tensors["model.layers.2.self_attn.g_proj.weight"]
    save_file(tensors, tmp_path / "saved" / "model.safetensors", metadata={"format": "pt"})
    process = without_package('AutoModelForCausalLM.from_pretrained("saved", trust_remote_code=True)', check=False)
    assert process.returncode != 0
    assert "model.layers.2.self_attn.g_proj.weight" in process.stderr


def test_bundle_names_are_distinctive_and_flat(tmp_path):
    (tmp_path / "gate.py").write_text("a user's own module")
    tiny_gated().save_pretrained(tmp_path)
    assert (tmp_path / "gate.py").read_text() == "a user's own module"
    for name in BUNDLED_MODULES.values():
        assert "gated_attention" in name
        assert "from .." not in (tmp_path / f"{name}.py").read_text()


@pytest.mark.parametrize("then", ["single", "sharded"])
@pytest.mark.parametrize("before", ["single", "sharded", "more_shards", "converted", "other_model"])
def test_saving_over_an_older_save_leaves_nothing_of_it(tmp_path, before, then):
    folder = tmp_path / "folder"
    sizes = {"single": "5GB", "sharded": "20KB", "more_shards": "8KB"}
    if before == "converted":
        convert_checkpoint(save_source(tmp_path / "source", sharded=True), folder)
    elif before == "other_model":
        save_source(folder, tiny_llama(seed=3))
    else:
        tiny_gated(seed=3).save_pretrained(folder, max_shard_size=sizes[before])
    model = tiny_gated(seed=4)
    model.save_pretrained(folder, max_shard_size=sizes[then])
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(folder)), logits_of(model))
    weights = {path.name for path in folder.glob("*.safetensors")}
    if then == "single":
        assert weights == {"model.safetensors"}
        assert not (folder / "model.safetensors.index.json").exists()
    else:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert weights == set(index["weight_map"].values())


def test_saving_a_variant_spares_the_main_weights(tmp_path):
    main, half = tiny_gated(seed=1), tiny_gated(seed=2)
    main.save_pretrained(tmp_path)
    half.save_pretrained(tmp_path, variant="fp16", max_shard_size="20KB")
    assert torch.equal(logits_of(GatedAttentionForCausalLM.from_pretrained(tmp_path)), logits_of(main))
    loaded = GatedAttentionForCausalLM.from_pretrained(tmp_path, variant="fp16")
    assert torch.equal(logits_of(loaded), logits_of(half))


def test_arguments_by_position(tmp_path):
    tiny_gated(seed=1).save_pretrained(tmp_path, True, None, False, "5GB", "fp16")
    model = tiny_gated(seed=2)
    model.save_pretrained(tmp_path, True, None, False, "20KB", "fp16")
    assert torch.equal(
        logits_of(GatedAttentionForCausalLM.from_pretrained(tmp_path, variant="fp16")), logits_of(model)
    )


def test_other_processes_of_a_distributed_run_write_nothing(tmp_path):
    tiny_gated().save_pretrained(tmp_path / "saved", is_main_process=False)
    assert not any((tmp_path / "saved").iterdir())
