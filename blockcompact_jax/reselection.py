"""When to select anew: how many rounds a selection serves, from what rounds and selections cost.

A cycle is one selection and the p rounds that it serves, of ages 0 … p-1. With T(a) the time of a
round of age a and g(a) the tokens it gains, S(p) and G(p) their sums over the cycle, and K what a
selection costs, a token takes (K + S(p)) / G(p). One more round raises that exactly where

    p · [T(p) - S(p) / p] - p · T(p) · [1 - G(p) / (p · g(p))]  >  K

which is the retention decision of `costs` with a horizon of p rounds: the step before is the next
round as it would be, the step after is the mean round of the cycle, and the second part is the
penalty on accepted tokens, negative where a fresh selection has more of them accepted. An older
selection never makes a round faster or more often accepted, so T and g are taken as monotone means
of what was measured, and the first period that the decision ends is the best one.
"""

from __future__ import annotations

import enum
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

from blockcompact_jax.costs import (
    UNMEASURED,
    RetainBenefits,
    RetainCosts,
    RetainDecision,
    Term,
    TermSource,
    assumed,
    decide_retention,
    measured,
)
from blockcompact_jax.errors import CompactionError
from blockcompact_jax.round_curves import (
    MAX_SAMPLES,
    RoundCurves,
    RoundSample,
    monotone,
    round_curves,
)

INSURANCE_SHARE = 0.03
"""Share of a cycle's time that a selection may cost beyond its measured benefit.

Tokens a round waver by half of their mean: a few dozen rounds cannot tell a selection that ages by
a few percent from one that does not. A selection too many costs its own known time; one too few
costs accepted tokens that nobody can bound.
"""
REVISIT_EVERY_CYCLES = 8
"""Every so many cycles one is a round longer than decided: that round is measured again."""


def decide_reselection(
    curves: RoundCurves,
    costs: RetainCosts,
    *,
    period_rounds: int,
    margin_us: float = 0.0,
    insurance_share: float = 0.0,
) -> RetainDecision:
    """Decides whether a cycle ends with `period_rounds` rounds, or goes on.

    Args:
        curves: rounds by age. The decision needs ages 0 … `period_rounds`; with fewer its benefits
            are unmeasured and it is open.
        costs: what a selection and its retention take.
        period_rounds: rounds of the cycle, the horizon of the decision.
        margin_us: what the benefit must exceed the cost by.
        insurance_share: share of the cycle's time that is taken off the margin.

    Returns:
        The decision. `avoided_stall` is assumed as 0: the pool has room for every round up to the
        longest period, so that nothing waits for capacity.
    """
    benefits = RetainBenefits(avoided_stall=assumed(0.0))
    if period_rounds < curves.num_ages:
        cycle_us = float(curves.round_us[:period_rounds].sum())
        margin_us -= insurance_share * cycle_us
        cycle_tokens = float(curves.gained_tokens[:period_rounds].sum())
        next_us = float(curves.round_us[period_rounds])
        next_tokens = period_rounds * float(curves.gained_tokens[period_rounds])
        benefits = RetainBenefits(
            attention_before=measured(next_us),
            attention_after=measured(cycle_us / period_rounds),
            avoided_stall=assumed(0.0),
            output_penalty=measured(period_rounds * next_us * (1 - cycle_tokens / next_tokens)),
        )
    return decide_retention(costs, benefits, horizon_steps=period_rounds, margin_us=margin_us)


@dataclass(frozen=True, kw_only=True)
class PeriodPrediction:
    """What each period would take.

    Attributes:
        period_rounds: the first that the decision ends, the longest measured one if none.
        us_per_token: time of a token by period, the first for a period of one round.
    """

    period_rounds: int
    us_per_token: tuple[float, ...]


