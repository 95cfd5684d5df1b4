"""Training from a recipe: what is trained, on what, and what is left when it stops."""

import collections
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import yaml
from conftest import (
    COMMAND,
    TINY_SHAPE,
    logits_of,
    randomise,
    tiny_gated,
    tiny_input_ids,
    tiny_llama,
    tiny_tokenizer,
)
from datasets import Dataset
from huggingface_hub import ModelCard
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    TrainerCallback,
)

from gated_attention import GatedAttentionConfig, GatedAttentionForCausalLM, convert_checkpoint
from gated_attention.training import RecipeError, gate_parameters, load_recipe, make_recipe, resolve_groups, train
from gated_attention.training.packing import PackedCollator, pack
from gated_attention.training.recipe import DataSource, ParameterGroup
from gated_attention.training.trainer import PretrainTrainer, refuse_silent_fallbacks


RECIPES = Path(__file__).parent.parent / "recipes"
WORDS = ["the gate opens", "the sink closes", "attention to the first token", "the first gate", "the sink"]


def texts(count: int, seed: int = 0) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(len(WORDS), (count, 6), generator=generator)
    lengths = torch.randint(1, 7, (count,), generator=generator)
    return [
        " ".join(WORDS[word] for word in row[:length]) for row, length in zip(draws.tolist(), lengths, strict=True)
    ]


def write_jsonl(path, records) -> str:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return str(path)


@pytest.fixture
def gated(source, tmp_path):
    convert_checkpoint(source, tmp_path / "gated", verify="headers")
    return tmp_path / "gated"


@pytest.fixture
def content(gated, tmp_path) -> dict:
    """A recipe that runs in a second."""
    return {
        "model": str(gated),
        "output_dir": str(tmp_path / "out"),
        "data": [{"path": write_jsonl(tmp_path / "train.jsonl", [{"text": text} for text in texts(200)])}],
        "evaluation_data": [{"path": write_jsonl(tmp_path / "test.jsonl", [{"text": text} for text in texts(9, 1)])}],
        "length": 32,
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "diagnostics": {"every": 0},
    }


def run(content: dict, **changes):
    return train(make_recipe(content | changes), echo=lambda text: None)


def losses(result) -> list[float]:
    return [entry["loss"] for entry in result.history if "loss" in entry]


def tensors_of(folder) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in Path(folder).glob("*.safetensors")
        if "start" not in path.name
        for name, tensor in load_file(path).items()
    }


