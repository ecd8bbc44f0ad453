"""Tables and words that a sweep prints."""

from collections.abc import Iterable, Mapping
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from .sweep_kinds import SweepKind, number

_MAX_SHOWN = 40
_NAMING_OPTIONS = ("engine", "model", "dtype", "trace", "tasks", "context", "policy", "budget")
"""What names a configuration of any kind, where it has them."""
_SAID_BY_ENGINE = ("retention", "ownership")
"""Options that follow from the engine where there is one."""


def name_of(configuration: dict[str, Any]) -> str:
    """What names a configuration of any kind, for people."""
    names = [name for name in _NAMING_OPTIONS if name in configuration]
    return ", ".join(str(configuration[name]) for name in names)


def print_rows(
    kind: SweepKind, rows: list[dict[str, Any]], configurations: list[dict[str, Any]]
) -> None:
    """Prints a table of the configurations that have a report, and what it says in words.

    Args:
        kind: of the sweep.
        rows: all rows of its file.
        configurations: those of this sweep, in order.
    """
    from blockcompact_jax.sweep.grid import configuration_hash
    from blockcompact_jax.sweep.store import latest_rows

    latest = latest_rows(rows)
    found = [latest.get(configuration_hash(configuration)) for configuration in configurations]
    shown = [row for row in found if row is not None and row["report"] is not None]
    if not shown:
        return
    varied = _varied(configurations)
    console = Console(highlight=False, markup=False)
    _print_shared(console, configurations[0], kind.shown_options, varied)
    table = Table(show_edge=False, pad_edge=False)
    for name in varied:
        table.add_column(name.replace("_", " "), overflow="fold")
    is_of_paths = kind.path_columns and not {"retention", "ownership"}.isdisjoint(varied)
    columns = kind.path_columns if is_of_paths else kind.columns
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    for row in shown[:_MAX_SHOWN]:
        table.add_row(
            *(str(row["configuration"].get(name, "")) for name in varied),
            *(text_of(row["report"]) for text_of in columns.values()),
        )
    console.print(table)
    if len(shown) > _MAX_SHOWN:
        typer.echo(f"and {len(shown) - _MAX_SHOWN} more; see the file")
    for line in kind.summary(shown, varied):
        console.print(line)


def _print_shared(
    console: Console, first: Mapping[str, Any], names: Iterable[str], varied: list[str]
) -> None:
    said = [f"{name} {first[name]}" for name in names if name in first and name not in varied]
    if said:
        console.print(f"in all: {', '.join(said)}")


def print_difference(difference: dict[str, Any]) -> None:
    """Prints what `compare_sweeps` found."""
    console = Console(highlight=False, markup=False)
    for name, (one, two) in difference["origins"].items():
        console.print(f"{name}: {one} → {two}")
    rows = difference["rows"]
    varied = _varied([row["configuration"] for row in rows])
    if rows:
        _print_shared(console, rows[0]["configuration"], _NAMING_OPTIONS, varied)
        console.print("speeds are ratios, second / first")
    table = Table(show_edge=False, pad_edge=False)
    for name in varied:
        table.add_column(name.replace("_", " "))
    for name in ("speedup", "tokens/s", "full tokens/s"):
        table.add_column(name, justify="right", min_width=len(name))
    table.add_column("differs in", overflow="fold", min_width=len("differs in"))
    for row in rows:
        ratios = [number(ratio, "{:.2f}") for ratio in row["ratios"].values()]
        changed = ", ".join(row["changed"])
        values = (str(row["configuration"].get(name, "")) for name in varied)
        table.add_row(*values, *ratios, changed)
    console.print(table)
    for side in ("first", "second"):
        for configuration in difference[f"only_{side}"]:
            console.print(f"only in the {side}: {name_of(configuration)}")
    num_timed = sum(not row["are_counts_compared"] for row in rows)
    if num_timed:
        console.print(
            f"{num_timed} with reselect_online: selections follow measured times, so rounds and "
            "metrics are not compared"
        )
    num_changed = sum(bool(row["changed"]) for row in difference["rows"])
    console.print(f"{len(difference['rows'])} in both, {num_changed} of them not the same")


def _varied(configurations: list[dict[str, Any]]) -> list[str]:
    """Options that have more than one value where they exist, in the order of configurations.

    What an engine's name says is left out.
    """
    values: dict[str, list[Any]] = {}
    for each in configurations:
        said = _SAID_BY_ENGINE if "engine" in each else ()
        for name in (name for name in each if name not in said):
            values.setdefault(name, []).append(each[name])
    return [name for name, found in values.items() if any(value != found[0] for value in found)]