def predict_period(
    curves: RoundCurves, costs: RetainCosts, *, insurance_share: float = 0.0
) -> PeriodPrediction | None:
    """The period of those whose every age is measured that `decide_reselection` ends.

    Args:
        curves: rounds by age.
        costs: what a selection and its retention take.
        insurance_share: as of the decision; 0 gives the period with the least time a token.

    Returns:
        The prediction; None while a cost or the first age is unmeasured.
    """
    terms = [getattr(costs, each.name).value_us for each in fields(costs)]
    if None in terms or not curves.num_ages:
        return None
    cost_us = sum(terms)
    tokens, cycle_us = curves.gained_tokens.cumsum(), curves.round_us.cumsum()
    us_per_token = (cost_us + cycle_us) / tokens
    next_us = curves.round_us[1:] / curves.gained_tokens[1:] * tokens[:-1]
    is_ended = next_us > cost_us + (1 - insurance_share) * cycle_us[:-1]
    return PeriodPrediction(
        period_rounds=int(is_ended.argmax()) + 1 if is_ended.any() else curves.num_ages,
        us_per_token=tuple(us_per_token.tolist()),
    )


def median_costs(samples: Iterable[RetainCosts]) -> RetainCosts:
    """Medians of several selections, term by term; unmeasured where one of them is."""
    samples = list(samples)
    return RetainCosts(
        **{
            each.name: _median([getattr(sample, each.name) for sample in samples])
            for each in fields(RetainCosts)
        }
    )


def _median(terms: Sequence[Term]) -> Term:
    values = [term.value_us for term in terms if term.value_us is not None]
    if not values or len(values) < len(terms):
        return UNMEASURED
    is_measured = all(term.source is TermSource.MEASURED for term in terms)
    return (measured if is_measured else assumed)(statistics.median(values))


class Basis(enum.Enum):
    """What a round's decision rests on."""

    FIXED = "fixed period"
    DECIDED = "costs"
    BOUNDED = "mass lost"
    UNMEASURED = "unmeasured: fixed period kept"
    MEASURING = "measuring another period"
    LONGEST = "longest period"


@dataclass(frozen=True, kw_only=True)
class RoundDecision:
    """Whether a round ends its cycle, and why.

    Attributes:
        age_rounds: rounds since the last selection.
        is_reselecting: whether blocks are selected anew after this round.
        basis: what that rests on.
        retention: the decision of the costs with every term; None where nobody asked for it.
    """

    age_rounds: int
    is_reselecting: bool
    basis: Basis
    retention: RetainDecision | None


@dataclass(frozen=True, kw_only=True)
class OnlineReselection:
    """How an online choice of the period starts, and how far it may go.

    Attributes:
        max_period_rounds: longest period; the resident pool has room for its tokens.
        margin_us: what a benefit must exceed its cost by.
        insurance_share: share of a cycle's time that is taken off the margin.
        costs: calibrated costs of a selection; empty to measure them during the run.
        rounds: calibrated rounds; empty to measure them during the run.
    """

    max_period_rounds: int = 16
    margin_us: float = 0.0
    insurance_share: float = INSURANCE_SHARE
    costs: tuple[RetainCosts, ...] = ()
    rounds: tuple[RoundSample, ...] = ()


