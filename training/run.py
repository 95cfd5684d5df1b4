"""Runs a recipe."""

import functools
import itertools
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Trainer, TrainerState

from ..configuration import GatedAttentionConfig
from ..conversion.sources import is_hub_id
from ..diagnostics import DiagnosticsCallback
from ..modeling_gated import GatedAttentionForCausalLM
from .distillation import DistillationTrainer
from .errors import RecipeError
from .liger import allow_liger
from .outputs import CURVES_FILE, RESULTS_FILE, curves, draw_curves, perplexity, write_card, write_results
from .packing import PackedCollator, PaddedCollator
from .parameter_groups import ResolvedGroup, freeze, gate_parameters, groups_table, resolve_groups
from .recipe import Recipe, arguments_class, check_same_training
from .text_data import load_records, text_rows
from .trainer import (
    RECIPE_FILE,
    KeepRecipe,
    PretrainTrainer,
    is_complete,
    last_checkpoint,
    print_no_logs,
    refuse_silent_fallbacks,
    remove_unfinished,
    sft_trainer_class,
    tensors_in_optimizer,
)


logger = logging.getLogger(__name__)

# Layers that carry a state from token to token see what was before, whatever the positions say.
_STATEFUL_LAYERS = ("linear_attention", "conv", "mamba", "recurrent")


@dataclass(frozen=True)
class TrainingResult:
    """
    Attributes:
        output_dir: Where the model is.
        steps: Steps that were made.
        final: The last figures: `train_loss` and, with evaluation data, `eval_loss` and `eval_perplexity`.
        groups: The table of parameter groups.
        history: What Trainer logged.
        merged: Where the model with merged adapters is, if there is one.
    """

    output_dir: Path
    steps: int
    final: dict[str, float]
    groups: str
    history: list[dict]
    merged: Path | None = None


def train(recipe: Recipe, echo: Callable[[str], None] = print, logs: bool = True) -> TrainingResult:
    """
    Train a model as a recipe says.

    Args:
        recipe ([`Recipe`]): What to do.
        echo: Where the table of parameter groups and the results go.
        logs: Whether what Trainer logs is printed, too.

    Returns:
        [`TrainingResult`]

    Raises:
        [`RecipeError`]: something of it cannot be done, the loss is no number, or the disk is full; the last good checkpoint is named.
    """
    arguments = _training_arguments(recipe)
    output_dir = Path(arguments.output_dir)
    resumed = _resumed_from(arguments, output_dir)
    finished = _is_finished(arguments, resumed)
    if finished and (output_dir / RESULTS_FILE).is_file():
        return _finished_before(output_dir, resumed, echo)
    if resumed is None:
        _refuse_to_overwrite(output_dir)
    elif (resumed / RECIPE_FILE).is_file():
        check_same_training(recipe, resumed / RECIPE_FILE)
    tokenizer = _load(AutoTokenizer.from_pretrained, recipe.tokenizer or recipe.model, recipe, {})
    model = _model(recipe)
    if arguments.use_liger_kernel:
        allow_liger(model)
    _refuse_leaks(recipe, model)
    try:
        trainer = _trainer(recipe, arguments, model, tokenizer)
    except RecipeError:
        raise
    except (ValueError, RuntimeError) as error:
        raise RecipeError(f"Trainer does not take this recipe: {error}") from error
    refuse_silent_fallbacks(trainer)
    if recipe.activation_offloading and recipe.objective != "sft":  # TRL's trainer does it itself
        trainer.offload_activations()
    trainer.groups = _groups(recipe, trainer.model)
    trainer.with_muon = recipe.optimizer == "muon"
    table = groups_table(trainer.model, trainer.groups, arguments.learning_rate, arguments.weight_decay)
    if trainer.is_world_process_zero():
        echo(table)
    trainer.add_callback(KeepRecipe(recipe))
    if not logs:
        print_no_logs(trainer)
    if recipe.diagnostics.every:
        options = (recipe.diagnostics.every, recipe.diagnostics.window, recipe.diagnostics.threshold)
        trainer.add_callback(DiagnosticsCallback(trainer, _watched_batch(trainer), *options))

    if finished:
        # Stopped between its last checkpoint and its end; Trainer would make one more step.
        trainer._load_from_checkpoint(str(resumed))
        trainer.state = TrainerState.load_from_json(str(resumed / "trainer_state.json"))
    else:
        _run(trainer, output_dir, resumed)
    final = {}
    last = next((entry for entry in reversed(trainer.state.log_history) if "train_loss" in entry), {})
    if "train_loss" in last:
        final["train_loss"] = last["train_loss"]
    if trainer.eval_dataset is not None:
        loss = trainer.evaluate()["eval_loss"]
        final |= {"eval_loss": loss, "eval_perplexity": perplexity(loss)}
        if recipe.distillation is not None:
            final["teacher_perplexity"] = perplexity(trainer.teacher_loss())
    trainer.save_model()
    trainer.save_state()
    merged = _merge(recipe, trainer, tokenizer, output_dir)
    result = TrainingResult(output_dir, trainer.state.global_step, final, table, trainer.state.log_history, merged)
    if trainer.is_world_process_zero():
        _write(recipe, result, trainer)
        for name, value in final.items():
            echo(f"{name}: {value:.4f}")
        echo(f"the model is in {output_dir}" + (f", with the adapters merged in {merged}" if merged else ""))
    return result


