"""Decides what a conversion will write, before anything is written."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from ..configuration import GatedAttentionConfig
from ..modeling_gated.bundle import bundled_files
from .checkpoint import INDEX_FILE, Checkpoint, TensorHeader, read_checkpoint
from .errors import ConversionError
from .families import Family
from .gated_config import (
    IDENTITY_SCALE,
    audit_names_and_shapes,
    family_of,
    gated_config,
    generation_settings,
    new_headers,
    new_names,
)
from .places import check_places, other_files


Granularity = Literal["headwise", "elementwise"]
Link = Literal["copy", "hard"]
Verify = Literal["headers", "logits"]


@dataclass(frozen=True)
class ConversionOptions:
    """
    How a checkpoint is converted; one object serves the function and the command line.

    Attributes:
        granularity: `"headwise"` (one gate a head) or `"elementwise"` (one gate a channel of a head).
        gate_bias: Whether the gates get a bias, zero at first.
        link: `"copy"` copies the source's shards; `"hard"` links them, which costs no space and needs the same file system.
        verify: `"headers"` audits names, shapes and formats; `"logits"` also loads both models and compares logits.
        overwrite: Whether a model folder at the target is replaced, as a whole.
    """

    granularity: Granularity = "headwise"
    gate_bias: bool = False
    link: Link = "copy"
    verify: Verify = "logits"
    overwrite: bool = False

    def __post_init__(self):
        for name, kind in (("granularity", Granularity), ("link", Link), ("verify", Verify)):
            if getattr(self, name) not in get_args(kind):
                raise ConversionError(f"`{name}` must be one of {get_args(kind)}, got {getattr(self, name)!r}")
        for name in ("gate_bias", "overwrite"):
            if not isinstance(getattr(self, name), bool):
                raise ConversionError(f"`{name}` must be True or False, got {getattr(self, name)!r}")


def options_from(kind: type, options, fields: dict):
    """The options object that was given, or one made of keywords; a function takes either, not both."""
    if options is not None and fields:
        raise TypeError(f"give `options` or its fields as keywords, not both: got options and {sorted(fields)}")
    return options or kind(**fields)


@dataclass(frozen=True)
class ConversionPlan:
    """
    What a conversion writes.

    Attributes:
        source: The checkpoint as it was read.
        family: The source's family.
        target: Folder to make.
        options: The options.
        config: The gated model's config.
        shard_names: The source's shard name and the name it gets.
        new_shard: Name of the new shard.
        new_tensors: Name and header of each new tensor, in file order; all zero: the gates, and biases that a sink transfer
            fills.
        copied: The source's other files to copy, as paths relative to the folder.
        generation_config: What to write as generation_config.json, if the source keeps such settings in its config.json.
        notes: What the user should know.
    """

    source: Checkpoint
    family: Family
    target: Path
    options: ConversionOptions
    config: GatedAttentionConfig
    shard_names: dict[str, str]
    new_shard: str
    new_tensors: dict[str, TensorHeader]
    copied: tuple[Path, ...]
    generation_config: dict | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def weight_map(self) -> dict[str, str]:
        """Tensor name to file, for the new index."""
        placed = {name: self.shard_names[shard.name] for shard in self.source.shards for name in shard.tensors}
        return dict(sorted({**placed, **dict.fromkeys(self.new_tensors, self.new_shard)}.items()))

    @property
    def new_bytes(self) -> int:
        return sum(header.nbytes for header in self.new_tensors.values())

    @property
    def source_bytes(self) -> int:
        return sum(shard.size for shard in self.source.shards)

    @property
    def bytes_to_write(self) -> int:
        """Bytes that reach the disk: new and copied files, without those that are linked."""
        other = sum((self.source.folder / path).stat().st_size for path in self.copied)
        code = sum(len(content.encode()) for content in bundled_files().values())
        return self.new_bytes + other + code + (self.source_bytes if self.options.link == "copy" else 0)

    def describe(self) -> str:
        """The plan as text, for `--dry-run` and for the log."""
        heads, layers = self.config.num_attention_heads, self.config.num_hidden_layers
        verb = "copy" if self.options.link == "copy" else "hard-link"
        lines = [
            f"source   {self.source.folder} ({self.family.architecture}, {len(self.source.tensors)} tensors, "
            f"{format_bytes(self.source_bytes)})",
            f"target   {self.target} ({self.config.architectures[0]})",
            f"gates    {self.options.granularity}, {layers} layers x {heads} heads, {len(self.new_tensors)} tensors, "
            f"{format_bytes(self.new_bytes)}, all zero with gate_scale {IDENTITY_SCALE:g}: the gate is exactly 1",
        ]
        lines += [f"{verb:<9}{old} -> {new}" for old, new in self.shard_names.items()]
        lines += [f"new      {self.new_shard}, {INDEX_FILE}, config.json, {', '.join(bundled_files())}"]
        if self.generation_config:
            lines.append("new      generation_config.json, with the generation settings of the source's config.json")
        if self.copied:
            lines.append(f"copy     {', '.join(str(path) for path in self.copied)}")
        lines.append(
            f"writes   {format_bytes(self.bytes_to_write)}, {format_bytes(free_bytes(self.target))} free at the target"
        )
        lines += [f"note     {note}" for note in self.notes]
        return "\n".join(lines)


def format_bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def free_bytes(target: Path) -> int:
    """Bytes free on the file system where `target` will be made."""
    folder = target.parent
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


@dataclass(frozen=True)
class Reading:
    """
    A source, read and found fit for conversion.

    Attributes:
        checkpoint: What the folder holds.
        family: Its family.
        config: Config of its gated twin.
        new_tensors: As in [`ConversionPlan`].
    """

    checkpoint: Checkpoint
    family: Family
    config: GatedAttentionConfig
    new_tensors: dict[str, TensorHeader]


def read_source(
    checkpoint: Checkpoint,
    granularity: str,
    gate_bias: bool,
    biases: tuple[str, ...] = (),
    gate_scale: float = IDENTITY_SCALE,
) -> Reading:
    """
    Check that a source can be converted, from its config and headers; no tensor is read.

    Args:
        checkpoint: The source.
        granularity, gate_bias, gate_scale: Of the gates.
        biases: `"v_bias"`, `"o_bias"`: biases that the result gets, if the source has none.

    Raises:
        `ConversionError`: it cannot be converted.
    """
    family = family_of(checkpoint)
    config, shapes = gated_config(checkpoint, family, granularity, gate_bias, gate_scale, biases)
    new = new_names(checkpoint, family, shapes, biases)
    audit_names_and_shapes(checkpoint, config, shapes, new)
    return Reading(checkpoint, family, config, new_headers(checkpoint, shapes, new))


def plan_conversion(source: Path, target: Path, options: ConversionOptions) -> ConversionPlan:
    """
    Read the source's headers and decide what to write.

    Raises:
        `ConversionError`: the source cannot be converted, or the target is in the way.
    """
    check_places(source, target, options.overwrite)
    return plan_of(read_source(read_checkpoint(source), options.granularity, options.gate_bias), target, options)


def plan_of(reading: Reading, target: Path, options: ConversionOptions) -> ConversionPlan:
    """What to write of a source that was read."""
    checkpoint = reading.checkpoint
    count = len(checkpoint.shards) + 1
    shard_names = {
        shard.name: f"model-{number:05d}-of-{count:05d}.safetensors"
        for number, shard in enumerate(checkpoint.shards, start=1)
    }
    copied, notes = other_files(checkpoint)
    return ConversionPlan(
        source=checkpoint,
        family=reading.family,
        target=target,
        options=options,
        config=reading.config,
        shard_names=shard_names,
        new_shard=f"model-{count:05d}-of-{count:05d}.safetensors",
        new_tensors=reading.new_tensors,
        copied=copied,
        generation_config=generation_settings(checkpoint),
        notes=notes,
    )
