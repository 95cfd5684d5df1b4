"""
Ablations of the sink transfer: each choice undone on its own, with its effect on perplexity and attention.

    python benchmarks/sink_transfer.py [--source FOLDER] [--other FILE] [--tokens 16384] [--test-tokens 8192]
        [--only NAME ...] [--output FILE.json]

Default source: SmolLM2-135M-Instruct, dequantised from Q4_1, in float32; calibration and test on disjoint parts of Python's help
pages, in windows of 512; `--other` names a text of another kind. The last column is the time of the transfer.
"""

import argparse
import gc
import json
import platform
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gated_attention import __version__, inspect_model, transfer_sinks
from gated_attention.conversion.sink_transfer import calibrate, gate_fit, layer_transfer, sinks
from gated_attention.conversion.sink_transfer.calibration import calibration_windows
from gated_attention.conversion.sink_transfer.key_edit import KeyEdit
from gated_attention.conversion.sink_transfer.massive import shrunk_tensors
from gated_attention.conversion.sink_transfer.report import MassiveReport
from gated_attention.demo import demo_checkpoint
from gated_attention.diagnostics.inspection import windows_of
from gated_attention.diagnostics.texts import default_text


LENGTH = 512


@contextmanager
def on_the_sources_activations() -> Iterator[None]:
    """Each layer is fitted on what it gets in the source, not on what the converted layers before it give."""
    seen = {}

    def remember(opened, hidden_states, input_ids):
        seen["states"] = hidden_states
        return sinks.find_sinks(opened, hidden_states, input_ids)

    def fit(opened, hidden_states, *rest, **options):
        return layer_transfer.fit_layer(opened, seen["states"], *rest, **options)

    with patch.object(calibrate, "find_sinks", remember), patch.object(calibrate, "fit_layer", fit):
        yield


@contextmanager
def projected_keys() -> Iterator[None]:
    """The sink's direction u is projected out of `k_proj`: W - (1 - strength) W u u^T / |u|^2."""

    def edit(moments, weight, bias):
        direction = (moments.sink_mean / moments.sink_mean.square().sum()).to(weight.dtype)
        along = torch.outer(moments.key_mean.to(weight.dtype), direction)
        return KeyEdit(-along, along)

    with patch.object(layer_transfer, "key_edit", edit):
        yield


@contextmanager
def first_tokens_only() -> Iterator[None]:
    """Tokens further on that share the first one's state, and draw more attention than it in some layers, are left out."""

    def first_only(opened, hidden_states, input_ids):
        found = sinks.find_sinks(opened, hidden_states, input_ids)
        found.mask[:, 1:] = False
        found.weights *= found.mask
        found.weights /= found.weights.sum().clamp(min=1e-12)
        return found

    with patch.object(calibrate, "find_sinks", first_only):
        yield


@contextmanager
def logistic_gates() -> Iterator[None]:
    """The weighted regression of the logits only, without minimising the error of what the layer adds."""
    with patch.object(gate_fit, "_minimise", lambda start, loss_of, iterations: start):
        yield


@contextmanager
def one_strength(value: float) -> Iterator[None]:
    with patch.object(layer_transfer, "STRENGTHS", (value,)):
        yield


@contextmanager
def least_attention(value: float) -> Iterator[None]:
    with patch.object(sinks, "LEAST_ATTENTION", value):
        yield


VARIANTS = {
    "as shipped": ({}, []),
    "fitted on the source's activations": ({}, [on_the_sources_activations]),
    "gates by logistic regression alone": ({}, [logistic_gates]),
    "sink's direction projected out of k_proj": ({}, [projected_keys]),
    "strength -0.3 everywhere": ({}, [lambda: one_strength(-0.3)]),
    "the sketch's key edit: projection, strength -0.3": ({}, [projected_keys, lambda: one_strength(-0.3)]),
    "first tokens only": ({}, [first_tokens_only]),
    "only sinks with a fifth of the attention": ({}, [lambda: least_attention(0.2)]),
    "BOS before every window": ({"bos_share": 1.0}, []),
    "elementwise gates": ({"granularity": "elementwise"}, []),
    "attention weight 0.02": ({"attention_weight": 0.02}, []),
    "attention weight 0.5": ({"attention_weight": 0.5}, []),
    "twice the tokens": ({"tokens": 2}, []),
    "massive activations left": ({"keep_massive": True}, []),
}
SHRUNK_SOURCE = "source, its massive activations made as small"


