"""Runs a source and its gated twin on the same tokens and compares what comes out."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil
import torch
from tqdm import tqdm
from transformers import AutoConfig, PreTrainedModel

from ..configuration import GatedAttentionConfig
from ..modeling_gated import GatedAttentionForCausalLM
from .checkpoint import read_checkpoint
from .comparison import Comparison, difference, layer_difference
from .errors import ConversionError
from .layouts import is_dropped
from .loading import (
    Layers,
    dtype_to_compare_in,
    errors_of_the_source,
    load_result,
    load_source,
    prepare_result,
    quiet,
    source_class,
    without_gates,
)
from .plan import ConversionPlan


# Whole models are loaded where one takes at most this part of the memory that is free; what is compared takes as much again.
_WHOLE_MODEL_SHARE = 1 / 3

# Windows longer than this are not looked past: one layer's attention over them takes minutes.
LONGEST_WINDOW = 8192


def compare_models(plan: ConversionPlan, folder: Path, layer_by_layer: bool | None = None) -> Comparison | None:
    """
    Run source and result on random tokens, of two lengths and past a sliding window, and compare what each layer (and in whole
    models the head) gives, bit for bit, in the checkpoint's own dtype (or the family's `compared_in`). Projections that the
    conversion took apart are put together again for this ([`rejoin_projections`]): apart they may round otherwise.

    Args:
        plan: What was converted.
        folder: Where the result is.
        layer_by_layer: Whether one layer of each is loaded at a time. By default where the models are large for the memory
            that is free.

    Returns:
        [`Comparison`], or `None` if there is no class that the source could be run with.

    Raises:
        `ConversionError`: source or result does not load cleanly, the source cannot be run, or outputs differ.
    """
    if layer_by_layer is None:
        layer_by_layer = not fits_in_memory(_bytes_in_memory(plan))
    if plan.pieces and not plan.family.has_stock_class:
        if not layer_by_layer:
            _run_alone(plan, folder)
        return None
    with torch.no_grad(), quiet():
        return (_compare_layers if layer_by_layer else _compare_whole)(plan, folder)


def fits_in_memory(size: int) -> bool:
    """Whether a model of so many bytes is loaded whole."""
    return size <= _WHOLE_MODEL_SHARE * free_memory()


def free_memory() -> int:
    """Bytes of memory that are free, for this process where it has a limit of its own."""
    free = psutil.virtual_memory().available
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return free if limit == "max" else min(free, max(0, int(limit) - used))
    except (OSError, ValueError):
        return free


def _bytes_in_memory(plan: ConversionPlan) -> int:
    if plan.family.compared_in is None:
        return sum(header.nbytes for header in plan.source.tensors.values())
    width = dtype_to_compare_in(plan).itemsize
    return sum(header.numel * width for header in plan.source.tensors.values())


def batches_for(config: GatedAttentionConfig) -> list[torch.Tensor]:
    """Random tokens: a short batch, a single longer text, and one that reaches past the window."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, 48), (1, 7)]
    window = config.sliding_window
    if "sliding_attention" in config.layer_types and 48 <= window + 8 <= LONGEST_WINDOW:
        sizes.append((1, window + 8))
    return [torch.randint(config.vocab_size, size, generator=generator) for size in sizes]


def _window_seen(plan: ConversionPlan, batches: list[torch.Tensor]) -> bool | None:
    if "sliding_attention" not in plan.config.layer_types:
        return None
    return max(batch.shape[1] for batch in batches) > plan.config.sliding_window


def _found(plan: ConversionPlan, batches: list[torch.Tensor], **fields) -> Comparison:
    return Comparison(
        **fields,
        lengths=tuple(batch.shape[1] for batch in batches),
        window_seen=_window_seen(plan, batches),
        rejoined=plan.family.takes_projections_apart,
        gates_set_aside=plan.options.init != "identity",
    )


def _compare_whole(plan: ConversionPlan, folder: Path) -> Comparison:
    batches = batches_for(plan.config)
    # One at a time: twice the checkpoint need not fit in memory.
    with errors_of_the_source(plan):
        expected = _run(load_source(plan), batches)
    model = load_result(plan, folder)
    prepare_result(model, plan)
    found = _run(model, batches)
    layers = []
    # The last entry is what the final norm made of the last layer's output.
    for layer in range(plan.config.num_hidden_layers):
        states = [[outputs.hidden_states[layer + 1] for outputs in run] for run in (found, expected)]
        layers.append(layer_difference(layer, *states))
    logits = max(
        difference("logits", ours.logits, theirs.logits)[0] for ours, theirs in zip(found, expected, strict=True)
    )
    return _found(
        plan,
        batches,
        method="whole models",
        dtype=str(expected[0].logits.dtype).removeprefix("torch."),
        layers=tuple(layers),
        logits=logits,
    )


def _run(model: PreTrainedModel, batches: list[torch.Tensor]) -> list:
    return [model(batch, use_cache=False, output_hidden_states=True) for batch in batches]


def _run_alone(plan: ConversionPlan, folder: Path) -> None:
    with torch.no_grad(), quiet():
        logits = load_result(plan, folder)(batches_for(plan.config)[0], use_cache=False).logits
    if not logits.isfinite().all():
        raise ConversionError(f"some of the converted checkpoint's logits are NaN or infinite in {logits.dtype}")


def _compare_layers(plan: ConversionPlan, folder: Path) -> Comparison:
    batches = batches_for(plan.config)
    dtype = dtype_to_compare_in(plan)
    dtype = plan.config.dtype if dtype == "auto" else dtype
    config = AutoConfig.from_pretrained(folder)
    stock = plan.family.has_stock_class
    is_left_out = partial(is_dropped, family=plan.family)
    layers = []
    with ExitStack() as stack:
        with errors_of_the_source(plan):
            source_config = AutoConfig.from_pretrained(plan.source.folder) if stock else without_gates(plan.config)
            source = Layers(plan.source, is_left_out, source_class(plan), source_config, dtype, stack)
            states = [source.embed(batch) for batch in batches]
        result = Layers(read_checkpoint(folder), is_left_out, GatedAttentionForCausalLM, config, dtype, stack)
        for theirs, ours in zip(states, [result.embed(batch) for batch in batches], strict=True):
            difference("embeddings", ours, theirs)
        for index in tqdm(range(config.num_hidden_layers), desc="Comparing", unit="layer", disable=None):
            with errors_of_the_source(plan):
                expected = _run_layer(source.layer(index), states)
            layer = result.layer(index)
            prepare_result(layer, plan)
            found = _run_layer(layer, states)
            del layer
            layers.append(layer_difference(index, found, expected))
            states = expected
    return _found(
        plan,
        batches,
        method="layer by layer",
        dtype=str(dtype).removeprefix("torch."),
        layers=tuple(layers),
        logits=None,
    )


def _run_layer(model: PreTrainedModel, states: list[torch.Tensor]) -> list[torch.Tensor]:
    return [model.base_model(inputs_embeds=one, use_cache=False).last_hidden_state for one in states]
