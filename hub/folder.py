"""Lays out the exact files of an upload: what is allowed to become public, and nothing else."""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import get_token

from ..conversion.checkpoint import INDEX_FILE, SINGLE_FILE
from ..conversion.places import CERTIFICATE_FILE, EXPORT_REPORT_FILE, tokenizer_code
from ..conversion.sources import is_hub_id
from ..modeling_gated.bundle import AUTO_MAP, write_code_bundle
from .errors import UploadError
from .source import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, ModelFolder, adapter_config_for


# What goes along from the top of the folder. A list of what is allowed: what becomes public should not depend on what somebody's
# folder happens to hold.
_UPLOADED = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "tokenizer*.model",
    "sentencepiece*.model",
    "spiece.model",
    "spm.model",
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
)
# Images go along where the card shows them.
_IMAGES = (".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg")
_NOT_UPLOADED_FOLDERS = ("checkpoint-*", "runs", "logs", "__pycache__", ".*")
# Files and folders that do not go along even where they are named.
_NEVER = (
    ".env",
    ".env.*",
    ".git",
    ".cache",
    "optimizer.*",
    "scheduler.pt",
    "rng_state*",
    "training_args.bin",
    "*.pem",
    "id_rsa*",
)

_SECRETS = re.compile(r"hf_[A-Za-z0-9]{30,}|-----BEGIN [A-Z ]*PRIVATE KEY-----")
# Vocabularies hold any string, paths among them.
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json")
_ABSOLUTE_PATH = re.compile(r"/[\w.@+-]+(?:/[\w.@+-]+)+")
_SYSTEM_FOLDERS = ("/bin/", "/dev/", "/etc/", "/lib/", "/opt/", "/proc/", "/sbin/", "/sys/", "/usr/", "/var/")
_LARGEST_TEXT = 50 * 1024 * 1024


@dataclass(frozen=True)
class UploadFolder:
    """
    The files of an upload, laid out.

    Attributes:
        folder: Where (weights as links).
        model: What they were made of.
        left_out: What the source's folder holds beside.
    """

    folder: Path
    model: ModelFolder
    left_out: tuple[str, ...] = ()

    def files(self) -> dict[str, Path]:
        """Path in the repository and on disk of each file."""
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {path.relative_to(self.folder).as_posix(): path for path in paths}


def lay_out(
    model: ModelFolder, folder: Path, base_model: str | None, shown: Iterable[str] = (), include: Iterable[str] = ()
) -> UploadFolder:
    """
    Lay out everything but the card: weights (linked, not copied), tokenizer and other files, and for a gated model a fresh code
    bundle and the config that refers to it.

    Args:
        model: What is uploaded.
        folder: An empty folder.
        base_model: Hub id of the base model; an adapter needs it.
        shown: Images that the card shows, by their paths in the model's folder.
        include: Patterns of other files that go along.

    Raises:
        `UploadError`: a file that is asked for must not be uploaded or is not there, or an adapter's base model has no Hub id.
    """
    source = model.folder
    written = _write_config(model, folder, base_model)
    chosen = _named_files(model) | set(shown)
    matched = dict.fromkeys(include, 0)
    left_out = []
    for relative in _files_below(source, set(include) | chosen):
        wanted = [pattern for pattern in include if fnmatch(relative, pattern)]
        for pattern in wanted:
            matched[pattern] += 1
        if wanted and any(fnmatch(part, never) for part in Path(relative).parts for never in _NEVER):
            raise UploadError(
                f"include: {relative} is not uploaded: such files hold secrets or the state of a training"
            )
        if relative in written or relative == "README.md":
            continue
        if wanted or relative in chosen or any(_fits(relative, pattern) for pattern in _UPLOADED):
            (folder / relative).parent.mkdir(parents=True, exist_ok=True)
            (folder / relative).symlink_to((source / relative).resolve())
        else:
            left_out.append(relative)
    if nothing := [pattern for pattern, count in matched.items() if count == 0]:
        raise UploadError(f"include: no file of {source} fits {', '.join(nothing)}")
    _drop_local_name(folder / "tokenizer_config.json")
    return UploadFolder(folder, model, tuple(left_out))


