"""The Forgetting Transformer: what a cache gives equals the whole sequence at once, and backends that cannot forget are named."""

import re

import pytest
import torch
from conftest import logits_of, tiny_gated, tiny_input_ids
from transformers import StaticCache

from gated_attention import GATE_VARIANTS, GatedAttentionForCausalLM, inspect_model
from gated_attention.modeling_gated.forget_gate import keys_with_gates, split_gates


VARIANTS = ["forgetting_transformer", "forgetting_transformer_pro"]
WINDOWS = {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 7}


def forgetting(variant: str = "forgetting_transformer_pro", **fields):
    return tiny_gated(**{**GATE_VARIANTS[variant].fields, **fields})


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("layers", [{}, WINDOWS], ids=["full", "windows"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_generation_with_a_cache_equals_the_full_forward(variant, layers, backend):
    model = forgetting(variant, **layers, attn_implementation=backend)
    input_ids = tiny_input_ids(2, 12)
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(input_ids, **options, use_cache=False)
    generated = model.generate(input_ids, **options, output_logits=True, return_dict_in_generate=True)
    assert torch.equal(generated.sequences, expected)
    full = logits_of(model, expected[:, :-1])[:, -10:]
    # Other shapes take other paths through the matrix products: float32 rounding.
    torch.testing.assert_close(torch.stack(generated.logits, dim=1), full, rtol=1e-4, atol=1e-4)
    assert torch.equal(model.generate(input_ids, **options, cache_implementation="static"), expected)
    beams = model.generate(input_ids, **options, num_beams=3)
    assert torch.equal(beams, model.generate(input_ids, **options, num_beams=3, use_cache=False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_cache_in_16_bits_keeps_the_gates(dtype):
    """The gate's logarithm needs more digits than 16-bit keys have; two channels hold it."""
    log_forget = -torch.rand(1, 2, 50, 2, generator=torch.Generator().manual_seed(0))
    keys = torch.randn(1, 2, 50, 8).to(dtype)
    found_keys, found = split_gates(keys_with_gates(keys, log_forget), 8)
    assert torch.equal(found_keys, keys)
    # 8 bits of mantissa twice, or 11 twice down to float16's smallest step.
    torch.testing.assert_close(found, log_forget, rtol=2**-16, atol=2**-24)


def test_chunks_and_beams_and_crops_keep_gates_beside_their_keys():
    model = forgetting()
    input_ids = tiny_input_ids(2, 16)
    full = logits_of(model, input_ids)
    with torch.no_grad():
        outputs = model(input_ids[:, :6], use_cache=True)
        outputs = model(input_ids[:, 6:13], cache=outputs.cache)
        torch.testing.assert_close(outputs.logits, full[:, 6:13], rtol=1e-4, atol=1e-4)
        cache = outputs.cache
        cache.crop(-4)
        torch.testing.assert_close(model(input_ids[:, 9:], cache=cache).logits, full[:, 9:], rtol=1e-4, atol=1e-4)
        cache.crop(-7)
        cache.reorder_cache(torch.tensor([1, 0]))
        swapped = model(input_ids[:, 9:].flip(0), cache=cache).logits
    torch.testing.assert_close(swapped, full[:, 9:].flip(0), rtol=1e-4, atol=1e-4)


def test_what_a_cropped_static_cache_still_holds_is_not_read():
    model = forgetting()
    input_ids = tiny_input_ids(1, 14)
    cache = StaticCache(config=model.config, max_cache_len=20)
    with torch.no_grad():
        model(input_ids[:, :6], cache=cache)
        model(tiny_input_ids(1, 8, seed=9), cache=cache)
        for layer in cache.layers:
            layer.crop(-8)
        found = model(input_ids[:, 6:9], cache=cache).logits
    torch.testing.assert_close(found, logits_of(model, input_ids)[:, 6:9], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_remembered(side, backend):
    model = forgetting(attn_implementation=backend)
    input_ids = tiny_input_ids(1, 9)
    padding = torch.full((1, 4), 5)
    real = slice(4, None) if side == "left" else slice(0, 9)
    padded = torch.cat((padding, input_ids) if side == "left" else (input_ids, padding), dim=1)
    attention_mask = torch.zeros_like(padded)
    attention_mask[:, real] = 1
    with torch.no_grad():
        found = model(padded, attention_mask=attention_mask, use_cache=False).logits[:, real]
    torch.testing.assert_close(found, logits_of(model, input_ids), rtol=1e-4, atol=1e-4)


def test_packed_documents_do_not_forget_each_other():
    model = forgetting()
    first, second = tiny_input_ids(1, 7), tiny_input_ids(1, 5, seed=2)
    position_ids = torch.cat((torch.arange(7), torch.arange(5)))[None]
    with torch.no_grad():
        packed = model(torch.cat((first, second), dim=1), position_ids=position_ids, use_cache=False).logits
    expected = torch.cat((logits_of(model, first), logits_of(model, second)), dim=1)
    torch.testing.assert_close(packed, expected, rtol=1e-4, atol=1e-4)


def test_gates_that_never_forget_leave_plain_attention():
    """f = 1 for any input: without a decay the model is the one without the gate."""
    model = forgetting("forgetting_transformer")
    plain = tiny_gated(gate_positions=[], no_rope_layers=[0, 0, 0])
    plain.load_state_dict({name: t for name, t in model.state_dict().items() if "f_proj" not in name})
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.f_proj.weight)
        torch.nn.init.constant_(layer.self_attn.f_proj.bias, 200.0)
    torch.testing.assert_close(logits_of(model), logits_of(plain), rtol=1e-5, atol=1e-5)


def test_long_texts_stay_finite_and_a_strong_gate_sees_only_itself():
    model = forgetting("forgetting_transformer")
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.self_attn.f_proj.bias, -1000.0)
    input_ids = tiny_input_ids(1, 64)
    # Without positions and without a past a token's logits depend on the token alone.
    expected = torch.cat([logits_of(model, input_ids[:, column : column + 1]) for column in range(64)], dim=1)
    torch.testing.assert_close(logits_of(model, input_ids), expected, rtol=1e-4, atol=1e-4)


def test_masks_of_numbers_booleans_and_integers_say_the_same():
    model = forgetting()
    input_ids = tiny_input_ids(1, 6)
    seen = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    masks = [seen, seen.long(), torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)]
    with torch.no_grad():
        found = [model(input_ids, attention_mask={"full_attention": mask}, use_cache=False).logits for mask in masks]
    for logits in found:
        torch.testing.assert_close(logits, logits_of(model, input_ids), rtol=1e-5, atol=1e-5)


def test_other_backends_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="flex_attention"):
        forgetting(attn_implementation="flex_attention")
    model = forgetting()
    with pytest.raises(ValueError, match=r"attn_implementation.*'eager', 'sdpa'.*forget_gate.*'flex_attention'"):
        model.set_attn_implementation("flex_attention")
    assert torch.isfinite(logits_of(model)).all()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="flex_attention"):
        GatedAttentionForCausalLM.from_pretrained(tmp_path, attn_implementation="flex_attention")
    # However it got there: FlashAttention is not installed here, where transformers would say so first.
    for backend in ("flash_attention_2", "paged|sdpa"):
        model.config._attn_implementation_internal = backend
        with pytest.raises(ValueError, match=re.escape(repr(backend))):
            model.model.layers[0].self_attn(torch.zeros(1, 3, 32), (torch.ones(1, 3, 10), torch.zeros(1, 3, 10)))


def test_missing_forget_gate_is_an_error(tmp_path):
    tiny_gated(no_rope_layers=[0, 0, 0]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.f_proj\.bias"):
        GatedAttentionForCausalLM.from_pretrained(tmp_path, forget_gate=True)


def test_compiled_in_one_graph_equals_eager():
    model = forgetting()
    compiled = torch.compile(model.model, fullgraph=True, backend="aot_eager")
    input_ids = tiny_input_ids()
    with torch.no_grad():
        expected = model.model(input_ids, use_cache=False).last_hidden_state
        found = compiled(input_ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_diagnostics_see_the_attention_that_forgets():
    model = forgetting("forgetting_transformer", attn_implementation="eager")
    input_ids = tiny_input_ids(2, 24)
    result = inspect_model(model, [{"input_ids": input_ids}])
    with torch.no_grad():
        attentions = model(input_ids, output_attentions=True, use_cache=False).attentions
    expected = torch.stack([of_layer[:, :, 1:, 0].mean() for of_layer in attentions]).mean()
    assert result.f_attn == pytest.approx(expected.item(), rel=1e-4)
