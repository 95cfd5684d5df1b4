"""Transfer and self-distillation in one go: what comes out, what is left when it stops, and what is refused."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from conftest import (
    COMMAND,
    TINY_SHAPE,
    logits_of,
    save_source,
    tiny_input_ids,
    tiny_llama,
    tiny_tokenizer,
    tree_hashes,
)
from test_sink_transfer import TEXT, planted_sink
from transformers import AutoModelForCausalLM, AutoTokenizer

from gated_attention import GatedAttentionForCausalLM
from gated_attention.conversion import ConversionError, NothingToTransferError
from gated_attention.conversion.sink_transfer import TransferOptions
from gated_attention.diagnostics.copying import ordinary_tokens
from gated_attention.training import HealingOptions, heal, healing_recipe
from gated_attention.training.healing_rows import chat_beginning, copied_row, sampled_rows


RECIPE = Path(__file__).parent.parent / "recipes" / "distill_transfer.yaml"

HEALING_FILE = "healing.json"

SMALL_TRANSFER = {"tokens": 1024, "length": 32, "test_tokens": 256}


def options(**changes) -> HealingOptions:
    transfer = TransferOptions(**SMALL_TRANSFER | changes.pop("transfer", {}))
    return HealingOptions(transfer, **{"tokens": 1024, "length": 32, "learning_rate": 1e-4} | changes)


@pytest.fixture
def planted_source(tmp_path):
    return save_source(tmp_path / "source", planted_sink())


def left_beside(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.glob(f".{target.name}*"))


def test_healed_model_has_no_sink_and_is_as_good(planted_source, target, tmp_path):
    before = tree_hashes(planted_source)
    other = tmp_path / "other.txt"
    other.write_text("the sink opens and the gate closes " * 300)
    said = []
    found = heal(planted_source, target, TEXT, options(texts=(other,)), text_name="some text", echo=said.append)
    assert tree_hashes(planted_source) == before and not left_beside(target)
    assert set(found) == {"end of some text", "other.txt"}
    for source, _, healed in found.values():
        assert source.f_attn > 0.2 and healed.f_attn < 0.05 and healed.largest_key_share < 0.1
        assert healed.perplexity < 1.1 * source.perplexity
    # What is read is what was made.
    model = AutoModelForCausalLM.from_pretrained(target)
    assert type(model) is GatedAttentionForCausalLM
    written = json.loads((target / HEALING_FILE).read_text())
    assert [test["perplexity"] for test in written["tests"]["other.txt"]] == [
        one.perplexity for one in found["other.txt"]
    ]
    assert written["options"]["tokens"] == 1024 and written["transfer"]["layers"]
    card = (target / "README.md").read_text()
    assert card.count("## Attention sinks, activations and gates") == 2 and "license: apache-2.0" in card
    assert str(tmp_path) not in card
    assert "# target\n" in card and "source after a sink transfer" in card and "- some text\n" in card
    assert "transferred" not in card.partition("## Attention")[0] and "rows.jsonl" not in card
    assert (target / "training_curves.png").is_file() and not list(target.glob("checkpoint-*"))
    assert any("teacher_perplexity" in text for text in said)


def test_smoothing_at_the_end_changes_no_logit(planted_source, tmp_path):
    logits, weights = {}, {}
    for smoothing in (0.0, 0.7):
        target = tmp_path / f"healed-{smoothing}"
        heal(planted_source, target, TEXT, options(smoothing=smoothing), echo=lambda text: None)
        model = AutoModelForCausalLM.from_pretrained(target)
        logits[smoothing], weights[smoothing] = logits_of(model, tiny_input_ids(1, 24)), model.state_dict()
    assert torch.equal(logits[0.0], logits[0.7])
    assert any(not torch.equal(tensor, weights[0.7][name]) for name, tensor in weights[0.0].items())


def test_a_healing_that_was_stopped_goes_on(planted_source, target, monkeypatch, tmp_path, caplog):
    straight = heal(planted_source, tmp_path / "straight", TEXT, options(), echo=lambda text: None)
    module = sys.modules["gated_attention.training.heal"]
    real_train, real_transfer, transfers = module.train, module.transfer_sinks, []

    def stopped(recipe, echo):
        real_train(recipe, echo)
        raise KeyboardInterrupt

    def counted(*arguments, **keywords):
        transfers.append(arguments)
        return real_transfer(*arguments, **keywords)

    monkeypatch.setattr(module, "transfer_sinks", counted)
    monkeypatch.setattr(module, "train", stopped)
    with pytest.raises(KeyboardInterrupt):
        heal(planted_source, target, TEXT, options(), echo=lambda text: None)
    assert not target.exists() and left_beside(target) == [".target.healing"]
    monkeypatch.setattr(module, "train", real_train)
    again = heal(planted_source, target, TEXT, options(), echo=lambda text: None)
    assert len(transfers) == 1 and not left_beside(target)
    assert [one.perplexity for one in again["end of text"]] == [one.perplexity for one in straight["end of text"]]

    # Other settings begin anew.
    monkeypatch.setattr(module, "train", stopped)
    with pytest.raises(KeyboardInterrupt):
        heal(planted_source, tmp_path / "other", TEXT, options(), echo=lambda text: None)
    monkeypatch.setattr(module, "train", real_train)
    with caplog.at_level(logging.WARNING):
        heal(planted_source, tmp_path / "other", TEXT, options(learning_rate=5e-5), echo=lambda text: None)
    assert "begun anew" in caplog.text and len(transfers) == 3


def test_another_text_of_the_same_length_begins_anew(planted_source, target, monkeypatch, caplog):
    monkeypatch.setattr(sys.modules["gated_attention.training.heal"], "train", _interrupt)
    other = TEXT.replace("gate opens", "gate close")
    assert len(other) == len(TEXT)
    for text, words in ((TEXT, ""), (TEXT, ""), (other, "begun anew")):
        caplog.clear()
        with pytest.raises(KeyboardInterrupt):
            heal(planted_source, target, text, options(), echo=lambda text: None)
        assert ("begun anew" in caplog.text) == bool(words)


def _interrupt(recipe, echo):
    raise KeyboardInterrupt


def rows_of(path: Path) -> list[list[int]]:
    return [json.loads(line)["input_ids"] for line in path.read_text().splitlines()]


def stopped_healing(source: Path, target: Path, monkeypatch, **changes):
    """The recipe of a healing that is stopped before it trains."""
    recipes = []

    def stopped(recipe, echo):
        recipes.append(recipe)
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["gated_attention.training.heal"], "train", stopped)
    with pytest.raises(KeyboardInterrupt):
        heal(source, target, TEXT, options(**changes), echo=lambda text: None)
    return recipes[0]


def test_rows_are_the_text_before_the_test(planted_source, target, monkeypatch):
    """And, in their shares, tokens to copy and what the source writes: after a random token, or as a chat."""
    shares = {"copy_share": 0.3, "sampled_share": 0.2, "chat_share": 0.25}
    recipe = stopped_healing(planted_source, target, monkeypatch, **shares)
    assert [source.weight for source in recipe.data] == [pytest.approx(share) for share in (0.5, 0.3, 0.15, 0.05)]
    of_text, copies, sampled, chats = (rows_of(Path(source.path)) for source in recipe.data)
    assert (len(copies), len(sampled), len(chats)) == (10, 5, 2)  # of 32
    tokenizer = AutoTokenizer.from_pretrained(planted_source)
    rows = of_text + copies + sampled
    # All are whole rows: of others the packing would cut the next one.
    assert {len(row) for row in rows + chats} == {32}
    begin = tokenizer("<user>", add_special_tokens=False)["input_ids"]
    assert {tuple(row[: len(begin)]) for row in chats} == {tuple(begin)} and chats[0] != chats[1]
    assert 0.6 < sum(row[0] == tokenizer.bos_token_id for row in rows) / len(rows) < 0.9
    whole = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    before_test = len(whole) // 32 * 32 - 256
    for number, row in enumerate(of_text):
        plain = row[1:] if row[0] == tokenizer.bos_token_id else row
        assert plain == whole[number * 31 : number * 31 + len(plain)]
    assert len(of_text) == (before_test - 32) // 31 + 1
    held_out = rows_of(Path(recipe.evaluation_data[0].path))
    assert [token for row in held_out for token in row[1:]] == whole[before_test : before_test + len(held_out) * 31]


@pytest.mark.parametrize("change", ["no_template", "none_wanted", "all"])
def test_chats_are_a_share_of_what_the_source_writes(planted_source, target, monkeypatch, change):
    if change == "no_template":
        (planted_source / "chat_template.jinja").unlink()
    share = {"no_template": 0.5, "none_wanted": 0.0, "all": 1.0}[change]
    recipe = stopped_healing(planted_source, target, monkeypatch, chat_share=share)
    kind = "chats" if change == "all" else "sampled"
    assert [(Path(source.path).stem, source.weight) for source in recipe.data][2:] == [(kind, 0.3)]


def test_chat_begins_with_all_that_stands_before_a_users_words():
    """A system prompt as well; a space before the words belongs to the first of them."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "<s>the gate opens [user] {{ messages[0]['content'] | trim }} [/user]"
    expected = tokenizer("<s>the gate opens [user]", add_special_tokens=False)["input_ids"]
    assert chat_beginning(tokenizer) == expected and expected[0] == tokenizer.bos_token_id
    tokenizer.chat_template = None
    assert chat_beginning(tokenizer) == []


