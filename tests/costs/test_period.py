"""How long an engine holds a selection: against every fixed period, and the formula written out."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockcompact_jax.costs import RetainCosts, assumed, measured
from blockcompact_jax.decision_log import DecisionLog, is_decision_log, read_decision_log
from blockcompact_jax.errors import CompactionError
from blockcompact_jax.period import (
    HeldSelection,
    PeriodByCosts,
    PeriodByMass,
    longest_within,
    mass_decision,
    mass_missed,
    mass_missed_at_best,
    next_period,
)
from blockcompact_jax.reselection import Basis
from blockcompact_jax.round_curves import RoundSample


def held(age, beyond_best, missed=0.5):
    at_best = missed - beyond_best
    return HeldSelection(
        age_tokens=age, mass_missed=missed, mass_missed_at_best=at_best, select_us=900.0
    )


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(-20, 90)), max_size=20), st.integers(1, 60)
)
def test_the_longest_period_within_the_bound_is_where_the_monotone_curve_crosses_it(drawn, bound):
    """The minimax formula of isotonic regression, and the crossing found step by step."""
    samples = [held(age, beyond / 1000) for age, beyond in drawn]
    found = longest_within(samples, max_mass_lost=bound / 1000)
    ages = sorted({age for age, _ in drawn})
    if 1 not in ages:
        assert found is None
        return

    def mean(first, last):
        values = [beyond for age, beyond in drawn if ages[first] <= age <= ages[last]]
        return sum(values) / len(values)

    def fitted(place):
        high = range(place, len(ages))
        return max(min(mean(low, b) for b in high) for low in range(place + 1))

    lost = [fitted(place) - fitted(0) for place in range(len(ages))]
    steps = [step / 100 for step in range(100, 100 * ages[-1] + 1)]
    within = [t for t in steps if np.interp(t, ages, lost) <= bound + 1e-9]
    assert found == pytest.approx(max(within), abs=0.011)


@pytest.mark.parametrize(("slope", "bound"), [(0.001, 0.02), (0.004, 0.02), (0.0001, 0.02)])
def test_mass_chooses_the_longest_fixed_period_that_keeps_the_bound(slope, bound):
    """CST-2: within a tenth of the best fixed period, whatever even a fresh selection misses."""
    random = np.random.default_rng(5)
    period = PeriodByMass(first_tokens=16, max_mass_lost=bound)
    chosen = []
    for _ in range(200):
        age = period.choice.period
        chosen.append(age)
        period.book(held(age, 0.009 + slope * (age - 1) * random.uniform(0.75, 1.25)))
    best = min(1 + bound / slope, 256)
    late = sorted(chosen[100:])
    assert late[50] == pytest.approx(best, rel=0.1, abs=1)
    assert max(chosen) <= 256
    assert chosen[::8] == [1] * 25, "every eighth measures a fresh selection"


def test_mass_doubles_the_period_while_nothing_is_lost_and_shortens_it_at_once():
    period = PeriodByMass(first_tokens=4, max_mass_lost=0.01, max_tokens=32)
    assert (period.choice.period, period.choice.basis) == (1, Basis.MEASURING)
    seen = []
    for _ in range(6):
        period.book(held(period.choice.period, 0.3))
        seen.append((period.choice.period, period.choice.basis))
    measuring = [(each, Basis.MEASURING) for each in (4, 8, 16, 32)]
    assert seen == [*measuring, (32, Basis.LONGEST), (32, Basis.LONGEST)]
    lasting = held(32, 0.9, missed=0.95)
    assert period.mass_lost(lasting) == pytest.approx(0.6)
    period.book(lasting)
    assert period.choice.basis is Basis.BOUNDED
    assert period.choice.period < 32


def test_where_even_the_second_token_loses_too_much_every_token_selects():
    period = PeriodByMass(first_tokens=4, max_mass_lost=0.01)
    for _ in range(9):
        age = period.choice.period
        period.book(held(age, 0.1 if age == 1 else 0.5))
    assert period.choice.period == 1
    assert period.choice.basis is Basis.BOUNDED


def test_nothing_is_lost_before_a_fresh_selection_was_measured():
    period = PeriodByMass(first_tokens=4)
    period.book(held(7, 0.2))
    assert period.mass_lost(held(7, 0.2)) is None


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, float("nan")])
def test_a_bound_that_is_no_share_is_refused(share):
    with pytest.raises(CompactionError, match="`max_mass_lost` is"):
        PeriodByMass(first_tokens=4, max_mass_lost=share)


def test_a_selection_of_no_age_is_refused():
    with pytest.raises(CompactionError, match="`age_tokens` is 0"):
        held(0, 0.1)


@given(st.data())
def test_missed_mass_is_that_of_candidates_that_are_not_selected(data):
    rows, blocks = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    counts = st.lists(st.integers(1, 9), min_size=blocks, max_size=blocks)
    mass = np.array([data.draw(counts) for _ in range(rows)], np.float64)
    mass /= mass.sum(axis=1, keepdims=True)
    candidates = data.draw(st.integers(0, blocks))
    num_selected = data.draw(st.integers(0, candidates))
    order = [data.draw(st.permutations(range(candidates)))[:num_selected] for _ in range(rows)]
    selected = np.array(order, np.int32).reshape(rows, num_selected)
    missed = [
        sum(mass[row, block] for block in range(candidates) if block not in order[row])
        for row in range(rows)
    ]
    assert mass_missed(mass, selected, candidates) == pytest.approx(sum(missed) / rows)
    least = [
        min(
            sum(mass[row, block] for block in range(candidates) if block not in chosen)
            for chosen in itertools.combinations(range(candidates), num_selected)
        )
        for row in range(rows)
    ]
    at_best = mass_missed_at_best(mass, num_selected, candidates)
    assert at_best == pytest.approx(sum(least) / rows, abs=1e-12)


class Rounds:
    """What rounds take and gain by the age of their selection alone."""

    def __init__(self, select_us, fall):
        self.select_us, self.fall = select_us, fall

    def sample(self, age):
        gained = max(1, round(1000 * (1 - self.fall) ** age))
        return RoundSample(age_rounds=age, round_us=100_000.0, num_gained_tokens=gained)

    def us_per_token(self, period):
        rounds = [self.sample(age) for age in range(period)]
        total = self.select_us + sum(each.round_us for each in rounds)
        return total / sum(each.num_gained_tokens for each in rounds)


def costs_of(total_us):
    names = ("table_update", "metadata", "wait", "allocator", "kv_move")
    return RetainCosts(plan=measured(total_us), **dict.fromkeys(names, assumed(0.0)))


@pytest.mark.parametrize(("select_us", "fall"), [(100, 0.1), (100_000, 0.02), (300_000, 0.0)])
def test_costs_choose_the_period_of_least_time_a_token(select_us, fall):
    """CST-2: what it settles on takes at most 1.1 times the best fixed period's time a token."""
    rounds = Rounds(select_us, fall)
    period, chosen = PeriodByCosts(first_rounds=4, max_rounds=16), []
    for _ in range(40):
        chosen.append(period.choice.period)
        for age in range(period.choice.period):
            period.book_round(rounds.sample(age))
        period.book_selection(costs_of(select_us))
    best = min(map(rounds.us_per_token, range(1, 17)))
    assert sorted(map(rounds.us_per_token, chosen[-20:]))[10] <= 1.1 * best
    assert max(chosen) <= 16
    assert period.tokens_per_round is not None


