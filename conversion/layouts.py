"""Where the numbers of a foreign layout go: each tensor of the result is made of rows of one tensor of the source."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch

from ..modeling_gated.expert_tensors import EXPERT_TENSORS, single_experts
from .checkpoint import Checkpoint, TensorHeader, is_ignored_on_load
from .errors import ConversionError
from .families import Family


Rows = tuple[tuple[int, int], ...]

# What is held at a time while a tensor is copied.
_CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Piece:
    """
    A tensor of the result.

    Attributes:
        target: Its name.
        source: The tensor that it is taken from.
        header: Its format and shape.
        expert: Index of the expert, where the source stacks all of them.
        rows: The rows of the source, or of the expert in it, that it is made of: (first, behind the last), in order.
    """

    target: str
    source: str
    header: TensorHeader
    expert: int | None
    rows: Rows

    def read(self, file) -> Iterator[torch.Tensor]:
        """Its rows from an open weight file ([`Shard.open`]), a part at a time."""
        view = file.get_slice(self.source)
        step = max(1, _CHUNK_BYTES // max(1, self.header.nbytes // max(1, self.header.shape[0])))
        for first, end in self.rows:
            for start in range(first, end, step):
                part = slice(start, min(start + step, end))
                yield view[part] if self.expert is None else view[self.expert, part]


def query_and_gate_rows(
    layout: Literal["q_proj_per_head", "q_proj_per_group"],
    num_attention_heads: int,
    num_key_value_heads: int,
    head_dim: int,
    granularity: Literal["headwise", "elementwise"],
) -> tuple[Rows, Rows]:
    """
    Which rows of a fused `q_proj` are the queries', and which the gates'.

    The two layouts agree only where each query head has its own key head: with grouped queries `q_proj_per_group` has all
    queries of a group before all its gates.
    """
    blocks = num_attention_heads if layout == "q_proj_per_head" else num_key_value_heads
    heads = num_attention_heads // blocks
    query, gate = heads * head_dim, heads * (head_dim if granularity == "elementwise" else 1)
    starts = [block * (query + gate) for block in range(blocks)]
    return (
        tuple((start, start + query) for start in starts),
        tuple((start + query, start + query + gate) for start in starts),
    )


def one_behind_the_other(widths: Iterable[int]) -> list[Rows]:
    """The rows of projections of these widths that make up a fused one."""
    ends = list(accumulate(widths))
    return [((start, end),) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def rows_of_fused(family: Family, name: str, config) -> int | None:
    """How many rows a tensor must have for its rows to be told apart, if it is one of the family's fused projections."""
    for fused, parts in family.fused.items():
        if name.endswith(f".{fused}.weight"):
            return sum(_width(part, config) for part in parts)
    return None


def fused_rows(config, granularity: str | None) -> int:
    """Number of rows of a `q_proj` that holds the gates too."""
    gates = {None: 0, "headwise": 1, "elementwise": config.head_dim}[granularity]
    return config.num_attention_heads * (config.head_dim + gates)


def renamed(name: str, family: Family) -> str:
    for theirs, ours in (*family.aliases, *family.renames):
        name = name.replace(theirs, ours)
    return name


def is_dropped(name: str, family: Family) -> bool:
    """Whether a tensor has no place in the result: the stock class passes over it too."""
    return is_ignored_on_load(name) or name.startswith(family.ignored)


def pieces_of(checkpoint: Checkpoint, family: Family, config) -> tuple[Piece, ...]:
    """
    Every tensor of the result, in the order of the source's files; nothing if the source's tensors can stay as they are.

    Args:
        checkpoint, family: The source.
        config ([`GatedAttentionConfig`]): Of the result.
    """
    shared = {name for shard in checkpoint.shards for name in shard.shared if config.tie_word_embeddings}
    pieces = tuple(
        piece
        for name, header in checkpoint.tensors.items()
        if not (name in shared and renamed(name, family) == "lm_head.weight")
        for piece in _pieces(name, header, family, config)
    )
    _refuse_doubles(checkpoint, pieces)
    _check_coverage(checkpoint, pieces)
    unchanged = all(
        piece.target == piece.source and piece.header == checkpoint.tensors[piece.source] for piece in pieces
    )
    stay = unchanged and family.gates is None and not checkpoint.is_pickled
    return () if stay else pieces


def _refuse_doubles(checkpoint: Checkpoint, pieces: tuple[Piece, ...]) -> None:
    sources: dict[str, str] = {}
    for piece in pieces:
        first = sources.setdefault(piece.target, piece.source)
        if first != piece.source:
            raise ConversionError(
                f"{first} and {piece.source} in {checkpoint.folder} would both be {piece.target}; one of the two is left over from "
                "another checkpoint: remove it"
            )


def _check_coverage(checkpoint: Checkpoint, pieces: tuple[Piece, ...]) -> None:
    """Every row of a tensor that is taken apart goes somewhere, and to one place."""
    taken: dict[tuple[str, int | None], list[tuple[int, int]]] = {}
    for piece in pieces:
        taken.setdefault((piece.source, piece.expert), []).extend(piece.rows)
    for (name, expert), rows in taken.items():
        height = checkpoint.tensors[name].shape[0 if expert is None else 1]
        ends = [0]
        for first, end in sorted(rows):
            ends.append(end if first == ends[-1] else -1)
        if ends[-1] != height:
            raise ConversionError(
                f"{name} in {checkpoint.folder} has {height} rows, and {ends[-1]} have a place. Fetch it again"
            )


def _pieces(name: str, header: TensorHeader, family: Family, config) -> Iterable[Piece]:
    if is_dropped(name, family):
        return ()
    target = renamed(name, family)
    layer, _, projection = target.rpartition(".self_attn.")
    if layer and projection in ("q_proj.weight", "q_proj.bias") and family.gates_in_q_proj:
        rows = query_and_gate_rows(
            family.gates,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.gate_granularity,
        )
        names = (target, target.replace("q_proj", "g_proj"))
        return [_piece(name, header, *pair) for pair in zip(names, rows, strict=True)]
    for fused, parts in family.fused.items():
        if target.endswith(f".{fused}.weight"):
            rows = one_behind_the_other(_width(part, config) for part in parts)
            prefix = target.removesuffix(f"{fused.rpartition('.')[2]}.weight")
            return [_piece(name, header, f"{prefix}{part}.weight", of) for part, of in zip(parts, rows, strict=True)]
    prefix, _, stacked = target.rpartition(".mlp.experts.")
    if prefix and stacked in EXPERT_TENSORS and len(header.shape) == 3:
        return [
            _piece(name, header, f"{prefix}.mlp.experts.{single}", (rows,), expert)
            for single, expert, rows in single_experts(stacked, *header.shape[:2])
        ]
    return [_piece(name, header, target, ((0, header.shape[0]),))]


def _width(projection: str, config) -> int:
    """Number of rows of one of our projections."""
    if projection == "q_proj":
        return config.num_attention_heads * config.head_dim
    if projection in ("k_proj", "v_proj"):
        return config.num_key_value_heads * config.head_dim
    return config.intermediate_size


def _piece(source: str, header: TensorHeader, target: str, rows: Rows, expert: int | None = None) -> Piece:
    count = sum(end - start for start, end in rows)
    inner = header.shape[1:] if expert is None else header.shape[2:]
    return Piece(target, source, TensorHeader(header.dtype, (count, *inner)), expert, rows)
