"""
What an export as a stock architecture costs, and how near its logits are.

    python benchmarks/export.py [--layers 28] [--formats float32 bfloat16] [--repetitions 3] [--folder DIR] [--output FILE.json]

A gated model of the shape of Qwen3-0.6B (hidden size 1024, 16 query and 8 key heads of 128 channels, vocabulary of 151,936, tied head) with
random weights. Weights of its norms are log-normal around 1: a quarter of those before attention and MLP lies below 1/2, where `weight - 1`
rounds, and a twelfth of those of queries and keys. It is exported as Qwen3.5 and Qwen3-Next (elementwise gates, and headwise ones widened) and as LFM3 (headwise gates).

Timed is writing, without running the models, beside `shutil.copytree` of the folder, in turn; memory is the peak of anonymous memory over
what a process holds after its imports. The errors are those that the export itself reports: root mean square of the difference of the
logits over that of the logits, on random tokens. `weight - 1` stands beside them: the same model with norms that were rounded so.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from measuring import WATCH, timed

from gated_attention import GatedAttentionConfig, GatedAttentionForCausalLM, __version__, export_checkpoint


SHAPE = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
    "qk_norm": True,
    "gate_scale": 2.0,
}
TARGETS = [("qwen3_5", "elementwise"), ("qwen3_5", "headwise"), ("qwen3_next", "elementwise"), ("lfm3", "headwise")]

_MEMORY = (
    WATCH
    + """
from gated_attention import export_checkpoint
start = peak = anonymous()
export_checkpoint(sys.argv[1], sys.argv[2], sys.argv[3], widen_gates=True, verify="headers")
time.sleep(0.01)
print(max(peak, anonymous()) - start)
"""
)


def make_model(folder: Path, granularity: str, dtype: torch.dtype, layers: int) -> None:
    """A random model on disk."""
    generator = torch.Generator().manual_seed(0)
    config = GatedAttentionConfig(**SHAPE, num_hidden_layers=layers, gate_granularity=granularity)
    model = GatedAttentionForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            spread = 0.5 if "q_norm" in name or "k_norm" in name else 1.0
            parameter.copy_((noise * spread).exp() if "norm" in name else noise * 0.02)
    model.to(dtype).save_pretrained(folder, max_shard_size="500MB")


def error_of_rounded_norms(folder: Path, dtype: torch.dtype) -> float:
    """Relative error of the logits, in float32, if norms were stored as `weight - 1` in the model's format."""
    input_ids = torch.randint(SHAPE["vocab_size"], (2, 48), generator=torch.Generator().manual_seed(0))
    model = GatedAttentionForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = model(input_ids, use_cache=False).logits
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + (parameter - 1).to(dtype).float())
        found = model(input_ids, use_cache=False).logits
    return ((found - expected).norm() / expected.norm()).item()


def measure(source: Path, scratch: Path, to: str, repetitions: int) -> dict:
    ratios, seconds = [], []
    for _ in range(repetitions):
        copy = timed(shutil.copytree, source, scratch / "copy")
        shutil.rmtree(scratch / "copy")
        options = {"widen_gates": True, "verify": "headers"}
        seconds.append(timed(export_checkpoint, source, scratch / "export", to, **options))
        shutil.rmtree(scratch / "export")
        ratios.append(seconds[-1] / copy)
    command = [sys.executable, "-c", _MEMORY, source, scratch / "export", to]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    shutil.rmtree(scratch / "export")
    result = export_checkpoint(source, scratch / "export", to, widen_gates=True)
    shutil.rmtree(scratch / "export")
    return {
        "seconds": [min(seconds), statistics.median(seconds), max(seconds)],
        "over_copy": [min(ratios), statistics.median(ratios), max(ratios)],
        "peak_bytes": peak,
        "rounded_tensors": len(result.rounded),
        "comparison": asdict(result.comparison),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--formats", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to work; default: the temporary folder")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "export.json")
    options = parser.parse_args()
    rows = []
    for name in options.formats:
        for granularity in ("elementwise", "headwise"):
            with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
                source = Path(scratch) / "source"
                make_model(source, granularity, getattr(torch, name), options.layers)
                naive = error_of_rounded_norms(source, getattr(torch, name))
                for to, of in TARGETS:
                    if of != granularity:
                        continue
                    row = {"to": to, "gates": granularity, "format": name, "error_of_weight_minus_1": naive}
                    row |= measure(source, Path(scratch), to, options.repetitions)
                    rows.append(row)
                    found = row["comparison"]
                    print(
                        f"{granularity} -> {to}, {name}: {row['seconds'][1]:.1f} s, {row['over_copy'][1]:.2f} x a copy, peak "
                        f"{row['peak_bytes'] / 2**20:.0f} MiB; error {found['saved']['relative']:.1e}, beside float32 "
                        f"{found['exported_to_exact']['relative']:.1e} (the model itself {found['own_to_exact']['relative']:.1e}), as a "
                        f"function {found['function']['relative']:.1e} (with weight - 1: {naive:.1e})",
                        flush=True,
                    )
    versions = {"gated_attention": __version__, "transformers": transformers.__version__, "torch": torch.__version__}
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    content = {"versions": versions, **machine, "layers": options.layers, "rows": rows}
    options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
