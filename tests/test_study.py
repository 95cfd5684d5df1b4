"""A study of small models: its corpus and tasks, its runs, and what it writes."""

import contextlib
import copy
import itertools
import json
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from conftest import tiny_gated, tiny_input_ids
from transformers import AutoModelForCausalLM

from gated_attention import inspect_model
from gated_attention.configuration import GATE_VARIANTS
from gated_attention.study import (
    TASKS,
    CorpusOptions,
    StudyError,
    TaskRow,
    build_corpus,
    extension,
    load_study,
    make_study,
    run_study,
    task_accuracy,
)
from gated_attention.study.corpus import Document, without_shared_passages
from gated_attention.study.gates import gates_of
from gated_attention.study.plan import narrower, parameters_of
from gated_attention.study.report import spread
from gated_attention.study.tasks import is_test_key
from gated_attention.training import DivergedError, train


STUDIES = Path(__file__).parent.parent / "recipes" / "studies"
OPTIONS = CorpusOptions(
    sources=["help"], characters=200_000, vocab_size=600, lengths=[128], task_rows=20, test_share=0.2
)
MODEL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return build_corpus(tmp_path_factory.mktemp("corpus") / "corpus", OPTIONS, progress=False)


def rows_of(corpus, name):
    lines = (corpus.folder / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line)["input_ids"] for line in lines]


TABLES = [{"title": "One", "runs": [{"variant": "baseline"}]}]


def study(**changes):
    return make_study(study_content(**changes))


def study_content(**changes):
    content = {
        "name": "tiny",
        "about": "A trial.",
        "corpus": {
            "sources": ["help"],
            "characters": 200_000,
            "vocab_size": 600,
            "lengths": [128],
            "task_rows": 20,
            "test_share": 0.2,
        },
        "recipe": {
            "new_model": MODEL,
            "length": 128,
            "max_steps": 4,
            "per_device_train_batch_size": 2,
            "learning_rate": "1e-3",
            "logging_steps": 1,
            "save_steps": 2,
            "use_cpu": True,
            "diagnostics": {"every": 0},
        },
        "tests": {"tokens": 512, "answers": 4},
        "tables": [
            {
                "title": "First",
                "paper": "variants",
                "seeds": [0, 1],
                "least_f_attn": 0.9,
                "measures": ["parameters", "perplexity", "accuracy", "f_attn", "gate_mean"],
                "runs": [{"variant": "baseline"}, {"variant": "g1_elementwise", "equal_parameters": True}],
            },
            {"title": "Second", "runs": [{"variant": "baseline"}]},
        ],
    }
    return copy.deepcopy({**content, **changes})


def test_rows_begin_alike_and_have_their_length(corpus):
    begin = corpus.tokenizer.bos_token_id
    for name in ("text-128", *(f"{task}-128" for task in TASKS)):
        rows = rows_of(corpus, name)
        assert rows and all(len(row) == 128 and row[0] == begin for row in rows), name
    windows = corpus.test_windows(128, 512)
    assert len(windows) == 4 and all(len(row) == 128 and row[0] == begin for row in windows)
    # From all of the held-out text, not from its beginning.
    held_out = " ".join(str(token) for row in rows_of(corpus, "test") for token in row[1:])
    places = [held_out.index(" ".join(map(str, window[1:9]))) / len(held_out) for window in windows]
    assert places == pytest.approx([0, 0.25, 0.5, 0.75], abs=0.03)


def test_held_out_documents_are_not_trained_on(corpus):
    """Nor are passages that pages quote from each other."""
    decode = corpus.tokenizer.decode
    trained = decode([token for row in rows_of(corpus, "text-128") for token in row[1:]])
    tested = decode([token for row in corpus.test_windows(128, 4096) for token in row[1:]])
    passages = [part for part in tested.split("\n\n")[1:-1] if len(part) > 100]
    assert len(passages) > 20
    assert not [part for part in passages if part in trained]


