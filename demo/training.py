"""A few Trainer steps that show the gates learning, measured on text that was held out."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)


# The gates start at the identity and have to move; the trained weights only have to follow.
GATE_LEARNING_RATE = 5e-3
LEARNING_RATE = 1e-5


class _Windows(torch.utils.data.Dataset):
    """Consecutive windows of a token stream."""

    def __init__(self, input_ids: list[int], sequence: int):
        count = len(input_ids) // sequence
        self.windows = torch.tensor(input_ids[: count * sequence]).view(count, sequence)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[row], "labels": self.windows[row]}


class _Progress(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            print(f"step {state.global_step:>3} of {state.max_steps}  loss {float(logs['loss']):.3f}", flush=True)


def parameter_groups(model) -> list[dict]:
    """The gates, and everything else, each with a learning rate of its own."""
    gates = [parameter for name, parameter in model.named_parameters() if ".g_proj." in name]
    rest = [parameter for name, parameter in model.named_parameters() if ".g_proj." not in name]
    return [{"params": gates, "lr": GATE_LEARNING_RATE}, {"params": rest, "lr": LEARNING_RATE}]


def train_gates(
    folder: Path,
    trained: Path,
    tokenizer,
    train_ids: list[int],
    held_out_ids: list[int],
    steps: int,
    sequence: int,
):
    """
    Train a converted checkpoint in float32 for `steps` steps of two windows of `sequence` tokens, and save it to `trained`.

    Returns:
        The model, and a `dict` with the losses and the gate scores per layer and head.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    held_out = torch.tensor([held_out_ids[: 2 * sequence]])
    loss_before, _ = _measure(model, held_out)
    groups = parameter_groups(model)
    for name, group in zip(("gates", "the rest"), groups, strict=True):
        count = sum(parameter.numel() for parameter in group["params"])
        print(f"{name}: {count:,} parameters, learning rate {group['lr']:g}")

    arguments = TrainingArguments(
        output_dir=str(trained),
        max_steps=steps,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=_Windows(train_ids, sequence),
        data_collator=default_data_collator,
        processing_class=tokenizer,
        optimizers=(torch.optim.AdamW(groups, weight_decay=0.0), None),
        callbacks=[_Progress()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model()
    model = trainer.model.to("cpu")
    loss_after, scores = _measure(model, held_out)
    print(f"held-out loss {loss_before:.3f} before, {loss_after:.3f} after")
    print(f"gate scores were 1 everywhere, now {scores.min():.3f} to {scores.max():.3f} (mean per layer and head)")
    report = {
        "steps": steps,
        "tokens_per_step": 2 * sequence,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "loss_before": loss_before,
        "loss_after": loss_after,
        "gate_mean": scores.mean().item(),
        "gate_min": scores.min().item(),
        "gate_max": scores.max().item(),
        "gate_scores": scores.tolist(),
    }
    return model, report


def _measure(model, input_ids: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Loss on `input_ids`, and the mean gate score of each layer and head: `(layers, heads)`."""
    config = model.config
    scores = []

    def keep(module, inputs, logits):
        gate_scores = config.gate_scale * torch.sigmoid(logits.float())
        per_head = gate_scores.unflatten(
            -1, (config.num_attention_heads, -1)
        )  # (batch, sequence, heads, 1 or head_dim)
        scores.append(per_head.mean(dim=(0, 1, 3)))

    handles = [layer.self_attn.g_proj.register_forward_hook(keep) for layer in model.model.layers]
    model.eval()
    with torch.no_grad():
        loss = model(input_ids, labels=input_ids, use_cache=False).loss.item()
    for handle in handles:
        handle.remove()
    return loss, torch.stack(scores)


def draw_training(report: dict, path: Path) -> None:
    """Two panels: the training loss, and the gate scores per layer and head after training."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    scores = torch.tensor(report["gate_scores"])
    spread = max((scores - 1).abs().max().item(), 1e-6)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", width_ratios=(1, 1.4))
    left.plot(range(1, len(report["losses"]) + 1), report["losses"], marker="o", markersize=3, color="#0072B2")
    left.set(xlabel="step", ylabel="training loss", title=f"{report['tokens_per_step']} tokens a step")
    left.xaxis.get_major_locator().set_params(integer=True)
    image = right.imshow(scores.T, aspect="auto", cmap="PuOr_r", vmin=1 - spread, vmax=1 + spread, origin="lower")
    right.set(xlabel="layer", ylabel="head", title="mean gate score on held-out text (1 before training)")
    right.xaxis.get_major_locator().set_params(integer=True)
    right.yaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=right)
    figure.savefig(path, dpi=150)
    plt.close(figure)
