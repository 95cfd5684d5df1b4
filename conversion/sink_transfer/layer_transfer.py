"""
Sink transfer of one layer.

For a head and a query, with attention a on the sinks, whose value is v_0, and attention p on the other keys renormalised,

    output = a v_0 + (1 - a) sum_j p_j v_j = g sum_j p_j (v_j - v_0) + v_0,    g = 1 - a:

attention with a sink is gated attention without one, with -v_0 as value bias and W_o v_0 as output bias.
"""

from dataclasses import dataclass

import torch

from ...modeling_gated.decoder import GatedAttentionDecoderLayer
from .gate_fit import GateData, GateFit, fit_gates
from .key_edit import KeyEdit, KeyMoments, key_edit
from .opened_attention import OpenedAttention
from .sinks import Sinks


# Candidates for the strength of the sinks' keys: 1 would leave them as they are. Where a norm follows `k_proj` it undoes what a
# positive strength does, and makes a key of full length of the rounding error that 0 leaves: only negative ones count.
STRENGTHS = (0.5, 0.25, 0.0, -0.25, -0.5, -1.0, -2.0)
# Windows that choose between them.
STRENGTH_WINDOWS = 8
ROWS = 512


@dataclass
class LayerFit:
    """
    A layer's transfer, not yet applied.

    Attributes:
        key_weight: `k_proj.weight` with the sinks' keys turned away, as the checkpoint's format keeps it.
        value: `(key_value_heads, head_dim)`: the sinks' value v_0.
        gates: The fitted gates.
        strengths: `(key_value_heads,)`.
        sink_attention, sink_attention_left: `(heads,)`: share of each head's attention that went to sinks, and that still does, on
            the held-out windows.
        r2: `(heads,)`: share of the variance of g that the gates explain on the held-out windows.
    """

    key_weight: torch.Tensor
    value: torch.Tensor
    gates: GateFit
    strengths: torch.Tensor
    sink_attention: torch.Tensor
    sink_attention_left: torch.Tensor
    r2: torch.Tensor


def fit_layer(
    opened: OpenedAttention,
    hidden_states: torch.Tensor,
    sinks: Sinks,
    fitted: int,
    attention_weight: float,
    key_dtype: torch.dtype = torch.float32,
    elementwise: bool = False,
) -> LayerFit:
    """
    Fit a layer's transfer.

    Args:
        opened (`OpenedAttention`): The layer's attention, with identity gates.
        hidden_states (`torch.Tensor` of shape `(windows, length, hidden_size)`): What the layer gets in the converted model.
        sinks (`Sinks`): The layer's sinks.
        fitted (`int`): The first so many windows are fitted to; the others choose and judge.
        attention_weight (`float`): What attention that is left on sinks costs: a share of it counts as much as so many times
            a relative squared error of that size.
        key_dtype: Format that the checkpoint keeps `k_proj` in.
        elementwise (`bool`): Whether there is a gate a channel.
    """
    moments = _moments(opened, hidden_states[:fitted], sinks)
    edit = key_edit(moments, opened.attention.k_proj.weight, opened.attention.k_proj.bias)
    value = moments.value_mean.to(opened.cos.dtype)
    strengths = _choose_strengths(opened, hidden_states, sinks, fitted, edit, value, attention_weight)
    weight = opened.attention.k_proj.weight
    key_weight = (weight + edit.change(strengths)).to(key_dtype).to(weight.dtype)
    # The gates are fitted to the keys as they are kept.
    data, left, openness = _gate_data(opened, hidden_states, sinks, key_weight - weight, value, elementwise)
    boundary = fitted * hidden_states.shape[1]
    held_out = slice(boundary, None)
    gates = fit_gates(
        data.part(slice(0, boundary)), data.part(held_out), opened.output_weight if elementwise else None
    )
    # The first token sees only itself: nothing there depends on the fit.
    later = torch.arange(boundary, len(data)) % hidden_states.shape[1] > 0
    left, exact, scores = left[held_out][later], openness[held_out][later], gates.scores[later]
    residual = ((1 - left) * scores - exact).square().sum(0)
    r2 = 1 - residual / (exact - exact.mean(0)).square().sum(0).clamp(min=1e-12)
    return LayerFit(key_weight, value, gates, strengths, 1 - exact.mean(0), left.mean(0), r2)