def test_shared_passages_stay_on_the_side_of_the_test():
    shared = "This passage is long enough to be told from what anybody might have written, and stands in both."
    found = without_shared_passages(
        [Document("a", f"Mine.\n\n{shared.replace(' ', chr(10), 3)}\n\nShort."), Document("b", shared)],
        [Document("c", f"{shared}\n\nShort.")],
    )
    assert found == [Document("a", "Mine.\n\nShort.")]


def test_text_comes_back_from_its_tokens(corpus):
    tokenizer = corpus.tokenizer
    text = "Gates, 2505 of them:\n\té ≤ 1"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert [token for token in tokenizer.convert_ids_to_tokens(ids) if token.isdigit()] == list("25051")


def test_rows_to_train_recall_on_ask_again_and_again(corpus):
    recall = TASKS["recall"](corpus.tokenizer)
    filler, draws = corpus._held_out, random.Random(0)
    rows = [recall(128, filler, False, draws) for _ in range(50)]
    assert all(len(row.input_ids) == 128 for row in rows)
    assert max(len(row.answers) for row in rows) > 2 * recall.pairs
    for row in rows:
        for (start, end), depth in zip(row.answers, row.depths, strict=True):
            fact = row.input_ids[start - 2 : end]
            places = [at for at in range(start - 2) if row.input_ids[at : at + 3] == fact]
            assert places and places[0] == round(depth * (start - 2))
            assert not is_test_key(str(fact[1]))


@pytest.mark.parametrize("task", TASKS)
def test_answer_is_in_the_row_at_its_depth(corpus, task):
    for row in corpus.test_rows(task, 160, 10):
        assert len(row.input_ids) == 160
        question = min(start for start, _ in row.answers)
        for (start, end), depth in zip(row.answers, row.depths, strict=True):
            answer, before = row.input_ids[start:end], row.input_ids[start - 1]
            places = [
                place
                for place in range(1, question)
                if row.input_ids[place : place + len(answer)] == answer and row.input_ids[place - 1] == before
            ]
            assert places
            assert any(abs(place / question - depth) < 0.2 for place in places)


@pytest.mark.parametrize("task", TASKS)
def test_keys_of_the_test_are_not_trained_on(corpus, task):
    tokenizer = corpus.tokenizer

    def keys(rows):
        key = tokenizer.convert_tokens_to_ids("<|key|>")
        for row in rows:
            if task == "recall":
                yield from (str(after) for token, after in itertools.pairwise(row) if token == key)
            else:
                yield "".join(tokenizer.convert_ids_to_tokens(row[-5:]))

    trained = set(keys(rows_of(corpus, f"{task}-128")))
    tested = set(keys(row.input_ids for row in corpus.test_rows(task, 128, 20)))
    assert all(is_test_key(key) for key in tested)
    assert not any(is_test_key(key) for key in trained)


def test_rows_to_test_on_are_the_same_each_time(corpus):
    assert corpus.test_rows("needles", 128, 3) == corpus.test_rows("needles", 128, 3)


class Copier(torch.nn.Module):
    """Predicts what followed the token when it was there last, as a perfect head for recall would."""

    device = torch.device("cpu")

    def forward(self, input_ids, use_cache, logits_to_keep):
        logits = torch.zeros(*input_ids.shape, 2000)
        for row, ids in enumerate(input_ids.tolist()):
            for place, token in enumerate(ids):
                for earlier in range(place):
                    if ids[earlier] == token:
                        logits[row, place, ids[earlier + 1]] = earlier + 1
        return type("Output", (), {"logits": logits[:, -logits_to_keep:]})


def test_accuracy_counts_what_is_right():
    ids = [7, 11, 21, 12, 22, 13, 23, 12, 22, 11, 99, 13, 23]
    row = TaskRow(ids, [(8, 9), (10, 11), (12, 13)], [0.1, 0.5, 0.9])
    found = task_accuracy(Copier(), [row], depths=2)
    assert found.answers == 3 and found.accuracy == pytest.approx(2 / 3)
    assert found.by_depth == [1.0, 0.5]


def test_accuracy_wants_every_token_of_an_answer():
    ids = [7, 11, 21, 31, 12, 11, 21, 99]
    assert task_accuracy(Copier(), [TaskRow(ids, [(6, 8)], [0.0])]).accuracy == 0.0
    assert task_accuracy(Copier(), [TaskRow(ids, [(6, 7)], [0.0])]).accuracy == 1.0


