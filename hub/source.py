"""What is uploaded: a gated model, a stock model of transformers, or a PEFT adapter of one of them."""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from ..configuration import GatedAttentionConfig
from ..conversion import ConversionError
from ..conversion.certificate import read_certificate
from ..conversion.checkpoint import Checkpoint, read_checkpoint, read_json
from ..conversion.journal import hash_file
from ..conversion.sources import find_source
from .errors import UploadError
from .heads import Head, head_of


ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"

Kind = Literal["gated", "stock", "adapter"]


@dataclass(frozen=True)
class ModelFolder:
    """
    A folder to upload, as it was read.

    Attributes:
        folder: The folder.
        kind: `"gated"` models travel with their code, `"stock"` ones need none, an `"adapter"` needs its base model.
        config: The model's config; an adapter's base model's.
        head: What it gives out.
        checkpoint: Its weights; of an adapter those of its base model.
        base_folder: Of an adapter, where its base model lies here.
        base_name, base_revision: Of an adapter, what its config says of the base model.
        certificate: Of the conversion that the weights come from, in a folder that has one.
        is_as_converted: Whether the weights (an adapter's base model's) are still those that the certificate was given for.
    """

    folder: Path
    kind: Kind
    config: PreTrainedConfig
    head: Head
    checkpoint: Checkpoint
    base_folder: Path | None = None
    base_name: str | None = None
    base_revision: str | None = None
    certificate: dict | None = None
    is_as_converted: bool = False

    @property
    def weights_folder(self) -> Path:
        """The folder that the Auto class loads."""
        return self.base_folder or self.folder

    @property
    def needs_code(self) -> bool:
        """Whether it loads only with `trust_remote_code=True` where this package is not installed."""
        return self.config.model_type == GatedAttentionConfig.model_type


def read_model_folder(folder: Path) -> ModelFolder:
    """
    Read what a folder holds.

    Raises:
        `UploadError`: no model or adapter that could be uploaded: the message says what is wrong.
    """
    try:
        if (folder / ADAPTER_CONFIG_FILE).is_file() and not (folder / "config.json").is_file():
            return _read_adapter(folder)
        checkpoint = read_checkpoint(folder)
        certificate = read_certificate(folder)
    except ConversionError as error:
        raise UploadError(str(error)) from error
    config = _read_config(folder, checkpoint.config)
    return ModelFolder(
        folder,
        "gated" if config.model_type == GatedAttentionConfig.model_type else "stock",
        config,
        head_of(config),
        checkpoint,
        certificate=certificate,
        is_as_converted=certificate is not None and _has_certified_weights(certificate, checkpoint),
    )


def _read_config(folder: Path, content: dict) -> PreTrainedConfig:
    model_type = content.get("model_type")
    if model_type != GatedAttentionConfig.model_type:
        if model_type not in CONFIG_MAPPING_NAMES:
            raise UploadError(
                f"{folder / 'config.json'}: model_type must be {GatedAttentionConfig.model_type!r} or one that transformers knows, got "
                f"{model_type!r}; add gates with `gated-attention convert` first"
            )
        if "auto_map" in content:
            raise UploadError(
                f"{folder / 'config.json'}: a {model_type} model must not have an auto_map, got {content['auto_map']}: it names code that "
                "is not uploaded. Remove the field if the stock class is meant"
            )
    try:
        return AutoConfig.from_pretrained(folder)
    except Exception as error:  # whatever a config can break
        raise UploadError(
            f"{folder / 'config.json'} does not describe a model ({type(error).__name__}: {error}); save it again"
        ) from error


def _has_certified_weights(certificate: dict, checkpoint: Checkpoint) -> bool:
    # Training and saving leave the certificate behind.
    files = certificate["result"]["files"]
    return all(files.get(shard.name) == sha256_of(shard.path) for shard in checkpoint.shards)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, computed once as long as the file stays as it is: large ones take minutes."""
    stat = path.stat()
    return _sha256_of(path.resolve(), stat.st_size, stat.st_mtime_ns)


@cache
def _sha256_of(path: Path, _size: int, _time: int) -> str:
    return hash_file(path)


def _read_adapter(folder: Path) -> ModelFolder:
    adapter_config = read_json(folder / ADAPTER_CONFIG_FILE)
    if not (folder / ADAPTER_WEIGHTS_FILE).is_file():
        raise UploadError(f"{folder} has no {ADAPTER_WEIGHTS_FILE}; save the adapter with `save_pretrained`")
    name = adapter_config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise UploadError(
            f"{folder / ADAPTER_CONFIG_FILE}: base_model_name_or_path must name the base model, got {name!r}"
        )
    revision = adapter_config.get("revision")
    base = read_model_folder(find_source(name, revision).folder)
    return replace(
        base, folder=folder, kind="adapter", base_folder=base.folder, base_name=name, base_revision=revision
    )


def adapter_config_for(model: ModelFolder, base_model: str) -> str:
    """
    The adapter's config as it is uploaded: it names the base model on the Hub, and no class of a package that a stranger lacks.

    Args:
        model: The adapter.
        base_model: Hub id of its base model.
    """
    content = json.loads((model.folder / ADAPTER_CONFIG_FILE).read_text(encoding="utf-8"))
    if content["base_model_name_or_path"] != base_model:
        # A commit of one repository is none of another.
        content["revision"] = None
    content["base_model_name_or_path"] = base_model
    if model.needs_code:
        # PEFT would import the class from this package; the Auto class takes it from the base model's repository.
        content["auto_mapping"] = None
        if content.get("task_type") is None and model.head.auto_class == "AutoModelForCausalLM":
            content["task_type"] = "CAUSAL_LM"
    return json.dumps(content, indent=2, sort_keys=True) + "\n"
