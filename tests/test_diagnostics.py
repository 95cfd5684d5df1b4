"""Known values, gates of stock models, windows of text and bad input: what the diagnostics say of a model."""

import math

import pytest
import torch
from conftest import TINY_SHAPE, randomise, tiny_gated, tiny_input_ids, tiny_llama, tiny_tokenizer
from test_diagnostics_maps import from_config, packed, padded, plain
from torch import nn
from transformers import (
    AfmoeConfig,
    AfmoeForCausalLM,
    BertConfig,
    BertLMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from gated_attention import inspect_model, inspect_text
from gated_attention.diagnostics import Inspection, InspectionError


def one_layer(hidden_size: int = 8, **fields) -> LlamaForCausalLM:
    """One layer, one head, all weights zero: attention is uniform until weights are set."""
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=hidden_size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        **fields,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
    return model


def test_known_value_uniform_attention():
    """With equal scores query i spreads over i + 1 keys: its share on each is 1 / (i + 1), its entropy log(i + 1)."""
    length = 9
    inspection = inspect_model(one_layer(), [{"input_ids": torch.arange(length)[None]}])
    shares = [1 / (query + 1) for query in range(1, length)]
    assert inspection.f_attn == pytest.approx(sum(shares) / len(shares), abs=1e-6)
    entropies = [math.log(query + 1) for query in range(1, length)]
    assert inspection.entropy == pytest.approx(sum(entropies) / len(entropies), abs=1e-5)
    assert inspection.layers[0].largest_key_position == 0
    assert inspection.perplexity == pytest.approx(16, rel=1e-5)  # zero logits


@pytest.mark.parametrize("place", [0, 3], ids=["first", "fourth"])
@pytest.mark.parametrize("score", [0.5, 3.0, 8.0])
def test_known_value_sink_of_a_set_mass(score, place):
    """
    Every query has the score `score` with the sink's key and 0 with all others, so the sink takes
    exp(score) / (exp(score) + others).
    """
    length, sink, other = 9, 5, 6
    # Angles of the slowest pair of channels, 3 and 7, are practically 0 with this base.
    model = one_layer(rope_parameters={"rope_type": "default", "rope_theta": 1e30})
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        model.model.embed_tokens.weight[sink, :2] = 1.0
        model.model.embed_tokens.weight[other, 0] = model.model.embed_tokens.weight[other, 2] = 1.0
        # RMSNorm turns two ones among eight channels into twos.
        attention.q_proj.weight[3, 0] = 0.5
        attention.k_proj.weight[3, 1] = 0.5 * score / attention.scaling
    tokens = torch.full((1, length), other)
    tokens[0, place] = sink
    inspection = inspect_model(model, [{"input_ids": tokens}])
    masses = [math.exp(score) / (math.exp(score) + query) if query >= place else 0.0 for query in range(1, length)]
    firsts = [(1 - mass) / query if query >= place else 1 / (query + 1) for query, mass in enumerate(masses, start=1)]
    if place == 0:
        assert inspection.f_attn == pytest.approx(sum(masses) / len(masses), abs=1e-5)
    else:
        assert inspection.f_attn == pytest.approx(sum(firsts) / len(firsts), abs=1e-5)
    if score > 1:  # otherwise the first tokens, which are seen by more queries, get more in all
        assert inspection.largest_key_share == pytest.approx(sum(masses) / len(masses), abs=1e-5)
        assert inspection.layers[0].largest_key_position == place


def test_known_value_planted_activation():
    model = one_layer(hidden_size=16, head_dim=8)
    with torch.no_grad():
        model.model.embed_tokens.weight[5, 11] = -321.0
        model.model.embed_tokens.weight[5, 2] = 7.0
        model.model.embed_tokens.weight[6, 3] = 50.0
    inspection = inspect_model(model, [{"input_ids": torch.tensor([[1, 6, 3, 5, 2]])}])
    largest = inspection.largest_activation
    assert (largest.value, largest.position, largest.channel, largest.token_id) == (321.0, 3, 11, 5)
    assert [activation.value for activation in inspection.layers[0].top_activations] == [321.0, 50.0, 7.0]
    assert inspection.m_act == 321.0
    assert inspection.layers[0].median_activation == 0.0


def test_figures_over_windows_are_those_of_all_windows():
    model, batches = tiny_gated(), [{"input_ids": tiny_input_ids(1, 19, seed=seed)} for seed in range(4)]
    together = inspect_model(model, [{"input_ids": torch.cat([batch["input_ids"] for batch in batches])}])
    apart = inspect_model(model, batches)
    for name, value in together.summary().items():
        assert apart.summary()[name] == pytest.approx(value, rel=1e-5), name


def test_gate_scores_equal_plain_loops():
    model, inputs = tiny_gated(gate_granularity="headwise", gate_scale=2.0), tiny_input_ids(2, 11)
    logits = []
    handles = [
        layer.self_attn.g_proj.register_forward_hook(lambda module, args, output: logits.append(output))
        for layer in model.model.layers
    ]
    inspection = inspect_model(model, [{"input_ids": inputs}])
    for handle in handles:
        handle.remove()
    for layer, raw in zip(inspection.layers, logits, strict=True):
        for head in range(4):
            scores = [2 / (1 + math.exp(-float(x))) for x in raw[..., head].flatten()]
            assert layer.gate.mean[head] == pytest.approx(sum(scores) / len(scores), rel=1e-5)
            assert layer.gate.closed_fraction[head] == sum(score < 0.1 for score in scores) / len(scores)
        assert sum(layer.gate.histogram) == pytest.approx(1)
        assert layer.gate.histogram_end == 2.0


def test_open_and_closed_gates_land_in_the_last_and_the_first_bin():
    for bias, place in ((30.0, -1), (-30.0, 0)):
        model = tiny_gated(gate_bias=True)
        for layer in model.model.layers:
            nn.init.constant_(layer.self_attn.g_proj.bias, bias)
            nn.init.zeros_(layer.self_attn.g_proj.weight)
        gate = inspect_model(model, [{"input_ids": tiny_input_ids()}]).layers[0].gate
        assert gate.histogram[place] == 1.0
        assert gate.closed_fraction == [float(place == 0)] * 4


def stock_afmoe():
    shape = {
        **TINY_SHAPE,
        "num_dense_layers": 3,
        "moe_intermediate_size": 16,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    }
    return randomise(AfmoeForCausalLM(AfmoeConfig(**shape, layer_types=["full_attention"] * 3)))


def stock_lfm3():
    rope = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    return from_config(
        "lfm3", layer_types=["full_attention"] * 3, rope_parameters=rope, use_sandwich_norm=False, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def stock_qwen(model_type: str):
    hybrid = {
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "head_dim": 16,
        "mlp_only_layers": [0, 1, 2],
    }
    return from_config(model_type, **hybrid)


STOCK = {
    "qwen3_next": lambda: stock_qwen("qwen3_next"),
    "qwen3_5": lambda: stock_qwen("qwen3_5_text"),
    "afmoe": stock_afmoe,
    "lfm3": stock_lfm3,
}


@pytest.mark.parametrize("stock", STOCK.values(), ids=STOCK.keys())
def test_natively_gated_stock_models_show_their_gates(stock):
    """The scores are those that the model multiplies by: attention's own output times them is what o_proj gets."""
    from gated_attention.diagnostics.capture import Batch, Observer, watching

    model, inputs = stock(), tiny_input_ids(2, 13)

    class Keep(Observer):
        def __init__(self):
            self.scores, self.outputs = {}, {}

        def gates(self, layer_idx, scores):
            self.scores[layer_idx] = scores

        def head_outputs(self, layer_idx, outputs, gated):
            self.outputs[layer_idx, gated] = outputs

    seen = Keep()
    with torch.no_grad(), watching(model, Batch.of(inputs), seen):
        model(inputs, use_cache=False)
    assert seen.scores
    for layer, scores in seen.scores.items():
        torch.testing.assert_close(seen.outputs[layer, True], seen.outputs[layer, False] * scores)
    inspection = inspect_model(model, [{"input_ids": inputs}])
    assert 0 < inspection.gate_mean < 1


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text"])
def test_hybrid_models_skip_linear_layers_and_say_so(model_type):
    from gated_attention.diagnostics.report import card_section, terminal_report

    model = stock_qwen(model_type)
    inspection = inspect_model(model, [plain()])
    assert inspection.skipped_layers == {0: "linear_attention"}
    assert inspection.layers[0].top_activations
    assert "attention is not measured in layers 0 (linear_attention)" in terminal_report([inspection])
    assert "linear_attention" in card_section([inspection])
    assert "not measured" not in terminal_report([inspect_model(model, [plain()], attention=False)])


def test_attention_maps_of_hybrid_models_are_those_of_their_layers():
    from gated_attention.diagnostics.plots import attention_maps

    model = stock_qwen("qwen3_next")
    found = attention_maps(model, tiny_tokenizer(), "the gate opens and the sink closes", [0, 1, 2], bos=True)
    assert [layer for layer, _, _ in found] == [1, 2]  # layer 0 has none
    ids = torch.tensor(
        [[1, *tiny_tokenizer()("the gate opens and the sink closes", add_special_tokens=False).input_ids]]
    )
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(ids, output_attentions=True, use_cache=False).attentions
    for (_, ours, _), theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(ours), theirs[0].mean(0))


def test_effective_ranks():
    """Equal singular values of number r have effective rank r; W_V W_O of a head is at most head_dim."""
    from gated_attention.diagnostics.accumulate import effective_rank, weight_ranks

    assert effective_rank(torch.tensor([3.0, 3.0, 3.0, 0.0]).double()).item() == pytest.approx(3)
    attention = tiny_llama().model.layers[0].self_attn
    for head, rank in enumerate(weight_ranks(attention)):
        value = attention.v_proj.weight[(head // 2) * 10 : (head // 2 + 1) * 10].double()
        product = attention.o_proj.weight[:, head * 10 : (head + 1) * 10].double() @ value
        assert rank == pytest.approx(effective_rank(torch.linalg.svdvals(product)[:10]).item(), rel=1e-6)
    closed = tiny_gated(gate_granularity="elementwise")
    with torch.no_grad():
        for layer in closed.model.layers:
            layer.self_attn.g_proj.weight.zero_()
    inspection = inspect_model(closed, [plain()])
    # A constant gate scales all channels alike: the rank stays.
    assert inspection.layers[0].gated_output_rank == pytest.approx(inspection.layers[0].output_rank, rel=1e-4)


def test_watching_leaves_the_model_as_it_was():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = tiny_gated().train()
    before = dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
    model.eval()
    with torch.no_grad():
        expected = model(tiny_input_ids(), use_cache=False).logits
    model.train()
    inspect_model(model, [{"input_ids": tiny_input_ids()}])
    assert model.training
    assert before == ALL_ATTENTION_FUNCTIONS._local_mapping
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(tiny_input_ids(), use_cache=False).logits, expected)


def test_saved_result_loads_again(tmp_path):
    inspection = inspect_model(tiny_gated(), [plain()], tokenizer=tiny_tokenizer(), name="tiny")
    inspection.save(tmp_path / "inspection.json")
    assert Inspection.load(tmp_path / "inspection.json") == inspection


TEXT = "the gate opens and the sink closes " * 40


@pytest.mark.parametrize("bos", [True, False, None])
def test_windows_of_a_text(bos):
    inspection = inspect_text(tiny_gated(), tiny_tokenizer(), TEXT, length=16, tokens=100, bos=bos, progress=False)
    settings = inspection.settings
    assert (settings.windows, settings.tokens, settings.length, settings.bos) == (6, 96, 16, bool(bos))
    assert len(inspection.loss_by_position) == 16
    assert inspection.loss_by_position[-1] is None


def tokenizer_without_bos():
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = None
    return tokenizer


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"length": 5000, "tokens": 5000}, ["5000", "longer text or a smaller length"]),
        ({"length": 64, "tokens": 32}, ["tokens", "32", "64"]),
        ({"length": 1}, ["length", "at least 2", "1"]),
        ({"length": 8, "bos": True, "tokenizer": tokenizer_without_bos()}, ["no BOS token", "--no-bos"]),
    ],
    ids=["text_too_short", "fewer_tokens_than_a_window", "length_1", "no_bos"],
)
def test_texts_that_cannot_be_used(options, words):
    tokenizer = options.pop("tokenizer", None) or tiny_tokenizer()
    with pytest.raises(InspectionError) as error:
        inspect_text(tiny_gated(), tokenizer, TEXT, **options)
    for word in words:
        assert word in str(error.value)


