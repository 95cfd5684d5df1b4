"""An adapter's base model on the Hub: it has to be there, with the weights that the adapter was made for, and with its code."""

from collections.abc import Callable

from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError

from .errors import UploadError
from .plan import is_same, repository_files
from .retries import retried, without_secrets
from .source import ModelFolder


def check_base_on_hub(
    model: ModelFolder,
    base_model: str,
    revision: str | None = None,
    must_reach: bool = True,
    echo: Callable[[str], None] = print,
) -> None:
    """
    Compare an adapter's base model here with the one on the Hub that strangers will load, by hashes.

    Args:
        model: The adapter.
        base_model: Hub id of its base model.
        revision: The revision that the adapter names.
        must_reach: Whether it is an error that the Hub cannot be asked.
        echo: Where it is said that it cannot.

    Raises:
        `UploadError`: other weights, or a gated model without its code.
        `HTTPError` or `OSError`: it cannot be asked.
    """
    api = HfApi()
    try:
        found = retried(lambda: repository_files(api, base_model, revision or "main"))
    except (HTTPError, OSError) as error:
        if must_reach:
            raise
        echo(f"note     the base model {base_model} could not be looked at ({without_secrets(error)})")
        return
    missing = [shard.name for shard in model.checkpoint.shards if shard.name not in found]
    other = [
        shard.name
        for shard in model.checkpoint.shards
        if shard.name in found and not is_same(shard.path, found[shard.name])
    ]
    if missing or other:
        raise UploadError(
            f"base_model: {base_model} has other weights than {model.base_folder}, which the adapter was made for "
            f"({', '.join([*missing, *other][:3])}); push that folder and name its repository"
        )
    if model.needs_code and "modeling_gated_attention.py" not in found:
        raise UploadError(
            f"base_model: {base_model} does not hold the model's code, without which nobody can load the adapter; push the base model with "
            f"`gated-attention push {base_model.split('/')[-1]} {base_model}` first"
        )
