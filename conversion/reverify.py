"""Verifies a finished conversion again, by anyone who has its source, at any time."""

from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open
from transformers import AutoConfig

from ..configuration import GatedAttentionConfig
from .certificate import read_certificate, weight_hashes
from .checkpoint import Checkpoint, read_checkpoint
from .errors import ConversionError
from .gate_starts import GATE_STARTS
from .gated_config import family_of
from .logits import Comparison, compare_models
from .plan import ConversionOptions, ConversionPlan, plan_of, read_source
from .sources import find_source
from .verify import audit_headers, compare_numbers


# Fields of a config that say nothing of the model.
_VOLATILE = ("transformers_version", "_name_or_path", "auto_map", "architectures", "use_cache", "gate_scale")

# Options that decide what the result is; the others are of one run.
_LASTING = ("granularity", "gate_bias", "init", "init_std", "init_bias", "seed")


@dataclass(frozen=True)
class Verification:
    """
    Attributes:
        checks: What was checked and found, one line each.
        comparison: What was found when source and result ran, if they did.
    """

    checks: list[str] = field(default_factory=list)
    comparison: Comparison | None = None


def verify_conversion(
    source: str | Path, target: str | Path, level: str = "logits", layer_by_layer: bool | None = None
) -> Verification:
    """
    Check that `target` is what a conversion of `source` gives: the config, the names, shapes and formats of all tensors, the hashes
    of its certificate, every number, and what both compute.

    Args:
        source (`str` or `Path`): Folder or Hub id of the source.
        target (`str` or `Path`): Folder of the result, as it was converted: not trained since.
        level (`str`): `"headers"`: config, names, shapes, formats, hashes and numbers. `"logits"`: also run both.
        layer_by_layer (`bool`, *optional*): Whether one layer of each is loaded at a time. By default where the models are
            large for the memory that is free.

    Returns:
        [`Verification`]

    Raises:
        [`ConversionError`]: a check failed; the message says which and where.
    """
    if level not in ("headers", "logits"):
        raise ConversionError(f"`level` must be 'headers' or 'logits', got {level!r}")
    found, target = find_source(source), Path(target)
    written = read_checkpoint(target)
    if written.config.get("model_type") != GatedAttentionConfig.model_type:
        raise ConversionError(
            f"{target / 'config.json'}: model_type must be {GatedAttentionConfig.model_type!r}, got "
            f"{written.config.get('model_type')!r}; give the source first and the result second"
        )
    checks = []
    certificate = read_certificate(target)
    if certificate is not None and found.repo_id is not None and certificate["source"]["id"] is not None:
        named = (certificate["source"]["id"], certificate["source"]["revision"])
        if named != (found.repo_id, found.revision):
            raise ConversionError(
                f"the certificate of {target} is of {named[0]}@{named[1]}, the source given is {found.repo_id}@{found.revision}"
            )
    plan = _plan_again(read_checkpoint(found.folder), written, target, certificate)
    checks.append(f"config: as a conversion of a {plan.family.model_type} checkpoint gives it")
    audit_headers(plan, target)
    checks.append(f"headers: {len(plan.tensors)} tensors in {len(written.shards)} files, names, shapes and formats")

    hashes = dict(zip(("source", "result"), weight_hashes(plan, target, {}), strict=True))
    if certificate is not None:
        for kind, folder in (("source", found.folder), ("result", target)):
            _compare_hashes(kind, folder, hashes[kind], certificate[kind]["files"])
        known = sum(len(certificate[kind]["files"]) for kind in hashes)
        checks.append(
            f"certificate: {known} files have the hashes that it gives" if known else "certificate: no hashes"
        )
    else:
        checks.append("certificate: none; what can be seen from the config alone was taken for the options")
    if plan.pieces:
        compare_numbers(plan, target)
    else:
        for shard in plan.shards:
            if hashes["source"][shard.name] != hashes["result"][plan.shard_names[shard.name]]:
                raise ConversionError(
                    f"{target / plan.shard_names[shard.name]} differs from {shard.path} of the source"
                )
    checks.append("numbers: each of the source's is in the result")
    if plan.new_tensors:
        checks.append(f"gates: {_check_gates(plan, target)}")

    comparison = compare_models(plan, target, layer_by_layer) if level == "logits" else None
    if comparison is not None:
        aside = ", gates set aside" if plan.options.init != "identity" else ""
        rejoined = ", projections that were taken apart put together" if comparison.rejoined else ""
        checks.append(
            f"outputs: equal bit for bit in {comparison.dtype}, {comparison.method}, lengths "
            f"{', '.join(map(str, comparison.lengths))}{rejoined}{aside}"
        )
    elif level == "logits":
        checks.append("outputs: the result runs; transformers has no class to compare it with")
    return Verification(checks, comparison)