# ---- recipes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learning_rat": 1e-3}, ["unknown key `learning_rat`", "`learning_rate`"]),
        ({"lora": {"rank": 8}}, ["unknown key `lora.rank`"]),
        ({"data": [{"path": "x", "colum": "y"}]}, ["unknown key `data.0.colum`", "`column`"]),
        ({"length": "long"}, ["`length` must be of type int, got 'long'"]),
        ({"length": 1}, ["`length` must be 2 or more"]),
        ({"train": "some"}, ["`train` must be one of 'all', 'gates', 'lora'; got 'some'"]),
        ({"data": []}, ["`data` must name at least one source"]),
        ({"data": [{"weight": 1}]}, ["`data.0.path` must be given"]),
        ({"data": [{"path": "x", "weight": 0}]}, ["`data.0.weight` must be positive"]),
        ({"model": None}, ["`model` or `new_model`"]),
        ({"new_model": {}}, ["`model` or `new_model`"]),
        ({"parameter_groups": [{"pattern": "("}]}, ["`parameter_groups.0.pattern`", "regular expression"]),
        (
            {"parameter_groups": [{"pattern": "a", "learning_rate": -1}]},
            ["`parameter_groups.0.learning_rate`", "factor"],
        ),
        (
            {"parameter_groups": [{"pattern": "a", "from_step": 4, "until_step": 3}]},
            ["`parameter_groups.0.until_step`"],
        ),
        ({"objective": "sft", "long_records": "split"}, ["`long_records`", "sft"]),
        ({"lora": {"r": 4}}, ["`lora` must be left out with `train: all`"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_recipes_that_make_no_sense_are_refused(content, changes, words):
    with pytest.raises(RecipeError) as error:
        make_recipe(content | changes)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_command_line_stands_over_the_file(content, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content).replace("0.001", "1e-3"))
    recipe = load_recipe(
        path, ["--train", "lora", "--learning_rate", "2e-5", "--lora.r=4", "--data.0.weight", "3", "--max-steps", "9"]
    )
    assert recipe.arguments["learning_rate"] == 2e-5 and recipe.arguments["max_steps"] == 9
    assert (recipe.lora.r, recipe.data[0].weight) == (4, 3.0)
    assert load_recipe(path).arguments["learning_rate"] == 1e-3
    assert load_recipe(path, ["--data.1.path", "more.txt", "--data.1.weight", "2"]).data[1] == DataSource(
        "more.txt", weight=2.0
    )
    for words, message in (
        (["--data.7.path", "x"], "no entry 7 among 1, and the next new one is 1"),
        (["x"], "expected --key value"),
        (["--length"], "needs a value"),
        (["--lenght", "3"], "did you mean `length`"),
    ):
        with pytest.raises(RecipeError, match=message):
            load_recipe(path, words)


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", None], ids=["list", "no_yaml", "missing"])
def test_files_that_are_no_recipes_are_refused(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RecipeError, match=r"recipe\.yaml"):
        load_recipe(path)


def test_command(content, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    process = subprocess.run([COMMAND, "train", str(path), "--max_steps", "2"], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "parameters  tensors  numbers" in process.stdout and "eval_perplexity" in process.stdout
    refused = subprocess.run([COMMAND, "train", str(path), "--max_step", "2"], capture_output=True, text=True)
    assert refused.returncode == 1 and "did you mean `max_steps`" in refused.stderr
    assert "Traceback" not in refused.stderr


# ---- parameter groups


def test_first_group_that_fits_counts():
    model = tiny_gated()
    groups = resolve_groups(model, [ParameterGroup("gates"), ParameterGroup(r"layers\.1\."), ParameterGroup("_proj")])
    names = [set(one.names) for one in groups]
    assert names[0] == {f"model.layers.{layer}.self_attn.g_proj.weight" for layer in range(3)}
    assert "model.layers.1.mlp.up_proj.weight" in names[1] and "model.layers.0.mlp.up_proj.weight" in names[2]
    assert names[3] == {name for name, _ in model.named_parameters()} - names[0] - names[1] - names[2]
    with pytest.raises(RecipeError, match=r"parameter_groups\.1\.pattern` '_proj' fits no parameter that an earlier"):
        resolve_groups(model, [ParameterGroup("."), ParameterGroup("_proj")])
    with pytest.raises(RecipeError, match="'nosuch' fits no parameter; names are such as"):
        resolve_groups(model, [ParameterGroup("nosuch")])
    with pytest.raises(RecipeError, match="the model has no gates"):
        resolve_groups(tiny_llama(), [ParameterGroup("gates")])


def test_factors_reach_the_optimizer(content, monkeypatch):
    """One step of plain gradient descent moves each parameter by its rate times its gradient; a rate of 0 by nothing."""
    groups = [
        {"pattern": "gates", "learning_rate": 10.0},
        {"pattern": "mlp", "learning_rate": 0.0},
        {"pattern": r"self_attn\.q_proj", "learning_rate": 0.5},
    ]
    before = tensors_of(content["model"])
    options = {
        "optim": "sgd",
        "max_grad_norm": 0,
        "max_steps": 1,
        "lr_scheduler_type": "constant",
        "dataloader_num_workers": 0,
    }
    plain = run(content, **options)
    after = tensors_of(plain.output_dir)
    result = run(content, **options, output_dir=content["output_dir"] + "2", parameter_groups=groups)
    scaled = tensors_of(result.output_dir)
    for name, start in before.items():
        factor = 10 if "g_proj" in name else 0 if "mlp" in name else 0.5 if "q_proj" in name else 1
        torch.testing.assert_close(scaled[name] - start, factor * (after[name] - start), rtol=1e-3, atol=1e-6)
    assert "gates" in result.groups and "0.01" in result.groups
    assert all(entry["learning_rate"] == 1e-3 for entry in result.history if "learning_rate" in entry)


def test_freeze_windows(content):
    groups = [
        {"pattern": "gates", "from_step": 2},
        {"pattern": "norm", "until_step": 2},
        {"pattern": "embed", "frozen": True},
    ]
    states = {}
    for steps in (2, 4):
        result = run(
            content,
            max_steps=steps,
            lr_scheduler_type="constant",
            parameter_groups=groups,
            output_dir=f"{content['output_dir']}{steps}",
        )
        states[steps] = tensors_of(result.output_dir)
    start = tensors_of(content["model"])

    def moved(name, one, other):
        return not torch.equal(one[name], other[name])

    gate, norm = "model.layers.1.self_attn.g_proj.weight", "model.norm.weight"
    assert not moved(gate, start, states[2]) and moved(gate, states[2], states[4])
    assert moved(norm, start, states[2]) and not moved(norm, states[2], states[4])
    assert not moved("model.embed_tokens.weight", start, states[4])
    assert "2 to the end" in result.groups and "0 to 1" in result.groups and "frozen" in result.groups


def test_gates_only(content):
    result = run(content, train="gates")
    before, after = tensors_of(content["model"]), tensors_of(result.output_dir)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "g_proj" in name}
    results = json.loads((result.output_dir / "training_results.json").read_text())
    gates = sum(before[name].numel() for name in changed)
    assert results["numbers_in_the_optimizer"] == 2 * gates + len(changed)  # and a step count for each tensor


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_optimizers(content, optimizer):
    result = run(content, optimizer=optimizer, max_steps=12, learning_rate=5e-3, weight_decay=0.1)
    assert losses(result)[-1] < losses(result)[0] - 0.3


def test_schedules(content):
    wsd = run(
        content, lr_scheduler_type="warmup_stable_decay", warmup_steps=2, lr_scheduler_kwargs={"num_decay_steps": 2}
    )
    rates = [entry["learning_rate"] for entry in wsd.history if "loss" in entry]
    assert rates[2] == rates[3] == 1e-3 > rates[5]
    cosine = run(content, lr_scheduler_type="cosine", output_dir=content["output_dir"] + "2")
    rates = [entry["learning_rate"] for entry in cosine.history if "loss" in entry]
    assert rates == sorted(rates, reverse=True)


# ---- data


def test_rows_are_the_documents_in_order():
    documents = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12]]
    rows = list(pack(documents, length=4, padding=0))
    assert [row["input_ids"] for row in rows] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert [row["seq_lengths"] for row in rows] == [[3, 1], [4], [3, 1]]
    (last,) = pack([[1, 2, 3]], length=5, padding=0)
    assert last == {"input_ids": [1, 2, 3, 0, 0], "seq_lengths": [3, 2], "padded": 2}
    batch = PackedCollator()([rows[0], rows[1]])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0], [0, 1, 2, 3]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100], [-100, 6, 7, 8]]
    assert PackedCollator()([last])["labels"].tolist() == [[-100, 2, 3, -100, -100]]


def loss_alone(model, documents: list[list[int]]) -> float:
    """Mean loss of documents that are run one by one, each token that has one before it in its document a target."""
    total, count = 0.0, 0
    with torch.no_grad():
        for ids in documents:
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1].double()
            total += torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]).long(), reduction="sum").item()
            count += len(ids) - 1
    return total / count


