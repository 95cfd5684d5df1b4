"""The callback logs what an inspection finds, leaves training as it is, and catches a spike with its batch."""

import json
import math

import pytest
import torch
from conftest import TINY_SHAPE, randomise, tiny_gated, tiny_input_ids, tiny_llama
from peft import LoraConfig, get_peft_model
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM, Trainer, TrainerCallback, TrainingArguments

from gated_attention import inspect_model
from gated_attention.diagnostics import DiagnosticsCallback, InspectionError
from gated_attention.diagnostics.callback import gate_weights


HELD = {"input_ids": tiny_input_ids(2, 18, seed=11)}


class Tokens(torch.utils.data.Dataset):
    """Random tokens; one row of another kind, if asked for, that the model does not expect."""

    def __init__(self, rows: int, odd_row: int | None = None):
        pattern = torch.arange(3, 9).repeat(4)[:20]
        self.rows = pattern.repeat(rows, 1)
        if odd_row is not None:
            self.rows[odd_row] = TINY_SHAPE["vocab_size"] - 1 - torch.arange(20)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        return {"input_ids": self.rows[row], "labels": self.rows[row]}


class Tracker(TrainerCallback):
    """Stands for any tracker: sees what Trainer logs."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append((state.global_step, dict(logs)))


def make_trainer(model, output, dataset, steps, tracker=None, **arguments):
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=1,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy=arguments.pop("save_strategy", "no"),
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        **arguments,
    )
    return Trainer(model=model, args=arguments, train_dataset=dataset, callbacks=[tracker] if tracker else None)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "not_gated"])
def test_logs_what_an_inspection_finds(tmp_path, gated):
    model, tracker = (tiny_gated() if gated else tiny_llama()), Tracker()
    trainer = make_trainer(model, tmp_path, Tokens(6), 6, tracker)
    trainer.add_callback(DiagnosticsCallback(trainer, HELD, every=3))
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if ".g_proj." in name}
    trainer.train()
    looks = {step: logs for step, logs in tracker.seen if "diagnostics/f_attn" in logs}
    assert list(looks) == [3, 6]
    expected = inspect_model(trainer.model, [HELD], ranks=False).summary()
    for name in ("f_attn", "largest_key_share", "m_act"):
        assert looks[6][f"diagnostics/{name}"] == pytest.approx(expected[name], rel=1e-6)
    assert looks[6]["diagnostics/grad_norm_rest"] > 0
    if gated:
        assert looks[6]["diagnostics/gate_mean"] == pytest.approx(expected["gate_mean"], rel=1e-6)
        moved = [(parameter - start[name]).square() for name, parameter in model.named_parameters() if name in start]
        movement = torch.cat([square.flatten() for square in moved]).mean().sqrt().item()
        assert looks[6]["diagnostics/gate_movement"] == pytest.approx(movement, rel=1e-5)
        total = math.hypot(looks[6]["diagnostics/grad_norm_gates"], looks[6]["diagnostics/grad_norm_rest"])
        logged = next(logs["grad_norm"] for step, logs in tracker.seen if step == 6 and "grad_norm" in logs)
        assert total == pytest.approx(min(logged, 1.0), rel=1e-3)  # clipped to Trainer's 1.0
    else:
        assert not any("gate" in name for name in looks[6])


def test_training_is_the_same_with_and_without(tmp_path):
    weights = []
    for watched in (False, True):
        trainer = make_trainer(tiny_gated(attention_dropout=0.1), tmp_path, Tokens(4), 4)
        if watched:
            trainer.add_callback(DiagnosticsCallback(trainer, HELD, every=1))
        trainer.train()
        weights.append(trainer.model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_spike_is_written_with_the_ids_of_its_batch(tmp_path):
    dataset, odd = Tokens(40, odd_row=30), 30
    trainer = make_trainer(tiny_gated(), tmp_path, dataset, 40)
    callback = DiagnosticsCallback(trainer, HELD, every=100, window=20, threshold=6.0)
    trainer.add_callback(callback)
    trainer.train()
    written = [json.loads(line) for line in (tmp_path / "loss_spikes.jsonl").read_text().splitlines()]
    assert written == callback.spikes
    assert written[0]["step"] == odd + 1
    assert written[0]["input_ids"] == [[dataset.rows[odd].tolist()]]
    assert max(written[0]["z_scores"].values()) > 6


def test_steady_training_has_no_spikes(tmp_path):
    trainer = make_trainer(tiny_gated(), tmp_path, Tokens(40), 40)
    callback = DiagnosticsCallback(trainer, HELD, every=100, window=20)
    trainer.add_callback(callback)
    trainer.train()
    assert callback.spikes == []
    assert not (tmp_path / "loss_spikes.jsonl").exists()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_loss_that_is_no_number_is_a_spike(tmp_path, value):
    trainer = make_trainer(tiny_gated(), tmp_path, Tokens(4), 4)
    callback = DiagnosticsCallback(trainer, HELD)
    callback.on_log(trainer.args, trainer.state, trainer.control, logs={"loss": value})
    callback.on_log(trainer.args, trainer.state, trainer.control, logs={"loss": value})
    assert len(callback.spikes) == 1  # it stays broken: one entry says it
    assert callback.spikes[0]["z_scores"]["loss"] == math.inf
    written = json.loads((tmp_path / "loss_spikes.jsonl").read_text(), parse_constant=pytest.fail)
    assert written["loss"] == str(value)


def test_a_look_that_fails_does_not_end_the_training(tmp_path):
    class Break(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 2:
                torch.nn.init.constant_(model.model.layers[1].mlp.down_proj.weight, math.nan)

    tracker, model = Tracker(), tiny_gated()
    trainer = make_trainer(model, tmp_path, Tokens(6), 6, tracker, logging_nan_inf_filter=False)
    trainer.add_callback(Break())
    callback = DiagnosticsCallback(trainer, HELD, every=1)
    trainer.add_callback(callback)
    trainer.train()
    assert trainer.state.global_step == 6
    looks = [logs for _, logs in tracker.seen if any(name.startswith("diagnostics/") for name in logs)]
    assert [logs.get("diagnostics/failed", 0.0) for logs in looks] == [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert len(callback.spikes) == 1
    assert not model._forward_pre_hooks


def test_arguments_are_checked(tmp_path):
    trainer = make_trainer(tiny_gated(), tmp_path, Tokens(4), 4)
    with pytest.raises(InspectionError, match="`every` must be at least 1, got 0"):
        DiagnosticsCallback(trainer, HELD, every=0)


def test_resumed_training_goes_on_where_it_was(tmp_path):
    """Movement is that from the first start, and the losses before the break judge the ones after it."""
    saving = {"save_strategy": "steps", "save_steps": 12}
    whole, parts = Tracker(), Tracker()
    trainer = make_trainer(tiny_gated(), tmp_path / "whole", Tokens(24), 24, whole, **saving)
    trainer.add_callback(DiagnosticsCallback(trainer, HELD, every=12, window=20))
    trainer.train()

    again = make_trainer(tiny_gated(seed=5), tmp_path / "whole", Tokens(24), 24, parts, **saving)
    callback = DiagnosticsCallback(again, HELD, every=12, window=20)
    again.add_callback(callback)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-12"))
    movement = [
        next(
            logs["diagnostics/gate_movement"]
            for step, logs in tracker.seen
            if step == 24 and "diagnostics/f_attn" in logs
        )
        for tracker in (whole, parts)
    ]
    assert movement[1] == pytest.approx(movement[0], rel=1e-6)
    assert len(callback.history["loss"]) == 20  # 12 before the break and 12 after it


@pytest.mark.parametrize("way", ["lora", "modules_to_save"])
def test_gates_trained_by_peft_move(tmp_path, way):
    """The movement is that of the gate the model uses, not of an adapter's factors."""
    base = tiny_gated(attention_dropout=0.0)
    start = [layer.self_attn.g_proj.weight.detach().clone() for layer in base.model.layers]
    target = (
        {"target_modules": ["g_proj"]}
        if way == "lora"
        else {"target_modules": ["v_proj"], "modules_to_save": ["g_proj"]}
    )
    model, tracker = get_peft_model(base, LoraConfig(r=2, **target)), Tracker()
    trainer = make_trainer(model, tmp_path, Tokens(4), 4, tracker)
    trainer.add_callback(DiagnosticsCallback(trainer, HELD, every=4))
    trainer.train()
    logged = next(logs for step, logs in tracker.seen if "diagnostics/f_attn" in logs)
    merged = trainer.model.merge_and_unload()
    moved = [layer.self_attn.g_proj.weight - before for layer, before in zip(merged.model.layers, start, strict=True)]
    expected = torch.stack(moved).square().mean().sqrt().item()
    assert expected > 1e-4
    assert logged["diagnostics/gate_movement"] == pytest.approx(expected, rel=1e-3)
    assert logged["diagnostics/grad_norm_gates"] > 0


