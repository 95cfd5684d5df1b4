"""A training run as data: one YAML file, and what the command line says over it."""

import dataclasses
import difflib
import re
import types
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from transformers import TrainingArguments

from .errors import RecipeError


@dataclass(frozen=True)
class DataSource:
    """
    Where records come from.

    Attributes:
        path: A file (`.jsonl`, `.json`, `.txt`, `.md`, `.parquet`), a folder or a pattern of such files, a folder that `datasets` saved, or a
            data set on the Hub.
        name: Configuration of a data set on the Hub.
        split: Which split of it.
        column: The column that holds text, or lists of token ids, which are taken as they are. Fine-tuning reads `messages`, or `prompt` and `completion`, where a record has them.
        weight: How often records are drawn from it beside the other sources.
    """

    path: str
    name: str | None = None
    split: str = "train"
    column: str = "text"
    weight: float = 1.0


@dataclass(frozen=True)
class ParameterGroup:
    """
    Parameters that are trained in a way of their own. Of several groups the first whose pattern fits counts.

    Attributes:
        pattern: Regular expression, looked for anywhere in a parameter's name; or `"gates"`: the parameters that hold the output gates,
            in any model that the diagnostics know.
        learning_rate: Factor on the learning rate.
        weight_decay: Factor on the weight decay.
        frozen: Whether they are not trained at all.
        from_step, until_step: The steps in which they are trained, the first counted as 0: from one on, up to before the other.
    """

    pattern: str
    learning_rate: float = 1.0
    weight_decay: float = 1.0
    frozen: bool = False
    from_step: int = 0
    until_step: int | None = None


