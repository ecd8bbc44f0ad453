"""Reads result files for the page: sweeps, single runs and benchmarks, each row with its file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

from blockcompact_jax.costs import costs_from_metrics
from blockcompact_jax.errors import CompactionError
from blockcompact_jax.metrics import CompactionMetrics
from blockcompact_jax.provenance import sha256_of
from blockcompact_jax.strict_json import parse_json
from blockcompact_jax.sweep.store import flatten, read_rows

_OPTION_NAMES = {"context": "context_tokens"}
"""Options of a sweep whose measured value stands under another name in a report."""


@dataclass(frozen=True, kw_only=True)
class ResultTable:
    """A table of a benchmark, as it is.

    Attributes:
        name: its name in the file.
        rows: flat rows; lists (samples) are left out.
    """

    name: str
    rows: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class ResultSet:
    """What one file holds.

    Attributes:
        name: the file's name.
        sha256: its hash.
        runs: decoding runs, flat, one a row.
        tables: benchmark tables.
        origin: machine, versions and settings, flat.
    """

    name: str
    sha256: str
    runs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    tables: list[ResultTable] = field(default_factory=list[ResultTable])
    origin: dict[str, Any] = field(default_factory=dict[str, Any])


def read_results(path: Path) -> ResultSet:
    """Reads one file: `.jsonl` of a sweep, or `.json` of a run or a benchmark.

    Raises:
        CompactionError: if it is none of these, or a value in it cannot be used.
    """
    try:
        return _read_results(path)
    except (KeyError, TypeError, AttributeError) as error:
        what = f"has no {error}" if isinstance(error, KeyError) else f"cannot be used ({error})"
        raise CompactionError(
            f"`results` is {str(path)!r}, which {what}; expected the file of a sweep, of "
            "`run --json` or of a benchmark, as it was written."
        ) from error


def _read_results(path: Path) -> ResultSet:
    if path.suffix == ".jsonl":
        rows = read_rows(path)
        runs = [_sweep_row(row, path.name) for row in rows]
        origin = flatten({"machine": rows[-1]["machine"]}) if rows else {}
        return ResultSet(name=path.name, sha256=sha256_of(path), runs=runs, origin=origin)
    document = read_object(path, argument="results")
    if is_report(document):
        runs = [_report_row(document, path.name)]
        return ResultSet(name=path.name, sha256=sha256_of(path), runs=runs)
    tables = {name: _objects(value) for name, value in document.items() if _objects(value)}
    if not tables:
        raise CompactionError(
            f"`results` is {str(path)!r}, which holds no list of results; give the file of a "
            "sweep, of `run --json` or of a benchmark."
        )
    samples = [
        sample
        for rows in tables.values()
        for row in rows
        for sample in _objects(row.get("samples"))
        if is_report(sample)
    ]
    facts = {name: value for name, value in document.items() if name not in tables}
    return ResultSet(
        name=path.name,
        sha256=sha256_of(path),
        runs=[_report_row(sample, path.name) for sample in samples],
        tables=[
            ResultTable(name=name, rows=[flatten(row) for row in rows])
            for name, rows in tables.items()
        ],
        origin=flatten(facts),
    )


def read_object(path: Path, *, argument: str) -> dict[str, Any]:
    """Reads a file with one JSON object.

    Raises:
        CompactionError: if it cannot be read or holds something else.
    """
    try:
        document: Any = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CompactionError(
            f"`{argument}` is {str(path)!r}, which cannot be read ({error.strerror})."
        ) from error
    except ValueError as error:
        raise CompactionError(
            f"`{argument}` is {str(path)!r}, which is no JSON ({error})."
        ) from error
    if not isinstance(document, dict):
        raise CompactionError(f"`{argument}` is {str(path)!r}, which holds no JSON object.")
    return cast(dict[str, Any], document)


def is_report(document: dict[str, Any]) -> bool:
    """Whether an object is the report of one decoding run."""
    return {"token_ids", "metrics", "seconds"} <= set(document)


def _objects(value: Any) -> list[dict[str, Any]]:
    items = cast(list[Any], value) if isinstance(value, list) else []
    return [cast(dict[str, Any], item) for item in items if isinstance(item, dict)]


def _sweep_row(row: dict[str, Any], name: str) -> dict[str, Any]:
    options: dict[str, Any] = row["configuration"]
    configuration = {_OPTION_NAMES.get(key, key): value for key, value in options.items()}
    measured: dict[str, Any] = {"file": name}
    if row["report"]:
        measured = _report_row(row["report"], name)
    return {
        **configuration,
        **measured,
        "state": row["state"],
        "error": row["error"],
        "created": row["created"],
        "wall_seconds": row["wall_seconds"],
        "configuration_hash": row["configuration_hash"],
    }


def _report_row(report: dict[str, Any], name: str) -> dict[str, Any]:
    flat = flatten({key: value for key, value in report.items() if key != "text"})
    return {**flat, **_cost_terms(report["metrics"]), **_budget_share(report), "file": name}


def _cost_terms(metrics: dict[str, Any]) -> dict[str, float | None]:
    """The cost terms of all retentions of a run; an unmeasured one is None, never 0."""
    known = {each.name for each in fields(CompactionMetrics)}
    booked = CompactionMetrics(**{key: value for key, value in metrics.items() if key in known})
    costs = costs_from_metrics(booked)
    return {f"cost.{each.name}_us": getattr(costs, each.name).value_us for each in fields(costs)}


def _budget_share(report: dict[str, Any]) -> dict[str, float]:
    tokens = report.get("context_tokens") or 0
    blocks = report.get("budget_blocks")
    if not tokens or blocks is None:
        return {}
    return {"budget_share": min(1.0, blocks * report["block_tokens"] / tokens)}


def columns_of(rows: Iterable[dict[str, Any]], first: Iterable[str]) -> list[str]:
    """Names of all columns: those of `first` that occur, then the others in order."""
    found = dict.fromkeys(name for row in rows for name in row)
    leading = [name for name in first if name in found]
    return leading + [name for name in found if name not in leading]
