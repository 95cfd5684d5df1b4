"""
Sinks, activations, gates and loss spikes while your own Trainer trains.

    python examples/diagnostics_callback.py MODEL TEXT_FILE OUTPUT
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from gated_attention.diagnostics import DiagnosticsCallback


folder, text, output = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")

ids = tokenizer(Path(text).read_text(encoding="utf-8"), verbose=False)["input_ids"]
rows = [torch.tensor(ids[start : start + 64]) for start in range(0, len(ids) - 64, 64)]
arguments = TrainingArguments(
    output, max_steps=20, per_device_train_batch_size=4, logging_steps=1, save_strategy="no", report_to="none"
)
trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows[2:]])
held_out = {"input_ids": torch.stack(rows[:2])}
trainer.add_callback(DiagnosticsCallback(trainer, held_out, every=10))
trainer.train()

for entry in trainer.state.log_history:
    if "diagnostics/f_attn" in entry:
        print(
            entry["step"], {name: round(value, 4) for name, value in entry.items() if name.startswith("diagnostics/")}
        )
trainer.save_model()
