"""Requests to the Hub: what is tried again, and what an error means."""

import re
import time
from collections.abc import Callable
from typing import TypeVar

from huggingface_hub import get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

from .errors import UploadError


T = TypeVar("T")

TRIES = 4
# A request that another one was in the way of, or that the Hub did not get to.
RETRIED_STATUSES = (409, 429, 500, 502, 503, 504)
_LONGEST_WAIT = 300.0

_ADVICE = {
    401: "the token is missing or not valid: run `hf auth login`, or set HF_TOKEN",
    403: "the token may not do that: use one that can write to this repository (https://huggingface.co/settings/tokens), or propose the "
    "change with --create-pr",
    404: "there is no such repository or revision, or the token may not see it",
    409: "another change of the repository is going on: try again",
    412: "the repository was changed meanwhile: run the same command again, which makes a new plan",
    413: "a file is too large for the Hub: save the model with a smaller `max_shard_size`",
    429: "too many requests: wait, and run the same command again",
}
_SERVER = "the Hub has a problem: run the same command again later"
_UNREACHED = "the Hub could not be reached: look at the connection (and HF_ENDPOINT), and run the same command again"


def status_of(error: Exception) -> int | None:
    """The HTTP status of an error, if it has one."""
    return error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else None


def is_transient(error: Exception) -> bool:
    """Whether the same request may succeed later."""
    status = status_of(error)
    if status is not None:
        return status in RETRIED_STATUSES
    return isinstance(error, (HTTPError, ConnectionError)) and not isinstance(error, OfflineModeIsEnabled)


def retried(action: Callable[[], T], may_retry: Callable[[Exception], bool] = is_transient) -> T:
    """
    Do something on the Hub, and again where that may help, after as long as the Hub asks for. The client does so for uploads of files and
    not for what changes a repository: an answer that was lost must not lead to a second change, which is for the caller to see to.

    Args:
        action: What to do.
        may_retry: Whether it may be done again after an error.

    Raises:
        The last error.
    """
    for attempt in range(1, TRIES + 1):
        try:
            return action()
        except (HTTPError, OSError) as error:
            if attempt == TRIES or not may_retry(error):
                raise
            time.sleep(_wait_after(error, attempt))


def _wait_after(error: Exception, attempt: int) -> float:
    response = error.response if isinstance(error, HfHubHTTPError) else None
    asked = "" if response is None else response.headers.get("Retry-After", "")
    return min(float(asked), _LONGEST_WAIT) if asked.isdigit() else float(2 ** (attempt - 1))


def upload_error(error: Exception, what: str) -> UploadError:
    """What an error of a request means and what to do, without secrets."""
    status = status_of(error)
    if status is not None:
        advice = _SERVER if status >= 500 else _ADVICE.get(status, "the Hub refused it")
        return UploadError(f"{what} failed with status {status}: {advice} ({without_secrets(error)})")
    advice = _UNREACHED if isinstance(error, (HTTPError, ConnectionError)) else "a file could not be read or sent"
    return UploadError(f"{what} failed: {advice} ({type(error).__name__}: {without_secrets(error)})")


def without_secrets(error: Exception) -> str:
    """An error's text in one line, without the token and without the signatures in addresses to upload to."""
    text = " ".join(str(error).split())
    token = get_token()
    if token:
        text = text.replace(token, "***")
    return re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\")]+", r"\1?...", text)
