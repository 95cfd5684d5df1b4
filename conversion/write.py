"""Writes a planned conversion into a folder."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from ..modeling_gated.bundle import write_code_bundle
from .checkpoint import FLOAT_FORMATS, INDEX_FILE, Shard, TensorHeader
from .errors import ConversionError
from .journal import Journal, NoJournal, hash_file
from .layouts import Piece
from .plan import ConversionPlan, Link, format_bytes, free_bytes


# What is copied between two looks at the progress bar, and what is held in memory where bytes go through it.
_CHUNK_BYTES = 32 * 2**20


def write_conversion(
    plan: ConversionPlan, folder: Path, hard_links: bool = True, resumable: bool = True
) -> tuple[str, ...]:
    """
    Write a result into `folder`: its shards, the new ones with zeros, index, config, code and the source's other files.

    Args:
        plan: What to write.
        folder: Where.
        hard_links: Whether hard links may be advised where the disk is full.
        resumable: Whether finished shards are taken down in a journal, and those of an earlier run reused.

    Returns:
        `tuple[str, ...]`: names of the shards that an earlier run had finished.

    Raises:
        `ConversionError`: not enough room on the disk, or hard links are not possible there.
    """
    free = free_bytes(folder) + sum(path.stat().st_size for path in folder.iterdir())
    needed = plan.bytes_to_write
    if plan.options.link == "auto" and not plan.pieces and _can_reflink(plan, folder):
        needed -= plan.source_bytes
    if needed > free:
        raise ConversionError(
            f"{plan.target} needs {format_bytes(needed)}, {format_bytes(free)} are free there; make room"
            + (" or use --link hard, which writes the gates only" if hard_links and not plan.pieces else "")
        )
    journal = Journal(folder, plan.fingerprint) if resumable else NoJournal()
    (_rewrite_shards if plan.pieces else _place_shards)(plan, folder, journal)
    if plan.new_tensors:
        write_zero_shard(folder / plan.new_shard, plan.new_tensors)
    metadata = {key: value for key, value in plan.source.index_metadata.items() if not key.startswith("total_")}
    total = sum(header.nbytes for header in plan.tensors.values())
    write_index(folder, {**metadata, "total_size": total}, plan.weight_map)
    copy_files(plan.source.folder, plan.copied, folder)
    if plan.generation_config:
        _write_json(folder / "generation_config.json", plan.generation_config)
    write_code_bundle(folder)
    plan.config.save_pretrained(folder)
    return tuple(journal.reused)


def write_index(folder: Path, metadata: dict, weight_map: dict[str, str]) -> None:
    """Write down which tensor lies in which file."""
    _write_json(folder / INDEX_FILE, {"metadata": metadata, "weight_map": weight_map})


def copy_files(source: Path, names: Iterable[Path], folder: Path) -> None:
    """Copy a checkpoint's other files; `names` are relative to its folder."""
    for path in names:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        # Contents only, links resolved: the source may be a cache of links, and saving writes such files in place.
        shutil.copyfile(source / path, folder / path)


def _place_shards(plan: ConversionPlan, folder: Path, journal: Journal) -> None:
    link = plan.options.link
    # On a terminal only; a link takes no time worth showing.
    hidden = True if link in ("hard", "reflink") else None
    with tqdm(total=plan.source_bytes, unit="B", unit_scale=True, desc="Copying", disable=hidden) as bar:
        for shard in plan.shards:
            destination = folder / plan.shard_names[shard.name]
            if not journal.has(destination, partial(hash_file, shard.path)):
                destination.unlink(missing_ok=True)  # of a run that was killed
                if place_copy(shard.path, destination, link):
                    journal.add(destination)
            bar.update(shard.size)


def place_copy(source: Path, destination: Path, link: Link) -> bool:
    """
    Give a file a second place. Whether its bytes were copied, which takes time.

    Raises:
        `ConversionError`: it cannot be linked in the way that was asked for.
    """
    if link == "hard":
        _hard_link(source, destination)
    elif link == "copy" or not _reflink(source, destination, must=link == "reflink"):
        shutil.copyfile(source, destination)
        return True
    return False


def _hard_link(source: Path, destination: Path) -> None:
    try:
        os.link(source, destination)
    except OSError as error:
        raise ConversionError(
            f"{source} cannot be hard-linked into {destination.parent.parent} ({error.strerror}); hard links need one file system "
            "that has them: use --link copy"
        ) from error


# FICLONE of linux/fs.h: let a file share the blocks of another until either is written to.
_FICLONE = 0x40049409


def _can_reflink(plan: ConversionPlan, folder: Path) -> bool:
    probe = folder / ".reflink-probe"
    try:
        return _reflink(plan.shards[0].path, probe, must=False)
    finally:
        probe.unlink(missing_ok=True)


