"""Builds the page: one HTML file with its data, style and program inside, and nothing outside."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, cast

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.monitor.checks import SCHEMA
from blockcompact_jax.monitor.contracts import parse_contracts
from blockcompact_jax.monitor.results import (
    ResultSet,
    columns_of,
    course_of,
    read_results,
    report_row,
)
from blockcompact_jax.provenance import (
    machine,
    now,
    package_versions,
    sha256_of,
    source_hashes,
)
from blockcompact_jax.strict_json import read_object

_MAX_EXACT = 2**53
"""JSON.parse gives float64, which holds every integer up to this one."""
_LEADING_COLUMNS = (
    "engine",
    "model",
    "dtype",
    "context_tokens",
    "budget",
    "policy",
    "retention",
    "ownership",
    "block_tokens",
    "draft_tokens",
    "reselect_every",
    "attention",
    "acceptance_rate",
    "tokens_per_round",
    "speedup_vs_full",
    "tokens_per_second",
    "tokens_identical_to_full",
    "state",
)


def build_page(
    *,
    document: Path | None,
    checks: Path | None,
    results: Sequence[Path],
    title: str = "blockcompact",
) -> str:
    """Builds the page from files alone.

    Args:
        document: the contracts. Each of them is on the board, with or without checks. None for a
            page without a board.
        checks: `contract_checks.json` of this document; None shows every contract as not run.
        results: files of sweeps, runs and benchmarks.
        title: the page's title.

    Returns:
        HTML that needs no network.

    Raises:
        CompactionError: if a file cannot be used, or `checks` was made from another document.
    """
    sets = [read_results(path) for path in results]
    sources = [*(path for path in (document, checks) if path is not None), *results]
    courses = [course for each in sets for course in each.courses]
    data = {
        **_frame(title),
        "sources": [{"name": path.name, "sha256": sha256_of(path)} for path in sources],
        "board": None if document is None else _board(document, checks),
        "is_one_run": False,
        "runs": _table([row for each in sets for row in each.runs], _LEADING_COLUMNS),
        "courses": {str(number): each for number, each in enumerate(courses) if each},
        "benchmarks": [_benchmark(each) for each in sets if each.tables],
    }
    return _render(title, data)


def build_run_page(report: dict[str, Any]) -> str:
    """Builds the page of one run: the views of a run, and nothing of contracts and sweeps.

    Args:
        report: as `run --json` prints it, with its course.

    Returns:
        HTML that needs no network.

    Raises:
        CompactionError: if the course is none.
    """
    course, title = course_of(report, "this run"), f"{report['model']}: one run"
    data = {
        **_frame(title),
        "sources": [{"name": name, "sha256": sha256} for name, sha256 in source_hashes().items()],
        "board": None,
        "is_one_run": True,
        "runs": _table([report_row(report, "this run")], _LEADING_COLUMNS),
        "courses": {} if course is None else {"0": course},
        "benchmarks": [],
    }
    return _render(title, data)


def _frame(title: str) -> dict[str, Any]:
    return {
        "title": title,
        "created": now(),
        "machine": machine(),
        "versions": package_versions(),
    }


def _board(document: Path, checks: Path | None) -> dict[str, Any]:
    """The checks, held against the document as it is now."""
    contracts = parse_contracts(document.read_text(encoding="utf-8"))
    if checks is None:
        rows = [{**vars(contract), **_UNCHECKED} for contract in contracts]
        return {"contracts": rows, "areas": [], "tests": {}, "created": None, "seed": None}
    found = _read_checks(checks)
    promised = {contract.number: contract.text for contract in contracts}
    checked = {contract["number"]: contract["text"] for contract in found["contracts"]}
    if promised != checked:
        names = {*promised, *checked}
        changed = sorted(name for name in names if promised.get(name) != checked.get(name))
        raise CompactionError(
            f"`checks` is {str(checks)!r}, made from another document: {', '.join(changed[:5])} "
            "differ. Run `blockcompact check` again."
        )
    return found


def _read_checks(path: Path) -> dict[str, Any]:
    """Whole checks: with everything that the page shows of them."""
    found = read_object(path, argument="checks")
    if found.get("schema") != SCHEMA:
        raise CompactionError(
            f"`checks` is {str(path)!r}, whose `schema` is {found.get('schema')!r}; expected "
            f"{SCHEMA!r}. Make it with `blockcompact check`."
        )
    _check_fields(found, _CHECKS_FIELDS, "", path)
    contracts: object = found["contracts"]
    if not isinstance(contracts, list):
        raise CompactionError(f"`checks` is {str(path)!r}, whose `contracts` is no list.")
    for contract in cast(list[Any], contracts):
        _check_fields(contract, _CONTRACT_FIELDS, " of a contract", path)
        _check_fields(found["tests"], contract["tests"], " of `tests`", path)
    return found


def _check_fields(found: Any, names: Iterable[str], where: str, path: Path) -> None:
    missing = [name for name in names if not isinstance(found, dict) or name not in found]
    if missing:
        raise CompactionError(
            f"`checks` is {str(path)!r}, which has no `{missing[0]}`{where}. Make it with "
            "`blockcompact check`."
        )


_CHECKS_FIELDS = ("contracts", "areas", "tests", "runs", "created", "seed", "changed_after_the_run")
_CONTRACT_FIELDS = (
    "number",
    "family",
    "family_title",
    "text",
    "state",
    "tests",
    "num_tests",
    "num_cases",
    "reasons",
)
_UNCHECKED: dict[str, Any] = {
    "state": "not run",
    "tests": [],
    "num_tests": {"passed": 0, "failed": 0, "not run": 0},
    "num_cases": {"passed": 0, "failed": 0, "skipped": 0},
    "reasons": ["no checks were given"],
}


def _table(rows: list[dict[str, Any]], first: Sequence[str] = ()) -> dict[str, Any]:
    """A table by columns' names once: ten thousand rows stay a few megabytes."""
    columns = columns_of(rows, first)
    return {"columns": columns, "rows": [[row.get(name) for name in columns] for row in rows]}


def _benchmark(results: ResultSet) -> dict[str, Any]:
    return {
        "file": results.name,
        "origin": results.origin,
        "tables": [{"name": table.name, **_table(table.rows)} for table in results.tables],
    }


def _as_shown(value: Any) -> Any:
    """Integers that the page's program would round, as text."""
    if isinstance(value, dict):
        parts = cast(dict[str, Any], value)
        return {name: _as_shown(part) for name, part in parts.items()}
    if isinstance(value, list):
        return [_as_shown(part) for part in cast(list[Any], value)]
    return str(value) if isinstance(value, int) and abs(value) > _MAX_EXACT else value


def _render(title: str, data: dict[str, Any]) -> str:
    folder = files("blockcompact_jax.monitor") / "page_files"
    style, *program = (
        (folder / name).read_text(encoding="utf-8")
        for name in ("page.css", "course.js", "table.js", "page.js")
    )
    # No `<` in the data: nothing in it can end the element it stands in.
    text = json.dumps(_as_shown(data), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    shell = Template((folder / "page.html").read_text(encoding="utf-8"))
    name = title.replace("&", "&amp;").replace("<", "&lt;")
    return shell.substitute(title=name, data=text, style=style, program="".join(program))
