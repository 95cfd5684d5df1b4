"""Reads what a checkpoint folder holds, from the headers of its files; no tensor is read."""

import json
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .errors import ConversionError
from .pickled import PickledWeights, is_plain


SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED_SINGLE_FILE = "pytorch_model.bin"
PICKLED_INDEX_FILE = "pytorch_model.bin.index.json"

# In the order in which transformers looks for them.
_WEIGHT_FILES = ((SINGLE_FILE, INDEX_FILE), (PICKLED_SINGLE_FILE, PICKLED_INDEX_FILE))

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
    """
    One weight file.

    Attributes:
        name: Its name in the folder.
        path: Its real path, links resolved.
        size: In bytes.
        tensors: Headers of its tensors, in file order.
        is_pickled: Whether it is one of `torch.save`, and not safetensors.
        shared: Names of tensors that are another one of the file once more.
    """

    name: str
    path: Path
    size: int
    tensors: dict[str, TensorHeader]
    is_pickled: bool = False
    shared: frozenset[str] = field(default=frozenset())

    def open(self) -> AbstractContextManager:
        """The file, with `get_tensor` and `get_slice` of its tensors."""
        return PickledWeights(self.path) if self.is_pickled else safe_open(self.path, framework="pt")


@dataclass(frozen=True)
class Checkpoint:
    """
    A folder of weights whose index and headers agree.

    Attributes:
        folder: The folder.
        config: Its config.json.
        shards: Its weight files.
        index_metadata: The index's own, if there is an index.
        index_name: Name of the index, if it was read.
    """

    folder: Path
    config: dict
    shards: tuple[Shard, ...]
    index_metadata: dict
    index_name: str | None = None

    @property
    def is_pickled(self) -> bool:
        """Whether its files are those of `torch.save`."""
        return any(shard.is_pickled for shard in self.shards)

    @cached_property
    def tensors(self) -> dict[str, TensorHeader]:
        return {name: header for shard in self.shards for name, header in shard.tensors.items()}


