"""Fills new gates with what they begin with."""

from pathlib import Path

import torch

from .checkpoint import FLOAT_FORMATS
from .plan import ConversionPlan
from .write import overwrite_tensors


def fill_gates(plan: ConversionPlan, folder: Path) -> None:
    """Give the gates of a written result, which are zero, what the options ask for."""
    options = plan.options
    if options.init not in ("normal", "open"):
        return
    generator = torch.Generator().manual_seed(options.seed)
    for name, header in sorted(plan.new_tensors.items()):
        dtype = FLOAT_FORMATS[header.dtype]
        if options.init == "open" and name.endswith(".g_proj.bias"):
            tensor = torch.full(header.shape, options.init_bias, dtype=dtype)
        elif options.init == "normal" and name.endswith(".g_proj.weight"):
            tensor = (torch.randn(header.shape, generator=generator) * options.init_std).to(dtype)
        else:
            continue
        overwrite_tensors(folder / plan.new_shard, {name: tensor})
