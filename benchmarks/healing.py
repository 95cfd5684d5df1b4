"""
What heals a model: sinks handed to gates first, gates that start as the identity, or no gates at all. Same rows, loss and rates.

    python benchmarks/healing.py --other FILE [--source FOLDER] [--tokens 40960] [--seeds 3] [--test-tokens 32768]
        [--starts transfer transfer_massive_kept identity none] [--chat-share 0.5] [--bf16] [--work FOLDER] [--output FILE.json]

Default source: SmolLM2-135M-Instruct, dequantised from Q4_1, in float32. Text: Python's help pages, whose end is one test; `--other` names a text of
another kind, which neither the transfer nor the healing sees. Each start is healed once a seed, which decides the windows of the transfer and the rows
of the healing; the figures are means over seeds, with the standard deviation. Without gates the penalty on the first token's share is all that
works against the sink. A transfer also makes massive activations smaller; `transfer_massive_kept` does not. All are tested in the source's format; eight bits as they are and smoothed.
What is finished lies in `--work` and in the output, and is not done again.
"""

import argparse
import gc
import hashlib
import json
import shutil
import statistics
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from gated_attention import __version__, convert_checkpoint, inspect_model, transfer_sinks
from gated_attention.conversion.checkpoint import read_checkpoint
from gated_attention.conversion.places import TRAINING_RESULTS_FILE
from gated_attention.conversion.sink_transfer import TransferOptions
from gated_attention.conversion.sink_transfer.command import windows_of_tests
from gated_attention.demo import demo_checkpoint
from gated_attention.diagnostics import copying_accuracy, low_bit_perplexity, smooth_model, streaming_perplexity
from gated_attention.diagnostics.texts import default_text
from gated_attention.modeling_gated.gate import is_gate_tensor
from gated_attention.training import HealingOptions, healing_recipe, make_recipe, train
from gated_attention.training.heal import SMOOTHED_ON
from gated_attention.training.healing_rows import HealingRows
from gated_attention.training.parameter_groups import first_fit
from gated_attention.training.recipe import ParameterGroup


STARTS = ("transfer", "transfer_massive_kept", "identity", "none")
LENGTH = 512
COPIED = (32, 256, 1024)
STREAM = {"length": 2048, "window": 256}
LOW_BIT_TOKENS = 4096
SMOOTHING = 0.7
ROWS = {
    "perplexity": "{:.2f}",
    "f_attn": "{:.4f}",
    "largest_key_share": "{:.4f}",
    "m_act": "{:,.0f}",
}


def start_of(kind: str, source: Path, text: str, options: HealingOptions, folder: Path) -> Path:
    """The model that the healing starts from."""
    if kind == "none":
        return source
    if not folder.is_dir():
        if kind == "identity":
            convert_checkpoint(source, folder, gate_bias=True, verify="headers")
        else:
            kept = kind == "transfer_massive_kept"
            transfer_sinks(source, folder, text, replace(options.transfer, keep_massive=kept))
    return folder


def healed(kind: str, source: Path, text: str, options: HealingOptions, work: Path) -> Path:
    """Heal a start with a seed; a training that was stopped goes on."""
    seed = options.transfer.seed
    rows, trained = work / f"rows-{seed}", work / f"{kind}-{seed}"
    rows.mkdir(parents=True, exist_ok=True)
    data, held_out = HealingRows(source, text, options.mixture, options.transfer).write(rows)
    start = start_of(kind, source, text, options, work / f"{kind}-start-{seed}")
    settings = healing_recipe(str(source), str(start), data, str(held_out), str(trained), options)
    names = list(read_checkpoint(start).tensors)
    gates = {name for name in names if is_gate_tensor(name)}
    groups = [ParameterGroup(**group) for group in settings["parameter_groups"]]
    # Without a transfer there are no biases but the gates' own, and a model without gates has no gates.
    with_members = {first_fit(name, groups, gates) for name in names}
    settings["parameter_groups"] = [
        group for index, group in enumerate(settings["parameter_groups"]) if index in with_members
    ]
    if not (trained / TRAINING_RESULTS_FILE).is_file():
        train(make_recipe(settings | {"resume_from_checkpoint": "auto", "diagnostics": {"every": 0}}))
    for checkpoint in trained.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    return trained


