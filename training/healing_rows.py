"""The rows that a model is healed on: a text, and tokens to copy."""

import json
from pathlib import Path

import torch

from ..conversion.errors import ConversionError
from ..conversion.sink_transfer.calibration import windows_before_test
from ..conversion.sink_transfer.transfer import TransferOptions, load_tokenizer
from ..diagnostics.copying import ordinary_tokens


# Rows of the held-out text that the curves are drawn of; the tests are on all of it.
WATCHED_ROWS = 8
# Tokens of the shortest passage that is repeated, and the longest one's share of a row.
SHORTEST_PASSAGE = 8
LONGEST_PASSAGE = 0.4


def write_rows(
    source: Path, text: str, length: int, copy_share: float, transfer: TransferOptions, folder: Path
) -> tuple[Path, Path]:
    """
    Write the rows as token ids, so that what is repeated is repeated token for token.

    Args:
        source (`Path`): Folder of the source, for its tokenizer.
        text (`str`): The text. What lies before its test is cut into rows, of which as many as in a calibration begin with BOS: a long
            text would have it once.
        length (`int`): Tokens in a row.
        copy_share (`float`): Share of the rows that hold random tokens and repeat them ([`copied_row`]), mixed in among those of the text.
        transfer ([`TransferOptions`]): Which part of the text is for the test, the share of rows with BOS, the seed.
        folder (`Path`): Where they are written.

    Returns:
        The file of the rows, and one of some rows of the test, to watch.
    """
    tokenizer = load_tokenizer(source)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    test = transfer.length * windows_before_test(len(ids), transfer.length, transfer.test_tokens)
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    inside = length - len(begin)
    generator = torch.Generator().manual_seed(transfer.seed)
    vocabulary = ordinary_tokens(tokenizer) if copy_share else None
    if vocabulary is not None and len(vocabulary) < inside:
        raise ConversionError(
            f"`length` must be at most {len(vocabulary) + len(begin)} with a `copy_share`: {source} has {len(vocabulary)} ordinary tokens, and "
            f"none is drawn twice in a row; got {length}"
        )

    def draw(share: float) -> bool:
        return torch.rand((), generator=generator).item() < share

    def record(tokens: list[int], with_bos: bool) -> str:
        return json.dumps({"input_ids": (begin if with_bos else []) + tokens}) + "\n"

    rows, held_out = folder / "rows.jsonl", folder / "held_out.jsonl"
    with rows.open("w", encoding="utf-8") as file:
        for start in range(0, test - inside + 1, inside):
            file.write(record(ids[start : start + inside], draw(transfer.bos_share)))
            # One of these beside so many of those.
            if draw(copy_share / (1 - copy_share)):
                file.write(record(copied_row(vocabulary, inside, generator), draw(transfer.bos_share)))
    watched = range(test, min(len(ids) - inside, test + WATCHED_ROWS * inside) + 1, inside)
    held_out.write_text("".join(record(ids[start : start + inside], True) for start in watched), encoding="utf-8")
    return rows, held_out


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
