"""When to select anew: against every fixed period, run one by one, and the formula written out."""

import math
import random
import statistics
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockcompact_jax.costs import UNMEASURED, RetainCosts, TermSource, assumed, measured
from blockcompact_jax.errors import CompactionError
from blockcompact_jax.reselection import (
    Basis,
    OnlineReselection,
    Reselection,
    decide_reselection,
    median_costs,
    predict_period,
)
from blockcompact_jax.round_curves import RoundSample, round_curves


def selection_costs(total_us):
    """Six terms that add up to `total_us`."""
    names = [field.name for field in fields(RetainCosts)]
    return RetainCosts(**{name: measured(total_us / len(names)) for name in names})


class Engine:
    """A twin of decoding: what a round takes and gains by the age of its selection alone."""

    def __init__(self, *, select_us, round_us, gained, noise=0.0, seed=0):
        self.select_us, self.round_us, self.gained = select_us, round_us, gained
        self.noise, self.random = noise, random.Random(seed)

    def round(self, age):
        shake = 1 + self.noise * (2 * self.random.random() - 1)
        return RoundSample(
            age_rounds=age,
            round_us=self.round_us(age) * shake,
            num_gained_tokens=max(1, round(self.gained(age))),
        )

    def us_per_token(self, period, *, num_cycles=1):
        """Runs a fixed period."""
        total_us = tokens = 0
        for _ in range(num_cycles):
            for age in range(period):
                done = self.round(age)
                total_us += done.round_us
                tokens += done.num_gained_tokens
            total_us += self.select_us
        return total_us / tokens

    def best_fixed(self, longest):
        return min(range(1, longest + 1), key=self.us_per_token)


def slower(select_us, slope, *, gained=200.0):
    return {
        "select_us": select_us,
        "round_us": lambda age: 100_000 * (1 + slope * age),
        "gained": lambda age: gained,
    }


def fewer(select_us, fall):
    return {
        "select_us": select_us,
        "round_us": lambda age: 100_000.0,
        "gained": lambda age: 1000 * math.exp(-fall * age),
    }


ENGINES = [
    slower(100_000, 0.02),  # sqrt(2 * 1 / 0.02) = 10 rounds
    slower(1_000_000, 0.05),  # 20 rounds
    slower(1_000_000, 0.0125),  # 40 rounds
    slower(10, 0.5),  # every round
    fewer(50_000, 0.01),
    fewer(900_000, 0.01),
]


@pytest.mark.parametrize("facts", ENGINES)
def test_the_predicted_period_is_the_best_fixed_one(facts):
    """CST-2: within a tenth of the measured best period, with times that waver by 5 %."""
    best = Engine(**facts).best_fixed(100)
    noisy = Engine(**facts, noise=0.05, seed=3)
    rounds = [noisy.round(age) for _ in range(9) for age in range(60)]
    found = predict_period(round_curves(rounds), selection_costs(facts["select_us"]))
    assert abs(found.period_rounds - best) <= max(0.1 * best, 0.5)
    exact = Engine(**facts)
    assert exact.us_per_token(found.period_rounds) <= 1.01 * exact.us_per_token(best)


@given(
    st.lists(st.integers(0, 40_000), min_size=2, max_size=12),
    st.lists(st.integers(0, 30), min_size=2, max_size=12),
    st.integers(1, 400_000),
)
def test_the_first_decision_to_select_is_at_the_best_period(slowdowns, losses, select_us):
    """Retain iff benefit > cost finds the least time a token, whatever the monotone course."""
    length = min(len(slowdowns), len(losses))
    times = [100_000 + sum(slowdowns[: age + 1]) for age in range(length)]
    gains = [500 - sum(losses[: age + 1]) for age in range(length)]
    engine = Engine(select_us=select_us, round_us=times.__getitem__, gained=gains.__getitem__)
    curves = round_curves([engine.round(age) for age in range(length)], min_samples=1)
    costs = selection_costs(select_us)
    decisions = [
        decide_reselection(curves, costs, period_rounds=period) for period in range(1, length + 1)
    ]
    assert [each.is_retained is None for each in decisions] == [False] * (length - 1) + [True]
    assert decisions[-1].unmeasured == ("attention_before", "attention_after", "output_penalty")
    ends = [period for period, each in enumerate(decisions, start=1) if each.is_retained]
    chosen = ends[0] if ends else length
    best = min(engine.us_per_token(period) for period in range(1, length + 1))
    assert engine.us_per_token(chosen) == pytest.approx(best, rel=1e-9)
    predicted = predict_period(curves, costs).period_rounds
    assert engine.us_per_token(predicted) == pytest.approx(best, rel=1e-9)


