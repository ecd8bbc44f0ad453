"""A file of decisions, one JSON object a line, that engines write and the monitor reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.provenance import origin
from blockcompact_jax.strict_json import parse_json

SCHEMA = "blockcompact decision log, version 1"


class DecisionLog:
    """Appends decisions to a file; each is on disk when `add` returns.

    The first line says who decides, machine and versions. What finds a file begins it anew; several
    that begin it before any of them decides share it.
    """

    def __init__(self, path: Path, **facts: Any) -> None:
        """Begins the file.

        Args:
            path: the file; its folder exists.
            **facts: of the engine, as plain JSON values.

        Raises:
            CompactionError: if it cannot be written.
        """
        self.path = path
        self._num_decisions = 0
        self._write({"schema": SCHEMA, **facts, **origin()}, mode="w")

    def add(self, decision: dict[str, Any]) -> None:
        """Appends one decision, numbered from 0."""
        self._write({"number": self._num_decisions, **decision}, mode="a")
        self._num_decisions += 1

    def _write(self, line: dict[str, Any], *, mode: str) -> None:
        text = json.dumps(line, allow_nan=False) + "\n"
        try:
            with self.path.open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise CompactionError(
                f"`decision_log` is {str(self.path)!r}, which cannot be written "
                f"({error.strerror}); give a file in a folder that exists."
            ) from error


def is_decision_log(path: Path) -> bool:
    """Whether a file begins as one; a file that cannot be read does not."""
    try:
        with path.open("rb") as file:
            return file.read(len(_START)) == _START
    except OSError:
        return False


_START = json.dumps({"schema": SCHEMA})[:-1].encode()


def read_decision_log(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Reads what `DecisionLog` wrote; a last line that was torn is left out.

    Returns:
        The first line without its schema, and the decisions.

    Raises:
        CompactionError: if the file is no decision log.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    whole = lines[:-1]  # what follows the last line's end was torn, or is empty
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(whole, start=1):
        try:
            row: Any = parse_json(line)
        except ValueError as error:
            raise CompactionError(
                f"`results` is {str(path)!r}, whose line {number} is no JSON ({error})."
            ) from error
        if not isinstance(row, dict):
            raise CompactionError(f"`results` is {str(path)!r}, whose line {number} is no object.")
        rows.append(cast(dict[str, Any], row))
    if not rows or rows[0].get("schema") != SCHEMA:
        raise CompactionError(
            f"`results` is {str(path)!r}, which does not begin with `schema` {SCHEMA!r}."
        )
    return {name: value for name, value in rows[0].items() if name != "schema"}, rows[1:]
