"""What an export writes: read, refused or planned, before anything is written."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import torch
from transformers import AutoConfig, PreTrainedConfig

from ...configuration import GatedAttentionConfig
from ...modeling_gated import GatedAttentionForCausalLM
from ...modeling_gated.expert_tensors import names_on_disk
from ..certificate import read_certificate
from ..checkpoint import FLOAT_FORMATS, SINGLE_FILE, Checkpoint, Shard, is_ignored_on_load, read_checkpoint, shard_name
from ..errors import ConversionError
from ..families import FAMILIES, Family
from ..gated_config import dtype_as_loaded, gates_are_identity, has_identity_scale, refuse_other_tensors
from ..places import check_places, other_files
from ..plan import Link, format_bytes, free_bytes
from .stock_config import config_problems, rope_problems, stock_class, stock_config, switches
from .tensors import Changes, OutputTensor, TensorPlanner, stock_name


Target = Literal["qwen3_5", "qwen3_next", "lfm3"]


@dataclass(frozen=True)
class GatedModel:
    """
    A gated checkpoint that was read.

    Attributes:
        checkpoint: What the folder holds.
        config: Its config.
        certificate: Of the conversion that it comes from, if there is one.
    """

    checkpoint: Checkpoint
    config: GatedAttentionConfig
    certificate: dict | None

    @property
    def folder(self) -> Path:
        return self.checkpoint.folder

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, whole."""
        shard = next(shard for shard in self.checkpoint.shards if name in shard.tensors)
        with shard.open() as file:
            return file.get_tensor(name)

    def is_zero(self, *ends: str) -> bool:
        """Whether all tensors with names of these ends hold zeros, if there are any."""
        for shard in self.checkpoint.shards:
            names = [name for name in shard.tensors if name.endswith(ends)]
            if names:
                with shard.open() as file:
                    if any(file.get_tensor(name).any() for name in names):
                        return False
        return True


def read_gated_model(folder: Path) -> GatedModel:
    """
    Read a gated checkpoint's config and headers.

    Raises:
        `ConversionError`: it is none, or lacks a tensor.
    """
    checkpoint = read_checkpoint(folder)
    found = checkpoint.config.get("model_type")
    if found != GatedAttentionConfig.model_type:
        raise ConversionError(
            f"{folder / 'config.json'}: model_type must be {GatedAttentionConfig.model_type!r}, got {found!r}; add gates with "
            "`gated-attention convert` first"
        )
    architectures = checkpoint.config.get("architectures") or [GatedAttentionForCausalLM.__name__]
    if architectures != [GatedAttentionForCausalLM.__name__]:
        raise ConversionError(
            f"{folder / 'config.json'}: architectures must be [{GatedAttentionForCausalLM.__name__!r}], got {architectures}; save "
            "the causal language model"
        )
    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = GatedAttentionForCausalLM(config)
    except Exception as error:  # whatever a config can break
        raise ConversionError(
            f"{folder / 'config.json'} does not describe a model that can be built: {type(error).__name__}: {error}"
        ) from error
    found = {name: header.shape for name, header in checkpoint.tensors.items() if not is_ignored_on_load(name)}
    expected = names_on_disk({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})
    way_out = "It is half-written, or of two models: save or fetch it again"
    refuse_other_tensors(checkpoint, config, found, expected, set(), "it", way_out)
    if getattr(config, "dtype", None) is not None and config.dtype not in FLOAT_FORMATS.values():
        raise ConversionError(
            f"{folder / 'config.json'}: dtype must be one of {', '.join(str(one).removeprefix('torch.') for one in FLOAT_FORMATS.values())}, "
            f"got {config.dtype}"
        )
    return GatedModel(checkpoint, config, read_certificate(folder))


