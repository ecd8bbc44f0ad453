"""Builds the page: one HTML file with its data, style and program inside, and nothing outside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.monitor.checks import SCHEMA
from blockcompact_jax.monitor.contracts import parse_contracts
from blockcompact_jax.monitor.results import ResultSet, columns_of, read_object, read_results
from blockcompact_jax.provenance import machine, now, package_versions, sha256_of

_LEADING_COLUMNS = (
    "model",
    "dtype",
    "context_tokens",
    "budget",
    "policy",
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
    *, document: Path, checks: Path | None, results: Sequence[Path], title: str = "blockcompact"
) -> str:
    """Builds the page from files alone.

    Args:
        document: the contracts. Each of them is on the board, with or without checks.
        checks: `contract_checks.json`; None shows every contract as not run.
        results: files of sweeps, runs and benchmarks.
        title: the page's title.

    Returns:
        HTML that needs no network.

    Raises:
        CompactionError: if a file cannot be used, or `checks` was made from another document.
    """
    sets = [read_results(path) for path in results]
    sources = [document, *([] if checks is None else [checks]), *results]
    data = {
        "title": title,
        "created": now(),
        "machine": machine(),
        "versions": package_versions(),
        "sources": [{"name": path.name, "sha256": sha256_of(path)} for path in sources],
        "board": _board(document, checks),
        "runs": _table([row for each in sets for row in each.runs], _LEADING_COLUMNS),
        "benchmarks": [_benchmark(each) for each in sets if each.tables],
    }
    return _render(title, data)


def _board(document: Path, checks: Path | None) -> dict[str, Any]:
    """The checks, held against the document as it is now."""
    contracts = parse_contracts(document.read_text(encoding="utf-8"))
    if checks is None:
        rows = [{**vars(contract), **_UNCHECKED} for contract in contracts]
        return {"contracts": rows, "areas": [], "tests": {}, "created": None, "seed": None}
    found = read_object(checks, argument="checks")
    if found.get("schema") != SCHEMA:
        raise CompactionError(
            f"`checks` is {str(checks)!r}, whose `schema` is {found.get('schema')!r}; expected "
            f"{SCHEMA!r}. Make it with `blockcompact check`."
        )
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


def _render(title: str, data: dict[str, Any]) -> str:
    folder = files("blockcompact_jax.monitor") / "page_files"
    parts = {name: (folder / f"page.{name}").read_text(encoding="utf-8") for name in ("css", "js")}
    # No `<` in the data: nothing in it can end the element it stands in.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    shell = Template((folder / "page.html").read_text(encoding="utf-8"))
    name = title.replace("&", "&amp;").replace("<", "&lt;")
    return shell.substitute(title=name, data=text, style=parts["css"], program=parts["js"])
