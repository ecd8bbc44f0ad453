"""Whether to retain now: what it costs against what it brings, every term named and sourced (CST).

Tretain = table_update + plan + metadata + wait + allocator + kv_move
Benefit = horizon · (attention_before - attention_after) + avoided_stall - output_penalty
Retain where Benefit > Tretain + margin.

A term is measured, assumed by the caller, or unmeasured. An unmeasured term is never taken as 0:
the decision is then open, and says which terms are missing.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.metrics import CompactionMetrics


class TermSource(enum.Enum):
    """Where the value of a term comes from."""

    MEASURED = "measured"
    ASSUMED = "assumed"
    UNMEASURED = "unmeasured"


@dataclass(frozen=True)
class Term:
    """One term of a decision.

    Attributes:
        value_us: its value in microseconds; None exactly where it is unmeasured.
        source: where the value comes from.
    """

    value_us: float | None
    source: TermSource

    def __post_init__(self) -> None:
        if (self.value_us is None) != (self.source is TermSource.UNMEASURED):
            raise CompactionError(
                f"`value_us` is {self.value_us} and `source` {self.source.value}; an unmeasured "
                "term has no value, and every other has one."
            )
        if self.value_us is not None and not math.isfinite(self.value_us):
            raise CompactionError(f"`value_us` is {self.value_us}; give a finite number.")


UNMEASURED = Term(None, TermSource.UNMEASURED)


def measured(value_us: float) -> Term:
    """A term that was measured."""
    return Term(value_us, TermSource.MEASURED)


def assumed(value_us: float) -> Term:
    """A term that the caller answers for."""
    return Term(value_us, TermSource.ASSUMED)


@dataclass(frozen=True, kw_only=True)
class RetainCosts:
    """What one retention takes, each part under its own name.

    Attributes:
        table_update: writing tables.
        plan: planning.
        metadata: telling the other side.
        wait: waiting for transfers and readers.
        allocator: reserving and freeing blocks.
        kv_move: moving bytes within the pool; measured as 0 only on a validated remap path.
    """

    table_update: Term = UNMEASURED
    plan: Term = UNMEASURED
    metadata: Term = UNMEASURED
    wait: Term = UNMEASURED
    allocator: Term = UNMEASURED
    kv_move: Term = UNMEASURED


@dataclass(frozen=True, kw_only=True)
class RetainBenefits:
    """What one retention brings.

    Attributes:
        attention_before: attention of one step as it is.
        attention_after: attention of one step after the retention.
        avoided_stall: waiting for capacity that it spares.
        output_penalty: what fewer accepted tokens cost over the horizon.
    """

    attention_before: Term = UNMEASURED
    attention_after: Term = UNMEASURED
    avoided_stall: Term = UNMEASURED
    output_penalty: Term = UNMEASURED


@dataclass(frozen=True, kw_only=True)
class RetainDecision:
    """One decision with everything it rests on.

    Attributes:
        is_retained: True or False; None while terms are missing.
        unmeasured: names of the missing terms.
        cost_us: sum of the costs; None while one is missing.
        benefit_us: the benefit; None while one of its terms is missing.
        horizon_steps: steps over which the benefit was counted.
        margin_us: what the benefit had to exceed the cost by.
        costs: all cost terms.
        benefits: all benefit terms.
    """

    is_retained: bool | None
    unmeasured: tuple[str, ...]
    cost_us: float | None
    benefit_us: float | None
    horizon_steps: int
    margin_us: float
    costs: RetainCosts
    benefits: RetainBenefits


def costs_from_metrics(booked: CompactionMetrics) -> RetainCosts:
    """Takes what a runtime booked; a time that was not measured stays unmeasured.

    Args:
        booked: metrics of one retention, or the mean of several.
    """
    return RetainCosts(
        table_update=_term(booked.table_us),
        plan=_term(booked.plan_us),
        metadata=_term(booked.metadata_us),
        wait=_term(booked.wait_us),
        allocator=_term(booked.allocator_us),
        kv_move=_term(booked.move_us),
    )


def decide_retention(
    costs: RetainCosts, benefits: RetainBenefits, *, horizon_steps: int, margin_us: float
) -> RetainDecision:
    """Decides whether a retention pays.

    Args:
        costs: what it takes.
        benefits: what it brings.
        horizon_steps: steps until the next decision.
        margin_us: what the benefit must exceed the cost by; below 0 where a retention may cost more
            than its measured benefit.

    Returns:
        The decision and all its terms.

    Raises:
        CompactionError: for a negative horizon, or a margin that is not finite.
    """
    if horizon_steps < 0 or not math.isfinite(margin_us):
        raise CompactionError(
            f"`horizon_steps` is {horizon_steps} and `margin_us` {margin_us}; give 0 or more steps "
            "and a finite margin."
        )
    cost_terms, benefit_terms = _values(costs), _values(benefits)
    missing = [name for name, value in (cost_terms | benefit_terms).items() if value is None]
    cost = _sum(cost_terms)
    benefit = None
    if None not in benefit_terms.values():
        value = {name: float(us) for name, us in benefit_terms.items() if us is not None}
        saved_us = value["attention_before"] - value["attention_after"]
        benefit = horizon_steps * saved_us + value["avoided_stall"] - value["output_penalty"]
    is_retained = None if cost is None or benefit is None else benefit > cost + margin_us
    return RetainDecision(
        is_retained=is_retained,
        unmeasured=tuple(missing),
        cost_us=cost,
        benefit_us=benefit,
        horizon_steps=horizon_steps,
        margin_us=margin_us,
        costs=costs,
        benefits=benefits,
    )


def decision_row(decision: RetainDecision) -> dict[str, Any]:
    """One row of a table with everything that a decision rests on.

    A term without a value is None and named in `unmeasured`; one that the caller answers for is
    named in `assumed`; every other was measured.
    """
    terms: dict[str, Term] = {
        field.name: getattr(part, field.name)
        for part in (decision.costs, decision.benefits)
        for field in fields(part)
    }
    assumed = [name for name, term in terms.items() if term.source is TermSource.ASSUMED]
    return {
        "is_retained": decision.is_retained,
        "benefit_us": decision.benefit_us,
        "cost_us": decision.cost_us,
        "margin_us": decision.margin_us,
        "horizon_rounds": decision.horizon_steps,
        "unmeasured": ", ".join(decision.unmeasured),
        "assumed": ", ".join(assumed),
        **{f"{name}_us": term.value_us for name, term in terms.items()},
    }


def _term(value_us: float | None) -> Term:
    return UNMEASURED if value_us is None else measured(value_us)


def _values(terms: RetainCosts | RetainBenefits) -> dict[str, float | None]:
    return {field.name: getattr(terms, field.name).value_us for field in fields(terms)}


def _sum(values: Mapping[str, float | None]) -> float | None:
    known = [value for value in values.values() if value is not None]
    return sum(known) if len(known) == len(values) else None
