"""
Time, bytes and memory of a conversion, beside a plain copy of the checkpoint's folder.

    python benchmarks/conversion.py [--gigabytes 4] [--repetitions 7] [--folder DIR] [--output FILE.json]

A synthetic Llama-type checkpoint in bfloat16, sharded, with one tensor of 1.2 GB, is copied with `shutil.copytree` and
converted with `--link hard` and `--link copy`, in turn, several times in one run. Timed is what the conversion does between
its imports and the finished folder without the comparison of logits: plan, write, header audit. The logit check and the
hashing of the folder are timed once, beside it. Memory is that of a process of its own: the peak of its anonymous memory
over what it holds after importing torch and transformers.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from gated_attention import GatedAttentionConfig, GatedAttentionForCausalLM, __version__, convert_checkpoint


HIDDEN, INTERMEDIATE, HEADS, KEY_VALUE_HEADS = 4096, 11008, 32, 8
VOCABULARY = 146_496  # x 4096 x 2 bytes = 1.2 GB

_MEMORY = """
import sys, threading, time
import torch, transformers

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

start = peak = anonymous()
def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.001)
threading.Thread(target=watch, daemon=True).start()
from gated_attention import convert_checkpoint
imported = anonymous()
convert_checkpoint(sys.argv[1], sys.argv[2], link=sys.argv[3], granularity=sys.argv[4], verify="headers")
time.sleep(0.01)
print(max(peak, anonymous()) - start, imported - start)
"""


def make_checkpoint(folder: Path, gigabytes: float) -> None:
    """A Llama-type checkpoint of about that size, one file a layer and one for the rest, filled with random numbers."""
    layer_bytes = 2 * HIDDEN * (2 * HIDDEN + 2 * HIDDEN * KEY_VALUE_HEADS // HEADS + 3 * INTERMEDIATE)
    layers = max(1, round((gigabytes * 1e9 - 2 * VOCABULARY * HIDDEN) / layer_bytes))
    config = GatedAttentionConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        shapes = {
            name: p.shape for name, p in GatedAttentionForCausalLM(config).named_parameters() if "g_proj" not in name
        }
    names = [f"model.layers.{layer}." for layer in range(layers)] + ["model.embed_tokens", "model.norm"]
    weight_map = {}
    generator = torch.Generator().manual_seed(0)
    for number, part in enumerate(tqdm(names, desc="making the checkpoint"), start=1):
        shard = f"model-{number:05d}-of-{len(names):05d}.safetensors"
        tensors = {}
        for name, shape in shapes.items():
            if name.startswith(part):
                block = (torch.randn(2**20, generator=generator) * 0.02).bfloat16()
                count = shape.numel()
                tensors[name] = block.repeat(count // len(block) + 1)[:count].view(shape).clone()
                weight_map[name] = shard
        save_file(tensors, folder / shard, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(2 * shape.numel() for shape in shapes.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    source_config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "attention_bias": False,
        "hidden_act": "silu",
        **{
            name: getattr(config, name)
            for name in (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "max_position_embeddings",
                "tie_word_embeddings",
                "rms_norm_eps",
            )
        },
    }
    (folder / "config.json").write_text(json.dumps(source_config))


def timed(job, *arguments, **options) -> float:
    os.sync()  # what an earlier repetition left to write must not be charged to this one
    started = time.perf_counter()
    job(*arguments, **options)
    return time.perf_counter() - started


def peak_memory(source: Path, target: Path, link: str, granularity: str) -> dict[str, int]:
    """Peak anonymous bytes of a conversion over importing torch and transformers, and the part its own imports take."""
    command = [sys.executable, "-c", _MEMORY, str(source), str(target), link, granularity]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    shutil.rmtree(target)
    peak, imports = map(int, process.stdout.split()[-2:])
    return {"peak_bytes": peak, "of_which_imports_bytes": imports}


def hash_folder(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                hashlib.file_digest(file, "sha256")


def interval(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "greatest": max(values)}


def measure(folder: Path, gigabytes: float, repetitions: int) -> dict:
    source = folder / "source"
    source.mkdir()
    make_checkpoint(source, gigabytes)
    size = sum(path.stat().st_size for path in source.iterdir())
    target = folder / "target"
    jobs = {
        "copytree": lambda: shutil.copytree(source, target),
        "hard, headwise": lambda: convert_checkpoint(source, target, link="hard", verify="headers"),
        "copy, headwise": lambda: convert_checkpoint(source, target, link="copy", verify="headers"),
        "hard, elementwise": lambda: convert_checkpoint(
            source, target, link="hard", granularity="elementwise", verify="headers"
        ),
    }
    seconds = {name: [] for name in jobs}
    written = {}
    for repetition in tqdm(range(repetitions + 1), desc="repetitions"):
        for name, job in jobs.items():
            taken = timed(job)
            if repetition > 0:  # the first round warms the caches
                seconds[name].append(taken)
            written[name] = sum(p.stat().st_size for p in target.iterdir() if p.stat().st_nlink == 1)
            shutil.rmtree(target)
    ratios = {
        name: interval([a / b for a, b in zip(seconds[name], seconds["copytree"], strict=True)])
        for name in jobs
        if name != "copytree"
    }
    memory = {
        f"{link}, {granularity}": peak_memory(source, target, link, granularity)
        for link, granularity in (("hard", "headwise"), ("copy", "headwise"), ("hard", "elementwise"))
    }
    checked = convert_checkpoint(source, target, link="hard")
    return {
        "checkpoint_bytes": size,
        "largest_tensor_bytes": 2 * VOCABULARY * HIDDEN,
        "shards": len(list(source.glob("*.safetensors"))),
        "repetitions": repetitions,
        "seconds": {name: interval(values) for name, values in seconds.items()},
        "time_over_copytree": ratios,
        "bytes_written": written,
        "bytes_over_checkpoint": {name: count / size for name, count in written.items()},
        "memory_over_imports": memory,
        "beside": {"logit_check_seconds": checked.seconds["logits"], "sha256_seconds": timed(hash_folder, source)},
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": {"gated_attention": __version__, "torch": torch.__version__},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def table(report: dict) -> str:
    lines = [
        f"{report['checkpoint_bytes'] / 1e9:.2f} GB in {report['shards']} files, {report['repetitions']} interleaved "
        "repetitions; median (least to greatest)",
        f"{'':<20}{'seconds':<26}{'time / copy':<26}{'bytes / folder':<16}peak memory over imports",
    ]
    for name, seconds in report["seconds"].items():
        ratio, memory = report["time_over_copytree"].get(name), report["memory_over_imports"].get(name)
        lines.append(
            f"{name:<20}"
            + f"{seconds['median']:.3f} ({seconds['least']:.3f} to {seconds['greatest']:.3f})".ljust(26)
            + (f"{ratio['median']:.3f} ({ratio['least']:.3f} to {ratio['greatest']:.3f})" if ratio else "1").ljust(26)
            + f"{report['bytes_over_checkpoint'][name]:.2%}".ljust(16)
            + (f"{memory['peak_bytes'] / 2**20:.0f} MiB" if memory else "")
        )
    beside = report["beside"]
    lines.append(
        f"beside it: comparing logits {beside['logit_check_seconds']:.1f} s, hashing the source "
        f"{beside['sha256_seconds']:.1f} s"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of the synthetic checkpoint")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to work; needs three times the size")
    parser.add_argument("--output", type=Path, help="JSON file to write the figures to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        report = measure(Path(folder), options.gigabytes, options.repetitions)
    print(table(report))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
