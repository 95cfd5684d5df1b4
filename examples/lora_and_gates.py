"""
LoRA on the attention and the gates in full, with PEFT and your own Trainer; then both merged into a model of its own.

    python examples/lora_and_gates.py GATED_MODEL TEXT_FILE OUTPUT
"""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import gated_attention  # noqa: F401 (registers the model)


folder, text, output = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
model = get_peft_model(
    model,
    # By name: "all-linear" would put an adapter on the gate instead of training it.
    LoraConfig(
        r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], modules_to_save=["g_proj"], task_type="CAUSAL_LM"
    ),
)
model.print_trainable_parameters()

ids = tokenizer(Path(text).read_text(encoding="utf-8"), verbose=False)["input_ids"]
rows = [torch.tensor(ids[start : start + 64]) for start in range(0, len(ids) - 64, 64)]
arguments = TrainingArguments(
    output, max_steps=20, per_device_train_batch_size=4, learning_rate=1e-3, save_strategy="no", report_to="none"
)
Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows]).train()

merged = model.merge_and_unload()
merged.save_pretrained(output)
tokenizer.save_pretrained(output)
