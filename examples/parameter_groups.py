"""
The gates at a rate of their own, in your own Trainer.

    python examples/parameter_groups.py GATED_MODEL TEXT_FILE OUTPUT
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import gated_attention  # noqa: F401 (registers the model)
from gated_attention.training import ParameterGroup, groups_table, optimizer_groups, resolve_groups


folder, text, output = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")

ids = tokenizer(Path(text).read_text(encoding="utf-8"), verbose=False)["input_ids"]
rows = [torch.tensor(ids[start : start + 64]) for start in range(0, len(ids) - 64, 64)]
arguments = TrainingArguments(
    output,
    max_steps=20,
    per_device_train_batch_size=4,
    learning_rate=1e-5,
    weight_decay=0.1,
    save_strategy="no",
    report_to="none",
)
trainer = Trainer(
    model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows], processing_class=tokenizer
)

groups = resolve_groups(
    model, [ParameterGroup("gates", learning_rate=100, weight_decay=0), ParameterGroup("norm", weight_decay=0)]
)
print(groups_table(model, groups, arguments.learning_rate, arguments.weight_decay))
decayed = set(trainer.get_decay_parameter_names(model))
trainer.optimizer = torch.optim.AdamW(
    optimizer_groups(model, groups, arguments.learning_rate, arguments.weight_decay, decayed)
)

trainer.train()
trainer.save_model()