@pytest.mark.parametrize(("fall", "ends"), [(0.2, True), (0.0, False)])
def test_CST_2_a_choice_keeps_every_term_and_its_source(fall, ends):
    """CST-1, CST-2: costs, benefits, margin and horizon by hand; what was assumed is named."""
    rounds = Rounds(100_000, fall)
    period = PeriodByCosts(first_rounds=4, max_rounds=8)
    for _ in range(3):
        for age in range(8):
            period.book_round(rounds.sample(age))
        period.book_selection(costs_of(100_000))
    row = period.decision_row()
    best = row["horizon_rounds"]
    gained = [rounds.sample(age).num_gained_tokens for age in range(8)]
    assert row["round_us_by_age"] == pytest.approx([100_000.0] * 8)
    assert row["gained_tokens_by_age"] == pytest.approx(gained)
    assert row["next_period_rounds"] == (best if ends else 8)
    assert row["basis"] == ("costs" if ends else "longest period")
    assert best < 7 if ends else best == 7, "the longest of which every term is known"
    assert row["is_retained"] is ends
    assert row["unmeasured"] == ""
    nothing = "table_update, metadata, wait, allocator, kv_move, avoided_stall"
    assert row["assumed"] == nothing
    assert row["plan_us"] == row["cost_us"] == 100_000.0
    assert row["attention_before_us"] == row["attention_after_us"] == pytest.approx(100_000)
    penalty_us = best * 100_000 * (1 - sum(gained[:best]) / (best * gained[best]))
    assert row["output_penalty_us"] == pytest.approx(penalty_us)
    assert row["benefit_us"] == pytest.approx(-penalty_us)
    assert row["margin_us"] == pytest.approx(-0.03 * best * 100_000)


