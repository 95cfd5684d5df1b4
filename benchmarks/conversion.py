"""
Time, bytes and memory of a conversion, beside a plain copy of the checkpoint's folder and beside its peers.

    python benchmarks/conversion.py [--gigabytes 8] [--repetitions 5] [--kills 10] [--peer-gigabytes 3]
        [--peer-repetitions 3] [--mergekit PYTHON] [--folder DIR] [--output FILE.json]

Two synthetic checkpoints in bfloat16, sharded, each with one tensor of 1.2 GB: one of the Llama family, whose tensors stay as they
are, and one of the Phi-3 family, whose fused projections are taken apart. Both are copied with `shutil.copytree` and converted, in
turn, several times in one run. Timed is what the conversion does between its imports and the finished folder without running the
models: plan, write, header audit and, where tensors are rewritten, the comparison of every number, which is also
given apart. Memory is that of a process of its own: the peak of its anonymous memory over what it holds after importing torch and
transformers.

Then conversions of both are killed at random moments, and run again: what was finished has to be reused, the source untouched.

Then Llama, Qwen3 and Mistral checkpoints of about `--peer-gigabytes` are converted, loaded and saved with transformers, and passed
through mergekit (with an interpreter that has it), in turn, each in a process of its own.
"""

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from measuring import WATCH, timed
from safetensors.torch import save_file
from tqdm import tqdm

from gated_attention import GatedAttentionConfig, GatedAttentionForCausalLM, __version__, convert_checkpoint


HIDDEN, INTERMEDIATE, HEADS, KEY_VALUE_HEADS = 4096, 11008, 32, 8
VOCABULARY = 146_496  # x 4096 x 2 bytes = 1.2 GB

_MEMORY = (
    WATCH
    + """
from gated_attention import convert_checkpoint
imported = anonymous()
convert_checkpoint(sys.argv[1], sys.argv[2], link=sys.argv[3], granularity=sys.argv[4], verify="headers")
time.sleep(0.01)
print(max(peak, anonymous()) - start, imported - start)
"""
)

_CONVERT = """
import json, sys
from gated_attention import convert_checkpoint
print("ready", flush=True)
result = convert_checkpoint(sys.argv[1], sys.argv[2], link="copy", verify="headers")
print(json.dumps(list(result.reused)))
"""

# Of the peers: source, target and a folder for scratch in argv. Timed is the job without its imports.
_PEERS = {
    "convert": WATCH
    + """
from gated_attention import convert_checkpoint
started = time.perf_counter()
convert_checkpoint(sys.argv[1], sys.argv[2], link="copy", verify="headers")
print(json.dumps({"seconds": time.perf_counter() - started, "peak_bytes": max(peak, anonymous()) - start}))
""",
    "convert, hard links": WATCH
    + """
from gated_attention import convert_checkpoint
started = time.perf_counter()
convert_checkpoint(sys.argv[1], sys.argv[2], link="hard", verify="headers")
print(json.dumps({"seconds": time.perf_counter() - started, "peak_bytes": max(peak, anonymous()) - start}))
""",
    "transformers": WATCH
    + """
from transformers import AutoModelForCausalLM
started = time.perf_counter()
AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto").save_pretrained(sys.argv[2])
print(json.dumps({"seconds": time.perf_counter() - started, "peak_bytes": max(peak, anonymous()) - start}))
""",
    "mergekit": WATCH
    + """
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
config = {"merge_method": "passthrough", "dtype": "bfloat16", "models": [{"model": sys.argv[1]}]}
started = time.perf_counter()
options = MergeOptions(lazy_unpickle=True, copy_tokenizer=False, write_model_card=False, quiet=True)
run_merge(MergeConfiguration.model_validate(config), sys.argv[2], options=options)
print(json.dumps({"seconds": time.perf_counter() - started, "peak_bytes": max(peak, anonymous()) - start}))
""",
}

