"""Trainer that learns another model's predictions, and may be asked to keep attention on first tokens and activations small."""

from contextlib import ExitStack

import torch
from transformers import PreTrainedModel

from ..diagnostics.capture import Batch
from .divergence import divergence
from .errors import RecipeError
from .packing import IGNORED
from .penalties import FirstTokenShare, LargestActivations
from .recipe import Distillation
from .trainer import PretrainTrainer


class DistillationTrainer(PretrainTrainer):
    """
    Args:
        distillation ([`Distillation`]): The parts of the loss.
        teacher ([`PreTrainedModel`]): The model whose predictions are learned.
        arguments: As of Trainer.
    """

    def __init__(self, *args, distillation: Distillation, teacher: PreTrainedModel, **kwargs):
        super().__init__(*args, **kwargs)
        self.distillation = distillation
        if distillation.sink_share or distillation.activations:
            checkpointing = self.args.activation_checkpointing_kwargs or {}
            if self.args.activation_checkpointing and checkpointing.get("use_reentrant"):
                raise RecipeError("`use_reentrant` must be false with a penalty: it would have no gradient")
            if self.args.torch_compile:
                raise RecipeError(
                    "`torch_compile` must be false with a penalty, which watches what is inside of the model"
                )
        own, others = (m.config.get_text_config().vocab_size for m in (self._plain_model(), teacher))
        if own != others:
            raise RecipeError(
                f"`distillation.teacher` must have the vocabulary of the model, {own} tokens; it has {others}"
            )
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise RecipeError(
                "`objective: distill` cannot be used with FSDP or DeepSpeed: the teacher is held whole; use plain data parallelism"
            )
        teacher.eval().requires_grad_(False)
        self.teacher = teacher.to(self.args.device)
        self.share = FirstTokenShare(self._plain_model()) if distillation.sink_share else None
        self.largest = (
            LargestActivations(self._plain_model(), distillation.activation_threshold)
            if distillation.activations
            else None
        )
        self._parts: dict[str, torch.Tensor] = {}
        self._batches = 0

    def _plain_model(self) -> torch.nn.Module:
        model = self.accelerator.unwrap_model(self.model)
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    def train(self, *args, **kwargs):
        with ExitStack() as stack:
            for watched in filter(None, (self.share, self.largest)):
                stack.enter_context(watched.watching())
            return super().train(*args, **kwargs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not self.model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        labels = inputs.pop("labels")
        inputs["use_cache"] = False
        with torch.no_grad():
            teacher_logits = self.teacher(**inputs).logits
        if self.share is not None:
            self.share.expect(Batch.of(inputs["input_ids"], inputs.get("attention_mask"), inputs.get("position_ids")))
        if self.largest is not None:
            self.largest.expect()
        outputs = model(**inputs)
        # Position t predicts token t + 1.
        targets = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        counts = targets != IGNORED
        if num_items_in_batch is None:
            number, across, share_of_step = counts.sum().clamp(min=1), 1, 1.0
        else:
            # Targets of all processes and of all batches of a step together; gradients are averaged over processes.
            number, share_of_step = num_items_in_batch, 1 / self.current_gradient_accumulation_steps
            across = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1

        settings = self.distillation
        of_teacher = divergence(outputs.logits, teacher_logits, counts, settings.temperature, settings.top_k)
        del teacher_logits
        parts = {"divergence": of_teacher * across / number}
        loss = parts["divergence"]
        if settings.cross_entropy:
            logits = outputs.logits.flatten(0, 1)
            each = torch.nn.functional.cross_entropy(
                logits.float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            parts["cross_entropy"] = each * across / number
            loss = loss + settings.cross_entropy * parts["cross_entropy"]
        for name, watched, weight in (
            ("first_token_share", self.share, settings.sink_share),
            ("activation_excess", self.largest, settings.activations),
        ):
            if watched is not None:
                parts[name] = watched.take() * share_of_step
                loss = loss + weight * parts[name].to(loss.device)
        self._note(parts, share_of_step)
        return (loss, outputs) if return_outputs else loss

    def _note(self, parts: dict[str, torch.Tensor], share_of_step: float) -> None:
        for name, value in parts.items():
            self._parts[name] = self._parts.get(name, 0) + value.detach().float()
        self._batches += share_of_step

    def log(self, logs: dict, *args, **kwargs) -> None:
        if "loss" in logs and self._parts:
            names = sorted(self._parts)
            means = torch.stack([self._parts[name] for name in names]) / max(self._batches, 1e-9)
            means = self.accelerator.reduce(means, reduction="mean")
            logs |= dict(zip(names, means.tolist(), strict=True))
            self._parts, self._batches = {}, 0
        super().log(logs, *args, **kwargs)

    def teacher_loss(self) -> float:
        """The teacher's mean loss over the tokens of the evaluation data."""
        own, self.model = self.model, self.teacher
        try:
            dataloader = self.get_eval_dataloader()
            output = self.evaluation_loop(
                dataloader,
                description="Evaluating the teacher",
                prediction_loss_only=True,
                metric_key_prefix="teacher",
            )
        finally:
            self.model = own
        return output.metrics["teacher_loss"]
