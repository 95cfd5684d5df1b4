"""The model computes what the paper's equations say, on every backend, and equals its source where the gate is the identity."""

import pytest
import torch
from conftest import TINY_SHAPE, logits_of, tiny_gated, tiny_input_ids, tiny_llama
from transformers import AutoModel, AutoModelForCausalLM

from gated_attention import GatedAttentionConfig, GatedAttentionForCausalLM, GatedAttentionModel


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BACKENDS = ["eager", "sdpa"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("granularity", ["headwise", "elementwise"])
@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
def test_identity_gate_equals_llama_bit_for_bit(granularity, dtype, backend, biases):
    llama = tiny_llama(attention_bias=biases, mlp_bias=biases).to(dtype)
    config = GatedAttentionConfig(
        **TINY_SHAPE,
        gate_granularity=granularity,
        gate_scale=2.0,
        qk_bias=biases,
        v_bias=biases,
        o_bias=biases,
        mlp_bias=biases,
    )
    gated = GatedAttentionForCausalLM(config).eval().to(dtype)
    result = gated.load_state_dict(llama.state_dict(), strict=False)
    assert not result.unexpected_keys
    assert all(".g_proj." in name for name in result.missing_keys)
    for layer in gated.model.layers:
        torch.nn.init.zeros_(layer.self_attn.g_proj.weight)
    llama.set_attn_implementation(backend)
    gated.set_attn_implementation(backend)
    assert torch.equal(logits_of(gated), logits_of(llama))


@pytest.mark.parametrize("granularity", ["headwise", "elementwise"])
def test_gates_matter_and_learn_from_the_identity(granularity):
    model = tiny_gated(gate_granularity=granularity, gate_scale=2.0)
    gated = logits_of(model)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.g_proj.weight)
    assert not torch.equal(logits_of(model), gated)
    model(tiny_input_ids(), labels=tiny_input_ids()).loss.backward()
    for layer in model.model.layers:
        assert layer.self_attn.g_proj.weight.grad.abs().max() > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("granularity", ["headwise", "elementwise"])
def test_cached_decoding_equals_full_forward(granularity, backend):
    model = tiny_gated(gate_granularity=granularity)
    model.set_attn_implementation(backend)
    prompt = tiny_input_ids(batch=2, sequence=7)
    generated = model.generate(prompt, max_new_tokens=9, do_sample=False, eos_token_id=None)
    expected = prompt
    for _ in range(9):
        expected = torch.cat([expected, logits_of(model, expected)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generated, expected)


def test_hidden_states_and_attentions_are_returned():
    model = tiny_gated(attn_implementation="eager")
    outputs = model(tiny_input_ids(2, 5), output_hidden_states=True, output_attentions=True)
    assert len(outputs.hidden_states) == TINY_SHAPE["num_hidden_layers"] + 1
    assert [attention.shape for attention in outputs.attentions] == [(2, 4, 5, 5)] * TINY_SHAPE["num_hidden_layers"]


def test_auto_classes_know_the_model_and_importing_again_changes_nothing():
    from gated_attention.modeling_gated.registration import register

    register()
    register()
    config = GatedAttentionConfig(**TINY_SHAPE)
    assert type(AutoModel.from_config(config)) is GatedAttentionModel
    assert type(AutoModelForCausalLM.from_config(config)) is GatedAttentionForCausalLM


def test_tied_head_shares_the_embedding():
    model = tiny_gated(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
