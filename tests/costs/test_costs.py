"""The retention decision, against its formula written out."""

import math
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockcompact_jax.costs import (
    UNMEASURED,
    RetainBenefits,
    RetainCosts,
    Term,
    TermSource,
    assumed,
    costs_from_metrics,
    decide_retention,
    measured,
)
from blockcompact_jax.errors import CompactionError
from blockcompact_jax.metrics import CompactionMetrics

COSTS = [field.name for field in fields(RetainCosts)]
BENEFITS = [field.name for field in fields(RetainBenefits)]
times = st.floats(0, 1e6)


@given(
    st.lists(times, min_size=6, max_size=6),
    st.lists(times, min_size=4, max_size=4),
    st.integers(0, 1000),
    st.floats(0, 1e5),
)
def test_the_decision_is_the_formula(cost_values, benefit_values, horizon, margin):
    """CST-2: retain iff benefit > cost + margin; the record keeps every term."""
    costs = RetainCosts(**dict(zip(COSTS, map(measured, cost_values), strict=True)))
    benefits = RetainBenefits(**dict(zip(BENEFITS, map(assumed, benefit_values), strict=True)))
    decision = decide_retention(costs, benefits, horizon_steps=horizon, margin_us=margin)
    before, after, stall, penalty = benefit_values
    benefit = horizon * (before - after) + stall - penalty
    assert decision.benefit_us == benefit
    assert decision.cost_us == sum(cost_values)
    assert decision.is_retained == (benefit > sum(cost_values) + margin)
    assert decision.unmeasured == ()
    assert (decision.costs, decision.benefits) == (costs, benefits)
    assert (decision.horizon_steps, decision.margin_us) == (horizon, margin)


@pytest.mark.parametrize("name", COSTS + BENEFITS)
def test_an_unmeasured_term_is_never_zero(name):
    """CST-1: with a term missing nothing is decided, whatever the others say."""
    costs = RetainCosts(**{cost: measured(0.0) for cost in COSTS})
    benefits = RetainBenefits(**{benefit: measured(0.0) for benefit in BENEFITS})
    benefits = replace(benefits, attention_before=measured(1e9))
    assert decide_retention(costs, benefits, horizon_steps=1, margin_us=0).is_retained is True
    if name in COSTS:
        costs = replace(costs, **{name: UNMEASURED})
    else:
        benefits = replace(benefits, **{name: UNMEASURED})
    decision = decide_retention(costs, benefits, horizon_steps=1, margin_us=0)
    assert decision.is_retained is None
    assert decision.unmeasured == (name,)
    assert (decision.cost_us is None) == (name in COSTS)
    assert (decision.benefit_us is None) == (name in BENEFITS)


def test_booked_times_keep_their_names_and_gaps():
    """CST-1, MET-1: what a runtime did not measure stays unmeasured; a zero stands for itself."""
    booked = CompactionMetrics(
        plan_us=1.0, table_us=2.0, wait_us=3.0, allocator_us=4.0, move_us=0.0
    )
    costs = costs_from_metrics(booked)
    assert costs.metadata == UNMEASURED
    assert (costs.plan, costs.table_update, costs.wait) == (
        measured(1.0),
        measured(2.0),
        measured(3.0),
    )
    assert (costs.allocator, costs.kv_move) == (measured(4.0), measured(0.0))


def test_terms_without_a_source_or_a_number_are_refused():
    for value, source in (
        (None, TermSource.MEASURED),
        (1.0, TermSource.UNMEASURED),
        (float("nan"), TermSource.ASSUMED),
    ):
        with pytest.raises(CompactionError, match="`value_us`"):
            Term(value, source)
    for steps, margin in ((-1, 0.0), (1, math.inf), (1, math.nan)):
        with pytest.raises(CompactionError, match="give 0 or more steps and a finite margin"):
            decide_retention(RetainCosts(), RetainBenefits(), horizon_steps=steps, margin_us=margin)
