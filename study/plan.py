"""A study as data: which small models are trained, on what, what is measured, and which tables come of it."""

import copy
import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from ..configuration import GATE_VARIANTS, GatedAttentionConfig
from ..modeling_gated import GatedAttentionForCausalLM
from ..training import RecipeError, make_recipe
from ..training.recipe import built, numbers_in, read_yaml
from .corpus import FORMAT, Corpus, CorpusOptions
from .errors import StudyError
from .figures_of_paper import FIGURES


# What a run is measured in, and how a table names and writes it.
MEASURES = {
    "parameters": ("parameters", "{:,.0f}"),
    "perplexity": ("perplexity", "{:.3f}"),
    "f_attn": ("F-Attn", "{:.3f}"),
    "largest_key_share": ("largest key", "{:.3f}"),
    "sink_rate": ("sink rate", "{:.1%}"),
    "m_act": ("M-Act", "{:,.1f}"),
    "gate_mean": ("mean gate", "{:.3f}"),
    "spikes": ("loss spikes", "{:.1f}"),
    "diverged": ("diverged", "{:.0%}"),
}

# What the study sets itself.
_OWN_KEYS = ("data", "evaluation_data", "output_dir", "model", "tokenizer", "seed")


def _check_own_keys(where: str, content: dict[str, Any], refused: tuple[str, ...] = _OWN_KEYS) -> None:
    for key in refused:
        if key in content:
            raise StudyError(f"`{where}.{key}` must be left out: the study sets it")


def _check_seeds(title: str, seeds: list[int]) -> None:
    if len(set(seeds)) < len(seeds):
        raise StudyError(f"`seeds` of {title!r} must be different ones, got {seeds}")


