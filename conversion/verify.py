"""Checks that a converted checkpoint is complete, and that it computes what its source computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from transformers.utils import logging

from ..modeling_gated import GatedAttentionForCausalLM
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
    expected = plan.source.tensors | plan.new_tensors
    if written.tensors != expected:
        different = sorted(
            name
            for name in written.tensors.keys() | expected.keys()
            if written.tensors.get(name) != expected.get(name)
        )
        raise ConversionError(
            f"what was written differs from the plan in {', '.join(different[:5])}: did the source change meanwhile?"
        )
    sizes = {shard.name: shard.size for shard in written.shards}
    for shard in plan.source.shards:
        if sizes[plan.shard_names[shard.name]] != shard.size:
            raise ConversionError(f"{plan.shard_names[shard.name]} is not as long as its source {shard.path}")


def compare_logits(plan: ConversionPlan, folder: Path, batch: int = 2, sequence: int = 48) -> None:
    """
    Load source and result as a user would, in the checkpoint's own dtype, and compare their logits on random tokens.

    Raises:
        `ConversionError`: a tensor is missing or unexpected on loading, or the logits differ.
    """
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(plan.config.vocab_size, (batch, sequence), generator=generator)
    source_class = getattr(transformers, plan.family.architecture)
    with torch.no_grad(), _without_progress_bars():
        # One at a time: twice the checkpoint need not fit in memory.
        expected = source_class.from_pretrained(plan.source.folder, dtype="auto")(input_ids, use_cache=False).logits
        model, info = GatedAttentionForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
        logits = model(input_ids, use_cache=False).logits
    leftovers = {key: sorted(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]}
    if leftovers:
        raise ConversionError(f"the converted checkpoint does not load cleanly: {leftovers}")
    if logits.dtype != expected.dtype:
        raise ConversionError(f"the source loads in {expected.dtype}, the converted checkpoint in {logits.dtype}")
    if not expected.isfinite().any():
        raise ConversionError(
            f"the source's own logits are all NaN or infinite in {expected.dtype}, so comparing them would show nothing; look "
            'at the source, or use --verify headers (verify="headers")'
        )
    # NaN where the source has NaN (float16 overflow, say) is the same function.
    if not torch.allclose(logits, expected, rtol=0, atol=0, equal_nan=True):
        difference = (logits.float() - expected.float()).abs().max().item()
        raise ConversionError(
            f"the converted checkpoint's logits differ from the source's by up to {difference:g}; nothing was kept. Please "
            "report this with the source's config.json"
        )


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