def parts(documents: list[list[int]], length: int) -> list[list[int]]:
    """The documents as the rows hold them."""
    found = []
    for row in pack(documents, length, 0):
        ids = row["input_ids"]
        counts = row["seq_lengths"][: -1 if row["padded"] else None]
        for count in counts:
            found.append(ids[:count])
            ids = ids[count:]
    return found


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_no_token_sees_another_document(content, mode, backend):
    tokenizer = tiny_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(content["model"]).eval()
    number = 9 if mode == "evaluation" else 200
    ids = [[*tokenizer(text)["input_ids"], 2] for text in texts(number, 1 if mode == "evaluation" else 0)]
    options = {"attn_implementation": backend, "shuffle": False, "max_steps": 1, "per_device_train_batch_size": 4}
    if mode == "evaluation":
        result = run(content, **options, learning_rate=0.0)
        documents, found = parts(ids, 32), result.final["eval_loss"]
    else:
        sampler = {"train_sampling_strategy": "sequential"}
        result = run(content, **options, **sampler)
        documents, found = [], losses(result)[0]
        for index, row in enumerate(pack(ids, 32, 0)):
            if index < 4:
                documents += parts([row["input_ids"]], 32) if len(row["seq_lengths"]) == 1 else _cut(row)
    assert len(documents) > 6
    assert found == pytest.approx(loss_alone(model, documents), rel=1e-5)


def _cut(row: dict) -> list[list[int]]:
    ids, found = row["input_ids"], []
    for count in row["seq_lengths"]:
        found.append(ids[:count])
        ids = ids[count:]
    return found


def test_no_token_sees_another_document_in_fine_tuning(content):
    """TRL packs whole documents, so that no row cuts one; its evaluation is one of ours by tokens too."""
    tokenizer = tiny_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(content["model"]).eval()
    ids = [tokenizer(text + tokenizer.eos_token)["input_ids"] for text in texts(9, 1)]
    result = run(content, objective="sft", max_steps=1, learning_rate=0.0, packing=True)
    assert result.final["eval_loss"] == pytest.approx(loss_alone(model, ids), rel=1e-4)


def test_without_packing_documents_are_padded(content):
    tokenizer = tiny_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(content["model"]).eval()
    ids = [[*tokenizer(text)["input_ids"], 2] for text in texts(9, 1)]
    result = run(content, packing=False, max_steps=1, learning_rate=0.0)
    assert result.final["eval_loss"] == pytest.approx(loss_alone(model, ids), rel=1e-5)


@pytest.mark.parametrize("kind", ["text", "parquet", "json_column", "folder", "saved", "pattern"])
def test_kinds_of_data(content, tmp_path, kind):
    records = texts(30)
    column = {}
    if kind == "text":
        path = tmp_path / "a.txt"
        path.write_text("\n".join(records))
    elif kind == "parquet":
        path = tmp_path / "a.parquet"
        Dataset.from_dict({"text": records}).to_parquet(str(path))
    elif kind == "json_column":
        path = Path(write_jsonl(tmp_path / "a.jsonl", [{"body": text, "n": 1} for text in records]))
        column = {"column": "body"}
    elif kind == "saved":
        path = tmp_path / "saved"
        Dataset.from_dict({"text": records}).save_to_disk(path)
    else:
        path = tmp_path / "folder"
        path.mkdir()
        for number in range(3):
            write_jsonl(path / f"{number}.jsonl", [{"text": text} for text in records])
        path = path / "*.jsonl" if kind == "pattern" else path
    assert run(content, data=[{"path": str(path), **column}], max_steps=2).steps == 2


@pytest.mark.parametrize("streaming", [False, True], ids=["map", "streaming"])
def test_token_ids_train_as_their_text_does(content, tmp_path, streaming):
    """Alone and beside text; nothing is added to them."""
    tokenizer = tiny_tokenizer()
    ids = [{"tokens": [*tokenizer(text)["input_ids"], 2]} for text in texts(200)]
    of_ids = {"path": write_jsonl(tmp_path / "ids.jsonl", ids), "column": "tokens"}
    options = {"streaming": streaming, "shuffle": False}
    expected = losses(run(content, **options))
    assert losses(run(content, data=[of_ids], output_dir=str(tmp_path / "ids"), **options)) == expected
    both = [*content["data"], of_ids]
    assert run(content, data=both, output_dir=str(tmp_path / "both"), **options).steps == 6


@pytest.mark.parametrize(("token", "named"), [(-1, "-1"), (10**6, "1000000")], ids=["below", "above"])
def test_token_ids_of_another_tokenizer_are_refused(content, tmp_path, token, named):
    data = [{"path": write_jsonl(tmp_path / "ids.jsonl", [{"input_ids": [5, token, 6]}]), "column": "input_ids"}]
    with pytest.raises(RecipeError, match=f"record 0 has the token id {named}, and the tokenizer has those from 0 to"):
        run(content, data=data)


@pytest.mark.parametrize("streaming", [False, True], ids=["map", "streaming"])
def test_sources_are_mixed_by_weight_in_a_fixed_order(content, tmp_path, streaming):
    sources = [
        {"path": write_jsonl(tmp_path / f"{word}.jsonl", [{"text": word}] * 2000), "weight": weight}
        for word, weight in (("gate", 3), ("sink", 1))
    ]
    from gated_attention.training.text_data import load_records

    recipe = make_recipe(content | {"data": sources, "streaming": streaming})
    draws = []
    for _ in range(2):
        records = load_records(recipe, recipe.data, shuffle=True)
        draws.append([record["text"] for _, record in zip(range(400), records, strict=False)])
    assert draws[0] == draws[1]
    assert 270 < draws[0].count("gate") < 330


