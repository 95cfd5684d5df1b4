"""What a model of transformers must do beyond a forward pass: every backend, cache, compiler and way of loading."""

import pytest
import torch
from conftest import TINY_SHAPE, logits_of, tiny_gated, tiny_input_ids
from naive_attention import PROJECTIONS
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AutoModelForCausalLM, StaticCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from gated_attention import (
    GatedAttentionConfig,
    GatedAttentionForCausalLM,
    GatedAttentionForQuestionAnswering,
    GatedAttentionForSequenceClassification,
    GatedAttentionForTokenClassification,
)


POSITIONS = list(PROJECTIONS)
VARIANTS = {
    "headwise": {"gate_granularity": "headwise"},
    "elementwise": {},
    "every_position": {"gate_positions": POSITIONS, "qk_norm": True},
    "sliding": {"sliding_window": 6},
    "mixed": {
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "no_rope_layers": [1, 0, 1],
    },
}
GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
every_variant = pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)


@every_variant
def test_eager_and_sdpa_agree(fields):
    model = tiny_gated(**fields)
    logits = []
    for backend in ("eager", "sdpa"):
        model.set_attn_implementation(backend)
        logits.append(logits_of(model))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["elementwise", "mixed"])
def test_compiled_flex_agrees_with_sdpa(name):
    # Flex on a CPU takes head dimensions that are powers of two.
    model = tiny_gated(**{**VARIANTS[name], "head_dim": 16})
    input_ids = tiny_input_ids(1, 128)
    expected = logits_of(model, input_ids)
    model.set_attn_implementation("flex_attention")
    torch.testing.assert_close(logits_of(model, input_ids), expected, rtol=1e-3, atol=1e-4)


@every_variant
def test_generation_with_a_static_cache_equals_the_growing_one_past_the_window(fields):
    model = tiny_gated(**fields)
    prompt = tiny_input_ids(2, 5)
    expected = model.generate(prompt, **GREEDY)
    assert torch.equal(model.generate(prompt, cache_implementation="static", **GREEDY), expected)
    assert torch.equal(model.generate(prompt, use_cache=False, **GREEDY), expected)


@every_variant
def test_assisted_generation_equals_plain_generation(fields):
    model = tiny_gated(**fields)
    assistant = tiny_gated(seed=0, gate_granularity="headwise", num_hidden_layers=1)
    prompt = tiny_input_ids(1, 5)
    assert torch.equal(model.generate(prompt, assistant_model=assistant, **GREEDY), model.generate(prompt, **GREEDY))


