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
from ..diagnostics.copying import ordinary_tokens


# Rows of the held-out text that the curves are drawn of; the tests are on all of it.
WATCHED_ROWS = 8
# Tokens of the shortest passage that is repeated, and the longest one's share of a row.
SHORTEST_PASSAGE = 8
LONGEST_PASSAGE = 0.4
# Tokens that are held at once while rows are sampled.
SAMPLED_AT_ONCE = 32768


@dataclass(frozen=True)
class Mixture:
    """
    What rows are made of. What is left of the shares is text.

    Attributes:
        rows: How many are needed in all.
        length: Tokens in a row.
        copy_share: Share of random tokens that are repeated ([`copied_row`]).
        sampled_share: Share of what the source writes by itself ([`sampled_rows`]).
    """

    rows: int
    length: int
    copy_share: float
    sampled_share: float


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
        [`ConversionError`]: the text or its test has no row of this length, or the vocabulary is too small for a row to copy.
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
        kinds = {"text": (1 - mixture.copy_share - mixture.sampled_share, of_text)}
        if mixture.copy_share:
            generator = torch.Generator().manual_seed(_seed(seed, "copies"))
            number = math.ceil(mixture.copy_share * mixture.rows)
            copied = (copied_row(self.vocabulary, mixture.length, generator) for _ in range(number))
            kinds["copies"] = (mixture.copy_share, copied)
        if mixture.sampled_share:
            number = math.ceil(mixture.sampled_share * mixture.rows)
            sampled = sampled_rows(
                self.source, self.tokenizer, begin, self.vocabulary, number, mixture.length, seed, self.transfer.device
            )
            kinds["sampled"] = (mixture.sampled_share, sampled)
        data = []
        for name, (share, rows) in kinds.items():
            path = folder / f"{name}.jsonl"
            _write(path, with_bos(rows, name))
            data.append({"path": str(path), "column": "input_ids", "weight": share})
        held_out = folder / "held_out.jsonl"
        watched = itertools.islice(_cut(self.ids, self.test, len(self.ids), inside, inside), WATCHED_ROWS)
        _write(held_out, (begin + row for row in watched))
        return data, held_out


def _cut(ids: list[int], start: int, end: int, length: int, step: int) -> Iterator[list[int]]:
    return (ids[place : place + length] for place in range(start, end - length + 1, step))


def _seed(seed: int, *names: str) -> int:
    """A seed of its own for each purpose."""
    return int.from_bytes(hashlib.sha256(repr((seed, *names)).encode()).digest()[:7], "big")


def _write(path: Path, rows: Iterable[list[int]]) -> None:
    """A file that is there is whole: it gets its name when it is finished."""
    if path.is_file():
        return
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"input_ids": row}) + "\n" for row in rows)
    unfinished.rename(path)


@torch.no_grad()
def sampled_rows(
    source: Path,
    tokenizer,
    begin: list[int],
    vocabulary: torch.Tensor,
    number: int,
    length: int,
    seed: int = 0,
    device: str = "cpu",
) -> Iterator[list[int]]:
    """
    What a model writes by itself after a random token, drawn from its own predictions (the idea of LLM-QAT, arXiv 2305.17888): text of all the
    kinds that it was trained on, where the text at hand is of one. It runs in bfloat16, which is exact enough to draw from.

    Args:
        source (`Path`): Folder of the model.
        tokenizer: Its tokenizer. Token ids that it does not have, by which models fill up their vocabulary, are not drawn.
        begin (`list[int]`): BOS, which stands before each row and is left out of it; or nothing.
        vocabulary (`torch.LongTensor` of shape `(tokens,)`): Ids that first tokens are drawn from.
        number, length (`int`): Rows, and tokens in each. They go on past the end of a text.
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
        max_new_tokens=length - 1,
        pad_token_id=0,
        suppress_tokens=sorted(unknown) or None,
    )
    with (
        torch.random.fork_rng(devices=[]),
        tqdm(total=number, desc="The source writes", unit="row", disable=None) as progress,
    ):
        torch.manual_seed(seed)
        firsts = vocabulary[torch.randint(len(vocabulary), (number,))]
        for drawn in firsts.split(max(1, SAMPLED_AT_ONCE // length)):
            prompts = torch.cat([torch.tensor(begin, dtype=torch.long).expand(len(drawn), -1), drawn[:, None]], dim=1)
            prompts = prompts.to(model.device)
            rows = model.generate(prompts, attention_mask=torch.ones_like(prompts))[:, len(begin) :].tolist()
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