def test_a_row_that_has_no_room_for_a_chat_is_refused(planted_source, target):
    template = planted_source / "chat_template.jinja"
    template.write_text("the gate " * 20 + template.read_text())
    words = "`length` must be more than .* with a `chat_share`: .* got 32. Or give `chat_share` 0"
    with pytest.raises(ConversionError, match=words):
        heal(planted_source, target, TEXT, options(), echo=lambda text: None)
    assert not left_beside(target)


@pytest.mark.parametrize("lost", ["text", "copies", "sampled", "chats"])
def test_rows_that_were_not_finished_are_written_the_same(planted_source, target, monkeypatch, lost):
    recipe = stopped_healing(planted_source, target, monkeypatch)
    paths = [Path(source.path) for source in recipe.data]
    expected = [path.read_bytes() for path in paths]
    (lost_path,) = (path for path in paths if path.stem == lost)
    lost_path.unlink()
    lost_path.with_suffix(".unfinished").write_text("{")
    stopped_healing(planted_source, target, monkeypatch)
    assert [path.read_bytes() for path in paths] == expected


def test_sampled_rows_are_what_the_model_predicts(tmp_path):
    """A model that is sure of what comes next after each token writes just that, past its end-of-text token too."""
    model = tiny_llama(layers=1)
    tokenizer = tiny_tokenizer()
    # The model has more tokens than the tokenizer.
    size = len(tokenizer)
    assert size < TINY_SHAPE["vocab_size"]
    follows = torch.arange(TINY_SHAPE["vocab_size"])
    follows[:size] = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        codes = torch.nn.functional.normalize(torch.randn(TINY_SHAPE["vocab_size"], TINY_SHAPE["hidden_size"]), dim=-1)
        model.model.embed_tokens.weight.copy_(codes)
        model.model.norm.weight.fill_(1)
        model.lm_head.weight[follows] = 100 * codes
    source = save_source(tmp_path / "source", model)
    firsts = ordinary_tokens(tokenizer)[:, None]
    starts = torch.cat([torch.ones_like(firsts), firsts], dim=1)
    rows = list(sampled_rows(source, tokenizer, starts, 13, seed=3))
    assert rows == list(sampled_rows(source, tokenizer, starts, 13, seed=3))
    assert [row[:2] for row in rows] == starts.tolist() and len(rows) > 30
    for row in rows:
        assert len(row) == 13 and row[2:] == follows[torch.tensor(row[1:-1])].tolist()


