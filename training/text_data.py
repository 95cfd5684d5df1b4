"""Records from files, folders and the Hub; mixed, in a fixed order, and packed into rows."""

import copy
import difflib
import glob
import itertools
import logging
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch

from ..conversion.sources import is_hub_id
from .errors import RecipeError
from .packing import one_by_one, pack
from .recipe import DataSource, Recipe


logger = logging.getLogger(__name__)

# Of a stream so many records are at hand to be drawn from.
SHUFFLE_BUFFER = 10_000

_BUILDERS = {".jsonl": "json", ".json": "json", ".txt": "text", ".md": "text", ".parquet": "parquet", ".csv": "csv"}


def load_records(recipe: Recipe, sources: list[DataSource], shuffle: bool):
    """
    The records of several sources as one data set of `datasets`, an `IterableDataset` if the recipe streams.

    Raises:
        `RecipeError`: a source is not there, empty, no text, or lacks the column.
    """
    from datasets import interleave_datasets

    seed = recipe.seed
    found = [_load(recipe, source) for source in sources]
    if shuffle:
        if recipe.streaming:
            found = [one.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER) for one in found]
        else:
            found = [one.shuffle(seed=seed) for one in found]
    if len(found) == 1:
        return found[0]
    total = sum(source.weight for source in sources)
    return interleave_datasets(
        found,
        probabilities=[source.weight / total for source in sources],
        seed=seed,
        stopping_strategy="all_exhausted",
    )


def _load(recipe: Recipe, source: DataSource):
    from datasets import load_dataset, load_from_disk

    path = Path(source.path)
    if path.is_dir() and ((path / "state.json").is_file() or (path / "dataset_dict.json").is_file()):
        records = load_from_disk(str(path))
        records = records[source.split] if hasattr(records, "keys") else records
        return _checked_columns(recipe, source, records.to_iterable_dataset() if recipe.streaming else records)
    files = _files(path)
    if not files and not is_hub_id(source.path):
        raise RecipeError(
            f"the data {source.path} is not there; give a file, a folder, a pattern or a data set on the Hub"
        )
    try:
        if files:
            builders = {_BUILDERS.get(file.suffix.lower()) for file in files}
            if len(builders) != 1 or None in builders:
                raise RecipeError(
                    f"the data {source.path} must be files of one kind, {', '.join(sorted(_BUILDERS))}; found "
                    f"{', '.join(sorted({file.suffix or file.name for file in files}))}"
                )
            (builder,) = builders
            for file in files:
                _check_file(file, builder)
            options = {"sample_by": "document"} if builder == "text" else {}
            names = [str(file) for file in files]
            records = load_dataset(builder, data_files=names, split="train", streaming=recipe.streaming, **options)
        else:
            records = load_dataset(source.path, source.name, split=source.split, streaming=recipe.streaming)
    except RecipeError:
        raise
    except Exception as error:  # datasets has many of its own, and passes on those of its readers
        cause = error.__cause__ or error
        raise RecipeError(f"the data {source.path} cannot be read: {type(cause).__name__}: {cause}") from error
    return _checked_columns(recipe, source, records)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        return sorted(one for one in path.rglob("*") if one.suffix.lower() in _BUILDERS and one.is_file())
    return sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())


def _check_file(file: Path, builder: str) -> None:
    if file.stat().st_size == 0:
        raise RecipeError(f"the data {file} is empty")
    if builder == "parquet":
        return
    with file.open("rb") as opened:
        start = opened.read(2**16)
    if b"\0" in start:
        raise RecipeError(f"the data {file} is binary, not text")
    if not start.strip():
        raise RecipeError(f"the data {file} holds nothing but blanks")


def _checked_columns(recipe: Recipe, source: DataSource, records):
    try:
        first = next(iter(records), None)
    except Exception as error:  # whatever a reader of a format raises
        raise RecipeError(f"the data {source.path} cannot be read: {type(error).__name__}: {error}") from error
    if first is None:
        raise RecipeError(f"the data {source.path} has no records")
    if recipe.objective == "sft" and ("messages" in first or {"prompt", "completion"} <= first.keys()):
        kept = [name for name in ("messages", "prompt", "completion") if name in first]
        return records.select_columns(kept)
    if source.column not in first:
        near = difflib.get_close_matches(source.column, first, n=1)
        wanted = "" if recipe.objective != "sft" else "`messages`, or `prompt` and `completion`, or "
        raise RecipeError(
            f"the data {source.path} must have {wanted}the column {source.column!r}; it has {', '.join(map(repr, first))}"
            + (f": did you mean {near[0]!r}?" if near else "")
        )
    value = first[source.column]
    is_ids = recipe.objective != "sft" and isinstance(value, list) and all(type(one) is int for one in value)
    if not is_ids and not isinstance(value, str):
        kinds = "text" if recipe.objective == "sft" else "text or token ids"
        raise RecipeError(
            f"the column {source.column!r} of {source.path} must hold {kinds}, found a {type(value).__name__}"
        )
    records = records.select_columns([source.column])
    name = "input_ids" if is_ids else "text"
    return records if source.column == name else records.rename_column(source.column, name)


