"""hub_upload.py sends exactly what a stranger can load, and refuses what nobody could; the Hub is one on this machine."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import WITHOUT_PACKAGE, logits_of, randomise, tiny_input_ids, tree_hashes
from huggingface_hub import ModelCard
from loopback_hub import LoopbackHub
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gated_attention import convert_checkpoint, hub_upload
from gated_attention.modeling_gated.bundle import bundled_files


SCRIPT = Path(__file__).parents[1] / "hub_upload.py"
REPO = "someone/tiny-gated"


@pytest.fixture
def gated(source, target):
    """A converted checkpoint whose gates were trained, with what a training run leaves beside it."""
    convert_checkpoint(source, target, granularity="elementwise")
    model = AutoModelForCausalLM.from_pretrained(target)
    randomise(model, seed=8).save_pretrained(target)
    (target / "training_args.bin").write_bytes(b"a pickle")
    (target / "checkpoint-2").mkdir()
    (target / "checkpoint-2" / "optimizer.pt").write_bytes(b"a pickle")
    (target / "model-00009-of-00009.safetensors").write_bytes(b"a leftover")
    (target / "sub").mkdir()
    (target / "sub" / "model.safetensors").write_bytes(b"not the model")
    (target / "id_rsa").write_text("a secret")
    return target


def upload(*arguments, environment=None, cwd=None) -> subprocess.CompletedProcess:
    environment = {**os.environ, **(environment or {})}
    command = [sys.executable, SCRIPT, *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True)


@pytest.fixture
def hub(tmp_path):
    with LoopbackHub() as server:
        server.client = server.client_environment(tmp_path / "hf_home")
        yield server


def run_as_stranger(hub, script: str) -> None:
    environment = {**hub.client, "HF_HOME": f"{hub.client['HF_HOME']}_of_a_stranger"}
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGE + script], env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr


def stranger_logits(hub, tmp_path) -> torch.Tensor:
    """Load the pushed model from the hub in a process without the package and with empty caches."""
    save_file({"input_ids": tiny_input_ids()}, tmp_path / "inputs.safetensors")
    run_as_stranger(
        hub,
        f"""
model = AutoModelForCausalLM.from_pretrained({REPO!r}, trust_remote_code=True)
input_ids = load_file({str(tmp_path / "inputs.safetensors")!r})["input_ids"]
with torch.no_grad():
    save_file({{"logits": model(input_ids, use_cache=False).logits}}, {str(tmp_path / "logits.safetensors")!r})
""",
    )
    return load_file(tmp_path / "logits.safetensors")["logits"]


def test_dry_run_checks_everything_and_sends_nothing(gated, hub):
    before = tree_hashes(gated)
    process = upload(gated.name, REPO, "--dry-run", environment=hub.client, cwd=gated.parent)
    assert process.returncode == 0, process.stderr
    for part in ("model.safetensors", "gated_attention_gate.py", "bit for bit", "nothing was sent"):
        assert part in process.stdout
    sent, left_out = process.stdout.split("left out:")
    for name in ("training_args.bin", "model-00009-of-00009.safetensors", "sub/model.safetensors", "id_rsa"):
        assert name not in sent
        assert name in left_out
    assert hub.requests == []
    assert tree_hashes(gated) == before


def test_pushed_model_loads_at_a_strangers(gated, hub, tmp_path):
    process = upload(gated, REPO, "--private", "--base-model", "someone/tiny", environment=hub.client)
    assert process.returncode == 0, process.stderr
    files = hub.files(REPO)
    assert files["model.safetensors"] == (gated / "model.safetensors").read_bytes()
    unwanted = {"training_args.bin", "model-00009-of-00009.safetensors", "sub/model.safetensors", "id_rsa"}
    assert not (unwanted | {"checkpoint-2/optimizer.pt"}) & files.keys()
    assert files["images/plot.png"] == (gated / "images" / "plot.png").read_bytes()
    assert torch.equal(stranger_logits(hub, tmp_path), logits_of(AutoModelForCausalLM.from_pretrained(gated)))
    run_as_stranger(
        hub,
        f"""
from transformers import AutoTokenizer
assert AutoTokenizer.from_pretrained({REPO!r}, trust_remote_code=True)("the gate").input_ids
""",
    )

    sent = hub.received_bytes
    assert upload(gated, REPO, "--base-model", "someone/tiny", environment=hub.client).returncode == 0
    assert hub.received_bytes == sent  # a second push finds everything there


@pytest.mark.parametrize(("first", "second"), [("5GB", "20KB"), ("20KB", "5GB")], ids=["then_sharded", "then_single"])
def test_second_upload_in_another_layout_leaves_nothing_of_the_first(gated, hub, tmp_path, first, second):
    for seed, size in ((1, first), (2, second)):
        folder = tmp_path / f"model-{seed}"
        shutil.copytree(gated, folder, ignore=shutil.ignore_patterns("model*"))
        model = randomise(AutoModelForCausalLM.from_pretrained(gated), seed=seed)
        model.save_pretrained(folder, max_shard_size=size)
        assert upload(folder, REPO, environment=hub.client).returncode == 0
    weights = {name for name in hub.files(REPO) if name.endswith((".safetensors", ".index.json"))}
    assert weights == {path.name for path in folder.iterdir() if path.name.endswith((".safetensors", ".index.json"))}
    assert torch.equal(stranger_logits(hub, tmp_path), logits_of(model))


def test_model_push_to_hub_is_self_contained_too(gated, hub, tmp_path):
    script = f"""