def test_copied_rows_repeat_passages_whose_tokens_are_all_different():
    vocabulary, generator = torch.arange(100, 400), torch.Generator().manual_seed(0)
    distances, repeated = [], 0
    for _ in range(200):
        row = copied_row(vocabulary, 64, generator)
        assert len(row) == 64 and set(row) <= set(vocabulary.tolist())
        firsts = {}
        for place, token in enumerate(row):
            first = firsts.setdefault(token, place)
            if first != place and row[place - 1] == row[first - 1]:
                distances.append(place - first)
        # No token comes three times.
        assert all(row.count(token) <= 2 for token in row)
        repeated += 64 - len(firsts)
    assert min(distances) == 8 and max(distances) > 40
    assert sum(distance < 16 for distance in distances) > 0.25 * len(distances)
    assert 0.3 < repeated / (200 * 64) < 0.5


def test_a_row_must_not_be_longer_than_the_vocabulary_that_is_copied(tmp_path, target):
    source = save_source(tmp_path / "source", planted_sink())
    with pytest.raises(
        ConversionError, match="has so many ordinary tokens, and none is drawn twice in a row; got 128"
    ):
        heal(source, target, TEXT, options(length=128), echo=lambda text: None)
    assert not left_beside(target)


def test_command_and_recipe_train_in_the_same_way():
    recipe = yaml.safe_load(RECIPE.read_text())
    made = healing_recipe("source", "transferred", "text.jsonl", "held-out.jsonl", "healed", HealingOptions())
    for name in (
        "objective",
        "parameter_groups",
        "length",
        "max_steps",
        "per_device_train_batch_size",
        "warmup_steps",
    ):
        assert recipe[name] == made[name], name
    for name in ("learning_rate", "lr_scheduler_type", "max_grad_norm", "eval_steps", "save_steps"):
        assert float(recipe[name]) == made[name] if name == "learning_rate" else recipe[name] == made[name], name
    assert recipe["distillation"]["sink_share"] == made["distillation"]["sink_share"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": 50}, "`tokens` must hold a step of 2 rows of 32 tokens, got 50"),
        ({"smoothing": 2}, "`smoothing` must be at least 0 and at most 1, got 2"),
        ({"chat_share": 1.5}, "`chat_share` must be at least 0 and at most 1, got 1.5"),
        ({"copy_share": 1}, "`copy_share` must be at least 0 and at most 0.5, got 1"),
        ({"sampled_share": -0.1}, "`sampled_share` must be at least 0 and at most 0.5, got -0.1"),
        ({"copy_share": 0.5, "sampled_share": 0.45}, "must leave a tenth for the text, got 0.5 and 0.45"),
        ({"length": 8}, "`length` must be 16 or more, got 8"),
        ({"transfer": {"test_tokens": 0}}, "a healing is tested"),
        ({"length": 300, "tokens": 2000}, "`test_tokens` must be at least a row of `length` 300, got 256"),
    ],
    ids=["tokens", "smoothing", "chats", "copies", "sampled", "no_text", "length", "no_test", "short_test"],
)
def test_options_that_make_no_sense_are_refused(changes, words):
    with pytest.raises(ConversionError, match=words):
        options(**changes)


def test_nothing_is_left_of_a_healing_that_cannot_begin(planted_source, target, tmp_path):
    target.mkdir()
    (target / "mine.txt").write_text("mine")
    with pytest.raises(ConversionError, match="is not empty"):
        heal(planted_source, target, TEXT, options())
    assert not left_beside(target) and (target / "mine.txt").read_text() == "mine"
    sinkless = save_source(tmp_path / "sinkless", tiny_llama())
    with pytest.raises(NothingToTransferError):
        heal(sinkless, tmp_path / "new", TEXT, options())
    assert not left_beside(tmp_path / "new")


def test_command(planted_source, target, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    sizes = ["--tokens", "256", "--length", "32", "--calibration-tokens", "1024", "--calibration-length", "32"]
    command = [COMMAND, "heal", planted_source, target, "--text", text, "--test-tokens", "256", *sizes]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "end of text.txt" in process.stdout and f"the healed model is in {target}" in process.stdout
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 1 and "is not empty" in again.stderr and "Traceback" not in again.stderr
