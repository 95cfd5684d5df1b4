"""Runs the whole pipe on one model and reports what was seen, as a table, a figure and JSON."""

import json
import os
import platform
import shutil
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from .._version import __version__
from ..conversion import NothingToTransferError, convert_checkpoint, transfer_sinks
from ..conversion.checkpoint import read_json
from ..conversion.plan import format_bytes
from ..diagnostics.texts import default_text
from ..hub.check import run_without_package
from .smollm2 import DemoError, demo_checkpoint
from .training import draw_training, train_gates


DTYPES = ("float32", "bfloat16", "float16")
BACKENDS = ("eager", "sdpa")
_MARKER = ".gated-attention-demo"
QUESTION = "What is gravity? Answer in two sentences."


def run_demo(model_name: str | None = None, output: Path = Path("demo-output"), short: bool = False) -> dict:
    """
    Convert a model, show that nothing changed, train its gates for a few steps, save it and load it again; and transfer its
    attention sink to the gates.

    Args:
        model_name (`str`, *optional*): Folder or Hub id of a checkpoint; default: SmolLM2-135M-Instruct, dequantised from Q4_1.
        output (`Path`): Folder for the converted and the trained model, `report.json` and `demo.png`.
        short (`bool`): Fewer tokens and steps, for continuous integration.

    Returns:
        `dict`: what was seen; the content of `report.json`.

    Raises:
        `DemoError`: something that must be equal is not; the report is written all the same. Or the model cannot be
        found, or the output folder holds other things.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokens, new_tokens, steps, sequence = (128, 16, 4, 128) if short else (512, 64, 24, 256)
    _check_extras()

    _title("1. The model")
    source = _find_source(model_name)
    _prepare_output(output, source)
    print(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    texts = _texts(tokenizer)

    _title("2. Add gates")
    converted = output / "converted"
    conversion = _convert(source, converted)

    _title(f"3. Compare logits on {tokens} tokens of text")
    equal = _compare(source, converted, texts["held_out"][:tokens])

    _title(f"4. Generate {new_tokens} tokens from both")
    same_text = _generate(source, converted, tokenizer, new_tokens)

    _title(f"5. Train for {steps} steps, the gates in their own parameter group")
    trained = output / "trained"
    if trained.is_dir():
        shutil.rmtree(trained)
    model, training = train_gates(converted, trained, tokenizer, texts["train"], texts["held_out"], steps, sequence)
    draw_training(training, output / "demo.png")

    _title("6. Move the attention sink into the gates of a fresh copy")
    transferred = _transfer(source, output / "transferred", short)

    _title("7. Load the trained model again, with this package and in a process without it")
    reload = _reload(model, trained, texts["held_out"][:tokens])

    report = {
        "model": model_name or source.name,
        "short": short,
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__},
        "versions": {"gated_attention": __version__, "transformers": transformers.__version__},
        "conversion": conversion,
        "logits_equal": equal,
        "generation_equal": same_text,
        "training": training,
        "transfer": transferred,
        "reload": reload,
    }
    (output / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    _title("What was seen")
    print(_table(report))
    print(f"\nmodels, report.json and demo.png are in {output}")
    failed = [name for name, value in {**equal, "generation": same_text, **reload}.items() if not value]
    if failed:
        raise DemoError(f"not equal: {', '.join(failed)}")
    return report


def _title(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


def _check_extras() -> None:
    """Before the work rather than after it."""
    if find_spec("matplotlib") is None:
        raise DemoError("the demo draws with matplotlib: pip install 'gated-attention[demo]'")


def _prepare_output(output: Path, source: Path) -> None:
    """Make the folder; one that is there must be an earlier demo's, since its models are replaced."""
    if output.resolve() == source.resolve() or source.resolve() in output.resolve().parents:
        raise DemoError(f"the output {output} lies in the model's own folder; give another one with --output")
    if output.exists() and not output.is_dir():
        raise DemoError(f"the output {output} is a file; give a folder with --output")
    if output.is_dir() and any(output.iterdir()) and not (output / _MARKER).exists():
        raise DemoError(
            f"the output {output} holds other things than an earlier demo; give a new folder with --output"
        )
    output.mkdir(parents=True, exist_ok=True)
    (output / _MARKER).write_text("made by `gated-attention demo`; the folders beside this file are replaced by it\n")


def _find_source(model: str | None) -> Path:
    if model is None:
        return demo_checkpoint()
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    unused = ["*.bin", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "original/*"]
    try:
        return Path(snapshot_download(model, ignore_patterns=unused))
    except (OSError, ValueError) as error:
        raise DemoError(f"{model!r} is neither a folder nor a model that can be fetched: {error}") from error


def _texts(tokenizer) -> dict[str, list[int]]:
    """Token ids of Python's own help pages: the first nine tenths to train on, the rest held out."""
    from pydoc_data.topics import topics

    names = sorted(topics)
    cut = len(names) * 9 // 10
    parts = {"train": names[:cut], "held_out": names[cut:]}
    return {part: tokenizer("\n\n".join(topics[name] for name in chosen)).input_ids for part, chosen in parts.items()}