def test_encoders_are_refused():
    config = BertConfig(
        vocab_size=96, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    for inputs in (plain(), padded("right")):
        inputs.pop("position_ids", None)
        with pytest.raises(InspectionError, match="not causal"):
            inspect_model(BertLMHeadModel(config), [inputs])
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=96, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(InspectionError, match="encoder-decoder"):
        inspect_model(t5, [plain()])


def test_attention_that_cannot_be_reached_names_what_is_possible():
    model = tiny_llama()

    class OwnAttention(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.layer_idx = inner.v_proj, inner.layer_idx
            self.out = nn.Linear(20, 32)

        def forward(self, hidden_states, **kwargs):
            return self.out(self.inner(hidden_states)), None

    for layer in model.model.layers:
        layer.self_attn = OwnAttention(layer.self_attn)
    with pytest.raises(InspectionError, match="attention=False"):
        inspect_model(model, [plain()])
    inspection = inspect_model(model, [plain()], attention=False)
    assert inspection.f_attn is None
    assert inspection.perplexity > 1
    assert inspection.m_act > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_named_by_layer(value):
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 4] = value
    with pytest.raises(InspectionError, match="layer 1 holds NaN or infinity"):
        inspect_model(model, [plain()])


def test_positions_count_from_the_documents_first_token():
    sink_first = one_layer()  # uniform attention: the first key is seen by most queries
    for inputs in (plain(), padded("left"), packed()):
        inputs["input_ids"] = inputs["input_ids"] % 16
        inspection = inspect_model(sink_first, [inputs])
        assert inspection.layers[0].largest_key_position == 0
        assert inspection.largest_key_share == pytest.approx(inspection.f_attn, abs=1e-6)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"attention_mask": torch.ones(1, 4)}, "must have input_ids"),
        ({"input_ids": torch.ones(1, 4, dtype=torch.long), "token_type_ids": torch.ones(1, 4)}, "token_type_ids"),
        (
            {"input_ids": torch.ones(2, 4, dtype=torch.long), "attention_mask": torch.tensor([[1] * 4, [0] * 4])},
            "padding only",
        ),
        (torch.ones(1, 4, dtype=torch.long), "dictionary with input_ids; got a Tensor"),
    ],
    ids=["no_input_ids", "unknown_input", "row_of_padding", "tensor"],
)
def test_batches_that_cannot_be_used(batch, words):
    with pytest.raises(InspectionError, match=words):
        inspect_model(tiny_llama(), [batch])


