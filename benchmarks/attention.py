"""
What a gate costs: time, floating point operations, and bytes kept for the backward pass.

    python benchmarks/attention.py [--units layer model] [--shapes ...] [--modes eager compiled] [--dtypes float32 bfloat16]
        [--jobs train prefill512 prefill2048 decode] [--processes 3] [--rounds 31] [--device cuda] [--output FILE.json]

Without gates, with headwise and with elementwise ones, and (one layer only) transformers' own `Qwen3NextAttention`, at the shapes of
SmolLM2-135M, Qwen3-0.6B and Qwen3-Next. All four run in one process and take turns, in a new order and with their weights at
new addresses each round; a ratio is taken within a round. The rounds of several processes are pooled. Printed are the median of the
ratios and its 95 % interval (from order statistics), beside what must hold:

- compiled, headwise over ungated: at most 1.02 for a training step and for decoding;
- compiled, elementwise over ungated: at most 1.03 times the ratio of operations;
- eager, elementwise over `Qwen3NextAttention`: at most 1, and no more bytes kept for backward.

The limits are for CPUs. One layer is the attention alone, which is where a gate weighs most, and has QK-norm at every shape, since the
stock one has. What it is ahead of the stock one by is not the gate's doing alone: RoPE and norms are others too. A model has 4 layers with their MLPs and a vocabulary of
1,024. A training step is forward and backward, of 512 tokens (model: 256). Decoding is one token after 512, in a static cache.
"""

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm
from transformers import Qwen3NextConfig, StaticCache
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

from conversion import _processor
from gated_attention import GatedAttentionConfig, GatedAttentionForCausalLM, GatedAttentionModel, __version__
from gated_attention.modeling_gated.attention import GatedAttention


SHAPES = {
    "SmolLM2-135M": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
    "Qwen3-0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "qk_norm": True,
    },
    "Qwen3-Next": {
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "qk_norm": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
}
GATES = {
    "ungated": {"gate_positions": []},
    "headwise": {"gate_granularity": "headwise"},
    "elementwise": {"gate_granularity": "elementwise"},
}
STOCK = "Qwen3NextAttention"
CONTEXT = 512
SHORTEST_SAMPLE = 0.02  # seconds


