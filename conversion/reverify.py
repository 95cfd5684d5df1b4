"""Verifies a finished conversion again, by anyone who has its source, at any time."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig

from ..configuration import GatedAttentionConfig
from ..modeling_gated.bundle import AUTO_MAP, bundled_files
from .certificate import LASTING_OPTIONS, check_copies, file_hashes, read_certificate
from .checkpoint import Checkpoint, read_checkpoint, read_json
from .comparison import Comparison
from .errors import ConversionError
from .gate_starts import GATE_STARTS
from .gated_config import family_of
from .initialisation import initial_values
from .layouts import is_dropped
from .logits import compare_models
from .plan import ConversionOptions, ConversionPlan, plan_of, read_source
from .sources import find_source
from .verify import audit_headers, compare_numbers


# Fields of a config that say nothing of the model.
_VOLATILE = ("transformers_version", "_name_or_path", "auto_map", "architectures", "use_cache", "gate_scale")


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
    target = Path(target)
    written = read_checkpoint(target)
    if written.config.get("model_type") != GatedAttentionConfig.model_type:
        raise ConversionError(
            f"{target / 'config.json'}: model_type must be {GatedAttentionConfig.model_type!r}, got "
            f"{written.config.get('model_type')!r}; give the source first and the result second"
        )
    checks = []
    certificate = read_certificate(target)
    its_own = certificate is not None and str(source) == certificate["source"]["id"]
    found = find_source(source, certificate["source"]["revision"] if its_own else None)
    if certificate is not None and found.repo_id is not None and certificate["source"]["id"] is not None:
        named = (certificate["source"]["id"], certificate["source"]["revision"])
        if named != (found.repo_id, found.revision):
            raise ConversionError(
                f"the certificate of {target} is of {named[0]}@{named[1]}, the source given is {found.repo_id}@{found.revision}"
            )
    plan = _plan_again(read_checkpoint(found.folder, allow_pickled=True), written, target, certificate)
    checks.append(f"config: as a conversion of a {plan.family.model_type} checkpoint gives it")
    audit_headers(plan, target)
    checks.append(f"headers: {len(plan.tensors)} tensors in {len(written.shards)} files, names, shapes and formats")

    hashes = dict(zip(("source", "result"), file_hashes(plan, target), strict=True))
    if certificate is not None:
        for kind, folder in (("source", found.folder), ("result", target)):
            _compare_hashes(kind, folder, hashes[kind], certificate[kind]["files"])
        known = sum(len(certificate[kind]["files"]) for kind in hashes)
        checks.append(
            f"certificate: {known} files have the hashes that it gives" if known else "certificate: no hashes"
        )
    else:
        checks.append("certificate: none; what can be seen from the config alone was taken for the options")
    check_copies(plan, target, **hashes)
    if plan.pieces:
        compare_numbers(plan, target)
    dropped = [name for name in plan.source.tensors if plan.pieces and is_dropped(name, plan.family)]
    left_out = f", but for {len(dropped)} tensors that loaders pass over" if dropped else ""
    checks.append(f"numbers: each of the source's is in the result{left_out}")
    checks.append(f"code: {_check_code(target)}")
    if plan.new_tensors:
        checks.append(f"gates: {_check_gates(plan, target)}")

    comparison = compare_models(plan, target, layer_by_layer) if level == "logits" else None
    if comparison is not None:
        checks.append(
            f"outputs: equal bit for bit in {comparison.dtype}, {comparison.method}, lengths "
            f"{', '.join(map(str, comparison.lengths))}{comparison.conditions}"
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
    try:
        config = AutoConfig.from_pretrained(target)
    except Exception as error:  # whatever a changed config can break
        raise ConversionError(
            f"{target / 'config.json'} is not that of a conversion: {type(error).__name__}: {error}"
        ) from error
    if family_of(checkpoint).gates is not None:
        options = ConversionOptions(link="copy")  # the gates are the source's: nothing was asked for
    elif certificate is not None:
        asked = {name: value for name, value in certificate["options"].items() if name in LASTING_OPTIONS}
        options = ConversionOptions(**asked, link="copy")
    else:
        options = _options_by_sight(config, written)
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


def _options_by_sight(config: GatedAttentionConfig, written: Checkpoint) -> ConversionOptions:
    """What must have been asked for, by the config, and by the biases where that leaves a choice."""
    asked = {"granularity": config.gate_granularity, "gate_bias": config.gate_bias, "link": "copy"}
    if config.gate_scale != 1.0:
        return ConversionOptions(**asked)
    for shard in written.shards:
        for name in shard.tensors:
            if name.endswith(".g_proj.bias"):
                with safe_open(shard.path, "pt") as file:
                    bias = file.get_tensor(name)
                if bias.any():
                    return ConversionOptions(**asked, init="open", init_bias=bias.flatten()[0].item())
    return ConversionOptions(**asked, init="zeros")


def _check_code(target: Path) -> str:
    """Whether the code in the folder is this package's, and the config names it."""
    auto_map = read_json(target / "config.json").get("auto_map")
    if auto_map != AUTO_MAP:
        raise ConversionError(f"{target / 'config.json'}: auto_map must be {AUTO_MAP}, got {auto_map}")
    files = bundled_files()
    missing = sorted(name for name in files if not (target / name).is_file())
    if missing:
        raise ConversionError(
            f"{target} lacks the code {', '.join(missing)}, so it loads only where this package is installed"
        )
    other = sorted(name for name, content in files.items() if (target / name).read_text(encoding="utf-8") != content)
    if other:
        return f"complete, of another version of this package ({other[0]} differs)"
    return f"{len(files)} files, this package's"


def _compare_hashes(kind: str, folder: Path, found: dict[str, str], certified: dict[str, str]) -> None:
    different = sorted(name for name, digest in certified.items() if found.get(name) != digest)
    if different:
        raise ConversionError(
            f"{', '.join(different[:3])} of the {kind} {folder} "
            f"{'is' if len(different) == 1 else 'are'} not what the certificate was given for: changed since, or another revision"
        )


def _check_gates(plan: ConversionPlan, target: Path) -> str:
    """What the new tensors hold, if it is what the options say."""

    def is_as_it_began(name: str, began: torch.Tensor | None) -> bool:
        found = file.get_tensor(name)
        return torch.equal(found, began) if began is not None else not found.any()

    with safe_open(target / plan.new_shard, "pt") as file:
        changed, filled = [], set()
        for name, tensor in initial_values(plan):
            filled.add(name)
            changed += [] if is_as_it_began(name, tensor) else [name]
        changed += [name for name in plan.new_tensors if name not in filled and not is_as_it_began(name, None)]
    if changed:
        raise ConversionError(
            f"{target / plan.new_shard}: {sorted(changed)[0]} is not what gates begin with as {plan.options.init!r}: they were "
            "trained, or fitted by a transfer, since"
        )
    return GATE_STARTS[plan.options.init].effect
