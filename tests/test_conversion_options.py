"""How gates begin, how shards get into the result, and sources on the Hub."""

import errno
import os
import subprocess
import sys

import pytest
import torch
from conftest import COMMAND, logits_of, tiny_input_ids, tree_hashes
from loopback_hub import LoopbackHub
from transformers import AutoModelForCausalLM

from gated_attention import convert_checkpoint
from gated_attention.conversion import ConversionError, plan_conversion
from gated_attention.conversion.plan import ConversionOptions


def gates_of(model, **kwargs):
    with torch.no_grad():
        scores = model(tiny_input_ids(), output_gate_scores=True, use_cache=False).gate_scores
    return torch.stack([of_layer.flatten() for of_layer in scores])


@pytest.mark.parametrize("granularity", ["headwise", "elementwise"])
def test_initialisations_begin_as_they_say(source, target, tmp_path, granularity):
    expected = logits_of(AutoModelForCausalLM.from_pretrained(source))
    models = {}
    for init in ("identity", "normal", "open", "zeros"):
        result = convert_checkpoint(source, tmp_path / init, granularity=granularity, init=init)
        # The rest of the model is compared with the gates set aside.
        assert result.outputs_equal
        assert result.logits_equal == (True if init == "identity" else None)
        assert ("gates set aside" in result.checked) == (init != "identity")
        assert init == "identity" or "exactly 1" not in result.plan.describe()
        models[init] = AutoModelForCausalLM.from_pretrained(tmp_path / init)
    gates = {init: gates_of(model) for init, model in models.items()}
    assert torch.equal(gates["identity"], torch.ones_like(gates["identity"]))
    assert torch.equal(logits_of(models["identity"]), expected)
    torch.testing.assert_close(gates["open"], torch.full_like(gates["open"], 0.9820137900))
    assert torch.equal(gates["zeros"], torch.full_like(gates["zeros"], 0.5))
    assert 0.9 < gates["normal"].mean() < 1.1 and gates["normal"].std() > 0.01
    weights = torch.cat([p.detach().flatten() for n, p in models["normal"].named_parameters() if "g_proj" in n])
    assert weights.std() == pytest.approx(0.02, rel=0.2)
    for init in ("normal", "open", "zeros"):
        assert not torch.equal(logits_of(models[init]), expected)
    assert models["open"].config.gate_bias and not models["zeros"].config.gate_bias


def test_normal_gates_depend_on_the_seed_and_the_deviation(source, tmp_path):
    folders = {}
    for name, options in (("one", {}), ("same", {}), ("seed", {"seed": 1}), ("wide", {"init_std": 0.5})):
        convert_checkpoint(source, tmp_path / name, init="normal", **options)
        folders[name] = tree_hashes(tmp_path / name)["model-00002-of-00002.safetensors"]
    assert folders["one"] == folders["same"]
    assert len({folders["one"], folders["seed"], folders["wide"]}) == 3


def test_bias_of_open_gates_is_the_options(source, target):
    convert_checkpoint(source, target, init="open", init_bias=1.0)
    gates = gates_of(AutoModelForCausalLM.from_pretrained(target))
    torch.testing.assert_close(gates, torch.full_like(gates, 0.7310585786))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"init": "random"}, ["init", "identity", "'random'"]),
        ({"init": "normal", "init_std": -1.0}, ["init_std", "0 or more", "-1.0"]),
        ({"init": "open", "init_bias": float("nan")}, ["init_bias", "1000", "nan"]),
        ({"init": "open", "init_bias": 1e6}, ["init_bias", "1000", "1000000.0"]),
        ({"init": "normal", "seed": 2**64}, ["seed", "2**63", str(2**64)]),
        ({"init": "normal", "seed": -1}, ["seed", "0 or more", "-1"]),
        ({"init_std": 0.5}, ["init_std", "'identity'", "'normal'", "0.5"]),
        ({"init": "normal", "init_bias": 1.0}, ["init_bias", "'normal'", "'open'", "1.0"]),
        ({"seed": 3}, ["seed", "'identity'", "'normal'", "3"]),
        ({"layer_by_layer": "yes"}, ["layer_by_layer", "None", "'yes'"]),
        ({"link": "soft"}, ["link", "reflink", "'soft'"]),
    ],
)
def test_options_that_mean_nothing(options, words):
    with pytest.raises(ConversionError) as error:
        ConversionOptions(**options)
    for word in words:
        assert word in str(error.value)


def refuse_reflinks(monkeypatch):
    def ioctl(*arguments):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr("fcntl.ioctl", ioctl)


