"""How two sweeps differ, configuration by configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from blockcompact_jax.sweep.store import flatten, latest_rows

EXACT = ("weights", "tokens_identical_to_full", "memory_bytes", "study", "tasks")
"""What depends on the configuration alone, as the tokens do."""

COUNTED = ("acceptance_rate", "tokens_per_round", "num_rounds", "metrics")
"""What does too, but where selections follow measured times (`reselect_online`)."""

TIMED = ("speedup_vs_full", "tokens_per_second", "tokens_per_second_full")
"""What depends on the machine and its load too."""


def compare_sweeps(
    first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Compares the done rows of two sweeps whose configurations are equal.

    Args:
        first: rows of one result file.
        second: rows of the other.

    Returns:
        Plain JSON values: "origins" says in what machine, versions and sources the two differ;
        "rows" holds for each common configuration "changed" (exact values that differ, as
        [first, second]), "are_counts_compared" (whether `COUNTED` are exact, too) and "ratios"
        (second / first of each speed, None where one is missing);
        "only_first" and "only_second" are configurations without a partner.
    """
    sides = [
        {key: row for key, row in latest_rows(rows).items() if row["state"] == "done"}
        for rows in (first, second)
    ]
    left, right = sides
    common = [key for key in left if key in right]
    return {
        "origins": _origins(list(left.values()), list(right.values())),
        "rows": [_row(left[key], right[key]) for key in common],
        "only_first": [row["configuration"] for key, row in left.items() if key not in right],
        "only_second": [row["configuration"] for key, row in right.items() if key not in left],
        "median_ratios": {name: _median_ratio(name, left, right, common) for name in TIMED},
    }


def _row(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    are_counts_compared = not left["configuration"].get("reselect_online", False)
    names = (*EXACT, *(COUNTED if are_counts_compared else ()))
    one, two = (_exact_values(side["report"], names) for side in (left, right))
    changed = {
        name: [one.get(name), two.get(name)]
        for name in dict.fromkeys((*one, *two))
        if one.get(name) != two.get(name)
    }
    if left["report"].get("token_ids") != right["report"].get("token_ids"):
        changed["token_ids"] = ["differ", "differ"]
    return {
        "configuration": left["configuration"],
        "changed": changed,
        "are_counts_compared": are_counts_compared,
        "ratios": {name: _ratio(left["report"], right["report"], name) for name in TIMED},
    }


def _exact_values(report: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Values that the same configuration gives on every machine: no time, no peak memory."""
    flat = flatten({name: report.get(name) for name in names})
    return {name: value for name, value in flat.items() if not name.endswith(("_us", "_peak"))}


def _ratio(left: dict[str, Any], right: dict[str, Any], name: str) -> float | None:
    one, two = left.get(name), right.get(name)
    return two / one if one and two else None


def _median_ratio(
    name: str, left: dict[str, Any], right: dict[str, Any], common: list[str]
) -> float | None:
    ratios = [_ratio(left[key]["report"], right[key]["report"], name) for key in common]
    known = sorted(ratio for ratio in ratios if ratio is not None)
    if not known:
        return None
    middle = len(known) // 2
    return known[middle] if len(known) % 2 else math.sqrt(known[middle - 1] * known[middle])


def _origins(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> dict[str, Any]:
    if not left or not right:
        return {}
    one, two = (
        flatten({key: rows[-1].get(key) for key in ("machine", "versions", "sources")})
        for rows in (left, right)
    )
    return {
        name: [one.get(name), two.get(name)]
        for name in dict.fromkeys((*one, *two))
        if one.get(name) != two.get(name)
    }