def test_labels_of_a_data_set_are_left_out():
    inputs = plain()
    assert inspect_model(tiny_llama(), [{**inputs, "labels": inputs["input_ids"]}]).f_attn > 0


def test_nan_in_the_head_is_said():
    model = tiny_llama()
    torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    with pytest.raises(InspectionError, match="logits hold NaN"):
        inspect_model(model, [plain()])


def test_other_names_and_wrapped_projections():
    """GPT-2 and Phi-3 fuse their projections; an adapter hides the matrices: what cannot be known is None, the rest is there."""
    from peft import LoraConfig, get_peft_model

    gpt2 = from_config("gpt2", n_embd=32, n_head=4, n_layer=3, n_positions=64)
    lora = get_peft_model(tiny_llama(), LoraConfig(task_type="CAUSAL_LM"))
    for model in (gpt2, from_config("phi3", pad_token_id=0, head_dim=8), lora):
        layer = inspect_model(model, [plain()]).layers[0]
        assert layer.f_attn
        assert layer.attention_output_max > 0
        assert layer.output_rank
    assert layer.weight_rank is None


def test_other_models_of_the_process_are_not_watched():
    from gated_attention.diagnostics.capture import replaced_attention

    def refuse(module, *args, original, **kwargs):
        raise AssertionError("reached")

    other = tiny_llama()
    with replaced_attention(tiny_gated(), refuse), torch.no_grad():
        other(tiny_input_ids(), use_cache=False)


def test_hooks_are_gone_if_watching_cannot_begin():
    model = tiny_gated()
    del model.model.layers[2].self_attn.o_proj
    with pytest.raises(AttributeError):
        inspect_model(model, [plain()])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_kurtosis_far_from_zero():
    from gated_attention.diagnostics.accumulate import Accumulator
    from gated_attention.diagnostics.capture import Batch

    accumulator = Accumulator(1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        accumulator.batch = Batch.of(torch.zeros(1, 500, dtype=torch.long))
        accumulator.attention_output(0, 300 + torch.randn(1, 500, 64, generator=generator))
        accumulator.hidden_states(0, torch.ones(1, 500, 64))
    assert accumulator.layer(0, "attention", None).attention_output_kurtosis == pytest.approx(3, abs=0.1)


def test_bfloat16():
    exact = inspect_model(tiny_gated(), [plain()])
    rounded = inspect_model(tiny_gated().bfloat16(), [plain()])
    assert rounded.settings.dtype == "bfloat16"
    assert rounded.f_attn == pytest.approx(exact.f_attn, abs=0.01)
