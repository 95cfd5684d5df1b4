"""hub_upload.py and `gated-attention push` send exactly what a stranger can load; the Hub is one on this machine."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import COMMAND, logits_of, randomise, run_as_stranger, tiny_input_ids, tree_hashes
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from gated_attention import UploadError, convert_checkpoint
from gated_attention.hub.check import check_in_clean_process
from gated_attention.hub.push import prepare_upload, push_folder
from gated_attention.hub.source import read_model_folder


SCRIPT = Path(__file__).parents[1] / "hub_upload.py"
REPO = "someone/tiny-gated"
PRIVATE = ("training_args.bin", "model-00009-of-00009.safetensors", "sub/model.safetensors", "id_rsa", "hf_token.json")


@pytest.fixture
def gated(source, target):
    """A converted checkpoint whose gates were trained, with what a training run leaves beside it."""
    convert_checkpoint(source, target, granularity="elementwise", verify="headers")
    model = AutoModelForCausalLM.from_pretrained(target)
    randomise(model, seed=8).save_pretrained(target)
    (target / "checkpoint-2").mkdir()
    (target / "sub").mkdir()
    for name in (*PRIVATE, ".env", "optimizer.pt", "checkpoint-2/optimizer.pt", "holiday.png"):
        (target / name).write_bytes(b"not for others")
    return target


def upload(*arguments, environment=None, cwd=None, command=(sys.executable, SCRIPT)) -> subprocess.CompletedProcess:
    environment = {**os.environ, **(environment or {})}
    command = [*command, *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True)


def stranger_logits(hub, tmp_path, repo_id: str = REPO) -> torch.Tensor:
    """Load the pushed model from the hub in a process without the package and with empty caches."""
    save_file({"input_ids": tiny_input_ids()}, tmp_path / "inputs.safetensors")
    run_as_stranger(
        hub,
        f"""
from transformers import AutoTokenizer
assert AutoTokenizer.from_pretrained({repo_id!r}, trust_remote_code=True)("the gate").input_ids
model = AutoModelForCausalLM.from_pretrained({repo_id!r}, trust_remote_code=True)
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
    for part in ("model.safetensors", "gated_attention_gate.py", "bit for bit", "nothing was sent", "16 tokens"):
        assert part in process.stdout
    sent, left_out = process.stdout.split("left out:")
    for name in (*PRIVATE, ".env", "optimizer.pt", "holiday.png"):
        assert f"  {name}\n" not in sent
        assert name in left_out
    assert not [request for request in hub.requests if not request.startswith(("GET", "HEAD"))]
    assert hub.repositories() == set()
    assert tree_hashes(gated) == before


def test_pushed_model_loads_at_a_strangers(gated, hub, tmp_path):
    """By the command; the script is the same function, as a test below shows."""
    command = (COMMAND, "push")
    process = upload(gated, REPO, "--private", "--base-model", "someone/tiny", environment=hub.client, command=command)
    assert process.returncode == 0, process.stderr
    files = hub.files(REPO)
    assert files["model.safetensors"] == (gated / "model.safetensors").read_bytes()
    assert files["images/plot.png"] == (gated / "images" / "plot.png").read_bytes()
    assert not {*PRIVATE, ".env", "optimizer.pt", "checkpoint-2/optimizer.pt", "holiday.png"} & files.keys()
    # Secrets are in no file, and nowhere in what was said.
    assert not [name for name, content in files.items() if b"hf_dummy" in content or str(tmp_path).encode() in content]
    assert "hf_dummy" not in process.stdout + process.stderr
    assert torch.equal(stranger_logits(hub, tmp_path), logits_of(AutoModelForCausalLM.from_pretrained(gated)))

    sent = hub.received_bytes
    assert upload(gated, REPO, "--base-model", "someone/tiny", environment=hub.client).returncode == 0
    assert hub.received_bytes == sent  # a second push finds everything there


