"""What a conversion was made of and what was found equal, in a file that travels with the result."""

import json
import platform
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

from .._version import __version__
from .comparison import Comparison
from .errors import ConversionError
from .journal import JOURNAL_FILE, hash_file
from .places import CERTIFICATE_FILE
from .plan import ConversionPlan
from .sources import Source


# Options that decide what the result is; the others are of one run.
LASTING_OPTIONS = ("granularity", "gate_bias", "init", "init_std", "init_bias", "seed")


def certificate_of(
    plan: ConversionPlan,
    source: Source,
    comparison: Comparison | None,
    numbers_equal: bool | None,
    source_hashes: dict[str, str],
    result_hashes: dict[str, str],
) -> dict:
    """
    The content of the certificate.

    Args:
        plan: What was converted.
        source: Where it came from; a folder's path stays out of the certificate.
        comparison, numbers_equal: What was found equal.
        source_hashes, result_hashes: SHA-256 of the weight files of the source and of the result's files, by name; empty if they
            were not computed.
    """
    # What is in effect, and not what was left to a default that may change.
    options = {name: getattr(plan.options, name) for name in LASTING_OPTIONS}
    options |= {"granularity": plan.config.gate_granularity, "gate_bias": plan.config.gate_bias}
    # `None` is for what was not looked at.
    same_function = (True if comparison is not None else None) if plan.options.init == "identity" else False
    return {
        "tool": {
            "gated_attention": __version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "machine": platform.machine(),
        },
        "source": {
            "id": source.repo_id,
            "revision": source.revision,
            "model_type": plan.family.model_type,
            "files": source_hashes,
        },
        "result": {"files": result_hashes},
        "options": options,
        "gates": plan.gates,
        "same_function": same_function,
        "rounds_otherwise": plan.family.tolerance,
        "numbers_equal": numbers_equal,
        "comparison": None if comparison is None else asdict(comparison),
    }


def write_certificate(folder: Path, content: dict) -> None:
    """Write the certificate into a result's folder."""
    (folder / CERTIFICATE_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_certificate(folder: Path) -> dict | None:
    """
    The certificate of a result, if it has one.

    Raises:
        `ConversionError`: it is no such file.
    """
    path = folder / CERTIFICATE_FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        tables = [content["source"]["files"], content["result"]["files"], content["options"], content["tool"]]
        words = [content["gates"], content["tool"]["gated_attention"], content["source"]["model_type"]]
        comparison = content["comparison"]
        layers = [] if comparison is None else [layer["ulps"] for layer in comparison["layers"]]
        names = [content["source"]["id"], content["source"]["revision"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConversionError(f"{path} is not the certificate of a conversion ({error!r}); remove it") from error
    kinds = ((tables, dict), (words, str), (layers, int), (names, str | None))
    if not all(isinstance(one, kind) for several, kind in kinds for one in several):
        raise ConversionError(f"{path} is not the certificate of a conversion; remove it")
    return content


def certified_files(plan: ConversionPlan, folder: Path) -> list[str]:
    """
    Names of the result's files that a certificate is given for, in subfolders too: weights, code, tokenizer and whatever else there
    is. Not the card, and not the config, which says the same in many ways and is compared by what it says.
    """
    left_out = ("README.md", "config.json", CERTIFICATE_FILE, JOURNAL_FILE)
    paths = [path for path in folder.rglob("*") if path.is_file()]
    names = {path.relative_to(folder).as_posix() for path in paths if "__pycache__" not in path.parts}
    return sorted(names - set(left_out) | plan.weight_files)


def file_hashes(plan: ConversionPlan, folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """
    SHA-256 of the source's weight files, and of the result's files.

    Args:
        plan, folder: The result.
    """
    targets = certified_files(plan, folder)
    sizes = sum(shard.size for shard in plan.source.shards) + sum((folder / name).stat().st_size for name in targets)
    hashes: dict[tuple[int, int], str] = {}  # of one file under two names once
    with tqdm(total=sizes, unit="B", unit_scale=True, desc="Hashing", disable=None) as bar:

        def of(path: Path) -> str:
            stat = path.stat()
            key = (stat.st_dev, stat.st_ino)
            if key not in hashes:
                hashes[key] = hash_file(path)
            bar.update(stat.st_size)
            return hashes[key]

        source = {shard.name: of(shard.path) for shard in plan.source.shards}
        result = {name: of(folder / name) for name in targets}
    return source, result


def check_copies(plan: ConversionPlan, folder: Path, source: dict[str, str], result: dict[str, str]) -> None:
    """
    Check by their hashes that the files which a conversion leaves as they are were left so.

    Raises:
        `ConversionError`: one was not.
    """
    for shard in () if plan.pieces else plan.shards:
        copy = plan.shard_names[shard.name]
        if source[shard.name] != result[copy]:
            raise ConversionError(
                f"{folder / copy} differs from {shard.path} of the source, of which it should be a copy"
            )
