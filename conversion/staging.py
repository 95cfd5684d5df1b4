"""Folders and files that appear under their names only when they are complete."""

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from filelock import FileLock, Timeout

from .errors import ConversionError
from .journal import JOURNAL_FILE, read_journal


logger = logging.getLogger(__name__)


def partial_folder(target: Path) -> Path:
    """Where a target is made."""
    return target.parent / f".{target.name}.partial"


def replaced_folder(target: Path) -> Path:
    """Where the folder that a new target replaces lies for the moment between two renames."""
    return target.parent / f".{target.name}.replaced"


def check_parent(target: Path) -> None:
    """
    Refuse a target that lies in a file.

    Raises:
        `ConversionError`: it does.
    """
    parent = next(folder for folder in target.parents if folder.exists())
    if not parent.is_dir():
        raise ConversionError(f"the target {target} cannot be made: {parent} is a file")


@contextmanager
def exclusive(target: Path) -> Iterator[None]:
    """
    Hold the right to make `target`. A folder that a killed run had moved away is given back first.

    The lock lies beside the target, where whoever makes it looks, from another machine or with other temporary files too. It goes
    when it is given up, and folders that were made for it go if nothing came into them.

    Raises:
        `ConversionError`: another process is making the same target, or it lies in a file.
    """
    check_parent(target)
    made = [folder for folder in target.parents if not folder.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(target.parent / f".{target.name}.lock")
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ConversionError(
                f"another process is making {target} (it holds {lock.lock_file}); wait for it"
            ) from None
        try:
            if replaced_folder(target).exists() and not target.exists():
                logger.warning("giving back %s, which a killed run had moved away", target)
                replaced_folder(target).rename(target)
            yield
        finally:
            # While it is held: whoever opened the file meanwhile sees that it is gone, and makes a new one.
            with suppress(OSError):  # Windows keeps a file that is open
                Path(lock.lock_file).unlink()
            lock.release()
    finally:
        for folder in made:
            with suppress(OSError):  # it is the target's home now
                folder.rmdir()


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A text file to write, which gets its name when the block is done; what was there before stays until then."""
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        yield file
    unfinished.replace(path)


@contextmanager
def staged_folder(
    target: Path, key: str | None = None, before_placing: Callable[[], None] | None = None
) -> Iterator[Path]:
    """
    A hidden folder beside `target` that takes its place when the block ends well, and disappears when it does not. What was
    at `target` stays there until then.

    A run that was killed, interrupted or stopped by the machine (a full disk, a read error) leaves the hidden folder. The next
    one goes on with it if its journal has finished files of a conversion with the same `key`, and clears it if not.

    Args:
        target: Folder to make.
        key: Says what is being made.
        before_placing: Called before the folder takes its place, to look again at what is there.
    """
    staging = partial_folder(target)
    _clear(staging, read_journal(staging, key) if key else [])
    staging.mkdir(exist_ok=True)
    try:
        yield staging
        if before_placing is not None:
            before_placing()
        (staging / JOURNAL_FILE).unlink(missing_ok=True)
        _put_in_place(staging, target)
    except (KeyboardInterrupt, MemoryError, OSError):
        finished = read_journal(staging, key) if key else []
        if not finished:
            shutil.rmtree(staging, ignore_errors=True)
        else:
            logger.warning("%s holds %d finished files; the same command goes on from there", staging, len(finished))
        raise
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _clear(staging: Path, finished: list[str]) -> None:
    """Remove what an earlier run left, but for finished files and their journal."""
    if not finished:
        shutil.rmtree(staging, ignore_errors=True)
        return
    for path in staging.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in finished and path.name != JOURNAL_FILE:
            path.unlink()


def _put_in_place(staging: Path, target: Path) -> None:
    replaced = replaced_folder(target)
    shutil.rmtree(replaced, ignore_errors=True)  # of a run that was killed after its last rename
    if target.exists() and any(target.iterdir()):
        target.rename(replaced)
    try:
        if target.exists():
            target.rmdir()
        staging.rename(target)
    except BaseException:
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        raise
    shutil.rmtree(replaced, ignore_errors=True)
