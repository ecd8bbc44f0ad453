"""Configurations of a sweep, from lists of values."""

from __future__ import annotations

import itertools
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, cast

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.provenance import sha256_of_text

Value: TypeAlias = str | int | float | bool
Configuration: TypeAlias = dict[str, Value]
Grid: TypeAlias = Mapping[str, Sequence[Value]]

_GRID_TABLE = "grid"


def configuration_hash(configuration: Configuration) -> str:
    """SHA-256 of a configuration, whatever the order of its options."""
    return sha256_of_text(json.dumps(configuration, sort_keys=True))


def expand(grids: Iterable[Grid]) -> list[Configuration]:
    """Every combination of the values of each grid, in order, each once.

    Raises:
        CompactionError: if an option has no value.
    """
    found: dict[str, Configuration] = {}
    for grid in grids:
        for name, values in grid.items():
            if not values:
                raise CompactionError(f"`{name}` has no value in the sweep; give at least one.")
        for combination in itertools.product(*grid.values()):
            configuration = dict(zip(grid, combination, strict=True))
            found.setdefault(configuration_hash(configuration), configuration)
    return list(found.values())


def read_grids(path: Path) -> list[Grid]:
    """Reads a TOML file: options with a value or a list, and `[[grid]]` tables on top of them.

    Without such a table the options of the file are the one grid. Dashes in names become
    underscores.

    Raises:
        CompactionError: if the file is missing, is no TOML, or holds anything else.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CompactionError(
            f"`file` is {str(path)!r}, which cannot be read ({error.strerror})."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CompactionError(f"`file` is {str(path)!r}, which is no TOML: {error}.") from error
    tables: object = document.pop(_GRID_TABLE, [{}])
    is_list = isinstance(tables, list) and all(
        isinstance(table, dict) for table in cast(list[object], tables)
    )
    if not is_list:
        raise CompactionError(f"`{_GRID_TABLE}` in {str(path)!r} is no table; write [[grid]].")
    common = _as_grid(document)
    return [{**common, **_as_grid(table)} for table in cast(list[dict[str, object]], tables)]


def parse_setting(text: str) -> tuple[str, list[Value]]:
    """Parses `name=value,value` of a command line; values stay text.

    Raises:
        CompactionError: if there is no name or no value.
    """
    name, equals, values = text.partition("=")
    found: list[Value] = [value.strip() for value in values.split(",") if value.strip()]
    if not equals or not name.strip() or not found:
        raise CompactionError(f"`set` is {text!r}; give option=value,value, as budget=10%,25%.")
    return name.strip().replace("-", "_"), found


def _as_grid(table: Mapping[str, object]) -> dict[str, list[Value]]:
    grid: dict[str, list[Value]] = {}
    for raw, value in table.items():
        values = cast(list[object], value) if isinstance(value, list) else [value]
        for each in values:
            if not isinstance(each, str | int | float | bool):
                raise CompactionError(
                    f"`{raw}` holds {each!r} in the sweep; give a text, a number, true or false, "
                    "or a list of them."
                )
        grid[raw.replace("-", "_")] = cast(list[Value], values)
    return grid
