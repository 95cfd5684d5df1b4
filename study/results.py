"""What the runs of studies gave: one row a run, in a SQLite file."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from .errors import StudyError


TABLE_FILE = "runs.sqlite"
# Columns to look at with any tool for SQLite; `result` holds all that was measured, as JSON.
_COLUMNS = {
    "key": "TEXT PRIMARY KEY",
    "study": "TEXT",
    "variant": "TEXT",
    "seed": "INTEGER",
    "learning_rate": "REAL",
    "steps": "INTEGER",
    "seconds": "REAL",
    "parameters": "INTEGER",
    "perplexity": "REAL",
    "f_attn": "REAL",
    "m_act": "REAL",
    "gate_mean": "REAL",
    "spikes": "INTEGER",
    "diverged": "INTEGER",
    "result": "TEXT NOT NULL",
}


def grouped(results: list[dict[str, Any]], *names: str) -> dict[tuple, list[dict[str, Any]]]:
    """Results that agree in these figures, in the order in which they come."""
    found: dict[tuple, list[dict[str, Any]]] = {}
    for result in results:
        found.setdefault(tuple(result[name] for name in names), []).append(result)
    return found


class ResultsTable:
    """
    The rows of finished runs. A row is written as a whole or not at all, by however many processes.

    Args:
        folder (`Path`): Of the study; the file is made with the first row.
    """

    def __init__(self, folder: Path):
        self.path = folder / TABLE_FILE

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with closing(sqlite3.connect(self.path, timeout=60)) as connection, connection:
                columns = ", ".join(f"{name} {kind}" for name, kind in _COLUMNS.items())
                connection.execute(f"CREATE TABLE IF NOT EXISTS runs ({columns})")
                yield connection
        except sqlite3.Error as error:
            raise StudyError(f"the table {self.path} cannot be used: {error}") from error

    def find(self, key: str) -> dict[str, Any] | None:
        """The result of a run, if it is finished."""
        if not self.path.is_file():
            return None
        with self._connection() as connection:
            row = connection.execute("SELECT result FROM runs WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def add(self, key: str, result: dict[str, Any]) -> None:
        """Write down a finished run."""
        values = {**result, "key": key, "result": json.dumps(result, allow_nan=False)}
        row = [values.get(name) for name in _COLUMNS]
        with self._connection() as connection:
            marks = ", ".join("?" * len(row))
            connection.execute(f"INSERT OR REPLACE INTO runs VALUES ({marks})", row)