def empty(tmp_path):
    (tmp_path / "bad.jsonl").write_text("")
    return {"path": str(tmp_path / "bad.jsonl")}, "bad.jsonl is empty"


def blank(tmp_path):
    (tmp_path / "bad.txt").write_text(" \n\n")
    return {"path": str(tmp_path / "bad.txt")}, "nothing but blanks"


def binary(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"text\0\x01\x02")
    return {"path": str(tmp_path / "bad.txt")}, "is binary, not text"


def no_json(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": ')
    return {"path": str(tmp_path / "bad.jsonl")}, "cannot be read"


def another_column(tmp_path):
    return {
        "path": write_jsonl(tmp_path / "bad.jsonl", [{"texts": "a"}])
    }, "column 'text'; it has 'texts': did you mean 'texts'"


def numbers(tmp_path):
    return {"path": write_jsonl(tmp_path / "bad.jsonl", [{"text": 3}])}, "must hold text or token ids, found a int"


def missing(tmp_path):
    return {"path": str(tmp_path / "nosuch.jsonl")}, "is not there"


def another_kind(tmp_path):
    (tmp_path / "bad.exe").write_text("a")
    return {"path": str(tmp_path / "bad.exe")}, "must be files of one kind"


@pytest.mark.parametrize(
    "make",
    [empty, blank, binary, no_json, another_column, numbers, missing, another_kind],
    ids=lambda one: one.__name__,
)
@pytest.mark.parametrize("streaming", [False, True], ids=["map", "streaming"])
def test_bad_data_is_named(content, tmp_path, make, streaming):
    source, message = make(tmp_path)
    with pytest.raises(RecipeError, match=message):
        run(content, data=[source], streaming=streaming)


def test_records_longer_than_a_row(content, tmp_path):
    long = write_jsonl(tmp_path / "long.jsonl", [{"text": "the gate"}, {"text": "the gate opens " * 40}])
    with pytest.raises(RecipeError, match=r"record 1 has \d+ tokens, more than `length` 32"):
        run(content, data=[{"path": long}], long_records="error", shuffle=False)
    for choice in ("split", "truncate", "drop"):
        assert (
            run(content, data=[{"path": long}], long_records=choice, output_dir=content["output_dir"] + choice).steps
            == 6
        )
    with pytest.raises(RecipeError, match=r"record 0 has \d+ tokens, more than `length` 32: set `long_records`"):
        run(
            content,
            data=[{"path": write_jsonl(tmp_path / "l.jsonl", [{"text": "the gate opens " * 40}])}],
            objective="sft",
        )


def test_records_that_are_all_dropped(content, tmp_path):
    data = [{"path": write_jsonl(tmp_path / "long.jsonl", [{"text": "the gate opens " * 40}] * 3)}]
    for streaming in (False, True):
        with pytest.raises(RecipeError, match="none of the records gives a row"):
            run(content, data=data, long_records="drop", streaming=streaming)
    with pytest.raises(RecipeError, match="every record is longer than `length` 32, and was dropped"):
        run(content, data=data, long_records="drop", objective="sft")
    with pytest.raises(RecipeError, match="`completion_only_loss` needs records with `prompt` and `completion`"):
        run(content, objective="sft", completion_only_loss=True)


def test_no_is_a_word(content, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content).replace("'no'", "no"))
    recipe = load_recipe(path, ["--eval_strategy", "no", "--shuffle", "false"])
    assert recipe.arguments["save_strategy"] == recipe.arguments["eval_strategy"] == "no"
    assert recipe.shuffle is False


# ---- going on


def test_a_finished_run_is_left_as_it_is(content):
    options = {"save_strategy": "steps", "save_steps": 3}
    first = run(content, **options)
    before = tensors_of(first.output_dir)
    again = run(content, **options, resume_from_checkpoint="auto")
    assert (again.steps, again.final, losses(again)) == (6, first.final, losses(first))
    # Killed between its last checkpoint and its end: the end is made up for, without a step more.
    (first.output_dir / "training_results.json").unlink()
    (first.output_dir / "model.safetensors").unlink()
    made_up = run(content, **options, resume_from_checkpoint="auto")
    assert made_up.steps == 6 and made_up.final["eval_loss"] == first.final["eval_loss"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(first.output_dir).items())


def test_a_run_that_was_stopped_before_its_first_checkpoint_begins_again(content, monkeypatch):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    module = sys.modules["gated_attention.training.run"]
    real = module._trainer

    def stopped(*arguments):
        trainer = real(*arguments)
        trainer.add_callback(Stop())
        return trainer

    monkeypatch.setattr(module, "_trainer", stopped)
    options = {"diagnostics": {"every": 2}, "resume_from_checkpoint": "auto"}
    with pytest.raises(KeyboardInterrupt):
        run(content, **options)
    assert list(Path(content["output_dir"]).iterdir())  # the diagnostics' own
    monkeypatch.setattr(module, "_trainer", real)
    assert run(content, **options).steps == 6


def test_several_gpus_in_one_process_are_refused():
    trainer = types.SimpleNamespace(args=types.SimpleNamespace(n_gpu=2))
    with pytest.raises(RecipeError, match="2 GPUs are visible to one process"):
        refuse_silent_fallbacks(trainer)


@pytest.mark.parametrize("option", ["bf16_full_eval", "fp16_full_eval"])
def test_evaluation_that_would_round_the_model_is_refused(content, option):
    with pytest.raises(RecipeError, match="Trainer would round the model itself"):
        run(content, **{option: True})


