"""A Hugging Face Hub on loopback, held in memory, to test pushing and pulling a model without a network.

It speaks the part of the Hub's HTTP interface that `huggingface_hub` and `transformers` use for model repositories:
create, commit (regular and LFS files), branches, pull requests (opening them), listing and download. Xet, tags,
datasets, Spaces, gated repositories, `.gitignore` and the checks on a model card's metadata are left out. It can be told
to fail: see `Fault`.

    with LoopbackHub() as hub:
        environment = {**os.environ, **hub.environment(), "HF_HOME": str(temporary_folder)}
        subprocess.run([sys.executable, "push.py"], env=environment, check=True)
        assert "config.json" in hub.files("somebody/some-model")

`huggingface_hub` reads its endpoint when it is imported, so the client is best a process of its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import socket
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlencode, urlsplit


USER = "loopback-user"
DEFAULT_BRANCH = "main"
LFS_SUFFIXES = (".bin", ".safetensors")
LARGEST_REGULAR_FILE = 10 * 1024 * 1024
# As on the Hub, every repository starts with one commit that holds this file.
GIT_ATTRIBUTES = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES).encode()


@dataclass(frozen=True)
class StoredFile:
    """The content of one file at one commit, and whether git would hold it as an LFS pointer."""

    content: bytes
    is_lfs: bool = False

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def pointer(self) -> bytes:
        """What git itself stores for an LFS file."""
        oid, size = self.sha256, len(self.content)
        return f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {size}\n".encode()

    @cached_property
    def blob_id(self) -> str:
        """The git object id: of the content, or of the pointer for an LFS file."""
        blob = self.pointer if self.is_lfs else self.content
        return hashlib.sha1(b"blob %d\0" % len(blob) + blob).hexdigest()

    @property
    def etag(self) -> str:
        """What the client names its cached copy by, and compares with its local file before it commits."""
        return self.sha256 if self.is_lfs else self.blob_id

    def lfs_entry(self, digest_key: str) -> dict[str, Any]:
        """The `lfs` field of a listing; listings differ in what they call the digest."""
        if not self.is_lfs:
            return {}
        return {"lfs": {digest_key: self.sha256, "size": len(self.content), "pointerSize": len(self.pointer)}}


@dataclass(frozen=True)
class Commit:
    """A full snapshot of a repository, linked to the commit before it."""

    sha: str
    parent: str | None
    files: dict[str, StoredFile]


@dataclass
class Repository:
    """A model repository: its commits by sha, and the head of each branch."""

    repo_id: str
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def resolve(self, revision: str) -> Commit:
        """Return the commit that a branch name or a full sha stands for."""
        commit = self.commits.get(self.branches.get(revision, revision))
        if commit is None:
            raise HubError(HTTPStatus.NOT_FOUND, f"Invalid rev id: {revision}", code="RevisionNotFound")
        return commit

    def add_commit(self, branch: str, files: dict[str, StoredFile]) -> Commit:
        """Move a branch to a new commit that holds exactly these files."""
        parent = self.branches.get(branch)
        # Counting the commits keeps apart two that hold the same files.
        identity = [self.repo_id, len(self.commits), parent, {path: file.etag for path, file in files.items()}]
        commit = Commit(hashlib.sha1(json.dumps(identity).encode()).hexdigest(), parent, files)
        self.commits[commit.sha] = commit
        self.branches[branch] = commit.sha
        return commit


@dataclass(frozen=True)
class Request:
    """One HTTP request, taken apart: `fields` are the parts of the path that its route names."""

    path: str
    fields: dict[str, str]
    query: dict[str, str]
    headers: dict[str, str]  # with lower-case names
    body: bytes

    @property
    def has_token(self) -> bool:
        """Whether the client sent any token at all: every token is good here."""
        return self.headers.get("authorization", "").startswith("Bearer ")

    def json(self) -> Any:
        return json.loads(self.body or b"{}")

    def asks_for(self, name: str) -> bool:
        """Whether a boolean query parameter is on."""
        return self.query.get(name, "").lower() in ("1", "true")


@dataclass(frozen=True)
class Response:
    """One HTTP response; `Content-Length` is added when it is sent."""

    status: HTTPStatus = HTTPStatus.OK
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def json_response(value: Any, status: HTTPStatus = HTTPStatus.OK, headers: dict[str, str] | None = None) -> Response:
    return Response(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})


class HubError(Exception):
    """An answer other than success. The client picks the exception to raise by `code`, rather than by the status."""

    def __init__(self, status: HTTPStatus, message: str, code: str = "", **headers: str):
        super().__init__(message)
        if code:
            headers["X-Error-Code"] = code
        self.response = json_response({"error": message}, status, headers)


@dataclass
class Fault:
    """
    The next requests that go wrong.

    Attributes:
        method: Their HTTP method.
        path: A regular expression that is found in their path.
        status: What is answered; the connection is dropped where it is `None`.
        times: How many go wrong.
        headers: Of the answer.
        done: Whether the request is carried out all the same, so that only its answer is lost. A dropped request that is not is
            dropped in the middle of its body.
        after: How many such requests go well before.
    """

    method: str
    path: str
    status: HTTPStatus | None = None
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    done: bool = False
    after: int = 0

    def strikes(self, method: str, path: str) -> bool:
        """Whether a request goes wrong; counts it."""
        if method != self.method or self.times == 0 or not re.search(self.path, path):
            return False
        if self.after:
            self.after -= 1
            return False
        self.times -= 1
        return True


Handler = Callable[["LoopbackHub", Request], Response]
ROUTES: list[tuple[str, re.Pattern[str], Handler]] = []
# A repository is two segments, owner and name; a revision is one, with its own slashes quoted.
REPOSITORY = "(?P<repo_id>[^/]+/[^/]+)"
REVISION = "(?P<revision>[^/]+)"
MODEL = f"/api/models/{REPOSITORY}"


def route(method: str, path: str) -> Callable[[Handler], Handler]:
    """Let a method of `LoopbackHub` answer the requests whose path matches this pattern."""

    def register(handler: Handler) -> Handler:
        ROUTES.append((method, re.compile(path), handler))
        return handler

    return register


class LoopbackHub:
    """A Hub of model repositories at `url`, alive within a `with` block.

    `received_bytes` counts the file content that clients have sent, as LFS uploads or inside commits: a push that
    sends only what is new adds only that. `requests` holds "METHOD /path" of every request, oldest first. What is put into
    `faults` goes wrong, and `on_commit` is called before a commit is answered.
    """

    url: str

    def __init__(self, tree_page_size: int = 1000):
        self.received_bytes = 0
        self.requests: list[str] = []
        self.faults: list[Fault] = []
        self.on_commit: Callable[[], None] = lambda: None
        self._tree_page_size = tree_page_size
        self._repositories: dict[str, Repository] = {}
        self._lfs_objects: dict[str, bytes] = {}
        self._lock = threading.RLock()

    def __enter__(self) -> Self:
        self._server = _Server(self)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        # The interval is how long leaving the block can take.
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def environment(self) -> dict[str, str]:
        """Return the variables that point a client process here. `HF_HOME` is the caller's to set."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": "hf_dummy",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            # What the test run itself may have set must not send the client elsewhere, or nowhere.
            "HF_HUB_OFFLINE": "0",
            "TRANSFORMERS_OFFLINE": "0",
            "HUGGINGFACE_CO_STAGING": "0",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def client_environment(self, home: Path) -> dict[str, str]:
        """Environment of a process whose Hub is this one, with a cache and settings of its own in `home`."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
        return {**kept, **self.environment(), "HF_HOME": str(home)}

    def fault_for(self, method: str, target: str) -> Fault | None:
        """The fault that strikes a request, if one does."""
        with self._lock:
            return next((fault for fault in self.faults if fault.strikes(method, urlsplit(target).path)), None)

    def repositories(self) -> set[str]:
        """Return the ids of all repositories."""
        with self._lock:
            return set(self._repositories)

    def make_private(self, repo_id: str) -> None:
        """Hide a repository from clients without a token."""
        with self._lock:
            self._repositories[repo_id].private = True

    def edit(self, repo_id: str, files: dict[str, bytes | None]) -> None:
        """Commit other files to main, or none where the content is `None`."""
        with self._lock:
            repository = self._repositories[repo_id]
            head = repository.resolve(DEFAULT_BRANCH).files
            new = {path: StoredFile(content) for path, content in files.items() if content is not None}
            repository.add_commit(
                DEFAULT_BRANCH, {p: f for p, f in {**head, **new}.items() if p not in files or p in new}
            )

    def files(self, repo_id: str, revision: str = DEFAULT_BRANCH) -> dict[str, bytes]:
        """Return the content of a revision by path, `.gitattributes` included."""
        with self._lock:
            commit = self._repositories[repo_id].resolve(revision)
            return {path: file.content for path, file in sorted(commit.files.items())}

    def commits(self, repo_id: str) -> list[str]:
        """Return the shas of main, newest last; the first is the commit that came with the repository."""
        with self._lock:
            repository = self._repositories[repo_id]
            shas = [repository.branches[DEFAULT_BRANCH]]
            while (parent := repository.commits[shas[-1]].parent) is not None:
                shas.append(parent)
            return shas[::-1]

    def answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Response:
        """Answer one request; requests are answered one at a time."""
        parts = urlsplit(target)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        with self._lock:
            self.requests.append(f"{method} {parts.path}")
            try:
                for route_method, pattern, handler in ROUTES:
                    match = pattern.fullmatch(parts.path)
                    if match and route_method == ("GET" if method == "HEAD" else method):
                        fields = {name: unquote(value) for name, value in match.groupdict().items() if value}
                        return handler(self, Request(parts.path, fields, query, headers, body))
                raise HubError(HTTPStatus.NOT_FOUND, f"The loopback hub has no {method} {parts.path}")
            except HubError as error:
                return error.response
            except Exception:
                traceback.print_exc()
                # Not 500: the client would retry that for half a minute before the test sees it fail.
                return json_response({"error": "The loopback hub failed"}, HTTPStatus.NOT_IMPLEMENTED)

    def _readable(self, request: Request) -> Repository:
        """Return the repository that a request names, if the client may see it."""
        repository = self._repositories.get(request.fields["repo_id"])
        if repository is None or (repository.private and not request.has_token):
            status = HTTPStatus.NOT_FOUND if request.has_token else HTTPStatus.UNAUTHORIZED
            raise HubError(status, "Repository not found", code="RepoNotFound")
        return repository

    def _writable(self, request: Request) -> Repository:
        """Return the repository that a request names, if the client may change it."""
        repository = self._readable(request)
        if not request.has_token:
            raise HubError(HTTPStatus.UNAUTHORIZED, "Invalid username or password.")
        return repository

    # Repositories and revisions

    @route("POST", "/api/repos/create")
    def _create_repository(self, request: Request) -> Response:
        options = request.json()
        if not request.has_token:
            raise HubError(HTTPStatus.UNAUTHORIZED, "Invalid username or password.")
        if options.get("type") not in (None, "model"):
            raise HubError(HTTPStatus.BAD_REQUEST, "The loopback hub has model repositories only")
        repo_id = f"{options.get('organization') or USER}/{options['name']}"
        url = f"{self.url}/{repo_id}"
        if repo_id in self._repositories:
            # With exist_ok, the client reads the url from this answer.
            return json_response({"error": "You already created this model repo", "url": url}, HTTPStatus.CONFLICT)
        repository = Repository(repo_id, private=options.get("visibility") == "private")
        repository.add_commit(DEFAULT_BRANCH, {".gitattributes": StoredFile(GIT_ATTRIBUTES)})
        self._repositories[repo_id] = repository
        return json_response({"url": url, "name": repo_id})

    @route("POST", rf"{MODEL}/branch/{REVISION}")
    def _create_branch(self, request: Request) -> Response:
        repository, branch = self._writable(request), request.fields["revision"]
        if branch in repository.branches:
            raise HubError(HTTPStatus.CONFLICT, f"Reference already exists: {branch}")
        start = repository.resolve(request.json().get("startingPoint", DEFAULT_BRANCH))
        repository.branches[branch] = start.sha
        return json_response({})

    # Push

    @route("POST", "/api/validate-yaml")
    def _validate_model_card(self, request: Request) -> Response:
        return json_response({"errors": [], "warnings": []})

    @route("POST", rf"{MODEL}/preupload/{REVISION}")
    def _preupload(self, request: Request) -> Response:
        """Say how each file is to be sent, and what is there now, so that the client leaves out what is the same."""
        present = self._writable(request).resolve(request.fields["revision"]).files
        answers = []
        for file in request.json()["files"]:
            path, size = file["path"], file["size"]
            # The client sends an empty file as a regular one whatever the answer.
            is_lfs = size > 0 and (path.endswith(LFS_SUFFIXES) or size > LARGEST_REGULAR_FILE)
            answer = {"path": path, "uploadMode": "lfs" if is_lfs else "regular", "shouldIgnore": False}
            if path in present:
                answer["oid"] = present[path].etag
            answers.append(answer)
        return json_response({"files": answers})

    @route("POST", rf"/{REPOSITORY}\.git/info/lfs/objects/batch")
    def _lfs_batch(self, request: Request) -> Response:
        """Say where to upload each LFS object that is not here yet."""
        self._writable(request)
        objects = []
        for wanted in request.json()["objects"]:
            answer = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self._lfs_objects:
                answer["actions"] = {"upload": {"href": f"{self.url}/lfs-objects/{wanted['oid']}", "header": {}}}
            objects.append(answer)
        return json_response({"transfer": "basic", "objects": objects})

    @route("PUT", "/lfs-objects/(?P<oid>[0-9a-f]{64})")
    def _upload_lfs_object(self, request: Request) -> Response:
        # No token here: the Hub signs these urls, and the client sends no header with them.
        self.received_bytes += len(request.body)
        if hashlib.sha256(request.body).hexdigest() != request.fields["oid"]:
            raise HubError(HTTPStatus.BAD_REQUEST, "The content does not have the sha256 that was announced")
        self._lfs_objects[request.fields["oid"]] = request.body
        return Response()

    @route("POST", rf"{MODEL}/commit/{REVISION}")
    def _commit(self, request: Request) -> Response:
        """Apply a commit: one JSON value a line, a header and then the operations, all or nothing.

        A commit that changes nothing is made all the same, as on the Hub: it is the client that avoids it.
        """
        repository, branch = self._writable(request), request.fields["revision"]
        head = repository.resolve(branch)
        if branch not in repository.branches:
            raise HubError(HTTPStatus.BAD_REQUEST, f"Not a branch: {branch}")
        files = dict(head.files)
        for line in request.body.splitlines():
            operation = json.loads(line)
            key, value = operation["key"], operation["value"]
            if key == "header":
                if value.get("parentCommit", head.sha) != head.sha:
                    raise HubError(HTTPStatus.PRECONDITION_FAILED, "A commit has happened since. Please try again.")
            elif key == "file":
                content = base64.b64decode(value["content"])
                self.received_bytes += len(content)
                files[value["path"]] = StoredFile(content)
            elif key == "lfsFile":
                if value["oid"] not in self._lfs_objects:
                    raise HubError(HTTPStatus.BAD_REQUEST, f"LFS object was not uploaded: {value['path']}")
                files[value["path"]] = StoredFile(self._lfs_objects[value["oid"]], is_lfs=True)
            elif key in ("deletedFile", "deletedFolder"):
                folder = value["path"].rstrip("/") + "/"
                gone = [path for path in files if path == value["path"] or path.startswith(folder)]
                if not gone:
                    message = f"A file with this name doesn't exist: {value['path']}"
                    raise HubError(HTTPStatus.NOT_FOUND, message, code="EntryNotFound")
                for path in gone:
                    del files[path]
            else:
                raise HubError(HTTPStatus.BAD_REQUEST, f"The loopback hub has no operation {key}")
        answer = {"success": True, "hookOutput": ""}
        if request.asks_for("create_pr"):
            number = 1 + sum(name.startswith("refs/pr/") for name in repository.branches)
            branch = f"refs/pr/{number}"
            repository.branches[branch] = head.sha
            answer["pullRequestUrl"] = f"{self.url}/{repository.repo_id}/discussions/{number}"
        commit = repository.add_commit(branch, files)
        url = f"{self.url}/{repository.repo_id}/commit/{commit.sha}"
        self.on_commit()
        return json_response({**answer, "commitOid": commit.sha, "commitUrl": url})

    # Pull

    @route("GET", rf"{MODEL}(?:/revision/{REVISION})?")
    def _model_info(self, request: Request) -> Response:
        repository = self._readable(request)
        commit = repository.resolve(request.fields.get("revision", DEFAULT_BRANCH))
        siblings = [
            {"rfilename": path, "size": len(file.content), "blobId": file.blob_id, **file.lfs_entry("sha256")}
            for path, file in sorted(commit.files.items())
        ]
        info = {"id": repository.repo_id, "sha": commit.sha, "private": repository.private, "siblings": siblings}
        return json_response(info)

    @route("GET", rf"{MODEL}/tree/{REVISION}(?:/(?P<folder>.+))?")
    def _tree(self, request: Request) -> Response:
        """List a folder, in pages that are linked by a header."""
        commit = self._readable(request).resolve(request.fields["revision"])
        folder = request.fields.get("folder", "")
        entries = tree_entries(commit, f"{folder}/" if folder else "", request.asks_for("recursive"))
        if folder and not entries:
            message = f"{folder} does not exist on {request.fields['revision']}"
            raise HubError(HTTPStatus.NOT_FOUND, message, code="EntryNotFound")
        start = int(request.query.get("cursor", 0))
        end = start + self._tree_page_size
        headers = {}
        if end < len(entries):
            query = urlencode({**request.query, "cursor": end})
            headers["Link"] = f'<{self.url}{request.path}?{query}>; rel="next"'
        return json_response(entries[start:end], headers=headers)

    @route("GET", rf"/{REPOSITORY}/resolve/{REVISION}/(?P<path>.+)")
    def _download(self, request: Request) -> Response:
        commit = self._readable(request).resolve(request.fields["revision"])
        headers = {"X-Repo-Commit": commit.sha}
        file = commit.files.get(request.fields["path"])
        if file is None:
            # With the commit the client can remember that this optional file is not there.
            raise HubError(HTTPStatus.NOT_FOUND, "Entry not found", code="EntryNotFound", **headers)
        headers |= {"ETag": f'"{file.etag}"', "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        size = len(file.content)
        if file.is_lfs:
            headers |= {"X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(size)}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
        if wanted is None:
            return Response(HTTPStatus.OK, file.content, headers)
        start = int(wanted[1])
        end = min(int(wanted[2]) + 1, size) if wanted[2] else size
        if start >= end:
            headers |= {"Content-Range": f"bytes */{size}"}
            raise HubError(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "Range not satisfiable", **headers)
        headers |= {"Content-Range": f"bytes {start}-{end - 1}/{size}"}
        return Response(HTTPStatus.PARTIAL_CONTENT, file.content[start:end], headers)


def tree_entries(commit: Commit, prefix: str, recursive: bool) -> list[dict[str, Any]]:
    """List the files and folders below a path prefix, which is empty or ends in a slash."""
    entries: dict[str, dict[str, Any]] = {}
    for path, file in sorted(commit.files.items()):
        if not path.startswith(prefix):
            continue
        names = path.removeprefix(prefix).split("/")
        for depth in range(1, len(names) if recursive else min(len(names), 2)):
            folder = prefix + "/".join(names[:depth])
            # Not git's id of the folder, which no test needs, but the same shape.
            oid = hashlib.sha1(f"{commit.sha}/{folder}".encode()).hexdigest()
            entries.setdefault(folder, {"type": "directory", "oid": oid, "size": 0, "path": folder})
        if recursive or len(names) == 1:
            size = len(file.content)
            entries[path] = {"type": "file", "oid": file.blob_id, "size": size, "path": path, **file.lfs_entry("oid")}
    return list(entries.values())


class _Server(ThreadingHTTPServer):
    request_queue_size = 64  # a client downloads a snapshot over several connections at once

    def __init__(self, hub: LoopbackHub):
        super().__init__(("127.0.0.1", 0), _RequestHandler)
        self.hub = hub


class _RequestHandler(BaseHTTPRequestHandler):
    """Reads requests off a connection, and writes what the hub answers."""

    server: _Server
    protocol_version = "HTTP/1.1"  # keeps connections open, as the client expects
    disable_nagle_algorithm = True  # or each answer, written as head and body, waits for the client's delayed ACK

    def _answer(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        # The client never sends in chunks: it knows the length of everything that it sends.
        length = int(headers.get("content-length", 0))
        fault = self.server.hub.fault_for(self.command, self.path)
        if fault is not None and fault.status is None and not fault.done:
            self.rfile.read(length // 2)
            return self._drop()
        body = self.rfile.read(length)
        if fault is None or fault.done:
            response = self.server.hub.answer(self.command, self.path, headers, body)
        if fault is not None and fault.status is None:
            return self._drop()
        if fault is not None:
            response = json_response({"error": "A fault was injected"}, fault.status, fault.headers)
        self.send_response(response.status)
        for name, value in response.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(response.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    def _drop(self) -> None:
        self.close_connection = True
        # Closing alone would wait for the client.
        self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _answer

    def log_message(self, *_arguments: object) -> None:
        """Keep requests out of the test output."""
