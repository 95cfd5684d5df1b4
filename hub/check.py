"""Loads an upload as a stranger would, in a process that cannot import this package, and compares what it computes."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from . import clean_process
from .clean_process import load_model, run_model
from .errors import UploadError
from .folder import UploadFolder
from .source import ModelFolder


BATCH, SEQUENCE, NEW_TOKENS = 2, 32, 16

# Relative error of the logits, both in float32, up to which a stock class is taken for the model it was exported from. What the export
# itself finds, with all that it knows of the formats, is bounded more tightly there.
LARGEST_NATIVE_ERROR = 1e-2


@dataclass(frozen=True)
class Check:
    """
    What was found equal.

    Attributes:
        error: Relative error of the outputs (root mean square); 0 where they are equal bit for bit.
        generated: How many new tokens each greedy generation has; 0 where the model generates none.
        agreed: How many of them are the same before the first one that differs, at the least.
    """

    error: float
    generated: int
    agreed: int

    def describe(self, original: Path) -> str:
        equal = "equal to those" if self.error == 0 else f"within a relative {self.error:.1e}"
        bits = ", bit for bit" if self.error == 0 else ", both in float32"
        text = f"checked: loads without this package, outputs {equal} of {original}{bits}"
        if self.generated and self.agreed == self.generated:
            return f"{text}; {self.generated} tokens generated greedily are the same"
        if self.generated:
            return f"{text}; greedy generation parts after {self.agreed} of {self.generated} tokens, at a tie"
        return text


def check_in_clean_process(upload: UploadFolder, original: ModelFolder | None = None) -> Check:
    """
    Load the upload folder in a process that cannot import this package, run it, and compare with the model it was made from: outputs
    of the head, and greedy generation where it generates.

    Args:
        upload: What would be sent.
        original: The gated model that the upload was exported from as a stock class; default: the upload's own model.

    Raises:
        `UploadError`: it does not load there, or computes something else.
    """
    model = upload.model
    reference = model if original is None else original
    dtype = "auto" if original is None else "float32"
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(model.config.get_text_config().vocab_size, (BATCH, SEQUENCE), generator=generator)
    new_tokens = NEW_TOKENS if model.head.auto_class == "AutoModelForCausalLM" else 0
    outputs = list(model.head.outputs)

    loaded = _load_here(reference, dtype)
    expected = run_model(loaded, input_ids, outputs, new_tokens)
    if original is None:
        del loaded  # before the same weights are loaded in another process
    is_adapter = model.kind == "adapter"
    found = run_without_package(
        model.base_folder if is_adapter else upload.folder,
        input_ids,
        auto_class=model.head.auto_class,
        outputs=outputs,
        new_tokens=new_tokens,
        adapter=upload.folder if is_adapter else None,
        tokenizer=upload.folder if (upload.folder / "tokenizer_config.json").is_file() else None,
        dtype=dtype,
        trust_remote_code=model.needs_code,
    )
    if original is None:
        for name, value in expected.items():
            if not torch.equal(found[name], value):
                raise UploadError(
                    f"the upload folder's {name}, computed without this package, differ from those of {model.folder}; nothing was sent. "
                    "Please report this with the config.json"
                )
        return Check(0.0, new_tokens, new_tokens)
    error = max(_relative_error(found[name], expected[name]) for name in outputs)
    # A NaN is no small number.
    if not error <= LARGEST_NATIVE_ERROR:
        raise UploadError(
            f"the exported model's outputs differ from those of {reference.folder} by {error:.1e} of their size, both in float32; nothing "
            "was sent. Please report this with the config.json"
        )
    agreed = _agreed_tokens(loaded, expected, found, input_ids) if new_tokens else 0
    return Check(error, new_tokens, agreed)


def _load_here(model: ModelFolder, dtype: str):
    adapter = str(model.folder) if model.kind == "adapter" else None
    try:
        return load_model(str(model.weights_folder), model.head.auto_class, adapter, dtype, trust_remote_code=False)
    except Exception as error:  # whatever a class cannot load
        raise UploadError(
            f"{model.folder} does not load ({type(error).__name__}: {error}); save or fetch it again"
        ) from error


def _relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).double().square().mean() / expected.double().square().mean()).sqrt().item()


def _agreed_tokens(model, expected: dict, found: dict, input_ids: torch.Tensor) -> int:
    """How many greedily generated tokens are the same in every row; where rows part, it must be between tokens that tie."""
    tolerance = 4 * (found["logits"] - expected["logits"]).abs().max().item()
    start = input_ids.shape[1]
    agreed = expected["generated"].shape[1] - start
    for own, other in zip(expected["generated"], found["generated"], strict=True):
        different = (own != other).nonzero()
        if not len(different):
            continue
        place = int(different[0])
        with torch.no_grad():
            logits = model(input_ids=own[None, :place], use_cache=False).logits[0, -1]
        margin = (logits[own[place]] - logits[other[place]]).item()
        if margin > tolerance:
            raise UploadError(
                f"the exported model generates another token at place {place - start}, by a margin of {margin:.1e} between logits that "
                f"differ by less than {tolerance:.1e}; nothing was sent. Please report this with the config.json"
            )
        agreed = min(agreed, place - start)
    return agreed


def run_without_package(
    folder: Path,
    input_ids: torch.Tensor,
    *,
    auto_class: str = "AutoModelForCausalLM",
    outputs: Sequence[str] = ("logits",),
    new_tokens: int = 0,
    adapter: Path | None = None,
    tokenizer: Path | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = True,
) -> dict[str, torch.Tensor]:
    """
    Run a model in a process that cannot import this package.

    Args:
        folder: The model's.
        input_ids: Token ids of shape `(batch, sequence)`.
        auto_class, outputs, new_tokens, dtype, trust_remote_code: As in [`load_model`] and [`run_model`].
        adapter: Folder of a PEFT adapter to put on top.
        tokenizer: Folder of a tokenizer that has to load there too.

    Returns:
        The outputs by name, and `"generated"` where tokens were asked for.

    Raises:
        `UploadError`: it does not load or run there.
    """
    with tempfile.TemporaryDirectory() as scratch:
        inputs, results = Path(scratch) / "inputs.safetensors", Path(scratch) / "results.safetensors"
        save_file({"input_ids": input_ids}, inputs)
        request = {
            "folder": str(folder.resolve()),
            "adapter": None if adapter is None else str(adapter.resolve()),
            "tokenizer": None if tokenizer is None else str(tokenizer.resolve()),
            "auto_class": auto_class,
            "dtype": dtype,
            "trust_remote_code": trust_remote_code,
            "outputs": list(outputs),
            "new_tokens": new_tokens,
            "inputs": str(inputs),
            "results": str(results),
            "threads": torch.get_num_threads(),
        }
        (Path(scratch) / "request.json").write_text(json.dumps(request), encoding="utf-8")
        environment = {name: value for name, value in os.environ.items() if not name.endswith("_TOKEN")}
        environment |= {
            "HF_HUB_OFFLINE": "1",
            # A module cache of its own: one from an earlier load could hide that a file is missing.
            "HF_MODULES_CACHE": str(Path(scratch) / "modules"),
        }
        # -P: or the folder of the script, which is this package's, would be searched for modules first.
        process = subprocess.run(
            [sys.executable, "-P", clean_process.__file__, str(Path(scratch) / "request.json")],
            env=environment,
            cwd=scratch,
            capture_output=True,
            text=True,
        )
        if process.returncode != 0:
            raise UploadError(f"{folder} does not load without this package:\n{process.stderr[-3000:]}")
        return load_file(results)
