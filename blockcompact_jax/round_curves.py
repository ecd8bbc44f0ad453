"""What rounds took and gained by the age of their selection, as monotone curves."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from jaxtyping import Float64

from blockcompact_jax.errors import CompactionError

MIN_SAMPLES = 2
"""Rounds of an age that must have run before the age counts as measured."""
MAX_SAMPLES = 32
"""Newest rounds of an age, and newest selections, that count: a growing context changes both."""


@dataclass(frozen=True, kw_only=True)
class RoundSample:
    """What one round took and gave.

    Attributes:
        age_rounds: rounds since the last selection, 0 for the first round after it.
        round_us: its time in microseconds.
        num_gained_tokens: tokens it gained, at least 1.
    """

    age_rounds: int
    round_us: float
    num_gained_tokens: int

    def __post_init__(self) -> None:
        if self.age_rounds < 0 or not 0 < self.round_us < float("inf"):
            raise CompactionError(
                f"`age_rounds` is {self.age_rounds} and `round_us` {self.round_us}; expected an "
                "age of 0 or more and a finite time above 0."
            )
        if self.num_gained_tokens < 1:
            raise CompactionError(
                f"`num_gained_tokens` is {self.num_gained_tokens}; a round gains 1 or more."
            )


@dataclass(frozen=True, kw_only=True)
class RoundCurves:
    """Rounds by age, as far as every age is measured.

    Attributes:
        round_us: float64 [age], time of a round; never falls with age.
        gained_tokens: float64 [age], tokens a round gains; never rises with age.
    """

    round_us: Float64[np.ndarray, " age"]
    gained_tokens: Float64[np.ndarray, " age"]

    @property
    def num_ages(self) -> int:
        """Ages that are measured, from 0 on."""
        return len(self.round_us)


def round_curves(samples: Iterable[RoundSample], *, min_samples: int = MIN_SAMPLES) -> RoundCurves:
    """Medians of the times and means of the tokens by age, made monotone by isotonic regression.

    Args:
        samples: rounds, in any order.
        min_samples: samples that an age needs to count as measured; ages after the first that has
            fewer are left out.
    """
    by_age: dict[int, list[RoundSample]] = {}
    for sample in samples:
        by_age.setdefault(sample.age_rounds, []).append(sample)
    ages: list[list[RoundSample]] = []
    while len(by_age.get(len(ages), [])) >= min_samples:
        ages.append(by_age[len(ages)])
    weights = [len(each) for each in ages]
    round_us = [statistics.median(sample.round_us for sample in each) for each in ages]
    gained = [statistics.fmean(sample.num_gained_tokens for sample in each) for each in ages]
    return RoundCurves(
        round_us=monotone(round_us, weights, is_rising=True),
        gained_tokens=monotone(gained, weights, is_rising=False),
    )


def monotone(
    values: Sequence[float], weights: Sequence[float], *, is_rising: bool
) -> Float64[np.ndarray, " value"]:
    """The nearest values that never fall, or never rise: isotonic regression.

    Args:
        values: in order.
        weights: of each, above 0.
        is_rising: never fall.
    """
    if not values:
        return np.empty(0)
    optimize: Any = import_module("scipy.optimize")  # 0.2 s that a fixed period need not spend
    return optimize.isotonic_regression(values, weights=weights, increasing=is_rising).x
