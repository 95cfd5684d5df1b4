"""What a training leaves behind beside the model: figures as JSON, curves, and a model card."""

import json
import logging
import math
from dataclasses import asdict
from pathlib import Path

import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError

from ..conversion.certificate import read_certificate
from ..conversion.errors import ConversionError
from ..conversion.places import TRAINING_RESULTS_FILE
from ..conversion.sources import is_hub_id
from .recipe import Recipe


logger = logging.getLogger(__name__)

RESULTS_FILE = TRAINING_RESULTS_FILE
CURVES_FILE = "training_curves.png"

_CURVES = [
    ("loss", ("loss", "eval_loss")),
    ("divergence from the teacher", ("divergence", "cross_entropy")),
    ("penalties", ("first_token_share", "activation_excess")),
    ("gradient norm", ("grad_norm", "diagnostics/grad_norm_gates")),
    ("learning rate", ("learning_rate",)),
    ("attention on the first token", ("diagnostics/f_attn", "diagnostics/largest_key_share")),
    ("largest activation", ("diagnostics/largest_activation",)),
    ("gates", ("diagnostics/gate_mean", "diagnostics/gate_closed_fraction")),
]


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def curves(history: list[dict]) -> dict[str, list[tuple[int, float]]]:
    """Of each figure that Trainer logged: steps and values."""
    found: dict[str, list[tuple[int, float]]] = {}
    for entry in history:
        for name, value in entry.items():
            if isinstance(value, (int, float)) and name not in ("step", "epoch"):
                found.setdefault(name, []).append((entry["step"], float(value)))
    return found


def draw_curves(history: list[dict], path: Path) -> bool:
    """Draw what was logged; whether there was something, and matplotlib to draw with."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    logged = curves(history)
    panels = [
        (title, [name for name in names if len(logged.get(name, ())) > (name != "eval_loss")])
        for title, names in _CURVES
    ]
    panels = [(title, names) for title, names in panels if names]
    if not panels:
        return False
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(4.2 * columns, 3 * lines), layout="constrained", squeeze=False
    )
    colors = ("#0072B2", "#D55E00")
    for axis, (title, names) in zip(axes.flat, panels, strict=False):
        for name, color in zip(names, colors, strict=False):
            steps, values = zip(*logged[name], strict=True)
            marker = "o" if len(steps) < 20 or name == "eval_loss" else None
            axis.plot(steps, values, color=color, marker=marker, markersize=3, label=name.removeprefix("diagnostics/"))
        values = [value for name in names for _, value in logged[name]]
        if min(values) > 0 and max(values) > 20 * min(values):
            axis.set_yscale("log")
        axis.set(title=title, xlabel="step")
        axis.xaxis.get_major_locator().set_params(integer=True)
        if len(names) > 1:
            axis.legend(frameon=False, fontsize="small")
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


def write_results(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


_TRAINED = {"all": "all parameters", "gates": "the gates alone", "lora": "adapters"}


def public_name(path: str) -> str:
    """A Hub id as it is; of a local path the last name, which says nothing of where it lay."""
    return path if is_hub_id(path) else Path(path).name


def _origin(model: str | None) -> dict:
    """
    What a card says of where the model that was trained comes from: its licence, and a model on the Hub. The base model that a folder's card
    names is not that model, but what it was made of.
    """
    if model is None:
        return {}
    origin = {"base_model": model} if is_hub_id(model) else {}
    try:
        certificate = read_certificate(Path(model))
    except ConversionError:
        certificate = None
    if certificate is not None and certificate["source"]["id"] is not None:
        origin["base_model"] = certificate["source"]["id"]
    card = Path(model) / "README.md"
    try:
        # Of a folder without a card nothing is asked of the Hub.
        asked = card if card.is_file() else model if is_hub_id(model) else None
        data = None if asked is None else ModelCard.load(asked).data
    except (OSError, ValueError, HfHubHTTPError) as error:
        logger.warning("the card of %s cannot be read, so the new one has no licence: %s", model, error)
        return origin
    found = {} if data is None else data.to_dict()
    kept = ("license", "license_name", "license_link", "language")
    return origin | {name: found[name] for name in kept if found.get(name) is not None}


# Where things lie, and who may write there.
_NOT_IN_THE_CARD = (
    "resume_from_checkpoint",
    "hub_token",
    "logging_dir",
    "deepspeed",
    "fsdp_config",
    "accelerator_config",
)


def _settings(recipe: Recipe) -> dict:
    """What a card says of a recipe."""
    shown = ("objective", "train", "length", "packing", "long_records", "streaming", "shuffle", "optimizer", "dtype")
    settings = {name: getattr(recipe, name) for name in shown if getattr(recipe, name) is not None}
    if recipe.train == "lora":
        settings["lora"] = asdict(recipe.lora)
    if recipe.distillation is not None:
        settings["distillation"] = asdict(recipe.distillation) | {"teacher": public_name(recipe.distillation.teacher)}
    settings |= {name: value for name, value in recipe.arguments.items() if name not in _NOT_IN_THE_CARD}
    return {**settings, "seed": recipe.seed}


def write_card(
    folder: Path,
    recipe: Recipe,
    content: dict,
    *,
    title: str | None = None,
    trained_from: str | None = None,
    data: list[str] | None = None,
) -> None:
    """
    A model card with the data, the settings and the figures.

    Args:
        folder (`Path`): The model's; it gets `README.md`.
        recipe ([`Recipe`]): What was done.
        content (`dict`): What `RESULTS_FILE` holds.
        title, trained_from, data: What to call the model, what it was made of, and the texts, where the recipe's paths say nothing to a reader.
    """
    if data is None:
        data = [f"{public_name(source.path)}, weight {source.weight:g}" for source in recipe.data]
        data += [f"to evaluate on: {public_name(source.path)}" for source in recipe.evaluation_data]
    if trained_from is None:
        trained_from = public_name(recipe.model) if recipe.model else "random weights"
    adapters = recipe.train == "lora" and (folder / "adapter_config.json").is_file()
    metadata = ModelCardData(
        library_name="peft" if adapters else "transformers",
        pipeline_tag="text-generation",
        tags=["gated-attention"],
        **_origin(recipe.model),
    )
    final = content["final"]
    figures = [f"| {name} | {value:.4g} |" for name, value in final.items() if isinstance(value, (int, float))]
    lines = [
        f"# {title or folder.resolve().name}",
        "",
        f"Trained from {trained_from} with gated_attention: {recipe.objective}, "
        f"{_TRAINED[recipe.train]}, {content['steps']} steps.",
        "",
        "## Data",
        "",
        *(f"- {one}" for one in data),
        "",
        "## Figures",
        "",
        "| | |",
        "|---|---|",
        *figures,
        "",
        *([f"![What was logged]({CURVES_FILE})", ""] if content["drawn"] else []),
        "## Settings",
        "",
        "```",
        content["groups"],
        "```",
        "",
        "```yaml",
        yaml.safe_dump(_settings(recipe), sort_keys=True).strip(),
        "```",
        "",
    ]
    ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n" + "\n".join(lines)).save(folder / "README.md")