def test_CST_2_a_decision_keeps_the_formulas_terms():
    """CST-2: time of a round before and after, penalty on accepted tokens, horizon and margin."""
    curves = round_curves(
        [
            RoundSample(age_rounds=age, round_us=us, num_gained_tokens=tokens)
            for age, (us, tokens) in enumerate([(100.0, 8), (110.0, 6), (150.0, 4)])
        ],
        min_samples=1,
    )
    found = decide_reselection(curves, selection_costs(60), period_rounds=2, margin_us=7.0)
    terms = found.benefits
    assert (terms.attention_before, terms.attention_after) == (measured(150.0), measured(105.0))
    assert terms.output_penalty.value_us == pytest.approx(2 * 150 * (1 - 7 / 4))
    assert terms.avoided_stall == assumed(0.0)
    assert (found.horizon_steps, found.margin_us) == (2, 7.0)
    assert found.benefit_us == pytest.approx(2 * 45 + 225)
    assert found.is_retained is True
    lasting = decide_reselection(curves, selection_costs(60), period_rounds=2, margin_us=256.0)
    assert lasting.is_retained is False


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=40))
def test_curves_are_the_closest_monotone_ones(samples):
    """Pooled means by the minimax formula of isotonic regression, age by age."""
    rounds = [
        RoundSample(age_rounds=age, round_us=10.0 * tokens, num_gained_tokens=tokens)
        for age, tokens in samples
    ]
    curves = round_curves(rounds, min_samples=2)
    by_age = [[t for a, t in samples if a == age] for age in range(6)]
    num_ages = next((age for age, each in enumerate(by_age) if len(each) < 2), 6)
    assert curves.num_ages == num_ages

    def pooled(values, first, last):
        weights = [len(by_age[age]) for age in range(first, last + 1)]
        total = sum(w * v for w, v in zip(weights, values[first : last + 1], strict=True))
        return total / sum(weights)

    means = [statistics.mean(each) for each in by_age[:num_ages]]
    medians = [10.0 * statistics.median(each) for each in by_age[:num_ages]]
    for age in range(num_ages):
        ends, begins = range(age, num_ages), range(age + 1)
        falling = min(max(pooled(means, first, last) for last in ends) for first in begins)
        rising = max(min(pooled(medians, first, last) for last in ends) for first in begins)
        assert curves.gained_tokens[age] == pytest.approx(falling)
        assert curves.round_us[age] == pytest.approx(rising)


def drive(policy, engine, num_rounds):
    """Runs rounds as a session does; returns the decisions."""
    decisions = []
    for _ in range(num_rounds):
        decision = policy.decide()
        decisions.append(decision)
        policy.book_round(engine.round(decision.age_rounds))
        if decision.is_reselecting:
            policy.book_selection(selection_costs(engine.select_us))
    return decisions


def periods_of(decisions):
    ends = [number for number, each in enumerate(decisions, start=1) if each.is_reselecting]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def test_a_fixed_period_is_kept_and_costs_nothing():
    policy = Reselection(period_rounds=3)
    decisions = drive(policy, Engine(**ENGINES[0]), 10)
    assert periods_of(decisions) == [3, 3, 3]
    assert {each.basis for each in decisions} == {Basis.FIXED}
    assert {each.retention for each in decisions} == {None}
    assert policy.rounds == ()
    assert policy.num_rounds_by_basis == {Basis.FIXED: 10}


def test_a_recorded_fixed_period_says_what_the_costs_would_have_decided():
    """CST-2: the terms are recorded, and the period stays."""
    decisions = drive(Reselection(period_rounds=3, is_recorded=True), Engine(**ENGINES[3]), 20)
    assert set(periods_of(decisions)) == {3}
    assert {each.basis for each in decisions} == {Basis.FIXED}
    assert decisions[0].retention.is_retained is None
    assert decisions[-2].retention.is_retained is True


@pytest.mark.parametrize("facts", ENGINES)
def test_online_the_period_becomes_the_best_one(facts):
    """It measures, goes on to longer periods only while they may pay, and settles."""
    engine = Engine(**facts)
    longest = 64
    online = OnlineReselection(max_period_rounds=longest, insurance_share=0.0)
    policy = Reselection(period_rounds=4, online=online)
    decisions = drive(policy, engine, 700)
    best = engine.best_fixed(longest)
    settled = statistics.median(periods_of(decisions)[-16:])
    assert abs(settled - best) <= max(0.1 * best, 0.5)
    assert [each.basis for each in decisions[:8]] == [Basis.UNMEASURED] * 8
    assert periods_of(decisions)[:2] == [4, 4]


