"""Rows of a fixed length, filled with documents that do not see each other."""

from collections.abc import Iterable, Iterator

import torch


IGNORED = -100


def pack(documents: Iterable[list[int]], length: int, padding: int) -> Iterator[dict]:
    """
    Fill rows with documents, one behind the other. A document that reaches over the end of a row goes on in the next one, as a document of
    its own there. The last row is filled up with padding, which is no target.

    Args:
        documents (`Iterable[list[int]]`): Token ids of each.
        length (`int`): Tokens in a row.
        padding (`int`): Token id that the last row is filled up with.

    Returns:
        Rows: `input_ids`, `length` of them, and `seq_lengths`, how many belong to each document in turn; padding is the last, if
        `padded` tokens are.
    """
    row: list[int] = []
    lengths: list[int] = []
    for document in documents:
        start = 0
        while start < len(document):
            part = document[start : start + length - len(row)]
            row += part
            lengths.append(len(part))
            start += len(part)
            if len(row) == length:
                yield {"input_ids": row, "seq_lengths": lengths, "padded": 0}
                row, lengths = [], []
    if row:
        missing = length - len(row)
        yield {"input_ids": row + [padding] * missing, "seq_lengths": [*lengths, missing], "padded": missing}


def one_by_one(documents: Iterable[list[int]], length: int) -> Iterator[dict]:
    """Each document in rows of its own, of at most `length` tokens."""
    for document in documents:
        for start in range(0, len(document), length):
            part = document[start : start + length]
            yield {"input_ids": part, "seq_lengths": [len(part)], "padded": 0}


class PackedCollator:
    """
    Batches of packed rows: `input_ids`, `labels` and `position_ids` that begin anew with each document.

    There is no attention mask: transformers tells from the positions which tokens see each other, and only if there is none. The first
    token of a document is no target: what is before it is another document's.
    """

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        input_ids = torch.tensor([row["input_ids"] for row in rows])
        positions = torch.tensor(
            [[position for count in row["seq_lengths"] for position in range(count)] for row in rows]
        )
        labels = input_ids.masked_fill(positions == 0, IGNORED)
        for index, row in enumerate(rows):
            if row["padded"]:
                labels[index, -row["padded"] :] = IGNORED
        return {"input_ids": input_ids, "position_ids": positions, "labels": labels}


class PaddedCollator:
    """
    Batches of rows of one document each, filled up on the right.

    Args:
        padding (`int`): Token id to fill up with.
    """

    def __init__(self, padding: int):
        self.padding = padding

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        width = max(len(row["input_ids"]) for row in rows)
        batch = {"input_ids": [], "attention_mask": [], "labels": []}
        for row in rows:
            ids = list(row["input_ids"])
            missing = width - len(ids)
            batch["input_ids"].append(ids + [self.padding] * missing)
            batch["attention_mask"].append([1] * len(ids) + [0] * missing)
            batch["labels"].append(ids + [IGNORED] * missing)
        return {name: torch.tensor(values) for name, values in batch.items()}
