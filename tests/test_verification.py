"""A conversion can be verified again at any time, from its certificate and its source; what was changed since is found and named."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import COMMAND, randomise, save_source, tiny_gated, tiny_llama
from safetensors.torch import load_file, save_file
from test_families import stock
from test_layouts import REFERENCE
from test_layouts import stock as gated_stock
from transformers import AutoModelForCausalLM

from gated_attention import convert_checkpoint, verify_conversion
from gated_attention.conversion import ConversionError
from gated_attention.conversion.certificate import CERTIFICATE_FILE
from gated_attention.conversion.journal import hash_file
from gated_attention.hub.push import prepare_upload
from gated_attention.hub.source import read_model_folder


SOURCES = {
    "additive": lambda folder: save_source(folder, tiny_llama(), sharded=True),
    "rewritten": lambda folder: stock("phi3").save_pretrained(folder, max_shard_size="30KB"),
    "gates_of_its_own": lambda folder: randomise(gated_stock("qwen3_next_moe")).save_pretrained(folder),
    "experts": lambda folder: stock("mixtral_window").save_pretrained(folder),
}


@pytest.fixture(params=SOURCES)
def converted(request, tmp_path, target):
    source = tmp_path / "source"
    SOURCES[request.param](source)
    convert_checkpoint(source, target)
    return source, target


def certificate(target) -> dict:
    return json.loads((target / CERTIFICATE_FILE).read_text())


def edit_tensor(folder, name: str, edit) -> Path:
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            edit(tensors[name])
            save_file(tensors, path, metadata={"format": "pt"})
            return path
    raise KeyError(name)


@pytest.mark.parametrize("layer_by_layer", [False, True], ids=["whole", "layer_by_layer"])
def test_a_conversion_verifies(converted, layer_by_layer):
    source, target = converted
    verification = verify_conversion(source, target, layer_by_layer=layer_by_layer)
    kinds = [check.partition(":")[0] for check in verification.checks]
    assert kinds[:5] == ["config", "headers", "certificate", "numbers", "code"] and kinds[-1] == "outputs"
    assert len(verification.comparison.layers) == 3
    if layer_by_layer:
        assert "layer by layer" in verification.checks[-1]


def test_the_certificate_says_what_was_made_of_what(converted):
    source, target = converted
    content = certificate(target)
    assert content["source"]["files"] == {path.name: hash_file(path) for path in source.glob("*.safetensors")}
    files = content["result"]["files"]
    assert files == {name: hash_file(target / name) for name in files}
    assert {path.name for path in (*target.glob("*.safetensors"), *target.glob("*.py"))} <= files.keys()
    assert content["same_function"] and len(content["comparison"]["layers"]) == 3
    assert content["options"]["granularity"] in ("headwise", "elementwise")
    assert str(source.parent) not in (target / CERTIFICATE_FILE).read_text()  # nobody else has that path


@pytest.mark.parametrize("init", ["identity", "normal", "open", "zeros"])
@pytest.mark.parametrize("with_certificate", [True, False], ids=["certificate", "no_certificate"])
def test_every_initialisation_verifies(source, target, init, with_certificate):
    convert_checkpoint(source, target, init=init, granularity="elementwise", verify="headers")
    if not with_certificate:
        (target / CERTIFICATE_FILE).unlink()
    if init == "normal" and not with_certificate:
        # Nothing but the certificate says that gates were meant to be random.
        with pytest.raises(ConversionError, match="trained, or fitted by a transfer"):
            verify_conversion(source, target)
        return
    verification = verify_conversion(source, target)
    assert ("gates set aside" in verification.checks[-1]) == (init != "identity")
    assert not certificate(target)["same_function"] if with_certificate else True


@pytest.mark.parametrize("init", ["normal", "open"])
def test_trained_gates_are_found_that_did_not_begin_as_zeros(source, target, init):
    convert_checkpoint(source, target, init=init, verify="headers")
    end = "bias" if init == "open" else "weight"
    edit_tensor(target, f"model.layers.1.self_attn.g_proj.{end}", lambda tensor: tensor.mul_(1.01))
    with pytest.raises(ConversionError, match=r"layers\.1\.self_attn\.g_proj\.\w+ is not what gates begin with"):
        verify_conversion(source, target, "headers")


def test_zero_gates_with_a_bias_are_not_taken_for_open_ones(source, target):
    convert_checkpoint(source, target, init="zeros", gate_bias=True)
    (target / CERTIFICATE_FILE).unlink()
    assert "1/2" in " ".join(verify_conversion(source, target).checks)


def test_a_result_that_was_saved_again_is_said_to_be_one(converted, tmp_path):
    source, target = converted
    AutoModelForCausalLM.from_pretrained(target).save_pretrained(tmp_path / "again")
    with pytest.raises(ConversionError, match="saved again since"):
        verify_conversion(source, tmp_path / "again")


@pytest.mark.parametrize("change", ["missing_code", "other_code", "auto_map", "unreadable_config"])
def test_code_and_config_are_checked(source, target, change):
    convert_checkpoint(source, target)
    code = target / "modeling_gated_attention.py"
    if change == "missing_code":
        (target / CERTIFICATE_FILE).unlink()
        code.unlink()
        words = "lacks the code modeling_gated_attention.py"
    elif change == "other_code":
        code.write_text(code.read_text() + "# changed")
        words = "modeling_gated_attention.py of the result .* not what the certificate was given for"
    else:
        config = json.loads((target / "config.json").read_text())
        config |= {"auto_map": {}} if change == "auto_map" else {"gate_scale": -1.0}
        (target / "config.json").write_text(json.dumps(config))
        words = "auto_map must be" if change == "auto_map" else r"(?s)is not that of a conversion: .*gate_scale"
    with pytest.raises(ConversionError, match=words):
        verify_conversion(source, target, "headers")


def test_without_a_certificate_the_config_says_what_was_asked_for(converted):
    source, target = converted
    (target / CERTIFICATE_FILE).unlink()
    verification = verify_conversion(source, target)
    assert any(check.startswith("certificate: none") for check in verification.checks)
    assert verification.comparison is not None


def test_the_papers_checkpoints_verify_number_by_number(target):
    convert_checkpoint(REFERENCE / "headwise", target)
    checks = verify_conversion(REFERENCE / "headwise", target).checks
    assert "transformers has no class" in checks[-1]
    assert any(check.startswith("numbers") for check in checks)


def first_layer_norm(tensor):
    tensor[0] += 1


@pytest.mark.parametrize("level", ["headers", "logits"])
@pytest.mark.parametrize("where", ["source", "target"])
def test_a_changed_number_is_found_by_its_hash(converted, where, level):
    source, target = converted
    folder = {"source": source, "target": target}[where]
    path = edit_tensor(folder, "model.layers.0.input_layernorm.weight", first_layer_norm)
    with pytest.raises(ConversionError) as error:
        verify_conversion(source, target, level)
    assert path.name in str(error.value) and "not what the certificate was given for" in str(error.value)


def test_a_changed_number_is_found_without_a_certificate(converted):
    source, target = converted
    (target / CERTIFICATE_FILE).unlink()
    edit_tensor(target, "model.layers.0.input_layernorm.weight", first_layer_norm)
    with pytest.raises(ConversionError, match=r"differs from|as written differs"):
        verify_conversion(source, target, "headers")


def test_trained_gates_are_said_to_be(source, target):
    convert_checkpoint(source, target, verify="headers")
    edit_tensor(target, "model.layers.1.self_attn.g_proj.weight", lambda tensor: tensor.add_(0.1))
    with pytest.raises(
        ConversionError, match=r"layers\.1\.self_attn\.g_proj\.weight is not what gates begin with.*trained"
    ):
        verify_conversion(source, target)


def test_a_changed_config_is_found(source, target):
    convert_checkpoint(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3, "gate_scale": 1.0}))
    with pytest.raises(
        ConversionError, match=r"rms_norm_eps is 0\.001, would be 1e-06.*gate_scale is 1\.0, would be 2\.0"
    ):
        verify_conversion(source, target)


def test_another_source_is_found(tmp_path, source, target):
    convert_checkpoint(source, target)
    other = save_source(tmp_path / "other", tiny_llama(seed=5))
    with pytest.raises(ConversionError, match=r"of the source .* not what the certificate was given for"):
        verify_conversion(other, target)


def test_arguments_the_wrong_way_round(source, target):
    convert_checkpoint(source, target)
    with pytest.raises(ConversionError, match="give the source first and the result second"):
        verify_conversion(target, source)


def test_a_broken_certificate_is_said_to_be_one(source, target):
    convert_checkpoint(source, target)
    content = certificate(target)
    del content["gates"]
    (target / CERTIFICATE_FILE).write_text(json.dumps(content))
    with pytest.raises(ConversionError, match=r"is not the certificate of a conversion"):
        verify_conversion(source, target)


def test_a_certificate_does_not_go_on_to_the_next_conversion(tmp_path, source, target):
    (source / CERTIFICATE_FILE).write_text("{}")
    convert_checkpoint(source, target)
    assert certificate(target)["source"]["model_type"] == "llama"


def test_the_command_says_what_it_checked(source, target):
    convert_checkpoint(source, target)
    process = subprocess.run([COMMAND, "verify", source, target], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    for word in ("config:", "headers:", "certificate:", "numbers:", "gates:", "outputs: equal bit for bit"):
        assert word in process.stdout
    os.truncate(next(target.glob("model-00001*")), 100)
    process = subprocess.run([COMMAND, "verify", source, target], capture_output=True, text=True)
    assert process.returncode == 1 and "Traceback" not in process.stderr
    assert "model-00001-of-00002.safetensors" in process.stderr


# ---- on the way to the Hub


def prepared(folder: Path, tmp_path: Path, license: str | None = None):
    (tmp_path / "upload").mkdir()
    return prepare_upload(read_model_folder(folder), tmp_path / "upload", "someone/gated", license=license)


def test_the_certificate_and_what_it_says_go_into_an_upload(tmp_path, source, target):
    convert_checkpoint(source, target)
    content = certificate(target)
    content["source"] |= {"id": "someone/base", "revision": "0123abcd"}
    (target / CERTIFICATE_FILE).write_text(json.dumps(content))
    upload = prepared(target, tmp_path)
    assert CERTIFICATE_FILE in upload.files()
    card = (tmp_path / "upload" / "README.md").read_text()
    for words in (
        "base_model: someone/base",
        "license: apache-2.0",
        "## How it was made",
        "someone/base at revision `0123abcd`",
        "at most 0 units in the last place",
        "gated-attention verify",
    ):
        assert words in card


@pytest.mark.parametrize("init", ["identity", "zeros"])
def test_the_card_says_what_the_equality_holds_under(tmp_path, target, init):
    source = tmp_path / "source"
    stock("phi3").save_pretrained(source)
    convert_checkpoint(source, target, init=init)
    prepared(target, tmp_path, license="mit")
    card = (tmp_path / "upload" / "README.md").read_text()
    assert "with projections put together that the conversion took apart" in card
    assert ("with its gates set aside, which change what it computes" in card) == (init == "zeros")


def test_a_certificate_of_files_that_no_longer_load_stays_behind(tmp_path, source, target):
    convert_checkpoint(source, target)
    tensors = {name: t.clone() for name, t in AutoModelForCausalLM.from_pretrained(target).state_dict().items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})  # which loaders take first
    upload = prepared(target, tmp_path)
    assert CERTIFICATE_FILE not in upload.files()


def test_a_certificate_that_no_longer_holds_stays_behind(tmp_path, source, target):
    convert_checkpoint(source, target)
    model = randomise(AutoModelForCausalLM.from_pretrained(target))
    model.save_pretrained(target)
    upload = prepared(target, tmp_path)
    assert CERTIFICATE_FILE not in upload.files() and CERTIFICATE_FILE in upload.left_out
    card = (tmp_path / "upload" / "README.md").read_text()
    assert "Weights were changed since" in card and "units in the last place" not in card


def test_models_that_were_never_converted_have_none(tmp_path):
    tiny_gated().save_pretrained(tmp_path / "model")
    upload = prepared(tmp_path / "model", tmp_path, license="mit")
    assert "## How it was made" not in (tmp_path / "upload" / "README.md").read_text()
    assert CERTIFICATE_FILE not in upload.files()
    assert torch.is_tensor(load_file(tmp_path / "upload" / "model.safetensors")["model.norm.weight"])
