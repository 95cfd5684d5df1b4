"""Reads what a checkpoint folder holds, from the headers of its files; no tensor is read."""

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .errors import ConversionError


SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Name in a safetensors header, and in torch, of the formats that hold plain numbers.
FLOAT_FORMATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class TensorHeader:
    """What a file's header says of one tensor: its format (`"BF16"`, `"F32"`, ...) and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * FLOAT_FORMATS[self.dtype].itemsize


@dataclass(frozen=True)
class Shard:
    """One weight file: its name in the folder, its real path (links resolved), its size and its tensors, in file order."""

    name: str
    path: Path
    size: int
    tensors: dict[str, TensorHeader]


@dataclass(frozen=True)
class Checkpoint:
    """A folder of safetensors weights whose index and headers agree."""

    folder: Path
    config: dict
    shards: tuple[Shard, ...]
    index_metadata: dict

    @cached_property
    def tensors(self) -> dict[str, TensorHeader]:
        return {name: header for shard in self.shards for name, header in shard.tensors.items()}


def is_ignored_on_load(name: str) -> bool:
    """Whether loaders pass over a tensor: old checkpoints hold each layer's RoPE frequencies, which are computed now."""
    return name.endswith("rotary_emb.inv_freq")


def read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConversionError(f"{path} is not valid JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise ConversionError(f"{path} must hold a JSON object, found a {type(content).__name__}")
    return content


def read_checkpoint(folder: Path) -> Checkpoint:
    """
    Read a checkpoint's config and headers, and check that the index and the shards tell the same story.

    Raises:
        `ConversionError`: no config or weights; weights in another format; a shard that is missing, cut short or not what
        the index says.
    """
    if not folder.is_dir():
        raise ConversionError(f"the source {folder} is not a folder; give the folder of a downloaded checkpoint")
    config_path = folder / "config.json"
    if not config_path.is_file():
        adapter = (folder / "adapter_config.json").is_file()
        raise ConversionError(
            f"{folder} has no config.json"
            + ("; it holds a PEFT adapter: merge it into its base model first" if adapter else "")
        )
    config = read_json(config_path)
    if (folder / "adapter_config.json").is_file():
        raise ConversionError(
            f"{folder} holds a PEFT adapter (adapter_config.json), which transformers would load on top of the weights; "
            "merge it first (`merge_and_unload`, then `save_pretrained`) or remove it"
        )

    index_metadata: dict = {}
    weight_map = None
    if (folder / SINGLE_FILE).is_file():
        # As transformers does: with a single file in the folder, an index beside it is not read.
        names = [SINGLE_FILE]
    elif (folder / INDEX_FILE).is_file():
        index = read_json(folder / INDEX_FILE)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConversionError(f"{folder / INDEX_FILE} has no weight_map; fetch it again")
        if not all(isinstance(name, str) for name in weight_map.values()):
            raise ConversionError(
                f"{folder / INDEX_FILE}: weight_map must give a file name for each tensor; fetch it again"
            )
        index_metadata = {} if index.get("metadata") is None else index["metadata"]
        if not isinstance(index_metadata, dict):
            raise ConversionError(f"{folder / INDEX_FILE}: metadata must be an object, got {index_metadata!r}")
        names = sorted(set(weight_map.values()))
    else:
        raise ConversionError(_no_safetensors(folder))

    shards = tuple(_read_shard(folder, name) for name in names)
    if weight_map is not None:
        _check_index(folder, weight_map, shards)
    return Checkpoint(folder, config, shards, index_metadata)


def _no_safetensors(folder: Path) -> str:
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    if pickled:
        return (
            f"{folder} holds pickled weights only ({', '.join(pickled[:3])}), which can run code when they are opened; "
            "load the model in transformers and `save_pretrained` it, which writes safetensors"
        )
    patterns = ("*.gguf", "*.h5", "*.msgpack", "*.safetensors", "*.safetensors.index.*.json")
    other = sorted(path.name for pattern in patterns for path in folder.glob(pattern))
    found = f"; found {', '.join(other[:3])}" if other else ""
    return f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{found}"


def _read_shard(folder: Path, name: str) -> Shard:
    path = folder / name
    if Path(name).name != name:
        raise ConversionError(
            f"{folder / INDEX_FILE} names the file {name!r}; weight files must lie in the folder itself"
        )
    if not path.is_file():
        raise ConversionError(f"{path} is missing, although {INDEX_FILE} names it; fetch it again")
    real_path = path.resolve()
    with real_path.open("rb") as file:
        if file.read(24).startswith(b"version https://git-lfs"):
            raise ConversionError(f"{path} is a git-lfs pointer, not the file itself; fetch it with `git lfs pull`")
    try:
        # Opening checks that the header is sound and that the file is as long as the header says.
        with safe_open(real_path, framework="pt") as file:
            tensors = {}
            for tensor_name in file.offset_keys():
                view = file.get_slice(tensor_name)
                tensors[tensor_name] = TensorHeader(view.get_dtype(), tuple(view.get_shape()))
    except SafetensorError as error:
        raise ConversionError(f"{path} is damaged or cut short ({error}); fetch it again") from error
    for tensor_name, header in tensors.items():
        if header.dtype not in FLOAT_FORMATS:
            raise ConversionError(
                f"{path}: tensor {tensor_name} has the format {header.dtype}; only floating point weights can be read. If "
                "the checkpoint is quantised, dequantise it first (load it in transformers, `model.dequantize()`, "
                "`save_pretrained`) or convert the original"
            )
    return Shard(name, real_path, real_path.stat().st_size, tensors)


def _check_index(folder: Path, weight_map: dict[str, str], shards: tuple[Shard, ...]) -> None:
    in_shards = {(name, shard.name) for shard in shards for name in shard.tensors}
    in_index = set(weight_map.items())
    problems = [f"the index places {name} in {shard}, which does not hold it" for name, shard in in_index - in_shards]
    problems += [f"{shard} holds {name}, which the index does not place there" for name, shard in in_shards - in_index]
    if problems:
        raise ConversionError(
            f"{folder / INDEX_FILE} and the shards disagree: {'; '.join(sorted(problems))}. The folder mixes two "
            "checkpoints or is damaged: fetch it again"
        )
