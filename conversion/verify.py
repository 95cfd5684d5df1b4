"""Checks that a converted checkpoint holds what was planned, number by number where it was rewritten."""

from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from tqdm import tqdm

from .checkpoint import read_checkpoint
from .errors import ConversionError
from .plan import ConversionPlan


def audit_headers(plan: ConversionPlan, folder: Path) -> None:
    """
    Check the written folder against the plan: every tensor of the source and every gate, with its shape and format, in the
    file that the index names.

    Raises:
        `ConversionError`: they differ.
    """
    written = read_checkpoint(folder)  # refuses what the index and the shards do not agree on
    found = {shard.name for shard in written.shards}
    if found != plan.weight_files:
        raise ConversionError(
            f"{folder} has the weight files {', '.join(sorted(found)[:3])}, a conversion would have made "
            f"{', '.join(sorted(plan.weight_files)[:3])}: it was saved again since, or has another number of files"
        )
    expected = plan.tensors
    if written.tensors != expected:
        different = sorted(
            name
            for name in written.tensors.keys() | expected.keys()
            if written.tensors.get(name) != expected.get(name)
        )
        raise ConversionError(
            f"{folder} differs from what a conversion gives in {', '.join(different[:5])}: the source or the result was changed"
        )
    if plan.pieces:
        return
    sizes = {shard.name: shard.size for shard in written.shards}
    for shard in plan.shards:
        if sizes[plan.shard_names[shard.name]] != shard.size:
            raise ConversionError(f"{plan.shard_names[shard.name]} is not as long as its source {shard.path}")


def compare_numbers(plan: ConversionPlan, folder: Path) -> None:
    """
    Compare every number of a rewritten checkpoint with the one of the source that it was made of.

    Raises:
        `ConversionError`: one differs.
    """
    weight_map = plan.weight_map
    total = sum(piece.header.nbytes for piece in plan.pieces)
    with ExitStack() as stack, tqdm(total=total, unit="B", unit_scale=True, desc="Comparing", disable=None) as bar:
        written = {
            name: stack.enter_context(safe_open(folder / name, "pt"))
            for name in {weight_map[piece.target] for piece in plan.pieces}
        }
        for shard in plan.shards:
            with shard.open() as source:
                for piece in plan.pieces:
                    if piece.source not in shard.tensors:
                        continue
                    view, row = written[weight_map[piece.target]].get_slice(piece.target), 0
                    for part in piece.read(source):
                        found = view[row : row + part.shape[0]]
                        # As bytes: NaN too has to be the same one.
                        if not torch.equal(found.contiguous().view(torch.uint8), part.contiguous().view(torch.uint8)):
                            raise ConversionError(
                                f"{piece.target} as written differs from {piece.source} of the source; nothing was kept. Did the "
                                "source change meanwhile?"
                            )
                        row += part.shape[0]
                        bar.update(part.nbytes)
