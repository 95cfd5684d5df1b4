"""The text that a model is inspected on: a file, a data set, or the help pages that every Python ships."""

from pathlib import Path

from .errors import InspectionError


# Characters read from a data set for each token asked for; English has about four a token.
_CHARACTERS_A_TOKEN = 8


def read_text(path: Path) -> str:
    """
    A UTF-8 text file.

    Raises:
        [`InspectionError`]: there is no such file, or it is not text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InspectionError(f"the text {path} cannot be read as UTF-8: {error}") from error


def default_text() -> tuple[str, str]:
    """Python's own help pages (English, technical, PSF licence), and their name."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)), "Python's help pages"


def dataset_text(name: str, tokens: int, split: str = "test", column: str = "text") -> str:
    """
    Text of a data set of the Hub, or of a folder with text, JSON Lines or parquet files; streamed, as much as is needed.

    Raises:
        [`InspectionError`]: `datasets` is not installed, or the data set has no such split or column.
    """
    try:
        import datasets
    except ImportError as error:
        raise InspectionError("--dataset needs the package datasets: pip install 'gated-attention[data]'") from error
    try:
        rows = datasets.load_dataset(name, split=split, streaming=True)
        parts, length = [], 0
        for row in rows:
            if column not in row:
                raise InspectionError(
                    f"the data set {name} has no column {column!r}; it has {', '.join(row)} (--column)"
                )
            parts.append(row[column])
            length += len(row[column])
            if length > tokens * _CHARACTERS_A_TOKEN:
                break
    except (ValueError, OSError) as error:
        if isinstance(error, InspectionError):
            raise
        raise InspectionError(f"the data set {name} (split {split}) cannot be read: {error}") from error
    return "\n\n".join(parts)
