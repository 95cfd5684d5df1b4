"""
What gates cost in a training step: the recipe's trainer on a converted model beside TRL's SFTTrainer, which `trl sft` runs, on its source.

    python benchmarks/training.py [--model FOLDER] [--granularity headwise] [--length 256] [--batch 2] [--rounds 20] [--output FILE.json]

Both train all parameters in float32 with AdamW on the same records (Python's help pages, cut to the length). The two trainers live in one process and take turns, a step
each: forward, backward, clipping, optimizer. Given is the median of the ratios within a round with its 95 % interval (from the order of the
ratios).
"""

import argparse
import json
import math
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers
import trl
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from gated_attention import __version__, convert_checkpoint
from gated_attention.demo import demo_checkpoint
from gated_attention.training import make_recipe
from gated_attention.training.run import _groups, _model, _trainer, _training_arguments


def write_records(path: Path, count: int) -> None:
    texts = [text for _, text in sorted(topics.items()) if len(text) > 2000]
    path.write_text("\n".join(json.dumps({"text": texts[index % len(texts)]}) for index in range(count)) + "\n")


def step_seconds(trainer, batch: dict) -> float:
    started = time.perf_counter()
    trainer.training_step(trainer.model, dict(batch))
    torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Median and a 95 % interval of it, which no distribution has to be assumed for."""
    ordered, count = sorted(ratios), len(ratios)
    away = max(1, round(count / 2 - 0.98 * math.sqrt(count)))
    return ordered[away - 1], statistics.median(ordered), ordered[count - away]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="ungated checkpoint; default: the demo's SmolLM2-135M")
    parser.add_argument("--granularity", default="headwise")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "training.json")
    options = parser.parse_args()
    source = options.model or demo_checkpoint()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_records(folder / "train.jsonl", options.batch * 8)
        convert_checkpoint(source, folder / "gated", granularity=options.granularity, verify="headers")
        recipe = make_recipe(
            {
                "model": str(folder / "gated"),
                "objective": "sft",
                "data": [{"path": str(folder / "train.jsonl")}],
                "length": options.length,
                "long_records": "truncate",
                "packing": False,
                "output_dir": str(folder / "out"),
                "per_device_train_batch_size": options.batch,
                "learning_rate": 1e-5,
                "use_cpu": not torch.cuda.is_available(),
            }
        )
        arguments = _training_arguments(recipe)
        tokenizer = AutoTokenizer.from_pretrained(source)
        ours = _trainer(recipe, arguments, _model(recipe), tokenizer)
        ours.groups = _groups(recipe, ours.model)
        theirs = trl.SFTTrainer(
            AutoModelForCausalLM.from_pretrained(source, dtype="float32"),
            _training_arguments(recipe),
            train_dataset=load_dataset("json", data_files=str(folder / "train.jsonl"), split="train"),
            processing_class=tokenizer,
        )
        times: dict[str, list[float]] = {"recipe": [], "trl": []}
        batch = next(iter(ours.get_train_dataloader()))
        for trainer in (ours, theirs):
            trainer.create_optimizer()
            trainer.current_gradient_accumulation_steps = 1  # as `train` sets it
            step_seconds(trainer, batch)  # makes the optimizer's state
        for number in range(options.rounds):
            turn = [("recipe", ours), ("trl", theirs)]
            for name, trainer in turn if number % 2 else turn[::-1]:
                times[name].append(step_seconds(trainer, batch))
    ratios = [mine / other for mine, other in zip(times["recipe"], times["trl"], strict=True)]
    low, middle, high = interval(ratios)
    print(
        f"recipe / trl: {middle:.3f} ({low:.3f} to {high:.3f}); {statistics.median(times['trl']):.3f} s a step of TRL's"
    )
    versions = {
        "gated_attention": __version__,
        "transformers": transformers.__version__,
        "trl": trl.__version__,
        "torch": torch.__version__,
    }
    content = {
        "versions": versions,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "model": source.name,
        **{name: getattr(options, name) for name in ("granularity", "length", "batch", "rounds")},
        "seconds_a_step": times,
        "ratio": [low, middle, high],
    }
    options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
