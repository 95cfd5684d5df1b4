"""Reads the weight files of `torch.save`, through the loader that runs no code, and no more of them than is asked for."""

import pickle
import zipfile
from pathlib import Path

import torch

from .errors import ConversionError


class PickledWeights:
    """
    The tensors of a `torch.save` file. They are mapped into memory and not read, so they cost address space until they are used;
    the methods are those of `safetensors.safe_open` that a conversion calls.

    Args:
        path (`Path`): The file.

    Raises:
        [`ConversionError`]: it is no such file, cannot be mapped, needs code to be opened, or holds something besides tensors.
    """

    def __init__(self, path: Path):
        if not zipfile.is_zipfile(path):
            raise ConversionError(
                f"{path} is damaged, or cut short, or in the format of torch before 1.6, which can only be read as a whole; fetch it "
                "again, or load the model in transformers and `save_pretrained` it, which writes safetensors"
            )
        records = _records(path)
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            raise ConversionError(
                f"{path} is damaged, or holds more than tensors, and opening it would run code, which is never done "
                f"({_first_line(error)}); fetch it again, take the safetensors of this model, or let somebody who trusts the file load "
                "and `save_pretrained` it"
            ) from error
        except MemoryError:
            raise
        except Exception as error:  # a damaged pickle can ask for anything
            raise ConversionError(f"{path} is damaged or cut short ({_first_line(error)}); fetch it again") from error
        if not isinstance(content, dict):
            raise ConversionError(f"{path} must hold a dictionary of tensors, found a {type(content).__name__}")
        for name, value in content.items():
            if not (isinstance(name, str) and isinstance(value, torch.Tensor)):
                raise ConversionError(
                    f"{path} must hold a dictionary of tensors, found a {type(value).__name__} under {name!r}; save the model's "
                    "`state_dict()` alone, or use `save_pretrained`"
                )
        # A record that is too short would be read on into the next one. Formats that are refused later may lie elsewhere.
        if all(is_plain(tensor) for tensor in content.values()):
            storages = [tensor.untyped_storage() for tensor in content.values()]
            sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
            if sorted(filter(None, sizes.values())) != sorted(filter(None, records)):
                raise ConversionError(f"{path} is damaged: its tensors are not as long as its records; fetch it again")
        self.tensors: dict[str, torch.Tensor] = content

    def __enter__(self) -> "PickledWeights":
        return self

    def __exit__(self, *_) -> None:
        self.tensors = {}  # the last reference to the mapping

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name].detach()

    def get_slice(self, name: str) -> torch.Tensor:
        """What can be indexed as a slice of safetensors can: the tensor itself."""
        return self.get_tensor(name)

    def shared(self) -> frozenset[str]:
        """Names of tensors that are an earlier one of the file once more, as heads that are tied to the embedding are."""
        first: dict[tuple, str] = {}
        again = set()
        for name, tensor in self.tensors.items():
            if not is_plain(tensor):
                continue
            place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
            if tensor.numel() and first.setdefault(place, name) != name:
                again.add(name)
        return frozenset(again)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is numbers in a row, in memory."""
    return tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type == "cpu"


def _records(path: Path) -> list[int]:
    """
    Sizes of the records that tensors lie in.

    Raises:
        `ConversionError`: the file cannot be mapped.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError) as error:
        raise ConversionError(f"{path} is damaged or cut short ({error}); fetch it again") from error
    if any("/code/" in entry.filename or entry.filename.endswith("constants.pkl") for entry in entries):
        raise ConversionError(f"{path} is a TorchScript program, not a checkpoint; save the model's `state_dict()`")
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ConversionError(
            f"{path} was compressed after torch had written it, so it cannot be mapped; fetch it again"
        )
    return [entry.file_size for entry in entries if "/data/" in entry.filename]


def _first_line(error: Exception) -> str:
    """Of torch's messages the line that says what was found, without its advice."""
    message = str(error).strip().rpartition("WeightsUnpickler error: ")[2]
    return message.splitlines()[0] if message else type(error).__name__
