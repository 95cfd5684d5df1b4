"""Whatever the combination of fields, a config is either refused with the field named, or its model works throughout."""

import re
from dataclasses import fields

import torch
from conftest import randomise, tiny_input_ids
from huggingface_hub.errors import StrictDataclassError
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from gated_attention import GatedAttentionConfig, GatedAttentionForCausalLM


LAYERS = 2
POSITIONS = ["sdpa_output", "value", "key", "query", "dense_output"]
EXAMPLES = 200
# Counted over the examples of the one test below: tests may not be vacuous because most configs are refused.
counts = {"works": 0, "refused": 0}


def rope(head_dim: int):
    """RoPE settings of every type."""
    partial = st.sampled_from([{}, {"partial_rotary_factor": 0.5}])
    # Of what is rotated; longrope wants a factor for each pair of channels.
    pairs = {0: head_dim // 2, 1: head_dim // 4}

    def longrope(part):
        factors = [1.0 + index for index in range(pairs[len(part)])]
        return {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "factor": 2.0, **part}

    fixed = [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0},
        {"rope_type": "proportional"},
        {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ]
    plain = st.tuples(st.sampled_from(fixed), partial).map(lambda both: {**both[0], **both[1]})
    return st.one_of(st.none(), plain, partial.map(longrope)).map(
        lambda found: (
            found and {"rope_theta": 100.0, "original_max_position_embeddings": 32, **found}
            if found and found["rope_type"] in ("yarn", "llama3", "longrope")
            else found and {"rope_theta": 100.0, **found}
        )
    )


@st.composite
def config_fields(draw) -> dict:
    """Mostly fields that can stand together, and now and then ones that contradict each other."""
    head_dim = draw(st.sampled_from([8, 12, 16]))
    key_value_heads = draw(st.sampled_from([1, 2]))
    positions = draw(st.lists(st.sampled_from(POSITIONS), unique=True, max_size=5))
    chosen = {
        "vocab_size": 96,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": key_value_heads * draw(st.sampled_from([1, 2])),
        "num_key_value_heads": key_value_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 64,
        "rope_parameters": draw(rope(head_dim)),
        "gate_positions": positions,
        "tie_word_embeddings": draw(st.booleans()),
        "sdpa_output_nonlinearity": draw(st.sampled_from([None, "rms_norm", "silu"])),
        "attn_implementation": draw(st.sampled_from(["eager", "sdpa"])),
    }
    for name in ("qk_bias", "v_bias", "o_bias", "mlp_bias", "qk_norm", "zero_centered_norm", "forget_gate"):
        chosen[name] = draw(st.booleans())
    if draw(st.booleans()):
        chosen |= {
            "num_experts": 4,
            "num_experts_per_tok": 4,  # each of them gets a gradient
            "moe_intermediate_size": 16,
            "norm_topk_prob": draw(st.booleans()),
            "mlp_layer_types": draw(st.sampled_from([["dense", "sparse"], ["sparse", "dense"]])),
            "shared_expert_intermediate_size": draw(st.sampled_from([None, 24])),
            "router_logits_dtype": draw(st.sampled_from(["model", "float32"])),
            "output_router_logits": draw(st.booleans()),
        }
        chosen["shared_expert_gate"] = chosen["shared_expert_intermediate_size"] is not None and draw(st.booleans())
    window = draw(st.sampled_from([None, 2, 5]))
    if window is not None:
        chosen["sliding_window"] = window
        kinds = st.sampled_from(["full_attention", "sliding_attention"])
        chosen["layer_types"] = draw(st.none() | st.lists(kinds, min_size=LAYERS, max_size=LAYERS))
    chosen["no_rope_layers"] = draw(st.none() | st.lists(st.sampled_from([0, 1]), min_size=LAYERS, max_size=LAYERS))
    for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier"):
        if draw(st.booleans()):
            chosen[name] = draw(st.sampled_from([0.3, 1, 2.0]))
    careless = draw(st.integers(0, 9)) == 7  # not 0, which is drawn most
    if positions or careless:
        chosen["gate_operator"] = draw(st.sampled_from(["multiply", "add"]))
        chosen["gate_activation"] = draw(st.sampled_from(["sigmoid", "silu", "ns_sigmoid", "softplus", "identity"]))
        chosen["gate_scale"] = draw(st.sampled_from([0.5, 1, 2.0]))
        chosen["gate_layers"] = draw(st.sampled_from([None, [0], [1], [0, 1]]))
        chosen["gate_input"] = draw(st.sampled_from(["hidden_states", "hidden_states", "none"]))
        if "dense_output" not in positions or careless:
            chosen["gate_granularity"] = draw(st.sampled_from(["elementwise", "headwise"]))
            chosen["gate_sharing"] = draw(st.sampled_from(["head_specific", "head_shared"]))
        if chosen["gate_input"] == "hidden_states" or careless:
            chosen["gate_bias"] = draw(st.booleans())
            chosen["gate_input_size"] = draw(st.sampled_from([None, 1, 24]))
            chosen["gate_initializer_range"] = draw(st.sampled_from([None, 0.0, 0.1]))
        if chosen.get("gate_bias") or chosen["gate_input"] == "none" or careless:
            chosen["gate_initial_bias"] = draw(st.sampled_from([0.0, 1.0]))
    return chosen


@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(chosen=config_fields())
def check_config(tmp_path_factory, chosen):
    try:
        config = GatedAttentionConfig(**chosen)
    except (StrictDataclassError, ValueError, TypeError) as error:
        counts["refused"] += 1
        event("refused")
        named = re.search(r"`(\w+)`", str(error))
        assert named and named[1] in {field.name for field in fields(GatedAttentionConfig)}
        return
    counts["works"] += 1
    model = GatedAttentionForCausalLM(config).train()
    input_ids = tiny_input_ids(2, 9)
    model(input_ids, labels=input_ids, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name

    model = randomise(model)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    backend = chosen["attn_implementation"]
    loaded = GatedAttentionForCausalLM.from_pretrained(folder, attn_implementation=backend).eval()
    with torch.no_grad():
        logits = model(input_ids, use_cache=False).logits
        assert torch.equal(loaded(input_ids, use_cache=False).logits, logits)

        cached = model.generate(
            input_ids, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        full = model(cached.sequences[:, :-1], use_cache=False).logits[:, -5:]
    # Other shapes take other paths through the matrix products: float32 rounding.
    torch.testing.assert_close(torch.stack(cached.logits, dim=1), full, rtol=1e-3, atol=1e-3)


def test_random_configs_work_or_are_refused(tmp_path_factory):
    counts.update(works=0, refused=0)
    check_config(tmp_path_factory)
    assert counts["works"] + counts["refused"] >= EXAMPLES
    assert counts["refused"] <= 0.2 * EXAMPLES
