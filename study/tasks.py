"""
Tasks that ask for something said earlier in the row: associative recall, a pass key, and needles.

The facts lie among ordinary text, at any depth; the row ends with the question and its answer. Keys to test on are never trained on. They are of one
kind with those of the literature: multi-query associative recall (arXiv 2312.04927), the pass key (2305.16300) and needles of several keys (RULER,
2404.06654).
"""

import hashlib
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from .errors import StudyError


BEGIN, END, PADDING, KEY = "<|begin|>", "<|end|>", "<|padding|>", "<|key|>"
SPECIAL_TOKENS = (BEGIN, END, PADDING, KEY)

# One key of so many is for the test.
TEST_KEYS = 8
DIGITS = 5
RECALLED_PAIRS = 16
# Tokens that pairs are made of: fewer, each of which is seen the more often, are learned to be copied sooner.
RECALLED_TOKENS = 256
NEEDLES = 4

_COLOURS = [
    "amber",
    "black",
    "blue",
    "bronze",
    "brown",
    "copper",
    "crimson",
    "golden",
    "green",
    "grey",
    "ivory",
    "orange",
    "pink",
    "purple",
    "red",
    "silver",
    "white",
    "yellow",
]
_ANIMALS = [
    "badger",
    "bear",
    "beaver",
    "crane",
    "deer",
    "dolphin",
    "eagle",
    "falcon",
    "fox",
    "goose",
    "hare",
    "hawk",
    "heron",
    "horse",
    "lion",
    "lynx",
    "moose",
    "otter",
    "owl",
    "panda",
    "raven",
    "seal",
    "sheep",
    "swan",
    "tiger",
    "whale",
    "wolf",
    "wren",
    "zebra",
]


@dataclass(frozen=True)
class TaskRow:
    """
    Attributes:
        input_ids: The row, which ends with the last answer.
        answers: Of each answer the first position and the one past the last.
        depths: Of each answer where what it repeats lies: 0 at the row's beginning, 1 at the question.
    """

    input_ids: list[int]
    answers: list[tuple[int, int]]
    depths: list[float]


class Filler:
    """
    Text to put between facts.

    Args:
        ids (`list[int]`): The tokens of documents, one after another.
    """

    def __init__(self, ids: list[int]):
        if not ids:
            raise StudyError(
                "there is no text to put between the facts of a task: the corpus has no document on this side"
            )
        self.ids = ids

    def take(self, count: int, draws: random.Random) -> list[int]:
        """`count` tokens from a random place on, from the beginning again after the end."""
        start = draws.randrange(len(self.ids))
        taken = self.ids[start : start + count]
        while len(taken) < count:
            taken += self.ids[: count - len(taken)]
        return taken


class Task(Protocol):
    """A kind of question."""

    def __call__(self, length: int, filler: Filler, test: bool, draws: random.Random) -> TaskRow:
        """
        Draw a row.

        Args:
            length (`int`): Tokens in it.
            filler ([`Filler`]): Text between the facts.
            test (`bool`): Whether its keys are those of the test.
            draws (`random.Random`): Decides all there is to decide.
        """
        ...


def is_test_key(key: str) -> bool:
    """Whether a key is for the test; the same in every run and on every machine."""
    return hashlib.sha256(key.encode()).digest()[0] % TEST_KEYS == 0


def _draw_key(make: Callable[[], str], test: bool) -> str:
    while is_test_key(key := make()) != test:
        pass
    return key


