"""Results of `quality.py`, one a job, method and budget, in rows of one method and budget each."""

from __future__ import annotations

import math
import statistics
from typing import Any

SMALLEST_KL = 1e-6
"""What results are rounded to: a text's mean is never below it, so that it has a logarithm."""


def rows_of(setting: dict[str, Any], results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a method and budget: over the same positions of a job for all of them.

    The first prediction comes from the prefill; where one of ours attended to everything, no
    method's prediction counts. `samples` holds every position of every job.

    Args:
        setting: what all results have in common; every row says it.
        results: of one setting.
    """
    places_by_job = _common_places(results)
    rows = [
        {"method": method, "budget": budget}
        for method, budget in dict.fromkeys((r["method"], r["budget"]) for r in results)
    ]
    for row in rows:
        mine = [r for r in results if all(r[name] == value for name, value in row.items())]
        texts = [r for r in mine if r["job"].startswith("text")]
        needles = [r for r in mine if r["job"].startswith("needle")]
        kl_by_text = {
            r["job"]: max(statistics.fmean(_values([r], "kl", places_by_job)), SMALLEST_KL)
            for r in texts
        }
        all_kl = _values(texts, "kl", places_by_job)
        row |= {
            "num_kept_tokens": statistics.fmean(r["num_kept_tokens"] for r in texts or mine),
            "kl": statistics.fmean(kl_by_text.values()) if texts else None,
            "kl_geometric": _geometric_mean(kl_by_text) if texts else None,
            "kl_median": statistics.median(all_kl) if texts else None,
            "top1": _mean(_values(texts, "is_top1_equal", places_by_job)),
            "needle_recall": _mean(_values(needles, "is_token_found", places_by_job)),
            "kl_by_text": kl_by_text,
            "samples": [
                {name: value for name, value in r.items() if name not in ("method", "budget")}
                for r in mine
            ],
        }
    return [{**setting, **row} for row in sorted(rows, key=_order)]


def results_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results that `rows_of` made rows of."""
    return [
        {"method": row["method"], "budget": row["budget"], **sample}
        for row in rows
        for sample in row["samples"]
    ]


def mean_table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown, a line a method: over all texts and needles of one setting, at each budget.

    The columns of a budget are the tokens kept, the arithmetic and the geometric mean of the texts'
    KL, the share of equal best tokens, and that of needle tokens found.
    """
    budgets = sorted({row["budget"] for row in rows})
    names = ("kept", "KL", "geom.", "top-1", "needle")
    heads = [
        f"{budget:.0%}: {name}" if name == "kept" else name for budget in budgets for name in names
    ]
    lines = [_line(["", *heads]), _line(["---"] * (1 + len(heads)))]
    for method in _methods(rows):
        cells = [method]
        for row in rows:
            if row["method"] == method:
                cells += [
                    f"{row['num_kept_tokens']:,.0f}",
                    _kl(row["kl"]),
                    _kl(row["kl_geometric"]),
                ]
                cells += [_share(row["top1"]), _share(row["needle_recall"])]
        lines.append(_line(cells))
    return lines


def text_table(rows: list[dict[str, Any]], budget: float) -> list[str]:
    """Markdown, a line a method: the mean KL of each text of one setting."""
    mine = {row["method"]: row["kl_by_text"] for row in rows if row["budget"] == budget}
    texts = list(dict.fromkeys(text for kl_by_text in mine.values() for text in kl_by_text))
    heads = [text.removeprefix("text ") for text in texts]
    lines = [_line([f"KL at {budget:.0%}", *heads]), _line(["---"] * (1 + len(heads)))]
    for method in _methods(rows):
        lines.append(_line([method, *(_kl(mine[method].get(text)) for text in texts)]))
    return lines


def _methods(rows: list[dict[str, Any]]) -> list[str]:
    """Those of all rows, best at the smallest budget first."""
    return list(dict.fromkeys(row["method"] for row in rows))


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _kl(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value >= 0.01 else f"{value:.4f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _common_places(results: list[dict[str, Any]]) -> dict[str, list[int]]:
    return {
        job: [
            place
            for place in range(1, len(given["kl"]))
            if all(r["kl"][place] is not None for r in results if r["job"] == job)
        ]
        for job, given in {r["job"]: r for r in results}.items()
    }


def _values(
    results: list[dict[str, Any]], name: str, places_by_job: dict[str, list[int]]
) -> list[Any]:
    return [r[name][place] for r in results for place in places_by_job[r["job"]]]


def _mean(values: list[Any]) -> float | None:
    return statistics.fmean(values) if values else None


def _geometric_mean(kl_by_text: dict[str, float]) -> float:
    return math.exp(statistics.fmean(map(math.log, kl_by_text.values())))


def _order(row: dict[str, Any]) -> tuple[float, float]:
    return row["budget"], row["kl_geometric"] or 0.0