def test_auto_copies_where_there_are_no_reflinks_and_never_hard_links(sharded_source, target, monkeypatch):
    refuse_reflinks(monkeypatch)
    result = convert_checkpoint(sharded_source, target)
    assert result.logits_equal
    assert all(path.stat().st_nlink == 1 for path in target.glob("*.safetensors"))


def test_auto_takes_reflinks_where_there_are_some(sharded_source, target, monkeypatch):
    """What the kernel would do, done by hand: this file system may not be able to."""
    cloned = []

    def ioctl(destination, request, source):
        assert request == 0x40049409
        cloned.append(destination)
        os.write(destination, os.pread(source, os.fstat(source).st_size, 0))

    monkeypatch.setattr("fcntl.ioctl", ioctl)
    for link in ("auto", "reflink"):
        result = convert_checkpoint(sharded_source, target, link=link, overwrite=True)
        assert result.logits_equal
    assert len(cloned) == 2 * len(result.plan.shards) + 1 > 3  # "auto" tries first whether it needs room


def test_reflink_says_where_it_cannot(sharded_source, target, monkeypatch):
    refuse_reflinks(monkeypatch)
    with pytest.raises(ConversionError, match=r"cannot be reflinked .*Btrfs or XFS: use --link auto"):
        convert_checkpoint(sharded_source, target, link="reflink")
    assert not target.exists()


# ---- the Hub


@pytest.fixture
def hub(tmp_path, sharded_source):
    with LoopbackHub() as server:
        server.client = server.client_environment(tmp_path / "hf_home")
        (sharded_source / "pytorch_model.bin").write_bytes(b"a pickle")
        script = f"""
from huggingface_hub import HfApi
HfApi().create_repo("someone/tiny")
HfApi().upload_folder(repo_id="someone/tiny", folder_path={str(sharded_source)!r})
"""
        subprocess.run([sys.executable, "-c", script], env=server.client, check=True, capture_output=True)
        yield server


def convert_from(hub, name, target, *options) -> subprocess.CompletedProcess:
    command = [COMMAND, "convert", name, str(target), *options]
    return subprocess.run(command, env=hub.client, capture_output=True, text=True)


def test_hub_ids_are_sources(hub, sharded_source, target, tmp_path):
    process = convert_from(hub, "someone/tiny", target)
    assert process.returncode == 0, process.stderr
    assert "bit for bit" in process.stdout
    assert torch.equal(
        logits_of(AutoModelForCausalLM.from_pretrained(target)),
        logits_of(AutoModelForCausalLM.from_pretrained(sharded_source)),
    )
    # What a conversion has no use for is not fetched.
    assert not any(path.name == "pytorch_model.bin" for path in tmp_path.joinpath("hf_home").rglob("*"))
    commit = hub.commits("someone/tiny")[-1]
    again = convert_from(hub, f"someone/tiny@{commit}", target, "--overwrite", "--dry-run")
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize("name", ["someone/missing", "someone/tiny@nosuchrevision"])
def test_repositories_that_are_not_there_are_said_to_be(hub, target, name):
    process = convert_from(hub, name, target)
    assert process.returncode == 1
    assert name in process.stderr and "could not be fetched" in process.stderr
    assert "Traceback" not in process.stderr
    assert not target.exists()


def test_a_folder_counts_before_a_repository(source, target, monkeypatch):
    monkeypatch.chdir(source.parent.parent)
    assert plan_conversion(source, target, ConversionOptions()).source.folder == source
    relative = f"{source.parent.name}/{source.name}"
    assert convert_checkpoint(relative, target).logits_equal


@pytest.mark.parametrize("name", ["/no/such/folder", "./folder", "../folder", "-a/b", "a/b/c"])
def test_a_mistyped_folder_is_not_looked_for_on_the_hub(target, name):
    with pytest.raises(ConversionError, match="is not a folder"):
        convert_checkpoint(name, target)


def test_an_id_that_the_hub_does_not_allow_is_said_to_be_one(target):
    with pytest.raises(ConversionError, match=r"could not be fetched.*HFValidationError"):
        convert_checkpoint("a/b--c", target)


def test_a_target_in_the_way_is_seen_before_anything_is_fetched(source, target, monkeypatch):
    convert_checkpoint(source, target, verify="headers")

    def fetch(*arguments, **options):
        raise AssertionError("fetched")

    monkeypatch.setattr("gated_attention.conversion.sources.snapshot_download", fetch)
    with pytest.raises(ConversionError, match="not empty"):
        convert_checkpoint("someone/tiny", target)