def _check_names(title: str, runs: list["RunOptions"]) -> None:
    names = [run.name for run in runs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise StudyError(f"two runs of {title!r} are called {twice!r}: give one of them a `label`")


@dataclass(frozen=True)
class RunOptions:
    """
    One line of a table, before seeds and learning rates.

    Attributes:
        variant: A name of `GATE_VARIANTS`.
        label: What the table calls it; by default the variant's name.
        equal_parameters: Whether the MLPs are made narrower until the model has no more parameters than the same one without gates.
        changes: What stands over the study's recipe, `new_model` included.
    """

    variant: str
    label: str | None = None
    equal_parameters: bool = False
    changes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if self.variant not in GATE_VARIANTS:
            raise StudyError(f"`variant` must be one of {', '.join(GATE_VARIANTS)}; got {self.variant!r}")
        _check_own_keys("changes", self.changes)

    @property
    def name(self) -> str:
        return self.label or self.variant + (", equal parameters" if self.equal_parameters else "")


@dataclass(frozen=True)
class TableOptions:
    """
    Attributes:
        title: What stands over it.
        runs: Its lines.
        seeds: Each line is trained with each of them; the table has mean and spread.
        learning_rates: Each line is trained with each of them; none: the recipe's.
        measures: Its columns, keys of `MEASURES`, and `accuracy` for the tasks.
        paper: Which of the paper's figures stand beside them: keys of `FIGURES`.
        note: What is to be said of it.
        least_f_attn: If the first line's F-Attn is lower, what the table says of sinks is void, and it says so.
    """

    title: str
    runs: list[RunOptions]
    seeds: list[int] = field(default_factory=lambda: [0])
    learning_rates: list[float] | None = None
    measures: list[str] = field(default_factory=lambda: ["parameters", "perplexity", "f_attn", "m_act", "gate_mean"])
    paper: str | None = None
    note: str | None = None
    least_f_attn: float | None = None

    def __post_init__(self):
        for name in ("runs", "seeds", "measures"):
            if not getattr(self, name):
                raise StudyError(f"`{name}` of the table {self.title!r} must not be empty")
        for measure in self.measures:
            if measure not in (*MEASURES, "accuracy"):
                raise StudyError(
                    f"`measures` of the table {self.title!r} has {measure!r}; there are {', '.join(MEASURES)}, accuracy"
                )
        _check_names(self.title, self.runs)
        _check_seeds(self.title, self.seeds)
        if self.paper is not None and self.paper not in FIGURES:
            raise StudyError(f"`paper` must be one of {', '.join(FIGURES)}; got {self.paper!r}")


@dataclass(frozen=True)
class ExtensionOptions:
    """
    Attributes:
        title: What stands over it.
        runs: The models: trained as a table's runs are, and shared with it.
        seeds: Each is trained with each of them.
        lengths: Tokens in the windows and rows of the tests; the first is the training's.
        factor: YaRN's.
        tune: What stands over the study's recipe for the short training at the greatest length: `max_steps`, `learning_rate`, ...
        transfer: Whether the sinks of a model without gates are transferred too, and the result taken through the same stages.
        transfer_tokens: Tokens to calibrate that on.
        least_accuracy: If no task is answered so well by a model at the training's length, what is said of it at others is void.
    """

    title: str
    runs: list[RunOptions]
    tune: dict[str, Any]
    seeds: list[int] = field(default_factory=lambda: [0])
    lengths: list[int] = field(default_factory=lambda: [256, 512, 1024])
    factor: float = 4.0
    transfer: bool = True
    transfer_tokens: int = 16384
    least_accuracy: float = 0.9

    def __post_init__(self):
        for name in ("runs", "seeds"):
            if not getattr(self, name):
                raise StudyError(f"`{name}` of the extension {self.title!r} must not be empty")
        _check_names(self.title, self.runs)
        _check_seeds(self.title, self.seeds)
        _check_own_keys("tune", self.tune, (*_OWN_KEYS, "new_model", "length"))
        if len(self.lengths) < 2 or sorted(set(self.lengths)) != self.lengths:
            raise StudyError(f"`lengths` must hold two or more, the shortest first, got {self.lengths}")
        if self.factor <= 1:
            raise StudyError(f"`factor` must be greater than 1, got {self.factor}")
        if self.transfer_tokens < 8 * self.lengths[0]:
            raise StudyError(
                f"`transfer_tokens` must hold 8 windows of {self.lengths[0]} tokens, got {self.transfer_tokens}"
            )
        if "max_steps" not in self.tune:
            raise StudyError("`tune.max_steps` must be given: how long is trained at the greatest length")


@dataclass(frozen=True)
class TestOptions:
    """
    Attributes:
        tokens: Held-out tokens that perplexity, attention and activations are measured on, in windows of the training's length.
        answers: Rows of each task that are asked.
    """

    __test__ = False  # pytest takes it for a test otherwise

    tokens: int = 32768
    answers: int = 200

    def __post_init__(self):
        for name in ("tokens", "answers"):
            if getattr(self, name) < 1:
                raise StudyError(f"`tests.{name}` must be 1 or more, got {getattr(self, name)}")


@dataclass(frozen=True)
class Study:
    """
    A study.

    Attributes:
        name: Of the study, and of its folder.
        about: What it asks, in a paragraph.
        recipe: Keys of a recipe that all runs share, without `data` and `output_dir`.
        tables: What is trained and shown.
        corpus: What it is trained on.
        extensions: What is tried at greater lengths.
        tests: What is measured.
        smoke: What stands over the study for a short trial of everything. Of its `recipe` and `tune` what a line's `changes`
            or an extension's `tune` have too stands over those; each line is trained with its first seed.
    """

    name: str
    about: str
    recipe: dict[str, Any]
    tables: list[TableOptions] = field(default_factory=list)
    extensions: list[ExtensionOptions] = field(default_factory=list)
    corpus: CorpusOptions = field(default_factory=CorpusOptions)
    tests: TestOptions = field(default_factory=TestOptions)
    smoke: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if not self.tables and not self.extensions:
            raise StudyError("`tables` or `extensions` must hold at least one: what the study trains")
        titles = [one.title for one in (*self.tables, *self.extensions)]
        if len(set(titles)) < len(titles):
            raise StudyError(f"each table and extension must have a `title` of its own, got {', '.join(titles)}")
        for one in self.extensions:
            if one.lengths[0] != self.length or not {one.lengths[0], one.lengths[-1]} <= set(self.corpus.lengths):
                raise StudyError(
                    f"`lengths` of {one.title!r} must begin with the recipe's `length` {self.length}, and the corpus must have rows of the first and the last "
                    f"(`corpus.lengths`); got {one.lengths} and {self.corpus.lengths}"
                )
        if "new_model" not in self.recipe:
            raise StudyError("`recipe.new_model` must be given: a study trains models from random weights")
        _check_own_keys("recipe", self.recipe)

    @property
    def length(self) -> int:
        """Tokens in a row of a training."""
        return self.recipe.get("length", 256)

    def runs(self, table: TableOptions | ExtensionOptions) -> Iterator["Run"]:
        """The runs of a table or an extension, in order: all seeds of a line's first learning rate, then of the next."""
        rates = getattr(table, "learning_rates", None) or [None]
        for options, rate, seed in itertools.product(table.runs, rates, table.seeds):
            yield Run(self, options, seed, rate)


@dataclass(frozen=True)
class Run:
    """One training: a line of a table with a seed and a learning rate."""

    study: Study
    options: RunOptions
    seed: int
    learning_rate: float | None

    def recipe(self, corpus: Corpus, output_dir: Path) -> dict[str, Any]:
        """Keys of the recipe."""
        content = _merged(self.study.recipe, self.options.changes)
        content["new_model"] = self._model(content["new_model"], corpus)
        length = content.setdefault("length", 256)
        if self.learning_rate is not None:
            content["learning_rate"] = self.learning_rate
        return content | {
            "tokenizer": str(corpus.tokenizer_folder),
            "data": corpus.data(length),
            "output_dir": str(output_dir),
            "seed": self.seed,
        }

    def key(self, corpus: Corpus) -> str:
        """What tells it apart from others: all that decides its figures, and nothing of where it lies."""
        content = self.recipe(corpus, Path())
        for name in ("tokenizer", "output_dir"):
            content.pop(name)
        content["data"] = [[Path(source["path"]).name, source["weight"]] for source in content["data"]]
        content |= {"corpus": corpus.manifest["sha256"], "tests": asdict(self.study.tests), "format": FORMAT}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def _model(self, fields: dict[str, Any], corpus: Corpus) -> dict[str, Any]:
        tokenizer = corpus.tokenizer
        fields = {
            **fields,
            "variant": self.options.variant,
            "vocab_size": len(tokenizer),
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        if self.options.equal_parameters:
            fields["intermediate_size"] = narrower(fields)
        return fields


def config_of(fields: dict[str, Any]) -> GatedAttentionConfig:
    """The config of a `new_model` with its `variant`."""
    fields = dict(fields)
    try:
        return GatedAttentionConfig.from_variant(fields.pop("variant"), **fields)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise StudyError(f"`recipe.new_model` describes no model: {error}") from error


def parameters_of(fields: dict[str, Any]) -> int:
    """How many parameters a model has, counted without making its weights."""
    with torch.device("meta"):
        return GatedAttentionForCausalLM(config_of(fields)).num_parameters()


def narrower(fields: dict[str, Any]) -> int:
    """The largest `intermediate_size` with which a model has no more parameters than the same one without gates (paper, section 3.1)."""
    width = config_of(fields).intermediate_size
    allowed = parameters_of(fields | {"variant": "baseline"})
    taken = parameters_of(fields)
    a_channel = taken - parameters_of(fields | {"intermediate_size": width - 1})
    if a_channel <= 0:
        raise StudyError(
            "`equal_parameters` needs dense layers, whose MLPs `intermediate_size` makes narrower: leave it out with experts in every layer"
        )
    less = -(-max(0, taken - allowed) // a_channel)
    if less >= width:
        raise StudyError(
            f"`equal_parameters` cannot hold for {fields['variant']}: its gates have more parameters than the MLPs of `intermediate_size` {width}"
        )
    return width - less


def load_study(path: str | Path, smoke: bool = False) -> Study:
    """
    Read a study.

    Args:
        path (`str` or `Path`): The YAML file.
        smoke (`bool`): Whether its short setting is taken.

    Raises:
        [`StudyError`]: it cannot be read, or a key is unknown (the nearest is named) or has a value that makes no sense.
    """
    try:
        content = read_yaml(path, "study")
    except RecipeError as error:
        raise StudyError(str(error)) from error
    return make_study(content, smoke)


def make_study(content: dict[str, Any], smoke: bool = False) -> Study:
    """A study from a dictionary of its keys. Errors as for [`load_study`]."""
    content = numbers_in(copy.deepcopy(content))
    try:
        if smoke:
            content = _shortened(content)
        study = built(Study, content, "")
        # Whether Trainer knows the rest of the keys.
        for table in (*study.tables, *study.extensions):
            for options in table.runs:
                recipe = _merged(study.recipe, options.changes) | getattr(table, "tune", {})
                make_recipe(recipe | {"output_dir": ".", "tokenizer": ".", "data": [{"path": "."}]})
    except RecipeError as error:
        raise StudyError(str(error)) from error
    return study


def _merged(content: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`content` with what stands over it; dictionaries are merged, everything else is replaced."""
    merged = dict(content)
    for key, value in over.items():
        before = merged.get(key)
        merged[key] = _merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return merged


def _shortened(content: dict[str, Any]) -> dict[str, Any]:
    """A study with its short setting over it."""
    built(Study, content, "")  # so that what is taken apart here is what it should be
    short = content.get("smoke")
    if not short:
        raise StudyError("the study has no `smoke`, and so no short setting")
    content = _merged(content, short)
    of_recipe = short.get("recipe", {})
    for one in (*content.get("tables", ()), *content.get("extensions", ())):
        one["seeds"] = one.get("seeds", [0])[:1]
        for line in one["runs"]:
            line["changes"] = _over_known(line.get("changes", {}), of_recipe)
        if "tune" in one:
            one["tune"] = _over_known(one["tune"], of_recipe)
    return content


def _over_known(content: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """What stands over the keys that are there already and say something."""
    return _merged(content, {key: value for key, value in over.items() if content.get(key) not in (None, {})})