FAMILIES = {
    "llama": ("LlamaForCausalLM", {"attention_bias": False}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "qwen3": ("Qwen3ForCausalLM", {"attention_bias": False, "head_dim": HIDDEN // HEADS}),
    "phi3": ("Phi3ForCausalLM", {"pad_token_id": 0}),
}


def _fused(shapes: dict[str, torch.Size]) -> dict[str, torch.Size]:
    """The names and shapes of Phi-3."""
    fused: dict[str, torch.Size] = {}
    for name, shape in shapes.items():
        for parts, whole in ((("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("gate_proj", "up_proj"), "gate_up_proj")):
            part = name.split(".")[-2]
            if part in parts:
                name = name.replace(part, whole)
                before = fused.get(name, torch.Size((0, *shape[1:])))
                shape = torch.Size((before[0] + shape[0], *shape[1:]))
        fused[name] = shape
    return fused


def make_checkpoint(folder: Path, gigabytes: float, family: str = "llama", vocabulary: int = VOCABULARY) -> None:
    """A checkpoint of about that size, one file a layer and two for the rest, filled with random numbers."""
    layer_bytes = 2 * HIDDEN * (2 * HIDDEN + 2 * HIDDEN * KEY_VALUE_HEADS // HEADS + 3 * INTERMEDIATE)
    layers = max(1, round((gigabytes * 1e9 - 2 * vocabulary * HIDDEN) / layer_bytes))
    config = GatedAttentionConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        tie_word_embeddings=True,
        qk_norm=family == "qwen3",
        gate_positions=[],
        dtype="bfloat16",
    )
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in GatedAttentionForCausalLM(config).named_parameters()}
    shapes = _fused(shapes) if family == "phi3" else shapes
    names = [f"model.layers.{layer}." for layer in range(layers)] + ["model.embed_tokens", "model.norm"]
    weight_map = {}
    generator = torch.Generator().manual_seed(0)
    for number, part in enumerate(tqdm(names, desc=f"making a {family} checkpoint"), start=1):
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
    architecture, fields = FAMILIES[family]
    source_config = {
        "architectures": [architecture],
        "model_type": family,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        **fields,
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


def run_script(script: str, *arguments, python: str = sys.executable) -> str:
    command = [python, "-c", script, *map(str, arguments)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def peak_memory(source: Path, target: Path, link: str, granularity: str) -> dict[str, int]:
    """Peak anonymous bytes of a conversion over importing torch and transformers, and the part its own imports take."""
    peak, imports = map(int, run_script(_MEMORY, source, target, link, granularity).split()[-2:])
    shutil.rmtree(target)
    return {"peak_bytes": peak, "of_which_imports_bytes": imports}


def hash_folder(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def interval(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "greatest": max(values)}


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def measure(sources: dict[str, Path], target: Path, repetitions: int) -> dict:
    """Conversions beside copies, in turn."""
    last: dict[str, dict[str, float]] = {}

    def convert(name: str, source: Path, **options) -> None:
        last[name] = convert_checkpoint(source, target, verify="headers", **options).seconds

    llama, phi3 = sources["llama"], sources["phi3"]
    jobs = {
        "copy the folder": lambda: shutil.copytree(llama, target),
        "hard, headwise": lambda: convert("hard, headwise", llama, link="hard"),
        "hard, elementwise": lambda: convert("hard, elementwise", llama, link="hard", granularity="elementwise"),
        "copy, headwise": lambda: convert("copy, headwise", llama, link="copy"),
        "copy the fused folder": lambda: shutil.copytree(phi3, target),
        "rewrite, headwise": lambda: convert("rewrite, headwise", phi3, link="copy"),
    }
    seconds = {name: [] for name in jobs}
    writing = {name: [] for name in jobs if name not in ("copy the folder", "copy the fused folder")}
    written = {}
    for repetition in tqdm(range(repetitions + 1), desc="repetitions"):
        for name, job in jobs.items():
            taken = timed(job)
            if repetition > 0:  # the first round warms the caches
                seconds[name].append(taken)
                if name in writing:
                    writing[name].append(last[name]["write"])
            written[name] = sum(p.stat().st_size for p in target.iterdir() if p.stat().st_nlink == 1)
            shutil.rmtree(target)
    copies = {name: "copy the fused folder" if name == "rewrite, headwise" else "copy the folder" for name in writing}
    sizes = {name: size_of(path) for name, path in sources.items()}
    return {
        "checkpoint_bytes": sizes,
        "largest_tensor_bytes": 2 * VOCABULARY * HIDDEN,
        "shards": {name: len(list(path.glob("*.safetensors"))) for name, path in sources.items()},
        "repetitions": repetitions,
        "seconds": {name: interval(values) for name, values in seconds.items()},
        "time_over_copy": {
            name: interval([a / b for a, b in zip(seconds[name], seconds[copies[name]], strict=True)])
            for name in writing
        },
        "writing_over_copy": {
            name: interval([a / b for a, b in zip(writing[name], seconds[copies[name]], strict=True)])
            for name in writing
        },
        "bytes_written": written,
        "memory_over_imports": {
            "hard, headwise": peak_memory(llama, target, "hard", "headwise"),
            "hard, elementwise": peak_memory(llama, target, "hard", "elementwise"),
            "copy, headwise": peak_memory(llama, target, "copy", "headwise"),
            "rewrite, headwise": peak_memory(phi3, target, "copy", "headwise"),
        },
    }


def kill_and_go_on(sources: dict[str, Path], target: Path, kills: int, expected: dict[str, float]) -> list[dict]:
    """
    Kill conversions at random moments and run them again.

    Args:
        expected: How many seconds a conversion of each source writes for.
    """
    chance, found = random.Random(0), []
    hashes = {name: hash_folder(path) for name, path in sources.items()}
    for number in tqdm(range(kills), desc="kills"):
        name = list(sources)[number % len(sources)]
        source = sources[name]
        command = [sys.executable, "-c", _CONVERT, str(source), str(target)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        process.stdout.readline()
        moment = chance.uniform(0.1, 0.9) * expected[name]
        time.sleep(moment)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        looks_finished = target.exists()
        reused = json.loads(run_script(_CONVERT, source, target).splitlines()[-1])
        reused_bytes = sum((target / shard).stat().st_size for shard in reused)
        found.append(
            {
                "source": name,
                "killed_after_seconds": moment,
                "return_code": process.returncode,
                "looked_finished": looks_finished,
                "shards_reused": len(reused),
                "bytes_reused": reused_bytes,
                "bytes_written_by_the_second_run": size_of(target) - reused_bytes,
                "source_unchanged": hash_folder(source) == hashes[name],
            }
        )
        shutil.rmtree(target)
    return found


def beside_peers(folder: Path, gigabytes: float, repetitions: int, mergekit: str | None) -> dict:
    """Three families, each converted, loaded and saved, and passed through, in turn."""
    found = {}
    peers = {name: script for name, script in _PEERS.items() if name != "mergekit" or mergekit}
    for family in ("llama", "qwen3", "mistral"):
        source, target = folder / family, folder / "target"
        source.mkdir()
        make_checkpoint(source, gigabytes, family, vocabulary=32_000)
        runs = {name: [] for name in peers}
        for repetition in tqdm(range(repetitions + 1), desc=f"peers, {family}"):
            for name, script in peers.items():
                os.sync()
                python = mergekit if name == "mergekit" else sys.executable
                run = json.loads(run_script(script, source, target, python=python).splitlines()[-1])
                shutil.rmtree(target)
                if repetition > 0:
                    runs[name].append(run)
        base = runs["convert"]
        found[family] = {
            "checkpoint_bytes": size_of(source),
            "runs": runs,
            **{
                f"{what}_over_convert": {
                    name: interval([run[what] / ours[what] for run, ours in zip(of_peer, base, strict=True)])
                    for name, of_peer in runs.items()
                    if name != "convert"
                }
                for what in ("seconds", "peak_bytes")
            },
        }
        shutil.rmtree(source)
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _spread(values: dict[str, float] | None, digits: int = 2) -> str:
    if values is None:
        return ""
    return f"{values['median']:.{digits}f} ({values['least']:.{digits}f} to {values['greatest']:.{digits}f})"


def table(report: dict) -> str:
    copying = report["copying"]
    lines = [
        f"{copying['checkpoint_bytes']['llama'] / 1e9:.2f} GB in {copying['shards']['llama']} files, "
        f"{copying['repetitions']} interleaved repetitions; median (least to greatest)",
        f"{'':<24}{'seconds':<24}{'time / copy':<24}{'writing / copy':<24}peak memory over imports",
    ]
    for name, seconds in copying["seconds"].items():
        memory = copying["memory_over_imports"].get(name)
        lines.append(
            f"{name:<24}{_spread(seconds):<24}{_spread(copying['time_over_copy'].get(name)) or '1':<24}"
            f"{_spread(copying['writing_over_copy'].get(name)):<24}"
            + (f"{memory['peak_bytes'] / 2**20:.0f} MiB" if memory else "")
        )
    kills = report["kills"]
    if kills:
        reused = [kill["shards_reused"] for kill in kills]
        lines.append(
            f"{len(kills)} kills: {sum(kill['source_unchanged'] for kill in kills)} sources unchanged, "
            f"{sum(kill['looked_finished'] for kill in kills)} looked finished, {min(reused)} to {max(reused)} files reused"
        )
    for family, peers in report["peers"].items():
        lines.append(f"{family}, {peers['checkpoint_bytes'] / 1e9:.2f} GB, over convert --link copy")
        for name, ratio in peers["seconds_over_convert"].items():
            memory = peers["peak_bytes_over_convert"][name]
            lines.append(f"  {name:<22}time {_spread(ratio):<24}memory {_spread(memory)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=8.0, help="size of the synthetic checkpoints")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--kills", type=int, default=10, help="conversions to kill and go on with")
    parser.add_argument(
        "--peer-gigabytes", type=float, default=3.0, help="size of those beside the peers; 0: no peers"
    )
    parser.add_argument("--peer-repetitions", type=int, default=3)
    parser.add_argument(
        "--mergekit", help="interpreter of an environment that has mergekit; without one it is left out"
    )
    parser.add_argument("--folder", type=Path, help="where to work; needs four times the size")
    parser.add_argument("--output", type=Path, help="JSON file to write the figures to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        sources = {family: folder / family for family in ("llama", "phi3")}
        for family, source in sources.items():
            source.mkdir()
            make_checkpoint(source, options.gigabytes, family)
        copying = measure(sources, folder / "target", options.repetitions)
        expected = {
            "llama": copying["seconds"]["copy, headwise"]["median"],
            "phi3": copying["seconds"]["rewrite, headwise"]["median"],
        }
        kills = kill_and_go_on(sources, folder / "target", options.kills, expected) if options.kills else []
        for source in sources.values():
            shutil.rmtree(source)
        peers = {}
        if options.peer_gigabytes:
            peers = beside_peers(folder, options.peer_gigabytes, options.peer_repetitions, options.mergekit)
        report = {
            "copying": copying,
            "kills": kills,
            "peers": peers,
            "machine": {"processor": _processor(), "cores": os.cpu_count(), "system": platform.platform()},
            "versions": {"gated_attention": __version__, "torch": torch.__version__},
        }
    print(table(report))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