@pytest.mark.parametrize("facts", [*ENGINES, slower(2_000, 0.0), fewer(2_000, 0.002)])
def test_insurance_costs_no_more_than_its_share(facts):
    """CST-2: within a tenth of the best fixed period's time a token, by default, whatever it is."""
    engine = Engine(**facts)
    policy = Reselection(period_rounds=4, online=OnlineReselection())
    decisions = drive(policy, engine, 400)
    settled = int(statistics.median(periods_of(decisions)[-16:]))
    best = engine.us_per_token(engine.best_fixed(16))
    assert engine.us_per_token(settled) <= 1.06 * best
    assert policy.predict().period_rounds == settled
    last = next(each.retention for each in reversed(decisions) if each.basis is Basis.DECIDED)
    assert last.margin_us < 0, "the record says how much the measured benefit may fall short"


def test_where_rounds_waver_a_cheap_selection_is_made_often():
    """Gains of 1 to 9 tokens hide how a selection ages; a selection of 2 % of a round is cheap."""
    random_ = random.Random(4)
    gains = [1, 3, 5, 9, 9, 9]

    def round_at(age):
        gained = max(1, random_.choice(gains) - (age >= 4) * random_.randrange(3))
        return RoundSample(age_rounds=age, round_us=250_000.0, num_gained_tokens=gained)

    for _ in range(20):
        rounds = [round_at(age) for _ in range(3) for age in range(16)]
        curves, costs = round_curves(rounds), selection_costs(5_000)
        assert predict_period(curves, costs, insurance_share=0.03).period_rounds == 1


def test_calibrated_costs_decide_from_the_first_round():
    engine = Engine(**slower(100_000, 0.02))
    calibrated = OnlineReselection(
        insurance_share=0.0,
        costs=(selection_costs(100_000),),
        rounds=tuple(engine.round(age) for _ in range(2) for age in range(16)),
    )
    decisions = drive(Reselection(period_rounds=4, online=calibrated), engine, 40)
    assert {each.basis for each in decisions} == {Basis.DECIDED}
    assert periods_of(decisions) == [engine.best_fixed(16)] * len(periods_of(decisions))


@pytest.mark.parametrize("name", [field.name for field in fields(RetainCosts)])
def test_CST_1_an_unmeasured_cost_keeps_the_fixed_period(name):
    """CST-1: no term becomes 0; every decision is open, names it, and says what was done."""
    engine = Engine(**ENGINES[3])
    policy = Reselection(period_rounds=5, online=OnlineReselection())
    decisions = []
    for _ in range(60):
        decisions.append(policy.decide())
        policy.book_round(engine.round(decisions[-1].age_rounds))
        if decisions[-1].is_reselecting:
            policy.book_selection(replace(selection_costs(10), **{name: UNMEASURED}))
    assert set(periods_of(decisions)) == {5}
    assert {each.basis for each in decisions} == {Basis.UNMEASURED}
    assert {each.retention.is_retained for each in decisions} == {None}
    assert name in decisions[-1].retention.unmeasured
    assert policy.predict() is None


def test_one_cycle_in_eight_measures_one_round_more():
    engine = Engine(**slower(10, 0.5))
    decisions = drive(Reselection(period_rounds=2, online=OnlineReselection()), engine, 100)
    found = periods_of(decisions)
    assert found == [
        2 if number in {0, 1} or number % 8 == 7 else 1 for number in range(len(found))
    ]


def test_the_longest_period_is_never_passed():
    engine = Engine(select_us=1e9, round_us=lambda age: 1.0, gained=lambda age: 5)
    policy = Reselection(period_rounds=2, online=OnlineReselection(max_period_rounds=7))
    decisions = drive(policy, engine, 200)
    assert max(periods_of(decisions)) == 7
    assert decisions[-1].basis in {Basis.LONGEST, Basis.DECIDED}


def test_medians_of_costs_keep_gaps_and_assumptions():
    """CST-1: a term is measured only where every sample is, and missing where one is."""
    samples = [selection_costs(6), selection_costs(600), selection_costs(60)]
    assert median_costs(samples) == selection_costs(60)
    assert median_costs([]).plan == UNMEASURED
    one = replace(samples[0], plan=UNMEASURED, wait=assumed(3.0))
    found = median_costs([*samples, one])
    assert found.plan == UNMEASURED
    assert found.wait.source is TermSource.ASSUMED
    assert found.allocator.source is TermSource.MEASURED


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"age_rounds": -1, "round_us": 1.0, "num_gained_tokens": 1}, "`age_rounds` is -1"),
        ({"age_rounds": 0, "round_us": 0.0, "num_gained_tokens": 1}, "`round_us` 0.0"),
        ({"age_rounds": 0, "round_us": math.nan, "num_gained_tokens": 1}, "`round_us` nan"),
        ({"age_rounds": 0, "round_us": 1.0, "num_gained_tokens": 0}, "`num_gained_tokens` is 0"),
    ],
)
def test_impossible_rounds_are_refused(facts, said):
    with pytest.raises(CompactionError, match=said):
        RoundSample(**facts)
    with pytest.raises(CompactionError, match="`period_rounds` is 0"):
        Reselection(period_rounds=0)