from transformers import AutoModelForCausalLM
import gated_attention
model = AutoModelForCausalLM.from_pretrained({str(gated)!r})
model.push_to_hub({REPO!r})
model.save_pretrained({str(tmp_path / "saved")!r}, push_to_hub=True, repo_id={REPO + "-saved"!r})
"""
    process = subprocess.run([sys.executable, "-c", script], env=hub.client, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert torch.equal(stranger_logits(hub, tmp_path), logits_of(AutoModelForCausalLM.from_pretrained(gated)))
    # Saving with an upload sends what is new in the folder; the code is written first, and must count as new.
    assert set(bundled_files()) | {"model.safetensors", "config.json"} <= set(hub.files(f"{REPO}-saved"))


def test_card_says_what_the_model_is(gated, tmp_path):
    hub_upload.prepare_upload(gated, tmp_path / "upload", REPO, base_model="someone/tiny")
    card = ModelCard.load(tmp_path / "upload" / "README.md")
    assert card.data.license == "apache-2.0"
    assert card.data.base_model == "someone/tiny"
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert "gated-attention" in card.data.tags
    assert f'from_pretrained("{REPO}", trust_remote_code=True)' in card.text
    assert "elementwise" in card.text
    assert "not the identity" in card.text
    assert str(tmp_path) not in card.content


def test_card_of_an_untrained_conversion_says_so(source, target, tmp_path):
    convert_checkpoint(source, target)
    hub_upload.prepare_upload(target, tmp_path / "upload", REPO)
    text = (tmp_path / "upload" / "README.md").read_text()
    assert "exactly 1" in text
    assert "base_model" not in text


def test_broken_bundle_is_found_before_anything_is_sent(gated, tmp_path):
    prepared = hub_upload.prepare_upload(gated, tmp_path / "upload", REPO)
    hub_upload.check_in_clean_process(gated, prepared)
    module = tmp_path / "upload" / "gated_attention_gate.py"
    whole = module.read_text()
    module.write_text(whole.replace("return states * scores if", "return 1.001 * states * scores if"))
    assert module.read_text() != whole
    with pytest.raises(hub_upload.UploadError, match="differ"):
        hub_upload.check_in_clean_process(gated, prepared)
    module.unlink()
    with pytest.raises(hub_upload.UploadError, match="does not load without this package"):
        hub_upload.check_in_clean_process(gated, prepared)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"short"), "damaged or cut short"),
    ],
    ids=["no_config", "damaged_weights"],
)
def test_damaged_folder_is_refused(gated, hub, damage, words):
    damage(gated)
    process = upload(gated, REPO, environment=hub.client)
    assert process.returncode == 1
    assert words in process.stderr
    assert "Traceback" not in process.stderr
    assert hub.requests == []


def test_model_without_gates_is_refused(source, tmp_path):
    with pytest.raises(hub_upload.UploadError, match="gated-attention convert"):
        hub_upload.prepare_upload(source, tmp_path / "upload", REPO)


def test_licence_with_a_name_of_its_own_is_kept(gated, tmp_path):
    (gated / "README.md").write_text(
        "---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE\ndatasets: [a/b]\nbase_model: x/y\n---\n# Card\n"
    )
    hub_upload.prepare_upload(gated, tmp_path / "upload", REPO)
    data = ModelCard.load(tmp_path / "upload" / "README.md").data
    assert (data.license, data.license_name, data.license_link, data.datasets) == ("other", "own", "LICENSE", ["a/b"])
    assert data.base_model is None  # that of the source, not the source


@pytest.mark.parametrize(
    "card", [b"---\n- a list\n---\n", b"---\na: [1\n---\n", "---\nlicense: mit\n---\n caf\u00e9".encode("latin-1")]
)
def test_card_that_cannot_be_read_is_said(gated, tmp_path, card):
    (gated / "README.md").write_bytes(card)
    with pytest.raises(hub_upload.UploadError, match="cannot be read"):
        hub_upload.prepare_upload(gated, tmp_path / "upload", REPO)


@pytest.mark.parametrize("repo_id", ["tiny", "a/b/c", "a/..", "a b/c"])
def test_repository_must_be_user_and_name(gated, hub, repo_id, capsys):
    assert hub_upload.main([str(gated), repo_id, "--dry-run"]) == 1
    assert repo_id in capsys.readouterr().err


def test_hub_that_cannot_be_reached(gated, hub):
    environment = {**hub.client, "HF_ENDPOINT": "http://127.0.0.1:9"}
    process = upload(gated, REPO, environment=environment)
    assert process.returncode == 1
    assert "failed" in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize("base_model", ["/home/me/models/base", "C:\\models\\base", "models/of/mine"])
def test_local_path_as_base_model_is_refused(gated, tmp_path, base_model):
    with pytest.raises(hub_upload.UploadError, match="base_model must be a Hub id"):
        hub_upload.prepare_upload(gated, tmp_path / "upload", REPO, base_model=base_model)


def test_missing_token_is_said_before_the_work(gated, hub):
    environment = {**hub.client, "HF_TOKEN": ""}
    process = upload(gated, REPO, environment=environment)
    assert process.returncode == 1
    assert "hf auth login" in process.stderr
    assert hub.requests == []
