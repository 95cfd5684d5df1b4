"""Trainer and PEFT work on a converted model as on any other; training into a linked folder never reaches the source."""

import copy

import pytest
import torch
from conftest import logits_of, save_source, tiny_input_ids, tree_hashes
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from gated_attention import GatedAttentionForCausalLM, convert_checkpoint


class RandomTokens(torch.utils.data.Dataset):
    def __init__(self):
        self.input_ids = tiny_input_ids(batch=16, sequence=20, seed=7)

    def __len__(self):
        return len(self.input_ids)

    def __getitem__(self, row):
        return {"input_ids": self.input_ids[row], "labels": self.input_ids[row]}


def train(model, output_dir, steps=3, **arguments) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(output_dir),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **arguments,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=RandomTokens())
    trainer.train()
    return trainer


def gates_of(model) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if ".g_proj." in name}


@pytest.mark.parametrize("granularity", ["headwise", "elementwise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_trainer_moves_every_gate_and_a_reload_gives_equal_logits(tmp_path, target, granularity, dtype):
    source = save_source(tmp_path / "source", dtype=dtype)
    convert_checkpoint(source, target, granularity=granularity)
    model = AutoModelForCausalLM.from_pretrained(target)
    assert not any(gate.any() for gate in gates_of(model).values())
    trainer = train(model, tmp_path / "run")
    assert all(gate.any() for gate in gates_of(model).values())
    trainer.save_model()
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert type(reloaded) is GatedAttentionForCausalLM
    assert torch.equal(logits_of(reloaded), logits_of(model.eval()))


def test_trainer_checkpoint_resumes(source, target, tmp_path):
    convert_checkpoint(source, target)
    straight = train(AutoModelForCausalLM.from_pretrained(target), tmp_path / "straight", steps=4, seed=3)
    model = AutoModelForCausalLM.from_pretrained(target)
    arguments = copy.copy(straight.args)
    arguments.output_dir = str(tmp_path / "resumed")
    arguments.save_strategy, arguments.save_steps, arguments.max_steps = "steps", 2, 4
    stopped = Trainer(model=model, args=arguments, train_dataset=RandomTokens())
    stopped.train()
    again = Trainer(model=AutoModelForCausalLM.from_pretrained(target), args=arguments, train_dataset=RandomTokens())
    again.train(resume_from_checkpoint=str(tmp_path / "resumed" / "checkpoint-2"))
    assert torch.equal(logits_of(again.model.eval()), logits_of(straight.model.eval()))


@pytest.mark.parametrize("sharded", [False, True], ids=["single_file", "sharded"])
def test_training_and_saving_into_a_hard_linked_target_leaves_the_source_alone(tmp_path, target, sharded):
    source = save_source(tmp_path / "source", sharded=sharded)
    before = tree_hashes(source)
    convert_checkpoint(source, target, link="hard")
    model = AutoModelForCausalLM.from_pretrained(target)
    trainer = train(model, target)
    trainer.save_model(str(target))
    assert tree_hashes(source) == before
    model.save_pretrained(target, max_shard_size="20KB")  # the same shard names may come up
    assert tree_hashes(source) == before
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(target)), logits_of(model.eval()))


def lora_with_gates(**fields) -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", r=4, modules_to_save=["g_proj"], **fields)


def test_default_lora_targets_are_known_and_spare_the_gates(source, target):
    convert_checkpoint(source, target)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(target), LoraConfig(task_type="CAUSAL_LM"))
    adapted = {name.split(".lora_")[0].split(".")[-1] for name, _ in model.named_parameters() if ".lora_" in name}
    assert adapted == {"q_proj", "v_proj"}


@pytest.mark.parametrize("targets", [None, ["q_proj", "k_proj", "v_proj", "o_proj"]], ids=["default", "qkvo"])
def test_lora_with_fully_trained_gates_saves_reloads_and_merges(source, target, tmp_path, targets):
    """Case 20."""
    convert_checkpoint(source, target)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(target), lora_with_gates(target_modules=targets))
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name in trainable if "g_proj" in name and "lora" not in name}
    assert not any("mlp" in name for name in trainable)
    train(model, tmp_path / "run", steps=4)
    trained = logits_of(model.eval())
    model.save_pretrained(tmp_path / "adapter")

    reloaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(target), tmp_path / "adapter")
    assert torch.equal(logits_of(reloaded.eval()), trained)
    assert torch.equal(logits_of(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()), trained)

    merged = reloaded.merge_and_unload()
    assert all(gate.any() for gate in gates_of(merged).values())
    # W x + B A x against (W + B A) x: float32 rounding.
    torch.testing.assert_close(logits_of(merged), trained, rtol=1e-4, atol=1e-5)
    merged.save_pretrained(tmp_path / "merged")
    final = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(logits_of(final), logits_of(merged))


def test_all_linear_reaches_the_gate_and_merges(source, target, tmp_path):
    convert_checkpoint(source, target)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(target), config)
    assert any(".g_proj.lora_A" in name for name, _ in model.named_parameters())
    train(model, tmp_path / "run")
    trained = logits_of(model.eval())
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits_of(merged), trained, rtol=1e-4, atol=1e-5)