@dataclass(frozen=True)
class StockPlan:
    """
    What is written.

    Attributes:
        model: The gated checkpoint.
        family: Of the stock class.
        target: Folder to make.
        stock_config: The stock class's config.
        outputs: Every tensor of the result.
        files: Which tensors go into which file.
        copied: Other files that go along, relative to the folder.
        changes: What was rounded while planning: norms.
        link: How files get into the result of which no tensor changes.
        notes: What the user should know.
    """

    model: GatedModel
    family: Family
    target: Path
    stock_config: PreTrainedConfig
    outputs: tuple[OutputTensor, ...]
    files: dict[str, list[OutputTensor]]
    copied: tuple[Path, ...]
    changes: Changes
    link: Link = "copy"
    notes: tuple[str, ...] = field(default=())

    @property
    def checkpoint(self) -> Checkpoint:
        return self.model.checkpoint

    @cached_property
    def untouched(self) -> list[OutputTensor]:
        """The outputs that are one tensor of the gated checkpoint, but for their names."""
        headers = self.checkpoint.tensors
        return [output for output in self.outputs if output.is_untouched(headers)]

    @property
    def bytes_to_write(self) -> int:
        other = sum((self.checkpoint.folder / path).stat().st_size for path in self.copied)
        return other + sum(output.header.nbytes + 2 * len(output.name) + 128 for output in self.outputs)

    def copied_shard(self, outputs: list[OutputTensor]) -> Shard | None:
        """The gated checkpoint's file that holds these outputs as they are, and nothing else."""
        headers = self.checkpoint.tensors
        if not all(output.is_untouched(headers) and output.name == output.parts[0].source for output in outputs):
            return None
        names = {output.name for output in outputs}
        return next((shard for shard in self.checkpoint.shards if names == shard.tensors.keys()), None)

    def how(self) -> dict[str, list[OutputTensor]]:
        """The outputs that are not what a tensor of the gated checkpoint is, by what was done to them."""
        kinds: dict[str, list[OutputTensor]] = {}
        untouched = {output.name for output in self.untouched}
        for output in self.outputs:
            if output.name not in untouched:
                kinds.setdefault(output.how, []).append(output)
        return kinds

    def describe(self) -> str:
        """The plan as text."""
        source = self.checkpoint
        lines = [
            f"source   {source.folder} ({len(source.tensors)} tensors, {format_bytes(sum(s.size for s in source.shards))})",
            f"target   {self.target} ({self.family.architecture} of transformers)",
            f"tensors  {len(self.untouched)} of {len(self.outputs)} as they are"
            + (", under the stock names" if self.family.renames else ""),
        ]
        lines += [f"         {len(outputs)}: {how}" for how, outputs in self.how().items()]
        if self.copied:
            lines.append(f"copy     {', '.join(str(path) for path in self.copied)}")
        lines.append(
            f"writes   {format_bytes(self.bytes_to_write)} in {len(self.files)} weight file{'s' * (len(self.files) > 1)}, "
            f"{format_bytes(free_bytes(self.target))} free at the target"
        )
        lines += [f"note     {note}" for note in self.notes]
        return "\n".join(lines)


# ---- export


def target_family(to: Target, config: GatedAttentionConfig) -> Family:
    """The family that a model becomes: Qwen3.5's experts have a class of their own."""
    if to == "qwen3_5":
        return FAMILIES["qwen3_5_moe_text" if config.num_experts else "qwen3_5_text"]
    return FAMILIES[to]


def plan_export(source: Path, target: Path, to: Target, widen_gates: bool, overwrite: bool) -> StockPlan:
    """
    Read a gated checkpoint and decide what to write as a stock one.

    Raises:
        `ConversionError`: it is none, no stock class computes what it computes, or the target is in the way.
    """
    if to not in get_args(Target):
        raise ConversionError(f"`to` must be one of {', '.join(get_args(Target))}; got {to!r}")
    check_places(source, target, overwrite)
    model = read_gated_model(source)
    problems = export_problems(model, to, widen_gates)
    if problems:
        others = [
            f"{other}{' with --widen-gates' if widen and not widen_gates else ''}"
            for other, widen in _alternatives(model, to, widen_gates)
        ]
        way_out = f"{' or '.join(others)} could hold it" if others else "no stock class could"
        raise ConversionError(
            f"{source} cannot become {target_family(to, model.config).model_type}: {'; '.join(problems)}. "
            f"{way_out[0].upper()}{way_out[1:]}; it runs as it is with trust_remote_code=True"
        )
    return _planned(model, target_family(to, model.config), target, fill=True)