def test_command_and_script_have_the_same_options():
    options = [upload("--help", command=command).stdout for command in ((COMMAND, "push"), (sys.executable, SCRIPT))]
    assert "--create-pr" in options[0]
    assert options[0].partition("Upload a model")[2] == options[1].partition("Upload a model")[2]


def test_every_way_to_push_gives_the_same_files(gated, hub_here, tmp_path):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(gated), AutoTokenizer.from_pretrained(gated)
    arguments = TrainingArguments(
        str(tmp_path / "trained"), hub_model_id=f"{REPO}-by-trainer", report_to="none", use_cpu=True
    )
    # First: it sets fields of the config that it is given, such as `use_cache`.
    trainer = Trainer(model, arguments, processing_class=tokenizer)
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    push_folder(tmp_path / "saved", f"{REPO}-by-folder", license="mit")

    model.push_to_hub(f"{REPO}-by-model")
    tokenizer.push_to_hub(f"{REPO}-by-model")
    model.save_pretrained(tmp_path / "while-saving", push_to_hub=True, repo_id=f"{REPO}-while-saving")
    trainer.push_to_hub()

    pushed = hub_here.files(f"{REPO}-by-folder")
    del pushed["README.md"]  # each way writes a card of its own
    assert "modeling_gated_attention.py" in pushed and "model.safetensors" in pushed
    for way in ("by-model", "by-trainer"):
        files = hub_here.files(f"{REPO}-{way}")
        assert {name: files.get(name) for name in pushed} == pushed, way
        assert files.keys() - pushed.keys() <= {"README.md", "training_args.bin"}
    files = hub_here.files(f"{REPO}-while-saving")
    of_the_tokenizer = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert files.keys() - {"README.md"} == pushed.keys() - of_the_tokenizer
    assert all(files[name] == pushed[name] for name in files.keys() - {"README.md"})
    assert torch.equal(stranger_logits(hub_here, tmp_path, f"{REPO}-by-trainer"), logits_of(model))


@pytest.fixture
def prepared(gated, tmp_path):
    (tmp_path / "upload").mkdir()
    return prepare_upload(read_model_folder(gated), tmp_path / "upload", REPO)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text.replace("return states * scores if", "return 1.001 * states * scores if"), "differ"),
        (None, "does not load without this package"),
    ],
    ids=["computes_something_else", "does_not_load"],
)
def test_broken_bundle_is_found_before_anything_is_sent(prepared, damage, words):
    module = prepared.folder / "gated_attention_gate.py"
    if damage is None:
        module.unlink()
    else:
        whole = module.read_text()
        module.write_text(damage(whole))
        assert module.read_text() != whole
    with pytest.raises(UploadError, match=words):
        check_in_clean_process(prepared)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"short"), "damaged or cut short"),
        (lambda folder: shutil.rmtree(folder), "is not a folder"),
    ],
    ids=["no_config", "damaged_weights", "no_folder"],
)
def test_damaged_folder_is_refused(gated, hub_here, damage, words):
    damage(gated)
    with pytest.raises(UploadError, match=words):
        push_folder(gated, REPO)
    assert hub_here.requests == []


@pytest.mark.parametrize("repo_id", ["tiny", "a/b/c", "a/..", "a b/c"])
def test_repository_must_be_user_and_name(gated, repo_id):
    with pytest.raises(UploadError, match=repo_id.split("/")[0]):
        push_folder(gated, repo_id, dry_run=True)


@pytest.mark.parametrize("base_model", ["/home/me/models/base", "C:\\models\\base", "models/of/mine", "base"])
def test_local_path_as_base_model_is_refused(gated, base_model):
    with pytest.raises(UploadError, match="base_model must be a Hub id"):
        push_folder(gated, REPO, base_model=base_model, dry_run=True)


def test_error_of_the_command_is_said_without_a_traceback(gated, hub):
    process = upload(gated, REPO, environment={**hub.client, "HF_TOKEN": ""})
    assert process.returncode == 1
    assert "hf auth login" in process.stderr
    assert "Traceback" not in process.stderr
    assert hub.requests == []
