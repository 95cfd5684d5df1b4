"""What new gates begin with."""

from collections.abc import Iterator
from pathlib import Path

import torch

from .checkpoint import FLOAT_FORMATS
from .plan import ConversionPlan
from .write import overwrite_tensors


def initial_values(plan: ConversionPlan) -> Iterator[tuple[str, torch.Tensor]]:
    """The new tensors that do not begin as zeros, with their values, in the order of their names."""
    options = plan.options
    generator = torch.Generator().manual_seed(options.seed)
    for name, header in sorted(plan.new_tensors.items()):
        dtype = FLOAT_FORMATS[header.dtype]
        if options.init == "open" and name.endswith(".g_proj.bias"):
            yield name, torch.full(header.shape, options.init_bias, dtype=dtype)
        elif options.init == "normal" and name.endswith(".g_proj.weight"):
            yield name, (torch.randn(header.shape, generator=generator) * options.init_std).to(dtype)


def fill_gates(plan: ConversionPlan, folder: Path) -> None:
    """Give the gates of a written result, which are zero, what the options ask for."""
    for name, tensor in initial_values(plan):
        overwrite_tensors(folder / plan.new_shard, {name: tensor})
