"""Distillation: its loss and penalties have the values and gradients of their plain formulas, and a recipe lowers them."""

import math

import pytest
import torch
from conftest import randomise, tiny_gated, tiny_input_ids, tiny_llama
from test_recipe import content, gated, losses, run, tensors_of  # noqa: F401
from test_recipe_in_two_processes import run_twice
from transformers import AutoModelForCausalLM

from gated_attention.diagnostics.capture import Batch
from gated_attention.training import RecipeError
from gated_attention.training import divergence as divergence_module
from gated_attention.training.divergence import divergence
from gated_attention.training.penalties import FirstTokenShare, LargestActivations


# ---- the divergence


def plain_divergence(logits, teacher_logits, counts, temperature, top_k):
    total = torch.zeros((), dtype=logits.dtype)
    for row in range(logits.shape[0]):
        for token in range(logits.shape[1]):
            if not counts[row, token]:
                continue
            q, p = (torch.softmax(one[row, token] / temperature, -1) for one in (logits, teacher_logits))
            if top_k is not None:
                likely = set(p.argsort(descending=True)[:top_k].tolist())
                others = [token for token in range(len(p)) if token not in likely]
                p, q = (torch.stack([*(one[i] for i in sorted(likely)), one[others].sum()]) for one in (p, q))
            total = total + temperature**2 * sum(a * (a / b).log() for a, b in zip(p, q, strict=True))
    return total