def figures_of(
    folder: Path, tests: dict[str, list[torch.Tensor]], shrunk: MassiveReport | None = None
) -> dict[str, dict]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    if shrunk is not None:
        for index, neurons in shrunk.neurons.items():
            layer = model.model.layers[index].requires_grad_(False)
            dtypes = {name: parameter.dtype for name, parameter in layer.named_parameters()}
            layer.load_state_dict(shrunk_tensors(layer, neurons, shrunk.factor, dtypes), strict=False)
    found = {}
    for name, windows in tests.items():
        summary = inspect_model(model, [{"input_ids": window} for window in windows], ranks=False).summary()
        found[name] = {key: summary[key] for key in ("perplexity", "f_attn", "largest_key_share", "m_act")}
    del model
    gc.collect()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--other", type=Path)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--test-tokens", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=VARIANTS)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()

    source = arguments.source or demo_checkpoint()
    text, text_name = default_text()
    tokenizer = AutoTokenizer.from_pretrained(source)
    # The same test whatever the variant: cut for the largest calibration.
    reserved = calibration_windows(tokenizer, text, arguments.tokens, LENGTH, arguments.test_tokens)
    tests = {f"end of {text_name}": list(reserved.test[:, None])}
    if arguments.other:
        other = arguments.other.read_text(encoding="utf-8")
        tests[arguments.other.name] = windows_of(tokenizer, other, LENGTH, arguments.test_tokens, None)[0]
    results = {"source": {"tests": figures_of(source, tests)}}
    _show("source", results["source"], results["source"])
    for name, (options, changes) in VARIANTS.items():
        if arguments.only and name not in arguments.only:
            continue
        options = {"tokens": arguments.tokens, "length": LENGTH, "test_tokens": arguments.test_tokens, **options}
        if options["tokens"] < LENGTH:  # a factor
            options["tokens"] *= arguments.tokens
        with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
            for change in changes:
                stack.enter_context(change())
            report = transfer_sinks(source, Path(scratch) / "result", text, seed=arguments.seed, **options)
            results[name] = {
                "options": options,
                "seconds": report.seconds,
                "transferred": report.transferred,
                "r2": {layer.layer_idx: sum(layer.r2) / len(layer.r2) for layer in report.layers if layer.r2},
                "tests": figures_of(Path(scratch) / "result", tests),
            }
        _show(name, results[name], results["source"])
        if name == "as shipped" and report.massive and report.massive.factor:
            results[SHRUNK_SOURCE] = {"tests": figures_of(source, tests, report.massive)}
            _show(SHRUNK_SOURCE, results[SHRUNK_SOURCE], results["source"])
        if arguments.output:
            content = {
                "settings": {
                    "source": source.name,
                    "tokens": arguments.tokens,
                    "test_tokens": arguments.test_tokens,
                    "length": LENGTH,
                    "seed": arguments.seed,
                    "threads": torch.get_num_threads(),
                    "versions": {
                        "gated_attention": __version__,
                        "torch": torch.__version__,
                        "python": platform.python_version(),
                    },
                },
                "results": results,
            }
            arguments.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _show(name: str, result: dict, source: dict) -> None:
    parts = []
    for test, figures in result["tests"].items():
        ratio = figures["perplexity"] / source["tests"][test]["perplexity"]
        parts.append(
            f"{figures['perplexity']:8.3f} (x {ratio:.3f})  F-Attn {figures['f_attn']:.4f}  largest {figures['largest_key_share']:.4f}  M-Act "
            f"{figures['m_act']:,.0f}"
        )
    seconds = f"  {result['seconds']:.0f} s" if "seconds" in result else ""
    print(f"{name:<48}" + " | ".join(parts) + seconds, flush=True)


if __name__ == "__main__":
    main()