def shard_name(number: int, count: int) -> str:
    """Name of a weight file, counted from 1."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


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


def read_checkpoint(folder: Path, allow_pickled: bool = False) -> Checkpoint:
    """
    Read a checkpoint's config and headers, and check that the index and the shards tell the same story.

    Args:
        folder: The folder.
        allow_pickled: Whether the weights may be files of `torch.save`, where there are no safetensors. They are opened by the
            loader that runs no code.

    Raises:
        `ConversionError`: no config or weights; weights in another format; a shard that is missing, cut short or not what
        the index says.
    """
    if not folder.is_dir():
        raise ConversionError(f"{folder} is not a folder; give the folder of a checkpoint")
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
    weight_map = index_name = None
    for single_file, index_file in _WEIGHT_FILES if allow_pickled else _WEIGHT_FILES[:1]:
        if (folder / single_file).is_file():
            # As transformers does: with a single file in the folder, an index beside it is not read.
            names = [single_file]
            break
        if (folder / index_file).is_file():
            index_name = index_file
            weight_map, index_metadata = _read_index(folder / index_file)
            names = sorted(set(weight_map.values()))
            break
    else:
        raise ConversionError(_no_weights(folder, allow_pickled))

    shards = tuple(_read_shard(folder, name, index_name) for name in names)
    if weight_map is not None:
        _check_index(folder / index_name, weight_map, shards)
    return Checkpoint(folder, config, shards, index_metadata, index_name)


def _read_index(path: Path) -> tuple[dict[str, str], dict]:
    """An index's weight map and metadata."""
    index = read_json(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConversionError(f"{path} has no weight_map; fetch it again")
    if not all(isinstance(name, str) for name in weight_map.values()):
        raise ConversionError(f"{path}: weight_map must give a file name for each tensor; fetch it again")
    metadata = {} if index.get("metadata") is None else index["metadata"]
    if not isinstance(metadata, dict):
        raise ConversionError(f"{path}: metadata must be an object, got {metadata!r}")
    return weight_map, metadata


def _no_weights(folder: Path, allow_pickled: bool) -> str:
    patterns = ("*.bin", "*.pt", "*.pth", "*.ckpt")
    pickled = sorted(path.name for pattern in patterns for path in folder.glob(pattern))
    if pickled:
        shown = ", ".join(pickled[:3])
        what = (
            f"holds pickled weights under other names ({shown}) than {PICKLED_SINGLE_FILE} and {PICKLED_INDEX_FILE}"
            if allow_pickled
            else f"holds pickled weights only ({shown}), where safetensors are needed"
        )
        return f"{folder} {what}; load the model in transformers and `save_pretrained` it, which writes safetensors"
    patterns = ("*.gguf", "*.h5", "*.msgpack", "*.safetensors", "*.safetensors.index.*.json")
    other = sorted(path.name for pattern in patterns for path in folder.glob(pattern))
    found = f"; found {', '.join(other[:3])}" if other else ""
    return f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{found}"


def _read_shard(folder: Path, name: str, index_name: str | None) -> Shard:
    path = folder / name
    if Path(name).name != name:
        raise ConversionError(
            f"{folder / index_name} names the file {name!r}; weight files must lie in the folder itself"
        )
    if not path.is_file():
        raise ConversionError(f"{path} is missing, although {index_name} names it; fetch it again")
    real_path = path.resolve()
    with real_path.open("rb") as file:
        if file.read(24).startswith(b"version https://git-lfs"):
            raise ConversionError(f"{path} is a git-lfs pointer, not the file itself; fetch it with `git lfs pull`")
    is_pickled = not name.endswith(".safetensors")
    tensors, shared = (_pickled_headers if is_pickled else _safetensors_headers)(path)
    for tensor_name, header in tensors.items():
        if header.dtype not in FLOAT_FORMATS:
            raise ConversionError(
                f"{path}: tensor {tensor_name} has the format {header.dtype}; only floating point weights can be read. If "
                "the checkpoint is quantised, dequantise it first (load it in transformers, `model.dequantize()`, "
                "`save_pretrained`) or convert the original"
            )
    return Shard(name, real_path, real_path.stat().st_size, tensors, is_pickled, shared)


def _safetensors_headers(path: Path) -> tuple[dict[str, TensorHeader], frozenset[str]]:
    try:
        # Opening checks that the header is sound and that the file is as long as the header says.
        with safe_open(path.resolve(), framework="pt") as file:
            tensors = {}
            for name in file.offset_keys():
                view = file.get_slice(name)
                tensors[name] = TensorHeader(view.get_dtype(), tuple(view.get_shape()))
    except SafetensorError as error:
        raise ConversionError(f"{path} is damaged or cut short ({error}); fetch it again") from error
    return tensors, frozenset()


def _pickled_headers(path: Path) -> tuple[dict[str, TensorHeader], frozenset[str]]:
    formats = {dtype: name for name, dtype in FLOAT_FORMATS.items()}
    with PickledWeights(path) as file:
        tensors = {}
        for name, tensor in file.tensors.items():
            kind = formats.get(tensor.dtype, str(tensor.dtype))
            if not is_plain(tensor):
                kind = f"{tensor.layout} {tensor.dtype} on {tensor.device}"
            tensors[name] = TensorHeader(kind, tuple(tensor.shape))
        return tensors, file.shared()


def _check_index(index_path: Path, weight_map: dict[str, str], shards: tuple[Shard, ...]) -> None:
    in_shards = {(name, shard.name) for shard in shards for name in shard.tensors}
    in_index = set(weight_map.items())
    problems = [f"the index places {name} in {shard}, which does not hold it" for name, shard in in_index - in_shards]
    problems += [f"{shard} holds {name}, which the index does not place there" for name, shard in in_shards - in_index]
    if problems:
        raise ConversionError(
            f"{index_path} and the shards disagree: {'; '.join(sorted(problems))}. The folder mixes two "
            "checkpoints or is damaged: fetch it again"
        )
