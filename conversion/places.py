"""Where a conversion may read and write, and which of a source's other files go along."""

import json
import os
from fnmatch import fnmatch
from pathlib import Path

from ..modeling_gated.bundle import BUNDLED_MODULES
from .checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from .errors import ConversionError
from .staging import check_parent, partial_folder, replaced_folder


# Name of the certificate that a conversion leaves in its result.
CERTIFICATE_FILE = "gated_attention_conversion.json"

# Name of the report that an export leaves in its result.
EXPORT_REPORT_FILE = "gated_attention_export.json"

# Name of the figures that a training leaves beside its model; its card tells where the model comes from.
TRAINING_RESULTS_FILE = "training_results.json"

# Weights that are not read: in other formats than safetensors.
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack")

# Not copied: weights in any format, other frameworks' folders, and what belongs to the place a folder lay in.
_WEIGHTS = (
    "*.safetensors",
    "*.safetensors.index*.json",
    "*.bin.index*.json",
    "*.onnx",
    "*.onnx_data",
    *OTHER_WEIGHTS,
)
BUNDLED_FILES = {f"{name}.py" for name in BUNDLED_MODULES.values()}
_LEFT_BEHIND_FOLDERS = (".git", ".cache", "__pycache__", "original", "onnx")


def check_apart(source: Path, target: Path) -> None:
    """
    Refuse a source and a target that overlap, and a source that lies where the target is staged. To be asked before anything is
    made, restored or cleared there.

    Raises:
        `ConversionError`: they do.
    """
    real_source, real_target = source.resolve(), target.resolve()
    if real_target == real_source:
        raise ConversionError(f"the target {target} is the source itself; give a new folder")
    if real_source in real_target.parents or real_target in real_source.parents:
        raise ConversionError(
            f"the source {source} and the target {target} lie within each other; give a folder apart"
        )
    for reserved in (partial_folder(real_target), replaced_folder(real_target)):
        if reserved in (real_source, *real_source.parents):
            raise ConversionError(
                f"the source {source} has the name of a folder that is used while {target} is made; rename it"
            )


def check_places(source: Path, target: Path, overwrite: bool) -> None:
    """
    Refuse what [`check_apart`] and [`check_target`] refuse.

    Raises:
        `ConversionError`: they do.
    """
    check_apart(source, target)
    check_target(target, overwrite)


def check_target(target: Path, overwrite: bool) -> None:
    """
    Refuse a target that is in the way of something.

    Raises:
        `ConversionError`: the target is a link, a file, or a folder that may not be replaced.
    """
    if target.is_symlink():
        raise ConversionError(f"the target {target} is a symbolic link; give the folder itself, or remove the link")
    check_parent(target)
    if not target.exists():
        return
    if not target.is_dir():
        raise ConversionError(f"the target {target} is a file; give a folder that does not exist yet")
    if not any(target.iterdir()):
        return
    if not overwrite:
        raise ConversionError(
            f"the target folder {target} is not empty; remove it, give another one, or replace it as a whole with "
            "--overwrite (overwrite=True)"
        )
    _refuse_to_lose(target)


def _refuse_to_lose(target: Path) -> None:
    """Overwriting removes a folder: it has to be that of a model, and of nothing else."""
    try:
        model_type = json.loads((target / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        model_type = None
    weights = [path for pattern in ("*.safetensors", "*.bin") for path in target.glob(pattern)]
    if model_type is None or not weights:
        raise ConversionError(
            f"the target folder {target} does not look like a model (a config.json with a model_type, and weights), so it "
            "is not overwritten; remove it yourself or give another folder"
        )
    if (target / ".git").exists():
        raise ConversionError(f"the target folder {target} is a git repository, so it is not overwritten")


def other_files(checkpoint: Checkpoint, own_code: bool = False) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """
    The files to copy beside the weights, relative to the source's folder, and notes on what is left behind.

    Args:
        checkpoint: The source.
        own_code: Whether this package's code in it is left behind without a word.

    Raises:
        `ConversionError`: a file is a link to nothing.
    """
    needed_code = tokenizer_code(checkpoint.folder)
    used = {shard.name for shard in checkpoint.shards} | {INDEX_FILE, checkpoint.index_name}
    copied, code, unused = [], [], []
    for root, folders, names in os.walk(checkpoint.folder):
        links = [name for name in folders if (Path(root) / name).is_symlink()]
        unused += [f"{name}/ (a link)" for name in links]
        folders[:] = sorted(name for name in folders if name not in _LEFT_BEHIND_FOLDERS and name not in links)
        for name in sorted(names):
            path = Path(root) / name
            relative = path.relative_to(checkpoint.folder)
            if not path.exists():
                raise ConversionError(f"{path} is a link to nothing; complete the download")
            # A certificate is of what it came with, and so is a report.
            reports = (Path("config.json"), Path(CERTIFICATE_FILE), Path(EXPORT_REPORT_FILE))
            if relative in reports or not path.is_file():
                continue
            if any(fnmatch(name, pattern) for pattern in _WEIGHTS):
                if relative.as_posix() not in used:
                    unused.append(relative.as_posix())
            elif name.endswith(".py") and relative.as_posix() not in needed_code:
                if not (own_code and relative.as_posix() in BUNDLED_FILES):
                    code.append(relative.as_posix())
            else:
                copied.append(relative)
    return tuple(copied), tuple(_notes(checkpoint, code, unused, own_code))


def _notes(checkpoint: Checkpoint, code: list[str], unused: list[str], own_code: bool) -> list[str]:
    notes = []
    if own_code and code:
        notes.append(f"left behind: {', '.join(code)}, which the stock class has no use for")
    elif code or ("auto_map" in checkpoint.config and not own_code):
        notes.append(
            f"the source brings custom code ({', '.join(code) or 'auto_map'}), which is left behind: it is read as the stock "
            f"{checkpoint.config['model_type']} of transformers"
        )
    if unused:
        why = f", since transformers loads {SINGLE_FILE}" if (checkpoint.folder / SINGLE_FILE).is_file() else ""
        notes.append(f"left behind{why}: {', '.join(unused)}")
    return notes


def tokenizer_code(folder: Path) -> set[str]:
    """Names of the modules that the tokenizer's own `auto_map` needs: without them the tokenizer would not load."""
    try:
        auto_map = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("auto_map") or {}
    except (OSError, ValueError, AttributeError):
        return set()
    references = auto_map.get("AutoTokenizer", []) if isinstance(auto_map, dict) else auto_map
    references = [references] if isinstance(references, str) else references
    waiting = [f"{reference.rsplit('.', 1)[0]}.py" for reference in references if reference and "--" not in reference]
    needed: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in needed or not (folder / name).is_file():
            continue
        needed.add(name)
        waiting += [f"{module}.py" for module in _relative_imports(folder / name)]
    return needed


def _relative_imports(path: Path) -> list[str]:
    from transformers.dynamic_module_utils import get_relative_imports

    return get_relative_imports(path)
