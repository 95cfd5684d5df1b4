"""The model card: what the model is, how it was made, what was measured, how to load it."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from ..conversion.gated_config import gates_are_identity
from ..conversion.places import CERTIFICATE_FILE, EXPORT_REPORT_FILE
from ..conversion.sources import is_hub_id
from ..diagnostics.report import card_section
from ..diagnostics.results import Inspection
from .errors import UploadError
from .folder import UploadFolder
from .source import ModelFolder


# Between what is written here and the card that the folder had, which a later upload finds again by it.
PREVIOUS_CARD = "## Card of the model before it was uploaded here"
# Where the figures and what they are drawn from lie in the repository.
INSPECTION_FOLDER = "inspection"

CITATION = """\
```bibtex
@article{qiu2025gated,
  title={Gated Attention for Large Language Models: Non-linearity, Sparsity, and Attention-Sink-Free},
  author={Qiu, Zihan and Wang, Zekun and Zheng, Bo and Huang, Zeyu and Wen, Kaiyue and Yang, Songlin and Men, Rui and Yu, Le and Huang, Fei and Huang, Suozhi and Liu, Dayiheng and Zhou, Jingren and Lin, Junyang},
  journal={arXiv preprint arXiv:2505.06708},
  year={2025}
}
```"""

_POSITIONS = {
    "sdpa_output": "its attention output",
    "value": "its values",
    "key": "its keys",
    "query": "its queries",
    "dense_output": "the output of its attention layers",
}


@dataclass(frozen=True)
class CardSources:
    """
    What the card is written from, beside the model.

    Attributes:
        repo_id: Where the model will be.
        original: The folder that was given; another one than the uploaded model where that was exported from it.
        licence: The card's fields `license`, `license_name` and `license_link`.
        base_model: Hub id of what it was made of, if that is known.
        previous: The folder's card.
        exported: What [`export_checkpoint`] reported, of a model that was exported for this upload.
        inspections: Measured figures.
        figures: Names of the plots in `INSPECTION_FOLDER`.
    """

    repo_id: str
    original: ModelFolder
    licence: dict = field(default_factory=dict)
    base_model: str | None = None
    previous: ModelCard | None = None
    exported: str | None = None
    inspections: tuple[Inspection, ...] = ()
    figures: tuple[str, ...] = ()


def write_card(upload: UploadFolder, sources: CardSources) -> None:
    """Write README.md into the upload folder."""
    model = upload.model
    inherited = sources.previous.data.to_dict() if sources.previous else {}
    kept = {key: inherited[key] for key in ("language", "datasets", "extra_gated_prompt") if inherited.get(key)}
    relation = {"base_model_relation": "adapter" if model.kind == "adapter" else "finetune"}
    data = ModelCardData(
        **kept,
        **sources.licence,
        base_model=sources.base_model,
        **(relation if sources.base_model else {}),
        library_name="peft" if model.kind == "adapter" else "transformers",
        pipeline_tag=model.head.pipeline_tag,
        tags=["gated-attention"] + ["custom_code"] * (model.kind == "gated"),
    )
    parts = [f"# {sources.repo_id.split('/')[-1]}", _what_it_is(model), _how_to_load(model, sources)]
    parts += _how_it_was_made(model, sources)
    parts += _what_was_measured(sources)
    parts += ["## Citation", CITATION]
    previous = _previous_text(sources.previous)
    if previous:
        parts += [PREVIOUS_CARD, previous]
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n").save(upload.folder / "README.md")


def _what_it_is(model: ModelFolder) -> str:
    config = model.config.get_text_config()
    shape = f"{config.num_hidden_layers} layers, {config.num_attention_heads} heads"
    if not model.needs_code:
        what = f"`{(model.config.architectures or [model.config.model_type])[0]}` of transformers ({shape})"
        adapter = "A PEFT adapter of a " if model.kind == "adapter" else "A "
        return f"{adapter}{what}: it needs no code but transformers' own."
    positions = " and ".join(_POSITIONS[position] for position in config.gate_positions)
    gates = f"{config.gate_granularity} {config.gate_activation} gates on {positions}" if positions else "no gates"
    kind = "A PEFT adapter of a decoder" if model.kind == "adapter" else "A decoder"
    experts = f", {config.num_experts} experts" if config.num_experts else ""
    what = (
        f"{kind} with {gates} ([arXiv 2505.06708](https://arxiv.org/abs/2505.06708)): {shape}{experts}, `gate_scale` "
        f"{config.gate_scale:g}."
    )
    if model.kind == "adapter":
        return what
    if not positions:
        return f"{what} It is the control of a gated model."
    if gates_are_identity(model.checkpoint, config):
        return f"{what} Every gate is exactly 1, so the model computes what it computed before it had gates."
    return f"{what} The gates are not the identity: they take part in what the model computes."


def _how_to_load(model: ModelFolder, sources: CardSources) -> str:
    auto_class, repo_id = model.head.auto_class, sources.repo_id
    trust = ", trust_remote_code=True" if model.needs_code else ""
    if model.kind == "adapter":
        lines = [
            "from peft import PeftModel",
            f"from transformers import {auto_class}",
            f'model = {auto_class}.from_pretrained("{sources.base_model}"{trust})',
            f'model = PeftModel.from_pretrained(model, "{repo_id}")',
        ]
    else:
        lines = [
            f"from transformers import {auto_class}, AutoTokenizer",
            f'tokenizer = AutoTokenizer.from_pretrained("{repo_id}"{trust})',
            f'model = {auto_class}.from_pretrained("{repo_id}"{trust})',
        ]
    return "\n".join(["```python", *lines, "```"])


def _how_it_was_made(model: ModelFolder, sources: CardSources) -> list[str]:
    certificate = sources.original.certificate
    if certificate is None and sources.exported is None and model.kind != "adapter":
        return []
    parts = []
    if certificate is not None:
        parts.append(" ".join(_conversion(certificate, sources.original, holds_certificate=model.kind == "gated")))
    if sources.exported is not None:
        parts.append(
            f"Written as this stock class of transformers with `gated-attention export`; `{EXPORT_REPORT_FILE}` lists what is not equal bit "
            f"for bit:\n\n```\n{sources.exported}\n```"
        )
    if model.kind == "adapter":
        base = f"[{sources.base_model}](https://huggingface.co/{sources.base_model})"
        code = ", from where its code comes too" if model.needs_code else ""
        parts.append(f"The base model of this adapter is {base}{code}.")
    return ["## How it was made", *parts]


def _conversion(certificate: dict, model: ModelFolder, holds_certificate: bool) -> list[str]:
    """Sentences about the conversion that a model comes from."""
    source, comparison = certificate["source"], certificate["comparison"]
    name = (
        f"{source['id']} at revision `{source['revision']}`"
        if source["id"]
        else f"a {source['model_type']} checkpoint"
    )
    subject = "Its base model was converted" if model.kind == "adapter" else "Converted"
    lines = [
        f"{subject} from {name} with gated_attention {certificate['tool']['gated_attention']}. Gates: {certificate['gates']}."
    ]
    if not model.is_as_converted:
        # What was compared is not what is here.
        return [*lines, "Weights were changed since, as by training."]
    if comparison is not None:
        largest = max(layer["ulps"] for layer in comparison["layers"])
        conditions = " and ".join(
            words
            for words, holds in (
                ("with projections put together that the conversion took apart", comparison["rejoined"]),
                ("with its gates set aside, which change what it computes", comparison["gates_set_aside"]),
            )
            if holds
        )
        lines.append(
            f"Compared with its source in {comparison['dtype']}, {comparison['method']}, on texts of "
            f"{', '.join(map(str, comparison['lengths']))} random tokens{', ' + conditions if conditions else ''}: outputs of all "
            f"{len(comparison['layers'])} layers differ by at most {largest} units in the last place."
        )
    if holds_certificate:
        lines.append(
            f"`{CERTIFICATE_FILE}` has the hashes of the source's files and of these"
            + (", and the difference of each layer" if comparison is not None else "")
            + "; `gated-attention verify SOURCE FOLDER` checks them all again."
        )
    return lines


def _what_was_measured(sources: CardSources) -> list[str]:
    if not sources.inspections:
        return []
    figures = [f"![{Path(name).stem}]({INSPECTION_FOLDER}/{name})" for name in sources.figures]
    return [card_section(list(sources.inspections)).strip(), *figures]


def _previous_text(card: ModelCard | None) -> str:
    """The card that the folder had, without what an earlier upload wrote before it, and without PEFT's empty form."""
    text = "" if card is None else card.text.strip()
    if PREVIOUS_CARD in text:
        return text.partition(PREVIOUS_CARD)[2].strip()
    if CITATION in text or "[More Information Needed]" in text:
        return ""
    return text


