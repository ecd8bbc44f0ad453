"""How long an engine holds a selection: the period between two, chosen as it goes.

What is traded depends on what a selection decides:

* where drafts are verified, an old selection costs accepted tokens: the period with the least time
  a token (`PeriodByCosts`, by the rounds and costs of `reselection`);
* where decoding itself reads the selected blocks, it costs attention. Mass and microseconds have no
  rate of exchange, so one of them is bounded: the longest period, hence the cheapest, whose
  selections lose at most a given share of attention mass to their age (`PeriodByMass`).

Either way `next_period` makes the choice, from the best period by what was measured so far and how
far that reaches.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from blockcompact_jax.costs import RetainCosts, decision_row
from blockcompact_jax.errors import CompactionError
from blockcompact_jax.reselection import (
    INSURANCE_SHARE,
    REVISIT_EVERY_CYCLES,
    Basis,
    OnlineReselection,
    decide_reselection,
    median_costs,
    predict_period,
)
from blockcompact_jax.round_curves import MAX_SAMPLES, RoundSample, monotone, round_curves

MAX_MASS_LOST = 0.01
"""Share of attention mass that a selection may lose to its age, where nobody says another."""
MAX_PERIOD_TOKENS = 256
"""Longest period that mass chooses."""


@dataclass(frozen=True, kw_only=True)
class PeriodChoice:
    """The period until the next selection, and why.

    Attributes:
        period: tokens or rounds, as what chose it counts.
        basis: what it rests on.
    """

    period: int
    basis: Basis


def next_period(
    best: float | None,
    *,
    longest_measured: int,
    first: int,
    max_period: int,
    decided_by: Basis = Basis.DECIDED,
) -> PeriodChoice:
    """Chooses a period by what was measured so far.

    Args:
        best: the best period; None while it cannot be said.
        longest_measured: the longest that was measured. The best one may lie behind it, so that a
            `best` as long is followed by one of twice the length.
        first: period while nothing can be said.
        max_period: longest period.
        decided_by: what says which one is best.
    """
    if best is None:
        return PeriodChoice(period=min(first, max_period), basis=Basis.UNMEASURED)
    if best < longest_measured:
        return PeriodChoice(period=max(1, int(best)), basis=decided_by)
    if longest_measured >= max_period:
        return PeriodChoice(period=max_period, basis=Basis.LONGEST)
    return PeriodChoice(period=min(2 * longest_measured, max_period), basis=Basis.MEASURING)


@dataclass(frozen=True, kw_only=True)
class HeldSelection:
    """What a selection was worth when the next one was made, to the newest query.

    Attributes:
        age_tokens: tokens since it was made, 1 or more.
        mass_missed: share of attention mass in blocks that it left out, mean over layers and heads.
        mass_missed_at_best: the same, had as many of the same blocks been chosen in hindsight, by
            this very query.
        select_us: time of scoring and selecting.
    """

    age_tokens: int
    mass_missed: float
    mass_missed_at_best: float
    select_us: float

    def __post_init__(self) -> None:
        if self.age_tokens < 1:
            raise CompactionError(f"`age_tokens` is {self.age_tokens}; expected 1 or more.")

    @property
    def mass_beyond_best(self) -> float:
        """What hindsight would have kept. Even a fresh selection cannot know the next query."""
        return self.mass_missed - self.mass_missed_at_best


def mass_missed(
    mass: Float[np.ndarray, "row block"],
    selected: Int[np.ndarray, "row selected"],
    num_candidate_blocks: int,
) -> float:
    """Share of attention mass in candidate blocks that are not selected, mean over rows.

    Args:
        mass: of each logical block; each row adds up to 1.
        selected: logical blocks below `num_candidate_blocks`, each once a row.
        num_candidate_blocks: blocks before the always-attended tail.
    """
    candidates = mass[:, :num_candidate_blocks].sum(axis=1)
    held = np.take_along_axis(mass, selected.astype(np.int64), axis=1).sum(axis=1)
    return float((candidates - held).mean())


def mass_missed_at_best(
    mass: Float[np.ndarray, "row block"], num_selected: int, num_candidate_blocks: int
) -> float:
    """The least share of attention mass that so many blocks of each row can miss, mean over rows.

    Args:
        mass: of each logical block; each row adds up to 1.
        num_selected: blocks a row.
        num_candidate_blocks: blocks before the always-attended tail.
    """
    ranked = np.sort(mass[:, :num_candidate_blocks], axis=1)
    return float(ranked[:, : max(num_candidate_blocks - num_selected, 0)].sum(axis=1).mean())


def longest_within(samples: Iterable[HeldSelection], *, max_mass_lost: float) -> float | None:
    """The longest period whose selections lose at most `max_mass_lost`, as far as was measured.

    What an age loses is its `mass_beyond_best` over that of age 1. By age it is taken as monotone,
    by isotonic regression, and as linear between two ages.

    Args:
        samples: held selections.
        max_mass_lost: share of attention mass.

    Returns:
        Tokens, 1 or more; the longest measured age where none loses more; None without a sample of
        age 1.
    """
    by_age: dict[int, list[float]] = {}
    for sample in samples:
        by_age.setdefault(sample.age_tokens, []).append(sample.mass_beyond_best)
    if 1 not in by_age:
        return None
    ages = sorted(by_age)
    means = [statistics.fmean(by_age[age]) for age in ages]
    beyond_best = monotone(means, [len(by_age[age]) for age in ages], is_rising=True)
    lost: list[float] = (beyond_best - beyond_best[0]).tolist()
    behind = next((place for place, each in enumerate(lost) if each > max_mass_lost), None)
    if behind is None:
        return float(ages[-1])
    before = behind - 1
    share = (max_mass_lost - lost[before]) / (lost[behind] - lost[before])
    return ages[before] + share * (ages[behind] - ages[before])


def check_max_mass_lost(max_mass_lost: float) -> None:
    """Refuses what is no share.

    Raises:
        CompactionError: naming it.
    """
    if not 0 < max_mass_lost < 1:
        raise CompactionError(
            f"`max_mass_lost` is {max_mass_lost}; expected a share of attention mass above 0 and "
            "below 1, for example 0.01."
        )


class PeriodByMass:
    """Chooses the period of a lossy engine in tokens, from what held selections lost.

    The first selection, and every eighth after it, is held for one token: what it misses then is
    what a fresh one misses.

    Attributes:
        choice: the period now.
    """

    def __init__(
        self,
        *,
        first_tokens: int,
        max_mass_lost: float = MAX_MASS_LOST,
        max_tokens: int = MAX_PERIOD_TOKENS,
    ) -> None:
        """Starts with a period of one token, then `first_tokens`.

        Args:
            first_tokens: second period, of which longer or shorter ones follow.
            max_mass_lost: share of attention mass that age may lose.
            max_tokens: longest period.

        Raises:
            CompactionError: for a share that is none.
        """
        check_max_mass_lost(max_mass_lost)
        monotone([1.0], [1.0], is_rising=True)  # no step is to pay for the import
        self._first, self._max = first_tokens, max_tokens
        self._max_mass_lost = max_mass_lost
        self._samples: deque[HeldSelection] = deque(maxlen=MAX_SAMPLES)
        self._num_booked = 0
        self.choice = self._choose()

    def book(self, sample: HeldSelection) -> None:
        """Takes what a held selection was worth, and chooses anew."""
        self._samples.append(sample)
        self._num_booked += 1
        self.choice = self._choose()

    def mass_lost(self, sample: HeldSelection) -> float | None:
        """What a selection lost to its age; None while no fresh one was measured."""
        fresh = [each.mass_beyond_best for each in self._samples if each.age_tokens == 1]
        return sample.mass_beyond_best - statistics.fmean(fresh) if fresh else None

    def _choose(self) -> PeriodChoice:
        if self._num_booked % REVISIT_EVERY_CYCLES == 0:
            return PeriodChoice(period=1, basis=Basis.MEASURING)
        if self._num_booked == 1:
            return PeriodChoice(period=min(self._first, self._max), basis=Basis.MEASURING)
        return next_period(
            longest_within(self._samples, max_mass_lost=self._max_mass_lost),
            longest_measured=max((each.age_tokens for each in self._samples), default=0),
            first=self._first,
            max_period=self._max,
            decided_by=Basis.BOUNDED,
        )


class PeriodByCosts:
    """Chooses the period of a verifying engine in rounds, with the least time a token.

    One chooses for all requests of an engine, which are of several ages at a time: unlike
    `reselection.Reselection`, which decides round by round for one sequence, it is asked for a
    period.

    Attributes:
        choice: the period now.
        retention: the decision of the costs that it rests on; open while terms are missing.
    """

    def __init__(self, *, first_rounds: int, max_rounds: int | None = None) -> None:
        """Starts with `first_rounds`, until rounds and selections were measured.

        Args:
            first_rounds: first period.
            max_rounds: longest period; None for that of `OnlineReselection`.
        """
        monotone([1.0], [1.0], is_rising=True)  # no step is to pay for the import
        self._first = first_rounds
        self._max = max_rounds or OnlineReselection.max_period_rounds
        self._rounds: dict[int, deque[RoundSample]] = {}
        self._costs: deque[RetainCosts] = deque(maxlen=MAX_SAMPLES)
        self._num_selections = 0
        self.choice = self._choose()

    def book_round(self, sample: RoundSample) -> None:
        """Takes what a round took and gave."""
        rounds = self._rounds.setdefault(sample.age_rounds, deque(maxlen=MAX_SAMPLES))
        rounds.append(sample)

    def book_selection(self, costs: RetainCosts) -> None:
        """Takes what a selection cost, and chooses anew."""
        self._costs.append(costs)
        self._num_selections += 1
        self.choice = self._choose()

    @property
    def tokens_per_round(self) -> float | None:
        """Mean of the rounds so far; None before the first."""
        gained = [each.num_gained_tokens for rounds in self._rounds.values() for each in rounds]
        return statistics.fmean(gained) if gained else None

    @property
    def costs(self) -> RetainCosts:
        """Medians of the newest selections, term by term."""
        return median_costs(self._costs)

    def decision_row(self) -> dict[str, Any]:
        """The choice with everything it rests on.

        Its terms are those of the decision that ended the chosen period; where none ends one yet,
        of the longest that has them all, which says to go on. `horizon_rounds` says which.
        """
        curves = self._curves
        return {
            **decision_row(self.retention),
            "round_us_by_age": curves.round_us.tolist(),
            "gained_tokens_by_age": curves.gained_tokens.tolist(),
            "tokens_per_round": self.tokens_per_round,
            "basis": self.choice.basis.value,
            "next_period_rounds": self.choice.period,
        }

    def _choose(self) -> PeriodChoice:
        self._curves = curves = round_curves(
            each for rounds in self._rounds.values() for each in rounds
        )
        costs = self.costs
        found = predict_period(curves, costs, insurance_share=INSURANCE_SHARE)
        ended = self._first if found is None else min(found.period_rounds, curves.num_ages - 1)
        self.retention = decide_reselection(
            curves, costs, period_rounds=max(ended, 1), insurance_share=INSURANCE_SHARE
        )
        choice = next_period(
            None if found is None else found.period_rounds,
            longest_measured=curves.num_ages,
            first=self._first,
            max_period=self._max,
        )
        is_revisit = self._num_selections % REVISIT_EVERY_CYCLES == REVISIT_EVERY_CYCLES - 1
        if choice.basis is Basis.DECIDED and is_revisit:
            return PeriodChoice(period=choice.period + 1, basis=Basis.MEASURING)
        return choice


def mass_decision(
    sample: HeldSelection,
    choice: PeriodChoice,
    *,
    num_tokens: int,
    mass_lost: float | None,
    max_mass_lost: float | None,
) -> dict[str, Any]:
    """One decision of a lossy engine, with everything it rests on.

    Args:
        sample: the selection that ended.
        choice: the period of the new one.
        num_tokens: tokens of the sequence.
        mass_lost: what age lost; None where it was not measured.
        max_mass_lost: the bound; None where the period is fixed.
    """
    return {
        "num_tokens": num_tokens,
        **asdict(sample),
        "mass_beyond_best": sample.mass_beyond_best,
        "mass_lost": mass_lost,
        "max_mass_lost": max_mass_lost,
        "basis": choice.basis.value,
        "next_period_tokens": choice.period,
    }
