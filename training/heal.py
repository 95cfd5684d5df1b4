"""A sink transfer and the short self-distillation after it, in one go, and a test of what came of it."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from .._version import __version__
from ..conversion.errors import ConversionError
from ..conversion.places import check_places
from ..conversion.sink_transfer.command import inspect_folders, windows_of_tests
from ..conversion.sink_transfer.transfer import REPORT_FILE, TransferOptions, transfer_sinks
from ..conversion.staging import exclusive, staged_folder
from ..diagnostics.command import LoadOptions
from ..diagnostics.report import aligned, card_section, settings_line, summary_rows
from ..diagnostics.results import Inspection
from ..diagnostics.smoothing import smooth_model
from .errors import RecipeError
from .healing_rows import HealingRows, Mixture
from .outputs import RESULTS_FILE, write_card, write_results
from .recipe import make_recipe
from .run import train


logger = logging.getLogger(__name__)

HEALING_FILE = "healing.json"
# Rows of the text that a smoothing is found on.
SMOOTHED_ON = 16


@dataclass(frozen=True)
class HealingOptions:
    """
    How a model is healed; one object serves the function and the command line.

    Attributes:
        transfer: How sinks are transferred. Its `test_tokens` at the end of the text take part in nothing, and are what the result is tested on.
        tokens: Tokens to learn the source's predictions on, those before the test; a shorter text is gone through again.
        length: Tokens in a row.
        batch: Rows in a step.
        learning_rate: Of the attention's weights; gates and biases have ten times as much.
        sink_share: What attention on the first token costs.
        activations: What activations above 300 cost, as the logarithm of the ratio.
        copy_share: Share of the rows that hold random tokens and repeat them. A transfer fits gates on text, where there is little to copy, and
            loses most of it.
        sampled_share: Share of the rows that the source writes by itself, which are of all the kinds of text that it knows.
        chat_share: Share of those that are chats, of which the source writes both sides, if its tokenizer has a chat template.
        bf16: Whether products are computed in bfloat16 (weights stay in float32): faster on GPUs and on CPUs with AMX.
        smoothing: How strongly the healed model is smoothed ([`smooth_model`]): outliers go from inputs of linear layers into weights, for the sake of
            eight bits; no logit changes. 0: not at all.
        texts: Text files of other kinds to test on.
        dtype: Format that the models are tested in. Training is in float32, and the result has the source's format.
    """

    transfer: TransferOptions = field(default_factory=lambda: TransferOptions(test_tokens=8192))
    tokens: int = 81920
    length: int = 512
    batch: int = 2
    learning_rate: float = 2e-4
    sink_share: float = 1.0
    activations: float = 0.03
    copy_share: float = 0.2
    sampled_share: float = 0.3
    chat_share: float = 0.5
    bf16: bool = False
    smoothing: float = 0.7
    texts: tuple[Path, ...] = ()
    dtype: str = "auto"

    def __post_init__(self):
        for name, least in (("length", 16), ("batch", 1)):
            if getattr(self, name) < least:
                raise ConversionError(f"`{name}` must be {least} or more, got {getattr(self, name)}")
        if self.tokens < self.length * self.batch:
            raise ConversionError(
                f"`tokens` must hold a step of {self.batch} rows of {self.length} tokens, got {self.tokens}"
            )
        for name in ("smoothing", "chat_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConversionError(f"`{name}` must be at least 0 and at most 1, got {getattr(self, name)}")
        for name in ("copy_share", "sampled_share"):
            if not 0 <= getattr(self, name) <= 0.5:
                raise ConversionError(f"`{name}` must be at least 0 and at most 0.5, got {getattr(self, name)}")
        if self.copy_share + self.sampled_share > 0.9:
            raise ConversionError(
                f"`copy_share` and `sampled_share` must leave a tenth for the text, got {self.copy_share} and {self.sampled_share}"
            )
        if not self.transfer.test_tokens:
            raise ConversionError(f"`test_tokens` must be at least {self.transfer.length}: a healing is tested")
        if self.transfer.test_tokens < self.length:
            raise ConversionError(
                f"`test_tokens` must be at least a row of `length` {self.length}, got {self.transfer.test_tokens}"
            )
        if torch.device(self.transfer.device).index:
            raise ConversionError(
                f"`device` must be without a number, got {self.transfer.device!r}: choose with CUDA_VISIBLE_DEVICES"
            )

    @property
    def steps(self) -> int:
        return self.tokens // (self.length * self.batch)

    @property
    def mixture(self) -> Mixture:
        """The rows of all steps."""
        return Mixture(self.steps * self.batch, self.length, self.copy_share, self.sampled_share, self.chat_share)


def healing_recipe(
    source: str, transferred: str, data: list[dict], held_out: str, output_dir: str, options: HealingOptions
) -> dict[str, Any]:
    """The recipe of the distillation: that of `recipes/distill_transfer.yaml`, with the paths and figures of these options."""
    at_once = {"learning_rate": 10, "weight_decay": 0}
    return {
        "model": transferred,
        "output_dir": output_dir,
        "objective": "distill",
        "distillation": {
            "teacher": source,
            "teacher_dtype": "bfloat16" if options.bf16 else "float32",
            "sink_share": options.sink_share,
            "activations": options.activations,
        },
        "data": data,
        "evaluation_data": [{"path": held_out, "column": "input_ids"}],
        "length": options.length,
        "parameter_groups": [
            {"pattern": "gates", **at_once},
            {"pattern": r"self_attn\..*bias", **at_once},
            {"pattern": "self_attn"},
            {"pattern": "", "frozen": True},
        ],
        "max_steps": options.steps,
        "per_device_train_batch_size": options.batch,
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": max(1, options.steps // 20),
        "max_grad_norm": 1.0,
        "bf16": options.bf16,
        "logging_steps": max(1, options.steps // 20),
        "eval_strategy": "steps",
        "eval_steps": max(1, options.steps // 4),
        "save_steps": max(1, options.steps // 4),
        "save_total_limit": 2,
        "seed": options.transfer.seed,
        "use_cpu": options.transfer.device == "cpu",
        "diagnostics": {"every": max(1, options.steps // 4)},
    }


def heal(
    source: str | os.PathLike,
    target: str | os.PathLike,
    text: str,
    options: HealingOptions | None = None,
    *,
    text_name: str = "text",
    echo: Callable[[str], None] = print,
) -> dict[str, list[Inspection]]:
    """
    Transfer the sinks of a model, let the result learn its source's predictions, and test all three.

    What is made lies in a hidden folder beside the target until it is complete; a healing that was stopped goes on from there when it is asked
    for again with the same settings. The target holds the model, its card, `healing.json` with the tests, and `training_curves.png`.

    Args:
        source (`str` or `os.PathLike`): Folder of a checkpoint that [`transfer_sinks`] takes. Never written to.
        target (`str` or `os.PathLike`): Folder to make.
        text (`str`): Text to transfer and heal on; its end is for the test.
        options ([`HealingOptions`], *optional*): How.
        text_name (`str`): Name of the text, for the report.
        echo: Where reports go.

    Returns:
        By text, the inspections of the source, of the model after the transfer, and of the healed one.

    Raises:
        [`ConversionError`], [`RecipeError`]: something cannot be read, transferred, trained or written.
    """
    options = options or HealingOptions()
    source, target = Path(source).resolve(), Path(os.path.abspath(target))
    load = LoadOptions(dtype=options.dtype, device=options.transfer.device)
    load.check()
    with exclusive(target):
        check_places(source, target, options.transfer.overwrite)
        windows, bos = windows_of_tests(source, text, text_name, options.transfer, options.texts)
        rows = HealingRows(source, text, options.mixture, options.transfer)
        work = _work_folder(target, source, options, text)
        transferred, trained = work / "transferred", work / "trained"
        try:
            if not transferred.is_dir():
                echo(transfer_sinks(source, transferred, text, options.transfer, text_name=text_name).describe())
        except ConversionError:
            shutil.rmtree(work)
            raise
        data, held_out = rows.write(work)
        settings = healing_recipe(str(source), str(transferred), data, str(held_out), str(trained), options)
        recipe = make_recipe(settings | {"resume_from_checkpoint": "auto"})
        try:
            train(recipe, echo=echo)
        except RecipeError as error:
            raise RecipeError(
                f"{error} (the training is in {work}, and the same command goes on from there)"
            ) from error
        _round_and_smooth(trained, transferred, rows, options)

        folders = {"source": source, "transferred": transferred, "healed": trained}
        found = inspect_folders(folders, windows, bos, load)
        for name, inspections in found.items():
            echo(f"\n{name}, {settings_line(inspections[0])}\n{aligned(summary_rows(inspections))}")
        _write_report(trained / HEALING_FILE, transferred, options, found)
        write_card(
            trained,
            recipe,
            json.loads((trained / RESULTS_FILE).read_text(encoding="utf-8")),
            title=target.name,
            trained_from=f"{source.name} after a sink transfer",
            data=[text_name],
        )
        with (trained / "README.md").open("a", encoding="utf-8") as card:
            card.writelines(f"\n{card_section(inspections)}" for inspections in found.values())
        with staged_folder(target) as folder:
            # First what says that the training is finished: a move that is cut off can be made up for from the last checkpoint.
            for path in sorted(trained.iterdir(), key=lambda path: path.name != RESULTS_FILE):
                if not path.name.startswith("checkpoint-"):
                    path.rename(folder / path.name)
        shutil.rmtree(work)
    echo(f"\nthe healed model is in {target}")
    return found


def _work_folder(target: Path, source: Path, options: HealingOptions, text: str) -> Path:
    """A hidden folder beside the target; what another source, text or setting left there is cleared."""
    work = target.parent / f".{target.name}.healing"
    if work in source.parents:
        raise ConversionError(f"the source {source} lies where {target} is made; move it")
    files = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(source.iterdir())
        if path.suffix in (".safetensors", ".bin", ".json", ".model")
    ]
    settings = json.dumps(
        {
            "source": str(source),
            "files": files,
            "text": hashlib.sha256(text.encode()).hexdigest(),
            "version": __version__,
            **asdict(options),
        },
        default=str,
    )
    kept = work / "settings.json"
    if work.is_dir() and not (kept.is_file() and kept.read_text(encoding="utf-8") == settings):
        logger.warning("%s is of other settings, and begun anew", work)
        shutil.rmtree(work)
    work.mkdir(exist_ok=True)
    kept.write_text(settings, encoding="utf-8")
    return work


def _round_and_smooth(trained: Path, transferred: Path, rows: HealingRows, options: HealingOptions) -> None:
    """Training was in float32; the result has the source's format, as the model after the transfer has, and is smoothed if asked for."""
    dtype = AutoConfig.from_pretrained(transferred).dtype or torch.float32
    if dtype == torch.float32 and not options.smoothing:
        return
    model = AutoModelForCausalLM.from_pretrained(trained, dtype=dtype)
    if options.smoothing:
        model.to(options.transfer.device)
        smooth_model(model, (torch.tensor([row]) for row in rows.of_text(SMOOTHED_ON)), options.smoothing)
    model.save_pretrained(trained)


def _write_report(path: Path, transferred: Path, options: HealingOptions, found: dict[str, list[Inspection]]) -> None:
    content = {
        "options": json.loads(json.dumps(asdict(options), default=str)),
        "transfer": json.loads((transferred / REPORT_FILE).read_text(encoding="utf-8")),
        "tests": {name: [inspection.summary() for inspection in inspections] for name, inspections in found.items()},
    }
    write_results(path, content)
