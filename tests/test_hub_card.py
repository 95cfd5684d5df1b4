"""The card says what the model is and no more; licences are kept; secrets and paths of this machine stay here."""

import json

import pytest
from conftest import edit_tensors, save_source, tiny_gated, tiny_input_ids, tiny_llama, tiny_tokenizer
from huggingface_hub import HfApi, ModelCard

from gated_attention import UploadError, convert_checkpoint, inspect_model
from gated_attention.diagnostics.command import write_report
from gated_attention.hub.push import prepare_upload
from gated_attention.hub.source import read_model_folder


REPO = "someone/tiny-gated"


@pytest.fixture
def gated(tmp_path):
    """A gated model with random gates, and a card."""
    folder = tmp_path / "gated"
    tiny_gated().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: en\n---\n# Tiny\n![p](images/plot.png)\n")
    (folder / "images").mkdir()
    (folder / "images" / "plot.png").write_bytes(b"\x89PNG not really")
    return folder


@pytest.fixture
def prepare(tmp_path):
    count = iter(range(10))

    def prepare(folder, **options):
        laid_out = tmp_path / f"upload-{next(count)}"
        laid_out.mkdir()
        return prepare_upload(read_model_folder(folder), laid_out, REPO, **options)

    return prepare


def card_of(upload) -> ModelCard:
    return ModelCard.load(upload.folder / "README.md")


def write_licence(folder, licence: str | None) -> None:
    (folder / "README.md").write_text("# Tiny\n" if licence is None else f"---\nlicense: {licence}\n---\n# Tiny\n")


def test_card_says_what_the_model_is(gated, prepare, tmp_path):
    card = card_of(prepare(gated, base_model="someone/tiny"))
    assert (card.data.license, card.data.language, card.data.base_model) == ("apache-2.0", "en", "someone/tiny")
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert {"gated-attention", "custom_code"} <= set(card.data.tags)
    assert f'AutoModelForCausalLM.from_pretrained("{REPO}", trust_remote_code=True)' in card.text
    for words in ("elementwise", "not the identity", "arXiv:2505.06708", "# Tiny"):
        assert words in card.text
    assert str(tmp_path) not in card.content


def test_card_of_an_uploaded_model_does_not_grow_when_it_is_uploaded_again(gated, prepare):
    first = card_of(prepare(gated)).content
    (gated / "README.md").write_text(first)
    assert card_of(prepare(gated)).content == first


def test_card_of_an_untrained_conversion_says_how_it_was_made(source, target, prepare):
    convert_checkpoint(source, target)
    upload = prepare(target)
    text = card_of(upload).content
    for words in ("exactly 1", "## How it was made", "at most 0 units in the last place"):
        assert words in text
    assert "base_model" not in text
    assert "gated_attention_conversion.json" in upload.files()


def test_card_of_a_trained_conversion_claims_no_comparison(source, target, prepare):
    convert_checkpoint(source, target, verify="headers")
    edit_tensors(
        target / "model-00002-of-00002.safetensors", lambda tensors: [one.add_(0.1) for one in tensors.values()]
    )
    upload = prepare(target)
    text = card_of(upload).text
    assert "Converted from a llama checkpoint" in text and "changed since" in text
    assert "units in the last place" not in text
    assert "gated_attention_conversion.json" not in upload.files()


def test_measured_figures_and_plots_are_shown(gated, prepare, tmp_path):
    inspection = inspect_model(tiny_gated(), [{"input_ids": tiny_input_ids()}], name=str(gated))
    out = tmp_path / "inspected"
    out.mkdir()
    inspection.save(out / "inspection.json")
    write_report([inspection], out)
    upload = prepare(gated, inspection=out)
    text = card_of(upload).text
    assert f"{inspection.f_attn:.4f}" in text and "gate score, mean" in text
    assert "![sheet](inspection/sheet.png)" in text
    assert {"inspection/inspection.json", "inspection/sheet.png"} <= upload.files().keys()
    assert json.loads((upload.folder / "inspection/inspection.json").read_text())["settings"]["model"] == REPO


def test_inspection_that_is_none_is_refused(gated, prepare, tmp_path):
    with pytest.raises(UploadError, match="gated-attention inspect"):
        prepare(gated, inspection=tmp_path)


def test_licence_with_a_name_of_its_own_is_kept(gated, prepare):
    (gated / "README.md").write_text(
        "---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE\ndatasets: [a/b]\nbase_model: x/y\n---\n# Card\n"
    )
    data = card_of(prepare(gated)).data
    assert (data.license, data.license_name, data.license_link, data.datasets) == ("other", "own", "LICENSE", ["a/b"])
    assert data.base_model is None  # that of the source, not the source


@pytest.mark.parametrize(
    ("source", "given", "found"),
    [
        ("cc-by-nc-4.0", None, "cc-by-nc-4.0"),
        ("apache-2.0", "mit", "mit"),
        (None, "mit", "mit"),
        ("llama3.2", "llama3.2", "llama3.2"),
    ],
    ids=["carried_over", "permissive_source", "given", "the_same"],
)
def test_licence_of_a_derived_model(gated, prepare, source, given, found):
    write_licence(gated, source)
    assert card_of(prepare(gated, base_model="no/where", license=given)).data.license == found


