"""Every figure of the diagnostics equals what full attention maps and plain loops give, in every family and on every backend."""

import math

import pytest
import torch
from conftest import TINY_SHAPE, randomise, tiny_gated, tiny_input_ids, tiny_llama
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gated_attention import inspect_model
from gated_attention.diagnostics import Inspection


def from_config(model_type: str, **fields):
    shape = {key: value for key, value in TINY_SHAPE.items() if key not in ("bos_token_id", "eos_token_id")}
    return randomise(AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**shape, **fields})))


MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "llama": lambda: tiny_llama(),
    "mistral_window": lambda: from_config("mistral", sliding_window=5),
    "qwen3": lambda: from_config("qwen3"),
    "gemma2_softcap": lambda: from_config("gemma2", sliding_window=5, query_pre_attn_scalar=10, attn_logit_softcapping=2.0),
    "gpt_oss_learned_sinks": lambda: from_config(
        "gpt_oss", sliding_window=5, num_local_experts=2, num_experts_per_tok=1, head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    ),
    "granite": lambda: from_config("granite", attention_multiplier=0.3, head_dim=8),
    "gated_headwise": lambda: tiny_gated(gate_granularity="headwise", gate_scale=2.0),
    "gated_elementwise": lambda: tiny_gated(),
}  # fmt: skip

# transformers has no SDPA for learned sinks and softcaps.
EAGER_ONLY = ("gemma2_softcap", "gpt_oss_learned_sinks")
ON_BACKENDS = [
    (family, backend)
    for family in FAMILIES
    for backend in ("eager", "sdpa")
    if not (backend == "sdpa" and family in EAGER_ONLY)
]


def full_maps(model, inputs) -> list[torch.Tensor]:
    backend = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(**inputs, output_attentions=True, use_cache=False).attentions
    model.set_attn_implementation(backend)
    return [layer for layer in maps if layer is not None]


def plain() -> dict:
    return {"input_ids": tiny_input_ids(2, 23)}


def padded(side: str) -> dict:
    mask = torch.ones(2, 23, dtype=torch.long)
    if side == "left":
        mask[1, :6] = 0
    else:
        mask[1, -6:] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": tiny_input_ids(2, 23), "attention_mask": mask, "position_ids": positions}


def packed() -> dict:
    positions = torch.cat([torch.arange(9), torch.arange(4), torch.arange(10)])
    return {"input_ids": tiny_input_ids(2, 23), "position_ids": positions.expand(2, -1).contiguous()}


INPUTS = {
    "plain": plain,
    "left_padded": lambda: padded("left"),
    "right_padded": lambda: padded("right"),
    "packed": packed,
}


def naive_figures(maps: list[torch.Tensor], inputs: dict) -> list[dict[str, list[float]]]:
    """F-Attn, largest-key share, entropy and sink rate from full maps `(batch, heads, T, T)`, with plain loops."""
    batch, length = inputs["input_ids"].shape
    valid = inputs.get("attention_mask", torch.ones(batch, length)).bool()
    starts = []
    for row in range(batch):
        current, own = None, []
        for position in range(length):
            restarted = "attention_mask" not in inputs and position > 0 and inputs.get("position_ids") is not None and (
                inputs["position_ids"][row, position] != inputs["position_ids"][row, position - 1] + 1
            )  # fmt: skip
            if valid[row, position] and (current is None or restarted):
                current = position
            own.append(current)
        starts.append(own)
    figures = []
    for layer in maps:
        heads = layer.shape[1]
        result = {"f_attn": [], "largest_key_share": [], "entropy": [], "sink_rate": []}
        for head in range(heads):
            on_first, entropies, largest, sinks = [], [], 0.0, []
            for row in range(batch):
                per_document, early = {}, []
                for query in range(length):
                    if not valid[row, query]:
                        continue
                    first = starts[row][query]
                    p = layer[row, head, query]
                    if first == min(start for start in starts[row] if start is not None) and query - first < 64:
                        early.append(float(p[first]))
                    if query == first:
                        continue
                    on_first.append(float(p[first]))
                    outcome = torch.cat([p, 1 - p.sum()[None].clamp(max=1)])  # what a learned sink takes
                    entropies.append(-sum(float(x) * math.log(float(x)) for x in outcome if x > 1e-12))
                    per_document[first] = per_document.get(first, 0) + p
                largest += sum(float(per_key.max()) for per_key in per_document.values())
                sinks.append(sum(early) / len(early) > 0.3)
            result["f_attn"].append(sum(on_first) / len(on_first))
            result["largest_key_share"].append(largest / len(on_first))
            result["entropy"].append(sum(entropies) / len(entropies))
            result["sink_rate"].append(sum(sinks) / batch)
        figures.append(result)
    return figures


