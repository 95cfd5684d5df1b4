"""Decides what a conversion will write, before anything is written."""

import os
import shutil
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal, get_args

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from ..configuration import GatedAttentionConfig
from ..modeling_gated import GatedAttentionForCausalLM
from ..modeling_gated.bundle import AUTO_MAP, bundled_files
from .checkpoint import FLOAT_FORMATS, INDEX_FILE, Checkpoint, TensorHeader, read_checkpoint
from .errors import ConversionError
from .families import FAMILIES, Family


Granularity = Literal["headwise", "elementwise"]
Link = Literal["copy", "hard"]
Verify = Literal["headers", "logits"]

# 2 * sigmoid(0) = 1 in every float format: zero weights are the identity, at the gate's steepest point.
IDENTITY_SCALE = 2.0

# Not copied: weights in any format, other frameworks' folders, and what belongs to the place a folder lay in.
_LEFT_BEHIND_FILES = (
    "config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.onnx",
    "*.onnx_data",
    "*.py",
)
_LEFT_BEHIND_FOLDERS = (".git", ".cache", "__pycache__", "original", "onnx")


@dataclass(frozen=True)
class ConversionOptions:
    """
    How a checkpoint is converted; one object serves the function and the command line.

    Attributes:
        granularity: `"headwise"` (one gate a head) or `"elementwise"` (one gate a channel of a head).
        gate_bias: Whether the gates get a bias, zero at first.
        link: `"copy"` copies the source's shards; `"hard"` links them, which costs no space and needs the same file system.
        verify: `"headers"` audits names, shapes and formats; `"logits"` also loads both models and compares logits.
        overwrite: Whether a model folder at the target is replaced, as a whole.
    """

    granularity: Granularity = "headwise"
    gate_bias: bool = False
    link: Link = "copy"
    verify: Verify = "logits"
    overwrite: bool = False

    def __post_init__(self):
        for name, kind in (("granularity", Granularity), ("link", Link), ("verify", Verify)):
            if getattr(self, name) not in get_args(kind):
                raise ConversionError(f"`{name}` must be one of {get_args(kind)}, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class ConversionPlan:
    """
    What a conversion writes.

    Attributes:
        source: The checkpoint as it was read.
        family: The source's family.
        target: Folder to make.
        options: The options.
        config: The gated model's config.
        shard_names: The source's shard name and the name it gets.
        gate_shard: Name of the new shard.
        gates: Name and header of each gate tensor, in file order; all zero.
        copied: The source's other files to copy, as paths relative to the folder.
        notes: What the user should know.
    """

    source: Checkpoint
    family: Family
    target: Path
    options: ConversionOptions
    config: GatedAttentionConfig
    shard_names: dict[str, str]
    gate_shard: str
    gates: dict[str, TensorHeader]
    copied: tuple[Path, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def weight_map(self) -> dict[str, str]:
        """Tensor name to file, for the new index."""
        placed = {name: self.shard_names[shard.name] for shard in self.source.shards for name in shard.tensors}
        return dict(sorted({**placed, **dict.fromkeys(self.gates, self.gate_shard)}.items()))

    @property
    def gate_bytes(self) -> int:
        return sum(header.nbytes for header in self.gates.values())

    @property
    def source_bytes(self) -> int:
        return sum(shard.size for shard in self.source.shards)

    @property
    def bytes_to_write(self) -> int:
        """Bytes that reach the disk: new and copied files, without those that are linked."""
        other = sum((self.source.folder / path).stat().st_size for path in self.copied)
        code = sum(len(content.encode()) for content in bundled_files().values())
        return self.gate_bytes + other + code + (self.source_bytes if self.options.link == "copy" else 0)

    def describe(self) -> str:
        """The plan as text, for `--dry-run` and for the log."""
        heads, layers = self.config.num_attention_heads, self.config.num_hidden_layers
        verb = "copy" if self.options.link == "copy" else "hard-link"
        lines = [
            f"source   {self.source.folder} ({self.family.architecture}, {len(self.source.tensors)} tensors, "
            f"{format_bytes(self.source_bytes)})",
            f"target   {self.target} ({self.config.architectures[0]})",
            f"gates    {self.options.granularity}, {layers} layers x {heads} heads, {len(self.gates)} tensors, "
            f"{format_bytes(self.gate_bytes)}, all zero with gate_scale {IDENTITY_SCALE:g}: the gate is exactly 1",
        ]
        lines += [f"{verb:<9}{old} -> {new}" for old, new in self.shard_names.items()]
        lines += [f"new      {self.gate_shard}, {INDEX_FILE}, config.json, {', '.join(bundled_files())}"]
        if self.copied:
            lines.append(f"copy     {', '.join(str(path) for path in self.copied)}")
        lines.append(
            f"writes   {format_bytes(self.bytes_to_write)}, {format_bytes(free_bytes(self.target))} free at the target"
        )
        lines += [f"note     {note}" for note in self.notes]
        return "\n".join(lines)


def format_bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def free_bytes(target: Path) -> int:
    """Bytes free on the file system where `target` will be made."""
    folder = target.parent
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def plan_conversion(source: Path, target: Path, options: ConversionOptions) -> ConversionPlan:
    """
    Read the source's headers and decide what to write.

    Raises:
        `ConversionError`: the source cannot be converted, or the target is in the way.
    """
    _check_places(source, target, options)
    checkpoint = read_checkpoint(source)
    family = _family_of(checkpoint)
    config = _gated_config(checkpoint, family, options)
    with torch.device("meta"):
        shapes = {n: tuple(tensor.shape) for n, tensor in GatedAttentionForCausalLM(config).state_dict().items()}
    _audit_names_and_shapes(checkpoint, config, shapes)

    count = len(checkpoint.shards) + 1
    shard_names = {
        shard.name: f"model-{number:05d}-of-{count:05d}.safetensors"
        for number, shard in enumerate(checkpoint.shards, start=1)
    }
    copied, notes = _other_files(checkpoint)
    return ConversionPlan(
        source=checkpoint,
        family=family,
        target=target,
        options=options,
        config=config,
        shard_names=shard_names,
        gate_shard=f"model-{count:05d}-of-{count:05d}.safetensors",
        gates=_gate_headers(checkpoint, shapes),
        copied=copied,
        notes=notes,
    )


def _check_places(source: Path, target: Path, options: ConversionOptions) -> None:
    real_source, real_target = source.resolve(), target.resolve()
    if real_target == real_source:
        raise ConversionError(f"the target {target} is the source itself; give a new folder")
    if real_source in real_target.parents or real_target in real_source.parents:
        raise ConversionError(
            f"the source {source} and the target {target} lie within each other; give a folder apart"
        )
    if target.is_symlink():
        raise ConversionError(f"the target {target} is a symbolic link; give the folder itself, or remove the link")
    if not target.exists():
        return
    if not target.is_dir():
        raise ConversionError(f"the target {target} is a file; give a folder that does not exist yet")
    if not any(target.iterdir()):
        return
    if not options.overwrite:
        raise ConversionError(
            f"the target folder {target} is not empty; remove it, give another one, or replace it as a whole with "
            "--overwrite (overwrite=True)"
        )
    if not (target / "config.json").is_file():
        raise ConversionError(f"the target folder {target} holds no model (no config.json), so it is not overwritten")


def _family_of(checkpoint: Checkpoint) -> Family:
    config, where = checkpoint.config, checkpoint.folder / "config.json"
    model_type = config.get("model_type")
    gated = sorted(name for name in checkpoint.tensors if ".g_proj." in name)
    if model_type == GatedAttentionConfig.model_type or gated:
        what = f"model_type {model_type!r}" + (f", tensor {gated[0]}" if gated else "")
        raise ConversionError(f"{checkpoint.folder} already has gates ({what}); converting it again would gate twice")
    if model_type not in FAMILIES:
        raise ConversionError(
            f"{where}: model_type {model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[model_type]
    architectures = config.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        raise ConversionError(
            f"{where}: architectures must be [{family.architecture!r}], got {architectures}; save the causal language model"
        )
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown method")
        raise ConversionError(
            f"{where}: the checkpoint is quantised ({method}); dequantise it first (load it in transformers, "
            "`model.dequantize()`, `save_pretrained`), or convert the original"
        )
    return family


def _gated_config(checkpoint: Checkpoint, family: Family, options: ConversionOptions) -> GatedAttentionConfig:
    try:
        source_config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ConversionError(f"transformers cannot read {checkpoint.folder / 'config.json'}: {error}") from error
    fields = {ours: getattr(source_config, theirs) for ours, theirs in family.config_fields.items()}
    extra = {}
    if getattr(source_config, "tokenizer_class", None):
        # AutoTokenizer reads it where tokenizer_config.json does not name a class.
        extra["tokenizer_class"] = source_config.tokenizer_class
    return GatedAttentionConfig(
        **fields,
        **family.fixed_fields,
        **extra,
        gate_granularity=options.granularity,
        gate_bias=options.gate_bias,
        gate_scale=IDENTITY_SCALE,
        dtype=_dtype_as_loaded(checkpoint, source_config),
        architectures=[GatedAttentionForCausalLM.__name__],
        auto_map=dict(AUTO_MAP),
    )


def _dtype_as_loaded(checkpoint: Checkpoint, source_config) -> torch.dtype:
    """
    The dtype transformers loads the source in. Without a dtype in its config that is the format of the first tensor of the
    first file; written down, it no longer depends on what the new files list first.
    """
    if source_config.dtype is not None:
        return source_config.dtype
    first = checkpoint.shards[0].tensors
    return FLOAT_FORMATS[first[min(first)].dtype]


def _gate_headers(checkpoint: Checkpoint, shapes: dict[str, tuple[int, ...]]) -> dict[str, TensorHeader]:
    """Names, shapes and formats of the gates; each takes the format of its layer's `q_proj`."""
    gates = {}
    for name, shape in shapes.items():
        if ".g_proj." in name:
            query = checkpoint.tensors.get(f"{name.split('.g_proj.')[0]}.q_proj.weight")
            dtype = query.dtype if query is not None else "F32"  # a missing q_proj is refused by the audit
            gates[name] = TensorHeader(dtype, shape)
    # Wide formats first keeps every tensor aligned to its own width.
    return dict(sorted(gates.items(), key=lambda item: (-FLOAT_FORMATS[item[1].dtype].itemsize, item[0])))


def _audit_names_and_shapes(checkpoint: Checkpoint, config, expected: dict[str, tuple[int, ...]]) -> None:
    found = {name: header.shape for name, header in checkpoint.tensors.items()}
    missing = {name for name in expected.keys() - found.keys() if ".g_proj." not in name}
    if config.tie_word_embeddings:
        missing -= set(GatedAttentionForCausalLM._tied_weights_keys)
    unexpected = {name for name in found.keys() - expected.keys() if not is_ignored_on_load(name)}
    problems = [f"{name} is missing" for name in sorted(missing)]
    if "lm_head.weight" in missing:
        problems.append(
            "the config says that the head is not tied (tie_word_embeddings false), so it cannot be taken from the embedding"
        )
    problems += [f"{name} has no place in a {checkpoint.config['model_type']} model" for name in sorted(unexpected)]
    problems += [
        f"{name} has shape {found[name]}, the config implies {expected[name]}"
        for name in sorted(expected.keys() & found.keys())
        if found[name] != expected[name]
    ]
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise ConversionError(
            f"the tensors in {checkpoint.folder} are not those that its config.json describes: {shown}. Fetch it again"
        )


def is_ignored_on_load(name: str) -> bool:
    """Whether a loader passes over a tensor: old checkpoints hold each layer's RoPE frequencies, which are computed now."""
    return name.endswith("rotary_emb.inv_freq")


def _other_files(checkpoint: Checkpoint) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    copied, code = [], []
    for root, folders, names in os.walk(checkpoint.folder):
        folders[:] = sorted(name for name in folders if name not in _LEFT_BEHIND_FOLDERS)
        for name in sorted(names):
            path = (Path(root) / name).relative_to(checkpoint.folder)
            if name.endswith(".py"):
                code.append(path.as_posix())
            elif not any(fnmatch(name, pattern) for pattern in _LEFT_BEHIND_FILES):
                copied.append(path)
    notes = []
    if code or "auto_map" in checkpoint.config:
        notes.append(
            f"the source brings custom code ({', '.join(code) or 'auto_map'}), which is left behind: it is read as the "
            f"stock {checkpoint.config['model_type']} of transformers {transformers.__version__}"
        )
    ignored = [name for name in checkpoint.tensors if is_ignored_on_load(name)]
    if ignored:
        notes.append(f"{len(ignored)} tensors that loaders pass over stay in the shards ({ignored[0]}, ...)")
    return tuple(copied), tuple(notes)
