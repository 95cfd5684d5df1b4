"""The rows that a model is healed on: a text, tokens to copy, and what the source writes by itself."""

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
SAMPLED_AT_ONCE = 128


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

    def number(self, share: float) -> int:
        return math.ceil(share * self.rows)

    def check(self, source: Path) -> None:
        """
        Raises:
            [`ConversionError`]: the vocabulary is too small for a row to copy.
        """
        number = len(ordinary_tokens(load_tokenizer(source))) if self.copy_share else self.length
        if number < self.length:
            raise ConversionError(
                f"`length` must be at most {number} with a `copy_share`: {source} has so many ordinary tokens, and none is drawn twice in a "
                f"row; got {self.length}"
            )


def write_rows(
    source: Path, text: str, mixture: Mixture, transfer: TransferOptions, folder: Path
) -> tuple[list[dict], Path]:
    """
    Write the rows as token ids, so that what is repeated is repeated token for token. What is there already from an earlier try is kept.

    Args:
        source (`Path`): Folder of the source.
        text (`str`): The text. What lies before its test is cut into rows, of which as many as in a calibration begin with BOS: a long
            text would have it once.
        mixture ([`Mixture`]): What is wanted.
        transfer ([`TransferOptions`]): Which part of the text is for the test, the share of rows with BOS, the seed, the device.
        folder (`Path`): Where they are written.

    Returns:
        `data` of a recipe, and a file with some rows of the test, to watch.
    """
    tokenizer = load_tokenizer(source)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    test = transfer.length * windows_before_test(len(ids), transfer.length, transfer.test_tokens)
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    inside = mixture.length - len(begin)
    generator = torch.Generator().manual_seed(transfer.seed)

    def with_bos(rows: Iterable[list[int]], share: float) -> Iterator[list[int]]:
        for row in rows:
            yield begin + row if torch.rand((), generator=generator).item() < share else row

    def cut(start: int, end: int) -> Iterator[list[int]]:
        return (ids[place : place + inside] for place in range(start, end - inside + 1, inside))

    kinds = {"text": (1 - mixture.copy_share - mixture.sampled_share, with_bos(cut(0, test), transfer.bos_share))}
    vocabulary = ordinary_tokens(tokenizer) if mixture.copy_share or mixture.sampled_share else None
    if mixture.copy_share:
        copied = (copied_row(vocabulary, inside, generator) for _ in range(mixture.number(mixture.copy_share)))
        kinds["copies"] = (mixture.copy_share, with_bos(copied, transfer.bos_share))
    if mixture.sampled_share:
        number = mixture.number(mixture.sampled_share)
        sampled = sampled_rows(source, tokenizer, begin, vocabulary, number, inside, transfer.seed, transfer.device)
        kinds["sampled"] = (mixture.sampled_share, with_bos(sampled, transfer.bos_share))
    data = []
    for name, (share, rows) in kinds.items():
        path = folder / f"{name}.jsonl"
        _write(path, rows)
        data.append({"path": str(path), "column": "input_ids", "weight": share})
    held_out = folder / "held_out.jsonl"
    watched = itertools.islice(cut(test, len(ids)), WATCHED_ROWS)
    _write(held_out, (begin + row for row in watched))
    return data, held_out


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
    # Not what its own generation config would fill in; and none of its ends.
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=length - 1,
        pad_token_id=0,
        suppress_tokens=list(range(len(tokenizer), model.config.get_text_config().vocab_size)) or None,
    )
    with (
        torch.random.fork_rng(devices=[]),
        tqdm(total=number, desc="The source writes", unit="row", disable=None) as progress,
    ):
        torch.manual_seed(seed)
        firsts = vocabulary[torch.randint(len(vocabulary), (number,))]
        for drawn in firsts.split(SAMPLED_AT_ONCE):
            prompts = torch.cat([torch.tensor(begin, dtype=torch.long).expand(len(drawn), -1), drawn[:, None]], dim=1)
            prompts = prompts.to(model.device)
            rows = model.generate(prompts, attention_mask=torch.ones_like(prompts))[:, len(begin) :].tolist()
            progress.update(len(rows))
            yield from rows


def copied_row(vocabulary: torch.Tensor, length: int, generator: torch.Generator) -> list[int]:
    """
    Random tokens, none drawn twice, that begin again and again: the work of induction heads. Short passages and long ones, repeated at once or
    much later, are about as frequent as each other on a logarithmic scale.

    Args:
        vocabulary (`torch.LongTensor` of shape `(tokens,)`): Ids to draw from, at least `length`.
        length (`int`): Tokens in the row.
        generator (`torch.Generator`): Draws the tokens, the length of the passage and the distance to its repeat.
    """

    def between(least: int, most: int) -> int:
        share = torch.rand((), generator=generator).item()
        return round(least * (max(most, least) / least) ** share)

    passage = between(min(SHORTEST_PASSAGE, length // 2), int(length * LONGEST_PASSAGE))
    distance = between(passage, length - passage)
    drawn = vocabulary[torch.randperm(len(vocabulary), generator=generator)[:distance]].tolist()
    row = drawn + drawn[:passage]
    while len(row) < length:
        row += row[-distance:]
    return row[:length]
