"""Reads result files for the page: sweeps, runs, comparisons, benchmarks, with their files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

from blockcompact_jax.budget import effective_budget_blocks, parse_budget
from blockcompact_jax.costs import costs_from_metrics
from blockcompact_jax.course import check_course
from blockcompact_jax.decision_log import is_decision_log, read_decision_log
from blockcompact_jax.errors import CompactionError
from blockcompact_jax.metrics import CompactionMetrics
from blockcompact_jax.provenance import sha256_of
from blockcompact_jax.strict_json import read_object
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
        courses: the course of each of these runs, None where it was not recorded.
        tables: benchmark tables.
        origin: machine, versions and settings, flat.
    """

    name: str
    sha256: str
    runs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    courses: list[dict[str, Any] | None] = field(default_factory=list[dict[str, Any] | None])
    tables: list[ResultTable] = field(default_factory=list[ResultTable])
    origin: dict[str, Any] = field(default_factory=dict[str, Any])


def read_results(path: Path) -> ResultSet:
    """Reads one file: `.jsonl` of a sweep or an engine's decisions, `.json` of a run or benchmark.

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
    if is_decision_log(path):
        facts, decisions = read_decision_log(path)
        table = ResultTable(name="decisions", rows=[flatten(row) for row in decisions])
        origin = flatten(facts)
        return ResultSet(name=path.name, sha256=sha256_of(path), tables=[table], origin=origin)
    if path.suffix == ".jsonl":
        rows = read_rows(path)
        runs = [_sweep_row(row, path.name) for row in rows]
        origin = flatten({"machine": rows[-1]["machine"]}) if rows else {}
        return ResultSet(
            name=path.name,
            sha256=sha256_of(path),
            runs=runs,
            courses=[course_of(row["report"] or {}, path.name) for row in rows],
            origin=origin,
        )
    document = read_object(path, argument="results")
    if is_report(document):
        return ResultSet(
            name=path.name,
            sha256=sha256_of(path),
            runs=[report_row(document, path.name)],
            courses=[course_of(document, path.name)],
        )
    if _is_comparison(document):
        return ResultSet(
            name=path.name,
            sha256=sha256_of(path),
            runs=[_comparison_row(document, path.name)],
            courses=[None],
            origin=flatten({"machine": document["machine"]}),
        )
    tables = {name: _objects(value) for name, value in document.items() if _objects(value)}
    if not tables:
        raise CompactionError(
            f"`results` is {str(path)!r}, which holds no list of results; give the file of a "
            "sweep, of `run --json`, of `compare --out` or of a benchmark."
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
        runs=[report_row(sample, path.name) for sample in samples],
        courses=[course_of(sample, path.name) for sample in samples],
        tables=[
            ResultTable(name=name, rows=[flatten(row) for row in rows])
            for name, rows in tables.items()
        ],
        origin=flatten(facts),
    )


def is_report(document: dict[str, Any]) -> bool:
    """Whether an object is the report of one decoding run."""
    return {"token_ids", "metrics", "seconds"} <= set(document)


def _is_comparison(document: dict[str, Any]) -> bool:
    """Whether an object is what `compare` found."""
    return {"paths", "numeric", "draft", "num_context_tokens"} <= set(document)


_COMPARED_OPTIONS = {
    **{name: name for name in ("model", "dtype", "budget", "policy", "block_tokens", "layout")},
    "attention": "attention",
    "seed": "seed",
    "draft_tokens": "num_draft_tokens",
    "reselect_every": "reselect_every_rounds",
}
"""Columns of a run, and what they are in the options of `compare`."""


def _comparison_row(document: dict[str, Any], name: str) -> dict[str, Any]:
    """One comparison as a row beside runs: its figures under `numeric` and `draft`."""
    options: dict[str, Any] = document["configuration"]
    context_tokens: int = document["num_context_tokens"]
    whole_blocks = context_tokens // options["block_tokens"]
    report = {
        **{column: options[option] for column, option in _COMPARED_OPTIONS.items()},
        "context_tokens": context_tokens,
        "budget_blocks": effective_budget_blocks(parse_budget(options["budget"]), whole_blocks),
        **{part: document[part] for part in ("numeric", "draft", "is_held")},
        "metrics": document["paths"]["source_only"],
    }
    return report_row(report, name)


def _objects(value: Any) -> list[dict[str, Any]]:
    items = cast(list[Any], value) if isinstance(value, list) else []
    return [cast(dict[str, Any], item) for item in items if isinstance(item, dict)]


def _sweep_row(row: dict[str, Any], name: str) -> dict[str, Any]:
    options: dict[str, Any] = row["configuration"]
    configuration = {_OPTION_NAMES.get(key, key): value for key, value in options.items()}
    measured: dict[str, Any] = {"file": name}
    if row["report"]:
        measured = report_row(row["report"], name)
    return {
        **configuration,
        **measured,
        "state": row["state"],
        "error": row["error"],
        "created": row["created"],
        "wall_seconds": row["wall_seconds"],
        "configuration_hash": row["configuration_hash"],
    }


def report_row(report: dict[str, Any], name: str) -> dict[str, Any]:
    """A run's report as a flat row; `name` is the file that it is from."""
    flat = flatten({key: value for key, value in report.items() if key not in ("text", "course")})
    return {**flat, **_cost_terms(report["metrics"]), **_budget_share(report), "file": name}


def course_of(report: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The course in a report, checked; None where none was recorded.

    Raises:
        CompactionError: if it is none, naming the file `name` that it is from.
    """
    try:
        return check_course(report["course"]) if "course" in report else None
    except CompactionError as error:
        raise CompactionError(f"`results` is {name!r}, and its {error}") from error


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