class _Tokens:
    """What all tasks need of a tokenizer."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.begin = tokenizer.convert_tokens_to_ids(BEGIN)
        self.key = tokenizer.convert_tokens_to_ids(KEY)
        self.digits = [tokenizer.convert_tokens_to_ids(str(digit)) for digit in range(10)]
        ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
        missing = [token for token, number in ids.items() if number in (None, tokenizer.unk_token_id)]
        if missing or None in self.digits:
            raise StudyError(
                f"the tokenizer must have {', '.join(SPECIAL_TOKENS)} and a token for each digit: take one that the corpus builder made"
            )
        special = set(tokenizer.all_special_ids)
        self.ordinary = sorted(
            number for number in tokenizer.get_vocab().values() if number not in special and number not in self.digits
        )

    def text(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def number(self, digits: str) -> list[int]:
        return [self.digits[int(digit)] for digit in digits]


def _laid_out(
    begin: int, facts: list[list[int]], room: int, filler: Filler, draws: random.Random
) -> tuple[list[int], list[int]]:
    """
    Facts among `room` tokens of filler, in order.

    Returns:
        The row so far, with the token that begins it; and where each fact begins.
    """
    text = filler.take(room, draws)
    cuts = sorted(draws.randint(0, room) for _ in facts)
    row, places = [begin], []
    for fact, start, end in zip(facts, [0, *cuts[:-1]], cuts, strict=True):
        row += text[start:end]
        places.append(len(row))
        row += fact
    return row + text[cuts[-1] :], places


class AssociativeRecall:
    """
    Pairs of a key and a value, single tokens each, are strewn over the row; at its end each key is asked for its value, in an order of its own.

    A row to train on asks again and again, wherever it likes, for two to `pairs` of them: nearly every pair is an answer, and many lie near what they
    repeat. Rows of the test's kind alone hold few answers, all of them hard, and a small model does not begin to learn from them.
    """

    def __init__(self, tokenizer, pairs: int = RECALLED_PAIRS):
        self.tokens = _Tokens(tokenizer)
        self.pairs = pairs
        # An order of its own, for the first tokens of a tokenizer are single bytes.
        order = sorted(self.tokens.ordinary, key=lambda one: hashlib.sha256(f"recall {one}".encode()).digest())
        self.values = order[:RECALLED_TOKENS]
        self.keys = {test: [one for one in self.values if is_test_key(str(one)) == test] for test in (False, True)}
        if min(map(len, self.keys.values())) < pairs:
            raise StudyError(
                f"`vocab_size` must leave {pairs} tokens for the keys of the test, and leaves {len(self.keys[True])}; give a larger one"
            )

    def __call__(self, length: int, filler: Filler, test: bool, draws: random.Random) -> TaskRow:
        pairs = self.pairs if test else draws.randint(2, self.pairs)
        keys, values = draws.sample(self.keys[test], pairs), draws.sample(self.values, pairs)
        facts = [[self.tokens.key, key, value] for key, value in zip(keys, values, strict=True)]
        return (
            self._asked_at_the_end(facts, length, filler, draws) if test else self._asked(facts, length, filler, draws)
        )

    def _asked(self, facts: list[list[int]], length: int, filler: Filler, draws: random.Random) -> TaskRow:
        row, answers, depths, first = [self.tokens.begin], [], [], {}
        longest = max(1, length // 20)
        with_text = draws.choice([0.0, 0.3, 0.6])  # of the pairs
        while len(row) + len(facts[0]) <= length:
            index = draws.randrange(len(facts))
            text = filler.take(draws.randint(1, longest), draws) if draws.random() < with_text else []
            if len(row) + len(text) + len(facts[0]) > length:
                break
            place = len(row) + len(text)
            row += text + facts[index]
            if index in first:
                answers.append((len(row) - 1, len(row)))
                depths.append(first[index] / place)
            else:
                first[index] = place
        row += filler.take(length - len(row), draws)
        return TaskRow(row, answers, depths)

    def _asked_at_the_end(self, facts: list[list[int]], length: int, filler: Filler, draws: random.Random) -> TaskRow:
        room = _room(length, 2 * sum(map(len, facts)), "recall")
        row, places = _laid_out(self.tokens.begin, facts, room, filler, draws)
        question, answers, depths = len(row), [], []
        for index in draws.sample(range(len(facts)), len(facts)):
            row += facts[index]
            answers.append((len(row) - 1, len(row)))
            depths.append(places[index] / question)
        return TaskRow(row, answers, depths)


class PassKey:
    """A number is named once, and asked for at the end."""

    def __init__(self, tokenizer):
        self.tokens = _Tokens(tokenizer)
        self.before, self.after = self.tokens.text("\nThe pass key is "), self.tokens.text(". Remember it.\n")

    def __call__(self, length: int, filler: Filler, test: bool, draws: random.Random) -> TaskRow:
        key = self.tokens.number(_draw_key(lambda: _number(draws), test))
        facts = [self.before + key + self.after]
        room = _room(length, len(facts[0]) + len(self.before) + DIGITS, "pass_key")
        row, places = _laid_out(self.tokens.begin, facts, room, filler, draws)
        question = len(row)
        row += self.before + key
        return TaskRow(row, [(len(row) - DIGITS, len(row))], [places[0] / question])


class Needles:
    """Numbers of several animals are named, and one of them is asked for at the end."""

    def __init__(self, tokenizer, needles: int = NEEDLES):
        self.tokens = _Tokens(tokenizer)
        self.needles = needles

    def __call__(self, length: int, filler: Filler, test: bool, draws: random.Random) -> TaskRow:
        named: dict[str, str] = {}
        while len(named) < self.needles:
            animal = _draw_key(lambda: f"{draws.choice(_COLOURS)} {draws.choice(_ANIMALS)}", test)
            named[animal] = _draw_key(lambda: _number(draws), test)
        asked = {animal: self.tokens.text(f"\nThe number of the {animal} is ") for animal in named}
        end = self.tokens.text(".\n")
        facts = [asked[animal] + self.tokens.number(number) + end for animal, number in named.items()]
        chosen = draws.randrange(self.needles)
        animal = list(named)[chosen]
        question = asked[animal] + self.tokens.number(named[animal])
        room = _room(length, sum(map(len, facts)) + len(question), "needles")
        row, places = _laid_out(self.tokens.begin, facts, room, filler, draws)
        depth = places[chosen] / len(row)
        row += question
        return TaskRow(row, [(len(row) - DIGITS, len(row))], [depth])


TASKS: dict[str, Callable[..., Task]] = {"recall": AssociativeRecall, "pass_key": PassKey, "needles": Needles}


def _number(draws: random.Random) -> str:
    return "".join(str(draws.randrange(10)) for _ in range(DIGITS))


def _room(length: int, taken: int, task: str) -> int:
    """Tokens that are left for text, beside the one that begins the row."""
    room = length - taken - 1
    if room < 0:
        raise StudyError(f"`length` must be at least {taken + 1} for the task {task}, got {length}")
    return room


@dataclass(frozen=True)
class TaskResult:
    """
    Attributes:
        answers: How many were asked for.
        accuracy: Share of the answers of which every token is the model's first choice.
        by_depth: The same by where the fact lies, in equal parts of the row; None where none does.
    """

    answers: int
    accuracy: float
    by_depth: list[float | None]


@torch.no_grad()
def task_accuracy(model: nn.Module, rows: Iterable[TaskRow], depths: int = 5, batch_size: int = 8) -> TaskResult:
    """
    How many answers a model gets right. All tokens before the last of an answer are given, so an answer counts as it would be written greedily.

    Args:
        model (`nn.Module`): A causal language model, in evaluation mode.
        rows (`Iterable[TaskRow]`): Rows of one length.
        depths (`int`): Parts of the row to tell apart.
        batch_size (`int`): Rows at once.
    """
    rows = list(rows)
    right, counts = [0] * depths, [0] * depths
    for begin in range(0, len(rows), batch_size):
        some = rows[begin : begin + batch_size]
        input_ids = torch.tensor([row.input_ids for row in some], device=model.device)
        first = min(start for row in some for start, _ in row.answers) - 1
        logits = model(input_ids=input_ids, use_cache=False, logits_to_keep=input_ids.shape[1] - first).logits
        choices = logits.argmax(-1)  # (rows, tokens from `first` on): the choice for the token after each
        for number, row in enumerate(some):
            for (start, end), depth in zip(row.answers, row.depths, strict=True):
                found = choices[number, start - 1 - first : end - 1 - first]
                part = min(int(depth * depths), depths - 1)
                counts[part] += 1
                right[part] += torch.equal(found, input_ids[number, start:end])
    if not sum(counts):
        raise StudyError("there is no question to ask: the rows hold none")
    return TaskResult(
        sum(counts),
        sum(right) / sum(counts),
        [hits / count if count else None for hits, count in zip(right, counts, strict=True)],
    )