def _write_config(model: ModelFolder, folder: Path, base_model: str | None) -> set[str]:
    """Write the files that are not the source's own; returns their names."""
    if model.kind == "adapter":
        if base_model is None:
            raise UploadError(
                f"base_model: an adapter needs its base model on the Hub, and {ADAPTER_CONFIG_FILE} names a local folder; push that first "
                "(`gated-attention push FOLDER user/base`), then give --base-model user/base"
            )
        (folder / ADAPTER_CONFIG_FILE).write_text(adapter_config_for(model, base_model), encoding="utf-8")
        return {ADAPTER_CONFIG_FILE}
    if model.kind == "stock":
        content = {name: value for name, value in model.checkpoint.config.items() if name != "_name_or_path"}
        (folder / "config.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return {"config.json"}
    config = type(model.config).from_pretrained(model.folder)
    config.auto_map = dict(AUTO_MAP)
    config.save_pretrained(folder)
    write_code_bundle(folder)
    return {path.name for path in folder.iterdir()}


def _named_files(model: ModelFolder) -> set[str]:
    """The weights, and what belongs to them."""
    if model.kind == "adapter":
        return {ADAPTER_WEIGHTS_FILE}
    names = {shard.name for shard in model.checkpoint.shards}
    if SINGLE_FILE not in names:
        names.add(INDEX_FILE)
    if model.kind == "gated":
        names |= tokenizer_code(model.folder)
    if model.is_as_converted:
        names.add(CERTIFICATE_FILE)
    # A gated model can only have it from the export that it was read back from.
    if model.kind == "stock":
        names.add(EXPORT_REPORT_FILE)
    return names


def _files_below(source: Path, asked_for: set[str]) -> list[str]:
    found = []
    for root, folders, names in os.walk(source):
        below = Path(root).relative_to(source)
        folders[:] = sorted(
            name
            for name in folders
            if not any(fnmatch(name, pattern) for pattern in _NOT_UPLOADED_FOLDERS)
            or any(one.startswith(f"{(below / name).as_posix()}/") for one in asked_for)
        )
        found += [(below / name).as_posix() for name in sorted(names) if (Path(root) / name).is_file()]
    return found


def _fits(relative: str, pattern: str) -> bool:
    # Folder by folder: a star of fnmatch goes past slashes.
    return relative.count("/") == pattern.count("/") and fnmatch(relative, pattern)


def images_shown(text: str, folder: Path) -> list[str]:
    """The images in a folder that the text of a card shows, by the paths that it gives."""
    links = re.findall(r"\]\(\s*<?([^)\s>]+)|src=[\"']([^\"']+)", text)
    paths = {(first or second).removeprefix("./") for first, second in links}
    inside = (
        path for path in paths if path.lower().endswith(_IMAGES) and not path.startswith("/") and "://" not in path
    )
    return sorted(path for path in inside if ".." not in Path(path).parts and (folder / path).is_file())


def _drop_local_name(path: Path) -> None:
    """Some tokenizers write down the folder that they were loaded from."""
    if not path.is_file():
        return
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UploadError(f"{path.resolve()} is not valid JSON ({error}); save the tokenizer again") from error
    name = content.get("name_or_path")
    if isinstance(name, str) and not is_hub_id(name) and "/" in name:
        del content["name_or_path"]
        path.unlink()
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def refuse_secrets(upload: UploadFolder) -> None:
    """
    Look through the texts of an upload for tokens, private keys and paths of this machine.

    Raises:
        `UploadError`: there is one; the message names the file, and does not repeat a secret.
    """
    token = get_token()
    places = {upload.model.folder.absolute(), upload.model.folder.resolve()}
    if upload.model.base_folder is not None:
        places |= {upload.model.base_folder.absolute(), upload.model.base_folder.resolve()}
    # A short path, such as a root, could be a word of any text.
    needles = [str(place) for place in places if len(place.parts) > 2] + [f"{Path.home()}/"] * (
        Path.home() != Path("/")
    )
    for name, path in upload.files().items():
        content = _text_of(path)
        if content is None:
            continue
        if _SECRETS.search(content) or (token and len(token) >= 8 and token in content):
            raise UploadError(
                f"{name} holds what looks like a token or a private key, so nothing is uploaded; remove it there"
            )
        if name in _VOCABULARIES:
            continue
        found = next((needle for needle in needles if needle in content), None) or _existing_path(content)
        if found:
            raise UploadError(
                f"{name} names a path of this machine ({found}), which would become public; remove it there"
            )


def _existing_path(content: str) -> str | None:
    """A file or folder of this machine that a text names; those that every machine has do not count."""
    for path in dict.fromkeys(_ABSOLUTE_PATH.findall(content)):
        path = path.rstrip(".")
        if not path.startswith(_SYSTEM_FOLDERS) and os.path.exists(path):
            return path
    return None


def _text_of(path: Path) -> str | None:
    if path.suffix in (".safetensors", *_IMAGES[:-1]) or path.stat().st_size > _LARGEST_TEXT:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
