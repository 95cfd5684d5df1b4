# Copyright 2026 The gated_attention authors. All rights reserved.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Experts are stacked in the model and apart on disk, as in Qwen's checkpoints: the mapping, both ways."""

import re
from collections.abc import Iterator

from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter


# Per-expert projections, and the stacked parameter that they make up.
EXPERT_TENSORS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}

_EXPERT_NAME = re.compile(r"\.mlp\.experts\.(\d+)\.(\w+)\.weight$")


def single_experts(stacked: str, num_experts: int, rows: int) -> Iterator[tuple[str, int, tuple[int, int]]]:
    """
    The tensors on disk that make up a stacked parameter.

    Args:
        stacked (`str`): `"gate_up_proj"` or `"down_proj"`.
        num_experts, rows (`int`): The first two sizes of the parameter.

    Returns:
        For each tensor its name behind `mlp.experts.`, its expert, and which of the expert's rows it is: (first, behind the last).
    """
    projections = EXPERT_TENSORS[stacked]
    width = rows // len(projections)
    for expert in range(num_experts):
        for index, projection in enumerate(projections):
            yield f"{expert}.{projection}.weight", expert, (index * width, (index + 1) * width)


def names_on_disk(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """From the shapes of a model's tensors to those of its checkpoint: stacked experts are taken apart."""
    on_disk = {}
    for name, shape in shapes.items():
        prefix, _, stacked = name.rpartition(".mlp.experts.")
        if not prefix:
            on_disk[name] = shape
            continue
        count, width, inner = shape
        for single, _, (start, end) in single_experts(stacked, count, width):
            on_disk[f"{prefix}.mlp.experts.{single}"] = (end - start, inner)
    return on_disk


def expert_problems(names: set[str], stacked: str, num_experts: int) -> list[str]:
    """
    What is wrong with the tensors that make up a stacked parameter.

    Args:
        names (`set[str]`): Names of tensors of one layer in the checkpoint.
        stacked (`str`): `"gate_up_proj"` or `"down_proj"`.
        num_experts (`int`): Of the config.

    Returns:
        `list[str]`: a sentence for each problem; none if there is exactly one tensor for each expert and projection, or one
        stacked tensor.
    """
    found = {match.groups(): name for name in names if (match := _EXPERT_NAME.search(name))}
    whole = sorted(name for name in names if name.endswith(f".mlp.experts.{stacked}"))
    if whole and found:
        return [
            f"{whole[0]} (all experts) stands beside {min(found.values())} (one expert): one of the two is left over"
        ]
    if whole:
        return []
    wanted = {(str(expert), projection) for expert in range(num_experts) for projection in EXPERT_TENSORS[stacked]}
    missing = [f"{expert}.{projection}.weight" for expert, projection in sorted(wanted - found.keys(), key=_in_order)]
    surplus = [found[key] for key in sorted(found.keys() - wanted, key=_in_order) if key[1] in EXPERT_TENSORS[stacked]]
    problems = []
    if missing:
        problems.append(f"mlp.experts lacks {', '.join(missing[:6])}{', ...' if len(missing) > 6 else ''}")
    if surplus:
        problems.append(
            f"{surplus[0]} is of no expert that the config knows{' (and more)' if len(surplus) > 1 else ''}"
        )
    return problems


def _in_order(key: tuple[str, str]) -> tuple[int, str]:
    return int(key[0]), key[1]


def load_single_experts(experts, state_dict: dict, prefix: str, *_) -> None:
    """
    Let `load_state_dict` take a checkpoint's tensors as they lie on disk, one an expert, a few of them at a time too: Trainer
    resumes that way, file by file, without the mapping that `from_pretrained` goes by. A pre-hook of the module with the stacked
    parameters.
    """
    for stacked in EXPERT_TENSORS:
        parameter = getattr(experts, stacked)
        if parameter.is_meta:
            continue
        found = False
        for single, expert, (start, end) in single_experts(stacked, *parameter.shape[:2]):
            tensor = state_dict.pop(f"{prefix}{single}", None)
            if tensor is not None:
                parameter.data[expert, start:end].copy_(tensor)
                found = True
        if found:
            state_dict.setdefault(f"{prefix}{stacked}", parameter.data)


class ExpertConverter(WeightConverter):
    """
    Stacks the experts of a layer on loading, and takes them apart on saving.

    Loading insists on one tensor for each expert. transformers stacks whatever it finds: with an expert missing it reports the
    shapes of the stack, and with a wrong number among the names nothing at all. (Under DeepSpeed's ZeRO-3 it stacks without
    asking this class, so only shapes are noticed there.)
    """

    def convert(self, layer_name, model=None, config=None, hf_quantizer=None, loading_info=None):
        """
        As in the parent.

        Raises:
            `ValueError`: an expert is missing or left over, or the checkpoint has stacked tensors too.
        """
        stacked = layer_name.rpartition(".")[2]
        if loading_info is not None and stacked in EXPERT_TENSORS:
            names = set().union(*self.layer_targets.values())
            problems = expert_problems(names, stacked, config.num_experts)
            if problems:
                raise ValueError(
                    f"{layer_name} cannot be loaded: {'; '.join(problems)}. The config says `num_experts` = "
                    f"{config.num_experts}, or was told so; the checkpoint is damaged or belongs to another config: fetch it again, or "
                    "load it with its own config"
                )
        return super().convert(layer_name, model, config, hf_quantizer, loading_info)


def register_expert_tensors(model_type: str) -> None:
    """
    Tell transformers how experts lie on disk: `mlp.experts.3.gate_proj.weight` and its like, as in Qwen's checkpoints and where
    servers look for them. transformers passes over models from outside unless their type was registered.
    """
    mapping = [
        ExpertConverter(
            source_patterns=[f"mlp.experts.*.{projection}.weight" for projection in projections],
            target_patterns=f"mlp.experts.{stacked}",
            operations=[MergeModulelist(dim=0)] + [Concatenate(dim=1)] * (len(projections) > 1),
        )
        for stacked, projections in EXPERT_TENSORS.items()
    ]
    register_checkpoint_conversion_mapping(model_type, mapping, overwrite=True)