def add_inspections(path: Path, upload: UploadFolder, repo_id: str) -> tuple[tuple[Inspection, ...], tuple[str, ...]]:
    """
    Put measured figures and their plots into the upload folder.

    Args:
        path: Folder that `gated-attention inspect --out` wrote, or one JSON file of it.
        upload: The upload folder.
        repo_id: Name of the model in the figures, where there is one only.

    Returns:
        The inspections, and the names of the plots that the card shows.

    Raises:
        `UploadError`: there is no inspection, or one cannot be read.
    """
    folder = path if path.is_dir() else path.parent
    files = sorted(folder.glob("inspection*.json")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise UploadError(
            f"inspection: {path} holds no inspection.json; write it with `gated-attention inspect MODEL --out DIR`"
        )
    inspections = []
    target = upload.folder / INSPECTION_FOLDER
    target.mkdir()
    for file in files:
        try:
            inspection = Inspection.load(file)
        except (ValueError, KeyError, TypeError) as error:
            raise UploadError(
                f"inspection: {file} is not what `gated-attention inspect` writes ({error!r})"
            ) from error
        name = inspection.settings.model
        if len(files) == 1:
            name = repo_id
        elif not is_hub_id(name):
            name = Path(name).name
        inspection = replace(inspection, settings=replace(inspection.settings, model=name))
        inspection.save(target / file.name)
        inspections.append(inspection)
    plots = {plot.name for plot in folder.glob("*.png")}
    shown = [name for name in sorted(plots) if name == "sheet.png" or name.startswith("attention_maps")] or sorted(
        plots
    )
    for name in shown:
        (target / name).symlink_to((folder / name).resolve())
    return tuple(inspections), tuple(shown)
