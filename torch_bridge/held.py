"""How long sequences hold their selections in engines whose decoding reads selected blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int32

from blockcompact_jax.budget import OptionError
from blockcompact_jax.decision_log import DecisionLog
from blockcompact_jax.period import (
    MAX_MASS_LOST,
    HeldSelection,
    PeriodByMass,
    PeriodChoice,
    mass_decision,
    mass_missed,
    mass_missed_at_best,
)
from blockcompact_jax.reselection import Basis

AUTO: Literal["auto"] = "auto"
"""Value of `reselect_every_tokens` that lets the engine choose."""

EveryTokens = int | Literal["auto"]


def check_every_tokens(every_tokens: Any, max_mass_lost: Any) -> None:
    """Refuses a period, or a bound of the mass that one may lose, that cannot be used.

    Args:
        every_tokens: as given for `reselect_every_tokens`.
        max_mass_lost: as given; None where it was not.

    Raises:
        OptionError: naming which.
    """
    is_number = isinstance(every_tokens, int) and not isinstance(every_tokens, bool)
    if every_tokens != AUTO and not (is_number and every_tokens >= 1):
        raise OptionError(
            f"`reselect_every_tokens` is {every_tokens!r}, expected a whole number of 1 or more, "
            f"or {AUTO!r}"
        )
    if max_mass_lost is None:
        return
    if every_tokens != AUTO:
        raise OptionError(
            f"`max_mass_lost` is given with `reselect_every_tokens` {every_tokens!r}, expected "
            f"{AUTO!r}: a fixed period has no bound"
        )
    is_share = isinstance(max_mass_lost, (int, float)) and not isinstance(max_mass_lost, bool)
    if not (is_share and 0 < max_mass_lost < 1):
        raise OptionError(
            f"`max_mass_lost` is {max_mass_lost!r}, expected a share of attention mass above 0 and "
            "below 1, for example 0.01"
        )


def open_log(path: Path | str | None, **facts: Any) -> DecisionLog | None:
    """Begins a log of decisions.

    Args:
        path: its file; None where nobody asked for one.
        **facts: of the engine.

    Raises:
        CompactionError: if it cannot be written.
    """
    return None if path is None else DecisionLog(Path(path), **facts)


class Blocks(NamedTuple):
    """What one selection attends to, beside everything newer.

    Attributes:
        selected: logical blocks of each row.
        num_candidate_blocks: blocks it was made from.
    """

    selected: Int32[np.ndarray, "row selected"]
    num_candidate_blocks: int


class HoldingPeriod:
    """The tokens that a selection serves: fixed, or by what held selections lost.

    Attributes:
        log: where decisions go; None where nobody asked.
    """

    def __init__(
        self,
        every_tokens: EveryTokens,
        *,
        first_tokens: int,
        max_mass_lost: float | None,
        log: DecisionLog | None,
    ) -> None:
        """Starts with the first period.

        Args:
            every_tokens: the period, or "auto".
            first_tokens: what "auto" begins to measure with.
            max_mass_lost: share of attention mass that age may lose under "auto"; None for 0.01.
            log: where decisions go.
        """
        self._max_mass_lost = MAX_MASS_LOST if max_mass_lost is None else max_mass_lost
        self._by_mass: PeriodByMass | None = None
        self._fixed = first_tokens
        if every_tokens == AUTO:
            self._by_mass = PeriodByMass(
                first_tokens=first_tokens, max_mass_lost=self._max_mass_lost
            )
        else:
            self._fixed = every_tokens
        self.log = log

    @property
    def choice(self) -> PeriodChoice:
        """The period now, in tokens, and why."""
        if self._by_mass is None:
            return PeriodChoice(period=self._fixed, basis=Basis.FIXED)
        return self._by_mass.choice

    @property
    def is_asking(self) -> bool:
        """Whether `book` does anything with what it is told."""
        return self._by_mass is not None or self.log is not None

    def book(
        self,
        mass: Float[np.ndarray, "row block"],
        *,
        held: Blocks,
        age_tokens: int,
        num_tokens: int,
        select_us: float,
        **facts: Any,
    ) -> None:
        """Takes what a selection was worth when the next one was made.

        Args:
            mass: attention mass of each logical block to the newest query, mean over heads.
            held: the selection that ends.
            age_tokens: tokens that the first served.
            num_tokens: tokens of the sequence.
            select_us: time of scoring and selecting.
            **facts: what the log says of it as well.
        """
        sample = HeldSelection(
            age_tokens=age_tokens,
            mass_missed=mass_missed(mass, *held),
            mass_missed_at_best=mass_missed_at_best(
                mass, held.selected.shape[1], held.num_candidate_blocks
            ),
            select_us=select_us,
        )
        if self._by_mass is not None:
            self._by_mass.book(sample)
        if self.log is not None:
            decision = mass_decision(
                sample,
                self.choice,
                num_tokens=num_tokens,
                mass_lost=None if self._by_mass is None else self._by_mass.mass_lost(sample),
                max_mass_lost=None if self._by_mass is None else self._max_mass_lost,
            )
            self.log.add({**facts, **decision})