def test_a_finished_model_is_not_overwritten(content):
    first = run(content)
    before = tensors_of(first.output_dir)
    with pytest.raises(RecipeError, match=r"holds model\.safetensors.* of an earlier run.*another output_dir"):
        run(content, max_steps=3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(first.output_dir).items())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"length": 16}, "`length` was 32 and is 16"),
        ({"seed": 7}, "`seed` was None and is 7"),
        ({"parameter_groups": [{"pattern": "gates", "frozen": True}]}, r"`parameter_groups` was \[\] and is"),
        ({"data": [{"path": "other.jsonl"}]}, "`data` was .*train.jsonl.* and is .*other.jsonl"),
    ],
    ids=["length", "seed", "groups", "data"],
)
def test_going_on_with_other_settings_is_refused(content, changes, words):
    options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 4}
    result = run(content, **options)
    with pytest.raises(RecipeError, match=words):
        run(content, **options | changes | {"max_steps": 8}, resume_from_checkpoint="auto")
    # What may change: the length of the training, and how it is shown.
    again = run(content, **options | {"max_steps": 8, "logging_steps": 2}, resume_from_checkpoint="auto")
    assert again.steps == 8
    kept = load_recipe(result.output_dir / "checkpoint-3" / "recipe.yaml")
    assert kept == make_recipe(content | options)


def test_mixed_streams_go_on_in_a_later_pass(content, tmp_path):
    sources = [
        {
            "path": write_jsonl(tmp_path / f"{seed}.jsonl", [{"text": text} for text in texts(12, seed)]),
            "weight": weight,
        }
        for seed, weight in ((3, 3), (4, 1))
    ]
    options = {"data": sources, "streaming": True, "max_steps": 24, "save_strategy": "steps", "save_steps": 16}
    straight = run(content, **options)
    stopped = Path(content["output_dir"] + "2")
    stopped.mkdir()
    (straight.output_dir / "checkpoint-16").rename(stopped / "checkpoint-16")
    resumed = run(content, **options, output_dir=str(stopped), resume_from_checkpoint="auto")
    assert losses(resumed) == losses(straight)
    assert len(set(losses(straight)[:8])) == 8


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("streaming", [False, True], ids=["map", "streaming"])
def test_a_killed_training_goes_on_as_if_nothing_had_been(content, tmp_path, streaming, optimizer):
    options = {
        "streaming": streaming,
        "optimizer": optimizer,
        "max_steps": 10,
        "save_strategy": "steps",
        "save_steps": 3,
        "parameter_groups": [{"pattern": "gates", "learning_rate": 5.0, "from_step": 4}],
    }
    straight = run(content, **options)
    killed = str(tmp_path / "killed")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(content | options | {"output_dir": killed}))
    script = f"""
import os, signal
from transformers import TrainerCallback
from gated_attention.training import load_recipe, train, run
class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 8:
            os.kill(os.getpid(), signal.SIGKILL)
real = run._trainer
def with_kill(*args):
    trainer = real(*args)
    trainer.add_callback(Kill())
    return trainer
run._trainer = with_kill
train(load_recipe({str(recipe)!r}))
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.returncode == -signal.SIGKILL, process.stderr
    with pytest.raises(
        RecipeError, match=r"checkpoints of an earlier run, the newest checkpoint-6.*--resume_from_checkpoint auto"
    ):
        run(content, **options, output_dir=killed)
    # One that was cut off while it was written does not count.
    (Path(killed) / "checkpoint-9").mkdir()
    resumed = run(content, **options, output_dir=killed, resume_from_checkpoint="auto")
    assert losses(resumed)[-4:] == losses(straight)[-4:]
    before, after = tensors_of(straight.output_dir), tensors_of(killed)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_loss_that_is_no_number(content):
    """A step that is far too wide; the checkpoint from before is kept and named."""
    options = {"learning_rate": 1e20, "optim": "sgd", "max_grad_norm": 0, "lr_scheduler_type": "constant"}
    with pytest.raises(
        RecipeError,
        match=r"the loss is nan at step \d, in a batch that begins with the tokens \[.*No checkpoint was saved",
    ):
        run(content, **options)
    saving = {"save_strategy": "steps", "save_steps": 1}
    with pytest.raises(RecipeError, match=r"last good checkpoint is .*checkpoint-1; try a lower `learning_rate`"):
        run(content, **options, **saving)
    assert (Path(content["output_dir"]) / "checkpoint-1" / "model.safetensors").is_file()


def test_full_disk_at_a_checkpoint(content, monkeypatch):
    from transformers import Trainer

    real, saved = Trainer._save_optimizer_and_scheduler, []

    def save(self, folder):
        saved.append(folder)
        if len(saved) == 2:
            raise OSError(28, os.strerror(28), str(folder))
        return real(self, folder)

    monkeypatch.setattr(Trainer, "_save_optimizer_and_scheduler", save)
    options = {"save_strategy": "steps", "save_steps": 2}
    with pytest.raises(
        RecipeError, match=r"stopped at step 4: .*No space left.*last good checkpoint is .*checkpoint-2.*make room"
    ):
        run(content, **options)
    assert [path.name for path in Path(content["output_dir"]).glob("checkpoint-*")] == ["checkpoint-2"]
    monkeypatch.undo()
    assert run(content, **options, resume_from_checkpoint="auto").steps == 6


# ---- models


def test_new_model(content, source):
    fields = {
        "variant": "g1_headwise",
        **{k: v for k, v in TINY_SHAPE.items() if k not in ("bos_token_id", "eos_token_id")},
    }
    result = run(content, model=None, new_model=fields, tokenizer=str(source), max_steps=8, learning_rate=5e-3)
    model = AutoModelForCausalLM.from_pretrained(result.output_dir)
    assert type(model) is GatedAttentionForCausalLM and model.config.gate_granularity == "headwise"
    assert losses(result)[-1] < losses(result)[0]
    with pytest.raises(RecipeError, match=r"`new_model` describes no model.*gate_granularity"):
        run(
            content,
            model=None,
            new_model={"gate_granularity": "some"},
            tokenizer=str(source),
            output_dir=f"{result.output_dir}2",
        )


def test_saved_models_carry_their_code(content, without_package):
    result = run(content)
    assert {path.name for path in result.output_dir.glob("*.py")} >= {"modeling_gated_attention.py"}
    without_package(f"""
