"""
Upload a gated attention model to the Hub so that anyone loads it with `trust_remote_code=True`.

    python hub_upload.py DIR REPO [--private] [--revision BRANCH] [--base-model ID] [--license ID] [--dry-run]

Before anything is sent, the exact files of the upload are loaded in a process that cannot import this package, and their
logits compared with those of the folder.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import torch
from huggingface_hub import HfApi, ModelCard, ModelCardData, get_token
from huggingface_hub.errors import HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id
from safetensors.torch import load_file, save_file

from gated_attention import GatedAttentionConfig, GatedAttentionForCausalLM
from gated_attention.conversion import ConversionError
from gated_attention.conversion.certificate import read_certificate
from gated_attention.conversion.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, read_checkpoint
from gated_attention.conversion.gated_config import gates_are_identity
from gated_attention.conversion.journal import hash_file
from gated_attention.conversion.places import CERTIFICATE_FILE, tokenizer_code
from gated_attention.conversion.plan import format_bytes
from gated_attention.modeling_gated.bundle import AUTO_MAP, write_code_bundle


# What goes into the repository, beside the weights, the config, the code and the card that are made here. A list of what is
# allowed: what becomes public should not depend on what somebody's folder happens to hold.
_UPLOADED = (
    "*token*.json",
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "LICEN[CS]E*",
    "NOTICE*",
    "USE_POLICY*",
    "*.png",
    "*.jpg",
    "*.jpeg",
    "*.gif",
    "*.webp",
    "*.svg",
)
_NOT_UPLOADED_FOLDERS = ("checkpoint-*", "runs", "logs", "__pycache__", ".*")

# Weight files of an earlier upload that this one does not replace: a loader might take them.
_REPLACED = (
    "model*.safetensors",
    "model*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model*.bin.index.json",
)

# Runs in the clean process: argv is the folder, a file with the input ids and the file to write the logits to.
_LOAD_WITHOUT_PACKAGE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "gated_attention":
            raise ImportError("gated_attention is hidden from this process")

sys.meta_path.insert(0, Refuse())
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

folder, inputs, outputs = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="auto")
with torch.no_grad():
    logits = model(load_file(inputs)["input_ids"], use_cache=False).logits
save_file({"logits": logits.contiguous()}, outputs)
"""


class UploadError(ValueError):
    """A folder cannot be uploaded; the message says why and what to do."""


@dataclass(frozen=True)
class UploadFolder:
    """The files of an upload, laid out in `folder` (weights as links), and the checkpoint they come from."""

    folder: Path
    checkpoint: Checkpoint
    config: GatedAttentionConfig
    left_out: tuple[str, ...] = ()

    def files(self) -> dict[str, int]:
        """Path in the repository and size of each file."""
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {path.relative_to(self.folder).as_posix(): path.stat().st_size for path in paths}

    def describe(self, repo_id: str) -> str:
        lines = [f"{format_bytes(size):>10}  {name}" for name, size in self.files().items()]
        total = format_bytes(sum(self.files().values()))
        left_out = [f"left out: {', '.join(self.left_out)}"] if self.left_out else []
        return "\n".join([f"{repo_id}: {len(lines)} files, {total}", *lines, *left_out])


