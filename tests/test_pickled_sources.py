"""Checkpoints of `torch.save`: converted as safetensors are, opened without running code, refused where that cannot be."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
import torch
from conftest import COMMAND, logits_of, save_source, tiny_input_ids, tiny_llama, tree_hashes
from loopback_hub import LoopbackHub
from safetensors.torch import load_file
from test_families import stock
from transformers import AutoModelForCausalLM

from gated_attention import GatedAttentionForCausalLM, convert_checkpoint, transfer_sinks
from gated_attention.conversion import ConversionError, verify_conversion


def pickle_weights(folder, **options):
    """Replace a folder's safetensors by what `torch.save` writes of the same tensors, as old checkpoints have them."""
    weight_map, total = {}, 0
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        name = path.name.replace("model", "pytorch_model").replace(".safetensors", ".bin")
        torch.save(tensors, folder / name, **options)
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
        path.unlink()
    if (folder / "model.safetensors.index.json").exists():
        (folder / "model.safetensors.index.json").unlink()
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


def tensors_of(folder) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["llama", "qwen2_windows", "phi3", "mixtral", "qwen3_moe"])
def test_converted_as_safetensors_are(tmp_path, target, case, dtype):
    source = tmp_path / "source"
    stock(case).to(dtype).save_pretrained(source, max_shard_size="30KB")
    convert_checkpoint(source, tmp_path / "from_safetensors")
    shards = len(list(source.glob("*.safetensors")))
    pickle_weights(source)
    before = tree_hashes(source)
    result = convert_checkpoint(source, target)
    assert result.logits_equal and result.numbers_equal
    assert tree_hashes(source) == before
    assert len(list(target.glob("*.safetensors"))) == shards + 1 > 2
    assert not any("bin" in path.name for path in target.iterdir())
    found, expected = tensors_of(target), tensors_of(tmp_path / "from_safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    for layer_by_layer in (False, True):
        checks = verify_conversion(source, target, layer_by_layer=layer_by_layer).checks
        assert "bit for bit" in checks[-1] and "certificate" in checks[2]


def test_what_saving_a_state_dict_gives(tmp_path, target):
    """Heads that are the embedding once more, and tensors that are views of larger ones."""
    source = save_source(tmp_path / "source", model := tiny_llama(tie_word_embeddings=True))
    (source / "model.safetensors").unlink()
    tensors = dict(model.state_dict())
    assert "lm_head.weight" in tensors
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = torch.stack([tensors[name].T.contiguous()] * 2)[1].T
    assert not tensors[name].is_contiguous()
    torch.save(tensors, source / "pytorch_model.bin")
    assert convert_checkpoint(source, target).logits_equal
    written = tensors_of(target)
    assert "lm_head.weight" not in written
    assert torch.equal(written[name], model.state_dict()[name])
    assert torch.equal(logits_of(GatedAttentionForCausalLM.from_pretrained(target)), logits_of(model))


def test_untied_head_of_equal_numbers_stays(tmp_path, target):
    source = save_source(tmp_path / "source", model := tiny_llama(tie_word_embeddings=False))
    (source / "model.safetensors").unlink()
    tensors = dict(model.state_dict())
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    torch.save(tensors, source / "pytorch_model.bin")
    assert convert_checkpoint(source, target).logits_equal
    assert torch.equal(tensors_of(target)["lm_head.weight"], tensors["model.embed_tokens.weight"])


def test_safetensors_count_before_pickled_weights(source, target):
    (source / "pytorch_model.bin").write_bytes(b"never opened")
    result = convert_checkpoint(source, target)
    assert result.logits_equal and not result.plan.pieces
    assert any("pytorch_model.bin" in note for note in result.plan.notes)


def test_resumed_with_the_finished_files(tmp_path, target):
    source = pickle_weights(save_source(tmp_path / "source", sharded=True))
    script = f"""
import os, signal
from gated_attention.conversion import write
written = []
def then_die(*args, real=write._tensor_blocks):
    written.append(args)
    if len(written) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args)
write._tensor_blocks = then_die
from gated_attention import convert_checkpoint
convert_checkpoint({str(source)!r}, {str(target)!r})
"""
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode < 0
    assert not target.exists()
    process = subprocess.run([COMMAND, "convert", str(source), str(target)], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "reused   model-00001-of-" in process.stdout and "model-00002-of-" in process.stdout
    assert verify_conversion(source, target).comparison is not None


def test_sinks_are_transferred_from_them(tmp_path, target):
    source = save_source(tmp_path / "source", tiny_llama())
    options = {"tokens": 1024, "length": 32, "bos_share": 1.0}
    text = "the gate opens and the sink closes attention to the first token " * 200
    verdicts = []
    for folder in (source, pickle_weights(shutil.copytree(source, tmp_path / "pickled"))):
        with pytest.raises(ConversionError) as error:
            transfer_sinks(folder, target, text, **options)
        verdicts.append(str(error.value).replace(str(folder), ""))
    assert verdicts[0] == verdicts[1] and "nothing to transfer" in verdicts[0]


class Evil:
    def __reduce__(self):
        return os.system, ("touch opened",)


def holds_code(source):
    torch.save({"model.norm.weight": Evil()}, source / "pytorch_model.bin")


def holds_a_trainer_state(source):
    torch.save({"state_dict": tiny_llama().state_dict(), "step": 3}, source / "pytorch_model.bin")


def holds_a_list(source):
    torch.save([torch.zeros(3)], source / "pytorch_model.bin")


def cut_short(source):
    content = (source / "pytorch_model.bin").read_bytes()
    (source / "pytorch_model.bin").write_bytes(content[: len(content) // 2])


def damaged_inside(source):
    content = bytearray((source / "pytorch_model.bin").read_bytes())
    content[40:400] = bytes(360)
    (source / "pytorch_model.bin").write_bytes(bytes(content))


def rezipped(source, change) -> None:
    """Write the archive anew, each entry as `change` makes it of its name and content."""
    path = source / "pytorch_model.bin"
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            content, compression = change(name, content)
            archive.writestr(name, content, compress_type=compression)


def a_byte_of_the_pickle(source):
    rezipped(
        source,
        lambda name, content: (
            content[:40] + b"\xd7" + content[41:] if name.endswith("data.pkl") else content,
            zipfile.ZIP_STORED,
        ),
    )


def compressed(source):
    rezipped(source, lambda name, content: (content, zipfile.ZIP_DEFLATED))


def a_record_that_is_short(source):
    rezipped(source, lambda name, content: (content[:16] if name.endswith("/data/3") else content, zipfile.ZIP_STORED))


def on_no_device(source):
    tensors = torch.load(source / "pytorch_model.bin")
    tensors["model.norm.weight"] = torch.empty(32, device="meta")
    torch.save(tensors, source / "pytorch_model.bin")


def legacy_format(source):
    tensors = torch.load(source / "pytorch_model.bin")
    torch.save(tensors, source / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def quantised(source):
    tensors = torch.load(source / "pytorch_model.bin")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = torch.quantize_per_tensor(tensors[name], 0.1, 0, torch.qint8)
    torch.save(tensors, source / "pytorch_model.bin")


def integers(source):
    tensors = torch.load(source / "pytorch_model.bin")
    torch.save(tensors | {"model.position_ids": torch.arange(3)}, source / "pytorch_model.bin")


def tensor_missing(source):
    tensors = torch.load(source / "pytorch_model.bin")
    del tensors["model.norm.weight"]
    torch.save(tensors, source / "pytorch_model.bin")


def other_name(source):
    (source / "pytorch_model.bin").rename(source / "consolidated.00.pth")


def git_lfs_pointer(source):
    (source / "pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (holds_code, ["would run code", "never done", "safetensors of this model"]),
        (holds_a_trainer_state, ["found a (OrderedDict|dict) under 'state_dict'", r"`state_dict\(\)` alone"]),
        (holds_a_list, ["must hold a dictionary of tensors, found a list"]),
        (cut_short, ["cut short", "fetch it again"]),
        (damaged_inside, ["damaged", "fetch it again"]),
        (a_byte_of_the_pickle, ["damaged", "fetch it again"]),
        (compressed, ["compressed"]),
        (a_record_that_is_short, ["not as long as its records|damaged"]),
        (on_no_device, [r"model\.norm\.weight", "on meta"]),
        (legacy_format, ["torch before 1.6", "save_pretrained"]),
        (quantised, [r"mlp\.up_proj\.weight", "qint8", "dequantise"]),
        (integers, ["position_ids", "int64", "floating point"]),
        (tensor_missing, [r"model\.norm\.weight is missing"]),
        (other_name, [r"consolidated\.00\.pth", r"pytorch_model\.bin", "save_pretrained"]),
        (git_lfs_pointer, ["git lfs pull"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_cannot_be_read_is_refused(source, target, damage, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    pickle_weights(source)
    damage(source)
    before = tree_hashes(tmp_path)
    with pytest.raises(ConversionError) as error:
        convert_checkpoint(source, target)
    message = str(error.value)
    assert str(source) in message
    for word in words:
        assert re.search(word, message), (word, message)
    assert tree_hashes(tmp_path) == before  # nothing ran, nothing was written


def test_shards_are_never_linked(tmp_path, target):
    source = pickle_weights(save_source(tmp_path / "source"))
    with pytest.raises(ConversionError, match="pickled checkpoint have to be rewritten; got 'hard'"):
        convert_checkpoint(source, target, link="hard")


def test_an_index_that_its_shards_contradict_is_refused(tmp_path, target):
    source = pickle_weights(save_source(tmp_path / "source", sharded=True))
    path = source / "pytorch_model.bin.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = min(index["weight_map"].values())
    path.write_text(json.dumps(index))
    with pytest.raises(ConversionError, match=r"pytorch_model\.bin\.index\.json and the shards disagree.*layers\.9"):
        convert_checkpoint(source, target)


@pytest.mark.parametrize("sharded", [False, True], ids=["one_file", "sharded"])
def test_repositories_without_safetensors_are_sources(tmp_path, target, sharded):
    source = pickle_weights(save_source(tmp_path / "source", sharded=sharded))
    (source / "training_args.bin").write_bytes(b"a pickle")
    with LoopbackHub() as hub:
        client = hub.client_environment(tmp_path / "hf_home")
        script = f"""
from huggingface_hub import HfApi
HfApi().create_repo("someone/old")
HfApi().upload_folder(repo_id="someone/old", folder_path={str(source)!r})
"""
        subprocess.run([sys.executable, "-c", script], env=client, check=True, capture_output=True)
        command = [COMMAND, "convert", "someone/old", str(target)]
        process = subprocess.run(command, env=client, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "bit for bit" in process.stdout
    assert not any(path.name == "training_args.bin" for path in (tmp_path / "hf_home").rglob("*"))
    expected = logits_of(AutoModelForCausalLM.from_pretrained(source), tiny_input_ids())
    assert torch.equal(logits_of(GatedAttentionForCausalLM.from_pretrained(target)), expected)
