"""SmolLM2-135M (dequantised from Q4_1): the promises, kept by a model that people know."""

import json
import shutil
from pydoc_data.topics import topics

import pytest
import torch
from conftest import run_as_stranger, tree_hashes
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from gated_attention import GatedAttentionForCausalLM, convert_checkpoint, inspect_model, inspect_text, transfer_sinks
from gated_attention.demo import DemoError, demo_checkpoint
from gated_attention.diagnostics import streaming_perplexity
from gated_attention.diagnostics.texts import default_text
from gated_attention.hub.push import push_folder


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2():
    try:
        return demo_checkpoint()
    except DemoError as error:
        pytest.skip(f"the model is not at hand and cannot be fetched: {error}")


@pytest.fixture(scope="module", params=["headwise", "elementwise"])
def converted(request, smollm2, tmp_path_factory):
    target = tmp_path_factory.mktemp("converted") / request.param
    before = tree_hashes(smollm2)
    convert_checkpoint(smollm2, target, granularity=request.param, link="copy")
    assert tree_hashes(smollm2) == before
    return target


@pytest.fixture(scope="module")
def text(smollm2) -> torch.Tensor:
    """512 tokens of English."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    return tokenizer(topics["assignment"], return_tensors="pt").input_ids[:, :512]


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_logits_are_bit_equal_on_512_tokens(smollm2, converted, text, dtype, backend):
    assert text.shape == (1, 512)
    logits = []
    for folder in (smollm2, converted):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=backend)
        with torch.no_grad():
            logits.append(model(text, use_cache=False).logits)
    assert type(model) is GatedAttentionForCausalLM
    assert logits[0].isfinite().all()
    assert torch.equal(*logits)


def test_inspection_equals_full_maps_and_finds_what_is_known(smollm2, text):
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    input_ids = torch.cat([torch.tensor([[model.config.bos_token_id]]), text[:, :255]], dim=1)
    inspection = inspect_model(model, [{"input_ids": input_ids}], ranks=False)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(input_ids, output_attentions=True, use_cache=False).attentions
    for layer, attention in zip(inspection.layers, maps, strict=True):
        expected = attention[0, :, 1:, 0].mean(1)
        torch.testing.assert_close(torch.tensor(layer.f_attn), expected, rtol=0, atol=1e-5)
    assert 0.3 < inspection.f_attn < 0.42
    largest = inspection.largest_activation
    assert largest.value > 20_000
    assert (largest.layer_idx, largest.position) == (11, 0)
    assert largest.value > 1000 * inspection.layers[11].median_activation


def test_first_tokens_matter_to_it(smollm2, text):
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    everything, none, four = (streaming_perplexity(model, text, 64, kept) for kept in (None, 0, 4))
    assert none.perplexity_past_window > 1.5 * four.perplexity_past_window
    assert four.perplexity_past_window > everything.perplexity_past_window


def test_the_model_is_a_language_model(smollm2, text):
    """A wrongly unpacked GGUF (rotary halves swapped, say) still loads; it would not predict English."""
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    with torch.no_grad():
        loss = model(text, labels=text, use_cache=False).loss
    assert loss.exp() < 25


def test_greedy_generation_is_the_same_for_64_tokens(smollm2, converted, text):
    prompt = text[:, :64]
    generated = [
        AutoModelForCausalLM.from_pretrained(folder).generate(
            prompt, min_new_tokens=64, max_new_tokens=64, do_sample=False
        )
        for folder in (smollm2, converted)
    ]
    assert generated[0].shape == (1, 128)
    assert torch.equal(*generated)


def test_sink_is_transferred(smollm2, tmp_path):
    """With an eighth of the tokens that the figures of the README are made with."""
    text, _ = default_text()
    report = transfer_sinks(smollm2, tmp_path / "transferred", text, tokens=4096, length=256, progress=False)
    assert report.f_attn[0] > 0.3 and report.f_attn[1] < 0.02
    assert report.largest_key_share[1] < 0.05
    assert report.perplexity_ratio < 1.25
    # The sink that no layer up to 11 can undo is in all of the later ones.
    assert set(range(12, 30)) <= set(report.transferred) and 0 not in report.transferred
    # Two neurons write most of the massive activations; others take them out again.
    assert report.massive.neurons[11] == [1229, 1487] and 678 in report.massive.neurons[28]
    # How small they may be made is for the held-out tokens to say, which are few here.
    smallest = min(report.massive.tried, key=report.massive.tried.get)
    assert report.massive.tried[smallest] < 1.03 * report.perplexity[1]
    assert report.m_act[0] > 14_000
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "transferred")
    found = inspect_text(
        model, AutoTokenizer.from_pretrained(smollm2), text, length=256, tokens=2048, bos=True, ranks=False
    )
    assert found.f_attn < 0.025 and found.sink_rate < 0.01


@pytest.mark.parametrize("converted", ["headwise"], indirect=True)
def test_pushed_model_is_the_converted_one_at_a_strangers(converted, text, hub_here, tmp_path):
    """The whole path: converted, pushed, and fetched by its id where the package is not installed."""
    repo_id = "someone/SmolLM2-135M-gated"
    result = push_folder(converted, repo_id, base_model="HuggingFaceTB/SmolLM2-135M-Instruct")
    assert (result.check.error, result.check.agreed) == (0, result.check.generated)
    save_file({"input_ids": text}, tmp_path / "inputs.safetensors")
    run_as_stranger(
        hub_here,
        f"""
model = AutoModelForCausalLM.from_pretrained({repo_id!r}, trust_remote_code=True)
with torch.no_grad():
    logits = model(load_file({str(tmp_path / "inputs.safetensors")!r})["input_ids"], use_cache=False).logits
save_file({{"logits": logits}}, {str(tmp_path / "logits.safetensors")!r})
""",
    )
    model = AutoModelForCausalLM.from_pretrained(converted)
    with torch.no_grad():
        expected = model(text, use_cache=False).logits
        assert torch.equal(load_file(tmp_path / "logits.safetensors")["logits"], expected)

        # A step of training on the gates alone: the source's own files do not travel again.
        for name, parameter in model.named_parameters():
            if ".g_proj." in name:
                parameter += 0.01
    trained = shutil.copytree(converted, tmp_path / "trained")
    weight_map = json.loads((trained / "model.safetensors.index.json").read_text())["weight_map"]
    (gates,) = {file for name, file in weight_map.items() if ".g_proj." in name}
    parameters = model.state_dict()
    save_file(
        {name: parameters[name].contiguous() for name, file in weight_map.items() if file == gates},
        trained / gates,
        metadata={"format": "pt"},
    )
    before = hub_here.received_bytes
    plan = push_folder(trained, repo_id, base_model="HuggingFaceTB/SmolLM2-135M-Instruct").plan
    assert gates in plan.sent and not [name for name in plan.sent if name.endswith(".safetensors") and name != gates]
    assert hub_here.received_bytes - before == plan.bytes_to_send
    assert plan.bytes_to_send < (trained / gates).stat().st_size + 10_000  # of the card
