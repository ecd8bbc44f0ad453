"""Results of a sweep: one JSON object a line, appended as each configuration ends."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from blockcompact_jax.errors import CompactionError

SCHEMA = "blockcompact sweep row, version 1"


class ResultFile:
    """A file of rows that survives interruption: a row is there whole or not at all.

    Attributes:
        path: the file.
        rows: its rows, in order of writing.
    """

    def __init__(self, path: Path) -> None:
        """Opens a file for more rows, and drops a last line that was never finished."""
        self.path = path
        if path.exists():
            _drop_torn_line(path)
        self.rows = read_rows(path) if path.exists() else []

    def append(self, row: dict[str, Any]) -> None:
        """Adds a row and forces it to disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.rows.append(row)

    def completed(self) -> set[str]:
        """Hashes of the configurations that are done."""
        return {row["configuration_hash"] for row in self.rows if row["state"] == "done"}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads all rows.

    Raises:
        CompactionError: if the file cannot be read, or a line is no row of a sweep.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise CompactionError(
            f"`results` is {str(path)!r}, which cannot be read ({error.strerror})."
        ) from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            rows.append(_parse(line, path, number))
    return rows


def latest_rows(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The last row of each configuration, by hash, where one is done that one."""
    latest: dict[str, dict[str, Any]] = {}
    for row in rows:
        known = latest.get(row["configuration_hash"])
        if known is None or known["state"] != "done" or row["state"] == "done":
            latest[row["configuration_hash"]] = row
    return latest


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested objects as one, names joined by dots; lists are left out."""
    flat: dict[str, Any] = {}
    for name, part in value.items():
        if isinstance(part, Mapping):
            flat |= flatten(cast(Mapping[str, Any], part), f"{prefix}{name}.")
        elif not isinstance(part, list):
            flat[f"{prefix}{name}"] = part
    return flat


def write_parquet(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Writes all rows flat, a column for every value. Needs pyarrow, the [sweep] extra."""
    pyarrow: Any = import_module("pyarrow")
    parquet: Any = import_module("pyarrow.parquet")
    flat = [flatten(row) for row in rows]
    names = dict.fromkeys(name for row in flat for name in row)
    columns = {name: [row.get(name) for row in flat] for name in names}
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path)


def _parse(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise CompactionError(
            f"`results` is {str(path)!r}, whose line {number} is no JSON ({error.msg}); a sweep "
            "that was interrupted drops an unfinished last line when it is resumed."
        ) from error
    if not isinstance(row, dict) or cast(dict[str, Any], row).get("schema") != SCHEMA:
        raise CompactionError(
            f"`results` is {str(path)!r}, whose line {number} is no row of a sweep; expected "
            f"`schema` {SCHEMA!r}."
        )
    return cast(dict[str, Any], row)


def _drop_torn_line(path: Path) -> None:
    with path.open("rb+") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
