"""Which files of a conversion are finished, so that a run that was stopped can go on where it was."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path


JOURNAL_FILE = ".conversion-journal"

_READ_BYTES = 4 * 2**20


def hash_file(path: Path) -> str:
    """SHA-256 of a file's content, as the Hub has it of large files."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


class Journal:
    """
    A file in the folder of an unfinished conversion: what is being made, then a line for each finished file.

    Nothing is hashed while it is written: should a run be gone on with, what a file has to be can be told from the source.

    Args:
        folder: The unfinished folder.
        key: Says what is being made. A journal with another one is another conversion's.
    """

    def __init__(self, folder: Path, key: str):
        self.path = folder / JOURNAL_FILE
        self.finished = read_journal(folder, key)
        self.reused: list[str] = []
        if not self.finished:
            self.path.write_text(json.dumps({"key": key}) + "\n", encoding="utf-8")

    def has(self, path: Path, expected_hash: Callable[[], str]) -> bool:
        """Whether an earlier run finished a file, and it is what it has to be, by its hash."""
        if path.name not in self.finished or not path.is_file() or hash_file(path) != expected_hash():
            return False
        self.reused.append(path.name)
        return True

    def add(self, path: Path) -> None:
        """Take down a file that was just finished."""
        self.finished.append(path.name)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"file": path.name}) + "\n")


class NoJournal:
    """Stands in for a journal where files will be changed after they were written."""

    reused = ()

    def has(self, path: Path, expected_hash: Callable[[], str]) -> bool:
        return False

    def add(self, path: Path) -> None:
        pass


def read_journal(folder: Path, key: str) -> list[str]:
    """The finished files of an unfinished conversion with this key; none if there is no such."""
    try:
        lines = (folder / JOURNAL_FILE).read_text(encoding="utf-8").splitlines()
        if json.loads(lines[0])["key"] != key:
            return []
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        return []
    finished = []
    for line in lines[1:]:
        try:
            finished.append(json.loads(line)["file"])
        except (ValueError, KeyError, TypeError):
            break  # the last line of a run that was killed while it wrote it
    return finished
