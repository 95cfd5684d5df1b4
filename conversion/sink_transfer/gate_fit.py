"""
Fits the gates of a layer, so that the gated heads together add to the residual stream what the heads with a sink added.

For one token, let y_h be what head h adds ungated, without the sink, and t what the layer's attention should add. With gates
f_h = sigmoid(w_h x + b_h) the error |sum_h f_h y_h - t|^2 is the quadratic form f M f - 2 c f + |t|^2 with M = y y^T (heads x heads)
and c = y t. So a token is its input x and a small matrix, and the whole fit works without the heads' outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


# Penalties on the weights (for inputs of variance 1), from which the held-out tokens choose.
PENALTIES = (1e-3, 1e-4, 1e-5)
ITERATIONS = 60
ELEMENTWISE_ITERATIONS = 12
CHUNK = 4096


@dataclass
class GateData:
    """
    What the fit knows of each token.

    Attributes:
        inputs: `(tokens, hidden_size)`: the layer's normalised input.
        gram: `(tokens, heads, heads)`: products of the heads' contributions.
        cross: `(tokens, heads)`: product of each head's contribution with the target.
        target_square: `(tokens,)`.
        openness: `(tokens, heads)`: the share that the exact identity would let through, between 0 and 1.
        weight: `(tokens,)`: how much a token's error counts.
        outputs, target: `(tokens, heads, head_dim)` and `(tokens, hidden_size)`, only for elementwise gates.
    """

    inputs: torch.Tensor
    gram: torch.Tensor
    cross: torch.Tensor
    target_square: torch.Tensor
    openness: torch.Tensor
    weight: torch.Tensor
    outputs: torch.Tensor | None = None
    target: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    def part(self, tokens: slice) -> "GateData":
        return GateData(**{name: None if value is None else value[tokens] for name, value in vars(self).items()})

    def error(self, gates: torch.Tensor) -> torch.Tensor:
        """Weighted squared error of headwise gates `(tokens, heads)`, relative to the target's square."""
        squares = torch.einsum("th,thk,tk->t", gates, self.gram, gates) - 2 * (gates * self.cross).sum(-1)
        return (self.weight * (squares + self.target_square)).sum() / self.scale

    @property
    def scale(self) -> torch.Tensor:
        return (self.weight * self.target_square).sum().clamp(min=1e-30)


