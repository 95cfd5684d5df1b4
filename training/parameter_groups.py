"""Which parameters are trained at which rate, and when."""

import re
from dataclasses import dataclass

import torch
from torch import nn

from ..diagnostics.gate_locations import gate_projections
from ..modeling_gated.gate import is_gate_tensor
from .errors import RecipeError
from .recipe import ParameterGroup


GATES = "gates"

_REST = ParameterGroup("")


@dataclass(frozen=True)
class ResolvedGroup:
    """
    Attributes:
        group: What was asked for.
        names: Names of the parameters, in the model's order.
    """

    group: ParameterGroup
    names: tuple[str, ...]

    @property
    def title(self) -> str:
        return self.group.pattern or "the rest"

    def is_trained_at(self, step: int) -> bool:
        """Whether step number `step` (from 0) changes these parameters."""
        group = self.group
        if group.frozen or step < group.from_step:
            return False
        return group.until_step is None or step < group.until_step


def gate_parameters(model: nn.Module) -> set[str]:
    """
    Names of the parameters that hold gates, adapters of their projections included. Of stock classes in which queries and gates share
    a projection it is that projection.
    """
    modules = {projection.name for projection in gate_projections(model)}
    return {
        name
        for name, _ in model.named_parameters()
        if is_gate_tensor(name) or any(name.startswith(f"{module}.") for module in modules)
    }


def resolve_groups(model: nn.Module, groups: list[ParameterGroup], only_gates: bool = False) -> list[ResolvedGroup]:
    """
    Give each trainable parameter to the first group whose pattern fits; what fits none is a last group of its own.

    Args:
        model (`nn.Module`): Its parameters.
        groups (`list[ParameterGroup]`): As in the recipe.
        only_gates (`bool`): Whether everything but the gates is frozen.

    Raises:
        `RecipeError`: a pattern fits no parameter, or the model has no gates where they are asked for.
    """
    gates = gate_parameters(model)
    if not gates and (only_gates or any(group.pattern == GATES for group in groups)):
        raise RecipeError(
            "the model has no gates: add some with `gated-attention convert`, or leave `gates` out of the recipe"
        )
    if only_gates:
        groups = [*groups, ParameterGroup(GATES), ParameterGroup("", frozen=True)]
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    members: dict[int, list[str]] = {index: [] for index in range(len(groups) + 1)}
    for name in names:
        members[first_fit(name, groups, gates)].append(name)
    for index, group in enumerate(groups):
        if not members[index] and not only_gates:
            taken = any(_fits(name, group, gates) for name in names)
            raise RecipeError(
                f"`parameter_groups.{index}.pattern` {group.pattern!r} fits no parameter"
                + (
                    " that an earlier group has not taken"
                    if taken
                    else f"; names are such as {names[len(names) // 2]}"
                )
            )
    resolved = [ResolvedGroup(group, tuple(members[index])) for index, group in enumerate([*groups, _REST])]
    return [one for one in resolved if one.names]


def first_fit(name: str, groups: list[ParameterGroup], gates: set[str]) -> int:
    """The index of the group that a parameter belongs to; the number of groups if it fits none. `gates` are the names of the gates' parameters."""
    return next((index for index, group in enumerate(groups) if _fits(name, group, gates)), len(groups))


def _fits(name: str, group: ParameterGroup, gates: set[str]) -> bool:
    if group.pattern == GATES:
        return name in gates
    return re.search(group.pattern, name) is not None


def freeze(model: nn.Module, groups: list[ResolvedGroup]) -> None:
    """Parameters that are never trained need no gradient."""
    frozen = {name for one in groups if one.group.frozen for name in one.names}
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)


def optimizer_groups(
    model: nn.Module, groups: list[ResolvedGroup], learning_rate: float, weight_decay: float, decayed: set[str]
) -> list[dict]:
    """
    The groups of an optimizer.

    Args:
        model, groups: The parameters.
        learning_rate, weight_decay: What the factors are of.
        decayed: Names of the parameters that weight decay is for.
    """
    parameters = dict(model.named_parameters())
    found = []
    for one in groups:
        for decays in (True, False):
            members = [
                parameters[name]
                for name in one.names
                if parameters[name].requires_grad and (name in decayed) == decays
            ]
            if members:
                found.append(
                    {
                        "params": members,
                        "lr": learning_rate * one.group.learning_rate,
                        "weight_decay": weight_decay * one.group.weight_decay if decays else 0.0,
                        "factor": one.group.learning_rate,
                    }
                )
    return found


def groups_table(model: nn.Module, groups: list[ResolvedGroup], learning_rate: float, weight_decay: float) -> str:
    """The groups as text: tensors, numbers, rates and steps."""
    parameters = dict(model.named_parameters())
    total = sum(parameter.numel() for parameter in parameters.values())
    rows = [("parameters", "tensors", "numbers", "share", "learning rate", "weight decay", "steps")]
    seen = 0
    for one in groups:
        count = sum(parameters[name].numel() for name in one.names)
        seen += count
        group = one.group
        steps = f"{group.from_step} to {'the end' if group.until_step is None else group.until_step - 1}"
        rates = (f"{learning_rate * group.learning_rate:g}", f"{weight_decay * group.weight_decay:g}")
        rows.append(
            (
                one.title,
                str(len(one.names)),
                f"{count:,}",
                f"{count / total:.2%}",
                *(("-", "-", "frozen") if group.frozen else (*rates, "all" if steps == "0 to the end" else steps)),
            )
        )
    if seen < total:
        frozen = sum(1 for parameter in parameters.values() if not parameter.requires_grad)
        rows.append(
            ("without gradient", str(frozen), f"{total - seen:,}", f"{1 - seen / total:.2%}", "-", "-", "frozen")
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def drop_gradients(model: nn.Module, groups: list[ResolvedGroup], step: int) -> None:
    """Take away the gradients of the groups that are not trained in this step, so that neither they nor their moments change."""
    waiting = {name for one in groups if not one.is_trained_at(step) for name in one.names}
    if waiting:
        for name, parameter in model.named_parameters():
            if name in waiting:
                parameter.grad = None


class MuonAndAdamW(torch.optim.Optimizer):
    """
    Muon for matrices and AdamW for the rest, as one optimizer.

    Args:
        groups (`list[dict]`): Optimizer groups; each may have `"use_muon"`.
        adam (`dict`): Arguments of AdamW (`betas`, `eps`).
    """

    def __init__(self, groups: list[dict], adam: dict):
        if not hasattr(torch.optim, "Muon"):
            raise RecipeError("`optimizer: muon` needs torch 2.9 or newer, which has Muon")
        super().__init__(groups, {})
        # Both work on these very groups: what a scheduler sets reaches them.
        self.parts = {}
        matrices = [group for group in self.param_groups if group["use_muon"]]
        others = [group for group in self.param_groups if not group["use_muon"]]
        if matrices:
            # The update's size is that of AdamW's, so that one learning rate serves both.
            self.parts["muon"] = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw")
        if others:
            self.parts["adamw"] = torch.optim.AdamW(others, **adam)
        self.param_groups = [group for part in self.parts.values() for group in part.param_groups]

    def step(self, closure=None):
        loss = None if closure is None else closure()
        for part in self.parts.values():
            part.step()
        return loss

    def state_dict(self) -> dict:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state_dict: dict) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(state_dict[name])
        self.param_groups = [group for part in self.parts.values() for group in part.param_groups]
