"""What comparing two models gives, and how far two tensors are apart."""

from dataclasses import dataclass

import torch

from .errors import ConversionError


@dataclass(frozen=True)
class LayerDifference:
    """
    How far the outputs of a layer are apart.

    Attributes:
        layer: Its index.
        largest: Largest difference.
        ulps: Largest difference in units in the last place, of numbers that are not tiny beside the largest.
        magnitude: Largest output.
    """

    layer: int
    largest: float
    ulps: int
    magnitude: float


@dataclass(frozen=True)
class Comparison:
    """
    What was found when the models ran.

    Attributes:
        method: `"whole models"`, or `"layer by layer"`: each layer got the source's own states, and the head, whose numbers are
            compared by themselves, did not run.
        dtype: What the models ran in.
        lengths: How many tokens they ran on.
        layers: One entry a layer.
        logits: Largest difference of the logits, where whole models ran.
        window_seen: Whether some tokens lay outside of the sliding window; `None` if there is none.
        rejoined: Whether projections that the conversion took apart were put together again.
        gates_set_aside: Whether the result ran without its gates, which do not begin as the identity.
    """

    method: str
    dtype: str
    lengths: tuple[int, ...]
    layers: tuple[LayerDifference, ...]
    logits: float | None
    window_seen: bool | None
    rejoined: bool
    gates_set_aside: bool

    @property
    def conditions(self) -> str:
        """What the equality holds under, in words, each after a comma."""
        words = ", with projections put together that were taken apart" if self.rejoined else ""
        words += ", with the gates set aside" if self.gates_set_aside else ""
        return words + (", not past the sliding window" if self.window_seen is False else "")


def ulp_distance(first: torch.Tensor, second: torch.Tensor) -> int:
    """
    Largest number of representable numbers between two tensors' entries. Entries below a thousandth of the largest one are left
    out: beside it their last places mean nothing.
    """
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[first.dtype.itemsize]

    def ordered(tensor: torch.Tensor) -> torch.Tensor:
        bits = tensor.contiguous().view(integer).long()
        smallest = torch.iinfo(integer).min
        return torch.where(bits < 0, smallest - bits, bits)

    size = second.float().abs()
    counted = (size > 1e-3 * size.nan_to_num(0, 0, 0).max()) & first.isfinite() & second.isfinite()
    if not counted.any():
        return 0
    return int((ordered(first) - ordered(second)).abs()[counted].max())


def difference(where: str, found: torch.Tensor, expected: torch.Tensor) -> tuple[float, int, float]:
    """
    The largest difference, that in units in the last place, and the largest output.

    Raises:
        `ConversionError`: they differ.
    """
    if found.dtype != expected.dtype:
        raise ConversionError(f"the source runs in {expected.dtype}, the converted checkpoint in {found.dtype}")
    if not expected.isfinite().any():
        raise ConversionError(
            f"the source's own {where} are all NaN or infinite in {expected.dtype}, so comparing them would show nothing; look "
            'at the source, or use --verify headers (verify="headers")'
        )
    magnitude = expected.abs().nan_to_num(0, 0, 0).max().item()
    # NaN where the source has NaN (float16 overflow, say) is the same function.
    if torch.equal(found, expected) or torch.allclose(found, expected, rtol=0, atol=0, equal_nan=True):
        return 0.0, 0, magnitude
    largest = (found.float() - expected.float()).abs().nan_to_num(0, 0, 0).max().item()
    raise ConversionError(
        f"the converted checkpoint's {where} differ from the source's by up to {largest:g}, {ulp_distance(found, expected)} units in "
        f"the last place (the largest is {magnitude:g}); nothing was kept. On a processor of AMD's try again with "
        "MKL_CBWR=AUTO in the environment, without which MKL rounds a product by where its factors lie; else please report this with the source's config.json"
    )


def layer_difference(layer: int, found: list[torch.Tensor], expected: list[torch.Tensor]) -> LayerDifference:
    """
    Of one layer's outputs for several batches.

    Raises:
        `ConversionError`: they differ.
    """
    pairs = [difference(f"outputs of layer {layer}", *pair) for pair in zip(found, expected, strict=True)]
    return LayerDifference(layer, *(max(values) for values in zip(*pairs, strict=True)))
