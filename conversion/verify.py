"""Checks that a converted checkpoint is complete, and that it computes what its source computes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from tqdm import tqdm
from transformers.utils import logging

from ..configuration import GatedAttentionConfig
from ..modeling_gated import GatedAttentionForCausalLM
from .checkpoint import read_checkpoint
from .errors import ConversionError
from .plan import ConversionPlan


# Of the largest logit: what float32 sums of a few thousand terms differ by when they are taken in another order.
REWRITTEN_TOLERANCE = 1e-5


def audit_headers(plan: ConversionPlan, folder: Path) -> None:
    """
    Check the written folder against the plan: every tensor of the source and every gate, with its shape and format, in the
    file that the index names.

    Raises:
        `ConversionError`: they differ.
    """
    written = read_checkpoint(folder)  # refuses what the index and the shards do not agree on
    expected = plan.tensors
    if written.tensors != expected:
        different = sorted(
            name
            for name in written.tensors.keys() | expected.keys()
            if written.tensors.get(name) != expected.get(name)
        )
        raise ConversionError(
            f"what was written differs from the plan in {', '.join(different[:5])}: did the source change meanwhile?"
        )
    if plan.pieces:
        return
    sizes = {shard.name: shard.size for shard in written.shards}
    for shard in plan.source.shards:
        if sizes[plan.shard_names[shard.name]] != shard.size:
            raise ConversionError(f"{plan.shard_names[shard.name]} is not as long as its source {shard.path}")


def compare_numbers(plan: ConversionPlan, folder: Path) -> None:
    """
    Compare every number of a rewritten checkpoint with the source's, and check that each of the source's was taken once.

    Raises:
        `ConversionError`: one differs, is missing or was taken twice.
    """
    taken: dict[str, list[tuple[int | None, int, int]]] = {}
    for piece in plan.pieces:
        taken.setdefault(piece.source, []).extend((piece.expert, *rows) for rows in piece.rows)
    for name, parts in taken.items():
        shape = plan.source.tensors[name].shape
        experts = [None] if parts[0][0] is None else range(shape[0])
        height = shape[0] if parts[0][0] is None else shape[1]
        for expert in experts:
            ends = [0]
            for _, first, end in sorted(part for part in parts if part[0] == expert):
                ends.append(end if first == ends[-1] else -1)
            if ends[-1] != height:
                raise ConversionError(
                    f"not every row of {name} was taken once; nothing was kept. Please report this with the source's config.json"
                )

    weight_map = plan.weight_map
    total = sum(piece.header.nbytes for piece in plan.pieces)
    with ExitStack() as stack, tqdm(total=total, unit="B", unit_scale=True, desc="Comparing", disable=None) as bar:
        written = {
            name: stack.enter_context(safe_open(folder / name, "pt"))
            for name in {weight_map[piece.target] for piece in plan.pieces}
        }
        for shard in plan.source.shards:
            with safe_open(shard.path, "pt") as source:
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


def compare_logits(plan: ConversionPlan, folder: Path, batch: int = 2, sequence: int = 48) -> float | None:
    """
    Load source and result as a user would, and compare their logits on random tokens: bit for bit, in the checkpoint's own
    dtype, unless the family's `tolerance` says why they may differ by rounding: then in float32, to [`REWRITTEN_TOLERANCE`] of
    the largest logit.

    Returns:
        `float`: the largest difference, or `None` if there is no stock class that the source could be run with. The result then
        was loaded and run alone.

    Raises:
        `ConversionError`: a tensor is missing or unexpected on loading, or the logits differ.
    """
    dtype = torch.float32 if plan.family.tolerance else "auto"
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(plan.config.vocab_size, (batch, sequence), generator=generator)
    with torch.no_grad(), _without_progress_bars():
        # One at a time: twice the checkpoint need not fit in memory.
        expected = _source_logits(plan, input_ids, dtype)
        model, info = GatedAttentionForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
        logits = model(input_ids, use_cache=False).logits
    leftovers = {key: sorted(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]}
    if leftovers:
        raise ConversionError(f"the converted checkpoint does not load cleanly: {leftovers}")
    if expected is None:
        return None
    if logits.dtype != expected.dtype:
        raise ConversionError(f"the source loads in {expected.dtype}, the converted checkpoint in {logits.dtype}")
    if not expected.isfinite().any():
        raise ConversionError(
            f"the source's own logits are all NaN or infinite in {expected.dtype}, so comparing them would show nothing; look "
            'at the source, or use --verify headers (verify="headers")'
        )
    # NaN where the source has NaN (float16 overflow, say) is the same function.
    tolerance = REWRITTEN_TOLERANCE * expected.abs().nan_to_num(0, 0, 0).max().item() if plan.family.tolerance else 0
    difference = (logits.float() - expected.float()).abs().nan_to_num(0, 0, 0).max().item()
    if not torch.allclose(logits, expected, rtol=0, atol=tolerance, equal_nan=True):
        raise ConversionError(
            f"the converted checkpoint's logits differ from the source's by up to {difference:g}; nothing was kept. Please "
            "report this with the source's config.json"
        )
    return difference


def _source_logits(plan: ConversionPlan, input_ids: torch.Tensor, dtype: torch.dtype | str) -> torch.Tensor | None:
    if plan.family.has_stock_class:
        model = getattr(transformers, plan.family.architecture).from_pretrained(plan.source.folder, dtype=dtype)
    elif plan.pieces:
        return None
    else:
        # Tensors that stay as they are make up the same model without the gates.
        fields = {name: value for name, value in plan.config.to_dict().items() if not name.startswith("gate_")}
        config = GatedAttentionConfig(**fields, gate_positions=[])
        model = GatedAttentionForCausalLM.from_pretrained(plan.source.folder, config=config, dtype=dtype)
    return model(input_ids, use_cache=False).logits


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