def _alternatives(model: GatedModel, to: Target, widen_gates: bool) -> Iterator[tuple[str, bool]]:
    for other in get_args(Target):
        for widen in sorted({widen_gates, True}):
            if (other != to or widen != widen_gates) and not export_problems(model, other, widen):
                yield other, widen
                break


def export_problems(model: GatedModel, to: Target, widen_gates: bool) -> list[str]:
    """Why a model has no place in a stock architecture, as clauses of a sentence."""
    family, config = target_family(to, model.config), model.config
    empty = set()
    if config.mlp_bias and model.is_zero(".mlp.gate_proj.bias", ".mlp.up_proj.bias", ".mlp.down_proj.bias"):
        empty.add("mlp_bias")
    problems = _gate_problems(model, family, widen_gates) + config_problems(config, family, fill=True, empty=empty)
    return problems or _class_problems(model, family)


def _class_problems(model: GatedModel, family: Family) -> list[str]:
    """What the stock class's own config, or its RoPE, does not take."""
    try:
        stock = _stock_config(model, family, model.config.tie_word_embeddings)
        with torch.device("meta"):
            stock_class(family)(stock)
    except Exception as error:  # each class has checks of its own
        return [f"{family.model_type} does not take its config ({type(error).__name__}: {error})"]
    return rope_problems(model.config, stock, family)


def _gate_problems(model: GatedModel, family: Family, widen_gates: bool) -> list[str]:
    config, name = model.config, family.model_type
    if config.gate_positions != ["sdpa_output"]:
        where = ", ".join(config.gate_positions) or "nothing"
        return [
            f"its gates are on {where} (`gate_positions`), where {name} has them on the attention output (sdpa_output)"
        ]
    problems = []
    for switch, wanted in (
        ("gate_operator", "multiply"),
        ("gate_activation", "sigmoid"),
        ("gate_sharing", "head_specific"),
    ):
        if getattr(config, switch) != wanted:
            problems.append(f"`{switch}` is {getattr(config, switch)!r}, where {name} always has {wanted!r}")
    of_family = family.fixed_fields["gate_granularity"]
    if config.gate_granularity == "elementwise" and of_family == "headwise":
        problems.append(f"its gates are elementwise, where {name} has headwise ones")
    if config.gate_granularity == "headwise" and of_family == "elementwise" and not widen_gates:
        problems.append(
            f"its gates are headwise, where {name} has elementwise ones: --widen-gates (widen_gates=True) repeats each gate for "
            "every channel of its head, which is the same function"
        )
    has_bias = config.gate_bias or config.gate_input == "none"
    if has_bias and "gate_bias" not in family.config_fields and not model.is_zero(".g_proj.bias"):
        problems.append(f"its gates have a bias that is not zero, where {name} has none")
    return problems


# ---- strip


def plan_strip(source: Path, target: Path, link: Link, overwrite: bool) -> StockPlan:
    """
    Read a gated checkpoint whose gates are the identity and decide what to write without them.

    Raises:
        `ConversionError`: it is none, its gates do something, no stock class has what is left, or the target is in the way.
    """
    if link not in get_args(Link):
        raise ConversionError(f"`link` must be one of {get_args(Link)}, got {link!r}")
    check_places(source, target, overwrite)
    model = read_gated_model(source)
    _refuse_gates_that_matter(model)
    candidates = _ungated_families(model)
    reasons = {}
    for family in candidates:
        reasons[family.model_type] = config_problems(model.config, family, fill=False)
        reasons[family.model_type] = reasons[family.model_type] or _class_problems(model, family)
        if not reasons[family.model_type]:
            plan = _planned(model, family, target, fill=False, link=link)
            named = candidates[0].model_type
            if model.certificate and family.model_type != named and reasons.get(named):
                note = f"it was {named}, which has no place for what it is now: {'; '.join(reasons[named])}"
                plan = replace(plan, notes=(*plan.notes, note))
            return plan
    nearest = min(reasons, key=lambda name: len(reasons[name]))
    raise ConversionError(
        f"no class of transformers computes what {source} computes without its gates; the nearest is {nearest}: "
        f"{'; '.join(reasons[nearest])}"
    )


def _ungated_families(model: GatedModel) -> list[Family]:
    """The families that a model may be of, that which its certificate names first."""
    families = [family for family in FAMILIES.values() if family.gates is None]
    named = model.certificate["source"]["model_type"] if model.certificate else None
    return sorted(families, key=lambda family: family.model_type != named)


