"""
Longer than it was trained: models of a study at several times their training's length, as they are, with YaRN (arXiv 2309.00071), and after a
short training with it; and the same for a sink transfer of the model without gates (paper, section 4.4 and Table 5).
"""

import gc
import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from .._version import package_versions
from ..conversion.errors import NothingToTransferError
from ..conversion.sink_transfer import transfer_sinks
from ..conversion.staging import staged_folder
from ..diagnostics import InspectionError, inspect_model
from .corpus import Corpus
from .errors import StudyError
from .plan import ExtensionOptions, Run
from .training import device_of, train_once


STAGES = {"plain": "as trained", "yarn": "YaRN", "tuned": "YaRN, tuned"}
TRANSFERRED = "sink transfer of {}"
# Name of the folder with a model as a sink transfer takes it.
LLAMA = "llama"
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

    def settings_key(self, corpus: Corpus) -> str:
        """What tells the models of an extension apart from those of others; the training that they begin with is in it."""
        settings = {name: getattr(self.options, name) for name in ("lengths", "factor", "tune", "transfer_tokens")}
        content = [self.run.key(corpus), settings]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def key(self, corpus: Corpus) -> str:
        """What tells it apart from other stages."""
        content = [self.settings_key(corpus), self.transferred, self.stage]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def stages_of(options: ExtensionOptions, runs: Iterator[Run]) -> Iterator[Stage]:
    """What is to be measured, in the order of the table."""
    for run in runs:
        for transferred in (False, True):
            if transferred and not (options.transfer and run.options.variant == "baseline"):
                continue
            for stage in STAGES:
                yield Stage(options, run, transferred, stage)


def finish_stage(stage: Stage, corpus: Corpus, base: dict[str, Any], trained: Path, folder: Path) -> dict[str, Any]:
    """
    Measure a model at a stage.

    Args:
        stage ([`Stage`]): Which.
        corpus ([`Corpus`]): With rows of the greatest length.
        base (`dict`): The result of the training at the shortest length.
        trained (`Path`): Folder of the model that it gave.
        folder (`Path`): For what is made of it.

    Returns:
        What the table of results keeps. Where there is no model to measure it has no `lengths`, and a `reason`.
    """
    result = {
        "study": stage.run.study.name,
        "variant": stage.run.options.variant,
        "seed": stage.run.seed,
        "name": stage.name,
        "stage": stage.stage,
        "diverged": False,
        "lengths": None,
        "versions": package_versions(),
    }
    if base["diverged"]:
        return result | {"diverged": True, "reason": f"its training diverged at step {base['steps']}"}
    if not trained.is_dir():
        raise StudyError(
            f"{trained} is gone, the model that {stage.name}, seed {stage.run.seed}, is made of: put it back, or take another FOLDER"
        )
    try:
        model = _model_at(stage, corpus, trained, folder)
        if model is None:
            return result | {"diverged": True, "reason": "the training at the greatest length diverged"}
        lengths = measured(model, corpus, stage)
    except NothingToTransferError as error:
        # The error names the folder that it looked at.
        return result | {"reason": f"no sink to transfer: {error}".replace(str(folder / LLAMA), "the model")}
    except InspectionError as error:
        return result | {"diverged": True, "reason": f"it cannot be measured: {error}"}
    first = lengths[str(stage.options.lengths[0])]
    return result | {"lengths": lengths, "perplexity": first["perplexity"], "f_attn": first["f_attn"]}


def _model_at(stage: Stage, corpus: Corpus, trained: Path, folder: Path) -> Path | None:
    """The folder of the model at a stage, made if it is not there; None if its training diverges."""
    options, longest = stage.options, stage.options.lengths[-1]
    content = stage.run.recipe(corpus, folder)
    folder.mkdir(parents=True, exist_ok=True)
    source = trained
    if stage.transferred:
        source = folder / "transferred"
        transferred(trained, source, folder / LLAMA, corpus, options, device_of(content))
    if stage.stage == "plain":
        return source
    # The model that was trained lies in a folder named by its key.
    name = "transferred" if stage.transferred else "trained"
    with_yarn(source, folder / f"yarn-{name}", options.factor, options.lengths[0], longest)
    if stage.stage == "yarn":
        return folder / f"yarn-{name}"
    tuned = folder / f"tuned-{name}"
    content.pop("new_model")
    content |= options.tune
    content |= {"model": str(folder / f"yarn-{name}"), "length": longest, "data": corpus.data(longest)}
    outcome = train_once(content | {"output_dir": str(tuned)})
    return None if outcome.diverged else tuned


def transferred(
    source: Path, target: Path, llama: Path, corpus: Corpus, options: ExtensionOptions, device: str = "cpu"
) -> None:
    """A model after its sink transfer; `llama` is where it lies as the transfer takes it."""
    if target.is_dir():
        return
    as_llama(source, llama)
    text = transfer_text(corpus, options.transfer_tokens)
    length = options.lengths[0]
    transfer_sinks(
        llama,
        target,
        text,
        tokens=options.transfer_tokens,
        length=length,
        bos_share=1.0,
        device=device,
        progress=False,
    )


def measured(folder: Path, corpus: Corpus, stage: Stage) -> dict[str, Any]:
    """Perplexity, the loss by position, and the accuracy of each task by depth, at each length."""
    tests = stage.run.study.tests
    device = device_of(stage.run.study.recipe)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
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
            "accuracy": corpus.accuracies(model, length, tests.answers),
        }
    del model
    gc.collect()
    return found


def with_yarn(source: Path, target: Path, factor: float, trained_length: int, length: int) -> None:
    """A copy of a model whose RoPE is stretched by YaRN; no weight changes."""
    if target.is_dir():
        return
    config = AutoConfig.from_pretrained(source)
    config.rope_parameters = {
        **config.rope_parameters,
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": trained_length,
    }
    config.max_position_embeddings = max(length, round(trained_length * factor))
    with staged_folder(target) as folder:
        AutoModelForCausalLM.from_pretrained(source, config=config).save_pretrained(folder)
        copy_tokenizer(source, folder)


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
    tokens = torch.arange(min(64, model.config.vocab_size, model.config.max_position_embeddings))[None]
    with torch.no_grad():
        same = not (missing or unexpected) and torch.allclose(
            llama.eval()(tokens).logits, model.eval()(tokens).logits, rtol=1e-4, atol=1e-4
        )
    if not same:
        raise StudyError(
            "`transfer` needs a model that Llama can hold, and this one computes something else: leave `qk_norm` and other additions out of `recipe.new_model` and "
            "`changes`, or set `transfer: false`"
        )
    with staged_folder(target) as folder:
        llama.save_pretrained(folder)
        copy_tokenizer(source, folder)


def copy_tokenizer(source: Path, target: Path) -> None:
    for path in source.glob("tokenizer*"):
        shutil.copyfile(path, target / path.name)


def transfer_text(corpus: Corpus, tokens: int) -> str:
    """Training text to calibrate a transfer on, with something to spare: it is tokenised again."""
    tokenizer, ids = corpus.tokenizer, []
    for row in corpus.training_rows(corpus.options.lengths[0]):
        ids += row[1:]
        if len(ids) > 1.5 * tokens:
            break
    return tokenizer.decode(ids, skip_special_tokens=True)
