"""`gated-attention low-bit`, `copying` and `prompts` print, draw and save what the functions give, models side by side."""

import json
import math

import pytest
from conftest import save_source, tiny_llama, tree_hashes
from typer.testing import CliRunner

from gated_attention import convert_checkpoint
from gated_attention.cli import app
from gated_attention.diagnostics import low_bit


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the gate opens and the sink closes " * 60)
    return path


@pytest.fixture
def models(source, tmp_path) -> list:
    """A model, its conversion, which computes the same, and another one."""
    convert_checkpoint(source, tmp_path / "gated")
    save_source(tmp_path / "other", tiny_llama(seed=1))
    return [source, tmp_path / "gated", tmp_path / "other"]


def run(command, *arguments):
    return CliRunner().invoke(app, [command, *map(str, arguments)])


def line_of(output: str, start: str) -> str:
    return next(line for line in output.splitlines() if line.startswith(start))


def assert_picture(path):
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in path.with_suffix(".svg").read_text()


def low_bit_run(models, text, *arguments):
    return run("low-bit", *models, "--text", text, "--length", 32, "--tokens", 64, "--no-torchao", *arguments)


def test_low_bit(models, text, tmp_path):
    before = tree_hashes(models[0])
    result = low_bit_run(models, text, "--bos", "--by-layer", 32, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert (
        "64 tokens of text.txt in windows of 32, BOS first; float32; 21 linear layers rounded, 100.0%" in result.output
    )
    found = json.loads((tmp_path / "out" / "low_bit.json").read_text())
    assert list(found) == ["source", "gated", "other"]
    for name, label in {"not_rounded": "not rounded", **low_bit.SCHEMES}.items():
        line = line_of(result.output, label + "  ")
        for model in found.values():
            figures = model["runs"][name]
            assert f"{figures['perplexity']:,.3f} (x {figures['ratio']:.3f})" in line
            assert figures["ratio"] == figures["perplexity"] / model["runs"]["not_rounded"]["perplexity"]
    # Gates that are the identity are rounded to themselves.
    assert found["gated"]["runs"]["per_tensor"]["linears"] == 24
    assert found["gated"]["runs"]["per_tensor"]["perplexity"] == found["source"]["runs"]["per_tensor"]["perplexity"]
    costs = found["source"]["layers"]
    assert costs["tokens"] == 32
    assert f"x {max(costs['layers'].values()) / costs['perplexity']:.4f}" in result.output
    assert_picture(tmp_path / "out" / "low_bit")
    assert_picture(tmp_path / "out" / "input_ranges")
    assert tree_hashes(models[0]) == before


def test_low_bit_smoothed(models, text, tmp_path):
    """Found on the windows that follow, and the last run, since it changes weights."""
    before = tree_hashes(models[0])
    out = tmp_path / "out"
    result = low_bit_run(models[:2], text, "--smoothing", 0.5, "--out", out)
    assert result.exit_code == 0, result.output
    found = json.loads((out / "low_bit.json").read_text())
    plain = json.loads((out / "low_bit.json").read_text())["source"]["runs"]
    assert list(plain)[-1] == "smoothed" and plain["smoothed"]["scheme"] == "smoothed"
    assert plain["smoothed"]["perplexity"] != plain["per_tensor"]["perplexity"]
    line = line_of(result.output, "one scale a tensor, smoothed  ")
    for model in found.values():
        assert f"(x {model['runs']['smoothed']['ratio']:.3f})" in line
    without = low_bit_run(models[:1], text)
    assert f"{plain['not_rounded']['perplexity']:,.3f} (x 1.000)" in line_of(without.output, "not rounded  ")
    assert tree_hashes(models[0]) == before


def test_low_bit_smoothed_needs_more_text(source, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("the gate opens " * 40)
    result = run(
        "low-bit", source, "--text", short, "--length", 32, "--tokens", 4096, "--no-torchao", "--smoothing", 0.5
    )
    assert result.exit_code == 1 and "to find a smoothing on" in result.output


def test_low_bit_keeps_layers(source, text):
    result = low_bit_run([source], text, "--keep", r"down_proj", "--keep", r"layers\.0\.")
    assert result.exit_code == 0, result.output
    assert "12 linear layers rounded, 54.5%" in result.output
    result = low_bit_run([source], text, "--keep", ".")
    assert line_of(result.output, "one scale a tensor").endswith("(x 1.000)")
    for pattern, words in (("up_proy", "'up_proy' is in the name of no linear layer"), ("(", "regular expressions")):
        result = low_bit_run([source], text, "--keep", pattern)
        assert result.exit_code == 1
        assert words in result.output


def test_low_bit_without_torchao(source, text, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchao", None)
    result = run("low-bit", source, "--text", text, "--length", 32, "--tokens", 32, "--torchao")
    assert result.exit_code == 1
    assert "pip install torchao" in result.output


def test_copying(models, tmp_path):
    arguments = ["--distance", 4, "--distance", 9, "--segment", 4, "--sequences", 2]
    result = run("copying", *models, *arguments, "--bos", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "2 sequences a distance, 4 tokens repeated, BOS first; float32" in result.output
    found = json.loads((tmp_path / "out" / "copying.json").read_text())
    assert found["source"]["distances"] == found["gated"]["distances"] != found["other"]["distances"]
    for place, distance in enumerate((4, 9)):
        line = line_of(result.output, f"loss, distance {distance} ")
        for model in found.values():
            assert f"{model['distances'][place]['loss']:.3f}" in line
    assert_picture(tmp_path / "out" / "copying")
    result = run("copying", models[0], "--segment", 1)
    assert result.exit_code == 1
    assert "`segment` must be at least 2" in result.output


def test_prompts(models, tmp_path):
    (tmp_path / "mine.txt").write_text("the gate opens\nattention | to\n<b>\n")
    arguments = ["--prompts", tmp_path / "mine.txt", "--max-new-tokens", 12, "--out", tmp_path / "out"]
    result = run("prompts", *models, *arguments)
    assert result.exit_code == 0, result.output
    assert "3 prompts as a chat, greedy, at most 12 tokens; float32" in result.output
    assert line_of(result.output, "the same answer").split() == [
        "the",
        "same",
        "answer",
        "-",
        "3",
        "of",
        "3",
        "0",
        "of",
        "3",
    ]
    found = json.loads((tmp_path / "out" / "prompts.json").read_text())
    shares = [[answer["repetition"] for answer in model["answers"]] for model in found.values()]
    more = [after - before for before, after in zip(shares[0], shares[2], strict=True)]
    error = math.sqrt(sum((value - sum(more) / 3) ** 2 for value in more) / 2 / 3)
    line = line_of(result.output, "repeated more than by the first")
    assert line.endswith(f"-  +0.0% ± 0.0%  {sum(more) / 3:+.1%} ± {error:.1%}")
    assert [answer["prompt"] for answer in found["source"]["answers"]] == ["the gate opens", "attention | to", "<b>"]
    page = (tmp_path / "out" / "prompts.md").read_text()
    assert "## 2. attention \\| to" in page and "<b>" not in page
    for line in (line for line in page.splitlines() if line.startswith("|")):
        assert line.replace("\\|", "").count("|") in (4, 5)
    assert str(tmp_path) not in page
    result = run("prompts", models[0], "--prompts", tmp_path / "nowhere.txt")
    assert result.exit_code == 1
    assert "cannot be read" in result.output


@pytest.mark.parametrize("command", ["low-bit", "copying", "prompts"])
def test_interrupted(models, tmp_path, monkeypatch, command):
    """The models that are done are kept."""
    from gated_attention.diagnostics.command import LoadOptions

    load = LoadOptions.load

    def interrupted(self, name):
        if name == str(models[2]):
            raise KeyboardInterrupt
        return load(self, name)

    monkeypatch.setattr(LoadOptions, "load", interrupted)
    arguments = {
        "low-bit": ["--length", 32, "--tokens", 32, "--no-torchao"],
        "copying": ["--distance", 4, "--segment", 4, "--sequences", 1],
        "prompts": ["--max-new-tokens", 1],
    }[command]
    result = run(command, *models, *arguments, "--out", tmp_path / "out")
    assert result.exit_code == 130
    assert "interrupted; models that are done are in" in result.output
    name = {"low-bit": "low_bit"}.get(command, command)
    assert list(json.loads((tmp_path / "out" / f"{name}.json").read_text())) == ["source", "gated"]