@every_variant
def test_padding_on_either_side_changes_nothing_for_the_tokens(fields):
    model = tiny_gated(**fields)
    tokens = tiny_input_ids(1, 9)
    expected = logits_of(model, tokens)
    filling, ones = torch.zeros(1, 4, dtype=torch.long), torch.ones_like(tokens)
    with torch.no_grad():
        mask = torch.cat([filling, ones], dim=1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        left = model(torch.cat([filling, tokens], dim=1), attention_mask=mask, position_ids=positions).logits[:, 4:]
        mask = torch.cat([ones, filling], dim=1)
        right = model(torch.cat([tokens, filling], dim=1), attention_mask=mask).logits[:, :9]
    # Other shapes take other paths through the matrix products: float32 rounding.
    torch.testing.assert_close(left, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(right, expected, rtol=1e-4, atol=1e-5)


@every_variant
def test_packed_documents_do_not_see_each_other(fields):
    model = tiny_gated(**fields)
    first, second = tiny_input_ids(1, 7, seed=5), tiny_input_ids(1, 9, seed=6)
    positions = torch.cat([torch.arange(7), torch.arange(9)])[None]
    with torch.no_grad():
        packed = model(torch.cat([first, second], dim=1), position_ids=positions, use_cache=False).logits
    apart = torch.cat([logits_of(model, first), logits_of(model, second)], dim=1)
    torch.testing.assert_close(packed, apart, rtol=1e-4, atol=1e-5)


@every_variant
def test_prefill_and_decoding_compile_as_one_graph(fields):
    torch._dynamo.reset()
    model = tiny_gated(**fields)
    input_ids = tiny_input_ids(1, 10)
    expected = logits_of(model, input_ids)
    # What dynamo makes of the code is the question here, not what a code generator makes of the graph.
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        prefill = compiled(input_ids[:, :7], cache=cache, use_cache=True).logits
        decoded = [compiled(input_ids[:, i : i + 1], cache=cache, use_cache=True).logits for i in range(7, 10)]
    torch.testing.assert_close(torch.cat([prefill, *decoded], dim=1), expected, rtol=1e-4, atol=1e-5)


@every_variant
def test_training_step_compiles_as_one_graph_with_the_same_gradients(fields):
    torch._dynamo.reset()
    model = tiny_gated(**fields).train()
    input_ids = tiny_input_ids()
    gradients = []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        run(input_ids, labels=input_ids, use_cache=False).loss.backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
@every_variant
def test_gradient_checkpointing_gives_the_same_gradients(fields, reentrant):
    gradients = []
    for checkpointing in (False, True):
        model = tiny_gated(**fields).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        calls = []
        model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        model(tiny_input_ids(), labels=tiny_input_ids(), use_cache=False).loss.backward()
        assert len(calls) == (2 if checkpointing else 1)
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_attention_functions_get_what_flash_attention_needs():
    """FlashAttention itself needs a GPU; that its arguments arrive can be seen without one."""
    seen = []

    def recording(module, query, key, value, attention_mask, **arguments):
        seen.append({"query": query.shape, "key": key.shape, **arguments})
        return torch.zeros_like(query).transpose(1, 2), None

    AttentionInterface.register("recording", recording)
    AttentionMaskInterface.register("recording", ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
    model = tiny_gated(**VARIANTS["mixed"], attention_multiplier=0.2, attention_dropout=0.25).train()
    model.set_attn_implementation("recording")
    lengths = torch.tensor([0, 7, 16], dtype=torch.int32)
    packed = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": 9, "max_length_k": 9}
    model(tiny_input_ids(1, 16), position_ids=torch.cat([torch.arange(7), torch.arange(9)])[None], **packed)
    assert [call["sliding_window"] for call in seen] == [6, None, 6]
    for call in seen:
        assert (call["query"], call["key"]) == ((1, 4, 16, 10), (1, 2, 16, 10))
        assert (call["scaling"], call["dropout"]) == (0.2, 0.25)
        assert call["cu_seq_lens_q"] is lengths and call["max_length_k"] == 9


def test_device_map_auto_keeps_layers_whole_and_leaves_nothing_on_meta(tmp_path):
    from accelerate import infer_auto_device_map, init_empty_weights

    model = tiny_gated(**VARIANTS["every_position"])
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="auto")
    assert not any(tensor.is_meta for tensor in (*loaded.parameters(), *loaded.buffers()))
    assert torch.equal(logits_of(loaded), logits_of(model))
    with init_empty_weights():
        empty = GatedAttentionForCausalLM(model.config)
    limits = {0: "60KB", 1: "60KB", "cpu": "1GB"}
    placed = infer_auto_device_map(empty, max_memory=limits, no_split_module_classes=empty._no_split_modules)
    assert len(set(placed.values())) > 1
    assert not any(name.startswith("model.layers.") and name.count(".") > 2 for name in placed)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("gate_input", ["hidden_states", "none"])
def test_missing_gate_is_an_error_that_names_it(position, gate_input, tmp_path):
    tiny_gated(gate_positions=[position], gate_input=gate_input).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if f"layers.1.self_attn.{PROJECTIONS[position]}." in name)
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        GatedAttentionForCausalLM.from_pretrained(tmp_path)


HEADS = {
    "causal_lm": (GatedAttentionForCausalLM, {"labels": torch.ones(2, 6, dtype=torch.long)}),
    "sequence": (GatedAttentionForSequenceClassification, {"labels": torch.tensor([0, 1])}),
    "token": (GatedAttentionForTokenClassification, {"labels": torch.ones(2, 6, dtype=torch.long)}),
    "question_answering": (
        GatedAttentionForQuestionAnswering,
        {"start_positions": torch.tensor([0, 1]), "end_positions": torch.tensor([2, 3])},
    ),
}


@pytest.mark.parametrize(("head", "labels"), HEADS.values(), ids=HEADS)
def test_every_head_returns_gate_scores_and_trains_the_gates(head, labels):
    config = GatedAttentionConfig(**TINY_SHAPE, pad_token_id=0)
    model = head(config).eval()
    plain = model(tiny_input_ids(2, 6), **labels)
    outputs = model(tiny_input_ids(2, 6), **labels, output_gate_scores=True)
    assert torch.equal(outputs.loss, plain.loss)
    assert "gate_scores" not in plain
    assert [scores.shape for scores in outputs["gate_scores"]] == [(2, 6, 4, 10)] * 3
    as_tuple = model(tiny_input_ids(2, 6), **labels, output_gate_scores=True, return_dict=False)
    assert torch.equal(as_tuple[-1][0], outputs.gate_scores[0])
    outputs.loss.backward()
    assert model.model.layers[0].self_attn.g_proj.weight.grad.abs().max() > 0
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")(tiny_input_ids(2, 6), output_gate_scores=True)
    torch.testing.assert_close(compiled["gate_scores"][2], outputs["gate_scores"][2])


@pytest.mark.parametrize("head", [head for head, _ in HEADS.values()])
def test_every_head_takes_the_base_of_a_language_model(head, tmp_path):
    model = tiny_gated(pad_token_id=0)
    model.save_pretrained(tmp_path)
    loaded = head.from_pretrained(tmp_path)
    for name, tensor in model.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor)
