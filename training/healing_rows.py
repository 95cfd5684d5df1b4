"""The rows that a model is healed on: a text, tokens to copy, and what the source writes by itself."""

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GenerationConfig

from ..conversion.errors import ConversionError
from ..conversion.sink_transfer.calibration import windows_before_test
from ..conversion.sink_transfer.transfer import TransferOptions, load_tokenizer
from ..conversion.staging import whole_file
from ..diagnostics.copying import ordinary_tokens


# Rows of the held-out text that the curves are drawn of; the tests are on all of it.
WATCHED_ROWS = 8
# Tokens of the shortest passage that is repeated, and the longest one's share of a row.
SHORTEST_PASSAGE = 8
LONGEST_PASSAGE = 0.4
# Tokens that are held at once while rows are sampled.
SAMPLED_AT_ONCE = 32768
# Stands for what a user says, to find out what a chat template writes before it.
SAID = "what-a-user-says"


@dataclass(frozen=True)
class Mixture:
    """
    What rows are made of. What is left of the shares is text.

    Attributes:
        rows: How many are needed in all.
        length: Tokens in a row.
        copy_share: Share of random tokens that are repeated ([`copied_row`]).
        sampled_share: Share of what the source writes by itself ([`sampled_rows`]).
        chat_share: Share of those that begin as a chat does ([`chat_beginning`]), if the tokenizer has a chat template: the source writes
            both sides of it (the idea of Magpie, arXiv 2406.08464).
    """

    rows: int
    length: int
    copy_share: float
    sampled_share: float
    chat_share: float


class HealingRows:
    """
    Rows of token ids, so that what is repeated is repeated token for token. What there is too little of is found out when this is made.

    Args:
        source (`Path`): Folder of the source.
        text (`str`): The text. What lies before its test is cut into rows, of which as many as in a calibration begin with BOS: a long
            text would have it once.
        mixture ([`Mixture`]): What is wanted.
        transfer ([`TransferOptions`]): Which part of the text is for the test, the share of rows with BOS, the seed, the device.

    Raises:
        [`ConversionError`]: the text or its test has no row of this length, the vocabulary is too small for a row to copy, or a row is too
            short for a chat.
        `InspectionError`: the vocabulary has no token that is a piece of text.
    """

    def __init__(self, source: Path, text: str, mixture: Mixture, transfer: TransferOptions):
        self.source, self.mixture, self.transfer = source, mixture, transfer
        self.tokenizer = load_tokenizer(source)
        self.ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        self.test = transfer.length * windows_before_test(len(self.ids), transfer.length, transfer.test_tokens)
        length = mixture.length
        # What a row with BOS begins with, and how many tokens follow.
        self.begin = [] if self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]
        self.inside = length - len(self.begin)
        for name, number in (("before its test", self.test), ("in its test", len(self.ids) - self.test)):
            if number < length:
                raise ConversionError(
                    f"`length` must be at most {number}: the text has so many tokens {name}; got {length}. Give a longer text"
                )
        self.vocabulary = (
            ordinary_tokens(self.tokenizer) if mixture.copy_share or mixture.sampled_share else torch.empty(0)
        )
        if mixture.copy_share and len(self.vocabulary) < length:
            raise ConversionError(
                f"`length` must be at most {len(self.vocabulary)} with a `copy_share`: {source} has so many ordinary tokens, and none is drawn "
                f"twice in a row; got {length}"
            )

        self.chat = chat_beginning(self.tokenizer) if mixture.sampled_share and mixture.chat_share else []
        if len(self.chat) >= length:
            raise ConversionError(
                f"`length` must be more than {len(self.chat)} with a `chat_share`: so many tokens of {source}'s chat template stand before a "
                f"user's words; got {length}. Or give `chat_share` 0"
            )

    def of_text(self, number: int) -> list[list[int]]:
        """The first rows of the text, each beginning with BOS, where there is one."""
        rows = _cut(self.ids, 0, self.test, self.inside, self.inside)
        return [self.begin + row for row in itertools.islice(rows, number)]

    def write(self, folder: Path) -> tuple[list[dict], Path]:
        """
        Write them. What is there already from an earlier try is kept.

        Returns:
            `data` of a recipe, and a file with some rows of the test, to watch.
        """
        mixture, seed, begin, inside = self.mixture, self.transfer.seed, self.begin, self.inside

        def with_bos(rows: Iterable[list[int]], kind: str) -> Iterator[list[int]]:
            # Each kind has its draws, so that a file that is there already changes nothing in the others. All rows are of one length:
            # shorter ones would be filled up with the next one's beginning.
            generator = torch.Generator().manual_seed(_seed(seed, kind, "bos"))
            for row in rows:
                has_bos = torch.rand((), generator=generator).item() < self.transfer.bos_share
                yield ((begin if has_bos else []) + row)[: mixture.length]

        of_text = _cut(self.ids, 0, self.test, mixture.length, inside)
        kinds = {"text": (1 - mixture.copy_share - mixture.sampled_share, with_bos(of_text, "text"))}
        if mixture.copy_share:
            generator = torch.Generator().manual_seed(_seed(seed, "copies"))
            number = math.ceil(mixture.copy_share * mixture.rows)
            copied = (copied_row(self.vocabulary, mixture.length, generator) for _ in range(number))
            kinds["copies"] = (mixture.copy_share, with_bos(copied, "copies"))
        chats = mixture.sampled_share * mixture.chat_share if self.chat else 0.0
        if chats < mixture.sampled_share:
            share = mixture.sampled_share - chats
            generator = torch.Generator().manual_seed(_seed(seed, "firsts"))
            drawn = torch.randint(len(self.vocabulary), (math.ceil(share * mixture.rows),), generator=generator)
            starts = [[*begin, first] for first in self.vocabulary[drawn].tolist()]
            sampled = (row[len(begin) :] for row in self._sampled(starts, len(begin) + mixture.length, "sampled"))
            kinds["sampled"] = (share, with_bos(sampled, "sampled"))
        if chats:
            # They have the BOS that their template gives them.
            starts = [self.chat] * math.ceil(chats * mixture.rows)
            kinds["chats"] = (chats, self._sampled(starts, mixture.length, "chats"))
        data = []
        for name, (share, rows) in kinds.items():
            path = folder / f"{name}.jsonl"
            _write(path, rows)
            data.append({"path": str(path), "column": "input_ids", "weight": share})
        held_out = folder / "held_out.jsonl"
        watched = itertools.islice(_cut(self.ids, self.test, len(self.ids), inside, inside), WATCHED_ROWS)
        _write(held_out, (begin + row for row in watched))
        return data, held_out

    def _sampled(self, starts: list[list[int]], length: int, name: str) -> Iterator[list[int]]:
        seed = _seed(self.transfer.seed, name)
        return sampled_rows(self.source, self.tokenizer, torch.tensor(starts), length, seed, self.transfer.device)


