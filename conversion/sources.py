"""Where a source comes from: a folder, or a repository on the Hub, of which what a conversion needs is fetched."""

import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from .checkpoint import PICKLED_SINGLE_FILE
from .errors import ConversionError
from .places import OTHER_WEIGHTS, check_target


# `org/name`, or `org/name@revision`.
_HUB_ID = re.compile(r"^(?P<repo_id>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w./-]+))?$")

# Weights in other formats, or a second time, and other frameworks' folders. Of a repository without safetensors, pickled ones are.
_NOT_FETCHED = (*OTHER_WEIGHTS, "consolidated*", "*.onnx*", "onnx/*", "original/*")


def is_hub_id(name: str) -> bool:
    """Whether a name is a repository's, `org/name`, and not that of a file or folder here."""
    match = _HUB_ID.match(name)
    return match is not None and match["revision"] is None and not Path(name).exists()


@dataclass(frozen=True)
class Source:
    """
    Attributes:
        folder: Where its files are; never written to.
        repo_id: Its repository on the Hub, if it was given as one.
        revision: The commit that was fetched.
    """

    folder: Path
    repo_id: str | None = None
    revision: str | None = None


def find_source(source: str | Path, revision: str | None = None) -> Source:
    """
    A folder as it is; a Hub id `org/name`, or `org/name@revision`, fetched into the Hub's cache. A folder of that name counts first.

    Args:
        source: The folder or the id.
        revision: What to fetch where the id names none.

    Raises:
        `ConversionError`: there is no such folder, and no such repository or none that can be reached.
    """
    folder = Path(source)
    match = _HUB_ID.match(str(source))
    if folder.exists() or match is None:
        return Source(folder)
    repo_id, revision = match["repo_id"], match["revision"] or revision
    try:
        snapshot = Path(snapshot_download(repo_id, revision=revision, ignore_patterns=list(_NOT_FETCHED)))
        if not any(snapshot.glob("*.safetensors")):
            # The same commit: of a branch, another may have become the newest.
            snapshot_download(
                repo_id, revision=snapshot.name, allow_patterns=[PICKLED_SINGLE_FILE, "pytorch_model-*.bin"]
            )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConversionError(
            f"{source} is no folder here, and could not be fetched from the Hub ({type(error).__name__}: {error}); give a folder, or "
            "org/name or org/name@revision of a repository that you can read"
        ) from error
    return Source(snapshot, repo_id, snapshot.name)


def find_source_for(source: str | Path, target: Path, overwrite: bool) -> Source:
    """
    As [`find_source`], after a look at the target where something would have to be fetched first.

    Raises:
        `ConversionError`: the target is in the way, or there is no such source.
    """
    if not Path(source).exists():
        check_target(target, overwrite)
    return find_source(source)
