"""What a push would change: which files a repository has already, which are new, and how many bytes travel."""

from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.sha import git_hash
from tqdm import tqdm

from ..conversion.places import BUNDLED_FILES, CERTIFICATE_FILE, EXPORT_REPORT_FILE
from ..conversion.plan import format_bytes
from .card import INSPECTION_FOLDER
from .folder import UploadFolder
from .retries import retried, without_secrets
from .source import ADAPTER_CONFIG_FILE, sha256_of


# What an earlier upload may have left and this one does not have: a loader would take it, or it would say what is not so.
REPLACED = (
    "model*.safetensors",
    "model*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model*.bin.index.json",
    "adapter_model.*",
    ADAPTER_CONFIG_FILE,
    "config.json",
    CERTIFICATE_FILE,
    EXPORT_REPORT_FILE,
    f"{INSPECTION_FOLDER}/*",
    *sorted(BUNDLED_FILES),
)


@dataclass(frozen=True)
class PushPlan:
    """
    What a push does.

    Attributes:
        upload: The files; their folder may be gone when this is looked at.
        repo_id: The repository.
        sizes: Of each file, in bytes.
        states: Of each file `"new"`, `"changed"` or `"there"`.
        removed: Files of the repository that go.
        parent: The commit that this was compared with; `None` where there is no repository yet.
        note: Why nothing was compared.
    """

    upload: UploadFolder
    repo_id: str
    sizes: dict[str, int]
    states: dict[str, str]
    removed: tuple[str, ...] = ()
    parent: str | None = None
    note: str | None = None

    @property
    def sent(self) -> list[str]:
        """The files that travel."""
        return [name for name, state in self.states.items() if state != "there"]

    @property
    def bytes_to_send(self) -> int:
        return sum(self.sizes[name] for name in self.sent)

    @property
    def changes_nothing(self) -> bool:
        return not self.sent and not self.removed

    def describe(self) -> str:
        """The plan as text."""
        sizes = self.sizes
        lines = [f"{self.repo_id}: {len(sizes)} files, {format_bytes(sum(sizes.values()))}"]
        lines += [f"{format_bytes(sizes[name]):>10}  {state:7}  {name}" for name, state in self.states.items()]
        lines += [f"{'':>10}  removed  {name}" for name in self.removed]
        if self.note:
            lines.append(f"note     {self.note}")
        there = len(sizes) - len(self.sent)
        lines.append(
            f"send     {len(self.sent)} files, {format_bytes(self.bytes_to_send)} ({self.bytes_to_send:,} bytes); {there} are there already"
        )
        if self.upload.left_out:
            lines.append(f"left out: {', '.join(self.upload.left_out)}")
        return "\n".join(lines)


def plan_push(upload: UploadFolder, repo_id: str, revision: str | None = None, must_reach: bool = True) -> PushPlan:
    """
    Compare an upload with what a repository has, by the hashes that the Hub lists: SHA-256 of large files, and git's id of others.

    Args:
        upload: The files.
        repo_id: The repository; it need not exist.
        revision: The branch; one that does not exist would begin at main.
        must_reach: Whether it is an error that the Hub cannot be asked.

    Raises:
        `HTTPError` or `OSError`: it cannot be asked.
    """
    api = HfApi()
    files = upload.files()
    sizes = {name: path.stat().st_size for name, path in files.items()}
    try:
        parent, listed = retried(lambda: _listed(api, repo_id, revision))
    except RepositoryNotFoundError as error:
        # A token that is not valid looks the same, but for the status.
        if must_reach and error.response is not None and error.response.status_code == 401:
            raise
        note = "there is no such repository yet, or the token may not see it"
        return PushPlan(upload, repo_id, sizes, dict.fromkeys(files, "new"), note=note)
    except (HTTPError, OSError) as error:
        if must_reach:
            raise
        note = f"the repository could not be looked at, so every file counts as new ({without_secrets(error)})"
        return PushPlan(upload, repo_id, sizes, dict.fromkeys(files, "new"), note=note)
    states = {}
    compared = [name for name in files if name in listed and listed[name].size == sizes[name]]
    with tqdm(
        total=sum(sizes[name] for name in compared),
        unit="B",
        unit_scale=True,
        desc="Hashing",
        disable=None,
    ) as bar:
        for name, path in files.items():
            states[name] = "changed" if name in listed else "new"
            if name in compared:
                states[name] = "there" if is_same(path, listed[name]) else "changed"
                bar.update(sizes[name])
    gone = (name for name in listed if name not in files and any(fnmatch(name, pattern) for pattern in REPLACED))
    return PushPlan(upload, repo_id, sizes, states, tuple(sorted(gone)), parent)


def _listed(api: HfApi, repo_id: str, revision: str | None) -> tuple[str, dict[str, RepoFile]]:
    """The head of a branch, and its files."""
    try:
        head = api.model_info(repo_id, revision=revision).sha
    except RevisionNotFoundError:
        head = api.model_info(repo_id).sha
    return head, repository_files(api, repo_id, head)


def repository_files(api: HfApi, repo_id: str, revision: str) -> dict[str, RepoFile]:
    """The files of a revision by path."""
    entries = api.list_repo_tree(repo_id, recursive=True, revision=revision)
    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


def is_same(path: Path, listed: RepoFile) -> bool:
    """Whether a file has the content of one in a repository."""
    if path.stat().st_size != listed.size:
        return False
    if listed.lfs is not None:
        return sha256_of(path) == listed.lfs.sha256
    return git_hash(path.read_bytes()) == listed.blob_id
