"""Pushes a folder: reads it, lays out and checks what would be sent, sends what is new in one commit, and reads it back."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id

from ..conversion import ConversionError, export_checkpoint
from ..conversion.places import TRAINING_RESULTS_FILE
from ..conversion.sources import is_hub_id
from .base_model import check_base_on_hub
from .card import CardSources, add_inspections, write_card
from .check import Check, check_in_clean_process
from .errors import UploadError
from .folder import UploadFolder, images_shown, lay_out, refuse_secrets
from .licences import card_on_hub, carried_licence, licence_fields, read_card
from .plan import PushPlan, is_same, plan_push, repository_files
from .retries import is_transient, retried, status_of, upload_error
from .source import ModelFolder, read_model_folder


COMMIT_MESSAGE = "Upload gated attention model"


@dataclass(frozen=True)
class PushResult:
    """
    What was done.

    Attributes:
        plan: What was to be sent.
        check: What was found equal before.
        revision: The commit that holds the files, once they were read back; `None` after a dry run.
        url: Its address, or that of the pull request.
    """

    plan: PushPlan
    check: Check
    revision: str | None = None
    url: str | None = None


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    native: str | None = None,
    widen_gates: bool = False,
    base_model: str | None = None,
    license: str | None = None,
    inspection: str | Path | None = None,
    include: Sequence[str] = (),
    dry_run: bool = False,
    echo: Callable[[str], None] = print,
) -> PushResult:
    """
    Upload a model so that anyone can load it: a gated one with its code, a stock one as it is, a PEFT adapter beside its base model.

    The exact files are laid out in a temporary folder, loaded in a process that cannot import this package, and compared with the
    model. Only files that the repository does not have travel, in one commit, which is read back and compared by its hashes. A push that
    was cut off is gone on with by the same call: the Hub keeps the large files that it got, and nobody sees them before the commit.

    Args:
        folder (`str` or `Path`): The model, or the adapter. Never written to.
        repo_id (`str`): The repository, as `user/name`; made if it does not exist.
        private (`bool`): Whether it is made private then.
        revision (`str`, *optional*): Branch, made from main if it does not exist; or `refs/pr/1` of an open pull request.
        create_pr (`bool`): Whether to propose the commit as a pull request; the repository must exist.
        native (`str`, *optional*): Export a gated model as this stock architecture first (`"qwen3_5"`, `"qwen3_next"`, `"lfm3"`).
        widen_gates (`bool`): For the export: whether headwise gates may become elementwise.
        base_model (`str`, *optional*): Hub id of what the model was made of. Default: what the certificate or the adapter says.
        license (`str`, *optional*): Licence of the card. Default: that of the folder's card, or of the base model's.
        inspection (`str` or `Path`, *optional*): Folder that `gated-attention inspect --out` wrote, for the card.
        include (`Sequence[str]`): Patterns of other files that go along.
        dry_run (`bool`): Prepare, check and plan, and send nothing.
        echo: Where the plan and what was done are said.

    Returns:
        [`PushResult`]

    Raises:
        [`UploadError`]: the folder cannot be loaded by others, the licence forbids it, a secret or a path of this machine would become
        public, or the Hub refuses or cannot be reached. The repository is then as it was.
    """
    folder = Path(folder)
    check_repo_id(repo_id)
    if not dry_run and get_token() is None:
        raise UploadError("no Hub token: run `hf auth login`, set HF_TOKEN, or look at the plan with --dry-run")
    if base_model is not None and not _is_repo_id(base_model):
        raise UploadError(f"base_model must be a Hub id such as org/name, got {base_model!r}")
    with tempfile.TemporaryDirectory(prefix="hub-upload-") as scratch:
        laid_out = Path(scratch) / "upload"
        laid_out.mkdir()
        original = read_model_folder(folder)
        model, exported = original, None
        if native is not None:
            model, exported = _export(original, Path(scratch) / "native", native, widen_gates)
        upload = prepare_upload(
            model,
            laid_out,
            repo_id,
            base_model=base_model,
            license=license,
            inspection=inspection,
            include=include,
            original=original,
            exported=exported,
        )
        check = check_in_clean_process(upload, original if native is not None else None)
        try:
            if model.kind == "adapter":
                base = _base_of(model, base_model)
                # A commit of one repository is none of another.
                base_revision = model.base_revision if base == model.base_name else None
                check_base_on_hub(model, base, base_revision, must_reach=not dry_run, echo=echo)
            plan = plan_push(upload, repo_id, revision, must_reach=not dry_run)
        except (HTTPError, OSError) as error:
            raise upload_error(error, f"looking at {repo_id}") from error
        echo(plan.describe())
        echo(check.describe(folder))
        if dry_run:
            echo("dry run: nothing was sent")
            return PushResult(plan, check)
        sha, url = send(plan, private=private, revision=revision, create_pr=create_pr)
        echo(f"uploaded: {url}" if not plan.changes_nothing else f"nothing to send: {url} is the same")
        echo(f"read back: {len(plan.states)} files of {sha} have the hashes of what was sent")
        return PushResult(plan, check, sha, url)


def check_repo_id(repo_id: str) -> None:
    """
    Raises:
        `UploadError`: not `user/name`; the card's lines to load the model need both.
    """
    if not _is_repo_id(repo_id):
        raise UploadError(f"the repository must be given as user/name, got {repo_id!r}")


def _is_repo_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1


def _export(original: ModelFolder, target: Path, native: str, widen_gates: bool) -> tuple[ModelFolder, str]:
    if original.kind != "gated":
        raise UploadError(
            f"native: only a gated model is exported, and {original.folder} holds a {original.kind} one; leave it out"
        )
    try:
        result = export_checkpoint(original.folder, target, native, widen_gates=widen_gates)
    except ConversionError as error:
        raise UploadError(str(error)) from error
    return read_model_folder(target), result.describe()


def _base_of(model: ModelFolder, base_model: str | None) -> str | None:
    """The Hub id of what a model was made of, if anybody says."""
    if base_model is not None:
        return base_model
    if model.base_name is not None:
        return model.base_name if is_hub_id(model.base_name) else None
    return model.certificate["source"]["id"] if model.certificate is not None else None


def prepare_upload(
    model: ModelFolder,
    folder: Path,
    repo_id: str,
    *,
    base_model: str | None = None,
    license: str | None = None,
    inspection: str | Path | None = None,
    include: Sequence[str] = (),
    original: ModelFolder | None = None,
    exported: str | None = None,
) -> UploadFolder:
    """
    Lay out everything that would be sent, the card included, and look through it for secrets.

    Args:
        model: What is uploaded.
        folder: An empty folder.
        repo_id: The repository.
        base_model, license, inspection, include: As for [`push_folder`].
        original: The gated model that it was exported from, which knows where it comes from.
        exported: What the export reported.

    Raises:
        `UploadError`: as for [`push_folder`].
    """
    original = model if original is None else original
    base_model = _base_of(original, base_model)
    previous = read_card(original.folder / "README.md")
    # An adapter's is the gated model that it was trained on, which its config names.
    if (
        base_model is None
        and original.kind != "adapter"
        and previous is not None
        and (original.folder / TRAINING_RESULTS_FILE).is_file()
    ):
        # The card of a training, which knows. One that was copied from a source names the source's base, not the source.
        named = previous.data.base_model
        base_model = named if isinstance(named, str) and is_hub_id(named) else None
    found = licence_fields(previous)
    if not found and original.base_folder is not None:
        found = licence_fields(read_card(original.base_folder / "README.md"))
    if not found and base_model is not None:
        found = licence_fields(card_on_hub(base_model))
    is_derived = base_model is not None or original.certificate is not None or original.kind == "adapter"
    licence = carried_licence(found, license, is_derived)
    shown = images_shown(previous.text, model.folder) if previous else []
    upload = lay_out(model, folder, base_model, shown, include)
    inspections, figures = (), ()
    if inspection is not None:
        inspections, figures = add_inspections(Path(inspection), upload, repo_id)
    write_card(
        upload,
        CardSources(repo_id, original, licence, base_model, previous, exported, inspections, figures),
    )
    refuse_secrets(upload)
    return upload


def send(
    plan: PushPlan, *, private: bool = False, revision: str | None = None, create_pr: bool = False
) -> tuple[str, str]:
    """
    Send what a plan says in one commit on top of the one that it was compared with, and read it back.

    Args:
        plan: What to send.
        private, revision, create_pr: As for [`push_folder`].

    Returns:
        `tuple[str, str]`: the commit, and its address (or the pull request's).

    Raises:
        `UploadError`: the Hub could not be reached, or refused; the repository has the files that it had. Or what was read back is
        something else.
    """
    api = HfApi()
    repo_id, what = plan.repo_id, f"the upload to {plan.repo_id}"
    try:
        parent = plan.parent
        if not create_pr:
            retried(lambda: api.create_repo(repo_id, private=private or None, exist_ok=True))
            if private and not retried(lambda: api.model_info(repo_id)).private:
                raise UploadError(
                    f"private: {repo_id} exists and is public, so nothing was sent; change that in its settings on the Hub, or leave --private out"
                )
            if revision and not revision.startswith("refs/"):  # as an open pull request's is
                retried(lambda: api.create_branch(repo_id, branch=revision, exist_ok=True))
        if parent is None:
            parent = retried(lambda: api.model_info(repo_id, revision=revision).sha)
        if plan.changes_nothing:
            sha, url = parent, f"{api.endpoint}/{repo_id}/commit/{parent}"
        else:
            sha, url = _commit(api, plan, parent, revision, create_pr)
        wrong = retried(lambda: _differences(api, plan, sha))
    except (HTTPError, OSError) as error:
        raise upload_error(error, what) from error
    except UploadError:
        raise
    except ValueError as error:  # the Hub's check of the card's metadata
        raise UploadError(f"{what} was refused: {error}") from error
    if wrong:
        raise UploadError(
            f"{what} went wrong: in commit {sha}, {', '.join(wrong[:5])} are not what was sent; run the same command again"
        )
    return sha, url


def _commit(api: HfApi, plan: PushPlan, parent: str, revision: str | None, create_pr: bool) -> tuple[str, str]:
    files = plan.upload.files()

    def commit():
        # Made anew for each try: operations remember how far they got.
        operations = [CommitOperationAdd(name, files[name]) for name in plan.sent]
        operations += [CommitOperationDelete(name) for name in plan.removed]
        try:
            info = api.create_commit(
                plan.repo_id,
                operations,
                commit_message=COMMIT_MESSAGE,
                revision=revision,
                create_pr=create_pr,
                parent_commit=parent,
            )
        except HfHubHTTPError as error:
            # Somebody else's commit; or ours, made by a try whose answer was lost.
            if status_of(error) == 412 and not create_pr:
                head = api.model_info(plan.repo_id, revision=revision).sha
                if not _differences(api, plan, head):
                    return head, f"{api.endpoint}/{plan.repo_id}/commit/{head}"
            raise
        except RuntimeError as error:
            # How the client says that a large file did not arrive. It has tried that again itself.
            if isinstance(error.__cause__, (HTTPError, OSError)):
                raise upload_error(error.__cause__, f"the upload to {plan.repo_id}") from error
            raise
        return info.oid, info.pr_url or info.commit_url

    # A second pull request would be a second one: only what the Hub did not begin is tried again.
    return retried(commit, (lambda error: status_of(error) == 429) if create_pr else is_transient)


def _differences(api: HfApi, plan: PushPlan, revision: str) -> list[str]:
    """The files of a revision that are not what was to be there."""
    found = repository_files(api, plan.repo_id, revision)
    wrong = [name for name, path in plan.upload.files().items() if name not in found or not is_same(path, found[name])]
    return wrong + [name for name in plan.removed if name in found]
