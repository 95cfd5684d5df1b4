"""Runs a gated model and the stock one made of it, and says how far their logits are apart."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from ...modeling_gated import GatedAttentionForCausalLM
from ..checkpoint import read_checkpoint
from ..errors import ConversionError
from ..loading import Layers, load, quiet, remove_final_norm
from ..logits import batches_for, fits_in_memory
from .plan import StockPlan
from .stock_config import stock_class


# Relative error of the logits up to which an export in 32 bits is taken for the same function: the same numbers are multiplied, in
# another order.
LARGEST_ERROR = 1e-5

# In 16 bits the stock classes also round in other places (Qwen's norms once, where Llama's round twice), so two classes differ as much as
# each differs from the logits that it would have in float32. The export may be so many times as far from those as the model itself is.
LARGEST_RATIO = 2.0


@dataclass(frozen=True)
class LogitError:
    """
    How far the logits (layer by layer: the states behind the last layer) of two models are apart.

    Attributes:
        relative: Root of the mean square of the difference over that of the gated model's.
        largest: Largest difference, over the largest number of the gated model's.
        same_token: Share of positions with the same most likely token; `None` where the head did not run.
        equal: Whether all are equal bit for bit.
    """

    relative: float
    largest: float
    same_token: float | None
    equal: bool

    def describe(self) -> str:
        if self.equal:
            return "equal bit for bit"
        tokens = (
            "" if self.same_token is None else f", the same most likely token at {self.same_token:.2%} of positions"
        )
        return f"relative error {self.relative:.1e} (largest {self.largest:.1e}){tokens}"


@dataclass(frozen=True)
class StockComparison:
    """
    Attributes:
        method: `"whole models"` or `"layer by layer"`.
        dtype: The format that the checkpoint is saved in.
        lengths: How many tokens they ran on.
        saved: Both models in the saved format.
        function: Both in float32, where nothing is left but what was rounded when the checkpoint was written.
        exported_to_exact, own_to_exact: The stock and the gated model in the saved format, each beside the gated one in float32.
    """

    method: str
    dtype: str
    lengths: tuple[int, ...]
    saved: LogitError
    function: LogitError
    exported_to_exact: LogitError
    own_to_exact: LogitError

    @property
    def is_in_16_bits(self) -> bool:
        return self.dtype in ("bfloat16", "float16")

    @property
    def error(self) -> float:
        """The relative error that is bounded."""
        return self.exported_to_exact.relative if self.is_in_16_bits else self.saved.relative

    @property
    def largest_error(self) -> float:
        """What it is bounded by, unless told otherwise."""
        return max(LARGEST_ERROR, LARGEST_RATIO * self.own_to_exact.relative) if self.is_in_16_bits else LARGEST_ERROR

    def describe(self) -> list[str]:
        """What was found, line by line."""
        what = "logits" if self.method == "whole models" else "states behind the last layer"
        lines = [f"{what} in {self.dtype}, of both: {self.saved.describe()}"]
        if self.is_in_16_bits:
            lines.append(
                f"beside the model's in float32: relative error {self.exported_to_exact.relative:.1e}; the model itself has "
                f"{self.own_to_exact.relative:.1e}"
            )
            lines.append(f"both in float32: {self.function.describe()}")
        return lines


def compare_with_stock(plan: StockPlan, folder: Path, layer_by_layer: bool | None = None) -> StockComparison:
    """
    Run the gated model and the stock one on random tokens, of two lengths and past a sliding window, in the saved format and in float32.

    Args:
        plan: What was written.
        folder: Where.
        layer_by_layer: Whether one layer of each is loaded at a time. By default where the models are large for the memory that is free.

    Raises:
        `ConversionError`: one does not load cleanly, or the gated model's own logits are not finite.
    """
    batches = batches_for(plan.model.config)
    if layer_by_layer is None:
        layer_by_layer = not fits_in_memory(sum(output.header.numel * 4 for output in plan.outputs))
    saved = plan.stock_config.dtype
    runs = {}
    with torch.no_grad(), quiet():
        for dtype in dict.fromkeys((saved, torch.float32)):
            try:
                runs[dtype] = (_run_layers if layer_by_layer else _run_whole)(plan, folder, batches, dtype)
            except (ConversionError, MemoryError):
                raise
            except Exception as error:  # whatever a class cannot load or run
                raise ConversionError(
                    f"{plan.family.architecture}, or the gated model, does not run in {str(dtype).removeprefix('torch.')} "
                    f"({type(error).__name__}: {error}), so their logits cannot be compared. Please report this with the config.json"
                ) from error
    (exported, own), (function, exact) = runs[saved], runs[torch.float32]
    return StockComparison(
        method="layer by layer" if layer_by_layer else "whole models",
        dtype=str(saved).removeprefix("torch."),
        lengths=tuple(batch.shape[1] for batch in batches),
        saved=_error(exported, own, has_head=not layer_by_layer),
        function=_error(function, exact, has_head=not layer_by_layer),
        exported_to_exact=_error(exported, exact, has_head=not layer_by_layer),
        own_to_exact=_error(own, exact, has_head=not layer_by_layer),
    )


def _run_whole(
    plan: StockPlan, folder: Path, batches: list[torch.Tensor], dtype: torch.dtype
) -> list[list[torch.Tensor]]:
    """Logits of the stock model and of the gated one."""
    results = []
    # One at a time: twice the checkpoint need not fit in memory.
    for model_class, where in ((AutoModelForCausalLM, folder), (GatedAttentionForCausalLM, plan.checkpoint.folder)):
        model = load(model_class, where, f"model in {where}", dtype=dtype)
        if model_class is AutoModelForCausalLM and type(model) is not stock_class(plan.family):
            raise ConversionError(f"{folder} loads as {type(model).__name__}, not as {plan.family.architecture}")
        results.append([model(batch, use_cache=False).logits for batch in batches])
        del model
    return results


def _run_layers(
    plan: StockPlan, folder: Path, batches: list[torch.Tensor], dtype: torch.dtype
) -> list[list[torch.Tensor]]:
    """
    The states behind the last layer, before the final norm, of whose weights a part may be in the stock model's head; each model's
    layers get the states of its own layers before.
    """
    config = plan.model.config
    written = read_checkpoint(folder)
    with ExitStack() as stack:
        models = [
            Layers(
                written, lambda name: False, stock_class(plan.family), AutoConfig.from_pretrained(folder), dtype, stack
            ),
            Layers(plan.checkpoint, lambda name: False, GatedAttentionForCausalLM, config, dtype, stack),
        ]
        states = [[model.embed(batch) for batch in batches] for model in models]
        for index in tqdm(range(config.num_hidden_layers), desc="Comparing", unit="layer", disable=None):
            for place, model in enumerate(models):
                layer = model.layer(index)
                remove_final_norm(layer)
                states[place] = [
                    layer.base_model(inputs_embeds=one, use_cache=False).last_hidden_state for one in states[place]
                ]
                del layer
    return states


def _error(found: list[torch.Tensor], expected: list[torch.Tensor], has_head: bool) -> LogitError:
    wanted = torch.cat([one.double().flatten(0, 1) for one in expected])
    got = torch.cat([one.double().flatten(0, 1) for one in found])
    if not wanted.isfinite().all():
        raise ConversionError(
            f"the gated model's own logits are NaN or infinite in {expected[0].dtype}, so comparing them would show nothing; look at the "
            'model, or use --verify headers (verify="headers")'
        )
    difference = got - wanted
    smallest = torch.finfo(torch.float32).tiny
    return LogitError(
        relative=(difference.square().mean().sqrt() / wanted.square().mean().sqrt().clamp(min=smallest)).item(),
        largest=(difference.abs().max() / wanted.abs().max().clamp(min=smallest)).item(),
        same_token=(got.argmax(-1) == wanted.argmax(-1)).double().mean().item() if has_head else None,
        equal=torch.equal(got, wanted),
    )
