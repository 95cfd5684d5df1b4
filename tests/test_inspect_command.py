"""`gated-attention inspect` prints, draws and saves what it found, and says what it cannot use."""

import json

import pytest
from conftest import save_source, tiny_llama
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from gated_attention import convert_checkpoint
from gated_attention.cli import app
from gated_attention.diagnostics import Inspection


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the gate opens and the sink closes " * 60)
    return path


def run(*arguments):
    return CliRunner().invoke(app, ["inspect", *map(str, arguments), "--length", "32", "--tokens", "96"])


def test_one_model(source, text, tmp_path):
    result = run(source, "--text", text, "--bos", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "96 tokens of text.txt in 3 windows of 32, BOS first; float32, sdpa" in result.output
    assert "F-Attn" in result.output
    inspection = Inspection.load(tmp_path / "out" / "inspection.json")
    assert inspection.settings.model == "source"
    assert f"{inspection.f_attn:.4f}" in result.output
    content = json.loads((tmp_path / "out" / "inspection.json").read_text())
    assert content["summary"]["f_attn"] == inspection.f_attn
    for figure in ("f_attn", "heads", "activations", "loss_by_position", "attention_maps", "sheet"):
        assert (tmp_path / "out" / f"{figure}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / "out" / f"{figure}.svg").read_text()


def test_two_models_side_by_side(source, text, tmp_path):
    convert_checkpoint(source, tmp_path / "gated")
    result = run(source, tmp_path / "gated", "--text", text, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    before, after = (Inspection.load(tmp_path / "out" / f"inspection_{number}.json") for number in (1, 2))
    assert before.perplexity == after.perplexity
    assert (before.gate_mean, after.gate_mean) == (None, 1.0)
    assert (tmp_path / "out" / "gate_means.svg").exists()
    page = (tmp_path / "out" / "inspection.html").read_text()
    assert page.count("<svg") == page.count("</svg>") >= 7
    assert "http" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    ).replace("https://matplotlib.org", "")
    card = (tmp_path / "out" / "card.md").read_text()
    assert "| source | gated |" in card
    assert str(tmp_path) not in card
    assert str(tmp_path) not in page


def test_layers_of_the_maps_can_be_chosen(source, text, tmp_path):
    result = run(source, "--text", text, "--map-layer", 2, "--map-layer", 0, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    drawing = (tmp_path / "out" / "attention_maps.svg").read_text()
    assert "<!-- layer 2 -->" in drawing
    assert "<!-- layer 0 -->" in drawing
    assert "<!-- layer 1 -->" not in drawing


def test_default_text_and_no_attention(source):
    result = run(source, "--no-attention")
    assert result.exit_code == 0, result.output
    assert "Python's help pages" in result.output
    assert "F-Attn)" not in result.output
    assert "not measured" not in result.output


def test_data_set_in_a_folder(source, tmp_path):
    (tmp_path / "data").mkdir()
    rows = [json.dumps({"body": f"the gate opens and the sink closes {number} times"}) for number in range(80)]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(rows))
    result = run(source, "--dataset", tmp_path / "data", "--split", "train", "--column", "body")
    assert result.exit_code == 0, result.output
    assert "data (train)" in result.output
    result = run(source, "--dataset", tmp_path / "data", "--split", "train")
    assert result.exit_code == 1
    assert "no column 'text'; it has body" in result.output


def test_names_that_are_the_same_are_written_out(text, tmp_path):
    for parent in ("a", "b"):
        save_source(tmp_path / parent / "model", tiny_llama())
    result = run(tmp_path / "a" / "model", tmp_path / "b" / "model", "--text", text)
    assert result.exit_code == 0, result.output
    assert "a/model" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--text", "nowhere.txt"], "nowhere.txt cannot be read"),
        (["--text", "{text}", "--dataset", "x"], "not both"),
        (["--dtype", "float31"], "float31"),
        (["--device", "abacus"], "device 'abacus'"),
        (["--text", "{text}", "--map-layer", "7", "--out", "{source}/out"], "layer 7 has no attention to draw"),
        (["--text", "{source}/model.safetensors"], "cannot be read as UTF-8"),
    ],
    ids=["no_such_text", "two_texts", "dtype", "device", "map_layer", "not_a_text"],
)
def test_bad_input(source, text, arguments, words):
    result = run(source, *[argument.format(text=text, source=source) for argument in arguments])
    assert result.exit_code == 1
    assert words in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_model_that_is_none(tmp_path, text):
    (tmp_path / "empty").mkdir()
    result = run(tmp_path / "empty", "--text", text)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)  # a message, no traceback


def test_same_model_twice(source, text, tmp_path):
    result = run(source, source, "--text", text, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "attention_maps_2.svg").exists()


def test_card_survives_tokens_that_are_markup(source, text, tmp_path):
    from gated_attention.diagnostics import Inspection
    from gated_attention.diagnostics.report import card_section

    assert run(source, "--text", text, "--bos", "--out", tmp_path / "out").exit_code == 0
    path = tmp_path / "out" / "inspection.json"
    path.write_text(path.read_text().replace('"token": "', '"token": "<|x|>$$'))
    row = next(line for line in card_section([Inspection.load(path)]).splitlines() if "largest activation at" in line)
    assert row.replace("\\|", "").count("|") == 3
    assert "<|" not in row


def test_inspected_folder_is_not_touched(source, text):
    from conftest import tree_hashes

    before = tree_hashes(source)
    assert run(source, "--text", text).exit_code == 0
    assert tree_hashes(source) == before
    AutoModelForCausalLM.from_pretrained(source)


def test_stream(source, text, tmp_path):
    arguments = ["stream", source, "--text", text, "--length", 40, "--window", 12, "--kept", 3, "--bos"]
    result = CliRunner().invoke(app, [*map(str, arguments), "--out", str(tmp_path / "stream.json")])
    assert result.exit_code == 0, result.output
    assert "40 tokens of text.txt, BOS first; float32" in result.output
    runs = json.loads((tmp_path / "stream.json").read_text())["source"]
    assert list(runs) == ["full cache", "last 12", "first 3 and last 9"]
    for label, run in runs.items():
        assert f"{run['perplexity']:.3f}" in next(
            line for line in result.output.splitlines() if line.startswith(label)
        )
    result = CliRunner().invoke(app, ["stream", str(source), "--text", str(text), "--length", "40", "--window", "40"])
    assert result.exit_code == 1
    assert "`window` must be" in result.output
