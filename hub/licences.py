"""The licence of what is uploaded: the source's, carried over; refused where the source forbids what is done."""

from pathlib import Path

from huggingface_hub import ModelCard
from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError

from .errors import UploadError


# Licences (the Hub's ids) under which a derived work may have another licence.
PERMISSIVE = frozenset(
    [
        "apache-2.0",
        "mit",
        "bsd",
        "bsd-2-clause",
        "bsd-3-clause",
        "bsd-3-clause-clear",
        "isc",
        "zlib",
        "unlicense",
        "cc0-1.0",
        "cc-by-2.0",
        "cc-by-2.5",
        "cc-by-3.0",
        "cc-by-4.0",
        "pddl",
        "wtfpl",
        "afl-3.0",
        "artistic-2.0",
        "ecl-2.0",
        "ms-pl",
        "ncsa",
        "postgresql",
        "bsl-1.0",
        "openrail",
        "cdla-permissive-1.0",
        "cdla-permissive-2.0",
    ]
)
_FIELDS = ("license", "license_name", "license_link")


def read_card(path: Path) -> ModelCard | None:
    """
    A folder's card, if it has one.

    Raises:
        `UploadError`: it cannot be read.
    """
    if not path.is_file():
        return None
    try:
        return ModelCard.load(path)
    except Exception as error:  # YAML has many ways to be broken
        raise UploadError(
            f"the card {path} cannot be read ({type(error).__name__}: {error}); mend or remove it"
        ) from error


def card_on_hub(repo_id: str) -> ModelCard | None:
    """The card of a repository; `None` if it has none, or none that can be read now."""
    try:
        return ModelCard.load(repo_id)
    except (HTTPError, LocalEntryNotFoundError, OSError, ValueError):
        return None


def licence_fields(card: ModelCard | None) -> dict[str, str]:
    """What a card's metadata says of the licence."""
    data = {} if card is None else card.data.to_dict()
    return {name: data[name] for name in _FIELDS if data.get(name)}


def forbids_derivatives(licence: str | list) -> bool:
    """Whether a licence is one of Creative Commons' without derivatives (`cc-by-nd-4.0`, `cc-by-nc-nd-4.0`)."""
    return any("nd" in str(one).lower().split("-") for one in ([licence] if isinstance(licence, str) else licence))


def carried_licence(found: dict, given: str | None, is_derived: bool) -> dict:
    """
    The licence for the card.

    Args:
        found: What the source's card says ([`licence_fields`]).
        given: What the user says.
        is_derived: Whether the model was made from somebody's: converted, trained on or adapted.

    Raises:
        `UploadError`: nobody says; the source forbids derivatives; or what is given is not what the source asks for.
    """
    source = found.get("license")
    if is_derived and source and forbids_derivatives(source):
        raise UploadError(
            f"license: the source's card says {source!r}, which forbids to publish what was made of it; ask its authors, or keep the model "
            "to yourself"
        )
    if given is None:
        if source is None:
            raise UploadError(
                "license: neither the folder's card nor that of the base model names one; give it with --license (an id of the Hub's, such "
                "as apache-2.0)"
            )
        return found
    if is_derived and forbids_derivatives(given):
        raise UploadError(
            f"license: {given!r} forbids derivatives, and this model is one; give the licence of its source"
        )
    if is_derived and source and given != source and source not in PERMISSIVE:
        raise UploadError(
            f"license: the source's card says {source!r}, so the model cannot be given {given!r}; leave --license out to carry it over"
        )
    return found if given == source else {"license": given}
