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
"""
The code that travels with a checkpoint, so that `trust_remote_code=True` loads it without this package.

transformers runs custom code from flat files whose imports read `from .module import name`. The package spans two folders,
so its modules are flattened on the way out. This module is itself part of the bundle: a model that was loaded from one saves
a complete one again.
"""

import os
import re
from pathlib import Path


# Module of the package, and its name in a bundle: distinctive there, since a user may save into a folder with own code.
BUNDLED_MODULES = {
    "configuration_gated_attention": "configuration_gated_attention",
    "gate_variants": "gated_attention_gate_variants",
    "presets": "gated_attention_presets",
    "modeling_gated_attention": "modeling_gated_attention",
    "decoder": "gated_attention_decoder",
    "attention": "gated_attention_attention",
    "gate": "gated_attention_gate",
    "outputs": "gated_attention_outputs",
    "rotary": "gated_attention_rotary",
    "norm": "gated_attention_norm",
    "forget_gate": "gated_attention_forget_gate",
    "moe": "gated_attention_moe",
    "expert_tensors": "gated_attention_expert_tensors",
    "bundle": "gated_attention_bundle",
}

AUTO_MAP = {
    "AutoConfig": "configuration_gated_attention.GatedAttentionConfig",
    "AutoModel": "modeling_gated_attention.GatedAttentionModel",
    "AutoModelForCausalLM": "modeling_gated_attention.GatedAttentionForCausalLM",
    "AutoModelForSequenceClassification": "modeling_gated_attention.GatedAttentionForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_gated_attention.GatedAttentionForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_gated_attention.GatedAttentionForQuestionAnswering",
}

_PACKAGE_IMPORT = re.compile(r"^from \.+(?:\w+\.)*(\w+) import ", flags=re.MULTILINE)


def _flatten_imports(source: str) -> str:
    return _PACKAGE_IMPORT.sub(lambda found: f"from .{BUNDLED_MODULES.get(found[1], found[1])} import ", source)


def bundled_files() -> dict[str, str]:
    """File name and content of each module of the bundle, flattened."""
    here = Path(__file__).parent
    files = {}
    for module, bundled in BUNDLED_MODULES.items():
        candidates = (
            here / f"{bundled}.py",  # running from a bundle, and the two modules whose name stays
            here / f"{module}.py",
            here.parent / "configuration" / f"{module}.py",
        )
        source = next(path for path in candidates if path.is_file())
        files[f"{bundled}.py"] = _flatten_imports(source.read_text(encoding="utf-8"))
    return files


def write_code_bundle(folder: str | os.PathLike) -> list[str]:
    """
    Write the bundle into `folder`, which is made if need be. The config that refers to it needs `AUTO_MAP`.

    Returns:
        `list[str]`: the names of the files.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = bundled_files()
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    return list(files)


def _main_weight_files(folder: str | os.PathLike, variant: str | None) -> list[Path]:
    infix = f".{variant}" if variant else ""
    return [Path(folder) / f"model{infix}.safetensors", Path(folder) / f"model.safetensors.index{infix}.json"]


def weight_file_states(folder: str | os.PathLike, variant: str | None = None) -> dict[Path, tuple[int, int]]:
    """Identity of the files that decide which weights a loader takes: inode and time of change, where they exist."""
    states = {}
    for path in _main_weight_files(folder, variant):
        if path.is_file():
            stat = path.stat()
            states[path] = (stat.st_ino, stat.st_mtime_ns)
    return states


def remove_stale_weights(folder: str | os.PathLike, variant: str | None, before: dict[Path, tuple[int, int]]) -> None:
    """
    Remove a single weight file or an index that a save has not replaced. transformers removes old shards only; it would
    then load an old `model.safetensors` beside a new index, and leave an old index beside a new file.
    """
    after = weight_file_states(folder, variant)
    if len(after) < 2:
        return
    for path, state in after.items():
        if before.get(path) == state:
            path.unlink()