@pytest.mark.parametrize("top_k", [None, 3], ids=["all_tokens", "likely_tokens"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_divergence_is_that_of_the_formula(monkeypatch, temperature, top_k):
    monkeypatch.setattr(divergence_module, "_BLOCK", 30)  # three tokens at a time
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (torch.randn(2, 4, 10, generator=generator, dtype=torch.float64) for _ in range(2))
    counts = torch.rand(2, 4, generator=generator) < 0.7
    results = []
    for function in (divergence, plain_divergence):
        leaf = logits.clone().requires_grad_()
        value = function(leaf, teacher, counts, temperature, top_k)
        (3 * value).backward()
        results.append((value.detach(), leaf.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-12)
    assert (results[0][1][~counts] == 0).all()
    assert divergence(teacher, teacher, counts, temperature, top_k).abs() < 1e-12


def test_divergence_of_16_bit_logits_is_taken_in_32():
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (10 * torch.randn(1, 5, 50, generator=generator) for _ in range(2))
    counts = torch.ones(1, 5, dtype=torch.bool)
    rounded = [one.bfloat16() for one in (logits, teacher)]
    found = divergence(*rounded, counts)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, divergence(*(one.float() for one in rounded), counts))


# ---- the penalties


def share_of_maps(model, input_ids, begins, **inputs) -> torch.Tensor:
    """From whole attention maps."""
    found = []
    for weights in model(input_ids, output_attentions=True, use_cache=False, **inputs).attentions:
        of_heads = []
        for row in range(len(input_ids)):
            for query in range(input_ids.shape[1]):
                first = max(index for index in range(query + 1) if begins[row, index])
                if first != query:
                    of_heads.append(weights[row, :, query, first])
        found.append(torch.stack(of_heads).mean())
    return torch.stack(found).mean()


MODELS = {
    "gated": lambda: tiny_gated(gate_scale=2.0),
    "llama": tiny_llama,
    "windows": lambda: tiny_gated(
        sliding_window=5, layer_types=["sliding_attention", "full_attention", "sliding_attention"], qk_norm=True
    ),
}


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_share_of_first_tokens_and_its_gradient_are_those_of_whole_maps(name, packed, backend):
    model = randomise(MODELS[name]()).double().train()
    input_ids = tiny_input_ids()
    positions = torch.arange(input_ids.shape[1]).expand_as(input_ids).clone()
    if packed:
        positions[:, 7:] -= 7
        positions[1, 11:] -= 4
    inputs = {"position_ids": positions}
    begins = positions == 0
    gradients = []

    model.set_attn_implementation("eager")
    expected = share_of_maps(model, input_ids, begins, **inputs)
    gradients.append(torch.autograd.grad(expected, model.model.layers[0].self_attn.k_proj.weight)[0])

    model.set_attn_implementation(backend)
    plain = model(input_ids, use_cache=False, **inputs).logits
    share = FirstTokenShare(model)
    with share.watching():
        share.expect(Batch.of(input_ids, position_ids=positions))
        logits = model(input_ids, use_cache=False, **inputs).logits
        found = share.take()
        gradients.append(torch.autograd.grad(found, model.model.layers[0].self_attn.k_proj.weight)[0])
    torch.testing.assert_close(logits, plain, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    # The models' norms work in float32, whatever the format.
    largest = gradients[0].abs().max().item()
    assert largest > 1e-6
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-6, atol=1e-6 * largest)
    assert torch.equal(model(input_ids, use_cache=False, **inputs).logits, plain)  # and nothing is left behind


def test_share_keeps_nothing_of_what_checkpointing_computes_again():
    model = randomise(tiny_gated()).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    input_ids = tiny_input_ids()
    share = FirstTokenShare(model)
    with share.watching():
        share.expect(Batch.of(input_ids))
        model(input_ids, use_cache=False)
        share.take().backward()
    assert model.model.layers[0].self_attn.k_proj.weight.grad.abs().max() > 0
    assert not share._means


@pytest.mark.parametrize("threshold", [0.5, 1e6], ids=["above", "below"])
def test_excess_of_the_largest_activations_is_that_of_the_formula(threshold):
    model = randomise(tiny_gated()).double().train()
    seen = []
    handles = [layer.register_forward_hook(lambda *args: seen.append(args[2])) for layer in model.model.layers]
    largest = LargestActivations(model, threshold)
    with largest.watching():
        largest.expect()
        model(tiny_input_ids(), use_cache=False)
        found = largest.take()
    for handle in handles:
        handle.remove()
    excess = [max(0.0, math.log(row.abs().max().item() / threshold)) for states in seen for row in states]
    assert found.item() == pytest.approx(sum(excess) / len(excess), rel=1e-9)
    weight = model.model.embed_tokens.weight
    gradient = torch.autograd.grad(found, weight)[0]
    assert (gradient.abs().max() > 0) == (threshold == 0.5)


# ---- the recipe


@pytest.fixture
def teacher(tmp_path, content) -> str:  # noqa: F811
    """The model itself after a training: as near as a teacher is after a transfer."""
    return str(run(content, max_steps=30, learning_rate=1e-2, output_dir=str(tmp_path / "teacher")).output_dir)


def distill(content, teacher, changes=None, **distillation):  # noqa: F811
    settings = {"objective": "distill", "distillation": {"teacher": teacher, **distillation}, "max_steps": 12}
    return run(content, **settings | (changes or {}))


def logged(result, name: str) -> list[float]:
    return [entry[name] for entry in result.history if "loss" in entry and name in entry]


@pytest.mark.parametrize("top_k", [None, 8], ids=["all_tokens", "likely_tokens"])
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_distillation_nears_the_teacher(content, teacher, top_k, packing):  # noqa: F811
    result = distill(content, teacher, {"packing": packing, "learning_rate": 5e-3, "max_steps": 20}, top_k=top_k)
    found = logged(result, "divergence")
    assert found[-1] < 0.5 * found[0]
    assert found == pytest.approx(losses(result), rel=1e-4)
    own = run(
        content, model=teacher, max_steps=1, learning_rate=0.0, packing=packing, output_dir=content["output_dir"] + "2"
    )
    assert result.final["teacher_perplexity"] == pytest.approx(own.final["eval_perplexity"], rel=1e-5)


def test_own_teacher_has_nothing_to_teach(content):  # noqa: F811
    before = tensors_of(content["model"])
    result = distill(
        content, content["model"], {"weight_decay": 0.0, "max_steps": 2, "max_grad_norm": 0.0, "optim": "sgd"}
    )
    assert max(abs(value) for value in logged(result, "divergence")) < 1e-6
    for name, tensor in tensors_of(result.output_dir).items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=1e-6)


def test_parts_of_the_loss(content, teacher):  # noqa: F811
    weights = {"cross_entropy": 0.5, "sink_share": 2.0, "activations": 0.1}
    result = distill(content, teacher, activation_threshold=0.01, **weights)
    names = {"cross_entropy": "cross_entropy", "sink_share": "first_token_share", "activations": "activation_excess"}
    expected = torch.tensor(logged(result, "divergence"))
    for weight, name in names.items():
        part = torch.tensor(logged(result, name))
        assert (part > 0).all(), name
        expected += weights[weight] * part
    torch.testing.assert_close(torch.tensor(losses(result)), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("penalty", ["sink_share", "activations"])
def test_penalties_lower_what_they_are_for(content, teacher, penalty):  # noqa: F811
    name = {"sink_share": "first_token_share", "activations": "activation_excess"}[penalty]
    changes = {"max_steps": 20, "learning_rate": 1e-2}
    result = distill(content, teacher, changes, activation_threshold=0.01, **{penalty: 20.0})
    found = logged(result, name)
    assert found[-1] < (0.8 * found[0] if penalty == "sink_share" else found[0] - 0.3)  # of a logarithm


@pytest.mark.parametrize("option", ["accumulation", "checkpointing"])
def test_options_that_change_no_result(content, teacher, option):  # noqa: F811
    penalties = {"sink_share": 1.0, "activations": 0.1, "activation_threshold": 0.01, "cross_entropy": 0.2}
    # Both rows of a batch hold as many queries, so that means over rows and over batches are one.
    content |= {"shuffle": False, "train_sampling_strategy": "sequential", "max_steps": 5}
    plain = distill(content, teacher, {"max_steps": 5}, **penalties)
    changes = {
        "accumulation": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2},
        "checkpointing": {"activation_checkpointing": True},
    }[option]
    found = distill(
        content, teacher, {"max_steps": 5, "output_dir": content["output_dir"] + "2", **changes}, **penalties
    )
    tolerance = (
        1e-2 if option == "accumulation" else 1e-5
    )  # shares are means over queries, of which rows have not quite as many
    torch.testing.assert_close(
        torch.tensor(losses(found)), torch.tensor(losses(plain)), rtol=tolerance, atol=tolerance
    )


def test_distillation_goes_on_where_it_was(content, teacher, tmp_path):  # noqa: F811
    options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    straight = distill(content, teacher, options, sink_share=1.0)
    stopped = tmp_path / "stopped"
    stopped.mkdir()
    (straight.output_dir / "checkpoint-3").rename(stopped / "checkpoint-3")
    again = distill(
        content, teacher, options | {"output_dir": str(stopped), "resume_from_checkpoint": "auto"}, sink_share=1.0
    )
    assert losses(again)[-3:] == losses(straight)[-3:]
    expected = tensors_of(straight.output_dir)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors_of(stopped).items())


