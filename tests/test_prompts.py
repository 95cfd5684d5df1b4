"""Answers are plain greedy decoding, whatever a model's generation config says, and their figures are what loops count."""

import pytest
import torch
from conftest import logits_of, tiny_gated, tiny_llama, tiny_tokenizer
from transformers import GenerationConfig

from gated_attention.diagnostics import InspectionError, answer_prompts
from gated_attention.diagnostics.prompts import PROMPTS, agreement, distinct_share, prompt_ids, read_prompts


ASKED = ("the gate opens", "attention to the sink")


def greedy(model, input_ids: torch.Tensor, ends: tuple, max_new_tokens: int) -> list[int]:
    """One token after the other, without a cache."""
    tokens = input_ids[0].tolist()
    for _ in range(max_new_tokens):
        token = int(logits_of(model, torch.tensor([tokens]))[0, -1].argmax())
        if token in ends:
            break
        tokens.append(token)
    return tokens[input_ids.shape[1] :]


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "plain"])
@pytest.mark.parametrize("model", [tiny_llama, tiny_gated], ids=["llama", "gated"])
def test_equals_decoding_token_by_token(model, chat):
    model, tokenizer = model(), tiny_tokenizer()
    if not chat:
        tokenizer.chat_template = None
    # What released models have in it, and what would change the answers.
    model.generation_config = own = GenerationConfig(
        do_sample=True,
        temperature=2.0,
        repetition_penalty=1.8,
        no_repeat_ngram_size=2,
        min_new_tokens=9,
        eos_token_id=[2, 5],
    )
    answers = answer_prompts(model, tokenizer, ASKED, max_new_tokens=12)
    for prompt, answer in zip(ASKED, answers, strict=True):
        text = f"<user> {prompt} " if chat else prompt
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=not chat).input_ids
        assert torch.equal(prompt_ids(tokenizer, prompt), ids)
        assert answer.token_ids == greedy(model, ids, (2, 5), 12)
        assert answer.ended == (len(answer.token_ids) < 12)
        assert (answer.prompt, answer.agreement, answer.same) == (prompt, None, None)
    assert model.generation_config is own


def test_answers_that_end():
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    token_ids = answer_prompts(model, tokenizer, ASKED[:1], max_new_tokens=8)[0].token_ids
    end = next(token for token in token_ids[1:] if token != token_ids[0])
    model.generation_config.eos_token_id = end
    (answer,) = answer_prompts(model, tokenizer, ASKED[:1], max_new_tokens=8)
    assert answer.ended
    assert answer.token_ids == token_ids[: token_ids.index(end)]


def test_compared_with_the_first_model():
    tokenizer = tiny_tokenizer()
    first = answer_prompts(tiny_llama(), tokenizer, ASKED, max_new_tokens=8)
    again = answer_prompts(tiny_llama(), tokenizer, ASKED, max_new_tokens=8, first=first)
    assert [(answer.agreement, answer.same) for answer in again] == [(len(a.token_ids), True) for a in first]
    other = answer_prompts(tiny_llama(seed=1), tokenizer, ASKED, max_new_tokens=8, first=first)
    for one, answer in zip(first, other, strict=True):
        assert not answer.same
        place = answer.agreement
        assert one.token_ids[:place] == answer.token_ids[:place]
        assert one.token_ids[place : place + 1] != answer.token_ids[place : place + 1]


@pytest.mark.parametrize(
    ("first", "second", "until"), [([1, 2, 3], [1, 2, 4], 2), ([1], [1, 2], 1), ([], [1], 0), ([3], [4], 0)]
)
def test_agreement(first, second, until):
    assert agreement(first, second) == agreement(second, first) == until


@pytest.mark.parametrize(
    ("token_ids", "length", "share"),
    [([1, 2, 1, 2, 1], 2, 2 / 4), ([1, 2, 3], 2, 1.0), ([7] * 10, 4, 1 / 7), ([1, 2], 4, 1.0), ([], 2, 1.0)],
)
def test_distinct_share(token_ids, length, share):
    assert distinct_share(token_ids, length) == pytest.approx(share)


def test_prompts_of_our_own():
    assert len(PROMPTS) == len(set(PROMPTS)) == 20


def test_prompts_from_a_file(tmp_path):
    (tmp_path / "prompts.txt").write_text("One?\n\n  Two? \n")
    assert read_prompts(tmp_path / "prompts.txt") == ("One?", "Two?")
    (tmp_path / "empty.txt").write_text("\n")
    for name, words in (("empty.txt", "holds no prompt"), ("nowhere.txt", "cannot be read as UTF-8")):
        with pytest.raises(InspectionError, match=words):
            read_prompts(tmp_path / name)


def test_what_cannot_answer():
    with pytest.raises(InspectionError, match="`max_new_tokens` must be at least 1, got 0"):
        answer_prompts(tiny_llama(), tiny_tokenizer(), ASKED, max_new_tokens=0)
    with pytest.raises(InspectionError, match="LlamaModel cannot generate"):
        answer_prompts(tiny_llama().model, tiny_tokenizer(), ASKED)