def test_native_gates_of_a_stock_model_count(tmp_path):
    """Qwen3-Next keeps the gate in half the rows of q_proj: only those are the gate's."""
    config = Qwen3NextConfig(
        vocab_size=TINY_SHAPE["vocab_size"], hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, layer_types=["full_attention"] * 2, num_experts=0, mlp_only_layers=[0, 1],
    )  # fmt: skip
    model, tracker = randomise(Qwen3NextForCausalLM(config)), Tracker()

    def gate_rows():
        return torch.stack(
            [layer.self_attn.q_proj.weight.detach().unflatten(0, (4, 16))[:, 8:] for layer in model.model.layers]
        )

    start = gate_rows()
    trainer = make_trainer(model, tmp_path, Tokens(4), 4, tracker, max_grad_norm=0.0)
    trainer.add_callback(DiagnosticsCallback(trainer, HELD, every=4))
    trainer.train()
    logged = next(logs for step, logs in tracker.seen if "diagnostics/f_attn" in logs)
    assert logged["diagnostics/gate_movement"] == pytest.approx(
        (gate_rows() - start).square().mean().sqrt().item(), rel=1e-4
    )
    assert logged["diagnostics/grad_norm_gates"] > 0


def test_quantised_gates_are_left_out():
    """Nothing of them is trained, and their numbers are not weights."""
    model = tiny_gated()
    gate = model.model.layers[1].self_attn.g_proj
    gate.weight = torch.nn.Parameter(torch.zeros(gate.weight.shape, dtype=torch.int8), requires_grad=False)
    assert [name.split(".")[2] for name in gate_weights(model)] == ["0", "2"]