def figures_of(folder: Path, dtype, tokenizer, tests: dict[str, list[torch.Tensor]], others: list) -> dict:
    """What a model gives; `others` are windows of the text before its test, to find a smoothing on."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    bos = tokenizer.bos_token_id is not None
    found = {"tests": {}}
    for name, windows in tests.items():
        summary = inspect_model(model, [{"input_ids": window} for window in windows], ranks=False, bos=bos).summary()
        kept = {key: summary[key] for key in ROWS}
        few = windows[: LOW_BIT_TOKENS // LENGTH]
        plain = low_bit_perplexity(model, few, None).perplexity
        kept["low_bit_ratio"] = low_bit_perplexity(model, few).perplexity / plain
        begin = windows[0][:, : int(bos)]
        stream = torch.cat([begin, *(window[:, int(bos) :] for window in windows)], dim=1)[:, : STREAM["length"]]
        kept["stream"] = {
            str(held): streaming_perplexity(model, stream, STREAM["window"], held).perplexity_past_window
            for held in (None, 0, 4)
        }
        found["tests"][name] = kept
    found["copying"] = {
        str(result.distance): result.accuracy for result in copying_accuracy(model, tokenizer, COPIED, bos=bos)
    }
    smooth_model(model, others, SMOOTHING)  # last: it changes the weights
    for name, windows in tests.items():
        few = windows[: LOW_BIT_TOKENS // LENGTH]
        plain = low_bit_perplexity(model, few, None).perplexity
        found["tests"][name]["low_bit_smoothed_ratio"] = low_bit_perplexity(model, few).perplexity / plain
    del model
    gc.collect()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, required=True)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--tokens", type=int, default=40960)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--test-tokens", type=int, default=32768)
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=["transfer", "identity", "none"])
    parser.add_argument("--chat-share", type=float, default=HealingOptions.chat_share)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--work", type=Path, default=Path("healing-work"))
    parser.add_argument("--output", type=Path, default=Path("healing.json"))
    arguments = parser.parse_args()

    source = Path(arguments.source or demo_checkpoint())
    text, text_name = default_text()
    tokenizer = AutoTokenizer.from_pretrained(source)
    test_tokens = arguments.test_tokens // LENGTH * LENGTH
    options = HealingOptions(
        TransferOptions(test_tokens=test_tokens, length=LENGTH),
        tokens=arguments.tokens,
        chat_share=arguments.chat_share,
        bf16=arguments.bf16,
    )
    tests, _ = windows_of_tests(source, text, text_name, options.transfer, [arguments.other])
    rows = HealingRows(source, text, options.mixture, options.transfer)
    others = [torch.tensor([row]) for row in rows.of_text(SMOOTHED_ON)]
    settings = {
        "version": __version__,
        "source": source.name,
        "other": arguments.other.name,
        "tokens": arguments.tokens,
        "test_tokens": test_tokens,
        "chat_share": arguments.chat_share,
        "bf16": arguments.bf16,
    }
    work = arguments.work / hashlib.sha256(json.dumps([settings, str(source.resolve())]).encode()).hexdigest()[:8]
    found = {"settings": settings, "runs": {}}
    if arguments.output.is_file():
        found = json.loads(arguments.output.read_text(encoding="utf-8"))
        if found["settings"] != settings:
            parser.error(f"{arguments.output} is of other settings; give another --output")
    dtype = AutoConfig.from_pretrained(source).dtype
    runs = [("source", None)] + [(kind, seed) for seed in range(arguments.seeds) for kind in arguments.starts]
    for kind, seed in runs:
        name = kind if seed is None else f"{kind} {seed}"
        if name in found["runs"]:
            continue
        if seed is None:
            folder = source
        else:
            seeded = replace(options, transfer=replace(options.transfer, seed=seed))
            folder = healed(kind, source, text, seeded, work)
        found["runs"][name] = figures_of(folder, dtype, tokenizer, tests, others)
        arguments.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(table(found["runs"]), flush=True)


def table(runs: dict[str, dict]) -> str:
    """Means over seeds, with the standard deviation where there are several."""
    kinds: dict[str, list[dict]] = {}
    for name, run in runs.items():
        kinds.setdefault(name.partition(" ")[0], []).append(run)
    lines = []
    for kind, of_kind in kinds.items():
        for test in of_kind[0]["tests"]:
            values = {
                **{key: ([run["tests"][test][key] for run in of_kind], form) for key, form in ROWS.items()},
                "low-bit": ([run["tests"][test]["low_bit_ratio"] for run in of_kind], "x {:.3f}"),
                "smoothed": ([run["tests"][test]["low_bit_smoothed_ratio"] for run in of_kind], "x {:.3f}"),
                "window": ([run["tests"][test]["stream"]["0"] for run in of_kind], "{:.2f}"),
                **{
                    f"copied {far}": ([run["copying"][far] for run in of_kind], "{:.1%}")
                    for far in of_kind[0]["copying"]
                },
            }
            cells = [f"{key} {spread(numbers, form)}" for key, (numbers, form) in values.items()]
            lines.append(f"{kind} ({len(of_kind)}), {test}: " + " | ".join(cells))
    return "\n".join(lines)


def spread(numbers: list[float], form: str) -> str:
    mean = form.format(statistics.mean(numbers))
    return mean if len(numbers) == 1 else f"{mean} ± {form.format(statistics.stdev(numbers)).removeprefix('x ')}"


if __name__ == "__main__":
    main()
