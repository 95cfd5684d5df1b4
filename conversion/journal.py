"""Which files of a conversion are finished, so that a run that was killed can go on where it was."""

import hashlib
import json
from concurrent.futures import Future, ThreadPoolExecutor
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
    A file in the folder of an unfinished conversion: what is being made, then a line for each finished file, with its hash.

    Files are hashed in the background while the next is written; `hashlib` lets other threads work meanwhile. A mere copy is
    not: should it be gone on with, its source can be hashed then.

    Args:
        folder: The unfinished folder.
        key: Says what is being made. A journal with another one is another conversion's.
    """

    def __init__(self, folder: Path, key: str):
        self.path = folder / JOURNAL_FILE
        self.finished = read_journal(folder, key)
        self.reused: list[str] = []
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hash")
        self._pending: list[Future] = []
        if not self.finished:
            self.path.write_text(json.dumps({"key": key}) + "\n", encoding="utf-8")

    def has(self, path: Path, copy_of: Path | None = None) -> bool:
        """Whether an earlier run finished a file, and it is still what it was: by its hash, or by that of what it is a copy of."""
        if path.name not in self.finished or not path.is_file():
            return False
        if copy_of is not None and path.stat().st_size != copy_of.stat().st_size:
            return False
        known = self.finished[path.name] if copy_of is None else hash_file(copy_of)
        if hash_file(path) != known:
            return False
        self.reused.append(path.name)
        return True

    def add(self, path: Path, is_copy: bool = False) -> None:
        """Take down a file that was just finished."""
        if is_copy:
            self._take_down(path, None)
        else:
            self._pending.append(self._executor.submit(lambda: self._take_down(path, hash_file(path))))

    def _take_down(self, path: Path, digest: str | None) -> None:
        self.finished[path.name] = digest
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"file": path.name, "sha256": digest}) + "\n")

    def close(self, wait: bool = True) -> dict[str, str]:
        """
        Wait for the hashes.

        Returns:
            `dict[str, str]`: name and hash of each finished file that was hashed.
        """
        self._executor.shutdown(wait=wait, cancel_futures=not wait)
        if wait:
            for future in self._pending:
                future.result()
        return {name: digest for name, digest in self.finished.items() if digest is not None}


class NoJournal:
    """Stands in for a journal where files will be changed after they were written."""

    reused = ()

    def has(self, path: Path, copy_of: Path | None = None) -> bool:
        return False

    def add(self, path: Path, is_copy: bool = False) -> None:
        pass

    def close(self, wait: bool = True) -> dict[str, str]:
        return {}


def read_journal(folder: Path, key: str) -> dict[str, str | None]:
    """The finished files of an unfinished conversion with this key, with the hashes it has; none if there is no such."""
    try:
        lines = (folder / JOURNAL_FILE).read_text(encoding="utf-8").splitlines()
        if json.loads(lines[0])["key"] != key:
            return {}
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        return {}
    finished = {}
    for line in lines[1:]:
        try:
            entry = json.loads(line)
            finished[entry["file"]] = entry["sha256"]
        except (ValueError, KeyError, TypeError):
            break  # the last line of a run that was killed while it wrote it
    return finished
