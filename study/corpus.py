"""
A mixed corpus from what lies on this machine: Python's help pages, the source of its standard library, text files of one's own; a tokenizer that is
trained on it; and rows of the tasks. Nothing is downloaded.
"""

import hashlib
import json
import random
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from ..conversion.staging import staged_folder
from .errors import StudyError
from .tasks import BEGIN, END, PADDING, SPECIAL_TOKENS, TASKS, Filler, TaskRow, task_accuracy


MANIFEST = "corpus.json"
# Raised when rows, windows or measures become others: what was made before is made anew.
FORMAT = 2
TOKENIZER = "tokenizer"
# Text that the tokenizer is trained on at most, in characters, and text of a source that is used.
TOKENIZER_CHARACTERS = 8_000_000
SHORTEST_DOCUMENT = 200
# Of a paragraph that counts as shared, in characters.
SHORTEST_PASSAGE = 60
TEXT_FILES = (".txt", ".md", ".rst", ".html")


@dataclass(frozen=True)
class Document:
    """
    Attributes:
        name: Says where it comes from; decides on which side it falls.
        text: Its text.
    """

    name: str
    text: str


@dataclass(frozen=True)
class CorpusOptions:
    """
    Attributes:
        sources: `"help"` (Python's help pages), `"standard_library"` (the source of its modules), or text files, folders of them and patterns.
        characters: Of each source at most so many are taken, in whole documents in an order drawn by `seed`.
        test_share: Share of the documents that are held out, chosen by their names.
        vocab_size: Tokens of the tokenizer.
        lengths: Tokens in a row; rows of each of these lengths are made.
        tasks: Share of the training rows that each task has; the rest is text.
        task_rows: Rows written of each task. A longer training sees them again.
        seed: Draws documents and rows.
    """

    sources: list[str] = field(default_factory=lambda: ["help", "standard_library"])
    characters: int = 12_000_000
    test_share: float = 0.05
    vocab_size: int = 2048
    lengths: list[int] = field(default_factory=lambda: [256])
    tasks: dict[str, float] = field(default_factory=lambda: {"recall": 0.15, "pass_key": 0.05, "needles": 0.05})
    task_rows: int = 20_000
    seed: int = 0

    def __post_init__(self):
        if not self.sources:
            raise StudyError("`corpus.sources` must name at least one source")
        if not self.lengths or min(self.lengths) < 64:
            raise StudyError(f"`corpus.lengths` must hold lengths of 64 or more, got {self.lengths}")
        for name, least in (("characters", 100_000), ("vocab_size", 512), ("task_rows", 1)):
            if getattr(self, name) < least:
                raise StudyError(f"`corpus.{name}` must be at least {least}, got {getattr(self, name)}")
        if not 0 < self.test_share < 1:
            raise StudyError(f"`corpus.test_share` must lie between 0 and 1, got {self.test_share}")
        for name, share in self.tasks.items():
            if name not in TASKS:
                raise StudyError(f"`corpus.tasks` has {name!r}; there are {', '.join(TASKS)}")
            if not isinstance(share, (int, float)) or share <= 0:
                raise StudyError(f"`corpus.tasks.{name}` must be a positive share, got {share!r}")
        if sum(self.tasks.values()) >= 1:
            raise StudyError(f"`corpus.tasks` must leave some of the rows for text, got {self.tasks}")