def _reflink(source: Path, destination: Path, must: bool) -> bool:
    """
    Make a copy that shares its blocks with the source. Whether that could be done.

    Raises:
        `ConversionError`: it could not, and must.
    """
    try:
        import fcntl  # not on Windows

        with source.open("rb") as reading, destination.open("wb") as writing:
            fcntl.ioctl(writing.fileno(), _FICLONE, reading.fileno())
        return True
    except (ImportError, OSError) as error:
        if must:
            raise ConversionError(
                f"{source} cannot be reflinked into {destination.parent.parent} ({getattr(error, 'strerror', None) or error}); that "
                "needs one file system that can, such as Btrfs or XFS: use --link auto, which copies where it cannot"
            ) from error
        return False


def _rewrite_shards(plan: ConversionPlan, folder: Path, journal: Journal) -> None:
    """Write each of the source's shards anew: a header, and the bytes of its tensors."""
    total = sum(piece.header.nbytes for piece in plan.pieces)
    with tqdm(total=total, unit="B", unit_scale=True, desc="Writing", disable=None) as bar:
        for shard in plan.shards:
            # Wide formats first keeps every tensor aligned to its own width.
            pieces = [piece for piece in plan.pieces if piece.source in shard.tensors]
            pieces.sort(key=lambda piece: -FLOAT_FORMATS[piece.header.dtype].itemsize)
            header, size = encoded_header({piece.target: piece.header for piece in pieces})
            destination = folder / plan.shard_names[shard.name]
            if journal.has(destination, partial(_hash_to_be, shard, header, pieces)):
                bar.update(size)
                continue
            with destination.open("wb") as file:
                file.write(header)
                if shard.is_pickled:
                    for block in _tensor_blocks(shard, pieces):
                        file.write(block)
                        bar.update(block.nbytes)
                else:
                    file.flush()
                    with shard.path.open("rb") as source:
                        for start, count in _ranges(shard, pieces):
                            _copy_range(source.fileno(), file.fileno(), start, count, bar)
            journal.add(destination)


def _hash_to_be(shard: Shard, header: bytes, pieces: list[Piece]) -> str:
    """What the hash of a rewritten shard has to be."""
    digest = hashlib.sha256(header)
    for block in (_tensor_blocks if shard.is_pickled else _range_blocks)(shard, pieces):
        digest.update(block)
    return digest.hexdigest()


def _tensor_blocks(shard: Shard, pieces: list[Piece]) -> Iterator[np.ndarray]:
    """The bytes of pieces of a pickled shard, where a tensor may be a view of a larger one."""
    with shard.open() as file:
        for piece in pieces:
            for part in piece.read(file):
                yield content_of(part)


def content_of(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor, as a weight file holds them."""
    return tensor.contiguous().view(torch.uint8).reshape(-1).numpy()


def _range_blocks(shard: Shard, pieces: list[Piece]) -> Iterator[bytes]:
    """The bytes of pieces of a safetensors shard."""
    with shard.path.open("rb", buffering=0) as file:
        for start, count in _ranges(shard, pieces):
            file.seek(start)
            while count and (block := file.read(min(count, _CHUNK_BYTES))):
                yield block
                count -= len(block)


def _ranges(shard: Shard, pieces: list[Piece]) -> list[tuple[int, int]]:
    """Which bytes of a safetensors shard are the pieces': (first, how many), in order. They need not go through memory."""
    offsets = data_offsets(shard.path)
    ranges: list[tuple[int, int]] = []
    for piece in pieces:
        source = shard.tensors[piece.source]
        height = source.shape[0] if piece.expert is None else source.shape[1]
        experts = 1 if piece.expert is None else source.shape[0]
        row = source.nbytes // max(1, height * experts)
        first_row = (piece.expert or 0) * height
        ranges += [
            (offsets[piece.source][0] + (first_row + start) * row, (end - start) * row) for start, end in piece.rows
        ]
    return [(start, count) for start, count in ranges if count]


def data_offsets(path: Path) -> dict[str, tuple[int, int]]:
    """At which byte of a safetensors file each tensor begins, and behind which it ends."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {name: tuple(8 + length + offset for offset in entry["data_offsets"]) for name, entry in header.items()}


def _copy_range(source: int, destination: int, start: int, count: int, bar: tqdm) -> None:
    """Copy bytes from one open file to the end of another, in the kernel where it can."""
    while count:
        size = min(count, _CHUNK_BYTES)
        try:
            copied = os.copy_file_range(source, destination, size, offset_src=start)
        except (AttributeError, OSError) as error:  # not on this system, or not between these file systems
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT):
                raise
            copied = os.write(destination, os.pread(source, size, start))
        if copied == 0:
            raise OSError(errno.EIO, "the source became shorter while it was read")
        start, count = start + copied, count - copied
        bar.update(copied)


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
    offsets = data_offsets(path)
    with path.open("r+b") as file:
        for name, tensor in tensors.items():
            begin, end = offsets.get(name, (0, -1))
            content = content_of(tensor.detach().cpu())
            if end - begin != content.nbytes:
                raise ConversionError(f"{path} has no tensor {name} of {content.nbytes} bytes")
            file.seek(begin)
            file.write(content)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
