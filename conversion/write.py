"""Writes a planned conversion into a folder."""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from tqdm import tqdm

from ..modeling_gated.bundle import write_code_bundle
from .checkpoint import FLOAT_FORMATS, INDEX_FILE, TensorHeader
from .errors import ConversionError
from .plan import ConversionPlan, format_bytes, free_bytes


def write_conversion(plan: ConversionPlan, folder: Path, hard_links: bool = True) -> None:
    """
    Write everything but the shards' places into `folder`; config.json comes last, so that a folder without it is unfinished.

    Args:
        plan: What to write.
        folder: Where.
        hard_links: Whether hard links may be advised where the disk is full.

    Raises:
        `ConversionError`: not enough room on the disk, or hard links are not possible there.
    """
    free = free_bytes(folder)
    if plan.bytes_to_write > free:
        raise ConversionError(
            f"{plan.target} needs {format_bytes(plan.bytes_to_write)}, {format_bytes(free)} are free there; make room"
            + (" or use --link hard, which writes the gates only" if hard_links and not plan.pieces else "")
        )
    if plan.pieces:
        _rewrite_shards(plan, folder)
    else:
        _place_shards(plan, folder)
    if plan.new_tensors:
        write_zero_shard(folder / plan.new_shard, plan.new_tensors)
    _write_json(
        folder / INDEX_FILE,
        {
            "metadata": {
                **{key: value for key, value in plan.source.index_metadata.items() if not key.startswith("total_")},
                "total_size": sum(header.nbytes for header in plan.tensors.values()),
            },
            "weight_map": plan.weight_map,
        },
    )
    for path in plan.copied:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        # Contents only, links resolved: the source may be a cache of links, and saving writes such files in place.
        shutil.copyfile(plan.source.folder / path, folder / path)
    if plan.generation_config:
        _write_json(folder / "generation_config.json", plan.generation_config)
    write_code_bundle(folder)
    plan.config.save_pretrained(folder)


def _place_shards(plan: ConversionPlan, folder: Path) -> None:
    linked = plan.options.link == "hard"
    # On a terminal only; a hard link takes no time worth showing.
    with tqdm(
        total=plan.source_bytes, unit="B", unit_scale=True, desc="Copying", disable=True if linked else None
    ) as bar:
        for shard in plan.shards:
            destination = folder / plan.shard_names[shard.name]
            if linked:
                try:
                    os.link(shard.path, destination)
                except OSError as error:
                    raise ConversionError(
                        f"{shard.path} cannot be hard-linked into {folder.parent} ({error.strerror}); hard links need one file "
                        "system that has them: use --link copy"
                    ) from error
            else:
                shutil.copyfile(shard.path, destination)
                bar.update(shard.size)


def _rewrite_shards(plan: ConversionPlan, folder: Path) -> None:
    """Write each of the source's shards anew, tensor by tensor: `safetensors` would need all of a file in memory."""
    total = sum(piece.header.nbytes for piece in plan.pieces)
    with tqdm(total=total, unit="B", unit_scale=True, desc="Writing", disable=None) as bar:
        for shard in plan.shards:
            pieces = [piece for piece in plan.pieces if piece.source in shard.tensors]
            # Wide formats first keeps every tensor aligned to its own width.
            pieces.sort(key=lambda piece: -FLOAT_FORMATS[piece.header.dtype].itemsize)
            header, _ = encoded_header({piece.target: piece.header for piece in pieces})
            with (folder / plan.shard_names[shard.name]).open("wb") as file, safe_open(shard.path, "pt") as source:
                file.write(header)
                for piece in pieces:
                    for part in piece.read(source):
                        content = part.contiguous().view(torch.uint8).numpy()
                        file.write(content)
                        bar.update(content.nbytes)


def encoded_header(tensors: dict[str, TensorHeader]) -> tuple[bytes, int]:
    """The beginning of a safetensors file with these tensors in this order, and how many bytes follow it."""
    header: dict = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format aligns the data to 8 bytes
    return len(encoded).to_bytes(8, "little") + encoded, end


def write_zero_shard(path: Path, tensors: dict[str, TensorHeader]) -> None:
    """
    Write a safetensors file of zeros. Only the header is written: the rest is the file's length, which reads as zeros and
    takes neither memory nor, where files can have holes, disk. `safetensors` would need every tensor in memory.
    """
    header, size = encoded_header(tensors)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size)


def overwrite_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """
    Replace tensors of a safetensors file where they lie; names, shapes and formats stay. Never on a linked file.

    Raises:
        `ConversionError`: the file has no such tensor, or one of another size.
    """
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        for name, tensor in tensors.items():
            begin, end = header[name]["data_offsets"] if name in header else (0, -1)
            content = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
            if end - begin != content.nbytes:
                raise ConversionError(f"{path} has no tensor {name} of {content.nbytes} bytes")
            file.seek(8 + length + begin)
            file.write(content)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
