"""Tiny models and checkpoints that every test builds on. Every parameter is random, norms and biases included."""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path


# No test may reach for the network. Before the imports: huggingface_hub reads it then.
os.environ["HF_HUB_OFFLINE"] = "1"
# On AMD's processors MKL's kernels give a product other bits where its factors lie otherwise in memory, unless they are told not to. Before the
# first product, and for the processes that tests start.
_CPU_INFO = Path("/proc/cpuinfo")
ON_AMD = _CPU_INFO.is_file() and "AuthenticAMD" in _CPU_INFO.read_text()
if ON_AMD:
    os.environ.setdefault("MKL_CBWR", "AUTO")

import huggingface_hub.constants
import pytest
import torch
from loopback_hub import LoopbackHub
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from gated_attention import GatedAttentionConfig, GatedAttentionForCausalLM


logging.disable_progress_bar()

COMMAND = Path(sys.executable).with_name("gated-attention")

# heads * head_dim (40) differs from hidden_size (32), and query heads outnumber key/value heads: wrong layouts show.
TINY_SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CHAT_TEMPLATE = "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} {% endfor %}"


# Start of a script that runs where nobody has installed the package.
WITHOUT_PACKAGE = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "gated_attention":
            raise ImportError("blocked")
sys.meta_path.insert(0, Block())
try:
    import gated_attention
except ImportError:
    pass
else:
    raise SystemExit("the package can still be imported")
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
"""


def randomise(model, seed: int = 0):
    """Give every parameter random values at which each matters: norms around 1 (zero-centred ones too), the rest around 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * 0.2
            parameter.copy_(1 + noise if "norm" in name else noise)
    return model.eval()


def tiny_llama(seed: int = 0, **overrides) -> LlamaForCausalLM:
    return randomise(LlamaForCausalLM(LlamaConfig(**{**TINY_SHAPE, **overrides})), seed)


def tiny_gated(seed: int = 0, **overrides) -> GatedAttentionForCausalLM:
    return randomise(GatedAttentionForCausalLM(GatedAttentionConfig(**{**TINY_SHAPE, **overrides})), seed)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=TINY_SHAPE["vocab_size"], special_tokens=["<unk>", "<s>", "</s>"])
    tokenizer.train_from_iterator(["the gate opens and the sink closes", "attention to the first token"] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="</s>",
        chat_template=CHAT_TEMPLATE,
    )


def tiny_input_ids(batch: int = 2, sequence: int = 24, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, TINY_SHAPE["vocab_size"], (batch, sequence), generator=torch.Generator().manual_seed(seed))


def logits_of(model, input_ids=None) -> torch.Tensor:
    with torch.no_grad():
        return model(tiny_input_ids() if input_ids is None else input_ids, use_cache=False).logits


def save_source(folder: Path, model=None, sharded: bool = False, tokenizer: bool = True, dtype=None) -> Path:
    """A Llama checkpoint on disk as a Hub download looks, in one file or in several."""
    model = model or tiny_llama()
    if dtype is not None:
        model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size="20KB" if sharded else "5GB")
    if tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    (folder / "README.md").write_text(
        "---\nlicense: apache-2.0\nlanguage: en\n---\n# Tiny\n![plot](images/plot.png)\n"
    )
    (folder / "LICENSE").write_text("some licence\n")
    (folder / "images").mkdir()
    (folder / "images" / "plot.png").write_bytes(b"\x89PNG not really")
    return folder


def edit_config(folder: Path, **fields) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def edit_tensors(path: Path, edit) -> None:
    """Change the dictionary of tensors of a weight file, or of the one in a folder, by a function."""
    file = path / "model.safetensors" if path.is_dir() else path
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def tree_hashes(folder: Path) -> dict[str, str]:
    """Hash of every file in a folder, links followed, to show that nothing changed."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def source(tmp_path) -> Path:
    return save_source(tmp_path / "source")


@pytest.fixture
def sharded_source(tmp_path) -> Path:
    return save_source(tmp_path / "source", sharded=True)


@pytest.fixture
def target(tmp_path) -> Path:
    return tmp_path / "target"


@pytest.fixture
def without_package(tmp_path):
    """Run a script in a process that cannot import the package; returns its standard output."""

    def run(script: str, check: bool = True) -> subprocess.CompletedProcess:
        environment = {"PATH": "", "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
        # It must compute what this process does.
        environment |= {name: os.environ[name] for name in ("MKL_CBWR", "OMP_NUM_THREADS") if name in os.environ}
        process = subprocess.run(
            [sys.executable, "-c", WITHOUT_PACKAGE + script],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        if check:
            assert process.returncode == 0, process.stderr
        return process

    return run


@pytest.fixture
def hub(tmp_path):
    """A Hub on this machine; `client` is the environment of a process that uses it."""
    with LoopbackHub() as server:
        server.client = server.client_environment(tmp_path / "hf_home")
        yield server


@pytest.fixture
def hub_here(hub, tmp_path, monkeypatch):
    """The same, and this process is its client, which does not wait before it tries again: `naps` says for how long it would."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf_cache"))
    for name, value in hub.environment().items():
        monkeypatch.setenv(name, value)
    hub.naps = []
    monkeypatch.setattr(time, "sleep", hub.naps.append)
    return hub


def run_as_stranger(hub, script: str) -> None:
    """Run a script where nobody has installed the package, with empty caches and the Hub on this machine."""
    environment = {**hub.client, "HF_HOME": f"{hub.client['HF_HOME']}_of_a_stranger"}
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGE + script], env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