def _convert(source: Path, target: Path) -> dict:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        started = time.perf_counter()
        shutil.copytree(source, Path(scratch) / "copy")
        copy_seconds = time.perf_counter() - started
    size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    print(f"a plain copy of the folder: {format_bytes(size)}, {copy_seconds:.2f} s")
    report = {"folder_bytes": size, "folder_copy_seconds": copy_seconds}
    for link in ("copy", "hard"):
        place = target if link == "copy" else target.parent / "converted-linked"
        try:
            result = convert_checkpoint(source, place, link=link, overwrite=True)
        except ValueError as error:
            if link == "copy":
                raise
            print(f"hard links are not possible here: {error}")
            continue
        seconds = sum(result.seconds[step] for step in ("plan", "write", "headers"))
        written = result.plan.bytes_to_write
        print(
            f"conversion with --link {link}: {format_bytes(written)} written, {seconds:.2f} s, "
            f"and {result.seconds['logits']:.2f} s to compare logits"
        )
        report[link] = {"bytes_written": written, "seconds": seconds, "logit_check_seconds": result.seconds["logits"]}
        if link == "hard":
            shutil.rmtree(place)
        else:
            print(
                f"gates: {result.plan.config.gate_granularity}, {len(result.plan.new_tensors)} tensors, all zero, scale 2"
            )
    return report


def _compare(source: Path, converted: Path, input_ids: list[int]) -> dict[str, bool]:
    batch = torch.tensor([input_ids])
    equal = {}
    for dtype in DTYPES:
        for backend in BACKENDS:
            logits = []
            for folder in (source, converted):
                model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=backend)
                with torch.no_grad():
                    logits.append(model(batch, use_cache=False).logits)
            equal[f"{dtype} {backend}"] = torch.equal(*logits)
            print(f"{dtype:<9}{backend:<6}{'bit-equal' if equal[f'{dtype} {backend}'] else 'DIFFERENT'}", flush=True)
    return equal


def _generate(source: Path, converted: Path, tokenizer, new_tokens: int) -> bool:
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": QUESTION}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(QUESTION, return_tensors="pt")
    answers = []
    for name, folder in (("source", source), ("gated", converted)):
        model = AutoModelForCausalLM.from_pretrained(folder)
        generated = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)[0]
        answers.append(generated)
        answer = tokenizer.decode(generated[inputs.input_ids.shape[1] :], skip_special_tokens=True)
        print(f"{name}: {answer.strip()}\n", flush=True)
    same = torch.equal(*answers)
    print("the same tokens" if same else "DIFFERENT tokens")
    return same


def _transfer(source: Path, target: Path, short: bool) -> dict | None:
    """The calibrated conversion; None for a model that has no sink."""
    text, text_name = default_text()
    longest = read_json(source / "config.json").get("max_position_embeddings", 2048)
    length = min(256 if short else 512, longest)
    try:
        report = transfer_sinks(
            source,
            target,
            text,
            tokens=(16 if short else 32) * length,
            length=length,
            text_name=text_name,
            overwrite=True,
        )
    except NothingToTransferError as error:
        print(error)
        return None
    print(report.describe())
    return report.to_dict()["summary"]


def _reload(model, trained: Path, input_ids: list[int]) -> dict[str, bool]:
    batch = torch.tensor([input_ids])
    with torch.no_grad():
        expected = model.eval()(batch, use_cache=False).logits
        again = AutoModelForCausalLM.from_pretrained(trained)(batch, use_cache=False).logits
    result = {
        "reload with this package": torch.equal(again, expected),
        "reload without this package": torch.equal(run_without_package(trained, batch)["logits"], expected),
    }
    for name, equal in result.items():
        print(f"{name}: logits {'bit-equal' if equal else 'DIFFERENT'}")
    return result


def _table(report: dict) -> str:
    """The report as two columns."""
    conversion, training = report["conversion"], report["training"]
    copied = f"{format_bytes(conversion['folder_bytes'])}, {conversion['folder_copy_seconds']:.2f} s"
    rows = [("model", report["model"]), ("plain copy of the folder", copied)]
    for link in ("copy", "hard"):
        if link in conversion:
            done = conversion[link]
            rows.append(
                (f"gates added, --link {link}", f"{format_bytes(done['bytes_written'])}, {done['seconds']:.2f} s")
            )
    rows += [
        (f"logits, {name}", "bit-equal" if equal else "DIFFERENT") for name, equal in report["logits_equal"].items()
    ]
    rows += [
        ("greedy generation", "the same tokens" if report["generation_equal"] else "DIFFERENT tokens"),
        ("held-out loss before and after training", f"{training['loss_before']:.3f} -> {training['loss_after']:.3f}"),
        ("gate scores before training", "1 everywhere"),
        (
            "gate scores after training",
            f"{training['gate_min']:.3f} to {training['gate_max']:.3f}, mean {training['gate_mean']:.3f}",
        ),
    ]
    if report["transfer"]:
        for name, label, form in (
            ("f_attn", "attention on the first token", "{:.3f}"),
            ("perplexity", "perplexity on held-out text", "{:.2f}"),
        ):
            before, after = report["transfer"][name]
            rows.append((f"sink transfer: {label}", f"{form.format(before)} -> {form.format(after)}"))
    rows += [(name, "bit-equal" if equal else "DIFFERENT") for name, equal in report["reload"].items()]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