@dataclass(frozen=True)
class Lora:
    """
    Attributes:
        r, alpha, dropout: Rank, scale and dropout of the adapters.
        target_modules: Modules that get them, by the end of their names.
        gates: Whether the gates are trained in full beside them.
        quantize: `"nf4"`: the frozen weights are held in four bits (QLoRA, needs bitsandbytes).
    """

    r: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: list[str] = field(default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"])
    gates: bool = True
    quantize: Literal["nf4"] | None = None


@dataclass(frozen=True)
class Diagnostics:
    """
    Attributes:
        every: Steps between two looks at sinks, activations and gates, on the first evaluation batch (of training, if there is none); 0: none.
        window, threshold: Of what counts as a loss spike, as in [`DiagnosticsCallback`].
    """

    every: int = 50
    window: int = 50
    threshold: float = 6.0


@dataclass(frozen=True)
class Distillation:
    """
    The loss of `objective: distill`: the divergence from a teacher, and what is added to it.

    Attributes:
        teacher: Folder or Hub id of the model whose predictions are learned: after a sink transfer, its source.
        teacher_dtype: Format that the teacher runs in; `"auto"`: its checkpoint's.
        temperature: What the logits of both are divided by.
        top_k: How many of the teacher's most likely tokens are compared one by one; all others are one outcome. By default every token.
        cross_entropy: Weight of the loss on the text itself.
        sink_share: Weight of the mean attention on first tokens.
        activations: Weight of what the layers' largest activations exceed `activation_threshold` by, as the logarithm of their ratio.
    """

    teacher: str
    teacher_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    temperature: float = 1.0
    top_k: int | None = None
    cross_entropy: float = 0.0
    sink_share: float = 0.0
    activations: float = 0.0
    activation_threshold: float = 300.0

    def __post_init__(self):
        for name in ("temperature", "activation_threshold"):
            if getattr(self, name) <= 0:
                raise RecipeError(f"`distillation.{name}` must be positive, got {getattr(self, name)}")
        for name in ("cross_entropy", "sink_share", "activations"):
            if getattr(self, name) < 0:
                raise RecipeError(
                    f"`distillation.{name}` must be 0 or more, got {getattr(self, name)}: it is a weight"
                )
        if self.top_k is not None and self.top_k < 1:
            raise RecipeError(f"`distillation.top_k` must be 1 or more, got {self.top_k}")


@dataclass(frozen=True)
class Recipe:
    """
    A training run. Keys that are not named here are those of transformers' `TrainingArguments` (`learning_rate`, `max_steps`,
    `per_device_train_batch_size`, `lr_scheduler_type`, `bf16`, `activation_checkpointing`, ...), for `objective: sft` those of TRL's `SFTConfig`.

    Attributes:
        model: Folder or Hub id of the checkpoint to train: converted, natively gated, or any causal language model.
        new_model: Instead of `model`: fields of `GatedAttentionConfig` for a new model, `preset` and `variant` among them.
        tokenizer: Folder or Hub id; by default the model's.
        trust_remote_code: Whether a model's own code is run.
        dtype: Format that the weights are held and trained in; `"auto"`: the checkpoint's.
        attn_implementation: `"eager"`, `"sdpa"`, `"flex_attention"`, `"flash_attention_2"`.
        objective: `"pretrain"`: the next token of text. `"sft"`: supervised fine-tuning, with TRL's SFTTrainer. `"distill"`: another
            model's predictions of the next token of text.
        train: `"all"` parameters, the `"gates"` alone, or `"lora"` adapters (and gates).
        data, evaluation_data: Where records come from.
        streaming: Whether records are read as they are needed, and not indexed first.
        shuffle: Whether records are drawn in random order (by `seed`); of a stream among 10,000 at a time.
        length: Tokens in a row.
        packing: Whether rows are filled with several documents, which do not see each other.
        long_records: What happens to a record that is longer than `length`. `"split"`: over several rows (text alone). `"truncate"`, `"drop"` or
            `"error"`. By default text is split, and a longer record to fine-tune on is an error.
        parameter_groups: See [`ParameterGroup`].
        activation_offloading: Whether what the backward pass needs waits in the CPU's memory (with TRL's own means; needs an accelerator).
        optimizer: `"adamw"`, or `"muon"` for the matrices of the layers and AdamW for the rest.
        lora: See [`Lora`].
        distillation: See [`Distillation`].
        diagnostics: See [`Diagnostics`].
        merge_adapters: Whether a model with the adapters merged is saved as well, in `merged`.
        arguments: The keys of Trainer.
    """

    output_dir: str
    model: str | None = None
    new_model: dict[str, Any] | None = None
    tokenizer: str | None = None
    trust_remote_code: bool = False
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    attn_implementation: str | None = None
    objective: Literal["pretrain", "sft", "distill"] = "pretrain"
    train: Literal["all", "gates", "lora"] = "all"
    data: list[DataSource] = field(default_factory=list)
    evaluation_data: list[DataSource] = field(default_factory=list)
    streaming: bool = False
    shuffle: bool = True
    length: int = 1024
    packing: bool = True
    long_records: Literal["split", "truncate", "drop", "error"] | None = None
    parameter_groups: list[ParameterGroup] = field(default_factory=list)
    activation_offloading: bool = False
    optimizer: Literal["adamw", "muon"] = "adamw"
    lora: Lora = field(default_factory=Lora)
    distillation: Distillation | None = None
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    merge_adapters: bool = True
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if (self.model is None) == (self.new_model is None):
            raise RecipeError("give either `model` or `new_model`: what is trained")
        if self.new_model is not None and self.tokenizer is None:
            raise RecipeError("`tokenizer` must be given with `new_model`: a new model has none of its own")
        if not self.data:
            raise RecipeError("`data` must name at least one source")
        if self.length < 2:
            raise RecipeError(f"`length` must be 2 or more, got {self.length}")
        if self.new_model is not None and self.train != "all":
            raise RecipeError(f"`train` must be 'all' for a `new_model`, got {self.train!r}: its weights are random")
        if self.train != "lora" and self.lora != Lora():
            raise RecipeError(f"`lora` must be left out with `train: {self.train}`: it is for 'lora'")
        if (self.objective == "distill") != (self.distillation is not None):
            raise RecipeError(
                f"`distillation` must be given with `objective: distill`, and only then; the objective is {self.objective!r}"
            )
        if self.objective == "sft" and self.long_records == "split":
            raise RecipeError(
                "`long_records` must be 'truncate', 'drop' or 'error' with `objective: sft`, got 'split'"
            )
        for where, sources in (("data", self.data), ("evaluation_data", self.evaluation_data)):
            for index, source in enumerate(sources):
                if source.weight <= 0:
                    raise RecipeError(f"`{where}.{index}.weight` must be positive, got {source.weight}")
        for index, group in enumerate(self.parameter_groups):
            _check_group(f"parameter_groups.{index}", group)

    @property
    def seed(self) -> int:
        """Trainer's."""
        return int(self.arguments.get("seed", 42))


def _check_group(where: str, group: ParameterGroup) -> None:
    try:
        re.compile(group.pattern)
    except re.error as error:
        raise RecipeError(f"`{where}.pattern` must be a regular expression, got {group.pattern!r}: {error}") from error
    for name in ("learning_rate", "weight_decay"):
        if getattr(group, name) < 0:
            raise RecipeError(f"`{where}.{name}` must be 0 or more, got {getattr(group, name)}: it is a factor")
    if group.from_step < 0 or (group.until_step is not None and group.until_step <= group.from_step):
        raise RecipeError(
            f"`{where}.until_step` must come after `from_step`, and neither be negative; got {group.from_step} and {group.until_step}"
        )


def argument_names(objective: str) -> set[str]:
    """Names of the keys that Trainer (or TRL's SFTTrainer) takes."""
    return {one.name for one in fields(arguments_class(objective)) if one.init}


def arguments_class(objective: str) -> type[TrainingArguments]:
    """The class of Trainer's arguments."""
    if objective != "sft":
        return TrainingArguments
    try:
        from trl import SFTConfig
    except ImportError as error:
        raise RecipeError("`objective: sft` needs TRL: pip install 'gated_attention[train]'") from error
    return SFTConfig


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """
    Read a recipe.

    Args:
        path (`str` or `Path`): The YAML file. Relative paths in it are relative to where the command runs.
        overrides (`Iterable[str]`): What stands over it: `--learning_rate`, `1e-5`, `--lora.r=8`, `--data.0.path`, `other.txt`, ...

    Raises:
        [`RecipeError`]: it cannot be read, or a key is unknown (the nearest is named) or has a value that makes no sense.
    """
    content = read_yaml(path, "recipe")
    for key, value in _pairs(list(overrides)):
        _set(content, key.split("."), value, key)
    return make_recipe(content)


def read_yaml(path: str | Path, kind: str) -> dict[str, Any]:
    """
    The keys and values of a YAML file.

    Args:
        path (`str` or `Path`): The file.
        kind (`str`): What it is, for errors.

    Raises:
        [`RecipeError`]: it cannot be read, or holds something else.
    """
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), RecipeLoader)
    except OSError as error:
        raise RecipeError(f"the {kind} {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"the {kind} {path} is no YAML: {error}") from error
    if not isinstance(content, dict):
        raise RecipeError(f"the {kind} {path} must hold keys and values, found a {type(content).__name__}")
    return content


def make_recipe(content: dict) -> Recipe:
    """A recipe from a dictionary of its keys. Errors as for [`load_recipe`]."""
    content = numbers_in(content)
    objective = content.get("objective", "pretrain")
    own = {one.name for one in fields(Recipe)} - {"arguments"}
    theirs = argument_names(objective) - {"output_dir"}
    for key in content:
        if key not in own | theirs:
            raise RecipeError(f"unknown key `{key}`{_nearest(key, own | theirs)}")
    arguments = {key: value for key, value in content.items() if key not in own}
    recipe = built(Recipe, {key: value for key, value in content.items() if key in own}, "")
    return Recipe(**{**{one.name: getattr(recipe, one.name) for one in fields(Recipe)}, "arguments": arguments})


def recipe_content(recipe: Recipe) -> dict[str, Any]:
    """The dictionary that [`make_recipe`] makes a recipe of."""
    content = dataclasses.asdict(recipe)
    return content | content.pop("arguments")


# What a training that goes on must have in common with what it goes on from: other rows or other parameters would follow
# on those before without a word.
_KEPT_ON_RESUME = (
    "objective",
    "train",
    "optimizer",
    "parameter_groups",
    "lora",
    "distillation",
    "data",
    "streaming",
    "shuffle",
    "length",
    "packing",
    "long_records",
    "seed",
    "data_seed",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
)


def check_same_training(recipe: Recipe, path: Path) -> None:
    """
    Compare a recipe with that of a checkpoint to go on from.

    Raises:
        [`RecipeError`]: a setting that must stay has changed.
    """
    before = yaml.load(path.read_text(encoding="utf-8"), RecipeLoader)
    now = yaml.load(yaml.safe_dump(recipe_content(recipe)), RecipeLoader)  # with what YAML makes of tuples and numbers
    changed = [name for name in _KEPT_ON_RESUME if before.get(name) != now.get(name)]
    if changed:
        said = "; ".join(f"`{name}` was {before.get(name)!r} and is {now.get(name)!r}" for name in changed)
        raise RecipeError(
            f"{path.parent} is of a training with other settings: {said}. Give those of before, begin anew in another output_dir, or remove "
            f"{path} to go on all the same"
        )


def _nearest(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(key), sorted(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(f'`{name}`' for name in near)}?" if near else ""


def _pairs(words: list[str]) -> Iterable[tuple[str, Any]]:
    """Keys and values of `--key value` and `--key=value`."""
    index = 0
    while index < len(words):
        word = words[index]
        if not word.startswith("--"):
            raise RecipeError(f"expected --key value after the recipe, got {word!r}")
        key, equals, text = word[2:].partition("=")
        index += 1
        if not equals:
            if index == len(words):
                raise RecipeError(f"--{key} needs a value")
            text = words[index]
            index += 1
        try:
            yield key.replace("-", "_"), yaml.load(text, RecipeLoader)
        except yaml.YAMLError:
            yield key.replace("-", "_"), text


def _set(content: Any, path: list[str], value: Any, key: str) -> None:
    for name, following in zip(path, [*path[1:], None], strict=True):
        place: Any = name
        if isinstance(content, list):
            if not name.isdigit() or int(name) > len(content):
                raise RecipeError(
                    f"--{key}: there is no entry {name} among {len(content)}, and the next new one is {len(content)}"
                )
            place = int(name)
            if place == len(content):
                content.append({})
        elif not isinstance(content, dict):
            raise RecipeError(f"--{key}: {name!r} is within a single value")
        if following is None:
            content[place] = value
            return
        if isinstance(content, dict):
            content.setdefault(place, {})
        content = content[place]


class RecipeLoader(yaml.SafeLoader):
    """YAML in which `no` is a word, as Trainer's `save_strategy: no` wants it; only true and false are what they say."""


RecipeLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
RecipeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


_FLOAT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


def numbers_in(value: Any) -> Any:
    """YAML takes 1e-5 for a word."""
    if isinstance(value, dict):
        return {key: numbers_in(one) for key, one in value.items()}
    if isinstance(value, list):
        return [numbers_in(one) for one in value]
    return float(value) if isinstance(value, str) and _FLOAT.fullmatch(value) else value


def built(kind: type, content: Any, where: str):
    """A dataclass from a dictionary, with its keys and types checked."""
    if not isinstance(content, dict):
        raise RecipeError(f"`{where}` must hold keys and values, got {content!r}")
    hints = get_type_hints(kind)
    known = {one.name: one for one in fields(kind)}
    prefix = f"{where}." if where else ""
    for key in content:
        if key not in known:
            raise RecipeError(f"unknown key `{prefix}{key}`{_nearest(key, known)}")
    for name, one in known.items():
        if name not in content and one.default is MISSING and one.default_factory is MISSING:
            raise RecipeError(f"`{prefix}{name}` must be given")
    return kind(**{key: _checked(value, hints[key], f"{prefix}{key}") for key, value in content.items()})


def _checked(value: Any, hint: Any, where: str) -> Any:
    origin = get_origin(hint)
    if is_dataclass(hint):
        return built(hint, value, where)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(hint):
            return None
        (inner,) = (one for one in get_args(hint) if one is not type(None))
        return _checked(value, inner, where)
    if origin is Literal:
        if value not in get_args(hint):
            raise RecipeError(f"`{where}` must be one of {', '.join(map(repr, get_args(hint)))}; got {value!r}")
        return value
    if origin is list:
        if not isinstance(value, list):
            raise RecipeError(f"`{where}` must be a list, got {value!r}")
        return [_checked(one, get_args(hint)[0], f"{where}.{index}") for index, one in enumerate(value)]
    if origin is dict:
        if not isinstance(value, dict):
            raise RecipeError(f"`{where}` must hold keys and values, got {value!r}")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise RecipeError(f"`{where}` must be of type {hint.__name__}, got {value!r}")
    return value
