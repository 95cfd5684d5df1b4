"""A push sends what is new, in one commit that is whole or not there; the Hub is one on this machine, and it can fail."""

import shutil
from http import HTTPStatus

import huggingface_hub.constants
import pytest
from conftest import edit_tensors, tiny_gated, tiny_tokenizer
from loopback_hub import Fault, HubError

from gated_attention import UploadError
from gated_attention.hub.plan import plan_push
from gated_attention.hub.push import prepare_upload, send
from gated_attention.hub.retries import without_secrets
from gated_attention.hub.source import read_model_folder


REPO = "someone/tiny-gated"
LFS = "/lfs-objects/"
COMMIT = "/commit/"


@pytest.fixture
def gated(tmp_path):
    """A gated model in several files, which differ from each other."""
    folder = tmp_path / "gated"
    tiny_gated(tie_word_embeddings=True).save_pretrained(folder, max_shard_size="20KB")
    tiny_tokenizer().save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Tiny\n")
    return folder


@pytest.fixture
def prepare(tmp_path):
    """Lay a folder out, without the check in another process."""
    count = iter(range(100))

    def prepare(folder):
        laid_out = tmp_path / f"upload-{next(count)}"
        laid_out.mkdir()
        return prepare_upload(read_model_folder(folder), laid_out, REPO)

    return prepare


def push(upload, **options):
    return send(plan_push(upload, REPO, options.get("revision")), **options)


def content(upload) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in upload.files().items()}


def on_hub(hub, revision="main") -> dict[str, bytes]:
    files = hub.files(REPO, revision)
    return {name: data for name, data in files.items() if name != ".gitattributes"}


def test_first_push_sends_everything_and_the_second_nothing(gated, prepare, hub_here):
    upload = prepare(gated)
    plan = plan_push(upload, REPO)
    assert set(plan.states.values()) == {"new"}
    assert plan.bytes_to_send == sum(map(len, content(upload).values()))
    sha, url = send(plan)
    assert on_hub(hub_here) == content(upload)
    assert hub_here.received_bytes == plan.bytes_to_send
    assert url.endswith(f"{REPO}/commit/{sha}")

    again = plan_push(prepare(gated), REPO)
    assert again.changes_nothing and again.bytes_to_send == 0
    assert send(again)[0] == sha
    assert len(hub_here.commits(REPO)) == 2 and hub_here.received_bytes == plan.bytes_to_send


def test_push_after_training_sends_what_changed(gated, prepare, hub_here):
    push(prepare(gated))
    before = hub_here.received_bytes
    trained = next(path for path in sorted(gated.glob("*.safetensors")))
    edit_tensors(trained, lambda tensors: [tensor.mul_(2) for tensor in tensors.values()])
    plan = plan_push(prepare(gated), REPO)
    assert plan.sent == [trained.name]
    assert f"{trained.stat().st_size:,} bytes" in plan.describe()
    send(plan)
    assert hub_here.received_bytes - before == plan.bytes_to_send == trained.stat().st_size
    assert on_hub(hub_here)[trained.name] == trained.read_bytes()


@pytest.mark.parametrize(("first", "second"), [("5GB", "20KB"), ("20KB", "5GB")], ids=["then_sharded", "then_single"])
def test_what_an_earlier_upload_left_is_removed_in_the_same_commit(prepare, hub_here, tmp_path, first, second):
    for seed, size in ((1, first), (2, second)):
        folder = tmp_path / f"model-{seed}"
        tiny_gated(seed).save_pretrained(folder, max_shard_size=size)
        (folder / "README.md").write_text("---\nlicense: mit\n---\n")
        if seed == 1:
            (folder / "LICENSE").write_text("some licence\n")
        push(prepare(folder))
    weights = {path.name for path in folder.iterdir() if "safetensors" in path.name}
    assert {name for name in on_hub(hub_here) if "safetensors" in name} == weights
    assert "LICENSE" in on_hub(hub_here)  # what no loader takes stays
    assert len(hub_here.commits(REPO)) == 3


