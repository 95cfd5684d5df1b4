"""transformers' Trainer and TRL's SFTTrainer, with parameter groups, freeze windows, and a stop at the first loss that is no number."""

import logging
import math
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import torch
import yaml
from tqdm import tqdm
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .errors import DivergedError, RecipeError
from .packing import IGNORED
from .parameter_groups import MuonAndAdamW, ResolvedGroup, drop_gradients, optimizer_groups
from .recipe import Recipe, recipe_content


logger = logging.getLogger(__name__)


class GroupedTraining:
    """
    What a recipe adds to a Trainer; to be mixed in before it. `groups` and `with_muon` are set before training.
    """

    groups: list[ResolvedGroup] = []
    with_muon = False

    def create_optimizer(self, model=None):
        if self.optimizer is not None:
            return self.optimizer
        of = self.model if model is None else model
        decayed = set(self.get_decay_parameter_names(of))
        groups = optimizer_groups(of, self.groups, self.args.learning_rate, self.args.weight_decay, decayed)
        if not groups:
            raise RecipeError("every parameter is frozen: there is nothing to train")
        if self.with_muon:
            adam = {"betas": (self.args.adam_beta1, self.args.adam_beta2), "eps": self.args.adam_epsilon}
            self.optimizer = MuonAndAdamW(_with_muon(of, groups), adam)
        else:
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, of)
            self.optimizer = optimizer_class(groups, **options)
        return self.optimizer

    def _get_learning_rate(self):
        # What is logged is the rate that the factors are of, whichever group comes first.
        for group in self.optimizer.param_groups:
            if group.get("factor"):
                return group["lr"] / group["factor"]
        return 0.0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        # With a cache, which evaluation would make, transformers no longer tells documents in a row apart.
        inputs["use_cache"] = False
        targets = (inputs["labels"][:, 1:] != IGNORED).sum().double()
        found = super().compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )
        if not self.model.training and targets > 0:
            loss = (found[0] if return_outputs else found).detach().double()
            divisor = targets.to(loss.device)
            if num_items_in_batch is not None:
                # Divided by the targets of all processes together, and multiplied by how many there are.
                divisor = num_items_in_batch / (self.accelerator.num_processes // self.get_tp_size())
            self._totals = self._totals + torch.stack([loss * divisor, targets.to(loss.device)])
        return found

    def prediction_step(self, model, inputs, *arguments, **options):
        state = self.accelerator.gradient_state
        if self.accelerator.num_processes > 1 and state.end_of_dataloader and state.remainder > 0:
            # The last batch is filled up with rows from before, so that all processes have as many: they are no targets again.
            rows = len(inputs["labels"])
            own = min(rows, max(0, state.remainder - rows * self.accelerator.process_index))
            inputs["labels"][own:] = IGNORED
        return super().prediction_step(model, inputs, *arguments, **options)

    def evaluation_loop(self, *arguments, metric_key_prefix: str = "eval", **options):
        # Trainer averages over batches; rows that are not full would weigh as much as others, and so would their perplexity.
        self._totals = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        output = super().evaluation_loop(*arguments, metric_key_prefix=metric_key_prefix, **options)
        loss, count = self.accelerator.reduce(self._totals.float()).tolist()
        if count and f"{metric_key_prefix}_loss" in output.metrics:
            output.metrics[f"{metric_key_prefix}_loss"] = loss / count
        return output

    def training_step(self, model, inputs, *arguments, **options):
        first = inputs["input_ids"][0, :16].tolist()
        loss = super().training_step(model, inputs, *arguments, **options)
        if not math.isfinite(loss.item()):
            kept = last_checkpoint(Path(self.args.output_dir))
            raise DivergedError(
                f"the loss is {loss.item()} at step {self.state.global_step + 1}, in a batch that begins with the tokens {first}. "
                + (f"The last good checkpoint is {kept}" if kept else "No checkpoint was saved before")
                + "; try a lower `learning_rate`, a longer warm-up, or a smaller `max_grad_norm`",
                step=self.state.global_step + 1,
                history=self.state.log_history,
            )
        # Before gradients are clipped: those of parameters that wait must not count.
        # Of the model itself: what wraps it for several processes gives its parameters other names.
        drop_gradients(self.model, self.groups, self.state.global_step)
        return loss


class PretrainTrainer(GroupedTraining, Trainer):
    """Trainer, for text."""

    def offload_activations(self) -> None:
        """From now on what the backward pass needs waits in the CPU's memory, as in TRL's trainers."""
        try:
            from trl.models import get_act_offloading_ctx_manager
        except ImportError as error:
            raise RecipeError("`activation_offloading` needs TRL: pip install 'gated_attention[train]'") from error
        self._offloading = get_act_offloading_ctx_manager(model=self.model)

    _offloading = nullcontext()

    def training_step(self, *arguments, **options):
        with self._offloading:
            return super().training_step(*arguments, **options)


def sft_trainer_class() -> type:
    """TRL's SFTTrainer with what a recipe adds."""
    from trl import SFTTrainer

    return type("RecipeSFTTrainer", (GroupedTraining, SFTTrainer), {})


def _with_muon(model, groups: list[dict]) -> list[dict]:
    """Matrices of the layers for Muon; embeddings, head and vectors for AdamW."""
    layers = {id(p) for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name}
    split = []
    for group in groups:
        for use_muon in (True, False):
            members = [parameter for parameter in group["params"] if (id(parameter) in layers) == use_muon]
            if members:
                split.append({**group, "params": members, "use_muon": use_muon})
    return split


def checkpoints(output_dir: Path) -> list[Path]:
    """The checkpoints in a folder, the oldest first."""
    found = [path for path in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.rpartition("-")[2].isdigit()]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def last_checkpoint(output_dir: Path) -> Path | None:
    """The newest checkpoint that is complete: Trainer writes its state last."""
    complete = [path for path in checkpoints(output_dir) if is_complete(path)]
    return complete[-1] if complete else None


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint was written to its end."""
    return (checkpoint / "trainer_state.json").is_file()


def remove_unfinished(output_dir: Path) -> None:
    """Remove the checkpoints that a run was stopped in the middle of."""
    for path in checkpoints(output_dir):
        if not is_complete(path):
            logger.warning("%s is unfinished and is removed", path)
            shutil.rmtree(path, ignore_errors=True)  # another process may be at it too


class BarAlone(ProgressCallback):
    """A bar for the steps, on a terminal, that goes when they are done; what is logged is not printed."""

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self.training_bar = tqdm(
                total=state.max_steps, desc="Training", unit="step", leave=False, dynamic_ncols=True, disable=None
            )
        self.current_step = 0

    def on_log(self, args, state, control, logs=None, **kwargs):
        pass


RECIPE_FILE = "recipe.yaml"


def print_no_logs(trainer: Trainer) -> None:
    """For trainings that are one of many."""
    for printing in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(printing)
    trainer.add_callback(BarAlone())


class KeepRecipe(TrainerCallback):
    """Lays the recipe beside each checkpoint: what goes on from there can be compared with it, or run from it."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe

    def on_save(self, args, state, control, **kwargs):
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            content = {name: value for name, value in recipe_content(self.recipe).items() if value is not None}
            content.pop("resume_from_checkpoint", None)
            (folder / RECIPE_FILE).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def refuse_silent_fallbacks(trainer: Trainer) -> None:
    """
    Refuse to train otherwise than was asked for: on a CPU Trainer turns FSDP into plain data parallelism, or lets each process
    train by itself.

    Raises:
        `RecipeError`: it would.
    """
    if trainer.args.n_gpu > 1:
        raise RecipeError(
            f"{trainer.args.n_gpu} GPUs are visible to one process, over which Trainer would spread each batch by threads: start with `accelerate launch`, "
            "or show it one (CUDA_VISIBLE_DEVICES)"
        )
    world = int(os.environ.get("WORLD_SIZE", "1"))
    accelerator = trainer.accelerator
    by_accelerate = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if (trainer.args.fsdp or by_accelerate) and not getattr(accelerator, "is_fsdp2", False):
        raise RecipeError(
            "FSDP was asked for (`fsdp`, or accelerate's settings), and accelerate would train without: it needs accelerators, and FSDP2 (`fsdp_config: {version: "
            "2}`)"
        )
    if world > 1 and accelerator.num_processes == 1:
        raise RecipeError(
            f"{world} processes were started, and each would train by itself in the same folder: on CPUs set `use_cpu: true` and "
            "`ddp_backend: gloo`"
        )


def tensors_in_optimizer(trainer: Trainer) -> int:
    """How many numbers the optimizer holds beside the parameters."""
    state = {} if trainer.optimizer is None else trainer.optimizer.state
    return sum(
        value.numel() for values in state.values() for value in values.values() if isinstance(value, torch.Tensor)
    )