@dataclass
class GateFit:
    """
    Attributes:
        weight: `(heads, hidden_size)` or, elementwise, `(heads * head_dim, hidden_size)`.
        bias: `(heads,)` or `(heads * head_dim,)`.
        input_mean: `(hidden_size,)`: mean of the inputs that were fitted to.
        error: Relative squared error of what the layer's attention adds, on the held-out tokens.
        scores: `(held-out tokens, heads)`: gate scores between 0 and 1; of elementwise gates their mean over channels.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    input_mean: torch.Tensor
    error: float
    scores: torch.Tensor


def fit_gates(fitted: GateData, held_out: GateData, elementwise_output_weight: torch.Tensor | None = None) -> GateFit:
    """
    Fit the gates of a layer.

    Args:
        fitted, held_out (`GateData`): Tokens to fit to, and tokens that choose the penalty.
        elementwise_output_weight (`torch.Tensor` of shape `(heads, head_dim, hidden_size)`, *optional*): Makes the gates
            elementwise, starting from the headwise ones.
    """
    # Channels differ in scale by orders of magnitude: they are standardised within the parameters, not in a copy.
    mean, deviation = fitted.inputs.mean(0), fitted.inputs.std(0).clamp(min=1e-6)
    parameters = _logistic_start(fitted, mean, deviation)
    best = None
    for penalty in PENALTIES:
        parameters = _minimise(
            parameters,
            lambda values, penalty=penalty: (
                fitted.error(_gates(values, fitted.inputs, mean, deviation))
                + penalty * values[:, :-1].square().sum() / len(values)
            ),
            ITERATIONS,
        )
        error = held_out.error(_gates(parameters, held_out.inputs, mean, deviation)).item()
        if best is not None and error >= best[0]:
            break
        best = error, parameters
    error, parameters = best
    scores = _gates(parameters, held_out.inputs, mean, deviation)
    if elementwise_output_weight is not None:
        parameters, error, scores = _refine_elementwise(
            fitted, held_out, parameters, mean, deviation, elementwise_output_weight
        )
    weight = parameters[:, :-1] / deviation
    bias = parameters[:, -1] - weight @ mean
    # An exact fit's error is a small difference of large numbers.
    return GateFit(weight, bias, mean, max(error, 0.0), scores)


def _gates(parameters: torch.Tensor, inputs: torch.Tensor, mean, deviation) -> torch.Tensor:
    weight = parameters[:, :-1] / deviation
    return torch.sigmoid(inputs @ weight.T + (parameters[:, -1] - weight @ mean))


def _logistic_start(data: GateData, mean: torch.Tensor, deviation: torch.Tensor) -> torch.Tensor:
    """Ridge regression of the logits, `(heads, hidden_size + 1)`: exact where the identity's gate is what a gate can be."""
    logits = torch.logit(data.openness.clamp(1e-5, 1 - 1e-5))
    # What a head adds, times the slope of its gate: an error in the logit matters that much.
    slope = (data.openness * (1 - data.openness)).clamp(min=1e-3)
    importance = data.gram.diagonal(dim1=1, dim2=2) * slope * data.weight[:, None]
    importance = importance / importance.mean(0).clamp(min=1e-30)
    size = data.inputs.shape[1]
    start = torch.zeros(logits.shape[1], size + 1, device=logits.device)
    for head in range(logits.shape[1]):
        moments = torch.zeros(size + 1, size + 1, dtype=torch.float64, device=logits.device)
        right = torch.zeros(size + 1, dtype=torch.float64, device=logits.device)
        for begin in range(0, len(data), CHUNK):
            rows = slice(begin, begin + CHUNK)
            features = torch.nn.functional.pad((data.inputs[rows] - mean) / deviation, (0, 1), value=1.0)
            weighted = features * importance[rows, head, None]
            moments += (weighted.T @ features).double()
            right += (weighted.T @ logits[rows, head]).double()
        penalty = 1e-3 * len(data) * torch.eye(size + 1, dtype=torch.float64, device=logits.device)
        start[head] = torch.linalg.solve(moments + penalty, right).float()
    return start


def _minimise(start: torch.Tensor, loss_of: Callable[[torch.Tensor], torch.Tensor], iterations: int) -> torch.Tensor:
    values = start.clone().requires_grad_(True)
    optimizer = torch.optim.LBFGS([values], max_iter=iterations, history_size=20, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = loss_of(values)
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    values = values.detach()
    return values if values.isfinite().all() else start


def _refine_elementwise(
    fitted: GateData, held_out: GateData, headwise: torch.Tensor, mean, deviation, output_weight: torch.Tensor
) -> tuple[torch.Tensor, float, torch.Tensor]:
    """From the headwise gates, each repeated for its channels (the same function), some steps with a gate a channel."""
    heads, head_dim = output_weight.shape[:2]
    flat_weight = output_weight.flatten(0, 1)
    start = headwise.repeat_interleave(head_dim, dim=0)
    scale = fitted.scale

    def error_of(data: GateData, values: torch.Tensor) -> torch.Tensor:
        gates = _gates(values, data.inputs, mean, deviation)
        added = (gates * data.outputs.flatten(1)) @ flat_weight
        return (data.weight * (added - data.target).square().sum(-1)).sum()

    values = start.clone().requires_grad_(True)
    optimizer = torch.optim.LBFGS(
        [values], max_iter=ELEMENTWISE_ITERATIONS, history_size=10, line_search_fn="strong_wolfe"
    )

    def closure():
        optimizer.zero_grad()
        total = PENALTIES[0] * (values[:, :-1] - start[:, :-1]).square().sum() / heads
        total.backward()
        # In chunks, so that the gates of all tokens are not held at once.
        for begin in range(0, len(fitted), CHUNK):
            part = error_of(fitted.part(slice(begin, begin + CHUNK)), values) / scale
            part.backward()
            total = total.detach() + part.detach()
        return total

    with torch.enable_grad():
        optimizer.step(closure)
    values = values.detach()
    before, after = (error_of(held_out, candidate).item() for candidate in (start, values))
    if not after < before:
        values, after = start, before
    scores = _gates(values, held_out.inputs, mean, deviation).unflatten(1, (heads, head_dim)).mean(-1)
    return values, after / held_out.scale.item(), scores
