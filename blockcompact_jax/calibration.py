"""Reads what `blockcompact calibrate` stored, for a run that decides by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from blockcompact_jax.costs import RetainCosts, Term, TermSource
from blockcompact_jax.errors import CompactionError
from blockcompact_jax.provenance import machine
from blockcompact_jax.reselection import OnlineReselection
from blockcompact_jax.round_curves import RoundSample
from blockcompact_jax.strict_json import read_object

FACTS = (
    "model",
    "dtype",
    "context_tokens",
    "budget",
    "block_tokens",
    "layout",
    "attention",
    "policy",
    "draft_tokens",
    "lookup_tokens",
)
"""What a calibration holds for, and a run that uses it must share."""


def read_calibration(path: Path, *, facts: Mapping[str, object]) -> OnlineReselection:
    """Reads calibrated costs and rounds.

    Args:
        path: a file of `blockcompact calibrate`.
        facts: what the run has, by every name of `FACTS`.

    Returns:
        How the run's choice of the period starts.

    Raises:
        CompactionError: if the file cannot be used, or was made for something else than the run or
            on another machine; it names what differs and both values.
    """
    document = read_object(path, argument="costs")
    found: dict[str, Any] = {**document, "machine": document.get("machine")}
    for name, expected in {**facts, "machine": machine()}.items():
        if found.get(name) != expected:
            raise CompactionError(
                f"`costs` is {str(path)!r}, calibrated with `{name}` {found.get(name)!r}; this "
                f"run has {expected!r}. Calibrate for it with `blockcompact calibrate`."
            )
    try:
        return OnlineReselection(
            margin_us=float(document["decision"]["margin_us"]),
            costs=(
                RetainCosts(
                    **{
                        each.name: _term(document["costs"][each.name])
                        for each in fields(RetainCosts)
                    }
                ),
            ),
            rounds=tuple(RoundSample(**each) for each in document["rounds"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CompactionError(
            f"`costs` is {str(path)!r}, which has no usable {error}; expected the file as "
            "`blockcompact calibrate` wrote it."
        ) from error


def _term(plain: Mapping[str, Any]) -> Term:
    return Term(plain["value_us"], TermSource(plain["source"]))