def _training_arguments(recipe: Recipe):
    options = {"output_dir": recipe.output_dir, "logging_nan_inf_filter": False}
    options |= {"dataloader_pin_memory": torch.cuda.is_available()}
    # By the name of before, which Trainer will drop and would pass over beside the new one.
    given = {
        name.replace("gradient_checkpointing", "activation_checkpointing"): v for name, v in recipe.arguments.items()
    }
    if recipe.objective == "sft":
        options |= {"max_length": recipe.length, "packing": recipe.packing, "shuffle_dataset": recipe.shuffle}
        # TRL has both on where nothing is said; a recipe means the same whatever its objective.
        options |= {"bf16": False, "activation_checkpointing": False}
        options["activation_offloading"] = recipe.activation_offloading
    else:
        options["remove_unused_columns"] = False
        if recipe.streaming and recipe.arguments.get("max_steps", -1) <= 0:
            raise RecipeError("`max_steps` must be given with `streaming: true`: a stream does not say how long it is")
    if not recipe.evaluation_data and recipe.arguments.get("eval_strategy", "no") != "no":
        raise RecipeError("`eval_strategy` needs `evaluation_data`")
    try:
        arguments = arguments_class(recipe.objective)(**options | given)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"Trainer does not take these arguments: {error}") from error
    if arguments.bf16_full_eval or arguments.fp16_full_eval:
        raise RecipeError(
            "`bf16_full_eval` and `fp16_full_eval` must be false: Trainer would round the model itself, and save it so"
        )
    if recipe.objective == "distill" and arguments.label_smoothing_factor:
        raise RecipeError("`label_smoothing_factor` must be 0 with `objective: distill`, which learns no labels")
    for name in ("learning_rate", "weight_decay", "max_grad_norm", "num_train_epochs"):
        if not isinstance(getattr(arguments, name), (int, float)):
            raise RecipeError(f"`{name}` must be a number, got {getattr(arguments, name)!r}")
    if recipe.activation_offloading and arguments.device.type == "cpu":
        raise RecipeError("`activation_offloading` must be false on a CPU: what it moves to the CPU's memory is there")
    has_windows = any(group.from_step or group.until_step is not None for group in recipe.parameter_groups)
    if arguments.fsdp and has_windows:
        logger.warning(
            "freeze windows under FSDP keep the frozen parts' gradients until the end of each backward pass"
        )
    if arguments.deepspeed and has_windows:
        raise RecipeError(
            "`from_step` and `until_step` cannot be used with DeepSpeed, which keeps gradients to itself"
        )
    return arguments


def _resumed_from(arguments, output_dir: Path) -> Path | None:
    """The checkpoint to go on from; an unfinished one, of a run that was stopped while it saved, does not count."""
    asked = arguments.resume_from_checkpoint
    remove_unfinished(output_dir)
    newest = last_checkpoint(output_dir)
    if asked in (None, False, "false"):
        if newest is not None:
            raise RecipeError(
                f"{output_dir} has checkpoints of an earlier run, the newest {newest.name}: go on from it with --resume_from_checkpoint auto, "
                "or give another output_dir"
            )
        return None
    if asked in (True, "auto", "true"):
        return newest
    path = Path(asked)
    if not is_complete(path):
        raise RecipeError(
            f"`resume_from_checkpoint` {path} is no complete checkpoint; `auto` takes the newest that is"
        )
    return path


def _refuse_to_overwrite(output_dir: Path) -> None:
    # Not whatever lies there: a run that was stopped before its first checkpoint leaves files of its diagnostics.
    patterns = ("model*.safetensors", "adapter_model*.safetensors", RESULTS_FILE)
    found = [path.name for pattern in patterns for path in sorted(output_dir.glob(pattern))]
    if found:
        raise RecipeError(
            f"{output_dir} holds {', '.join(found[:3])} of an earlier run, which would be overwritten: give another output_dir, or remove it"
        )


