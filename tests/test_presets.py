"""The paper's models have the sizes that it reports, and gated ones at equal parameters the size of their baseline."""

import pytest
import torch

from gated_attention import GATE_VARIANTS, PRESETS, GatedAttentionConfig, GatedAttentionForCausalLM


def parameters(config: GatedAttentionConfig) -> dict[str, int]:
    """Number of parameters by tensor; a tied head counts once."""
    with torch.device("meta"):
        model = GatedAttentionForCausalLM(config)
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


# Parameters of the paper's models, in billions, and of their gates, in millions.
SIZES = {"1.7b_28_layers": 1.7, "1.7b_48_layers": 1.7, "15a2b": 15}
ADDED = {
    ("1.7b_28_layers", "g1_elementwise"): 117.4,
    ("1.7b_48_layers", "g1_elementwise"): 151.0,
    ("15a2b", "g1_elementwise"): 201.3,
    ("1.7b_28_layers", "g1_headwise"): 0.92,
    ("1.7b_48_layers", "g1_headwise"): 1.18,
    ("15a2b", "g1_headwise"): 1.57,
}


@pytest.mark.parametrize("preset", SIZES)
def test_sizes_are_the_papers(preset):
    assert sum(parameters(GatedAttentionConfig.from_preset(preset)).values()) / 1e9 == pytest.approx(
        SIZES[preset], rel=0.05
    )


def test_active_parameters_of_the_mixture():
    config = GatedAttentionConfig.from_preset("15a2b")
    counts = parameters(config)
    experts = sum(count for name, count in counts.items() if ".experts." in name)
    active = sum(counts.values()) - experts + experts * config.num_experts_per_tok // config.num_experts
    assert active / 1e9 == pytest.approx(2, rel=0.15)


@pytest.mark.parametrize(("preset", "variant"), ADDED, ids="-".join)
def test_gates_add_the_papers_parameters(preset, variant):
    gated = parameters(GatedAttentionConfig.from_preset(preset, variant))
    baseline = parameters(GatedAttentionConfig.from_preset(preset))
    added = sum(gated.values()) - sum(baseline.values())
    assert added == sum(count for name, count in gated.items() if "g_proj" in name)
    assert round(added / 1e6, 2 if added < 1e7 else 1) == ADDED[preset, variant]


# What the larger baselines add, in 24 layers of 2048 channels.
LARGER = {
    "15a2b_more_key_value_heads": 24 * 2048 * 2 * 4 * 128,
    "15a2b_more_query_heads": 24 * 2048 * 2 * 16 * 128,
    "15a2b_more_experts": 24 * 2048 * 4 * (3 * 768 + 1),
}


@pytest.mark.parametrize("preset", LARGER)
def test_larger_baselines(preset):
    more = sum(parameters(GatedAttentionConfig.from_preset(preset)).values())
    more -= sum(parameters(GatedAttentionConfig.from_preset("15a2b")).values())
    assert more == LARGER[preset]


@pytest.mark.parametrize("preset", ["1.7b_28_layers", "1.7b_48_layers", "15a2b"])
@pytest.mark.parametrize("variant", [name for name in GATE_VARIANTS if name not in ("baseline", "sdpa_silu")])
def test_equal_parameters_are_equal_to_four_channels(preset, variant):
    config = GatedAttentionConfig.from_preset(preset, variant, equal_parameters=True)
    fields = GATE_VARIANTS[variant].fields
    without = {name: fields[name] for name in ("qk_norm", "sdpa_output_nonlinearity") if name in fields}
    baseline = GatedAttentionConfig.from_preset(preset, **without)
    difference = sum(parameters(config).values()) - sum(parameters(baseline).values())
    channel = 3 * config.hidden_size * (config.num_experts or 1) * config.num_hidden_layers
    assert abs(difference) <= 4 * channel
    name = "moe_intermediate_size" if config.num_experts else "intermediate_size"
    assert getattr(config, name) % 8 == 0
    if variant == "g1_elementwise":
        assert getattr(config, name) < PRESETS[preset].fields[name]


def test_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"15a2b.*got '7b'"):
        GatedAttentionConfig.from_preset("7b")


def test_gates_heavier_than_the_mlp_are_refused():
    with pytest.raises(ValueError, match=r"equal_parameters.*g1_elementwise.*1\.7b_28_layers"):
        GatedAttentionConfig.from_preset(
            "1.7b_28_layers", "g1_elementwise", equal_parameters=True, intermediate_size=256
        )
