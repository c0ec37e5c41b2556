"""Rows of JSONL and parquet files, each with its place for error messages."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Record:
    """One row of a file.

    Args:
        row: Its columns.
        where: File and line (or row) number, counted from 1.
    """

    row: dict[str, Any]
    where: str

    def __getitem__(self, column: str) -> Any:
        """Return a column.

        Raises:
            ValueError: The row lacks it.
        """
        return self.get(column)

    def get(self, column: str, option: str | None = None) -> Any:
        """Return a column, which an option of the data module names.

        Raises:
            ValueError: The row lacks it.
        """
        if self.row.get(column) is None:
            hint = "" if option is None else f"; name the one that is meant with {option}"
            raise ValueError(f"{self.where}: column {column!r} is missing; the row has {sorted(self.row)}{hint}.")
        return self.row[column]


def read_records(path: str) -> list[Record]:
    """Read a ``.parquet`` file, or any other file as JSON lines (empty lines are skipped).

    Raises:
        ValueError: The file does not exist, holds no row, or a line is no JSON object.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"data file {path!r} does not exist (working directory {str(Path.cwd())!r}).")
    records = _read_parquet(file) if file.suffix == ".parquet" else _read_jsonl(file)
    if not records:
        raise ValueError(f"data file {path!r} holds no rows; give one JSON object per line.")
    return records


def _read_jsonl(file: Path) -> list[Record]:
    records = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: not valid JSON ({error}).") from error
            if not isinstance(row, dict):
                raise ValueError(f'{where}: {type(row).__name__} instead of an object such as {{"prompt": "2+2="}}.')
            records.append(Record(row, where))
    return records


def _read_parquet(file: Path) -> list[Record]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(f"{file}: reading parquet needs pyarrow; `pip install pyarrow`, or use JSON lines.") from error
    rows = parquet.read_table(file).to_pylist()
    return [Record(row, f"{file}, row {number}") for number, row in enumerate(rows, start=1)]