def apply_fit(
    layer: GatedAttentionDecoderLayer, fit: LayerFit, dtypes: dict[str, torch.dtype] | None = None
) -> dict[str, torch.Tensor]:
    """
    Write a fit into a layer.

    Args:
        layer: The layer, whose config has `gate_scale = 2`; changed in place.
        fit: The fit.
        dtypes (*optional*): Format that the checkpoint keeps each tensor in, by its name in the layer; the layer holds what
            that leaves of each number. Default: the layer's own.

    Returns:
        The tensors that change in a checkpoint with `gate_scale = 1`, in their formats, by their name in the layer.
    """
    attention = layer.self_attn
    group = attention.num_key_value_groups
    kept: dict[str, torch.Tensor] = {}

    def keep(name: str, tensor: torch.Tensor) -> torch.Tensor:
        kept[name] = tensor.to(dtypes[f"self_attn.{name}"]) if dtypes else tensor
        return kept[name].to(tensor.dtype)

    value_bias = keep("v_proj.bias", attention.v_proj.bias - fit.value.flatten())
    # The output bias makes up for the value bias as it is kept, so that its rounding cancels; so does the gates' bias.
    constant = (attention.v_proj.bias - value_bias).unflatten(0, (-1, 1, attention.head_dim)).expand(-1, group, -1)
    gate_weight = keep("g_proj.weight", fit.gates.weight)
    new = {
        "k_proj.weight": keep("k_proj.weight", fit.key_weight),
        "v_proj.bias": value_bias,
        "o_proj.bias": keep("o_proj.bias", attention.o_proj.bias + attention.o_proj.weight @ constant.flatten()),
        "g_proj.weight": gate_weight,
        "g_proj.bias": keep("g_proj.bias", fit.gates.bias + (fit.gates.weight - gate_weight) @ fit.gates.input_mean),
        # The fitted gates are plain sigmoids; halving is exact.
        "o_proj.weight": attention.o_proj.weight / 2,
    }
    attention.load_state_dict(new, strict=False, assign=True)
    return {f"self_attn.{name}": tensor for name, tensor in kept.items()}


