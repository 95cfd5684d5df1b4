"""What a conversion was made of and what was found equal, in a file that travels with the result."""

import json
import platform
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

from .._version import __version__
from .errors import ConversionError
from .journal import hash_file
from .logits import Comparison
from .plan import ConversionPlan
from .sources import Source


CERTIFICATE_FILE = "gated_attention_conversion.json"


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
        source_hashes, result_hashes: SHA-256 of the weight files of both, by name; empty if they were not computed.
    """
    options = asdict(plan.options)
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
        "options": {name: value for name, value in options.items() if name not in ("overwrite", "link", "verify")},
        "gates": plan.gates,
        "exact": plan.family.tolerance or "bit for bit",
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
        files = (content["source"]["files"], content["result"]["files"], content["options"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConversionError(f"{path} is not the certificate of a conversion ({error!r}); remove it") from error
    if not all(isinstance(part, dict) for part in files):
        raise ConversionError(f"{path} is not the certificate of a conversion; remove it")
    return content


def weight_hashes(plan: ConversionPlan, folder: Path, known: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """
    SHA-256 of the weight files of source and result.

    Args:
        plan, folder: The result.
        known: Those of the result's files that were computed already.
    """
    targets = sorted({*plan.shard_names.values(), *([plan.new_shard] if plan.new_tensors else [])})
    unread = [folder / name for name in targets if name not in known]
    sizes = sum(shard.size for shard in plan.source.shards) + sum(path.stat().st_size for path in unread)
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
        result = {name: known.get(name) or of(folder / name) for name in targets}
    return source, result
