"""The streaming test equals the StreamingLLM protocol, carried out token by token with a cache that drops and re-numbers."""

import math

import pytest
import torch
from conftest import tiny_gated, tiny_input_ids, tiny_llama
from test_diagnostics_maps import FAMILIES, from_config

from gated_attention.diagnostics import InspectionError, streaming_perplexity


def rotate(vector: torch.Tensor, position: int, inv_freq: torch.Tensor) -> torch.Tensor:
    angles = torch.cat([position * inv_freq] * 2)
    first, second = vector.chunk(2, dim=-1)
    return vector * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()


def token_by_token(model, input_ids: torch.Tensor, window: int, kept: int) -> list[float]:
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
                    float(query @ rotate(key[head // group], place, inv_freq)) / math.sqrt(dim)
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
    everything = streaming_perplexity(model, input_ids, window=28, kept=3)
    torch.testing.assert_close(
        torch.tensor(everything.loss_by_position),
        torch.tensor(streaming_perplexity(model, input_ids, window=6, kept=None).loss_by_position),
        rtol=1e-4,
        atol=1e-4,
    )


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
        with pytest.raises(InspectionError):
            streaming_perplexity(FAMILIES[family](), tiny_input_ids(1, 30), window=6)


def test_positions_of_another_kind_are_found_out():
    """Cohere's RoPE turns neighbouring channels, not halves."""
    model = from_config("cohere", head_dim=8)
    with pytest.raises(InspectionError, match="positions of CohereForCausalLM"):
        streaming_perplexity(model, tiny_input_ids(1, 30), window=6, kept=2)
    assert streaming_perplexity(model, tiny_input_ids(1, 30), window=6, kept=0).perplexity > 1
