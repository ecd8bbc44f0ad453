"""Results of a sweep: one JSON object a line, appended as each configuration ends."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Any, cast

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.strict_json import parse_json

SCHEMA = "blockcompact sweep row, version 1"
_ROW_START = json.dumps({"schema": SCHEMA})[:-1].encode()
"""How a row begins on disk, whole or torn."""
_JSON = {str: "a text", dict: "an object", int: "a number", float: "a number", NoneType: "null"}
_FIELDS: dict[str, tuple[type, ...]] = {
    "configuration_hash": (str,),
    "configuration": (dict,),
    "state": (str,),
    "error": (str, NoneType),
    "created": (str,),
    "wall_seconds": (float, int),
    "report": (dict, NoneType),
    "machine": (dict,),
    "versions": (dict,),
    "sources": (dict,),
}
"""What every row has, and as what."""


class ResultFile:
    """A file of rows that survives interruption: a row is there whole or not at all.

    Attributes:
        path: the file.
        rows: its rows, in order of writing.
    """

    def __init__(self, path: Path) -> None:
        """Opens a file for more rows, and drops a last line that was never finished.

        Raises:
            CompactionError: if the file is none of a sweep; it is left as it is.
        """
        if path.suffix != ".jsonl":
            raise CompactionError(
                f"`out` is {str(path)!r}; give a file whose name ends in .jsonl, one row a line."
            )
        self.path = path
        self.rows = _resume(path) if path.exists() else []

    def append(self, row: dict[str, Any]) -> None:
        """Adds a row and forces it to disk.

        Raises:
            CompactionError: if it cannot be written.
        """
        self._append(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        self.rows.append(row)

    def check_appendable(self) -> None:
        """Tries to open the file, so that no configuration runs for nothing; leaves none behind.

        Raises:
            CompactionError: if it cannot be written.
        """
        is_new = not self.path.exists()
        self._append("")
        if is_new:
            self.path.unlink()

    def _append(self, text: str) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise CompactionError(
                f"`out` is {str(self.path)!r}, which cannot be written "
                f"({error.strerror or error}); give another path."
            ) from error

    def completed(self) -> set[str]:
        """Hashes of the configurations that are done."""
        return {row["configuration_hash"] for row in self.rows if row["state"] == "done"}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads all rows.

    Raises:
        CompactionError: if the file cannot be read, or a line is no row of a sweep.
    """
    return _rows_in(_content(path), path)


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


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CompactionError(
            f"`results` is {str(path)!r}, which cannot be read ({error.strerror})."
        ) from error


def _rows_in(content: bytes, path: Path) -> list[dict[str, Any]]:
    """Rows of whole lines. Only a line feed ends one: a text in a row may hold other breaks."""
    lines = enumerate(content.split(b"\n"), start=1)
    return [_parse(line, path, number) for number, line in lines if line.strip()]


def _resume(path: Path) -> list[dict[str, Any]]:
    """Whole rows of a file; a torn one after them is cut off, anything else is left alone."""
    content = _content(path)
    end = content.rfind(b"\n") + 1
    whole, torn = content[:end], content[end:]
    rows = _rows_in(whole, path)
    if not torn:
        return rows
    if not rows and not (torn.startswith(_ROW_START) or _ROW_START.startswith(torn)):
        raise CompactionError(
            f"`out` is {str(path)!r}, which holds something else than rows of a sweep; give "
            "another file."
        )
    os.truncate(path, end)
    return rows


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        row: Any = parse_json(line.decode("utf-8"))
    except ValueError as error:
        raise CompactionError(
            f"`results` is {str(path)!r}, whose line {number} is no JSON ({error}); a sweep "
            "that was interrupted drops an unfinished last line when it is resumed."
        ) from error
    if not isinstance(row, dict) or cast(dict[str, Any], row).get("schema") != SCHEMA:
        raise CompactionError(
            f"`results` is {str(path)!r}, whose line {number} is no row of a sweep; expected "
            f"`schema` {SCHEMA!r}."
        )
    return _check_fields(cast(dict[str, Any], row), path, number)


def _check_fields(row: dict[str, Any], path: Path, number: int) -> dict[str, Any]:
    for name, kinds in _FIELDS.items():
        if name not in row or not isinstance(row[name], kinds):
            found = repr(row[name])[:60] if name in row else "absent"
            expected = " or ".join(dict.fromkeys(_JSON[kind] for kind in kinds))
            raise CompactionError(
                f"`results` is {str(path)!r}, where `{name}` of line {number} is {found}; expected "
                f"{expected}. Remove the line, and the sweep runs its configuration again."
            )
    return row