def check_repo_id(repo_id: str) -> None:
    """
    Raises:
        `UploadError`: not `user/name`; the card's lines to load the model need both.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UploadError(str(error)) from error
    if repo_id.count("/") != 1:
        raise UploadError(f"the repository must be given as user/name, got {repo_id!r}")


def prepare_upload(
    source: Path, folder: Path, repo_id: str, base_model: str | None = None, license: str | None = None
) -> UploadFolder:
    """
    Lay out what will be uploaded: weights (linked, not copied), tokenizer and other files, a fresh code bundle, a config that
    refers to it, and a model card.

    Raises:
        `UploadError`: `source` holds no gated attention model, or its weights are damaged.
    """
    try:
        checkpoint = read_checkpoint(source)
    except ConversionError as error:
        raise UploadError(str(error)) from error
    model_type = checkpoint.config.get("model_type")
    if model_type != GatedAttentionConfig.model_type:
        raise UploadError(
            f"{source / 'config.json'}: model_type must be {GatedAttentionConfig.model_type!r}, got {model_type!r}; add gates "
            "with `gated-attention convert` first"
        )
    if base_model is not None and (Path(base_model).is_absolute() or base_model.count("/") > 1 or "\\" in base_model):
        raise UploadError(f"base_model must be a Hub id such as org/name, got {base_model!r}")

    config = GatedAttentionConfig.from_pretrained(source)
    config.auto_map = dict(AUTO_MAP)
    config.save_pretrained(folder)
    write_code_bundle(folder)
    shards = {shard.name for shard in checkpoint.shards}
    index = (
        {INDEX_FILE} if INDEX_FILE in {path.name for path in source.iterdir()} and SINGLE_FILE not in shards else set()
    )
    made_here = {path.name for path in folder.iterdir()} | {"README.md"}
    code = tokenizer_code(source)
    certificate = valid_certificate(source, checkpoint)
    if certificate is not None:
        code = code | {CERTIFICATE_FILE}
    left_out = []
    for root, folders, names in os.walk(source):
        folders[:] = sorted(name for name in folders if not any(fnmatch(name, p) for p in _NOT_UPLOADED_FOLDERS))
        for name in sorted(names):
            relative = (Path(root) / name).relative_to(source).as_posix()
            if relative in shards | index | code or any(fnmatch(name, pattern) for pattern in _UPLOADED):
                (folder / relative).parent.mkdir(parents=True, exist_ok=True)
                (folder / relative).symlink_to((source / relative).resolve())
            elif relative not in made_here:
                left_out.append(relative)
    upload = UploadFolder(folder, checkpoint, config, tuple(left_out))
    write_card(upload, source / "README.md", repo_id, base_model, license, certificate)
    return upload


def valid_certificate(source: Path, checkpoint: Checkpoint) -> dict | None:
    """
    The certificate of a conversion, if the folder has one and the weights that load are still those that it was given for:
    training and saving leave the file behind.
    """
    try:
        certificate = read_certificate(source)
    except ConversionError as error:
        raise UploadError(str(error)) from error
    if certificate is None:
        return None
    files = certificate["result"]["files"]
    same = all(files.get(shard.name) == hash_file(shard.path) for shard in checkpoint.shards)
    return certificate if same else None


def conversion_section(certificate: dict) -> list[str]:
    """What the card says of the conversion."""
    source, comparison = certificate["source"], certificate["comparison"]
    name = (
        f"{source['id']} at revision `{source['revision']}`"
        if source["id"]
        else f"a {source['model_type']} checkpoint"
    )
    lines = [
        "## Conversion",
        "",
        f"Converted from {name} with gated_attention {certificate['tool']['gated_attention']}.",
    ]
    lines += [f"Gates: {certificate['gates']}."]
    if comparison is not None:
        largest = max(layer["ulps"] for layer in comparison["layers"])
        conditions = " and ".join(
            words
            for words, holds in (
                ("with projections put together that the conversion took apart", comparison["rejoined"]),
                ("with its gates set aside, which change what it computes", comparison["gates_set_aside"]),
            )
            if holds
        )
        lines += [
            f"Compared with its source in {comparison['dtype']}, {comparison['method']}, on texts of "
            f"{', '.join(map(str, comparison['lengths']))} random tokens{', ' + conditions if conditions else ''}: outputs of all "
            f"{len(comparison['layers'])} layers differ by at most {largest} units in the last place."
        ]
    lines += [
        f"`{CERTIFICATE_FILE}` has the hashes of the source's files and of these"
        + (", and the difference of each layer" if comparison is not None else "")
        + "; `gated-attention verify SOURCE FOLDER` checks them all again.",
        "",
    ]
    return lines


_POSITIONS = {
    "sdpa_output": "its attention output",
    "value": "its values",
    "key": "its keys",
    "query": "its queries",
    "dense_output": "the output of its attention layers",
}


def write_card(
    upload: UploadFolder,
    source_card: Path,
    repo_id: str,
    base_model: str | None,
    license: str | None,
    certificate: dict | None = None,
) -> None:
    """Write README.md: metadata, how to load, what the gates are, and the card that the folder had, if any."""
    try:
        previous = ModelCard.load(source_card) if source_card.is_file() else None
    except Exception as error:  # YAML has many ways to be broken
        raise UploadError(
            f"the card {source_card} cannot be read ({type(error).__name__}: {error}); mend or remove it"
        ) from error
    inherited = previous.data.to_dict() if previous else {}
    kept = {key: inherited[key] for key in ("language", "datasets", "extra_gated_prompt") if inherited.get(key)}
    if license is None:
        kept |= {key: inherited[key] for key in ("license", "license_name", "license_link") if inherited.get(key)}
    else:
        kept["license"] = license
    data = ModelCardData(
        **kept,
        base_model=base_model or (certificate["source"]["id"] if certificate is not None else None),
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["gated-attention", "custom_code"],
    )
    config = upload.config
    positions = " and ".join(_POSITIONS[position] for position in config.gate_positions)
    gates = f"{config.gate_granularity} {config.gate_activation} gates on {positions}" if positions else "no gates"
    if not positions:
        state = "It is the control of a gated model."
    elif gates_are_identity(upload.checkpoint, config):
        state = "Every gate is exactly 1, so the model computes what it computed before it had gates."
    else:
        state = "The gates are not the identity: they take part in what the model computes."
    lines = [
        f"# {repo_id.split('/')[-1]}",
        "",
        f"A decoder with {gates} "
        "([arXiv 2505.06708](https://arxiv.org/abs/2505.06708)): "
        f"{config.num_hidden_layers} layers, {config.num_attention_heads} heads, `gate_scale` {config.gate_scale:g}. {state}",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{repo_id}", trust_remote_code=True)',
        f'model = AutoModelForCausalLM.from_pretrained("{repo_id}", trust_remote_code=True)',
        "```",
        "",
    ]
    if certificate is not None:
        lines += conversion_section(certificate)
    if previous and previous.text.strip():
        lines += ["## Card of the model before it was uploaded here", "", previous.text.strip(), ""]
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(lines)).save(upload.folder / "README.md")


def check_in_clean_process(source: Path, upload: UploadFolder, batch: int = 2, sequence: int = 32) -> None:
    """
    Load the upload folder in a process that cannot import this package, and compare its logits with those of the folder it was made from.

    Raises:
        `UploadError`: it does not load there, or the logits differ.
    """
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(upload.config.vocab_size, (batch, sequence), generator=generator)
    model = GatedAttentionForCausalLM.from_pretrained(source, dtype="auto")
    with torch.no_grad():
        expected = model(input_ids, use_cache=False).logits
    del model
    logits = load_without_package(upload.folder, input_ids)
    if not torch.equal(logits, expected):
        raise UploadError(f"the upload folder's logits, computed without this package, differ from those of {source}")


def load_without_package(folder: Path, input_ids: torch.Tensor) -> torch.Tensor:
    """Logits of the model in `folder` for `input_ids`, computed in a process that cannot import this package."""
    with tempfile.TemporaryDirectory() as scratch:
        inputs, outputs = Path(scratch) / "inputs.safetensors", Path(scratch) / "outputs.safetensors"
        save_file({"input_ids": input_ids}, inputs)
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            # A module cache of its own: one from an earlier load could hide that a file is missing.
            "HF_MODULES_CACHE": str(Path(scratch) / "modules"),
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
        }
        process = subprocess.run(
            [sys.executable, "-c", _LOAD_WITHOUT_PACKAGE, str(folder.resolve()), str(inputs), str(outputs)],
            env=environment,
            cwd=scratch,
            capture_output=True,
            text=True,
        )
        if process.returncode != 0:
            raise UploadError(f"the upload folder does not load without this package:\n{process.stderr[-3000:]}")
        return load_file(outputs)["logits"]


def push(upload: UploadFolder, repo_id: str, private: bool = False, revision: str | None = None) -> str:
    """
    Send the upload in one commit; weight files of an earlier upload that it does not replace are removed in the same commit.

    Returns:
        `str`: address of the commit.

    Raises:
        `UploadError`: the Hub could not be reached, or refused.
    """
    api = HfApi()
    try:
        repo_id = api.create_repo(repo_id, private=private or None, exist_ok=True).repo_id
        if revision:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=upload.folder,
            revision=revision,
            commit_message="Upload gated attention model",
            delete_patterns=list(_REPLACED),
        ).commit_url
    except (HTTPError, OSError) as error:
        raise UploadError(f"the upload to {repo_id} failed: {error}") from error


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hub_upload.py", description=__doc__.strip().splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the gated attention model")
    parser.add_argument("repo_id", help="repository on the Hub, as user/name")
    parser.add_argument("--private", action="store_true", help="make the repository private when it is created")
    parser.add_argument("--revision", help="branch to upload to; made if it does not exist")
    parser.add_argument("--base-model", help="Hub id of the model that was converted, for the card")
    parser.add_argument("--license", help="licence id for the card; default: that of the folder's README.md")
    parser.add_argument("--dry-run", action="store_true", help="prepare and check everything, send nothing")
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    try:
        check_repo_id(options.repo_id)
        if not options.dry_run and get_token() is None:
            raise UploadError("no Hub token: run `hf auth login`, set HF_TOKEN, or look at the plan with --dry-run")
        with tempfile.TemporaryDirectory(prefix="hub-upload-") as scratch:
            upload = prepare_upload(
                options.folder, Path(scratch), options.repo_id, options.base_model, options.license
            )
            check_in_clean_process(options.folder, upload)
            print(upload.describe(options.repo_id))
            print(f"checked: loads without this package, logits equal to those of {options.folder}, bit for bit")
            if options.dry_run:
                print("dry run: nothing was sent")
                return 0
            print(f"uploaded: {push(upload, options.repo_id, options.private, options.revision)}")
    except UploadError as error:
        print(f"hub_upload: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