def test_accuracy_of_a_model_runs(corpus):
    model = tiny_gated(vocab_size=600, max_position_embeddings=128)
    assert 0 <= task_accuracy(model, corpus.test_rows("recall", 128, 3)).accuracy <= 1


def test_corpus_is_made_once(corpus):
    stamp = (corpus.folder / "corpus.json").stat().st_mtime_ns
    assert build_corpus(corpus.folder, OPTIONS, progress=False).manifest == corpus.manifest
    assert (corpus.folder / "corpus.json").stat().st_mtime_ns == stamp
    with pytest.raises(StudyError, match=r"other options \(seed\)"):
        build_corpus(corpus.folder, CorpusOptions(**{**vars(OPTIONS), "seed": 1}), progress=False)


def test_corpus_is_the_same_when_it_is_made_again(corpus, tmp_path):
    assert build_corpus(tmp_path / "again", OPTIONS, progress=False).manifest["sha256"] == corpus.manifest["sha256"]


def test_own_texts_are_a_source(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text(f"Text {number}. " + "The whale is white, and the sea is wide. " * 30)
    options = CorpusOptions(sources=[str(texts)], vocab_size=512, lengths=[128], tasks={"pass_key": 0.1}, task_rows=2)
    made = build_corpus(tmp_path / "corpus", options, progress=False)
    assert made.manifest["sources"][str(texts)]["documents"] == 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sources": ["nowhere/*.txt"]}, "no such file"),
        ({"sources": []}, "at least one source"),
        ({"tasks": {"recal": 0.1}}, "there are recall, pass_key, needles"),
        ({"tasks": {"recall": 1.0}}, "leave some of the rows"),
        ({"lengths": [32]}, "64 or more"),
        ({"test_share": 0.0}, "between 0 and 1"),
        ({"sources": ["help"], "test_share": 1e-9}, "no document to test on"),
        ({"sources": ["help"], "lengths": [64]}, "`length` must be at least"),
        # Of which rows to train on can be made, and rows to test on cannot.
        (
            {"sources": ["help"], "lengths": [128, 64], "tasks": {"recall": 0.2}},
            "at least 97 for the task recall, got 64",
        ),
        ({"sources": ["SELF"], "characters": 100_000}, "`corpus.characters` must hold a document of"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_corpus_that_cannot_be(tmp_path, options, message):
    if options.get("sources") == ["SELF"]:
        (tmp_path / "long.txt").write_text("A long text. " * 10_000)
        options = {**options, "sources": [str(tmp_path / "long.txt")]}
    with pytest.raises(StudyError, match=message):
        build_corpus(
            tmp_path / "corpus", CorpusOptions(**{"task_rows": 5, "vocab_size": 600, **options}), progress=False
        )
    assert not (tmp_path / "corpus").exists()


def test_equal_parameters():
    fields = {**MODEL, "vocab_size": 600, "variant": "g1_elementwise"}
    allowed = parameters_of({**fields, "variant": "baseline"})
    width = narrower(fields)
    assert parameters_of({**fields, "intermediate_size": width}) <= allowed
    assert parameters_of({**fields, "intermediate_size": width + 1}) > allowed
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    with pytest.raises(StudyError, match="`equal_parameters` needs dense layers"):
        narrower({**fields, **experts})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    said = []
    found = run_study(study(), folder, echo=said.append)
    return folder, found, said


def test_study_writes_a_row_a_run_and_shares_runs(finished):
    folder, found, said = finished
    assert said[0] == "tiny: 4 runs, 0 of them finished before"
    with sqlite3.connect(folder / "runs.sqlite") as connection:
        rows = connection.execute("SELECT variant, seed, perplexity FROM runs ORDER BY variant, seed").fetchall()
    assert [row[:2] for row in rows] == [
        ("baseline", 0),
        ("baseline", 1),
        ("g1_elementwise", 0),
        ("g1_elementwise", 1),
    ]
    assert found["Second"][0]["perplexity"] == found["First"][0]["perplexity"] == rows[0][2]


def test_study_writes_tables_and_figures(finished):
    folder, found, _ = finished
    report = (folder / "report.md").read_text()
    line = next(line for line in report.splitlines() if line.startswith("| g1_elementwise, equal parameters |"))
    assert "(5.761)" in line and "±" in line
    assert "**Void as far as sinks go**" in report
    for picture in ("1-perplexity", "1-layers", "1-gates", "1-loss"):
        assert (folder / "figures" / f"{picture}.png").stat().st_size > 5000
        assert f"figures/{picture}.png" in report
    content = json.loads((folder / "results.json").read_text())
    assert content["tables"]["First"][0]["perplexity"] == found["First"][0]["perplexity"]
    assert content["corpus"]["sources"]["help"]["licence"] == "PSF licence"


def test_finished_study_changes_nothing(finished, monkeypatch):
    folder, found, _ = finished
    monkeypatch.setattr("gated_attention.study.training.train", lambda *_, **__: pytest.fail("trained again"))
    before = (folder / "report.md").read_text(), (folder / "results.json").read_text()
    said = []
    assert run_study(study(), folder, echo=said.append) == found
    assert said[0] == "tiny: 4 runs, 4 of them finished before"
    assert before == ((folder / "report.md").read_text(), (folder / "results.json").read_text())


def test_several_processes_find_what_one_finds(tmp_path):
    wanted = lengths()
    alone = run_study(wanted, tmp_path / "1")
    said = []
    together = run_study(wanted, tmp_path / "2", echo=said.append, jobs=2)
    assert together == alone
    number = 2 + len(alone["Longer"])  # the two trainings
    assert [line.split(":")[0] for line in said[1:-1]] == [f"{one} of {number}" for one in range(1, number + 1)]


def test_what_fails_in_a_process_of_its_own_is_said_as_usual(tmp_path):
    variants = ["baseline", "g1_headwise", "g1_elementwise", "g1_head_shared"]
    wanted = study(tables=[{"title": "One", "runs": [{"variant": variant} for variant in variants]}])
    corpus = build_corpus(tmp_path / "corpus", wanted.corpus, progress=False)
    blocked, other, *later = (run.key(corpus) for run in wanted.runs(wanted.tables[0]))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / blocked).write_text("in the way")
    with pytest.raises(StudyError, match=blocked):
        run_study(wanted, tmp_path, jobs=2)
    # What was begun is finished, and nothing else is begun.
    assert (tmp_path / "models" / other).is_dir()
    assert not any((tmp_path / "models" / key).exists() for key in later)
    (tmp_path / "models" / blocked).unlink()
    found = run_study(wanted, tmp_path, jobs=2)["One"]
    assert [run["variant"] for run in found] == variants


IN_PROCESSES = """
import sys
from gated_attention.study import load_study, run_study

if __name__ == "__main__":
    run_study(load_study(sys.argv[1]), sys.argv[2], jobs=2)
"""


def test_processes_end_with_the_study(tmp_path):
    """Killed, it must not leave trainings behind that its successor would meet in the same folders."""
    script, plan, folder = tmp_path / "script.py", tmp_path / "study.yaml", tmp_path / "folder"
    script.write_text(IN_PROCESSES)
    # Longer than the test waits.
    content = study_content(tables=[{"title": "One", "seeds": [0, 1], "runs": [{"variant": "baseline"}]}])
    content["recipe"]["max_steps"] = 100_000
    plan.write_text(json.dumps(content))
    study_process = subprocess.Popen([sys.executable, script, plan, folder], stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: len(list(folder.glob("models/*/checkpoint-*"))) >= 2)
        processes = psutil.Process(study_process.pid).children(recursive=True)
        assert len([one for one in processes if "spawn_main" in " ".join(one.cmdline())]) == 2
    finally:
        study_process.kill()
        study_process.wait()
    _, left = psutil.wait_procs(processes, timeout=60)
    assert not left


def wait_for(reached, seconds: float = 240) -> None:
    ended = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < ended
        time.sleep(0.2)


def test_stopped_study_goes_on_from_the_checkpoint(finished, tmp_path, monkeypatch):
    """Killed in the middle of a training; the results are those of a study that was not, however its folder is written."""
    _, found, _ = finished
    from transformers import Trainer

    original, steps = Trainer.training_step, []

    def training_step(self, *arguments, **options):
        steps.append(self.state.global_step)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return original(self, *arguments, **options)

    monkeypatch.setattr(Trainer, "training_step", training_step)
    with pytest.raises(KeyboardInterrupt):
        run_study(study(), tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    again = run_study(study(), tmp_path.name)
    assert steps[4] == 2  # of the first run, from its checkpoint on
    for title, results in found.items():
        for before, now in zip(results, again[title], strict=True):
            assert {**now, "seconds": 0} == {**before, "seconds": 0}


def diverging(recipe, **options):
    raise DivergedError("the loss is nan", step=3, history=[{"step": 1, "loss": 7.0}, {"step": 2, "loss": 9.0}])


def test_run_that_diverges_is_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr("gated_attention.study.training.train", diverging)
    rates = study(
        tables=[
            {
                "title": "Rates",
                "learning_rates": ["1e-3", "1e-1"],
                "measures": ["perplexity", "spikes", "diverged"],
                "runs": [{"variant": "baseline"}],
            }
        ]
    )
    found = run_study(rates, tmp_path)
    assert [(one["learning_rate"], one["diverged"], one["steps"]) for one in found["Rates"]] == [
        (1e-3, True, 3),
        (1e-1, True, 3),
    ]
    # Nobody looked for spikes.
    assert "| baseline | 0.1 | - | - | 100% |" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "figures" / "1-stability.png").is_file()
    # How it came to that is drawn.
    assert found["Rates"][0]["loss"] == [[1, 7.0], [2, 9.0]] and (tmp_path / "figures" / "1-loss.png").is_file()


def lengths(**changes):
    content = {
        "title": "Longer",
        "runs": [{"variant": "baseline"}, {"variant": "g1_headwise"}],
        "lengths": [128, 256],
        "factor": 2.0,
        "transfer_tokens": 2048,
        "tune": {"max_steps": 2, "per_device_train_batch_size": 1},
        **changes,
    }
    corpus = {**vars(OPTIONS), "lengths": [128, 256], "tasks": {"recall": 0.2}}
    return study(tables=[], extensions=[content], corpus=corpus)


@pytest.fixture(scope="module")
def lengthened(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lengths")
    with planted_transfer():
        return folder, run_study(lengths(), folder)


@contextlib.contextmanager
def planted_transfer():
    """Models of a few steps have no sink to transfer: an ordinary conversion stands in for the transfer."""
    from gated_attention import convert_checkpoint

    def converted(source, target, text, **options):
        assert len(text) > options["tokens"]
        convert_checkpoint(source, target, gate_bias=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gated_attention.study.extension.transfer_sinks", converted)
        yield


def test_extension_measures_each_model_at_each_stage_and_length(lengthened):
    folder, found = lengthened
    names = ["baseline", "sink transfer of baseline", "g1_headwise"]
    assert [(one["name"], one["stage"]) for one in found["Longer"]] == [
        (name, stage) for name in names for stage in ("plain", "yarn", "tuned")
    ]
    for one in found["Longer"]:
        assert list(one["lengths"]) == ["128", "256"]
        assert len(one["lengths"]["256"]["loss_by_position"]) == 8
    report = (folder / "report.md").read_text()
    assert "| sink transfer of baseline | YaRN, tuned |" in report
    assert "**Void for recall" in report
    for picture in ("length-1-lengths", "length-1-depths"):
        assert (folder / "figures" / f"{picture}.png").stat().st_size > 5000


def test_stages_differ_in_what_they_should(lengthened):
    """YaRN changes the function at the trained length too; a transfer without a sink does not."""
    _, found = lengthened
    by = {(one["name"], one["stage"]): one["lengths"]["128"]["perplexity"] for one in found["Longer"]}
    assert by["sink transfer of baseline", "plain"] == pytest.approx(by["baseline", "plain"], rel=1e-6)
    assert by["baseline", "yarn"] != by["baseline", "plain"]
    assert by["baseline", "tuned"] < by["baseline", "yarn"]


def test_transfer_without_a_sink_is_said(tmp_path):
    found = run_study(lengths(runs=[{"variant": "baseline"}]), tmp_path)["Longer"]
    assert [one["lengths"] is None for one in found] == [False] * 3 + [True] * 3
    report = (tmp_path / "report.md").read_text()
    assert "No result: sink transfer of baseline, seed 0: no sink to transfer: " in report
    assert "| sink transfer of baseline | YaRN | - | - |" in report


def test_extension_of_a_run_that_diverged_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("gated_attention.study.training.train", diverging)
    found = run_study(lengths(runs=[{"variant": "g1_headwise"}]), tmp_path)["Longer"]
    assert [(one["lengths"], one["diverged"]) for one in found] == [(None, True)] * 3
    assert "No result: g1_headwise, seed 0: its training diverged at step 3." in (tmp_path / "report.md").read_text()


def test_weights_that_the_last_step_broke_are_a_divergence(tmp_path, monkeypatch):
    def broken(recipe, **options):
        result = train(recipe, **options)
        model = AutoModelForCausalLM.from_pretrained(result.output_dir)
        model.model.layers[0].mlp.up_proj.weight.data[0, 0] = float("nan")
        model.save_pretrained(result.output_dir)
        return result

    monkeypatch.setattr("gated_attention.study.training.train", broken)
    found = run_study(study(tables=[{"title": "One", "runs": [{"variant": "baseline"}]}]), tmp_path)
    assert [(one["diverged"], one["steps"], "perplexity" in one) for one in found["One"]] == [(True, 4, False)]


def test_an_error_is_no_divergence(tmp_path, monkeypatch):
    """It is said, and tried again the next time."""

    def failing(*_, **__):
        raise ValueError("something else")

    wanted = study(tables=TABLES)
    with monkeypatch.context() as patch:
        patch.setattr("gated_attention.study.run.inspect_model", failing)
        with pytest.raises(ValueError, match="something else"):
            run_study(wanted, tmp_path)
    assert not run_study(wanted, tmp_path)["One"][0]["diverged"]


@pytest.mark.parametrize("kind", ["tables", "extensions"])
def test_a_line_has_the_label_of_today(finished, lengthened, kind, tmp_path, monkeypatch):
    """Rows are kept under what decides their figures, and a label does not."""
    folder, changed = tmp_path / "folder", {"variant": "g1_headwise", "label": "mine"}
    if kind == "tables":
        shutil.copytree(finished[0], folder)
        changed["variant"] = "baseline"
        wanted, title = study(tables=[{"title": "One", "runs": [changed]}]), "One"
    else:
        shutil.copytree(lengthened[0], folder)
        wanted, title = lengths(runs=[changed]), "Longer"
    monkeypatch.setattr("gated_attention.study.training.train", lambda *_, **__: pytest.fail("trained again"))
    assert {one["name"] for one in run_study(wanted, folder)[title]} == {"mine"}
    assert "| mine |" in (folder / "report.md").read_text()


def test_a_model_that_was_removed_is_named(lengthened, tmp_path):
    folder = tmp_path / "folder"
    shutil.copytree(lengthened[0], folder)
    shutil.rmtree(folder / "models")
    with pytest.raises(StudyError, match="is gone, the model that g1_headwise, seed 0, is made of: put it back"):
        run_study(lengths(runs=[{"variant": "g1_headwise"}], factor=3.0), folder)


@pytest.mark.parametrize(
    "variant", ["g1_elementwise", "g2_elementwise", "g5_elementwise", "g2_headwise", "g1_additive_silu", "baseline"]
)
def test_gate_scores_are_those_of_the_gate(variant):
    """Wherever it is; with a histogram where all scores lie in it."""
    model = tiny_gated(**GATE_VARIANTS[variant].fields)
    windows = [row.tolist() for row in tiny_input_ids(batch=3)]
    inspection = inspect_model(model, [{"input_ids": torch.tensor(windows)}], ranks=False)
    gates = gates_of(model, inspection, windows)
    if variant == "baseline":
        assert gates == [None] * len(model.model.layers)
        return
    with torch.no_grad():
        scores = model(torch.tensor(windows), output_gate_scores=True).gate_scores
    for gate, expected in zip(gates, scores, strict=True):
        assert gate.mean == pytest.approx(expected.double().mean().item(), rel=1e-5)
        if variant == "g1_additive_silu":
            assert gate.histogram is None
            continue
        assert sum(gate.histogram) == pytest.approx(1)
        bins, end = len(gate.histogram), gate.histogram_end
        low = sum((expected < end * 20 / bins).flatten().tolist()) / expected.numel()
        assert sum(gate.histogram[:20]) == pytest.approx(low, abs=1e-4)


@pytest.mark.parametrize("place", ["measured", "with_yarn", "copy_tokenizer"])
def test_extension_goes_on_wherever_it_was_stopped(lengthened, tmp_path, monkeypatch, place):
    """Killed before the row is written, and while models are made."""
    _, found = lengthened
    wanted = lengths(runs=[{"variant": "g1_headwise"}])
    original, calls = getattr(extension, place), []

    def stopped(*arguments, **options):
        calls.append(place)
        if len(calls) in (1, 3):
            raise KeyboardInterrupt
        return original(*arguments, **options)

    monkeypatch.setattr(extension, place, stopped)
    for _ in range(2):
        with contextlib.suppress(KeyboardInterrupt):
            run_study(wanted, tmp_path)
    again = run_study(wanted, tmp_path)["Longer"]
    assert len(calls) >= 2
    assert again == [one for one in found["Longer"] if one["variant"] == "g1_headwise"]
    assert not list((tmp_path / "models").rglob("checkpoint-*"))


def test_changed_extension_makes_models_of_its_own(lengthened, tmp_path):
    folder, found = lengthened
    stretched = lengths(runs=[{"variant": "g1_headwise"}], factor=4.0)
    again = run_study(stretched, shutil.copytree(folder, tmp_path / "copy"))["Longer"]
    before = [one for one in found["Longer"] if one["variant"] == "g1_headwise"]
    assert [one["perplexity"] == old["perplexity"] for one, old in zip(again, before, strict=True)] == [
        True,
        False,
        False,
    ]


def test_shares_of_tasks_are_part_of_a_run(corpus, tmp_path):
    other = build_corpus(
        tmp_path / "other", CorpusOptions(**{**vars(OPTIONS), "tasks": {"recall": 0.3}}), progress=False
    )
    more = build_corpus(
        tmp_path / "more", CorpusOptions(**{**vars(OPTIONS), "tasks": {"recall": 0.1}}), progress=False
    )
    (run,) = study(tables=[{"title": "One", "runs": [{"variant": "baseline"}]}]).runs(study().tables[1])
    assert len({run.key(one) for one in (corpus, other, more)}) == 3


def test_model_that_llama_cannot_hold_is_refused(tmp_path):
    content = lengths(runs=[{"variant": "baseline", "changes": {"new_model": {"zero_centered_norm": True}}}])
    with pytest.raises(StudyError, match="`transfer` needs a model that Llama can hold"):
        run_study(content, tmp_path)


def test_finished_extension_is_not_done_again(lengthened, monkeypatch):
    folder, found = lengthened
    monkeypatch.setattr("gated_attention.study.run.finish_stage", lambda *_, **__: pytest.fail("done again"))
    monkeypatch.setattr("gated_attention.study.training.train", lambda *_, **__: pytest.fail("trained again"))
    assert run_study(lengths(), folder) == found


@pytest.mark.parametrize("smoke", [False, True], ids=["whole", "smoke"])
@pytest.mark.parametrize("name", sorted(path.stem for path in STUDIES.glob("*.yaml")))
def test_studies_of_the_repository_can_be_read(name, smoke):
    found = load_study(STUDIES / f"{name}.yaml", smoke)
    assert found.name == name and found.about.strip().endswith(".")
    for table in (*found.tables, *found.extensions):
        for run in table.runs:
            if run.equal_parameters:
                narrower({**found.recipe["new_model"], "variant": run.variant, "vocab_size": found.corpus.vocab_size})
            steps = {**found.recipe, **run.changes}["max_steps"], getattr(table, "tune", {}).get("max_steps", 0)
            assert (max(steps) <= 20 and len(table.seeds) == 1) if smoke else min(steps) != 20


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0], "1.00"),
        ([1.0, 3.0], "2.00 ± 1.41"),
        ([2.0, 2.0], "2.00"),
        ([None], "-"),
        ([1.0, None], "1.00 (1 of 2 runs)"),
    ],
)
def test_spread(values, expected):
    assert spread(values, "{:.2f}") == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [256, 128]}, "the shortest first"),
        ({"lengths": [64, 256]}, "must begin with the recipe's `length` 128"),
        ({"lengths": [128, 512]}, "the corpus must have rows of the first and the last"),
        ({"factor": 1.0}, "`factor` must be greater than 1"),
        ({"tune": {}}, "`tune.max_steps` must be given"),
        ({"transfer_tokens": 1000}, "must hold 8 windows of 128 tokens"),
        ({"runs": []}, "`runs` of the extension 'Longer' must not be empty"),
        ({"tune": {"max_steps": 2, "length": 64}}, "`tune.length` must be left out"),
        ({"seeds": [1, 1]}, "`seeds` of 'Longer' must be different ones"),
    ],
    ids=["order", "first", "rows", "factor", "steps", "windows", "runs", "length", "seeds"],
)
def test_extension_that_cannot_be(changes, message):
    with pytest.raises(StudyError, match=message):
        lengths(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tables": []}, "must hold at least one"),
        ({"tables": [{"title": "A", "runs": [{"variant": "baseline"}]}] * 2}, "a `title` of its own"),
        ({"tables": [{"title": "A", "runs": [{"variant": "g9"}]}]}, "`variant` must be one of"),
        ({"tables": [{"title": "A", "runs": [{"variant": "baseline"}], "measures": ["ppl"]}]}, "there are parameters"),
        ({"tables": [{"title": "A", "runs": [{"variant": "baseline"}], "seed": [1]}]}, "did you mean `seeds`"),
        ({"recipe": {"length": 128}}, "`recipe.new_model` must be given"),
        ({"recipe": {"new_model": MODEL, "learning_rat": 1}}, "did you mean `learning_rate`"),
        ({"recipe": {"new_model": MODEL, "data": []}}, "`recipe.data` must be left out"),
        ({"tests": {"answers": 0}}, "`tests.answers` must be 1 or more"),
        (
            {"tables": [{"title": "A", "runs": [{"variant": "baseline", "changes": {"seed": 7}}]}]},
            "`changes.seed` must be left out",
        ),
        (
            {
                "tables": [
                    {
                        "title": "A",
                        "runs": [{"variant": "baseline"}, {"variant": "baseline", "changes": {"bf16": True}}],
                    }
                ]
            },
            "two runs of 'A' are called 'baseline': give one of them a `label`",
        ),
    ],
    ids=["no-table", "title", "variant", "measure", "key", "model", "argument", "data", "answers", "seed", "names"],
)
def test_study_that_cannot_be(changes, message):
    with pytest.raises(StudyError, match=message):
        study(**changes)


def test_short_setting_must_be_there():
    with pytest.raises(StudyError, match="no short setting"):
        make_study({"name": "a", "about": "b", "recipe": {"new_model": MODEL}, "tables": TABLES}, smoke=True)


def test_narrower_takes_the_default_width():
    fields = {key: value for key, value in MODEL.items() if key != "intermediate_size"}
    assert narrower({**fields, "vocab_size": 600, "variant": "g1_elementwise"}) > 1000


def test_more_held_out_tokens_than_there_are_is_known_before_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr("gated_attention.study.training.train", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(StudyError, match="too few for 10000000"):
        run_study(study(tests={"tokens": 10_000_000}), tmp_path)
