"""
What gates cost in a training step: the recipe on a converted model beside `trl sft` on its source.

    python benchmarks/training.py [--model FOLDER] [--granularity headwise] [--length 256] [--batch 2] [--steps 10] [--repetitions 3]
        [--output FILE.json]

Both train all parameters in float32 with AdamW on the same records (Python's help pages, cut to the length), in processes of their own, in turn. A
step's time is Trainer's: the run without loading, over its steps. Given are both and the ratio of each pair, least to greatest.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers
import trl
import yaml

from gated_attention import __version__, convert_checkpoint
from gated_attention.demo import demo_checkpoint


def write_records(path: Path, count: int) -> None:
    texts = [text for _, text in sorted(topics.items()) if len(text) > 2000]
    path.write_text("\n".join(json.dumps({"text": texts[index % len(texts)]}) for index in range(count)) + "\n")


def step_seconds(printed: str, steps: int) -> float:
    """From what Trainer prints at the end."""
    return float(re.search(r"'train_runtime': '?([\d.]+)", printed)[1]) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="ungated checkpoint; default: the demo's SmolLM2-135M")
    parser.add_argument("--granularity", default="headwise")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "training.json")
    options = parser.parse_args()
    source = options.model or demo_checkpoint()
    common = {
        "max_steps": options.steps,
        "per_device_train_batch_size": options.batch,
        "learning_rate": 1e-5,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": options.steps,
        "save_strategy": "no",
        "use_cpu": not torch.cuda.is_available(),
        "seed": 0,
        "report_to": "none",
    }
    times: dict[str, list[float]] = {"trl sft": [], "recipe": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "data").mkdir()
        write_records(folder / "data" / "train.jsonl", options.batch * options.steps)
        convert_checkpoint(source, folder / "gated", granularity=options.granularity, verify="headers")
        recipe = {
            "model": str(folder / "gated"),
            "objective": "sft",
            "data": [{"path": str(folder / "data" / "train.jsonl")}],
            "length": options.length,
            "long_records": "truncate",
            "packing": False,
            "output_dir": str(folder / "recipe"),
            "diagnostics": {"every": 0},
            **common,
        }
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        theirs = {
            "model_name_or_path": str(source),
            "dataset_name": str(folder / "data"),
            "max_length": options.length,
            "packing": False,
            "output_dir": str(folder / "trl sft"),
            "dtype": "float32",
            **common,
        }
        (folder / "trl.yaml").write_text(yaml.safe_dump(theirs))
        commands = {
            "trl sft": [sys.executable, "-m", "trl.scripts.sft", "--config", str(folder / "trl.yaml")],
            "recipe": [sys.executable, "-m", "gated_attention.cli", "train", str(folder / "recipe.yaml")],
        }
        for _ in range(options.repetitions):
            for name, command in commands.items():
                process = subprocess.run(command, capture_output=True, text=True)
                if process.returncode:
                    raise SystemExit(f"{name} failed:\n{process.stderr[-3000:]}")
                times[name].append(step_seconds(process.stdout, options.steps))
                print(f"{name}: {times[name][-1]:.3f} s a step", flush=True)
    ratios = [ours / theirs for ours, theirs in zip(times["recipe"], times["trl sft"], strict=True)]
    print(f"recipe / trl sft: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    versions = {
        "gated_attention": __version__,
        "transformers": transformers.__version__,
        "trl": trl.__version__,
        "torch": torch.__version__,
    }
    machine = {"machine": platform.machine(), "cores": os.cpu_count()}
    settings = {name: value for name, value in vars(options).items() if name not in ("model", "output")}
    content = {
        "versions": versions,
        **machine,
        "model": source.name,
        **settings,
        "seconds_a_step": times,
        "ratios": ratios,
    }
    options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
