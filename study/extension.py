"""
Longer than it was trained: models of a study at several times their training's length, as they are, with YaRN (arXiv 2309.00071), and after a
short training with it; and the same for a sink transfer of the model without gates (paper, section 4.4 and Table 5).
"""

import gc
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ..conversion.errors import NothingToTransferError
from ..conversion.sink_transfer import transfer_sinks
from ..diagnostics import inspect_model
from ..training import make_recipe, train
from .corpus import Corpus
from .errors import StudyError
from .plan import ExtensionOptions, Run
from .tasks import task_accuracy


STAGES = {"plain": "as trained", "yarn": "YaRN", "tuned": "YaRN, tuned"}
TRANSFERRED = "sink transfer of {}"
# Positions whose losses are averaged for a point of a curve.
POSITIONS_A_POINT = 32


@dataclass(frozen=True)
class Stage:
    """A model at one of the stages."""

    options: ExtensionOptions
    run: Run
    transferred: bool
    stage: str

    @property
    def name(self) -> str:
        name = self.run.options.name
        return TRANSFERRED.format(name) if self.transferred else name

    def key(self, corpus: Corpus) -> str:
        """What tells it apart from others; the training that it begins with is in it."""
        settings = {name: getattr(self.options, name) for name in ("lengths", "factor", "tune", "transfer_tokens")}
        content = [self.run.key(corpus), self.transferred, self.stage, settings]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def stages_of(options: ExtensionOptions, runs: Iterator[Run]) -> Iterator[Stage]:
    """What is to be measured, in the order of the table."""
    for run in runs:
        for transferred in (False, True):
            if transferred and not (options.transfer and run.options.variant == "baseline"):
                continue
            for stage in STAGES:
                yield Stage(options, run, transferred, stage)


def finish_stage(
    stage: Stage, corpus: Corpus, trained: Path, folder: Path, echo: Callable[[str], None] = print
) -> dict[str, Any]:
    """
    Measure a model at a stage.

    Args:
        stage ([`Stage`]): Which.
        corpus ([`Corpus`]): With rows of the greatest length.
        trained (`Path`): Folder of the model that was trained at the shortest length.
        folder (`Path`): For what is made of it.
        echo: Where it is said what is done.

    Returns:
        What the table of results keeps; with no `lengths` where there was no sink to transfer.
    """
    options, longest = stage.options, stage.options.lengths[-1]
    result = {
        "study": stage.run.study.name,
        "variant": stage.run.options.variant,
        "seed": stage.run.seed,
        "name": stage.name,
        "stage": stage.stage,
        "diverged": False,
        "lengths": None,
    }
    source = trained
    if stage.transferred:
        source = folder / "transferred"
        try:
            transferred(trained, source, folder / "llama", corpus, options)
        except NothingToTransferError as error:
            echo(f"{stage.name}, seed {stage.run.seed}: {error}")
            return result
    if stage.stage != "plain":
        with_yarn(source, folder / f"yarn-{source.name}", options.factor, longest)
        source = folder / f"yarn-{source.name}"
    if stage.stage == "tuned":
        tuned = folder / f"tuned-{source.name}"
        content = stage.run.recipe(corpus, tuned)
        content.pop("new_model")
        content |= {"model": str(source), "length": longest, "data": corpus.data(longest)} | options.tune
        train(make_recipe(content | {"resume_from_checkpoint": "auto"}), echo=lambda line: None, logs=False)
        for checkpoint in tuned.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
        source = tuned
    result["lengths"] = measured(source, corpus, stage)
    first = result["lengths"][str(options.lengths[0])]
    return result | {"perplexity": first["perplexity"], "f_attn": first["f_attn"]}


def transferred(source: Path, target: Path, llama: Path, corpus: Corpus, options: ExtensionOptions) -> None:
    """A model after its sink transfer; `llama` is where it lies as the transfer takes it."""
    if target.is_dir():
        return
    as_llama(source, llama)
    text = transfer_text(corpus, options.transfer_tokens)
    transfer_sinks(llama, target, text, tokens=options.transfer_tokens, length=options.lengths[0], bos_share=1.0)


def measured(folder: Path, corpus: Corpus, stage: Stage) -> dict[str, Any]:
    """Perplexity, the loss by position, and the accuracy of each task by depth, at each length."""
    tests = stage.run.study.tests
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = {}
    for length in stage.options.lengths:
        windows = corpus.test_windows(length, tests.tokens)
        batches = ({"input_ids": torch.tensor([window])} for window in windows)
        inspection = inspect_model(model, batches, ranks=False, bos=True)
        losses = inspection.loss_by_position[:-1]
        found[str(length)] = {
            "perplexity": inspection.perplexity,
            "f_attn": inspection.f_attn,
            "loss_by_position": [
                sum(part) / len(part)
                for part in (losses[at : at + POSITIONS_A_POINT] for at in range(0, len(losses), POSITIONS_A_POINT))
            ],
            "accuracy": {
                task: asdict(task_accuracy(model, corpus.test_rows(task, length, tests.answers)))
                for task in corpus.options.tasks
            },
        }
    del model
    gc.collect()
    return found


def with_yarn(source: Path, target: Path, factor: float, length: int) -> None:
    """A copy of a model whose RoPE is stretched by YaRN; no weight changes."""
    if target.is_dir():
        return
    config = AutoConfig.from_pretrained(source)
    original = config.max_position_embeddings
    config.rope_parameters = {
        **config.rope_parameters,
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
    }
    config.max_position_embeddings = max(length, round(original * factor))
    model = AutoModelForCausalLM.from_pretrained(source, config=config)
    model.save_pretrained(target)
    copy_tokenizer(source, target)


def as_llama(source: Path, target: Path) -> None:
    """
    The same function as transformers' Llama, which a sink transfer takes.

    Raises:
        [`StudyError`]: the model has something that Llama has not.
    """
    if target.is_dir():
        return
    model = AutoModelForCausalLM.from_pretrained(source)
    fields = {name: getattr(model.config, name) for name in LlamaConfig().to_dict() if hasattr(model.config, name)}
    for name in ("architectures", "model_type", "transformers_version"):
        fields.pop(name, None)
    llama = LlamaForCausalLM(LlamaConfig(**fields))
    missing, unexpected = llama.load_state_dict(model.state_dict(), strict=False)
    missing = [name for name in missing if name != "lm_head.weight" or not llama.config.tie_word_embeddings]
    if missing or unexpected:
        raise StudyError(
            f"`transfer` needs a model that Llama can hold; {', '.join([*missing, *unexpected][:3])} are not in both: leave `qk_norm` and other "
            "additions out of `recipe.new_model`, or set `transfer: false`"
        )
    llama.save_pretrained(target)
    copy_tokenizer(source, target)


def copy_tokenizer(source: Path, target: Path) -> None:
    for path in source.glob("tokenizer*"):
        shutil.copyfile(path, target / path.name)


def transfer_text(corpus: Corpus, tokens: int) -> str:
    """Training text to calibrate a transfer on, with something to spare: it is tokenised again."""
    tokenizer, ids = corpus.tokenizer(), []
    for row in corpus.training_rows(corpus.options.lengths[0]):
        ids += row[1:]
        if len(ids) > 1.5 * tokens:
            break
    return tokenizer.decode(ids, skip_special_tokens=True)