def assert_equals_maps(model, inputs, inspection: Inspection) -> None:
    expected = naive_figures(full_maps(model, inputs), inputs)
    assert len(expected) == len(inspection.layers)
    for layer, figures in zip(inspection.layers, expected, strict=True):
        assert all(
            any_key >= first - 1e-6 for any_key, first in zip(layer.largest_key_share, layer.f_attn, strict=True)
        )
        for name, values in figures.items():
            torch.testing.assert_close(torch.tensor(getattr(layer, name)), torch.tensor(values), rtol=0, atol=1e-5)


# GPT-OSS does not hand the positions to its masks: packed documents see each other there.
CASES = [
    (family, backend, inputs)
    for family, backend in ON_BACKENDS
    for inputs in INPUTS
    if (family, inputs) != ("gpt_oss_learned_sinks", "packed")
]


@pytest.mark.parametrize(("family", "backend", "inputs"), CASES)
def test_equals_full_maps(family, backend, inputs):
    model = FAMILIES[family]()
    model.set_attn_implementation(backend)
    assert_equals_maps(model, INPUTS[inputs](), inspect_model(model, [INPUTS[inputs]()]))


@pytest.mark.slow
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS.keys())
@pytest.mark.parametrize("family", ["llama", "mistral_window", "gated_headwise"])
def test_equals_full_maps_on_flex_attention(family, inputs):
    model = FAMILIES[family]()
    model.set_attn_implementation("flex_attention")
    assert_equals_maps(model, inputs(), inspect_model(model, [inputs()]))


def flash_stand_in(module, query, key, value, attention_mask, scaling=None, sliding_window=None, **kwargs):
    """What FlashAttention computes, from the arguments it gets: a padding mask or positions, and the window as a number."""
    batch, _, length, _ = query.shape
    index = torch.arange(length)
    allowed = (index[None, :] <= index[:, None])[None].repeat(batch, 1, 1)
    if sliding_window is not None:
        allowed &= (index[:, None] - index[None, :] < sliding_window)[None]
    if attention_mask is not None:
        allowed &= attention_mask[:, None, :].bool() | (index[:, None] == index[None, :])[None]
    elif kwargs.get("position_ids") is not None:
        document = (kwargs["position_ids"].diff(dim=1) != 1).long().cumsum(1)
        document = torch.cat([torch.zeros(len(document), 1, dtype=torch.long), document], dim=1)
        allowed &= document[:, :, None] == document[:, None, :]
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~allowed[:, None], float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2), None


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS.keys())
@pytest.mark.parametrize("family", ["llama", "mistral_window", "gated_headwise"])
def test_equals_full_maps_with_the_arguments_of_flash_attention(family, inputs, monkeypatch):
    """FlashAttention needs a GPU; a stand-in gets its arguments, and the diagnostics read the same ones."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", flash_stand_in)
    model = FAMILIES[family]()
    expected = inspect_model(model, [inputs()])
    model.config._attn_implementation = "flash_attention_2"
    found = inspect_model(model, [inputs()])
    assert found.settings.attn_implementation == "flash_attention_2"
    for layer, reference in zip(found.layers, expected.layers, strict=True):
        for name in ("f_attn", "largest_key_share", "entropy", "sink_rate"):
            ours, theirs = torch.tensor(getattr(layer, name)), torch.tensor(getattr(reference, name))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