model = AutoModelForCausalLM.from_pretrained({str(result.output_dir)!r}, trust_remote_code=True)
assert type(model).__name__ == "GatedAttentionForCausalLM"
""")


def test_tuned_then_converted(content, source, tmp_path):
    """Adapters on an ungated model, merged, then gates: nothing of it changes what was learned."""
    result = run(content, model=str(source), train="lora", learning_rate=1e-2)
    assert convert_checkpoint(result.merged, tmp_path / "converted").logits_equal
    found, tuned = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "converted", result.merged))
    assert torch.equal(logits_of(found), logits_of(tuned))
    assert not torch.equal(logits_of(tuned), logits_of(AutoModelForCausalLM.from_pretrained(source)))


def test_mixture_of_experts(content, tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    tiny_gated(**experts).save_pretrained(tmp_path / "moe")
    tiny_tokenizer().save_pretrained(tmp_path / "moe")
    for objective in ("pretrain", "sft"):
        result = run(
            content, model=str(tmp_path / "moe"), objective=objective, output_dir=content["output_dir"] + objective
        )
        assert all(math.isfinite(loss) for loss in losses(result))
        assert AutoModelForCausalLM.from_pretrained(result.output_dir).config.num_experts == 4


@pytest.mark.parametrize(
    "option",
    ["activation_checkpointing", "gradient_checkpointing", pytest.param("torch_compile", marks=pytest.mark.slow)],
)
def test_options_that_change_no_result(content, option):
    plain = run(content, max_steps=3)
    found = run(content, max_steps=3, output_dir=content["output_dir"] + "2", **{option: True})
    torch.testing.assert_close(torch.tensor(losses(found)), torch.tensor(losses(plain)), rtol=1e-4, atol=1e-4)


def test_checkpointing_by_its_older_name_counts_in_fine_tuning(content, monkeypatch):
    seen = []
    monkeypatch.setattr(
        GatedAttentionForCausalLM, "activation_checkpointing_enable", lambda self, *args, **kwargs: seen.append(kwargs)
    )
    run(content, objective="sft", max_steps=1)
    assert not seen
    run(content, objective="sft", max_steps=1, output_dir=content["output_dir"] + "2", gradient_checkpointing=True)
    assert seen


@pytest.mark.parametrize("objective", ["pretrain", "sft"])
def test_activation_offloading_wants_an_accelerator(content, objective):
    with pytest.raises(RecipeError, match="`activation_offloading` must be false on a CPU"):
        run(content, objective=objective, activation_offloading=True)


def test_activation_offloading_goes_around_each_step(content, monkeypatch):
    """With a stand-in for TRL's means, which needs an accelerator."""
    entered = []

    @contextlib.contextmanager
    def offloading():
        entered.append(1)
        with torch.autograd.graph.save_on_cpu():
            yield

    class Reusable:
        def __enter__(self):
            self.inner = offloading()
            return self.inner.__enter__()

        def __exit__(self, *exception):
            return self.inner.__exit__(*exception)

    plain = run(content)
    monkeypatch.setattr("trl.models.get_act_offloading_ctx_manager", lambda model: Reusable())
    real = PretrainTrainer.__init__

    def offloaded(self, *args, **kwargs):
        real(self, *args, **kwargs)
        self.offload_activations()

    monkeypatch.setattr(PretrainTrainer, "__init__", offloaded)
    assert losses(run(content, output_dir=content["output_dir"] + "2")) == losses(plain)
    assert len(entered) == 6


class LigerStandIn:
    """Liger's functions as plain PyTorch: its kernels need a GPU. Counts the calls."""

    def __init__(self, monkeypatch):
        self.calls = collections.Counter()
        functional = types.ModuleType("liger_kernel.transformers.functional")
        functional.liger_rms_norm = self.rms_norm
        functional.liger_swiglu = self.swiglu
        functional.liger_fused_linear_cross_entropy = self.loss
        patching = types.ModuleType("liger_kernel.transformers.monkey_patch")
        patching.MODEL_TYPE_TO_APPLY_LIGER_FN = {}
        package = types.ModuleType("liger_kernel.transformers")
        package._apply_liger_kernel_to_instance = lambda model, **options: patching.MODEL_TYPE_TO_APPLY_LIGER_FN[
            model.config.model_type
        ](model=model, **options)
        for module in (types.ModuleType("liger_kernel"), package, functional, patching):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr("transformers.integrations.liger.is_liger_kernel_available", lambda: True)

    def rms_norm(self, states, weight, eps, offset, casting_mode, in_place):
        assert (offset, casting_mode) in ((0.0, "llama"), (1.0, "gemma")) and not in_place
        self.calls["rms_norm"] += 1
        return torch.nn.functional.rms_norm(states, weight.shape, weight + offset, eps)

    def swiglu(self, first, second):
        self.calls["swiglu"] += 1
        return torch.nn.functional.silu(first) * second

    def loss(self, states, weight, target, reduction):
        assert states.ndim == 2 and target.ndim == 1
        self.calls["loss"] += 1
        return torch.nn.functional.cross_entropy(states @ weight.T, target, reduction=reduction)


