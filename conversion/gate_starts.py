"""How new gates may begin, and what each way does to the model's function: data."""

from dataclasses import dataclass
from typing import Literal


# 2 * sigmoid(0) = 1 in every float format: zero weights are the identity, at the gate's steepest point.
IDENTITY_SCALE = 2.0

Initialisation = Literal["identity", "normal", "open", "zeros"]


@dataclass(frozen=True)
class GateStart:
    """
    Attributes:
        gate_scale: Factor on the gates' sigmoids.
        bias: Whether the gates need a bias.
        effect: What it does to the model's function.
    """

    gate_scale: float
    bias: bool
    effect: str


GATE_STARTS = {
    "identity": GateStart(
        IDENTITY_SCALE, False, "weights 0, scale 2: each gate is exactly 1, and the function the source's"
    ),
    "normal": GateStart(
        IDENTITY_SCALE, False, "weights N(0, std), scale 2: gates scatter around 1, and the function is disturbed"
    ),
    "open": GateStart(
        1.0,
        True,
        "weights 0, a bias, scale 1: each gate is sigmoid(bias), below 1, and learns slower the larger the bias",
    ),
    "zeros": GateStart(1.0, False, "weights 0, scale 1: each gate is 1/2, and attention gives half of what it gave"),
}
