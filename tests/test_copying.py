"""The copying test counts what a plain loop counts, and tells models that copy from models that cannot see so far."""

import math

import pytest
import torch
from conftest import logits_of, tiny_gated, tiny_llama, tiny_tokenizer
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_outputs import CausalLMOutput

from gated_attention.diagnostics import InspectionError, copying_accuracy
from gated_attention.diagnostics.copying import copying_sequences, ordinary_tokens


DISTANCES = (4, 7, 12)


class Copier(nn.Module):
    """Predicts what came after the last earlier occurrence of a token, if it is at most `reach` tokens away."""

    def __init__(self, vocab_size: int, reach: int = 10**9):
        super().__init__()
        self.config = LlamaConfig(num_hidden_layers=1)
        self.layers = nn.ModuleList([nn.Sequential(nn.Identity(), nn.Identity())])
        self.vocab_size, self.reach, self.device = vocab_size, reach, torch.device("cpu")

    def forward(self, input_ids, use_cache=None):
        tokens = input_ids[0].tolist()
        logits = torch.zeros(1, len(tokens), self.vocab_size)
        for place, token in enumerate(tokens):
            earlier = [before for before in range(place) if tokens[before] == token and place - before <= self.reach]
            if earlier:
                logits[0, place, tokens[earlier[-1] + 1]] = 20.0
        return CausalLMOutput(logits=logits)


@pytest.mark.parametrize("bos", [True, False], ids=["bos", "no_bos"])
@pytest.mark.parametrize("model", [tiny_llama, tiny_gated], ids=["llama", "gated"])
def test_equals_a_plain_loop(model, bos):
    model, tokenizer = model(), tiny_tokenizer()
    found = copying_accuracy(model, tokenizer, DISTANCES, segment=4, sequences=3, seed=5, bos=bos)
    for distance, result in zip(DISTANCES, found, strict=True):
        rows = copying_sequences(
            ordinary_tokens(tokenizer), distance, 4, 3, 5, tokenizer.bos_token_id if bos else None
        )
        right, losses, first_losses = [], [], []
        for row in rows:
            log_probabilities = logits_of(model, row[None])[0].log_softmax(-1)
            for place in range(bos + 1, bos + 4):  # the segment, without its first token
                again = place + distance
                assert row[again] == row[place]
                right.append(float(log_probabilities[again - 1].argmax() == row[again]))
                losses.append(-float(log_probabilities[again - 1, row[again]]))
                first_losses.append(-float(log_probabilities[place - 1, row[place]]))
        accuracies = [sum(right[start : start + 3]) / 3 for start in (0, 3, 6)]
        mean = sum(accuracies) / 3
        assert result.accuracy == pytest.approx(mean)
        variance = sum((value - mean) ** 2 for value in accuracies) / 2
        assert result.accuracy_error == pytest.approx(math.sqrt(variance / 3))
        assert result.loss == pytest.approx(sum(losses) / 9, rel=1e-5)
        assert result.first_loss == pytest.approx(sum(first_losses) / 9, rel=1e-5)
        assert (result.distance, result.sequences, result.segment) == (distance, 3, 4)


@pytest.mark.parametrize("bos", [True, False], ids=["bos", "no_bos"])
def test_a_copier_copies_as_far_as_it_sees(bos):
    tokenizer = tiny_tokenizer()
    results = copying_accuracy(Copier(96), tokenizer, DISTANCES, segment=4, sequences=2, bos=bos)
    assert [result.accuracy for result in results] == [1, 1, 1]
    assert all(result.loss < 1e-3 and result.first_loss == pytest.approx(math.log(96)) for result in results)
    near = copying_accuracy(Copier(96, reach=7), tokenizer, DISTANCES, segment=4, sequences=2, bos=bos)
    assert [result.accuracy for result in near] == [1, 1, 0]


def test_sequences():
    vocabulary = torch.arange(10, 60)
    rows = copying_sequences(vocabulary, 20, 6, 5, seed=1, bos_token_id=3)
    assert rows.shape == (5, 27)
    for row in rows.tolist():
        assert row[0] == 3
        assert row[1:7] == row[-6:]
        assert len(set(row[1:21])) == 20
        assert set(row[1:]) <= set(vocabulary.tolist())
    assert torch.equal(rows, copying_sequences(vocabulary, 20, 6, 5, seed=1, bos_token_id=3))
    assert not torch.equal(rows, copying_sequences(vocabulary, 20, 6, 5, seed=2, bos_token_id=3))
    assert copying_sequences(vocabulary, 6, 6, 1).shape == (1, 12)
    # What is copied is the same at every distance.
    near, far = (copying_sequences(vocabulary, distance, 6, 5) for distance in (8, 30))
    assert torch.equal(near[:, :8], far[:, :8])


def test_ordinary_tokens_are_text():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<tool>"])
    ids = ordinary_tokens(tokenizer).tolist()
    assert {tokenizer.decode([index]) for index in ids}.isdisjoint({"<unk>", "<s>", "</s>", "<tool>", "", " "})
    assert len(ids) == len(set(ids)) == len(tokenizer.get_vocab()) - 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"segment": 1}, "`segment` must be at least 2"),
        ({"distances": (3,)}, r"`distance` must be at least `segment` \(4\)"),
        ({"distances": (10_000,)}, "ordinary tokens of the vocabulary"),
        ({"sequences": 0}, "`sequences` must be at least 1, got 0"),
    ],
    ids=["segment", "too_near", "too_far", "none"],
)
def test_numbers_out_of_range(options, words):
    with pytest.raises(InspectionError, match=words):
        copying_accuracy(tiny_llama(), tiny_tokenizer(), **{"distances": DISTANCES, "segment": 4, **options})