@pytest.mark.parametrize(
    ("source", "given", "words"),
    [
        ("cc-by-nc-nd-4.0", None, "forbids"),
        ("cc-by-nd-4.0", "mit", "forbids"),
        ("cc-by-nc-4.0", "apache-2.0", "cannot be given"),
        ("mit", "cc-by-nd-4.0", "forbids derivatives"),
        (None, None, "--license"),
    ],
    ids=["no_derivatives", "no_derivatives_given_another", "narrow_given_a_wide_one", "itself_forbidden", "unknown"],
)
def test_licence_that_cannot_be_is_refused(gated, prepare, source, given, words):
    write_licence(gated, source)
    with pytest.raises(UploadError, match=words):
        prepare(gated, base_model="no/where", license=given)


def test_own_model_may_forbid_derivatives(gated, prepare):
    write_licence(gated, "cc-by-nc-nd-4.0")
    assert card_of(prepare(gated)).data.license == "cc-by-nc-nd-4.0"


def test_licence_and_base_model_come_from_the_hub(hub_here, tmp_path, prepare):
    source = save_source(tmp_path / "source", tiny_llama())
    write_licence(source, "cc-by-nc-sa-4.0")
    HfApi().create_repo("someone/source")
    HfApi().upload_folder(repo_id="someone/source", folder_path=source)
    convert_checkpoint("someone/source", tmp_path / "converted", verify="headers")
    (tmp_path / "converted" / "README.md").unlink()
    data = card_of(prepare(tmp_path / "converted")).data
    assert (data.base_model, data.license) == ("someone/source", "cc-by-nc-sa-4.0")


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "copied"])
def test_base_model_of_a_card_counts_if_a_training_wrote_it(gated, prepare, trained):
    """A card that came along from a source names what the source was made of."""
    (gated / "README.md").write_text("---\nlicense: mit\nbase_model: some/model\n---\n# Tiny\n")
    if trained:
        (gated / "training_results.json").write_text("{}")
    assert card_of(prepare(gated)).data.base_model == ("some/model" if trained else None)


@pytest.mark.parametrize(
    "card",
    [b"---\n- a list\n---\n", b"---\na: [1\n---\n", "---\nlicense: mit\n---\n caf\u00e9".encode("latin-1")],
    ids=["list", "broken", "latin"],
)
def test_card_that_cannot_be_read_is_said(gated, prepare, card):
    (gated / "README.md").write_bytes(card)
    with pytest.raises(UploadError, match="cannot be read"):
        prepare(gated)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("NOTICE", "use hf_" + "a1" * 17, "looks like a token"),
        ("NOTICE", "-----BEGIN OPENSSH PRIVATE KEY-----", "private key"),
        ("tokenizer_config.json", '{"api": "the-very-token"}', "looks like a token"),
        ("README.md", "---\nlicense: mit\n---\ntrained from {folder}/base", "path of this machine"),
        ("README.md", "---\nlicense: mit\n---\n[base](https://huggingface.co/{elsewhere})", "path of this machine"),
        ("generation_config.json", '{{"from": "{folder}"}}', "path of this machine"),
    ],
    ids=["token", "key", "own_token", "path_in_card", "other_path_in_card", "path_in_config"],
)
def test_secret_in_a_text_is_refused_and_not_repeated(gated, prepare, monkeypatch, name, text, words):
    monkeypatch.setenv("HF_TOKEN", "the-very-token")
    (gated / name).write_text(
        text.replace("{folder}", str(gated))
        .replace("{elsewhere}", str(gated.parent))
        .replace("{{", "{")
        .replace("}}", "}")
    )
    with pytest.raises(UploadError, match=words) as caught:
        prepare(gated)
    assert name in str(caught.value)
    assert "the-very-token" not in str(caught.value) and "a1a1" not in str(caught.value)


def test_folder_that_a_tokenizer_noted_down_stays_here(gated, prepare):
    path = gated / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "name_or_path": str(gated)}))
    upload = prepare(gated)
    assert "name_or_path" not in json.loads((upload.folder / path.name).read_text())


def test_only_what_is_allowed_or_named_goes_along(gated, prepare):
    names = (".env", "notes.txt", "data/train.jsonl", "runs/events", "tokens.json", "holiday.png", "sub/LICENSE")
    for name in names:
        (gated / name).parent.mkdir(exist_ok=True)
        (gated / name).write_text("mine")
    assert not set(names) & prepare(gated).files().keys()
    named = prepare(gated, include=["notes.txt", "data/*"]).files().keys()
    assert set(names) & named == {"notes.txt", "data/train.jsonl"}


@pytest.mark.parametrize("name", [".env", "optimizer.pt", "training_args.bin", "sub/.env"])
def test_secrets_and_training_states_are_refused_even_by_name(gated, prepare, name):
    (gated / name).parent.mkdir(exist_ok=True)
    (gated / name).write_text("mine")
    with pytest.raises(UploadError, match="secrets or the state of a training"):
        prepare(gated, include=["*"])


def test_pattern_that_fits_nothing_is_said(gated, prepare):
    with pytest.raises(UploadError, match=r"no file .* fits \*\.csv"):
        prepare(gated, include=["*.csv"])
