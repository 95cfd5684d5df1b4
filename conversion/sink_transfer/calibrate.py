"""Runs the calibration tokens through a model, layer by layer, and fits each layer on what the converted ones before it give."""

import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from ..._version import package_versions
from ...configuration import GatedAttentionConfig
from ...modeling_gated.decoder import GatedAttentionDecoderLayer
from ..checkpoint import FLOAT_FORMATS, Checkpoint
from ..errors import ConversionError
from ..gate_starts import IDENTITY_SCALE
from ..plan import format_bytes
from .calibration import Calibration
from .layer_source import LayerSource
from .layer_transfer import LayerFit, apply_fit, fit_layer, identity_tensors
from .massive import LARGEST_RISE, LARGEST_RISE_AT_ALL, ShrinkTrial, ShrunkLayer, shrunk_tensors
from .opened_attention import OpenedAttention, sink_shares
from .report import LayerReport, MassiveReport, TransferReport, TransferSettings
from .sinks import SinkGroup, find_sinks


# A layer's sink is left alone if the error of its transfer exceeds so many times the attention that it would move: then what
# draws attention is no sink in the sense of the identity, and gating it costs more than it brings.
LARGEST_ERROR = 0.5
LOSS_ROWS = 1024


def calibrate(
    checkpoint: Checkpoint,
    config: GatedAttentionConfig,
    calibration: Calibration,
    *,
    granularity: str,
    attention_weight: float,
    seed: int,
    keep_massive: bool = False,
    text_name: str | None = None,
    tokenizer=None,
    on_layer: Callable[[int, dict[str, torch.Tensor]], None] | None = None,
    scratch: Path | None = None,
    device: str | torch.device = "cpu",
    progress: bool = True,
) -> TransferReport:
    """
    Fit a sink transfer.

    Args:
        checkpoint (`Checkpoint`): The ungated source.
        config (`GatedAttentionConfig`): Config of the result.
        calibration (`Calibration`): The tokens.
        granularity, attention_weight, seed, keep_massive, text_name: For the report, and see [`TransferOptions`].
        tokenizer (*optional*): Names the tokens of the report.
        on_layer (`Callable`, *optional*): Gets each layer's index and the tensors that change in it, by their full names; a layer
            whose MLP changes comes twice.
        scratch (`Path`, *optional*): Folder for the hidden states of all calibration tokens; default: memory.
        device: Where layers run.
        progress (`bool`): Whether to show a progress bar, on a terminal.

    Returns:
        [`TransferReport`]
    """
    started = time.perf_counter()
    identity_config = deepcopy(config)
    identity_config.gate_scale = IDENTITY_SCALE
    source = LayerSource(checkpoint, identity_config, device)
    windows, length = calibration.input_ids.shape
    held_out = slice(calibration.fitted, None)
    reports = []

    def hand_out(index: int, tensors: dict[str, torch.Tensor]) -> None:
        if on_layer is not None:
            on_layer(index, {f"model.layers.{index}.{name}": tensor for name, tensor in tensors.items()})

    trial = None if keep_massive else ShrinkTrial(lambda states, name: _states(states, scratch, name))
    with torch.no_grad():
        position_embeddings = source.position_embeddings(length)
        before = _states(source.embed(calibration.input_ids), scratch, "before.bin")
        after = before  # one and the same until a layer is changed
        bar = tqdm(
            range(config.num_hidden_layers), desc="Transferring", unit="layer", disable=None if progress else True
        )
        for index in bar:
            layer = source.layer(index)
            dtypes = _formats(checkpoint, layer, index)
            opened = OpenedAttention(layer, position_embeddings)
            sinks = find_sinks(opened, before, calibration.input_ids)
            shares = [sink_shares(opened, before[held_out])]
            fit, outcome = None, "no sink"
            rare = not sinks.mask[: calibration.fitted].any() or not sinks.mask[held_out].any()
            if sinks.groups and rare:
                outcome = "rare"
            elif sinks.groups:
                fit = fit_layer(
                    opened,
                    after,
                    sinks,
                    calibration.fitted,
                    attention_weight,
                    dtypes["self_attn.k_proj.weight"],
                    elementwise=granularity == "elementwise",
                )
                moved = sinks.attention - fit.sink_attention_left.mean().item()
                outcome = "transferred" if fit.gates.error <= LARGEST_ERROR * moved else "error"
            if outcome == "transferred" and after is before:
                after = _states(before, scratch, "after.bin")
            entering = after[held_out].clone() if trial and not trial.states else None
            with trial.watching(layer) if trial and after is before else nullcontext():
                activations = [_run(layer, before, position_embeddings, calibration.fitted)]
            if outcome == "transferred":
                tensors = apply_fit(layer, fit, dtypes)
                opened = OpenedAttention(layer, position_embeddings)
            else:
                tensors = identity_tensors(layer, dtypes)
            if after is not before:
                shares.append(sink_shares(opened, after[held_out]))
                with trial.watching(layer) if trial else nullcontext():
                    activations.append(_run(layer, after, position_embeddings, calibration.fitted))
            if trial:
                trial.follow(
                    index,
                    layer,
                    position_embeddings,
                    entering,
                    dtypes,
                    lambda layer, states: _run(layer, states, position_embeddings, fitted=0),
                )
            hand_out(index, tensors)
            reports.append(
                LayerReport(
                    layer_idx=index,
                    outcome=outcome,
                    sinks=[_described(group, tokenizer) for group in sinks.groups],
                    strengths=fit.strengths.tolist() if outcome == "transferred" else None,
                    error=fit.gates.error if fit else None,
                    r2=fit.r2.tolist() if outcome == "transferred" else None,
                    sink_attention=_sink_attention(fit, outcome) if fit else None,
                    # Where no layer was changed yet, after is before.
                    f_attn=(shares[0].first.mean().item(), shares[-1].first.mean().item()),
                    largest_key_share=(shares[0].largest.mean().item(), shares[-1].largest.mean().item()),
                    m_act=(activations[0], activations[-1]),
                )
            )
        head = source.head()

        def held_out_perplexity(states: torch.Tensor) -> float:
            return _perplexity(head, states, calibration.input_ids[held_out], source.device)

        perplexity = held_out_perplexity(before[held_out]), held_out_perplexity(after[held_out])
        massive = None
        if trial and trial.neurons and any(report.outcome == "transferred" for report in reports):
            tried = {factor: held_out_perplexity(states) for factor, states in trial.states.items()}
            limits = perplexity[1] * LARGEST_RISE, perplexity[1] * LARGEST_RISE_AT_ALL
            massive = MassiveReport.of(trial.neurons, tried, *limits)
        if massive is not None and massive.factor is not None:
            perplexity = perplexity[0], tried[massive.factor]
            reports = [_with_shrunk(report, trial.layers[massive.factor]) for report in reports]
            # Layers are read once more only for somebody who takes them.
            for index, neurons in massive.neurons.items() if on_layer is not None else ():
                layer = source.layer(index)
                hand_out(index, shrunk_tensors(layer, neurons, massive.factor, _formats(checkpoint, layer, index)))
    return TransferReport(
        settings=TransferSettings(
            source=checkpoint.folder.resolve().name,
            dtype=str(config.dtype).removeprefix("torch."),
            granularity=granularity,
            text=text_name,
            tokens=windows * length,
            length=length,
            held_out_tokens=calibration.held_out * length,
            bos_windows=int(calibration.bos.sum()),
            windows=windows,
            seed=seed,
            attention_weight=attention_weight,
            keep_massive=keep_massive,
            versions=package_versions(),
        ),
        layers=reports,
        massive=massive,
        perplexity=perplexity,
        seconds=time.perf_counter() - started,
    )