def identity_tensors(layer: GatedAttentionDecoderLayer, dtypes: dict[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """What changes in a layer without a transfer: its zero gates are sigmoid(0) = 1/2, for which doubling makes up exactly."""
    name = "self_attn.o_proj.weight"
    return {name: (layer.self_attn.o_proj.weight * 2).to(dtypes[name])}


def _moments(opened: OpenedAttention, hidden_states: torch.Tensor, sinks: Sinks) -> KeyMoments:
    device, size = opened.cos.device, hidden_states.shape[-1]
    others = torch.zeros(size, size, dtype=torch.float64, device=device)
    of_sinks, sink_mean, key_mean, value_mean = others.clone(), 0.0, 0.0, 0.0
    total, count = 0.0, 0
    for window, mask, weights in zip(hidden_states, sinks.mask, sinks.weights, strict=False):
        projections = opened.project(window.to(device))
        mask, weights = mask.to(device), weights.to(device, opened.cos.dtype)
        inputs = projections.inputs
        rest, own, weights = inputs[~mask], inputs[mask], weights[mask]
        others += (rest.T @ rest).double()
        count += len(rest)
        of_sinks += (own.T @ (own * weights[:, None])).double()
        sink_mean += (weights @ own).double()
        key_mean += (weights @ projections.raw_key[mask]).double()
        value_mean += torch.einsum("s,ksc->kc", weights, projections.value[:, mask]).double()
        total += weights.sum().double()
    return KeyMoments(others / count, of_sinks / total, sink_mean / total, key_mean / total, value_mean / total)


def _token_weight(hidden_states: torch.Tensor) -> torch.Tensor:
    """What comes next normalises the residual stream, so an error counts relative to its length."""
    return hidden_states.shape[-1] / hidden_states.square().sum(-1).clamp(min=1e-12)


def _choose_strengths(
    opened: OpenedAttention,
    hidden_states: torch.Tensor,
    sinks: Sinks,
    fitted: int,
    edit: KeyEdit,
    value: torch.Tensor,
    attention_weight: float,
) -> torch.Tensor:
    """
    The strength of each key/value head that costs least on held-out windows, if the gates were exact: the error that
    the other keys' change brings, and the attention that the sinks still get.
    """
    device, group = opened.cos.device, opened.group
    candidates = [strength for strength in STRENGTHS if strength < 0 or not opened.attention.config.qk_norm]
    windows = range(fitted, min(len(hidden_states), fitted + STRENGTH_WINDOWS))
    errors = torch.zeros(len(candidates), opened.key_value_heads, device=device)
    left, scale = torch.zeros_like(errors), torch.zeros((), device=device)
    for window in windows:
        residual = hidden_states[window].to(device)
        projections = opened.project(residual)
        mask, weight = sinks.mask[window].to(device), _token_weight(residual)
        neutral, step = projections.inputs @ edit.neutral.T, projections.inputs @ edit.step.T
        new_keys = [opened.keys(projections.raw_key + neutral + strength * step) for strength in candidates]
        shifted = projections.value - value[:, None]
        added = torch.zeros_like(residual)
        for head, (heads, probabilities) in enumerate(opened.probabilities(projections.query, projections.key)):
            sink_attention = probabilities[..., mask].sum(-1)
            output = torch.matmul(probabilities, shifted[head])
            added += opened.to_residual(output, heads).sum(0)
            for row, keys in enumerate(new_keys):
                changed = opened.attend(projections.query[heads], keys[head])
                still = changed[..., mask].sum(-1)
                gate = _openness(sink_attention, still)[..., None]
                difference = gate * torch.matmul(changed, shifted[head]) - output
                error = opened.to_residual(difference, heads).sum(0).square().sum(-1)
                errors[row, head] += (weight * error).sum()
                left[row, head] += still.sum() / (group * still.shape[-1] * len(windows))
        scale += (weight * added.square().sum(-1)).sum()
    cost = errors / scale.clamp(min=1e-30) + attention_weight * left / opened.key_value_heads
    return torch.tensor(candidates, device=device)[cost.argmin(0)]


def _openness(sink_attention: torch.Tensor, still: torch.Tensor) -> torch.Tensor:
    """What a gate must let through where sinks got `sink_attention` and still get `still`."""
    return ((1 - sink_attention) / (1 - still).clamp(min=1e-6)).clamp(max=1)


def _gate_data(
    opened: OpenedAttention,
    hidden_states: torch.Tensor,
    sinks: Sinks,
    change: torch.Tensor,
    value: torch.Tensor,
    elementwise: bool,
) -> tuple[GateData, torch.Tensor, torch.Tensor]:
    """For every token what the fit needs, the attention still on sinks, and the exact openness `(tokens, heads)`."""
    device = opened.cos.device
    parts, left, exact = [], [], []
    for window, mask in zip(hidden_states, sinks.mask, strict=True):
        window, mask = window.to(device), mask.to(device)
        projections = opened.project(window)
        new_key = opened.keys(projections.raw_key + projections.inputs @ change.T)
        shifted = projections.value - value[:, None]
        sink_attention, still, target, outputs = [], [], torch.zeros_like(window), []
        both = zip(
            opened.probabilities(projections.query, projections.key),
            opened.probabilities(projections.query, new_key),
            shifted,
            strict=True,
        )
        for (heads, before), (_, after), head_values in both:
            sink_attention.append(before[..., mask].sum(-1))
            still.append(after[..., mask].sum(-1))
            target += opened.to_residual(torch.matmul(before, head_values), heads).sum(0)
            outputs.append(torch.matmul(after, head_values))
        sink_attention, still, outputs = (torch.cat(tensors) for tensors in (sink_attention, still, outputs))
        gram, cross = [], []
        for begin in range(0, len(window), ROWS):
            rows = slice(begin, begin + ROWS)
            added = opened.to_residual(outputs[:, rows]).transpose(0, 1)  # (tokens, heads, hidden_size)
            gram.append(added @ added.transpose(1, 2))
            cross.append((added @ target[rows, :, None]).squeeze(-1))
        parts.append(
            GateData(
                projections.inputs,
                torch.cat(gram),
                torch.cat(cross),
                target.square().sum(-1),
                _openness(sink_attention, still).T,
                _token_weight(window),
                outputs.transpose(0, 1) if elementwise else None,
                target if elementwise else None,
            )
        )
        left.append(still.T)
        exact.append(1 - sink_attention.T)
    names = [name for name, tensor in vars(parts[0]).items() if tensor is not None]
    data = GateData(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})
    return data, torch.cat(left), torch.cat(exact)
