"""Decides what a conversion will write, before anything is written."""

import hashlib
import json
import shutil
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

from .._version import __version__
from ..configuration import GatedAttentionConfig
from ..modeling_gated.bundle import bundled_files
from .checkpoint import INDEX_FILE, Checkpoint, Shard, TensorHeader, read_checkpoint, shard_name
from .errors import ConversionError
from .families import Family
from .gate_starts import GATE_STARTS, IDENTITY_SCALE, Initialisation
from .gated_config import (
    audit_names_and_shapes,
    check_layout,
    family_of,
    gated_config,
    generation_settings,
    new_headers,
    new_names,
)
from .layouts import Piece, is_dropped, pieces_of
from .places import check_places, other_files


Granularity = Literal["headwise", "elementwise"]
Link = Literal["auto", "copy", "reflink", "hard"]
Verify = Literal["none", "headers", "logits"]


@dataclass(frozen=True)
class ConversionOptions:
    """
    How a checkpoint is converted; one object serves the function and the command line.

    Attributes:
        granularity: `"headwise"` (one gate a head) or `"elementwise"` (one gate a channel of a head). By default headwise; a source
            that has gates of its own keeps them, and takes no other granularity.
        gate_bias: Whether the gates get a bias, zero at first. Not for a source that has gates of its own.
        init: How the gates begin: a key of [`GATE_STARTS`]. Only `"identity"` leaves the function as it was.
        init_std: Standard deviation of the weights with `"normal"`.
        init_bias: The bias with `"open"`.
        seed: For the weights with `"normal"`.
        link: How the source's shards get into the result, if its tensors can stay as they are. `"copy"` copies them. `"reflink"`
            makes copies that share their blocks until one is written to, on file systems that can (Btrfs, XFS): no space, no time.
            `"auto"` is `"reflink"` where that can be, else `"copy"`. `"hard"` makes hard links: no space, no time, the same file.
        verify: `"none"` checks nothing. `"headers"` audits names, shapes and formats, and where tensors were rewritten compares
            every number with the source's. `"logits"` also runs both models, whole or layer by layer, and compares their outputs.
        layer_by_layer: Whether `"logits"` loads one layer of each model at a time. By default where the models are large for the
            memory that is free.
        overwrite: Whether a model folder at the target is replaced, as a whole.
    """

    granularity: Granularity | None = None
    gate_bias: bool = False
    init: Initialisation = "identity"
    init_std: float = 0.02
    init_bias: float = 4.0
    seed: int = 0
    link: Link = "auto"
    verify: Verify = "logits"
    layer_by_layer: bool | None = None
    overwrite: bool = False

    def __post_init__(self):
        kinds = (("granularity", Granularity), ("init", Initialisation), ("link", Link), ("verify", Verify))
        for name, kind in kinds:
            is_left_out = name == "granularity" and self.granularity is None
            if getattr(self, name) not in get_args(kind) and not is_left_out:
                raise ConversionError(f"`{name}` must be one of {get_args(kind)}, got {getattr(self, name)!r}")
        for name in ("gate_bias", "overwrite"):
            if not isinstance(getattr(self, name), bool):
                raise ConversionError(f"`{name}` must be True or False, got {getattr(self, name)!r}")
        if self.layer_by_layer not in (None, True, False):
            raise ConversionError(f"`layer_by_layer` must be True, False or None, got {self.layer_by_layer!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise ConversionError(f"`seed` must be an integer, 0 or more and below 2**63, got {self.seed!r}")
        for name, of in (("init_std", "normal"), ("seed", "normal"), ("init_bias", "open")):
            default = next(field.default for field in fields(self) if field.name == name)
            if self.init != of and getattr(self, name) != default:
                raise ConversionError(
                    f"`{name}` must be left out with init {self.init!r}: it is for {of!r}; got {getattr(self, name)!r}"
                )
        if not (isinstance(self.init_std, (int, float)) and 0 <= self.init_std < float("inf")):
            raise ConversionError(f"`init_std` must be a finite number, 0 or more, got {self.init_std!r}")
        if not (isinstance(self.init_bias, (int, float)) and abs(self.init_bias) <= 1000):
            raise ConversionError(f"`init_bias` must be a number from -1000 to 1000, got {self.init_bias!r}")

    @property
    def has_gate_bias(self) -> bool:
        """Whether new gates have a bias: asked for, or needed for how they begin."""
        return self.gate_bias or GATE_STARTS[self.init].bias


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
        pieces: What each tensor of the result is made of, where the source's tensors have to be rewritten; else empty.
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
    pieces: tuple[Piece, ...] = ()
    generation_config: dict | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def weight_map(self) -> dict[str, str]:
        """Tensor name to file, for the new index."""
        placed = {name: self.shard_names[shard.name] for shard in self.shards for name in shard.tensors}
        if self.pieces:
            placed = {piece.target: placed[piece.source] for piece in self.pieces}
        return dict(sorted({**placed, **dict.fromkeys(self.new_tensors, self.new_shard)}.items()))

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The source's files that have a counterpart in the result."""
        return tuple(shard for shard in self.source.shards if shard.name in self.shard_names)

    @property
    def weight_files(self) -> set[str]:
        """Names of the result's weight files."""
        return {*self.shard_names.values(), *([self.new_shard] if self.new_tensors else [])}

    @property
    def tensors(self) -> dict[str, TensorHeader]:
        """Every tensor of the result."""
        if self.pieces:
            return {piece.target: piece.header for piece in self.pieces} | self.new_tensors
        return self.source.tensors | self.new_tensors

    @property
    def new_bytes(self) -> int:
        return sum(header.nbytes for header in self.new_tensors.values())

    @property
    def source_bytes(self) -> int:
        return sum(shard.size for shard in self.source.shards)

    @property
    def bytes_to_write(self) -> int:
        """Bytes that reach the disk, about: new and copied files, without those that are linked."""
        other = sum((self.source.folder / path).stat().st_size for path in self.copied)
        code = sum(len(content.encode()) for content in bundled_files().values())
        # With "auto" it may be less, which only the file system knows.
        shards = self.source_bytes if self.options.link in ("auto", "copy") else 0
        if self.pieces:
            # Each name stands in a header and in the index.
            shards = sum(piece.header.nbytes + 2 * len(piece.target) + 128 for piece in self.pieces)
        return self.new_bytes + other + code + shards

    @cached_property
    def fingerprint(self) -> str:
        """Says what is being made, and from what: a run that was killed goes on only with the very same."""
        source = [(shard.name, shard.size, shard.path.stat().st_mtime_ns) for shard in self.source.shards]
        said = [
            __version__,
            str(self.source.folder.resolve()),
            source,
            self.source.config,
            self.config.to_dict(),
            self.shard_names,
            self.options.link,
            [(piece.target, piece.source, piece.expert, piece.rows) for piece in self.pieces],
        ]
        return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()

    @property
    def gates(self) -> str:
        """Where the gates come from, and what they do to the function."""
        if self.family.gates is not None:
            return "the source's own" + ("" if self.family.gates == "g_proj" else ", from its q_proj")
        effect = GATE_STARTS[self.options.init].effect
        return f"{len(self.new_tensors)} tensors, {format_bytes(self.new_bytes)}; {effect}"

    def describe(self) -> str:
        """The plan as text, for `--dry-run` and for the log."""
        heads, layers = self.config.num_attention_heads, self.config.num_hidden_layers
        verbs = {"auto": "copy", "copy": "copy", "reflink": "reflink", "hard": "hard-link"}
        verb = "rewrite" if self.pieces else verbs[self.options.link]
        lines = [
            f"source   {self.source.folder} ({self.family.architecture}, {len(self.source.tensors)} tensors, "
            f"{format_bytes(self.source_bytes)})",
            f"target   {self.target} ({self.config.architectures[0]})",
            f"gates    {self.config.gate_granularity}, {layers} layers x {heads} heads, {self.gates}",
        ]
        lines += [f"{verb:<8} {old} -> {new}" for old, new in self.shard_names.items()]
        lines.append(
            f"new      {self.new_shard + ', ' if self.new_tensors else ''}{INDEX_FILE}, config.json, and the model's code in "
            f"{len(bundled_files())} .py files"
        )
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
        new_tensors, pieces: As in [`ConversionPlan`].
    """

    checkpoint: Checkpoint
    family: Family
    config: GatedAttentionConfig
    new_tensors: dict[str, TensorHeader]
    pieces: tuple[Piece, ...] = ()


def read_source(
    checkpoint: Checkpoint,
    granularity: str | None,
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
    _refuse_other_gates(checkpoint, family, config, granularity, gate_bias)
    check_layout(checkpoint, family, config)
    pieces = pieces_of(checkpoint, family, config)
    new = new_names(checkpoint, family, shapes, biases)
    audit_names_and_shapes(checkpoint, family, config, shapes, new, pieces)
    return Reading(checkpoint, family, config, new_headers(checkpoint, shapes, new, pieces), pieces)


def _refuse_other_gates(
    checkpoint: Checkpoint, family: Family, config: GatedAttentionConfig, granularity: str | None, gate_bias: bool
) -> None:
    """A source with gates is read, not given others."""
    if family.gates is None:
        return
    if granularity not in (None, config.gate_granularity):
        raise ConversionError(
            f"`granularity` must be left out: {checkpoint.folder} has {config.gate_granularity} gates of its own; got "
            f"{granularity!r}"
        )
    if gate_bias and not config.gate_bias:
        raise ConversionError(
            f"`gate_bias` must be left out: {checkpoint.folder} has gates of its own, without a bias; got True"
        )


def plan_conversion(source: Path, target: Path, options: ConversionOptions) -> ConversionPlan:
    """
    Read the source's headers and decide what to write.

    Raises:
        `ConversionError`: the source cannot be converted, or the target is in the way.
    """
    check_places(source, target, options.overwrite)
    checkpoint = read_checkpoint(source, allow_pickled=True)
    scale = GATE_STARTS[options.init].gate_scale
    reading = read_source(checkpoint, options.granularity, options.has_gate_bias, gate_scale=scale)
    if reading.family.gates is not None and options.init != "identity":
        raise ConversionError(
            f"`init` must be left out: {checkpoint.folder} has gates of its own; got {options.init!r}"
        )
    return plan_of(reading, target, options)


def plan_of(reading: Reading, target: Path, options: ConversionOptions) -> ConversionPlan:
    """What to write of a source that was read."""
    checkpoint = reading.checkpoint
    if reading.pieces and options.link in ("hard", "reflink"):
        what = "pickled" if checkpoint.is_pickled else reading.family.model_type
        raise ConversionError(
            f'`link` must be "auto" or "copy" (--link copy) for {checkpoint.folder}: the tensors of this {what} checkpoint have to be '
            f"rewritten; got {options.link!r}"
        )
    used = {piece.source for piece in reading.pieces} or checkpoint.tensors.keys()
    kept = [shard for shard in checkpoint.shards if not used.isdisjoint(shard.tensors)]
    count = len(kept) + bool(reading.new_tensors)
    shard_names = {shard.name: shard_name(number, count) for number, shard in enumerate(kept, start=1)}
    copied, notes = other_files(checkpoint)
    ignored = [name for name in checkpoint.tensors if is_dropped(name, reading.family)]
    if ignored:
        what = "are left out" if reading.pieces else "stay in the shards"
        notes = (*notes, f"{len(ignored)} tensors that loaders pass over {what} ({ignored[0]}, ...)")
    for name in reading.family.dropped_in_training:
        if checkpoint.config.get(name):
            notes = (
                *notes,
                f"{name} {checkpoint.config[name]} is left out: it changes training only, and is not done here",
            )
    return ConversionPlan(
        source=checkpoint,
        family=reading.family,
        target=target,
        options=options,
        config=reading.config,
        shard_names=shard_names,
        new_shard=shard_name(count, count),
        new_tensors=reading.new_tensors,
        pieces=reading.pieces,
        copied=copied,
        generation_config=generation_settings(checkpoint),
        notes=notes,
    )