def test_CST_1_a_choice_without_rounds_names_what_is_missing():
    """CST-1: no benefit is 0 because nothing was measured."""
    period = PeriodByCosts(first_rounds=4)
    period.book_selection(costs_of(5.0))
    row = period.decision_row()
    assert row["unmeasured"] == "attention_before, attention_after, output_penalty"
    assert row["is_retained"] is row["benefit_us"] is row["output_penalty_us"] is None
    assert (row["round_us_by_age"], row["gained_tokens_by_age"]) == ([], [])


def test_CST_1_an_unmeasured_cost_keeps_the_first_period():
    """CST-1: nothing is chosen by a sum in which a term is missing."""
    period = PeriodByCosts(first_rounds=3)
    for _ in range(5):
        for age in range(3):
            period.book_round(Rounds(1, 0.5).sample(age))
        period.book_selection(RetainCosts(plan=measured(5.0)))
    assert (period.choice.period, period.choice.basis) == (3, Basis.UNMEASURED)


def test_the_first_period_is_not_longer_than_the_longest():
    assert next_period(None, longest_measured=0, first=9, max_period=4).period == 4


def test_CST_2_a_decision_log_keeps_every_term(tmp_path):
    """CST-2: what is read is what was decided, in order, with the bound and what it was held to."""
    path = tmp_path / "decisions.jsonl"
    log = DecisionLog(path, engine="made up", policy="attend")
    period = PeriodByMass(first_tokens=4)
    for age in (1, 4):
        sample = held(age, 0.25)
        period.book(sample)
        decision = mass_decision(
            sample,
            period.choice,
            num_tokens=99,
            mass_lost=period.mass_lost(sample),
            max_mass_lost=0.02,
        )
        log.add(decision)
    assert is_decision_log(path)
    facts, rows = read_decision_log(path)
    assert (facts["engine"], facts["policy"]) == ("made up", "attend")
    assert set(facts) >= {"machine", "versions", "sources"}
    assert [row["number"] for row in rows] == [0, 1]
    assert rows[0] == {
        "number": 0,
        "num_tokens": 99,
        "age_tokens": 1,
        "mass_missed": 0.5,
        "mass_missed_at_best": 0.25,
        "select_us": 900.0,
        "mass_beyond_best": 0.25,
        "mass_lost": 0.0,
        "max_mass_lost": 0.02,
        "basis": "measuring another period",
        "next_period_tokens": 4,
    }
    with path.open("a") as file:
        file.write('{"number": 2, "torn')
    assert read_decision_log(path)[1] == rows, "a torn last line is no decision"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "does not begin with"),
        (json.dumps({"schema": "other"}) + "\n", "does not begin with"),
        ("[1]\n", "line 1 is no object"),
        ("{\n", "line 1 is no JSON"),
    ],
)
def test_what_is_no_decision_log_is_refused(tmp_path, text, message):
    path = tmp_path / "decisions.jsonl"
    path.write_text(text)
    assert not is_decision_log(path)
    with pytest.raises(CompactionError, match=message):
        read_decision_log(path)


def test_a_log_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(CompactionError, match=r"`decision_log` is .*give a file in a folder"):
        DecisionLog(tmp_path / "none" / "log.jsonl")
