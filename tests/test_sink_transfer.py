"""Sinks move into the gates: exactly where the identity holds, with a report, and without a trace where they cannot."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import (
    TINY_SHAPE,
    WITHOUT_PACKAGE,
    logits_of,
    randomise,
    save_source,
    tiny_gated,
    tiny_llama,
    tiny_tokenizer,
    tree_hashes,
)
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from gated_attention import (
    GatedAttentionForCausalLM,
    convert_checkpoint,
    inspect_model,
    predict_transfer,
    transfer_sinks,
)
from gated_attention.conversion import ConversionError, NothingToTransferError, TransferOptions, TransferReport
from gated_attention.conversion.checkpoint import read_checkpoint
from gated_attention.conversion.plan import read_source
from gated_attention.conversion.sink_transfer import calibrate as calibrate_module
from gated_attention.conversion.sink_transfer.calibrate import calibrate
from gated_attention.conversion.sink_transfer.calibration import Calibration
from gated_attention.conversion.sink_transfer.command import ShowOptions, run_transfer
from gated_attention.conversion.sink_transfer.gate_fit import GateFit
from gated_attention.conversion.sink_transfer.key_edit import KeyMoments, key_edit
from gated_attention.conversion.sink_transfer.layer_transfer import LayerFit, apply_fit
from gated_attention.conversion.sink_transfer.opened_attention import OpenedAttention
from gated_attention.diagnostics import InspectionError


BOS = 1
HEAD_DIM, HEADS, KEY_VALUE_HEADS, CONTENT = 16, 4, 2, 14
SHAPE = {
    "vocab_size": TINY_SHAPE["vocab_size"],
    "hidden_size": 2 + CONTENT,
    "intermediate_size": 8,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_VALUE_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 128,
    "bos_token_id": BOS,
    "eos_token_id": 2,
    # The slowest pair of channels does not turn: the sink is seen alike from everywhere.
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e15},
}
TEXT = "the gate opens and the sink closes attention to the first token " * 400


def planted_sink(family: str = "llama", layers: int = 1, seed: int = 0):
    """
    A model in which the identity holds exactly and the gate's logit is linear in the layer's input.

    Channel 0 marks BOS, channel 1 the other tokens, the rest is what a token says. Each token looks at itself, with a large
    logit, and at BOS, with a logit that is linear in its input; in the model's norm all tokens have the same length.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(shape, generator=generator)

    window = {"sliding_window": None} if family == "mistral" else {}
    config = AutoConfig.for_model(family, **SHAPE, num_hidden_layers=layers, **window)
    model = randomise(AutoModelForCausalLM.from_config(config), seed)
    content = torch.nn.functional.normalize(noise(SHAPE["vocab_size"], CONTENT), dim=-1)
    embedding = torch.cat([torch.zeros(len(content), 1), torch.ones(len(content), 1), content], dim=1)
    embedding[BOS] = 0
    embedding[BOS, 0] = 2**0.5
    look = [channel for channel in range(HEAD_DIM) if channel not in (7, 15)]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(embedding)
        for layer in model.model.layers:
            attention = layer.self_attn
            layer.input_layernorm.weight.fill_(1.0)
            layer.mlp.down_proj.weight.zero_()
            attention.o_proj.weight.zero_()  # but for the last layer, so that each layer sees the embedding
            query, key = torch.zeros(HEADS, HEAD_DIM, SHAPE["hidden_size"]), torch.zeros(KEY_VALUE_HEADS, HEAD_DIM, 16)
            for head in range(KEY_VALUE_HEADS):
                key[head, look, 2:] = torch.linalg.qr(noise(CONTENT, CONTENT)).Q
                key[head, 7, 0] = 1.0
            # Logits with |x|^2 = 8: 8 * strength / 4 on itself, and about as much on BOS.
            strength, small = 50.0, 1e-3 if family == "qwen3" else 1.0
            for head in range(HEADS):
                query[head, look] = strength * key[head // 2, look]
                query[head, 7, 1] = small * strength / 2**0.5
                query[head, 7, 2:] = small * noise(CONTENT)
            attention.q_proj.weight.copy_(query.flatten(0, 1))
            attention.k_proj.weight.copy_(key.flatten(0, 1))
            if family == "qwen3":
                # Keys come out with length 4, queries with length 4 and the sink's channel magnified back.
                attention.k_norm.weight.fill_(1.0)
                attention.q_norm.weight.fill_(strength / 4)
                attention.q_norm.weight[7] = strength / 4 / small * 2**0.5
        model.model.layers[-1].self_attn.o_proj.weight.copy_(noise(SHAPE["hidden_size"], HEADS * HEAD_DIM) * 0.2)
    return model.eval()


def distinct_windows(count: int, length: int = 32, seed: int = 0) -> torch.Tensor:
    """Windows that begin with BOS and hold no other token twice."""
    generator = torch.Generator().manual_seed(seed)
    rows = [3 + torch.randperm(SHAPE["vocab_size"] - 3, generator=generator)[: length - 1] for _ in range(count)]
    return torch.cat([torch.full((count, 1), BOS), torch.stack(rows)], dim=1)


def fit_and_load(
    source, windows: torch.Tensor, held_out: int, granularity: str = "headwise"
) -> tuple[TransferReport, GatedAttentionForCausalLM]:
    """Calibrate on given windows, and the model that comes of it."""
    reading = read_source(
        read_checkpoint(source), granularity, gate_bias=True, biases=("v_bias", "o_bias"), gate_scale=1.0
    )
    changed = {}
    report = calibrate(
        reading.checkpoint,
        reading.config,
        Calibration(windows, held_out, torch.ones(len(windows), dtype=torch.bool), windows[:0]),
        granularity=granularity,
        attention_weight=0.1,
        seed=0,
        on_layer=lambda index, tensors: changed.update(tensors),
        progress=False,
    )
    model = GatedAttentionForCausalLM(reading.config).eval()
    state = dict.fromkeys(model.state_dict())
    original = AutoModelForCausalLM.from_pretrained(source).state_dict()
    zeros = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    model.load_state_dict({name: changed.get(name, original.get(name, zeros[name])) for name in state})
    return report, model


@pytest.mark.parametrize("qk_norm", [False, True], ids=["llama", "qwen3"])
def test_identity_on_random_models(qk_norm):
    """
    With the sink hidden and the exact gate, a layer with the biases that a transfer writes computes what it did with the
    sink, for every head and query, whatever the weights are.
    """
    model = tiny_gated(
        qk_norm=qk_norm, v_bias=True, o_bias=True, gate_bias=True, gate_granularity="headwise", gate_scale=2.0
    )
    layer, length = model.model.layers[1].double(), 24
    attention = layer.self_attn
    torch.nn.init.zeros_(attention.g_proj.weight)
    torch.nn.init.zeros_(attention.g_proj.bias)
    position_embeddings = model.model.rotary_emb(torch.zeros(1, dtype=torch.float64), torch.arange(length)[None])
    hidden_states = torch.randn(length, TINY_SHAPE["hidden_size"], generator=torch.Generator().manual_seed(3)).double()
    with torch.no_grad():
        expected, *_ = attention(layer.input_layernorm(hidden_states[None]), position_embeddings)
        opened = OpenedAttention(layer, position_embeddings)
        before = opened.project(hidden_states)
        shares = torch.cat([p for _, p in opened.probabilities(before.query, before.key)])
        gates = GateFit(attention.g_proj.weight, attention.g_proj.bias, torch.zeros(32).double(), 0.0, torch.zeros(0))
        nothing = torch.zeros(0)
        sinks_value = before.value[:, 0]  # one for each key/value head
        apply_fit(layer, LayerFit(attention.k_proj.weight, sinks_value, gates, nothing, nothing, nothing, nothing))
        values = OpenedAttention(layer, position_embeddings).project(hidden_states).value
        output = torch.zeros(length, 4, 10, dtype=torch.float64)
        for head in range(4):
            for query in range(1, length):
                others = shares[head, query, 1 : query + 1]
                gate = 1 - shares[head, query, 0]
                for key in range(1, query + 1):
                    output[query, head] += gate * others[key - 1] / others.sum() * values[head // 2, key]
        # Half of `o_proj` is for the identity gates' 2: here the gate is the exact one.
        found = output.flatten(1) @ (2 * attention.o_proj.weight).T + attention.o_proj.bias
    assert torch.allclose(found, expected[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("strength", [0.25, 0.0, -1.0])
@pytest.mark.parametrize("with_bias", [False, True], ids=["no_bias", "bias"])
def test_key_edit_moves_the_sink_and_little_else(strength, with_bias):
    generator = torch.Generator().manual_seed(0)
    size, width, heads = 24, 8, 2
    # The sink is like the others in some channels and unlike them in the rest.
    others = torch.randn(400, size, generator=generator) * torch.logspace(-1, 1, size)
    sink = torch.randn(size, generator=generator)
    weight, bias = torch.randn(width, size, generator=generator), torch.randn(width, generator=generator) * with_bias
    key = weight @ sink + bias
    moments = KeyMoments(
        (others.T @ others / len(others)).double(),
        torch.outer(sink, sink).double(),
        sink.double(),
        key.double(),
        torch.zeros(heads, width // heads).double(),
    )
    change = key_edit(moments, weight, bias if with_bias else None).change(torch.full((heads,), strength))
    distance = ((weight + change) @ sink + bias - strength * key).norm() / key.norm()
    projected = (strength - 1) * torch.outer(key, sink) / sink.square().sum()
    assert distance < 0.1
    assert (others @ change.T).square().mean() < 0.3 * (others @ projected.T).square().mean()


def test_opened_attention_is_the_layers_own():
    """What is fitted is what the layer computes: heads, groups, norms, RoPE and biases are where the model has them."""
    model = tiny_gated(qk_norm=True, qk_bias=True, v_bias=True, gate_scale=2.0)
    layer = model.model.layers[1]
    torch.nn.init.zeros_(layer.self_attn.g_proj.weight)  # the gates are exactly 1
    hidden_states = torch.randn(1, 20, TINY_SHAPE["hidden_size"], generator=torch.Generator().manual_seed(3))
    position_embeddings = model.model.rotary_emb(hidden_states, torch.arange(20)[None])
    opened = OpenedAttention(layer, position_embeddings)
    with torch.no_grad():
        expected, *_ = layer.self_attn(layer.input_layernorm(hidden_states), position_embeddings)
        projections = opened.project(hidden_states[0])
        found = sum(
            opened.to_residual(probabilities @ projections.value[number], heads).sum(0)
            for number, (heads, probabilities) in enumerate(opened.probabilities(projections.query, projections.key))
        )
    assert torch.allclose(found, expected[0], atol=1e-5)


@pytest.mark.parametrize("granularity", ["headwise", "elementwise"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_planted_sink_is_transferred_exactly(tmp_path, family, granularity):
    model = planted_sink(family)
    source = save_source(tmp_path / "source", model)
    windows = distinct_windows(64)
    before = inspect_model(model, [{"input_ids": windows[-8:]}])
    assert before.f_attn > 0.3
    report, transferred = fit_and_load(source, windows, held_out=8, granularity=granularity)
    assert report.transferred == [0]
    assert all(layer.sinks[0]["tokens_per_window"] == 1 for layer in report.layers)
    assert min(min(layer.r2) for layer in report.layers) > 0.9999
    by_head = torch.tensor(report.layers[0].sink_attention)
    assert torch.allclose(by_head[0], torch.tensor(before.layers[0].f_attn), atol=1e-4)
    assert by_head[1].max() < 1e-3
    after = inspect_model(transferred, [{"input_ids": windows[-8:]}])
    assert after.f_attn < 1e-3
    fresh = distinct_windows(8, seed=9)
    expected, found = logits_of(model, fresh), logits_of(transferred, fresh)
    # The gates are fitted in float32 by an iteration that stops: they are not exact to the last bit.
    assert (found - expected).abs().max() < 2e-3 * expected.abs().max()
    gates = [gate for layer in after.layers for gate in layer.gate.mean]
    assert min(gates) > 0.2 and max(gates) < 0.8


def test_elementwise_result_of_a_qk_norm_model_is_a_stock_qwen3_next(tmp_path, target):
    """The stock class holds every number of the result: one switch for all biases, those that are missing zero."""
    source = save_source(tmp_path / "source", planted_sink("qwen3"))
    transfer_sinks(source, target, TEXT, granularity="elementwise", tokens=1024, length=32, progress=False)
    model = AutoModelForCausalLM.from_pretrained(target)
    stock = Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **SHAPE,
            num_hidden_layers=1,
            attention_bias=True,
            layer_types=["full_attention"],
            mlp_only_layers=[0],
            num_experts=0,
            partial_rotary_factor=1.0,
            rms_norm_eps=model.config.rms_norm_eps,
        )
    ).eval()
    ours, theirs = model.state_dict(), stock.state_dict()
    new = {}
    for name, tensor in theirs.items():
        if name in ours and ours[name].shape == tensor.shape:
            new[name] = ours[name] - 1 if "norm.weight" in name else ours[name]  # theirs is (1 + w)
        elif ".q_proj." in name:
            gate = ours[name.replace("q_proj", "g_proj")].unflatten(0, (HEADS, HEAD_DIM))
            query = ours.get(name, torch.zeros(HEADS * HEAD_DIM)).unflatten(0, (HEADS, HEAD_DIM))
            new[name] = torch.cat([query, gate], dim=1).flatten(0, 1)
        else:
            assert name.endswith("k_proj.bias")
            new[name] = torch.zeros_like(tensor)
    stock.load_state_dict(new)
    windows = distinct_windows(4, seed=7)
    expected = logits_of(model, windows)
    assert torch.allclose(logits_of(stock, windows), expected, rtol=0, atol=1e-4 * expected.abs().max().item())


def test_sinks_beside_the_first_token(tmp_path):
    """A token further on that is in the first one's state is a sink as well, and is named."""
    model, windows, second = planted_sink(), distinct_windows(64, length=80), 5
    with torch.no_grad():
        model.model.embed_tokens.weight[second] = model.model.embed_tokens.weight[BOS]
    windows[windows == second] = 6
    windows[:, 9] = second
    before = inspect_model(model, [{"input_ids": windows[-4:]}])
    report, transferred = fit_and_load(save_source(tmp_path / "source", model), windows, held_out=8)
    (group,) = report.layers[0].sinks
    assert group["tokens_per_window"] == 2 and group["first_token_share"] == 1
    assert group["further_tokens"] == [[str(second), 64]]
    assert f"sinks beside the first token in layers 0; most often '{second}'" in report.describe()
    after = inspect_model(transferred, [{"input_ids": windows[-4:]}])
    assert before.largest_key_share > 0.2 and after.largest_key_share < 0.05
    assert after.perplexity == pytest.approx(before.perplexity, rel=0.01)


def planted_massive() -> LlamaForCausalLM:
    """Two layers: neuron 3 of the first writes 1,000 into BOS's state, neuron 5 of the second takes it out again."""
    model = planted_sink(layers=2)
    with torch.no_grad():
        for layer, neuron, written in zip(model.model.layers, (3, 5), (1000.0, -1000.0), strict=True):
            for projection in (layer.mlp.gate_proj, layer.mlp.up_proj):
                projection.weight[neuron] = 0
                projection.weight[neuron, 0] = 5.0
            layer.post_attention_layernorm.weight.fill_(1.0)
            # Normalised, BOS has a 4 in its channel and nothing elsewhere: the neuron fires with 20 * silu(20).
            layer.mlp.down_proj.weight[0, neuron] = written / 400
            layer.self_attn.o_proj.weight[0] = 0  # nor does attention put anything there
    return model


def test_massive_activations_become_ordinary(tmp_path):
    """The rows that write them are multiplied by a power of two, and no prediction changes: only their direction is read."""
    model, windows = planted_massive(), distinct_windows(64)
    source = save_source(tmp_path / "source", model)
    report, transferred = fit_and_load(source, windows, held_out=8)
    assert report.transferred == [0, 1]
    # Ordinary tokens have a largest activation of 1 or so: 1,000 becomes about twice that.
    assert report.massive.neurons == {0: [3], 1: [5]} and 2**-9 <= report.massive.factor <= 2**-8
    assert report.layers[0].m_act[0] == pytest.approx(1001.4, abs=0.1)
    assert max(layer.m_act[1] for layer in report.layers) < 6
    for layer, neuron in zip((0, 1), (3, 5), strict=True):
        expected = model.model.layers[layer].mlp.up_proj.weight.clone()
        expected[neuron] *= report.massive.factor
        assert torch.equal(transferred.model.layers[layer].mlp.up_proj.weight, expected)
    fresh = distinct_windows(8, seed=9)
    expected, found = logits_of(model, fresh), logits_of(transferred, fresh)
    assert (found - expected)[:, 1:].abs().max() < 2e-3 * expected.abs().max()
    inspected = inspect_model(transferred, [{"input_ids": windows[-8:]}])
    assert inspected.m_act == pytest.approx(report.m_act[1], rel=1e-3)
    assert inspected.f_attn == pytest.approx(report.f_attn[1], abs=1e-6)


def test_massive_activations_at_the_lowest_cost(tmp_path, monkeypatch):
    """Where no size costs as little as is wanted, the cheapest counts, although others are smaller."""
    monkeypatch.setattr(calibrate_module, "LARGEST_RISE", 0.5)
    report, _ = fit_and_load(save_source(tmp_path / "source", planted_massive()), distinct_windows(64), held_out=8)
    tried = report.massive.tried
    assert len(tried) == 5 and tried[report.massive.factor] == min(tried.values()) == report.perplexity[1]


@pytest.mark.parametrize("why", ["asked", "costly"])
def test_massive_activations_are_left(tmp_path, target, why, monkeypatch):
    """Where they are to stay, or where each smaller size costs too much perplexity."""
    for limit in ("LARGEST_RISE", "LARGEST_RISE_AT_ALL"):
        monkeypatch.setattr(calibrate_module, limit, 0.5)
    source = save_source(tmp_path / "source", planted_massive())
    report = transfer_sinks(source, target, TEXT, keep_massive=why == "asked", **SMALL)
    if why == "asked":
        assert report.massive is None and report.settings.keep_massive
    else:
        assert report.massive.factor is None and len(report.massive.tried) == 5
        assert "massive activations are left: making 2 neurons in layers 0, 1 smaller" in report.describe()
        assert TransferReport.load(target / "sink_transfer.json") == report
    before, after = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (source, target))
    assert all(torch.equal(before[name], after[name]) for name in before if ".mlp." in name)


@pytest.fixture
def planted_source(tmp_path):
    return save_source(tmp_path / "source", planted_sink())


SMALL = {"tokens": 1024, "length": 32, "progress": False}


def test_checkpoint_saves_loads_and_carries_its_code(planted_source, target, tmp_path):
    before = tree_hashes(planted_source)
    report = transfer_sinks(planted_source, target, TEXT, text_name="some text", **SMALL)
    assert tree_hashes(planted_source) == before
    assert report.transferred == [0]
    assert TransferReport.load(target / "sink_transfer.json") == report
    assert not list(tmp_path.glob(".target*"))

    model = AutoModelForCausalLM.from_pretrained(target)
    assert type(model) is GatedAttentionForCausalLM
    assert model.config.gate_scale == 1.0
    # A plain gated model: every projection has what stock layouts with one switch for biases have.
    assert (model.config.v_bias, model.config.o_bias, model.config.gate_bias) == (True, True, True)
    windows = distinct_windows(2, seed=5)
    expected = logits_of(model, windows)
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "again"), windows), expected)

    torch.save((windows, expected), tmp_path / "expected.pt")
    script = WITHOUT_PACKAGE + (
        f"windows, expected = torch.load({str(tmp_path / 'expected.pt')!r})\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(target)!r}, trust_remote_code=True)\n"
        "assert torch.equal(model(windows, use_cache=False).logits, expected)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)


def test_same_seed_gives_the_same_checkpoint(planted_source, tmp_path, monkeypatch):
    """Also with the states on disk."""
    states, files, from_file = [], [], torch.from_file
    monkeypatch.setattr(torch, "from_file", lambda name, **options: files.append(name) or from_file(name, **options))
    for name, on_disk in (("one", False), ("two", True)):
        transfer_sinks(planted_source, tmp_path / name, TEXT, on_disk=on_disk, **SMALL)
        states.append(AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert [Path(name).name for name in files] == ["before.bin", "after.bin"]
    assert not any(Path(name).exists() for name in files)


@pytest.mark.parametrize("granularity", ["headwise", "elementwise"])
def test_layer_without_a_sink_stays_as_it_is(tmp_path, target, granularity):
    """Where no token draws attention, the gates are the identity, exactly."""
    model = planted_sink(layers=2)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[:, 0] = 0  # BOS has a key like any other
        model.model.layers[0].self_attn.q_proj.weight.mul_(0.1)  # and every token looks about
    source = save_source(tmp_path / "source", model)
    report = transfer_sinks(source, target, TEXT, granularity=granularity, **SMALL)
    assert [layer.outcome for layer in report.layers] == ["no sink", "transferred"]
    found = AutoModelForCausalLM.from_pretrained(target).model.layers[0].self_attn
    assert torch.count_nonzero(found.g_proj.weight) == 0 and torch.count_nonzero(found.v_proj.bias) == 0
    assert torch.equal(found.o_proj.weight, 2 * model.model.layers[0].self_attn.o_proj.weight)
    assert torch.equal(found.k_proj.weight, model.model.layers[0].self_attn.k_proj.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_format_of_the_weights_is_kept(tmp_path, target, dtype):
    source = save_source(tmp_path / "source", planted_sink(), dtype=dtype, sharded=True)
    report = transfer_sinks(source, target, TEXT, **SMALL)
    model = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    assert model.dtype == dtype
    assert report.perplexity_ratio < 1.05


def test_source_with_biases_of_its_own(tmp_path, target):
    """The biases that a Llama with `attention_bias` has are added to, not replaced."""
    planted = planted_sink()
    model = randomise(LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=1, attention_bias=True)))
    model.load_state_dict(planted.state_dict(), strict=False)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.bias.zero_()
            layer.self_attn.k_proj.bias.zero_()
    source = save_source(tmp_path / "source", model)
    windows = distinct_windows(64)
    _, transferred = fit_and_load(source, windows, held_out=8)
    expected, found = logits_of(model, windows[-4:]), logits_of(transferred, windows[-4:])
    assert (found - expected).abs().max() < 5e-3 * expected.abs().max()


def test_report_only_writes_nothing_and_predicts_the_result(planted_source, target, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    predicted = predict_transfer(planted_source, TEXT, **SMALL)
    assert sorted(tmp_path.rglob("*")) == before
    report = transfer_sinks(planted_source, target, TEXT, **SMALL)
    assert predicted.perplexity == report.perplexity
    assert predicted.layers == report.layers
    assert "a good candidate" in predicted.verdict


def test_model_without_a_sink(source, target):
    """Nothing is written, and the prediction says why."""
    assert "no attention sink was found" in predict_transfer(source, TEXT, **SMALL).verdict
    with pytest.raises(NothingToTransferError, match=r"nothing to transfer.*gated-attention convert"):
        transfer_sinks(source, target, TEXT, **SMALL)
    assert not target.exists()


def test_what_draws_attention_without_a_constant_value_is_left(tmp_path):
    """A head that copies from the first token is no sink: no bias can stand in for values that differ."""
    model, windows = planted_sink(), distinct_windows(64)
    windows[::2, 0] = 2  # another first token, which draws attention as BOS does
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding[2] = embedding[BOS]
        embedding[BOS, 2], embedding[2, 2] = 0.1, -0.1
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight[:, 2] *= 200
            layer.self_attn.v_proj.weight[:, [0, 1, *range(3, 16)]] *= 0.01
            layer.self_attn.k_proj.weight[:, 2] = 0
            layer.self_attn.q_proj.weight[:, 2] = 0
    report, _ = fit_and_load(save_source(tmp_path / "source", model), windows, held_out=8)
    assert report.layers[0].outcome == "error"
    assert report.layers[0].sinks and report.layers[0].error > 0.3
    assert "no constant value" in report.verdict


def test_gated_models_are_not_gated_again(planted_source, target, tmp_path):
    transfer_sinks(planted_source, target, TEXT, **SMALL)
    with pytest.raises(ConversionError, match="already has gates"):
        transfer_sinks(target, tmp_path / "again", TEXT, **SMALL)
    convert_checkpoint(planted_source, tmp_path / "converted")
    with pytest.raises(ConversionError, match="already has gates"):
        predict_transfer(tmp_path / "converted", TEXT, **SMALL)


def test_families_whose_attention_needs_no_sink(tmp_path, target):
    config = GptOssConfig(
        vocab_size=96, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_local_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    source = save_source(tmp_path / "learned", GptOssForCausalLM(config))
    with pytest.raises(ConversionError, match="learned sinks of its own"):
        transfer_sinks(source, target, TEXT, **SMALL)
    source = save_source(tmp_path / "linear")
    described = json.loads((source / "config.json").read_text()) | {
        "model_type": "qwen3_next",
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
    }
    (source / "config.json").write_text(json.dumps(described))
    with pytest.raises(ConversionError, match="linear attention"):
        transfer_sinks(source, target, TEXT, **SMALL)
    assert not target.exists()


def test_short_text_and_missing_tokenizer(planted_source, target, tmp_path):
    with pytest.raises(ConversionError, match="1,024 tokens to calibrate and 64 to test are asked for"):
        transfer_sinks(planted_source, target, TEXT[:200], test_tokens=64, **SMALL)
    bare = save_source(tmp_path / "bare", planted_sink(), tokenizer=False)
    with pytest.raises(ConversionError, match="no tokenizer"):
        transfer_sinks(bare, target, TEXT, **SMALL)
    assert not target.exists()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("granularity", "tokenwise", "`granularity` must be"),
        ("attention_weight", -1.0, "`attention_weight` must be a finite number from 0 on, got -1.0"),
        ("length", 8, "`length` must be at least 16, got 8"),
        ("length", 256, "`length` must be at most 128, the model's max_position_embeddings, got 256"),
        ("tokens", 64, "`tokens` must hold at least 8 windows of `length` 32, got 64"),
        ("bos_share", 1.5, "`bos_share` must lie between 0 and 1, got 1.5"),
        ("device", "abacus", "the device 'abacus' cannot be used"),
        ("device", "meta", "the device 'meta' cannot be used"),
        ("seed", 10**23, "`seed` must lie between 0 and"),
    ],
)
def test_bad_options_are_named(planted_source, target, field, value, message):
    with pytest.raises(ConversionError, match=message):
        transfer_sinks(planted_source, target, TEXT, **{**SMALL, field: value})
    assert not target.exists()


def test_options_as_object_or_keywords(planted_source, target):
    with pytest.raises(TypeError, match="not both"):
        transfer_sinks(planted_source, target, TEXT, TransferOptions(), tokens=64)


def test_interrupted_run_leaves_nothing(planted_source, target, monkeypatch, tmp_path):
    from gated_attention.conversion.sink_transfer import transfer

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(transfer, "_write_layer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        transfer_sinks(planted_source, target, TEXT, **SMALL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_what_was_written_is_read_back(planted_source, target, monkeypatch):
    """A checkpoint that is not the model that was fitted does not appear."""
    from gated_attention.conversion.sink_transfer import transfer

    monkeypatch.setattr(transfer, "_write_layer", lambda plan, folder, tensors: None)
    with pytest.raises(ConversionError, match="nothing was kept"):
        transfer_sinks(planted_source, target, TEXT, **SMALL)
    assert not target.exists()


def test_tokenizer_without_bos(tmp_path, target):
    """The first token is the sink, whatever it is."""
    model = planted_sink()
    source = save_source(tmp_path / "source", model, tokenizer=False)
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = None
    tokenizer.save_pretrained(source)
    report = predict_transfer(source, TEXT, **SMALL)
    assert report.settings.bos_windows == 0
    assert "no BOS" in report.describe()


def test_random_model_is_converted_whatever_its_options(tmp_path, target):
    """No family option breaks the calibration; a random model has no sink, and says so."""
    source = save_source(
        tmp_path / "source", tiny_llama(tie_word_embeddings=True, mlp_bias=True, num_key_value_heads=1)
    )
    report = predict_transfer(source, TEXT, **SMALL)
    assert report.perplexity_ratio == 1.0


def test_first_tokens_of_several_kinds(tmp_path):
    """Each kind of first token is a state of its own; none hides the others."""
    model, windows, kinds = planted_sink(), distinct_windows(64), (BOS, 2, 0)
    with torch.no_grad():
        for channel, token in enumerate(kinds):
            model.model.embed_tokens.weight[token] = 0
            model.model.embed_tokens.weight[token, 0] = 1.0
            model.model.embed_tokens.weight[token, 2 + channel] = 1.0
        for projection in ("k_proj", "v_proj"):
            # The sinks' keys and values are alike all the same.
            getattr(model.model.layers[0].self_attn, projection).weight[:, 2:5] = 0
    windows[:, 0] = torch.tensor(kinds)[torch.arange(64) % 3]
    report, _ = fit_and_load(save_source(tmp_path / "source", model), windows, held_out=8)
    assert len(report.layers[0].sinks) == 3
    assert report.transferred == [0]
    assert report.f_attn[0] > 0.3 and report.f_attn[1] < 0.05


def test_sinks_in_no_fitted_window_are_left(tmp_path):
    """Nothing can be fitted to what is not there."""
    windows = distinct_windows(16)
    windows[:12, 0] = 7
    report, _ = fit_and_load(save_source(tmp_path / "source", planted_sink()), windows, held_out=4)
    assert report.layers[0].outcome in ("rare", "no sink")
    assert report.perplexity_ratio == 1.0


def test_source_that_gives_nan_is_named(tmp_path, target):
    model = planted_sink(layers=2)
    torch.nn.init.constant_(model.model.layers[1].mlp.down_proj.weight, torch.nan)
    source = save_source(tmp_path / "source", model)
    with pytest.raises(ConversionError, match="layer 1 gives NaN or infinity"):
        transfer_sinks(source, target, TEXT, **SMALL)
    assert not target.exists()


def test_formats_are_kept_tensor_by_tensor(tmp_path, target):
    """Doubling `o_proj` in a layer without a sink is exact, whatever the format of the others."""
    source = save_source(tmp_path / "source", planted_sink(layers=2), dtype=torch.bfloat16)
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors[name] = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(0)) * 1e-4
    tensors["model.layers.0.self_attn.k_proj.weight"].zero_()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    report = transfer_sinks(source, target, TEXT, **SMALL)
    assert report.layers[0].outcome == "no sink"
    written = load_file(target / "model-00001-of-00002.safetensors")
    assert torch.equal(written[name], 2 * tensors[name])


OPTIONS = TransferOptions(tokens=1024, length=32, test_tokens=256)


def test_command_shows_the_result_on_each_text(planted_source, target, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "calibration.txt").write_text(TEXT)
    (tmp_path / "other").mkdir()
    for path in (tmp_path / "test.txt", tmp_path / "other" / "test.txt"):
        path.write_text("attention opens and the gate closes " * 100)
    texts = (tmp_path / "test.txt", tmp_path / "other" / "test.txt")
    said = []
    report = run_transfer(
        planted_source,
        target,
        tmp_path / "calibration.txt",
        OPTIONS,
        ShowOptions(texts, out=tmp_path / "out"),
        echo=said.append,
    )
    assert list(report.tests) == ["end of calibration.txt", "test.txt", str(tmp_path / "other" / "test.txt")]
    for before, after in report.tests.values():
        assert before["f_attn"] > 0.3 and after["f_attn"] < 0.01
        assert after["perplexity"] == pytest.approx(before["perplexity"], rel=0.1)
    assert TransferReport.load(target / "sink_transfer.json") == report
    for number in (1, 2, 3):
        assert (tmp_path / "out" / f"test_{number}" / "sheet.png").read_bytes().startswith(b"\x89PNG")
    assert "A good candidate" in said[0] and "256 tokens of test.txt" in "".join(said)


@pytest.mark.parametrize(
    ("options", "tests", "message"),
    [
        ({}, {"dtype": "flot32"}, "`dtype` must be auto or a floating point type"),
        ({}, {"out": "source/figures"}, "lies in the source"),
        ({}, {"out": "a_file"}, "is a file; give a folder"),
        ({}, {"texts": ("short.txt",)}, "the text has"),
        ({"test_tokens": 16}, {}, "`test_tokens` must be 0 or hold a window of `length` 32, got 16"),
        ({"test_tokens": -5}, {}, "`test_tokens` must be 0 or hold a window of `length` 32, got -5"),
    ],
)
def test_command_finds_mistakes_before_the_work(planted_source, target, tmp_path, options, tests, message):
    (tmp_path / "calibration.txt").write_text(TEXT)
    (tmp_path / "short.txt").write_text("the gate")
    (tmp_path / "a_file").write_text("")
    tests = {key: tmp_path / value if key == "out" else value for key, value in tests.items()}
    tests["texts"] = tuple(tmp_path / name for name in tests.get("texts", ()))
    before = tree_hashes(tmp_path)
    with pytest.raises((ConversionError, InspectionError), match=message):
        made = TransferOptions(**{**vars(OPTIONS), **options})
        run_transfer(planted_source, target, tmp_path / "calibration.txt", made, ShowOptions(**tests))
    assert tree_hashes(tmp_path) == before


def test_command_predicts_without_a_target(planted_source, tmp_path):
    (tmp_path / "calibration.txt").write_text(TEXT)
    said = []
    arguments = (planted_source, None, tmp_path / "calibration.txt", OPTIONS)
    report = run_transfer(*arguments, ShowOptions(), report_only=True, echo=said.append)
    assert report.describe() == said[0]
    with pytest.raises(ConversionError, match="give the folder to make as TARGET, or --report-only"):
        run_transfer(*arguments, ShowOptions())
