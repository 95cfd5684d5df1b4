"""The streaming test equals the StreamingLLM protocol, carried out token by token with a cache that drops and re-numbers."""

import math

import pytest
import torch
from conftest import tiny_gated, tiny_input_ids, tiny_llama
from test_diagnostics_maps import FAMILIES, from_config
from transformers import FalconConfig, FalconForCausalLM

from gated_attention.diagnostics import InspectionError, streaming_perplexity


def rotate(vector: torch.Tensor, position: int, inv_freq: torch.Tensor) -> torch.Tensor:
    angles = torch.cat([position * inv_freq] * 2)
    first, second = vector.chunk(2, dim=-1)
    return vector * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()


def token_by_token(model, input_ids: torch.Tensor, window: int, kept: int, rope_scaling: float = 1.0) -> list[float]:
    """Losses of a Llama-type model that decodes one token after the other; keys are cached before RoPE."""
    config, inv_freq = model.config, model.model.rotary_emb.inv_freq
    dim, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    caches = [[] for _ in model.model.layers]
    losses = []
    for step in range(input_ids.shape[1] - 1):
        hidden = model.model.embed_tokens(input_ids[:, step])[0]
        for layer, cache in zip(model.model.layers, caches, strict=True):
            attention, normed = layer.self_attn, layer.input_layernorm(hidden)
            if len(cache) > window:
                del cache[kept]  # the oldest that is not kept
            cache.append((attention.k_proj(normed).view(-1, dim), attention.v_proj(normed).view(-1, dim)))
            heads = []
            for head, query in enumerate(attention.q_proj(normed).view(-1, dim)):
                query = rotate(query, len(cache) - 1, inv_freq)
                scores = [
                    float(query @ rotate(key[head // group], place, inv_freq)) * rope_scaling**2 / math.sqrt(dim)
                    for place, (key, _) in enumerate(cache)
                ]
                weights = torch.tensor(scores).softmax(0)
                heads.append(sum(w * value[head // group] for w, (_, value) in zip(weights, cache, strict=True)))
            output = torch.cat(heads)
            if hasattr(attention, "g_proj"):
                gates = config.gate_scale * attention.g_proj(normed).sigmoid()
                output = (output.view(-1, dim) * gates.view(len(heads), -1)).flatten()
            hidden = hidden + attention.o_proj(output)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        logits = model.lm_head(model.model.norm(hidden))
        losses.append(-float(logits.log_softmax(-1)[input_ids[0, step + 1]]))
    return losses


@pytest.mark.parametrize(("window", "kept"), [(6, 0), (6, 2), (6, 5), (1, 0), (20, 4)])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("model", [tiny_llama, tiny_gated], ids=["llama", "gated"])
def test_equals_decoding_token_by_token(model, backend, window, kept):
    model = model()
    model.set_attn_implementation(backend)
    input_ids = tiny_input_ids(1, 30)
    with torch.no_grad():
        expected = token_by_token(model, input_ids, window, kept)
    result = streaming_perplexity(model, input_ids, window, kept)
    torch.testing.assert_close(torch.tensor(result.loss_by_position), torch.tensor(expected), rtol=1e-4, atol=1e-4)
    past = expected[window + 1 :]
    assert result.perplexity_past_window == pytest.approx(math.exp(sum(past) / len(past)), rel=1e-4)


def test_reference_drops_nothing():
    model, input_ids = tiny_llama(), tiny_input_ids(1, 30)
    with torch.no_grad():
        loss = model(input_ids, labels=input_ids).loss
    result = streaming_perplexity(model, input_ids, window=6, kept=None)
    assert result.perplexity == pytest.approx(loss.exp().item(), rel=1e-5)
    assert result.window is None


def test_rope_that_scales_its_output():
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    model, input_ids = tiny_llama(rope_parameters=rope), tiny_input_ids(1, 30)
    scaling = model.model.rotary_emb.attention_scaling
    assert scaling != 1
    with torch.no_grad():
        expected = token_by_token(model, input_ids, window=6, kept=3, rope_scaling=scaling)
    found = streaming_perplexity(model, input_ids, window=6, kept=3).loss_by_position
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": 30}, "`window` must be between 1 and the text's length - 2"),
        ({"window": 0}, "got 0"),
        ({"window": 6, "kept": 6}, "`kept` must be at least 0 and less than the window"),
    ],
)
def test_windows_without_meaning(options, words):
    with pytest.raises(InspectionError, match=words):
        streaming_perplexity(tiny_llama(), tiny_input_ids(1, 30), **options)


def test_models_with_windows_or_sinks_of_their_own_are_refused():
    for family in ("mistral_window", "gpt_oss_learned_sinks"):
        with pytest.raises(InspectionError, match="a window or sinks of its own"):
            streaming_perplexity(FAMILIES[family](), tiny_input_ids(1, 30), window=6)
    wide = from_config("mistral", sliding_window=64)
    assert streaming_perplexity(wide, tiny_input_ids(1, 30), window=6, kept=2).perplexity > 1


def test_layers_whose_window_cannot_be_set_are_named():
    """Linear layers see everything, and attention that bypasses the interface too: the figure would mean nothing."""
    hybrid = from_config(
        "qwen3_next", layer_types=["linear_attention", "full_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, head_dim=16, mlp_only_layers=[0, 1, 2],
    )  # fmt: skip
    with pytest.raises(InspectionError, match="layers 0 of Qwen3NextForCausalLM"):
        streaming_perplexity(hybrid, tiny_input_ids(1, 30), window=6)
    falcon = FalconForCausalLM(
        FalconConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=False)
    )
    with pytest.raises(InspectionError, match="layers 0, 1 of FalconForCausalLM"):
        streaming_perplexity(falcon, tiny_input_ids(1, 30), window=6)


def test_rope_whose_angles_change_with_the_length():
    model = tiny_llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(InspectionError, match="'dynamic' RoPE"):
        streaming_perplexity(model, tiny_input_ids(1, 30), window=6, kept=2)
    assert streaming_perplexity(model, tiny_input_ids(1, 30), window=6).perplexity > 1


def test_one_text_at_a_time():
    with pytest.raises(InspectionError, match=r"\(1, length\)"):
        streaming_perplexity(tiny_llama(), tiny_input_ids(2, 30), window=6)


def test_positions_of_another_kind_are_found_out():
    """Cohere's RoPE turns neighbouring channels, not halves."""
    model = from_config("cohere", head_dim=8)
    with pytest.raises(InspectionError, match="positions of CohereForCausalLM"):
        streaming_perplexity(model, tiny_input_ids(1, 30), window=6, kept=2)
    assert streaming_perplexity(model, tiny_input_ids(1, 30), window=6, kept=0).perplexity > 1