def test_adapters_and_gates_are_distilled(content, teacher):  # noqa: F811
    result = distill(content, teacher, {"train": "lora", "learning_rate": 1e-2}, sink_share=0.1, activations=0.1)
    assert logged(result, "divergence")[-1] < logged(result, "divergence")[0]
    assert AutoModelForCausalLM.from_pretrained(result.merged).config.model_type == "gated_attention"


def test_two_processes_distill_as_one(content, teacher, tmp_path):  # noqa: F811
    content |= {"shuffle": False, "train_sampling_strategy": "sequential", "max_steps": 4}
    settings = {
        "objective": "distill",
        "distillation": {"teacher": teacher, "cross_entropy": 0.3, "sink_share": 0.5},
    }
    alone = run(content, **settings, gradient_accumulation_steps=2)
    together = run_twice(content, tmp_path, **settings, output_dir=str(tmp_path / "together"))
    found = [value for _, value in together["curves"]["loss"]]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses(alone)), rtol=1e-3, atol=1e-3)
    assert together["final"]["teacher_perplexity"] == pytest.approx(alone.final["teacher_perplexity"], rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"distillation": None}, "`distillation` must be given with `objective: distill`"),
        ({"objective": "pretrain"}, "and only then; the objective is 'pretrain'"),
        ({"distillation": {"teacher": "x", "temperature": 0}}, "`distillation.temperature` must be positive, got 0"),
        ({"distillation": {"teacher": "x", "sink_share": -1}}, "`distillation.sink_share` must be 0 or more"),
        ({"distillation": {"teacher": "x", "top_k": 0}}, "`distillation.top_k` must be 1 or more, got 0"),
        ({"distillation": {}}, "`distillation.teacher` must be given"),
        ({"label_smoothing_factor": 0.1}, "`label_smoothing_factor` must be 0"),
        ({"distillation": {"teacher": "./nowhere"}}, "there is no folder ./nowhere"),
    ],
    ids=["none", "objective", "temperature", "weight", "top_k", "no_teacher", "smoothing", "not_there"],
)
def test_settings_that_make_no_sense_are_refused(content, changes, words):  # noqa: F811
    settings = {"objective": "distill", "distillation": {"teacher": content["model"]}} | changes
    with pytest.raises(RecipeError, match=words):
        run(content, **settings)


def test_teacher_of_another_vocabulary_is_refused(content, tmp_path):  # noqa: F811
    tiny_gated(vocab_size=77).save_pretrained(tmp_path / "other")
    with pytest.raises(RecipeError, match="must have the vocabulary of the model"):
        distill(content, str(tmp_path / "other"))