def test_private_push_to_a_public_repository_is_refused(gated, prepare, hub_here):
    push(prepare(gated))
    (gated / "LICENSE").write_text("some licence\n")
    with pytest.raises(UploadError, match="is public"):
        push(prepare(gated), private=True)
    assert "LICENSE" not in on_hub(hub_here)
    hub_here.make_private(REPO)
    push(prepare(gated), private=True)
    assert "LICENSE" in on_hub(hub_here)


def test_branch_is_made_and_main_stays(gated, prepare, hub_here):
    upload = prepare(gated)
    sha, _ = push(upload, revision="trained")
    assert on_hub(hub_here, "trained") == on_hub(hub_here, sha) == content(upload)
    assert on_hub(hub_here) == {}


def test_pull_request_leaves_main_alone(gated, prepare, hub_here):
    push(prepare(gated))
    main = on_hub(hub_here)
    (gated / "LICENSE").write_text("some licence\n")
    upload = prepare(gated)
    _, url = push(upload, create_pr=True)
    assert url.endswith("/discussions/1")
    assert on_hub(hub_here) == main
    assert on_hub(hub_here, "refs/pr/1") == content(upload)

    (gated / "LICENSE").write_text("another licence\n")
    push(prepare(gated), revision="refs/pr/1")
    assert on_hub(hub_here) == main
    assert on_hub(hub_here, "refs/pr/1")["LICENSE"] == b"another licence\n"


def test_pull_request_to_nowhere_makes_nothing(gated, prepare, hub_here):
    with pytest.raises(UploadError, match="no such repository"):
        push(prepare(gated), create_pr=True)
    assert hub_here.repositories() == set()