def _plan_again(checkpoint: Checkpoint, written: Checkpoint, target: Path, certificate: dict | None) -> ConversionPlan:
    """
    The plan of which `target` is the result.

    Raises:
        `ConversionError`: its config is not that of a conversion of this source.
    """
    config = AutoConfig.from_pretrained(target)
    if family_of(checkpoint).gates is not None:
        options = ConversionOptions(link="copy")  # the gates are the source's: nothing was asked for
    elif certificate is not None:
        asked = {name: value for name, value in certificate["options"].items() if name in _LASTING}
        options = ConversionOptions(**asked, link="copy")
    else:
        init = "identity" if config.gate_scale != 1.0 else "open" if config.gate_bias else "zeros"
        options = ConversionOptions(config.gate_granularity, config.gate_bias, init, link="copy")
    scale = GATE_STARTS[options.init].gate_scale
    reading = read_source(checkpoint, options.granularity, options.has_gate_bias, gate_scale=scale)
    plan = plan_of(reading, target, options)
    said, planned = config.to_dict(), plan.config.to_dict()
    different = sorted(
        name for name in said.keys() | planned.keys() if said.get(name) != planned.get(name) and name not in _VOLATILE
    )
    if config.gate_scale != plan.config.gate_scale:
        different.append("gate_scale")
    if different:
        shown = "; ".join(f"{name} is {said.get(name)!r}, would be {planned.get(name)!r}" for name in different[:4])
        raise ConversionError(f"{target / 'config.json'} is not that of a conversion of {checkpoint.folder}: {shown}")
    return plan


def _compare_hashes(kind: str, folder: Path, found: dict[str, str], certified: dict[str, str]) -> None:
    different = sorted(name for name, digest in certified.items() if found.get(name) != digest)
    if different:
        raise ConversionError(
            f"{', '.join(different[:3])} of the {kind} {folder} "
            f"{'is' if len(different) == 1 else 'are'} not what the certificate was given for: changed since, or another revision"
        )


def _check_gates(plan: ConversionPlan, target: Path) -> str:
    """What the new tensors hold, if it is what the options say."""
    with safe_open(target / plan.new_shard, "pt") as file:
        filled = [name for name in plan.new_tensors if file.get_tensor(name).any()]
    expected = {
        "identity": [],
        "zeros": [],
        "open": [name for name in plan.new_tensors if name.endswith("g_proj.bias")] if plan.options.init_bias else [],
        "normal": [name for name in plan.new_tensors if name.endswith("g_proj.weight")]
        if plan.options.init_std
        else [],
    }[plan.options.init]
    if sorted(filled) != sorted(expected):
        odd = sorted(set(filled) ^ set(expected))
        raise ConversionError(
            f"{target / plan.new_shard}: {odd[0]} is {'not zero' if odd[0] in filled else 'zero'}, which gates that begin as "
            f"{plan.options.init!r} are not: they were trained, or fitted by a transfer, since"
        )
    return GATE_STARTS[plan.options.init].effect