def _formats(checkpoint: Checkpoint, layer: GatedAttentionDecoderLayer, index: int) -> dict[str, torch.dtype]:
    """Format of each tensor of a layer in the checkpoint; new ones have that of `q_proj`."""
    prefix = f"model.layers.{index}."
    query = checkpoint.tensors[f"{prefix}self_attn.q_proj.weight"]
    return {
        name: FLOAT_FORMATS[checkpoint.tensors.get(prefix + name, query).dtype] for name, _ in layer.named_parameters()
    }


def _with_shrunk(report: LayerReport, layers: dict[int, ShrunkLayer]) -> LayerReport:
    """A layer's report with what the figures after the transfer are when massive activations are made smaller."""
    if report.layer_idx not in layers:
        return report
    after = asdict(layers[report.layer_idx])
    return replace(report, **{name: (getattr(report, name)[0], value) for name, value in after.items()})


def _sink_attention(fit: LayerFit, outcome: str) -> tuple[list[float], list[float]]:
    before = fit.sink_attention.tolist()
    return before, fit.sink_attention_left.tolist() if outcome == "transferred" else before


def _described(group: SinkGroup, tokenizer) -> dict:
    named = [
        [str(token) if tokenizer is None else tokenizer.decode([token]), number]
        for token, number in group.further_tokens
    ]
    return {**asdict(group), "further_tokens": named}


