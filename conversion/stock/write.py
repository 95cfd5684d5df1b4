"""Writes a planned stock checkpoint, some rows of a tensor at a time."""

from contextlib import ExitStack
from pathlib import Path

from tqdm import tqdm

from ..checkpoint import FLOAT_FORMATS
from ..write import content_of, copy_files, encoded_header, place_copy, write_index
from .plan import StockPlan
from .tensors import Changes, OutputTensor


def write_stock(plan: StockPlan, folder: Path, changes: Changes) -> None:
    """
    Write a stock checkpoint into `folder`: weights, index, config and the model's other files.

    Args:
        plan: What to write.
        folder: Where.
        changes: Takes down which numbers were rounded.

    Raises:
        `ConversionError`: a number does not fit into its format.
    """
    total = sum(output.header.nbytes for output in plan.outputs)
    with ExitStack() as stack, tqdm(total=total, unit="B", unit_scale=True, desc="Writing", disable=None) as bar:
        files = {}
        for shard in plan.checkpoint.shards:
            files |= dict.fromkeys(shard.tensors, stack.enter_context(shard.open()))
        for name, outputs in plan.files.items():
            whole = plan.copied_shard(outputs)
            if whole is not None:
                place_copy(whole.path, folder / name, plan.link)
                bar.update(sum(output.header.nbytes for output in outputs))
            else:
                _write_file(folder / name, outputs, files, changes, bar)
    if len(plan.files) > 1:
        weight_map = {output.name: name for name, outputs in plan.files.items() for output in outputs}
        write_index(folder, {"total_size": total}, weight_map)
    copy_files(plan.checkpoint.folder, plan.copied, folder)
    plan.stock_config.save_pretrained(folder)


def _write_file(path: Path, outputs: list[OutputTensor], files: dict, changes: Changes, bar: tqdm) -> None:
    # Wide formats first keeps every tensor aligned to its own width.
    outputs = sorted(outputs, key=lambda output: -FLOAT_FORMATS[output.header.dtype].itemsize)
    header, _ = encoded_header({output.name: output.header for output in outputs})
    with path.open("wb") as file:
        file.write(header)
        for output in outputs:
            for block in output.blocks(files, changes):
                content = content_of(block)
                file.write(content)
                bar.update(content.nbytes)
