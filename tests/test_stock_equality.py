"""Without gates the decoder is the stock one, bit for bit: every RoPE type, windows, layers without RoPE, odd inputs."""

import pytest
import torch
from conftest import TINY_SHAPE, logits_of, randomise, tiny_gated, tiny_input_ids
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)


PAIRS = TINY_SHAPE["head_dim"] // 2
LAYERS = TINY_SHAPE["num_hidden_layers"]
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

ROPE_TYPES = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "longrope": {
        "factor": 2.0,
        "short_factor": [1.0 + index for index in range(PAIRS)],
        "long_factor": [2.0 + index for index in range(PAIRS)],
        "original_max_position_embeddings": 16,
    },
    "proportional": {"factor": 2.0},
}


def stock_and_gated(config_class, model_class, stock_fields: dict, gated_fields: dict, **gates):
    """The stock model, and ours with its weights and no gates (or with those of `gates`)."""
    stock = randomise(model_class(config_class(**{**TINY_SHAPE, **stock_fields})))
    gated = tiny_gated(**{"gate_positions": [], **gates}, **gated_fields)
    missing, unexpected = gated.load_state_dict(stock.state_dict(), strict=False)
    assert not unexpected and all("g_proj" in name for name in missing)
    return stock, gated


@pytest.mark.parametrize("length", [12, 40], ids=["short", "beyond_original_length"])
@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_rope_types_equal_llama(rope_type, length):
    fields = {
        "max_position_embeddings": 32,
        "rope_parameters": {"rope_type": rope_type, "rope_theta": 50.0, **ROPE_TYPES[rope_type]},
    }
    stock, gated = stock_and_gated(LlamaConfig, LlamaForCausalLM, fields, fields)
    input_ids = tiny_input_ids(2, length)
    assert torch.equal(logits_of(gated, input_ids), logits_of(stock, input_ids))


FAMILIES = {
    "mistral_window": (
        MistralConfig,
        MistralForCausalLM,
        {"sliding_window": 4},
        {"sliding_window": 4},
    ),
    "qwen2_some_layers_with_window": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"layer_types": MIXED, "sliding_window": 4, "use_sliding_window": True},
        {"layer_types": MIXED, "sliding_window": 4, "qk_bias": True, "v_bias": True},
    ),
    "qwen3": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {"layer_types": MIXED, "sliding_window": 4, "use_sliding_window": True},
        {"layer_types": MIXED, "sliding_window": 4, "qk_norm": True},
    ),
    "smollm3_layers_without_rope": (
        SmolLM3Config,
        SmolLM3ForCausalLM,
        {"no_rope_layers": [1, 0, 1], "pad_token_id": 0, "tie_word_embeddings": False, "rope_theta": 100.0},
        {"no_rope_layers": [1, 0, 1], "rope_theta": 100.0},
    ),
    "granite_all_multipliers": (
        GraniteConfig,
        GraniteForCausalLM,
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
        },
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
        },
    ),
    "tied_head": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_equal_their_stock_class(family, backend):
    # RMSNorm's epsilon differs between the families' defaults.
    config_class, model_class, stock_fields, gated_fields = FAMILIES[family]
    epsilon = {"rms_norm_eps": 1e-5}
    stock, gated = stock_and_gated(config_class, model_class, {**stock_fields, **epsilon}, {**gated_fields, **epsilon})
    for model in (stock, gated):
        model.set_attn_implementation(backend)
    assert torch.equal(logits_of(gated), logits_of(stock))
    prompt = tiny_input_ids(2, 6)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(gated.generate(prompt, **options), stock.generate(prompt, **options))


ODD_INPUTS = {
    "longer_than_max_position_embeddings": lambda: {"input_ids": tiny_input_ids(1, 200)},
    "empty_batch": lambda: {"input_ids": tiny_input_ids(0, 5)},
    "empty_sequence": lambda: {"input_ids": tiny_input_ids(2, 0)},
    "all_padding_row": lambda: {
        "input_ids": tiny_input_ids(2, 5),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]),
    },
    "right_padding": lambda: {
        "input_ids": tiny_input_ids(2, 5),
        "attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]),
    },
    "no_input": dict,
    "both_inputs": lambda: {"input_ids": tiny_input_ids(1, 3), "inputs_embeds": torch.zeros(1, 3, 32)},
    "token_out_of_vocabulary": lambda: {"input_ids": torch.tensor([[1000]])},
}


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("inputs", ODD_INPUTS.values(), ids=ODD_INPUTS)
@pytest.mark.parametrize(
    "gates", [{}, {"gate_positions": ["sdpa_output"], "gate_scale": 2.0}], ids=["none", "identity"]
)
def test_odd_inputs_are_treated_as_by_qwen3(inputs, gates, backend):
    stock, gated = stock_and_gated(Qwen3Config, Qwen3ForCausalLM, {}, {"qk_norm": True}, **gates)
    outcomes = []
    for model in (stock, gated):
        model.set_attn_implementation(backend)
        for name, parameter in model.named_parameters():
            if "g_proj" in name:
                torch.nn.init.zeros_(parameter)
        try:
            with torch.no_grad():
                outcomes.append(model(**inputs(), use_cache=False).logits)
        except Exception as error:
            outcomes.append((type(error), str(error)))
    if isinstance(outcomes[0], torch.Tensor):
        torch.testing.assert_close(outcomes[1], outcomes[0], rtol=0, atol=0, equal_nan=True)
    else:
        assert outcomes[1] == outcomes[0]