# What goes wrong once or for a while, and is got over.
PASSING = {
    "rate_limit_on_commit": Fault("POST", COMMIT, HTTPStatus.TOO_MANY_REQUESTS, headers={"Retry-After": "7"}),
    "rate_limit_on_weights": Fault("PUT", LFS, HTTPStatus.TOO_MANY_REQUESTS, headers={"Retry-After": "7"}),
    "rate_limit_on_create": Fault(
        "POST", "/api/repos/create", HTTPStatus.TOO_MANY_REQUESTS, headers={"Retry-After": "7"}
    ),
    "server_error_on_commit": Fault("POST", COMMIT, HTTPStatus.INTERNAL_SERVER_ERROR),
    "server_error_on_weights": Fault("PUT", LFS, HTTPStatus.INTERNAL_SERVER_ERROR, times=2),
    "server_error_on_listing": Fault("GET", "/tree/", HTTPStatus.INTERNAL_SERVER_ERROR),
    "conflict_on_commit": Fault("POST", COMMIT, HTTPStatus.CONFLICT),
    "dropped_in_weights": Fault("PUT", LFS, after=1),
    "dropped_in_commit": Fault("POST", COMMIT),
    "answer_to_commit_lost": Fault("POST", COMMIT, done=True),
    "commit_done_but_server_error": Fault("POST", COMMIT, HTTPStatus.INTERNAL_SERVER_ERROR, done=True),
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_passing_fault_is_got_over(gated, prepare, hub_here, fault):
    upload = prepare(gated)
    hub_here.faults.append(fault)
    sha, _ = push(upload)
    assert fault.times == 0
    assert on_hub(hub_here, sha) == on_hub(hub_here) == content(upload)
    assert len(hub_here.commits(REPO)) == 2  # the repository's own, and one
    if fault.headers:
        assert max(hub_here.naps) >= 7


# What stays wrong: words of the message.
LASTING = {
    "no_valid_token": (Fault("POST", "/api/models", HTTPStatus.UNAUTHORIZED, times=99), "hf auth login"),
    "token_expires": (Fault("POST", COMMIT, HTTPStatus.UNAUTHORIZED, times=99), "hf auth login"),
    "may_not_write": (Fault("POST", "/preupload/", HTTPStatus.FORBIDDEN, times=99), "can write to this repository"),
    "address_expired": (Fault("PUT", LFS, HTTPStatus.FORBIDDEN, times=99, after=1), "403"),
    "always_a_conflict": (Fault("POST", COMMIT, HTTPStatus.CONFLICT, times=99), "another change"),
    "always_too_many": (Fault("POST", COMMIT, HTTPStatus.TOO_MANY_REQUESTS, times=99), "too many requests"),
    "server_down_for_weights": (
        Fault("PUT", LFS, HTTPStatus.INTERNAL_SERVER_ERROR, times=99, after=1),
        "has a problem",
    ),
    "server_down_for_commit": (Fault("POST", COMMIT, HTTPStatus.INTERNAL_SERVER_ERROR, times=99), "has a problem"),
    "always_dropped_in_weights": (Fault("PUT", LFS, times=99, after=1), "could not be reached"),
}


@pytest.mark.parametrize("branch", [None, "trained"], ids=["main", "branch"])
@pytest.mark.parametrize(("fault", "words"), LASTING.values(), ids=LASTING)
def test_lasting_fault_leaves_the_revision_as_it_was_and_the_next_push_goes_on(
    gated, prepare, hub_here, fault, words, branch
):
    push(prepare(gated), revision=branch)
    before = on_hub(hub_here, branch or "main")
    for number, path in enumerate(sorted(gated.glob("*.safetensors")), 2):
        edit_tensors(path, lambda tensors, number=number: [tensor.mul_(number) for tensor in tensors.values()])
    received = hub_here.received_bytes
    fault = Fault(**vars(fault))  # a parameter is shared by its cases
    hub_here.faults.append(fault)
    upload = prepare(gated)
    with pytest.raises(UploadError, match=words) as caught:
        push(upload, revision=branch)
    assert "hf_dummy" not in str(caught.value) and "\n" not in str(caught.value)
    assert on_hub(hub_here, branch or "main") == before
    hub_here.faults.clear()

    plan = plan_push(upload, REPO, branch)
    send(plan, revision=branch)
    assert on_hub(hub_here, branch or "main") == content(upload)
    # What had arrived before the fault did not travel again.
    assert hub_here.received_bytes - received == plan.bytes_to_send


def test_push_of_a_new_repository_that_fails_shows_no_file(gated, prepare, hub_here):
    hub_here.faults.append(Fault("PUT", LFS, HTTPStatus.FORBIDDEN, times=99, after=2))
    with pytest.raises(UploadError):
        push(prepare(gated))
    assert on_hub(hub_here) == {}


def test_pull_request_is_not_opened_twice(gated, prepare, hub_here):
    push(prepare(gated))
    (gated / "LICENSE").write_text("some licence\n")
    hub_here.faults.append(Fault("POST", COMMIT, done=True))
    with pytest.raises(UploadError, match="could not be reached"):
        push(prepare(gated), create_pr=True)
    with pytest.raises(HubError):
        hub_here.files(REPO, "refs/pr/2")


def test_somebody_elses_commit_is_not_overwritten(gated, prepare, hub_here, tmp_path):
    push(prepare(gated))
    (gated / "LICENSE").write_text("mine\n")
    plan = plan_push(prepare(gated), REPO)
    theirs = shutil.copytree(gated, tmp_path / "theirs")
    (theirs / "LICENSE").write_text("theirs\n")
    push(prepare(theirs))
    with pytest.raises(UploadError, match="changed meanwhile"):
        send(plan)
    assert on_hub(hub_here)["LICENSE"] == b"theirs\n"


def test_what_arrived_otherwise_is_found_when_it_is_read_back(gated, prepare, hub_here):
    plan = plan_push(prepare(gated), REPO)
    path = plan.upload.folder / "config.json"

    def edit_while_it_is_sent():
        path.write_text(path.read_text() + "\n")

    hub_here.on_commit = edit_while_it_is_sent
    with pytest.raises(UploadError, match=r"config\.json.* not what was sent"):
        send(plan)


def test_hub_that_cannot_be_reached_is_said(gated, prepare, hub_here, monkeypatch):
    plan = plan_push(prepare(gated), REPO)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UploadError, match="could not be reached"):
        send(plan)
    # A dry run says it, and goes on.
    assert "could not be looked at" in plan_push(plan.upload, REPO, must_reach=False).describe()


def test_signature_and_token_stay_out_of_errors(hub_here):
    text = without_secrets(OSError("403 for url https://store/part?X-Amz-Signature=abc123 with Bearer hf_dummy\nmore"))
    assert "abc123" not in text and "hf_dummy" not in text and "https://store/part?" in text