@dataclass(frozen=True)
class Corpus:
    """
    A corpus on disk.

    Attributes:
        folder: Where it lies.
        manifest: What it was made of: options, sources with their licences, counts, and a hash of its contents.
    """

    folder: Path
    manifest: dict

    @classmethod
    def load(cls, folder: str | Path) -> "Corpus":
        """
        Raises:
            [`StudyError`]: there is no whole corpus.
        """
        path = Path(folder) / MANIFEST
        try:
            return cls(Path(folder), json.loads(path.read_text(encoding="utf-8")))
        except (OSError, json.JSONDecodeError) as error:
            raise StudyError(f"{folder} holds no corpus: {path.name} cannot be read ({error})") from error

    @property
    def options(self) -> CorpusOptions:
        return CorpusOptions(**self.manifest["options"])

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder / TOKENIZER

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return PreTrainedTokenizerFast.from_pretrained(self.tokenizer_folder)

    def data(self, length: int) -> list[dict]:
        """
        `data` of a recipe: text and tasks, in their shares, in rows of this length.

        Raises:
            [`StudyError`]: there are none of this length.
        """
        if length not in self.options.lengths:
            raise StudyError(f"`length` must be one of `corpus.lengths` {self.options.lengths}, got {length}")
        tasks = self.options.tasks
        shares = {"text": 1 - sum(tasks.values()), **tasks}
        return [
            {"path": str(self.folder / f"{name}-{length}.jsonl"), "column": "input_ids", "weight": share}
            for name, share in shares.items()
        ]

    def training_rows(self, length: int) -> Iterator[list[int]]:
        """The rows of text to train on."""
        return _read_ids(self.folder / f"text-{length}.jsonl")

    def test_windows(self, length: int, tokens: int) -> list[list[int]]:
        """
        Windows of the held-out documents, each beginning with `<|begin|>`, of about `tokens` tokens in all, from places that are spread evenly over
        them.

        Raises:
            [`StudyError`]: there are not so many tokens.
        """
        windows = list(_rows_of(_read_ids(self.folder / "test.jsonl"), length))
        wanted = max(1, tokens // length)
        if len(windows) < wanted:
            raise StudyError(
                f"the corpus holds out {self.manifest['tokens']['test']} tokens, too few for {tokens} in windows of {length}: name more "
                "sources, or test on less"
            )
        return [windows[number * len(windows) // wanted] for number in range(wanted)]

    def test_rows(self, task: str, length: int, number: int) -> list[TaskRow]:
        """Rows of a task with keys of the test among held-out text; the same ones each time."""
        make = TASKS[task](self.tokenizer)
        draws = random.Random(f"{self.options.seed} {task} {length} test")
        return [make(length, self._held_out, True, draws) for _ in range(number)]

    @cached_property
    def _held_out(self) -> Filler:
        return _filler(self.folder / "test.jsonl")

    def accuracies(self, model: nn.Module, length: int, number: int) -> dict[str, dict]:
        """What [`task_accuracy`] finds on `number` rows of each task, by task."""
        return {
            task: asdict(task_accuracy(model, self.test_rows(task, length, number))) for task in self.options.tasks
        }


def build_corpus(folder: str | Path, options: CorpusOptions | None = None, progress: bool = True) -> Corpus:
    """
    Make a corpus, or take the one that is there, if it was made with the same options.

    Rows are token ids, one JSON line each, and all begin with `<|begin|>`, as the windows of the test do; documents follow on each other with
    `<|end|>` between them. Those held out, and what tasks ask for in the test, take no part in the training rows.

    Args:
        folder (`str` or `Path`): Folder to make.
        options ([`CorpusOptions`], *optional*): What of.
        progress (`bool`): Whether to show progress, on a terminal.

    Raises:
        [`StudyError`]: a source is not there, there is too little text, or the folder holds another corpus. Nothing is left half-written.
    """
    options, folder = options or CorpusOptions(), Path(folder)
    wanted = json.loads(json.dumps(asdict(options)))
    if (folder / MANIFEST).is_file():
        found = Corpus.load(folder)
        if found.manifest.get("format") != FORMAT:
            raise StudyError(
                f"{folder} holds a corpus that another version of gated_attention made: give another folder, or remove it"
            )
        if found.manifest["options"] != wanted:
            changed = [name for name in wanted if found.manifest["options"].get(name) != wanted[name]]
            raise StudyError(
                f"{folder} holds a corpus of other options ({', '.join(changed)}): give another folder, or remove it"
            )
        return found
    if folder.exists():
        raise StudyError(f"{folder} is there and holds no corpus: give another folder, or remove it")
    disable = None if progress else True
    sides: dict[bool, list[Document]] = {False: [], True: []}
    sources = {}
    for source in options.sources:
        taken, licence = _documents_of(source, options)
        for document in taken:
            sides[_is_held_out(document.name, options.test_share)].append(document)
        sources[source] = {
            "licence": licence,
            "documents": len(taken),
            "characters": sum(len(document.text) for document in taken),
        }
    for is_test, documents in sides.items():
        # So that the beginning of a side is of all sources.
        random.Random(f"{options.seed} {is_test}").shuffle(documents)
        if not documents:
            raise StudyError(
                f"`corpus.test_share` {options.test_share} leaves no document to {'test on' if is_test else 'train on'}: name more sources"
            )
    before = sum(len(document.text) for document in sides[False])
    sides[False] = without_shared_passages(sides[False], sides[True])
    removed = before - sum(len(document.text) for document in sides[False])
    with staged_folder(folder) as staged:
        tokenizer = _train_tokenizer(sides[False], options, progress)
        tokenizer.save_pretrained(staged / TOKENIZER)
        counts = {}
        for is_test, name in ((False, "train"), (True, "test")):
            bar = tqdm(sides[is_test], desc=f"Documents, {name}", unit="document", disable=disable)
            counts[name] = _write_ids(staged / f"{name}.jsonl", (tokenizer(one.text)["input_ids"] for one in bar))
        filler = _filler(staged / "train.jsonl")
        for length in options.lengths:
            rows = _rows_of(_read_ids(staged / "train.jsonl"), length)
            counts[f"text-{length}"] = _write_ids(staged / f"text-{length}.jsonl", rows)
            for task in options.tasks:
                make, draws = TASKS[task](tokenizer), random.Random(f"{options.seed} {task} {length} train")
                make(length, filler, True, random.Random(0))  # that a row of the test has room is known now
                bar = tqdm(range(options.task_rows), desc=f"Rows, {task}", unit="row", disable=disable)
                rows = (make(length, filler, False, draws).input_ids for _ in bar)
                counts[f"{task}-{length}"] = _write_ids(staged / f"{task}-{length}.jsonl", rows)
        manifest = {
            "format": FORMAT,
            "options": wanted,
            "sources": sources,
            "tokens": counts,
            "shared_characters_removed": removed,
            "python": sys.version.split()[0],
            "sha256": _hash_of(staged),
        }
        (staged / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return Corpus.load(folder)


def _documents_of(source: str, options: CorpusOptions) -> tuple[list[Document], str]:
    """Documents of a source, as many as are wanted, and their licence."""
    if source == "help":
        found, licence = list(_help_pages()), "PSF licence"
    elif source == "standard_library":
        found, licence = list(_standard_library()), "PSF licence"
    else:
        found, licence = list(_text_files(source)), "whatever its owner says"
    found = [document for document in found if len(document.text) >= SHORTEST_DOCUMENT]
    if not found:
        raise StudyError(f"the source {source} holds no document of {SHORTEST_DOCUMENT} characters or more")
    random.Random(f"{options.seed} {source}").shuffle(found)
    taken, characters = [], 0
    for document in found:
        if characters + len(document.text) <= options.characters:
            taken.append(document)
            characters += len(document.text)
    if not taken:
        raise StudyError(
            f"`corpus.characters` must hold a document of {source}, the shortest of which has {min(len(one.text) for one in found)} characters; got "
            f"{options.characters}"
        )
    return taken, licence


def _help_pages() -> Iterable[Document]:
    from pydoc_data.topics import topics

    return (Document(f"help/{name}", topics[name]) for name in sorted(topics))


def _standard_library() -> Iterable[Document]:
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        # Not what was installed beside it, and not tests, which are half of it and much alike; the help pages are a source of their own.
        if {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"} & set(name.parts):
            continue
        try:
            yield Document(f"standard_library/{name.as_posix()}", path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, OSError):
            continue


def _text_files(source: str) -> Iterator[Document]:
    path = Path(source)
    if path.is_dir():
        files = sorted(one for one in path.rglob("*") if one.suffix.lower() in TEXT_FILES)
    elif path.is_file():
        files = [path]
    else:
        files = sorted(
            one for one in Path(path.anchor or ".").glob(str(path.relative_to(path.anchor))) if one.is_file()
        )
    if not files:
        raise StudyError(
            f"`corpus.sources` has {source!r}, and there is no such file, folder with {', '.join(TEXT_FILES)}, or pattern"
        )
    for file in files:
        try:
            # Not where the texts lie: a document stays on its side when they are moved.
            name = file.relative_to(path).as_posix() if path.is_dir() else file.name
            yield Document(f"texts/{name}", file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise StudyError(f"{file} is no UTF-8 text: {error}") from error


def _is_held_out(name: str, share: float) -> bool:
    """By the name alone, so that a document stays on its side whatever other sources are there."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") < share * 2**48


def without_shared_passages(trained: list[Document], held_out: list[Document]) -> list[Document]:
    """
    The documents to train on without the paragraphs that stand in a held-out one too: pages of a manual quote each other, and modules share
    headers. Short ones stay, which are anybody's.
    """
    shared = {" ".join(part.split()) for document in held_out for part in document.text.split("\n\n")}
    kept = []
    for document in trained:
        parts = document.text.split("\n\n")
        own = [part for part in parts if len(part) < SHORTEST_PASSAGE or " ".join(part.split()) not in shared]
        kept.append(replace(document, text="\n\n".join(own)))
    return [document for document in kept if document.text.strip()]


def _train_tokenizer(documents: list[Document], options: CorpusOptions, progress: bool) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    # Digits one by one: keys of the tasks are numbers. Words as byte-level BPE has them.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=progress and sys.stderr.isatty(),
    )
    texts, characters = [], 0
    for document in random.Random(options.seed).sample(documents, len(documents)):
        texts.append(document.text)
        characters += len(document.text)
        if characters > TOKENIZER_CHARACTERS:
            break
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A {END}", special_tokens=[(one, tokenizer.token_to_id(one)) for one in (BEGIN, END)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PADDING,
        additional_special_tokens=[one for one in SPECIAL_TOKENS if one not in (BEGIN, END, PADDING)],
        model_max_length=int(1e9),
    )


def _write_ids(path: Path, documents: Iterable[list[int]]) -> int:
    """Write token ids, a JSON line each; returns how many there are."""
    tokens = 0
    with path.open("w", encoding="utf-8") as file:
        for ids in documents:
            file.write(json.dumps({"input_ids": ids}) + "\n")
            tokens += len(ids)
    return tokens


def _read_ids(path: Path) -> Iterator[list[int]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["input_ids"]


def _rows_of(documents: Iterable[list[int]], length: int) -> Iterator[list[int]]:
    """Documents one after another, cut into rows that all begin with the token that documents begin with."""
    row: list[int] = []
    for ids in documents:
        place = 1
        while place < len(ids):
            row = row or ids[:1]
            taken = ids[place : place + length - len(row)]
            row, place = row + taken, place + len(taken)
            if len(row) == length:
                yield row
                row = []


def _filler(path: Path) -> Filler:
    return Filler([token for ids in _read_ids(path) for token in ids[1:]])


def _hash_of(folder: Path) -> str:
    """Of all that a training reads."""
    found = hashlib.sha256()
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        found.update(path.relative_to(folder).as_posix().encode())
        found.update(path.read_bytes())
    return found.hexdigest()