@dataclass(kw_only=True)
class Reselection:
    """Says before each round whether blocks are selected anew after it.

    With a fixed period every `period_rounds`-th round does. Online, the decision of the costs
    says so where all of its terms are known. Where they are not, the fixed period is kept; once
    every age within it is measured and no decision ended a cycle there, one cycle runs twice as
    long, and so on up to the longest period.

    The order of calls is `decide`, `book_round`, and `book_selection` where one was made.

    Attributes:
        period_rounds: the fixed period.
        online: how an online choice starts; None for the fixed period alone.
        is_recorded: whether decisions of a fixed period have their terms too.
        num_rounds_by_basis: rounds decided so far.
    """

    period_rounds: int
    online: OnlineReselection | None = None
    is_recorded: bool = False
    num_rounds_by_basis: dict[Basis, int] = field(default_factory=dict[Basis, int])

    def __post_init__(self) -> None:
        if self.period_rounds < 1:
            raise CompactionError(f"`period_rounds` is {self.period_rounds}; give 1 or more.")
        if self.is_asked:
            monotone([1.0], [1.0], is_rising=True)  # no round is to pay for the import
        online = self.online or OnlineReselection(max_period_rounds=self.period_rounds)
        self.max_period_rounds = max(online.max_period_rounds, self.period_rounds)
        self._margin_us = online.margin_us
        self._insurance_share = online.insurance_share if self.online else 0.0
        self._costs = deque(online.costs, maxlen=MAX_SAMPLES)
        self._rounds: dict[int, deque[RoundSample]] = {}
        for sample in online.rounds:
            self._keep(sample)
        self._age_rounds = 0
        self._num_cycles = 0
        self._is_revisited = False
        self._longest_rounds = min(
            max(self.period_rounds, self._curves().num_ages), self.max_period_rounds
        )

    @property
    def rounds(self) -> tuple[RoundSample, ...]:
        """The newest rounds of each age, calibrated ones included; empty where nobody asked."""
        return tuple(sample for rounds in self._rounds.values() for sample in rounds)

    @property
    def is_asked(self) -> bool:
        """Whether anybody reads costs and rounds; if not, none are kept."""
        return self.is_recorded or self.online is not None

    def decide(self) -> RoundDecision:
        """The decision for the round that is about to run."""
        retention = None
        if self.is_asked:
            retention = decide_reselection(
                self._curves(),
                median_costs(self._costs),
                period_rounds=self._age_rounds + 1,
                margin_us=self._margin_us,
                insurance_share=self._insurance_share,
            )
        is_reselecting, basis = self._choose(retention)
        self.num_rounds_by_basis[basis] = self.num_rounds_by_basis.get(basis, 0) + 1
        return RoundDecision(
            age_rounds=self._age_rounds,
            is_reselecting=is_reselecting,
            basis=basis,
            retention=retention,
        )

    def book_round(self, sample: RoundSample) -> None:
        """Takes what the round took and gave."""
        if self.is_asked:
            self._keep(sample)
        self._age_rounds += 1

    def book_selection(self, costs: RetainCosts | None) -> None:
        """Takes what the selection cost; None where it says nothing of later ones."""
        if costs is not None and self.is_asked:
            self._costs.append(costs)
        self._age_rounds = 0
        self._num_cycles += 1
        self._is_revisited = False

    def predict(self) -> PeriodPrediction | None:
        """The period that an online choice comes to by all that was measured so far."""
        return predict_period(
            self._curves(), median_costs(self._costs), insurance_share=INSURANCE_SHARE
        )

    def _keep(self, sample: RoundSample) -> None:
        self._rounds.setdefault(sample.age_rounds, deque(maxlen=MAX_SAMPLES)).append(sample)

    def _curves(self) -> RoundCurves:
        return round_curves(self.rounds)

    def _choose(self, retention: RetainDecision | None) -> tuple[bool, Basis]:
        period = self._age_rounds + 1
        if self.online is None or retention is None:
            return period >= self.period_rounds, Basis.FIXED
        if period >= self.max_period_rounds:
            return True, Basis.LONGEST
        if self._is_revisited:
            return True, Basis.MEASURING
        is_visit = (self._num_cycles + 1) % REVISIT_EVERY_CYCLES == 0
        if retention.is_retained and is_visit:
            self._is_revisited = True
            return False, Basis.MEASURING
        if retention.is_retained is not None:
            return retention.is_retained, Basis.DECIDED
        if period >= self._longest_rounds and self._is_only_next_age_missing(period, retention):
            self._longest_rounds = min(2 * self._longest_rounds, self.max_period_rounds)
        is_measuring = self._longest_rounds > self.period_rounds
        basis = Basis.MEASURING if is_measuring else Basis.UNMEASURED
        return period >= self._longest_rounds, basis

    def _is_only_next_age_missing(self, period: int, retention: RetainDecision) -> bool:
        """Whether every shorter period was measured and found too short."""
        return retention.cost_us is not None and self._curves().num_ages >= period