def _cut(ids: list[int], start: int, end: int, length: int, step: int) -> Iterator[list[int]]:
    return (ids[place : place + length] for place in range(start, end - length + 1, step))


def _seed(seed: int, *names: str) -> int:
    """A seed of its own for each purpose."""
    return int.from_bytes(hashlib.sha256(repr((seed, *names)).encode()).digest()[:7], "big")


def _write(path: Path, rows: Iterable[list[int]]) -> None:
    """A file that is there is whole: it gets its name when it is finished."""
    if path.is_file():
        return
    with whole_file(path) as file:
        file.writelines(json.dumps({"input_ids": row}) + "\n" for row in rows)


def chat_beginning(tokenizer) -> list[int]:
    """Tokens of a chat up to a user's first word, as the tokenizer's chat template has them; none if it has no template."""
    if tokenizer.chat_template is None:
        return []
    chat = tokenizer.apply_chat_template([{"role": "user", "content": SAID}], tokenize=False)
    # A space at the end would be a token of its own, where words begin with theirs.
    return tokenizer(chat.partition(SAID)[0].rstrip(" "), add_special_tokens=False)["input_ids"]


@torch.no_grad()
def sampled_rows(
    source: Path,
    tokenizer,
    starts: torch.Tensor,
    length: int,
    seed: int = 0,
    device: str = "cpu",
) -> Iterator[list[int]]:
    """
    What a model writes by itself after a few tokens, drawn from its own predictions (the idea of LLM-QAT, arXiv 2305.17888): text of all the
    kinds that it was trained on, where the text at hand is of one. It runs in bfloat16, which is exact enough to draw from.

    Args:
        source (`Path`): Folder of the model.
        tokenizer: Its tokenizer. Token ids that it does not have, by which models fill up their vocabulary, are not drawn.
        starts (`torch.LongTensor` of shape `(rows, tokens)`): What the rows begin with.
        length (`int`): Tokens in a row, its start among them. Rows go on past the end of a text.
        seed (`int`): The same seed gives the same rows.
        device: Where the model runs.
    """
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).to(device).eval()
    unknown = set(range(model.config.get_text_config().vocab_size)).difference(tokenizer.get_vocab().values())
    # Not what its own generation config would fill in; and none of its ends.
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_length=length,
        pad_token_id=0,
        suppress_tokens=sorted(unknown) or None,
    )
    with (
        torch.random.fork_rng(devices=[]),
        tqdm(total=len(starts), desc="The source writes", unit="row", disable=None) as progress,
    ):
        torch.manual_seed(seed)
        for some in starts.to(model.device).split(max(1, SAMPLED_AT_ONCE // length)):
            rows = model.generate(some, attention_mask=torch.ones_like(some)).tolist()
            progress.update(len(rows))
            yield from rows


def copied_row(vocabulary: torch.Tensor, length: int, generator: torch.Generator) -> list[int]:
    """
    Random tokens, none drawn twice, passages of which come again: the work of induction heads. Half of the passages are repeated at
    once, the others after tokens of their own; short passages and short distances are about as frequent as long ones, on a logarithmic scale.

    Args:
        vocabulary (`torch.LongTensor` of shape `(tokens,)`): Ids to draw from, at least `length`.
        length (`int`): Tokens in the row, at least 16.
        generator (`torch.Generator`): Draws the tokens and the lengths.
    """

    def between(least: int, most: int) -> int:
        return round(least * (max(most, least) / least) ** torch.rand((), generator=generator).item())

    drawn = vocabulary[torch.randperm(len(vocabulary), generator=generator)[:length]].tolist()
    row: list[int] = []
    while len(row) < length:
        passage = between(SHORTEST_PASSAGE, int(length * LONGEST_PASSAGE))
        at_once = torch.rand((), generator=generator).item() < 0.5
        gap = 0 if at_once else between(1, length - 2 * passage)
        block, drawn = drawn[: passage + gap], drawn[passage + gap :]
        row += block + block[:passage]
    return row[:length]
