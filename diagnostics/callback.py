"""Watches sinks, activations and gates while Trainer trains, and writes down loss spikes."""

import json
import logging
import math
from collections import deque
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainerCallback

from .errors import InspectionError
from .gate_locations import gate_projections
from .inspection import inspect_model


logger = logging.getLogger(__name__)

SPIKES_FILE = "loss_spikes.jsonl"
START_FILE = "gates_at_start.safetensors"


class DiagnosticsCallback(TrainerCallback):
    """
    Logs what the diagnostics see on a held batch, every so many steps, and detects loss spikes.

    Logged under `diagnostics/`: `f_attn`, `largest_key_share`, `m_act`, `largest_activation`; with gates `gate_mean`,
    `gate_closed_fraction`, `gate_movement` (root mean square difference of the gates' weights, adapters included, from those
    at the start of training), `grad_norm_gates`; and `grad_norm_rest` (norms as the optimizer gets them, after clipping).
    They go through `trainer.log`, and so to every tracker of Trainer. The gates of stock models that bring one count too.

    A training that is resumed goes on where it was: the gates at the start are kept in `gates_at_start.safetensors` in the
    output folder, and the losses logged before are taken from Trainer's state.

    A spike is a logged loss or gradient norm that lies more than `threshold` standard deviations above the mean of the
    `window` values logged before it. Each is written to `loss_spikes.jsonl` in the output folder with the token ids of the
    batches since the log before: with `logging_steps=1`, the batch of the spike.

    Args:
        trainer (`Trainer`): The trainer the callback is added to (as in TRL's callbacks).
        batch (`dict[str, torch.Tensor]`): Held batch with `input_ids`, and `attention_mask` or `position_ids` if need be.
        every (`int`): Steps between two looks.
        window (`int`): Number of logged values that a spike is judged by; none is judged before half of them are there.
        threshold (`float`): Standard deviations.

    ```python
    >>> trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
    >>> trainer.add_callback(DiagnosticsCallback(trainer, held_batch, every=100))
    ```"""

    def __init__(
        self,
        trainer: Trainer,
        batch: dict[str, torch.Tensor],
        every: int = 100,
        window: int = 50,
        threshold: float = 6.0,
    ):
        for name, value, least in (("every", every, 1), ("window", window, 4), ("threshold", threshold, 0)):
            if value < least:
                raise InspectionError(f"`{name}` must be at least {least}, got {value}")
        self.trainer = trainer
        self.batch = batch
        self.every = every
        self.threshold = threshold
        self.history = {"loss": deque(maxlen=window), "grad_norm": deque(maxlen=window)}
        self.start: dict[str, torch.Tensor] = {}
        self.gradient_norms: dict[str, float] = {}
        # Token ids since the last log; bounded, in case logs are far apart.
        self.recent: deque[list[list[int]]] = deque(maxlen=64)
        self.handle = None
        self.spikes: list[dict] = []
        self.broken = False

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.on_train_end(args, state, control)  # of a run that broke off
        if state.global_step > 0:
            self._resume(Path(args.output_dir), state)
        else:
            self.start = gate_weights(model)
            if self.start and state.is_world_process_zero:
                Path(args.output_dir).mkdir(parents=True, exist_ok=True)
                save_file(self.start, Path(args.output_dir) / START_FILE)
        self.handle = model.register_forward_pre_hook(self._keep_ids, with_kwargs=True)

    def _resume(self, folder: Path, state) -> None:
        for entry in state.log_history:
            for name, history in self.history.items():
                if name in entry and "loss" in entry and math.isfinite(float(entry[name])):
                    history.append(float(entry[name]))
        if (folder / START_FILE).is_file():
            self.start = load_file(folder / START_FILE)
        else:
            self.start = {}
            logger.warning("no %s in %s: gate movement is left out", START_FILE, folder)

    def on_train_end(self, args, state, control, **kwargs):
        if self.handle is not None:
            self.handle.remove()
            self.handle = None

    def _keep_ids(self, model, args, kwargs):
        if model.training and isinstance(kwargs.get("input_ids"), torch.Tensor):
            self.recent.append(kwargs["input_ids"].tolist())

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if (state.global_step + 1) % self.every == 0:
            gates, rest, seen = 0.0, 0.0, set()
            for projection in gate_projections(model):
                own, other = projection.square_sums()
                gates, rest = gates + own, rest + other
                seen.update(id(parameter) for parameter in projection.module.parameters())
            for parameter in model.parameters():
                if parameter.grad is not None and id(parameter) not in seen:
                    rest += parameter.grad.float().square().sum().item()
            self.gradient_norms = {"gates": math.sqrt(gates), "rest": math.sqrt(rest)}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.every == 0:
            try:
                figures = self._look(model)
            except InspectionError as error:
                # Training that blows up is what the spikes file is for: it must not end here.
                logger.warning("step %d: %s", state.global_step, error)
                figures = {"failed": 1.0}
            should_log = control.should_log
            self.trainer.log({f"diagnostics/{name}": value for name, value in figures.items()})
            control.should_log = should_log  # logging resets it; the loss of this step is still to be logged

    def _look(self, model) -> dict[str, float]:
        model = self.trainer.accelerator.unwrap_model(model)
        found = inspect_model(model, [self.batch], ranks=False).summary()
        shown = ("f_attn", "largest_key_share", "m_act", "largest_activation", "gate_mean", "gate_closed_fraction")
        figures = {name: found[name] for name in shown if found[name] is not None}
        now = gate_weights(model)
        if self.start.keys() == now.keys() and now:
            squares = sum((gate - self.start[name]).square().sum().item() for name, gate in now.items())
            figures["gate_movement"] = math.sqrt(squares / sum(gate.numel() for gate in now.values()))
        if now:
            figures["grad_norm_gates"] = self.gradient_norms.get("gates", 0.0)
        figures["grad_norm_rest"] = self.gradient_norms.get("rest", 0.0)
        return figures

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not logs or "loss" not in logs:
            return
        scores = {}
        for name, history in self.history.items():
            if name in logs:
                value = float(logs[name])
                scores[name] = self._score(value, history)
                if math.isfinite(value):
                    history.append(value)
        broken = any(not math.isfinite(float(logs[name])) for name in scores)
        if any(score > self.threshold for score in scores.values()) and not (broken and self.broken):
            spike = {
                "step": state.global_step,
                **{name: float(logs[name]) for name in scores},
                "z_scores": scores,
                "input_ids": list(self.recent),
            }
            self.spikes.append(spike)
            if state.is_world_process_zero:
                path = Path(args.output_dir) / SPIKES_FILE
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(_finite_or_text(spike), allow_nan=False) + "\n")
        self.broken = broken  # once the loss is no number it stays so: one entry says it
        self.recent.clear()

    def _score(self, value: float, history: deque) -> float:
        """Standard deviations above the mean of the history; infinite for NaN and infinity."""
        if not math.isfinite(value):
            return math.inf
        if len(history) < history.maxlen // 2:
            return 0.0
        mean = sum(history) / len(history)
        deviation = math.sqrt(sum((entry - mean) ** 2 for entry in history) / len(history))
        return (value - mean) / max(deviation, 1e-6 * max(abs(mean), 1.0))


def gate_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Weights and biases of a model's gates as it uses them (adapters included), by name, in float32 on the CPU."""
    model = getattr(model, "module", model)  # data parallel
    return {
        f"{projection.name}.{kind}": tensor
        for projection in gate_projections(model)
        for kind, tensor in zip(("weight", "bias"), projection.effective_weights(), strict=False)
    }


def _finite_or_text(value):
    """JSON has no NaN and no infinity: they become the words for them."""
    if isinstance(value, dict):
        return {key: _finite_or_text(entry) for key, entry in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