@pytest.mark.parametrize(
    ("fields", "kernels"),
    [
        ({}, {"rms_norm", "swiglu", "loss"}),
        ({"qk_norm": True, "zero_centered_norm": True, "logits_scaling": 3.0}, {"rms_norm", "swiglu", "loss"}),
        ({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}, {"rms_norm", "loss"}),
    ],
    ids=["dense", "zero_centered", "experts"],
)
def test_liger_reaches_gated_models(content, tmp_path, monkeypatch, fields, kernels):
    tiny_gated(**fields).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    content["model"] = str(tmp_path / "model")
    plain = run(content)
    liger = LigerStandIn(monkeypatch)
    found = run(content, use_liger_kernel=True, output_dir=content["output_dir"] + "2")
    torch.testing.assert_close(torch.tensor(losses(found)), torch.tensor(losses(plain)), rtol=1e-4, atol=1e-4)
    assert found.final["eval_loss"] == pytest.approx(plain.final["eval_loss"], rel=1e-4)
    assert set(liger.calls) == kernels and liger.calls["loss"] == 6  # evaluation keeps its logits


def test_liger_that_would_do_nothing_is_refused(content, source, monkeypatch):
    with pytest.raises(RecipeError, match="pip install liger-kernel"):
        run(content, use_liger_kernel=True)
    LigerStandIn(monkeypatch)
    with pytest.raises(RecipeError, match="no kernels for it"):
        run(content, model=str(source), use_liger_kernel=True)


def test_any_causal_language_model(content, source):
    result = run(content, model=str(source), max_steps=4)
    assert type(AutoModelForCausalLM.from_pretrained(result.output_dir)).__name__ == "LlamaForCausalLM"
    with pytest.raises(RecipeError, match="has no gates"):
        run(content, model=str(source), train="gates", output_dir=f"{result.output_dir}2")