class Documents:
    """
    The token ids of records, in order; of documents that are longer than a row, what the recipe says. Records that hold token ids are
    taken as they are.

    Args:
        recipe: Its `length` and `long_records` are read.
        records: Data set with the column `text` or `input_ids`.
        tokenizer: The tokenizer. Each document begins as it begins texts, and ends with its end-of-text token.
    """

    def __init__(self, recipe: Recipe, records, tokenizer):
        self.records, self.tokenizer = records, tokenizer
        self.epoch = 0
        self.length, self.long_records = recipe.length, recipe.long_records or "split"
        self.end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    @cached_property
    def last_id(self) -> int:
        return max(self.tokenizer.get_vocab().values())

    def __iter__(self) -> Iterator[list[int]]:
        dropped = 0
        for number, record in enumerate(self._records()):
            ids = self._ids(number, record)
            if not ids:
                continue
            if len(ids) > self.length and self.long_records != "split":
                if self.long_records == "error":
                    raise RecipeError(
                        f"record {number} has {len(ids)} tokens, more than `length` {self.length}: set `long_records` to 'split', 'truncate' "
                        "or 'drop', or a greater `length`"
                    )
                if self.long_records == "drop":
                    dropped += 1
                    continue
                ids = ids[: self.length]
            yield ids
        if dropped:
            logger.warning("%d records are longer than `length` %d and were dropped", dropped, self.length)

    def _ids(self, number: int, record: dict) -> list[int]:
        ids = record.get("input_ids")  # of several sources one may have these and another text
        if ids is not None:
            unknown = [token for token in ids if token is None or not 0 <= token <= self.last_id]
            if unknown:
                raise RecipeError(
                    f"record {number} has the token id {unknown[0]}, and the tokenizer has those from 0 to {self.last_id}: it was made with "
                    "another one"
                )
            return ids
        text = record["text"]
        if not text:
            return []
        ids = self.tokenizer(text, verbose=False)["input_ids"]
        return ids if ids[-1:] == self.end else ids + self.end

    def _records(self) -> Iterator[dict]:
        read = 0
        records = self.records
        if hasattr(records, "set_epoch"):
            # A stream of several sources remembers how far its lots are drawn: each pass begins with a fresh one, of its epoch.
            records = copy.deepcopy(records)
            records.set_epoch(self.epoch)
        try:
            for record in records:
                yield record
                read += 1
        except (RecipeError, GeneratorExit):
            raise
        except Exception as error:  # of a stream what is broken is found late
            raise RecipeError(
                f"the data cannot be read after record {read}: {type(error).__name__}: {error}"
            ) from error

    def rows(self, packing: bool) -> Iterator[dict]:
        """Rows of at most `length` tokens."""
        if packing:
            return pack(self, self.length, self.end[0] if self.end else 0)
        return one_by_one(self, self.length)


class RowStream(torch.utils.data.IterableDataset):
    """
    Rows as they are needed, each time in the same order: a training that goes on skips to where it was.

    Args:
        documents ([`Documents`]): Where they come from.
        packing (`bool`): Whether rows hold several documents.
        endless (`bool`): Whether the documents are gone through again and again, each time in the order of that pass: to Trainer that is
            one epoch, in which it can count.
    """

    def __init__(self, documents: Documents, packing: bool, endless: bool):
        self.documents, self.packing, self.endless = documents, packing, endless

    def __iter__(self) -> Iterator[dict]:
        for number in itertools.count():
            self.documents.epoch = number
            yield from self.documents.rows(self.packing)
            if not self.endless:
                return


def text_rows(recipe: Recipe, records, tokenizer, streaming: bool, endless: bool = False):
    """
    Rows to train or evaluate on: a stream, or a data set on disk that is made once and found again.

    Raises:
        `RecipeError`: a record is too long, or none holds text.
    """
    documents = Documents(recipe, records, tokenizer)
    if next(documents.rows(recipe.packing), None) is None:
        raise RecipeError(
            "none of the records gives a row: they hold no text, or are longer than `length` and dropped"
        )
    if streaming:
        return RowStream(documents, recipe.packing, endless)
    from datasets import Dataset

    if len(records) <= 1000:
        return Dataset.from_list(list(documents.rows(recipe.packing)))
    return Dataset.from_generator(_generate, gen_kwargs={"documents": documents, "packing": recipe.packing})


def _generate(documents: Documents, packing: bool) -> Iterator[dict]:
    yield from documents.rows(packing)