def _refuse_gates_that_matter(model: GatedModel) -> None:
    config = model.config
    if not config.gate_positions:
        return
    if gates_are_identity(model.checkpoint, config):
        return
    why = (
        "they are not zero: trained, fitted by a transfer, or begun otherwise"
        if has_identity_scale(config)
        else f"`gate_scale` is {config.gate_scale}, `gate_activation` {config.gate_activation!r}, `gate_operator` "
        f"{config.gate_operator!r}"
    )
    raise ConversionError(
        f"the gates of {model.folder} are not the identity ({why}), so without them it would be another model; `gated-attention "
        "export` writes it with its gates as a stock architecture"
    )


# ---- both


def _switch_values(config: GatedAttentionConfig, family: Family) -> dict[str, bool]:
    values = {}
    for theirs, names in switches(family).items():
        values[theirs] = any(getattr(config, name) for name in names)
        if "gate_bias" in names and config.gate_input == "none":
            values[theirs] = True
    return values


def _stock_config(model: GatedModel, family: Family, tied: bool) -> PreTrainedConfig:
    return stock_config(
        model.config,
        family,
        dtype_as_loaded(model.checkpoint, model.config),
        _switch_values(model.config, family),
        tied,
    )


def _planned(model: GatedModel, family: Family, target: Path, fill: bool, link: Link = "copy") -> StockPlan:
    planner = TensorPlanner(
        model.checkpoint,
        model.config,
        family,
        model.tensor,
        _switch_values(model.config, family) if fill else {},
        dtype_as_loaded(model.checkpoint, model.config),
    )
    outputs = planner.plan()
    tied = model.config.tie_word_embeddings and not planner.unties_head
    config = _stock_config(model, family, tied)
    _check_against_class(model, family, config, outputs)
    notes = []
    if planner.unties_head:
        size = next(output.header.nbytes for output in outputs if output.name == "lm_head.weight")
        notes.append(
            f"the head becomes a matrix of its own ({format_bytes(size)} more): powers of two of the final norm's weights go into it"
        )
    copied, left_behind = other_files(model.checkpoint, own_code=True)
    notes += left_behind
    return StockPlan(
        model=model,
        family=family,
        target=target,
        stock_config=config,
        outputs=tuple(outputs),
        files=_files(model.checkpoint, outputs),
        copied=copied,
        changes=planner.changes,
        link=link,
        notes=tuple(notes),
    )


def _files(checkpoint: Checkpoint, outputs: list[OutputTensor]) -> dict[str, list[OutputTensor]]:
    homes = {name: shard.name for shard in checkpoint.shards for name in shard.tensors}
    by_shard: dict[str, list[OutputTensor]] = {}
    for output in outputs:
        by_shard.setdefault(homes.get(output.home, ""), []).append(output)
    ordered = sorted(by_shard, key=lambda name: (name == "", name))
    if len(ordered) == 1:
        return {SINGLE_FILE: by_shard[ordered[0]]}
    return {shard_name(number, len(ordered)): by_shard[shard] for number, shard in enumerate(ordered, start=1)}


def _check_against_class(
    model: GatedModel, family: Family, config: PreTrainedConfig, outputs: list[OutputTensor]
) -> None:
    """What is planned is what the stock class has, name by name and shape by shape."""
    with torch.device("meta"):
        stock = stock_class(family)(config)
    expected = {name: tuple(tensor.shape) for name, tensor in stock.state_dict().items()}
    found = {output.name: output.header.shape for output in outputs}
    if not family.stacks_experts:
        expected = names_on_disk(expected)
    expected = {stock_name(name, family): shape for name, shape in expected.items()}
    tied = set(stock._tied_weights_keys) if config.tie_word_embeddings else set()
    missing = expected.keys() - found.keys() - tied
    wrong = {name for name in expected.keys() & found.keys() if expected[name] != found[name]}
    differences = sorted(missing | wrong | (found.keys() - expected.keys()))
    if differences:
        raise ConversionError(
            f"{model.folder} could not be planned as {family.architecture}: {', '.join(differences[:4])} would not be what the class "
            "has. Please report this with its config.json"
        )