HYBRIDS = {
    "qwen3_next": (Qwen3NextForCausalLM, Qwen3NextConfig, {"num_experts": 0, "mlp_only_layers": [0, 1, 2]}),
    "qwen3_5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, {}),
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_natively_gated_hybrids(content, tmp_path, name):
    model_class, config_class, fields = HYBRIDS[name]
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    layers = ["linear_attention", "full_attention", "linear_attention"]
    model = randomise(model_class(config_class(**{**TINY_SHAPE, "layer_types": layers, **linear, **fields})))
    model.save_pretrained(tmp_path / "hybrid")
    tiny_tokenizer().save_pretrained(tmp_path / "hybrid")
    assert gate_parameters(model) == {"model.layers.1.self_attn.q_proj.weight"}
    with pytest.raises(RecipeError, match=r"`packing` must be false.*linear_attention"):
        run(content, model=str(tmp_path / "hybrid"))
    groups = [{"pattern": "gates", "learning_rate": 10.0}]
    options = {
        "model": str(tmp_path / "hybrid"),
        "packing": False,
        "parameter_groups": groups,
        "diagnostics": {"every": 2},
    }
    result = run(content, **options, max_steps=4)
    assert any("diagnostics/gate_mean" in entry for entry in result.history)
    assert type(AutoModelForCausalLM.from_pretrained(result.output_dir)) is model_class


@pytest.mark.parametrize("objective", ["pretrain", "sft"])
def test_adapters_and_gates(content, objective):
    result = run(
        content, train="lora", objective=objective, max_steps=8, learning_rate=1e-2, lora={"r": 4, "alpha": 8}
    )
    base = AutoModelForCausalLM.from_pretrained(content["model"])
    adapted = PeftModel.from_pretrained(base, result.output_dir).eval()
    merged = AutoModelForCausalLM.from_pretrained(result.merged)
    input_ids = tiny_input_ids()
    found, expected = logits_of(merged, input_ids), logits_of(adapted, input_ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    before, after = tensors_of(content["model"]), tensors_of(result.merged)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {
        name for name in before if any(part in name for part in ("q_proj", "k_proj", "v_proj", "o_proj", "g_proj"))
    }
    assert losses(result)[-1] < losses(result)[0]


# ---- fine-tuning


def test_completions_alone_count(content, tmp_path):
    tokenizer = tiny_tokenizer()
    records = [
        {"prompt": "the gate", "completion": " opens and the sink closes"},
        {"prompt": "the sink closes", "completion": " the gate"},
    ]
    result = run(
        content, objective="sft", data=[{"path": write_jsonl(tmp_path / "chat.jsonl", records)}], evaluation_data=[],
        packing=False, max_steps=1, completion_only_loss=True, shuffle=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(content["model"]).eval()
    total, count = 0.0, 0
    for record in records:
        prompt = tokenizer(record["prompt"])["input_ids"]
        ids = tokenizer(record["prompt"] + record["completion"] + tokenizer.eos_token)["input_ids"]
        logits = logits_of(model, torch.tensor([ids]))[0, :-1]
        each = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")[len(prompt) - 1 :]
        total, count = total + each.sum().item(), count + len(each)
    assert losses(result)[0] == pytest.approx(total / count, rel=1e-4)


def test_conversations(content, tmp_path):
    records = [
        {"messages": [{"role": "user", "content": "the gate"}, {"role": "assistant", "content": "opens"}]}
        for _ in range(8)
    ]
    data = [{"path": write_jsonl(tmp_path / "chat.jsonl", records)}]
    result = run(
        content, objective="sft", data=data, evaluation_data=data, max_steps=6, learning_rate=1e-2, packing=False
    )
    assert losses(result)[-1] < losses(result)[0]
    assert result.final["eval_perplexity"] == pytest.approx(math.exp(result.final["eval_loss"]))


# ---- what is left behind


def test_outputs(content):
    result = run(content, diagnostics={"every": 2}, eval_strategy="steps", eval_steps=3)
    results = json.loads((result.output_dir / "training_results.json").read_text())
    assert results["final"]["eval_perplexity"] == pytest.approx(math.exp(results["final"]["eval_loss"]))
    assert [step for step, _ in results["curves"]["loss"]] == [1, 2, 3, 4, 5, 6]
    assert {"diagnostics/f_attn", "diagnostics/gate_mean", "eval_loss"} <= results["curves"].keys()
    assert (result.output_dir / "training_curves.png").read_bytes().startswith(b"\x89PNG")
    card = (result.output_dir / "README.md").read_text()
    assert "eval_perplexity" in card and "train.jsonl" in card and "learning_rate: 0.001" in card
    assert "test.jsonl" in card and "seed: 42" in card
    assert str(Path(content["model"]).parent) not in card  # nobody else has that path


def test_card_carries_on_what_the_source_says(content):
    header = "---\nlicense: other\nlicense_name: gate-1\nbase_model: its/base\nlibrary_name: other\n---\n"
    (Path(content["model"]) / "README.md").write_text(header)
    certificate = Path(content["model"]) / "gated_attention_conversion.json"
    written = json.loads(certificate.read_text())
    written["source"]["id"] = "some/model"
    certificate.write_text(json.dumps(written))
    result = run(content, train="lora", lora={"r": 4}, max_steps=2)
    for folder, library in ((result.output_dir, "peft"), (result.merged, "transformers")):
        card = ModelCard.load(folder / "README.md")
        assert (card.data.license, card.data.license_name, card.data.base_model, card.data.library_name) == (
            "other",
            "gate-1",
            "some/model",
            library,
        )
        assert "r: 4" in card.text
        assert (folder / "training_results.json").is_file()


@pytest.mark.parametrize("streaming", [False, True], ids=["map", "streaming"])
@pytest.mark.parametrize("objective", ["pretrain", "sft"])
def test_diagnostics_without_data_to_evaluate_on(content, objective, streaming):
    options = {"objective": objective, "streaming": streaming, "evaluation_data": [], "max_steps": 4}
    plain = run(content, **options)
    watched = run(content, **options, diagnostics={"every": 2}, output_dir=content["output_dir"] + "2")
    assert losses(watched) == losses(plain)  # looking changes nothing
    seen = [entry for entry in watched.history if "diagnostics/f_attn" in entry]
    assert len(seen) >= 2 and all(0 <= entry["diagnostics/f_attn"] <= 1 for entry in seen)


EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_examples_run(name, gated, tmp_path):
    (tmp_path / "text.txt").write_text("the gate opens and the sink closes attention to the first token " * 300)
    command = [sys.executable, EXAMPLES / name, gated, tmp_path / "text.txt", tmp_path / "out"]
    process = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert process.returncode == 0, process.stderr
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (gated, tmp_path / "out"))
    assert type(after) is GatedAttentionForCausalLM
    gate = "model.layers.1.self_attn.g_proj.weight"
    assert not torch.equal(after.get_parameter(gate), before.get_parameter(gate))


def test_recipe_for_many_gpus_names_what_there_is():
    """What can be told without them: keys, groups and rates, layer class, on a model without numbers."""
    recipe = load_recipe(RECIPES / "qwen3_8b_fsdp2.yaml")
    config = GatedAttentionConfig(
        vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, qk_norm=True, gate_granularity="headwise", gate_scale=2.0, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = GatedAttentionForCausalLM(config)
    groups = resolve_groups(model, recipe.parameter_groups)
    counts = [sum(model.get_parameter(name).numel() for name in one.names) for one in groups]
    assert counts[0] == 36 * 4096 * 32 and sum(counts) == model.num_parameters() == 8_195_453_952
    for name in ("fsdp2", "several_nodes"):
        fsdp = yaml.safe_load((RECIPES / "accelerate" / f"{name}.yaml").read_text())["fsdp_config"]
        assert fsdp["fsdp_version"] == 2
        assert fsdp["fsdp_transformer_layer_cls_to_wrap"] in model._no_split_modules
    for path in (RECIPES / "accelerate").glob("*.yaml"):
        assert yaml.safe_load(path.read_text())["mixed_precision"] == "bf16"


@pytest.mark.parametrize("name", sorted(path.name for path in RECIPES.glob("*.yaml")))
def test_recipes_run(name, content, tmp_path, gated):
    """Each as it stands, but for its data, model and length of training."""
    recipe = yaml.safe_load((RECIPES / name).read_text())
    chats = [
        {
            "prompt": [{"role": "user", "content": "the gate"}],
            "completion": [{"role": "assistant", "content": "opens"}],
        }
        for _ in range(8)
    ]
    data = (
        content["data"] if recipe.get("objective") != "sft" else [{"path": write_jsonl(tmp_path / "c.jsonl", chats)}]
    )
    changes = {
        "data": data,
        "output_dir": content["output_dir"],
        "max_steps": 3,
        "use_cpu": True,
        "save_strategy": "no",
    }
    changes |= {"bf16": False, "dtype": "float32", "attn_implementation": "sdpa"}
    changes |= {"gradient_accumulation_steps": 1, "length": 64, "logging_steps": 1, "warmup_steps": 1}
    if "lr_scheduler_kwargs" in recipe:
        changes["lr_scheduler_kwargs"] = {"num_decay_steps": 1}
    if "evaluation_data" in recipe:
        changes |= {"evaluation_data": content["evaluation_data"], "eval_steps": 2}
    changes |= {"tokenizer": str(gated)} if "new_model" in recipe else {"model": str(gated)}
    if "distillation" in recipe:
        # As a transfer leaves them, with biases.
        tiny_gated(v_bias=True, o_bias=True, gate_bias=True).save_pretrained(tmp_path / "model")
        tiny_tokenizer().save_pretrained(tmp_path / "model")
        changes |= {
            "model": str(tmp_path / "model"),
            "distillation": {**recipe["distillation"], "teacher": str(gated)},
            "save_steps": 500,
        }
    result = train(make_recipe(recipe | changes), echo=lambda text: None)
    assert result.steps == 3 and all(math.isfinite(loss) for loss in losses(result))