def attention_layer(shape: dict, kind: str, dtype: torch.dtype, device: str) -> torch.nn.Module:
    # All with QK-norm, which the stock layer always has.
    if kind == STOCK:
        rope = shape.get("rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0})
        fields = {name: value for name, value in shape.items() if name not in ("qk_norm", "rope_parameters")}
        config = Qwen3NextConfig(**fields, rope_parameters=rope, attn_implementation="sdpa")
        layer = Qwen3NextAttention(config, layer_idx=0)
    else:
        fields = {**shape, "qk_norm": True, "num_hidden_layers": 1}
        config = GatedAttentionConfig(**fields, **GATES[kind], attn_implementation="sdpa")
        layer = GatedAttention(config, layer_idx=0)
    return layer.to(device, dtype)


Jobs = tuple[torch.nn.Module, dict[str, Callable]]


def layer_jobs(shape: dict, kind: str, dtype: torch.dtype, device: str, compiled: bool) -> Jobs:
    layer = attention_layer(shape, kind, dtype, device)
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    rope_config = GatedAttentionConfig(**{**shape, "num_hidden_layers": 1, "vocab_size": 8})
    rotary = GatedAttentionModel(rope_config).rotary_emb.to(device)

    def inputs(length: int, position: int = 0, grad: bool = False):
        hidden = torch.randn(1, length, shape["hidden_size"], dtype=dtype, device=device, requires_grad=grad)
        positions = torch.arange(position, position + length, device=device)[None]
        return hidden, tuple(part.detach() for part in rotary(hidden, positions))

    train_inputs = inputs(512, grad=True)
    upstream = torch.randn(1, 512, shape["hidden_size"], dtype=dtype, device=device)
    prefill_inputs = {length: inputs(length) for length in (512, 2048)}
    decode_inputs = inputs(1, CONTEXT)
    cache_config = GatedAttentionConfig(**{**shape, "num_hidden_layers": 1})
    cache = StaticCache(config=cache_config, max_cache_len=CONTEXT + 64)

    def train():
        layer.zero_grad(set_to_none=True)
        train_inputs[0].grad = None
        run(train_inputs[0], position_embeddings=train_inputs[1], attention_mask=None)[0].backward(upstream)

    def prefill(length):
        with torch.no_grad():
            run(prefill_inputs[length][0], position_embeddings=prefill_inputs[length][1], attention_mask=None)

    def decode():
        cache.layers[0].cumulative_length.fill_(CONTEXT)
        with torch.no_grad():
            run(decode_inputs[0], position_embeddings=decode_inputs[1], attention_mask=None, cache=cache)

    with torch.no_grad():  # fill the cache, and make its tensors
        hidden, position_embeddings = inputs(CONTEXT)
        layer(hidden, position_embeddings=position_embeddings, attention_mask=None, cache=cache)
    return layer, {
        "train": train,
        "prefill512": lambda: prefill(512),
        "prefill2048": lambda: prefill(2048),
        "decode": decode,
    }


def model_jobs(shape: dict, kind: str, dtype: torch.dtype, device: str, compiled: bool) -> Jobs:
    config = GatedAttentionConfig(
        **{**shape, "num_hidden_layers": 4, "vocab_size": 1024}, **GATES[kind], attn_implementation="sdpa"
    )
    model = GatedAttentionForCausalLM(config).to(device, dtype)
    run = torch.compile(model, fullgraph=True) if compiled else model
    tokens = torch.randint(1024, (1, 2048), device=device)
    labels = tokens[:, :256].clone()
    cache = StaticCache(config=config, max_cache_len=CONTEXT + 64)

    def train():
        model.zero_grad(set_to_none=True)
        run(input_ids=tokens[:, :256], labels=labels, use_cache=False).loss.backward()

    def prefill(length):
        with torch.no_grad():
            run(input_ids=tokens[:, :length], use_cache=False, logits_to_keep=1)

    def decode():
        for layer in cache.layers:
            layer.cumulative_length.fill_(CONTEXT)
        with torch.no_grad():
            run(input_ids=tokens[:, :1], cache=cache, use_cache=True)

    with torch.no_grad():
        model(input_ids=tokens[:, :CONTEXT], cache=cache, use_cache=True)
    return model, {
        "train": train,
        "prefill512": lambda: prefill(512),
        "prefill2048": lambda: prefill(2048),
        "decode": decode,
    }


UNITS = {"layer": layer_jobs, "model": model_jobs}


def kinds_of(unit: str) -> list[str]:
    return [*GATES, STOCK] if unit == "layer" else [*GATES]


def relocate(module: torch.nn.Module, pages: int) -> None:
    """
    Move the weights to other addresses. On a CPU the same product of matrix and vector takes up to 1.4 times as long from one
    place in memory as from another: without this, a run would compare places.
    """
    shift = []
    for parameter in module.parameters():
        shift.append(torch.empty(pages * 4096, dtype=torch.uint8, device=parameter.device))
        parameter.data = parameter.data.clone()


def sample(job: Callable, repetitions: int, device: str) -> float:
    """Seconds of the fastest of some calls: what else the machine does only ever adds time."""
    fastest = math.inf
    for _ in range(repetitions):
        start = time.perf_counter()
        job()
        if device == "cuda":
            torch.cuda.synchronize()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


def interval_of_median(values: list[float]) -> tuple[float, float, float]:
    """Median and its 95 % interval: the order statistics between which the median lies with that probability."""
    ordered, count = sorted(values), len(values)
    rank = 0
    while 2 * sum(math.comb(count, i) for i in range(rank + 1)) / 2**count < 0.05:
        rank += 1
    return statistics.median(ordered), ordered[max(rank - 1, 0)], ordered[count - max(rank, 1)]


def bytes_kept(job: Callable, module: torch.nn.Module) -> int:
    """Bytes of the distinct storages that autograd keeps during `job`, parameters left out."""
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = (storage.nbytes(), tensor)  # kept alive, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        job()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    return sum(size for address, (size, _) in storages.items() if address not in parameters)


def operations(job: Callable) -> int:
    # The fused kernel for CPUs has no formula for its operations; the plain one is made of matrix products, which have.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        job()
    return counter.get_total_flops()


def static_figures(unit: str, shape: dict, kinds: list[str], job: str, dtype: torch.dtype, device: str) -> dict:
    """Operations and, for training, bytes kept, of the eager code."""
    figures = {}
    for kind in kinds:
        torch.manual_seed(0)
        module, jobs = UNITS[unit](shape, kind, dtype, device, compiled=False)
        figures[kind] = {"operations": operations(jobs[job])}
        if job == "train":
            figures[kind]["bytes_kept"] = bytes_kept(jobs[job], module)
    return figures


def times_of_a_process(unit, shape, job, mode, dtype, device, rounds, budget, seed) -> dict[str, list[float]]:
    """Seconds a call, by kind and round."""
    modules, jobs = {}, {}
    for kind in kinds_of(unit):
        modules[kind], made = UNITS[unit](shape, kind, dtype, device, compiled=mode == "compiled")
        jobs[kind] = made[job]
    for run in jobs.values():
        for _ in range(3):
            run()
    repetitions = max(2, math.ceil(SHORTEST_SAMPLE / sample(jobs["ungated"], 3, device)))
    times = {kind: [] for kind in jobs}
    order, shuffle, start = list(jobs), random.Random(seed), time.perf_counter()
    for done in range(rounds):
        shuffle.shuffle(order)
        for kind in order:
            relocate(modules[kind], shuffle.randrange(1, 64))
        for kind in order:
            times[kind].append(sample(jobs[kind], repetitions, device))
        if done >= 5 and time.perf_counter() - start > budget:
            break
    return times


def measure(unit, shape, job, mode, dtype, device, rounds, budget, processes) -> dict:
    kinds = kinds_of(unit)
    figures = static_figures(unit, shape, kinds, job, dtype, device)
    times = {kind: [] for kind in kinds}
    for seed in range(processes):
        # A process of its own each time: where its code and its data happen to lie shifts a ratio by some percent.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            arguments = (unit, shape, job, mode, dtype, device, rounds, budget, seed)
            for kind, found in pool.submit(times_of_a_process, *arguments).result().items():
                times[kind] += found
    for kind in kinds:
        figures[kind]["milliseconds"] = 1e3 * statistics.median(times[kind])
        for other in ("ungated", STOCK):
            if other in kinds and other != kind:
                ratios = [mine / theirs for mine, theirs in zip(times[kind], times[other], strict=True)]
                median, low, high = interval_of_median(ratios)
                figures[kind][f"over_{other}"] = {"median": median, "low": low, "high": high}
    figures["rounds"] = len(times["ungated"])
    return figures


def verdicts(unit: str, job: str, mode: str, dtype: str, figures: dict) -> list[str]:
    """The limits of this cell, and whether the interval meets them, misses them, or leaves it open."""
    limits = []
    base = figures["ungated"]["operations"]
    if mode == "compiled" and dtype == "float32":
        if job in ("train", "decode"):
            limits.append(("headwise", "ungated", 1.02))
        limits.append(("elementwise", "ungated", 1.03 * figures["elementwise"]["operations"] / base))
    if mode == "eager" and unit == "layer":
        limits.append(("elementwise", STOCK, 1.0))
    lines = []
    for kind, other, limit in limits:
        ratio = figures[kind][f"over_{other}"]
        state = "met" if ratio["high"] <= limit else "MISSED" if ratio["low"] > limit else "open"
        measured = f"{ratio['median']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f})"
        lines.append(f"{kind} over {other} at most {limit:.3f}: {measured}, {state}")
    if job == "train" and unit == "layer" and mode == "eager":
        kept, theirs = figures["elementwise"]["bytes_kept"], figures[STOCK]["bytes_kept"]
        lines.append(f"elementwise keeps {kept / theirs:.3f} of the bytes: {'met' if kept <= theirs else 'MISSED'}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", nargs="+", choices=UNITS, default=list(UNITS))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"])
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    jobs = ("train", "prefill512", "prefill2048", "decode")
    parser.add_argument("--jobs", nargs="+", choices=jobs, default=list(jobs))
    parser.add_argument("--processes", type=int, default=3, help="processes a cell, whose rounds are pooled")
    parser.add_argument("--rounds", type=int, default=31, help="at most so many in a process")
    # The interval of a median needs six.
    parser.add_argument("--budget", type=float, default=10.0, help="seconds for the rounds of a process, from 6 on")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.rounds < 6:
        parser.error("--rounds must be at least 6: fewer have no 95 % interval of the median")

    # At Qwen3-Next's shape one layer alone, as nobody builds a dense model of it.
    cells = [
        (unit, shape, mode, dtype, job)
        for unit in arguments.units
        for shape in arguments.shapes
        for mode in arguments.modes
        for dtype in arguments.dtypes
        for job in arguments.jobs
        if not (unit == "model" and shape == "Qwen3-Next")
    ]
    results = []
    for unit, shape, mode, dtype, job in tqdm(cells, unit="cell"):
        figures = measure(
            unit,
            SHAPES[shape],
            job,
            mode,
            getattr(torch, dtype),
            arguments.device,
            arguments.rounds,
            arguments.budget,
            arguments.processes,
        )
        checked = verdicts(unit, job, mode, dtype, figures)
        results.append(
            {"unit": unit, "shape": shape, "mode": mode, "dtype": dtype, "job": job, "verdicts": checked, **figures}
        )
        parts = [f"{unit} {shape} {mode} {dtype} {job}: {figures['ungated']['milliseconds']:.2f} ms ungated"]
        for kind in ("headwise", "elementwise", STOCK):
            if kind in figures:
                ratio = figures[kind]["over_ungated"]
                work = figures[kind]["operations"] / figures["ungated"]["operations"]
                parts.append(
                    f"{kind} {ratio['median']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f}; operations {work:.3f})"
                )
        tqdm.write(" | ".join(parts))
        for line in checked:
            tqdm.write(f"  {line}")
        if arguments.output:
            arguments.output.write_text(
                json.dumps(
                    {
                        "settings": {
                            "device": torch.cuda.get_device_name() if arguments.device == "cuda" else _processor(),
                            "threads": torch.get_num_threads(),
                            "rounds": arguments.rounds,
                            "versions": {
                                "gated_attention": __version__,
                                "torch": torch.__version__,
                                "transformers": transformers.__version__,
                            },
                        },
                        "results": results,
                    },
                    indent=1,
                )
                + "\n",
                encoding="utf-8",
            )


if __name__ == "__main__":
    main()