def perplexity_of(source: LayerSource, input_ids: torch.Tensor) -> float:
    """Perplexity of a checkpoint on windows `(windows, length)`, one layer in memory at a time."""
    with torch.no_grad():
        states = source.embed(input_ids).clone()
        position_embeddings = source.position_embeddings(input_ids.shape[1])
        for index in range(source.config.num_hidden_layers):
            _run(source.layer(index), states, position_embeddings, fitted=0)
        return _perplexity(source.head(), states, input_ids, source.device)


def _states(values: torch.Tensor, scratch: Path | None, name: str) -> torch.Tensor:
    """A copy of hidden states in memory, or in a file that the system pages in and out."""
    if scratch is None:
        return values.clone()
    path, size = scratch / name, values.numel() * values.element_size()
    try:
        # Room is taken now: a full disk would otherwise kill the process when a page is written back.
        with path.open("wb") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        raise ConversionError(
            f"{scratch} has no room for the hidden states of the calibration tokens, {format_bytes(size)} ({error.strerror}); take "
            "fewer tokens, or set TMPDIR to a folder with more room"
        ) from error
    states = torch.from_file(str(path), shared=True, size=values.numel(), dtype=values.dtype)
    return states.view(values.shape).copy_(values)


def _run(layer: GatedAttentionDecoderLayer, states: torch.Tensor, position_embeddings, fitted: int) -> float:
    """Take `states` through a layer, in place, window by window; returns the largest |state| of the held-out windows."""
    largest = 0.0
    for number, window in enumerate(states):
        output = layer(window[None].to(position_embeddings[0].device), position_embeddings=position_embeddings)[0]
        if not output.isfinite().all():
            raise ConversionError(
                f"layer {layer.self_attn.layer_idx} gives NaN or infinity on the calibration text; look at the source's weights"
            )
        window.copy_(output)
        if number >= fitted:
            largest = max(largest, output.abs().max().item())
    return largest


def _perplexity(head: nn.Module, states: torch.Tensor, input_ids: torch.Tensor, device: torch.device) -> float:
    total, count = 0.0, 0
    for window, tokens in zip(states, input_ids, strict=True):
        for begin in range(0, len(tokens) - 1, LOSS_ROWS):
            end = min(begin + LOSS_ROWS, len(tokens) - 1)
            targets = tokens[begin + 1 : end + 1].to(device)
            loss = nn.functional.cross_entropy(head(window[begin:end].to(device)), targets, reduction="sum")
            total, count = total + loss.item(), count + end - begin
    return math.exp(min(total / count, 700.0))
