"""What a sweep says in plain words at its end: the best, what limits the rest, what is unknown."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

Row = Mapping[str, Any]
"""One configuration and its report, under these two names."""

_ACCEPTED_WELL = 0.75
"""Share of accepted drafts from which a run is not limited by its selection."""


def named(row: Row, varied: Sequence[str]) -> str:
    """The options by which a configuration differs from the others."""
    configuration = row["configuration"]
    shown = [name for name in varied if name in configuration]
    chosen = [f"{name.replace('_', ' ')} {configuration[name]}" for name in shown]
    return ", ".join(chosen) or "what all have"


def summarize_runs(rows: Sequence[Row], varied: Sequence[str]) -> list[str]:
    """Speed, and whether tokens stayed the same, of each engine by itself.

    Args:
        rows: of configurations that ran.
        varied: options that have more than one value.
    """
    by_engine: dict[str, list[Row]] = {}
    for row in rows:
        by_engine.setdefault(row["configuration"]["engine"], []).append(row)
    if len(by_engine) == 1:
        return [*_summarize_engine(rows, varied), _LIMITS]
    others = [name for name in varied if name != "engine"]
    lines = [
        f"{engine}: {line}"
        for engine, mine in by_engine.items()
        for line in _summarize_engine(mine, others)
    ]
    return [*lines, "Speeds are each engine's own, to its own full attention.", _LIMITS]


_LIMITS = (
    "Each was timed once, on one text: differences of a tenth or less say nothing. Memory and "
    "other models, texts and machines were not compared."
)
_LOSSY = ("vllm-attend", "vllm-retain")
"""Engines whose tokens may differ from those of full attention."""


def _summarize_engine(rows: Sequence[Row], varied: Sequence[str]) -> list[str]:
    compared = [row for row in rows if _of(row, "speedup_vs_full") is not None]
    lines: list[str] = []
    if compared:
        best = max(compared, key=lambda row: _of(row, "speedup_vs_full"))
        times = _of(best, "speedup_vs_full")
        is_faster = times > 1
        lines.append(
            f"Fastest: {times:.2f} times the speed of full attention, with {named(best, varied)}."
            if is_faster
            else "Nothing was faster than full attention: at best, with "
            f"{named(best, varied)}, {times:.2f} times its speed."
        )
        num_slower = sum(_of(row, "speedup_vs_full") <= 1 for row in compared)
        if is_faster and num_slower:
            lines.append(f"Not faster than full attention: {num_slower} of {len(compared)}.")
        lines += _limits(compared)
    lines += [*_by_policy(rows), _same_tokens(rows)]
    if len(compared) < len(rows):
        lines.append(f"Speed not compared: {len(rows) - len(compared)} of {len(rows)}.")
    return lines


def _limits(rows: Sequence[Row]) -> list[str]:
    """What held back the runs that gained least: rejected drafts, or too short a context."""
    rows = [row for row in rows if _of(row, "acceptance_rate") is not None]
    well = [row for row in rows if _of(row, "acceptance_rate") >= _ACCEPTED_WELL]
    poor = [row for row in rows if row not in well]
    lines: list[str] = []
    if well and poor:
        lines.append(
            f"Rejected drafts are lost work: where {_ACCEPTED_WELL:.0%} or more of them were "
            f"accepted, the speed was {_span(well)} times, elsewhere {_span(poor)}."
        )
    contexts = sorted({row["configuration"]["context"] for row in well})
    if len(contexts) > 1:
        spans = [
            f"{_span([row for row in well if row['configuration']['context'] == context])} at "
            f"{context:,}"
            for context in contexts
        ]
        lines.append(
            f"Of those accepted so often, by tokens of context: {', '.join(spans)}. What drafting "
            "saves is the reading of KV, which grows with the context."
        )
    return lines


def _span(rows: Sequence[Row]) -> str:
    speeds = [_of(row, "speedup_vs_full") for row in rows]
    low, high = f"{min(speeds):.2f}", f"{max(speeds):.2f}"
    return low if low == high else f"{low} to {high}"


def _by_policy(rows: Sequence[Row]) -> list[str]:
    """How often drafts are accepted by each policy, as the controls are there to show."""
    rates: dict[str, list[float]] = {}
    for row in rows:
        rate = _of(row, "acceptance_rate")
        if rate is not None:
            rates.setdefault(row["configuration"]["policy"], []).append(rate)
    if len(rates) < 2:  # one alone compares with nothing
        return []
    means = ", ".join(f"{policy} {fmean(each):.0%}" for policy, each in rates.items())
    return [f"Drafts accepted, mean by policy: {means} (recency and random ignore the text)."]


def _same_tokens(rows: Sequence[Row]) -> str:
    known = [row for row in rows if _of(row, "tokens_identical_to_full") is not None]
    if not known:
        return "Whether the tokens are those of full attention was not compared."
    num_same = sum(_of(row, "tokens_identical_to_full") for row in known)
    is_lossy = known[0]["configuration"]["engine"] in _LOSSY
    why = " (a lossy engine: others are no error)" if is_lossy else ""
    return f"The same tokens as full attention: {num_same} of {len(known)}{why}."


def summarize_study(rows: Sequence[Row], varied: Sequence[str]) -> list[str]:
    """Attention mass kept, budget by budget."""
    lines: list[str] = []
    for budget in dict.fromkeys(row["configuration"]["budget"] for row in rows):
        mine = [row for row in rows if row["configuration"]["budget"] == budget]
        kept = [row for row in mine if row["report"]["study"]["mass_kept"] is not None]
        # A union attends to more than its budget: it is no better choice of as many blocks.
        kept = [row for row in kept if row["configuration"]["retention"] != "union"] or kept
        if not kept:
            continue
        best = max(kept, key=lambda row: row["report"]["study"]["mass_kept"])
        study = best["report"]["study"]
        others = [name for name in varied if name != "budget"]
        at_best = study["mass_kept_at_best"]
        most = "" if at_best is None else f", of {at_best:.1%} that as many blocks could keep"
        lines.append(
            f"Budget {budget}: {named(best, others)} keeps most of the attention, "
            f"{study['mass_kept']:.1%}{most}."
        )
    return [
        *lines,
        *_by_path(rows),
        "Mass kept is not accuracy: what a model makes of it was not run, nor was any speed.",
    ]


def _by_path(rows: Sequence[Row]) -> list[str]:
    """What the selections cost on each path: uploads, moves, and the pool that it takes."""
    by_path: dict[str, list[Row]] = {}
    for row in rows:
        chosen = row["configuration"]
        name = f"{chosen['retention']}, owned by {chosen['ownership']}"
        by_path.setdefault(name, []).append(row)
    if len(by_path) < 2:  # one alone compares with nothing
        return []
    lines: list[str] = []
    for name, mine in by_path.items():
        booked = [row["report"]["metrics"] for row in mine]
        paths = [row["report"]["study"]["path"] for row in mine]
        uploaded, moved = (
            fmean(each[key] for each in booked) / 1e6
            for key in ("h2d_bytes", "resident_move_bytes")
        )
        peak = fmean(each["pool_peak_bytes"] for each in paths) / 1e6
        kept = fmean(row["report"]["study"]["mass_kept"] for row in mine)
        lines.append(
            f"{name}: {kept:.1%} kept, {uploaded:,.1f} MB uploaded, {moved:,.1f} MB moved, a pool "
            f"of {peak:,.1f} MB (means)."
        )
    return [*lines, "Bytes are those of plans: nothing was moved."]


def summarize_tasks(rows: Sequence[Row], varied: Sequence[str]) -> list[str]:
    """Answers found with selected blocks, beside those that full attention finds."""
    lines: list[str] = []
    for row in rows:
        found = list(row["report"]["tasks"].values())
        num_cases = sum(each["num_cases"] for each in found)
        given, full = (
            fmean(each[name] for each in found)
            for name in ("token_accuracy", "token_accuracy_full")
        )
        agreement = fmean(each["agreement"] for each in found)
        lines.append(
            f"{named(row, varied)}: {given:.0%} of the answers' tokens found, {full:.0%} with full "
            f"attention; both say the same in {agreement:.0%} ({num_cases} cases), at "
            f"{row['report']['speedup_vs_full']:.2f} times its speed."
        )
    return [
        *lines,
        "A few cases each: a trend, not a ranking. Speeds are those of the answers' forwards, one "
        "token each, without the contexts'.",
    ]


Summary = Callable[[Sequence[Row], Sequence[str]], list[str]]
"""Lines for people, from the rows that have a report and the options that vary."""


def _of(row: Row, name: str) -> Any:
    return row["report"].get(name)