def _watched_batch(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The batch that the diagnostics look at again and again: the first to evaluate on, or else the first rows to train on."""
    if trainer.eval_dataset is not None:
        batch = next(iter(trainer.get_eval_dataloader()))
    else:
        # Not from the loader of the training: making one draws random numbers.
        rows = list(itertools.islice(trainer.train_dataset, trainer.args.per_device_train_batch_size))
        batch = trainer.data_collator(rows)
    return {name: batch[name] for name in ("input_ids", "position_ids", "attention_mask") if name in batch}


def _is_finished(arguments, resumed: Path | None) -> bool:
    """Whether the checkpoint to go on from is the end already."""
    if resumed is None:
        return False
    state = json.loads((resumed / "trainer_state.json").read_text())
    return state["global_step"] >= (arguments.max_steps if arguments.max_steps > 0 else state["max_steps"])


def _finished_before(output_dir: Path, resumed: Path, echo: Callable[[str], None]) -> TrainingResult:
    results = json.loads((output_dir / RESULTS_FILE).read_text())
    state = json.loads((resumed / "trainer_state.json").read_text())
    merged = output_dir / "merged"
    echo(f"{output_dir} is finished, after {results['steps']} steps; for more of them give a greater `max_steps`")
    return TrainingResult(
        output_dir,
        results["steps"],
        results["final"],
        results["groups"],
        state["log_history"],
        merged if merged.is_dir() else None,
    )


def _load(loader: Callable, source: str, recipe: Recipe, options: dict):
    if "/" in source and not Path(source).is_dir() and not is_hub_id(source):
        raise RecipeError(f"there is no folder {source}: give that of a model, or a Hub id")
    try:
        return loader(source, trust_remote_code=recipe.trust_remote_code, **options)
    except (OSError, ValueError) as error:
        raise RecipeError(f"{source} cannot be loaded: {error}") from error


def _model(recipe: Recipe) -> PreTrainedModel:
    if recipe.new_model is not None:
        return _new_model(recipe)
    options = {}
    if recipe.train == "lora" and recipe.lora.quantize is not None:
        options["quantization_config"] = _four_bits(recipe)
    return _pretrained(recipe.model, recipe.dtype, recipe, **options)


def _pretrained(source: str, dtype: str, recipe: Recipe, **options) -> PreTrainedModel:
    if recipe.attn_implementation is not None:
        options["attn_implementation"] = recipe.attn_implementation
    return _load(AutoModelForCausalLM.from_pretrained, source, recipe, {"dtype": dtype, **options})


def _new_model(recipe: Recipe) -> PreTrainedModel:
    fields = dict(recipe.new_model)
    preset, variant = fields.pop("preset", None), fields.pop("variant", None)
    try:
        if preset is not None:
            config = GatedAttentionConfig.from_preset(preset, *([variant] if variant else []), **fields)
        elif variant is not None:
            config = GatedAttentionConfig.from_variant(variant, **fields)
        else:
            config = GatedAttentionConfig(**fields)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise RecipeError(f"`new_model` describes no model: {error}") from error
    torch.manual_seed(recipe.seed)
    dtype = torch.float32 if recipe.dtype == "auto" else getattr(torch, recipe.dtype)
    if recipe.attn_implementation is not None:
        config._attn_implementation = recipe.attn_implementation
    return GatedAttentionForCausalLM(config).to(dtype)


def _four_bits(recipe: Recipe):
    try:
        import bitsandbytes  # noqa: F401
        from transformers import BitsAndBytesConfig
    except ImportError as error:
        raise RecipeError("`lora.quantize: nf4` needs bitsandbytes: pip install bitsandbytes") from error
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=["g_proj", "lm_head"],
    )


def _refuse_leaks(recipe: Recipe, model: PreTrainedModel) -> None:
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and recipe.length > longest:
        logger.warning("`length` %d is more than the %d positions that the model is meant for", recipe.length, longest)
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    stateful = sorted(kind for kind in kinds if kind.startswith(_STATEFUL_LAYERS))
    if recipe.packing and stateful:
        raise RecipeError(
            f"`packing` must be false for this model: its layers of {', '.join(stateful)} carry what they saw from one document of a row to "
            "the next"
        )


def _groups(recipe: Recipe, model) -> list[ResolvedGroup]:
    groups = resolve_groups(model, recipe.parameter_groups, only_gates=recipe.train == "gates")
    freeze(model, groups)
    return groups


def _trainer(recipe: Recipe, arguments, model: PreTrainedModel, tokenizer) -> Trainer:
    records = load_records(recipe, recipe.data, recipe.shuffle)
    held_out = load_records(recipe, recipe.evaluation_data, shuffle=False) if recipe.evaluation_data else None
    lora = _lora_config(recipe, model) if recipe.train == "lora" else None
    if recipe.objective == "sft":
        if (recipe.long_records or "error") == "error":
            records = _refuse_long(recipe, records, tokenizer)
        elif recipe.long_records == "drop":
            records = records.filter(lambda record: _token_count(tokenizer, record) <= recipe.length)
            if next(iter(records), None) is None:
                raise RecipeError(f"every record is longer than `length` {recipe.length}, and was dropped")
        if arguments.completion_only_loss and "completion" not in next(iter(records)):
            raise RecipeError(
                "`completion_only_loss` needs records with `prompt` and `completion`; these have text or messages"
            )
        return sft_trainer_class()(
            model=model,
            args=arguments,
            train_dataset=records,
            eval_dataset=held_out,
            processing_class=tokenizer,
            peft_config=lora,
        )
    if lora is not None:
        from peft import get_peft_model

        model = get_peft_model(model, lora)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    make = PretrainTrainer
    if recipe.distillation is not None:
        make = functools.partial(DistillationTrainer, distillation=recipe.distillation, teacher=_teacher(recipe))
    return make(
        model=model,
        args=arguments,
        train_dataset=text_rows(recipe, records, tokenizer, recipe.streaming, endless=True),
        eval_dataset=None if held_out is None else text_rows(recipe, held_out, tokenizer, recipe.streaming),
        data_collator=PackedCollator() if recipe.packing else PaddedCollator(padding),
        processing_class=tokenizer,
    )


def _teacher(recipe: Recipe) -> PreTrainedModel:
    teacher = _pretrained(recipe.distillation.teacher, recipe.distillation.teacher_dtype, recipe)
    _refuse_leaks(recipe, teacher)
    return teacher


def _token_count(tokenizer, record: dict) -> int:
    if "messages" in record:
        return len(tokenizer.apply_chat_template(record["messages"], return_dict=True)["input_ids"])
    if "prompt" in record and not isinstance(record["prompt"], str):
        return len(
            tokenizer.apply_chat_template(record["prompt"] + record["completion"], return_dict=True)["input_ids"]
        )
    text = record["text"] if "text" in record else record["prompt"] + record["completion"]
    return len(tokenizer(text, verbose=False)["input_ids"])


def _refuse_long(recipe: Recipe, records, tokenizer):
    def check(record, number):
        count = _token_count(tokenizer, record)
        if count > recipe.length:
            raise RecipeError(
                f"record {number} has {count} tokens, more than `length` {recipe.length}: set `long_records` to 'truncate' or 'drop', or a "
                "greater `length`"
            )
        return record

    return records.map(check, with_indices=True)


def _lora_config(recipe: Recipe, model: PreTrainedModel):
    from peft import LoraConfig

    gates = sorted({name.rpartition(".")[0].rpartition(".")[2] for name in gate_parameters(model)})
    # Of stock classes the gates lie in `q_proj`, which gets an adapter.
    trained = [name for name in gates if name not in recipe.lora.target_modules] if recipe.lora.gates else None
    return LoraConfig(
        r=recipe.lora.r,
        lora_alpha=recipe.lora.alpha,
        lora_dropout=recipe.lora.dropout,
        target_modules=list(recipe.lora.target_modules),
        modules_to_save=trained or None,
        task_type="CAUSAL_LM",
    )


def _run(trainer: Trainer, output_dir: Path, resumed: Path | None) -> None:
    try:
        trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
    except OSError as error:
        remove_unfinished(output_dir)
        kept = last_checkpoint(output_dir)
        where = (
            f"the last good checkpoint is {kept}: make room and go on with --resume_from_checkpoint auto"
            if kept
            else "no checkpoint was saved before"
        )
        raise RecipeError(f"training stopped at step {trainer.state.global_step}: {error}; {where}") from error


def _merge(recipe: Recipe, trainer: Trainer, tokenizer, output_dir: Path) -> Path | None:
    if recipe.train != "lora" or not recipe.merge_adapters or not trainer.is_world_process_zero():
        return None
    if recipe.lora.quantize is not None:
        logger.warning("adapters on weights in four bits are not merged: merge them into the model they came from")
        return None
    merged = output_dir / "merged"
    # The trainer's model is not needed any more.
    trainer.accelerator.unwrap_model(trainer.model).merge_and_unload().save_pretrained(merged)
    tokenizer.save_pretrained(merged)
    return merged


def _write(recipe: Recipe, result: TrainingResult, trainer: Trainer) -> None:
    drawn = draw_curves(result.history, result.output_dir / CURVES_FILE)
    content = {
        "steps": result.steps,
        "final": result.final,
        "groups": result.groups,
        "numbers_in_the_optimizer": tensors_in_optimizer(trainer),
        "curves": curves(result.history),
        "drawn": drawn,
    }
    write_results(result.output_dir / RESULTS_FILE, content)
    for folder in filter(None, (result.output_dir, result.merged)):
        if folder == result.merged:
            for name in (RESULTS_FILE, *([CURVES_FILE] if drawn else [])):
                shutil.copyfile(result.output_dir / name, folder / name)
        write_card(folder, recipe, content)
