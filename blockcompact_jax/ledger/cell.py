"""Where a host keeps its one ledger, and what changes it: events in order, and the way back."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from .apply import apply_event
from .state import LedgerShape, LedgerState, empty_state, event_of_rows

EventRow = tuple[int, ...]
"""One event, in the order of `EVENT_FIELDS`."""


class Cell(Protocol):
    """One ledger. Every implementation gives the same answers and the same state to the bit."""

    @property
    def state(self) -> LedgerState:
        """What the ledger knows, one lane. It may change in place with the next call: copy it."""
        ...

    def apply(self, rows: Sequence[EventRow]) -> Sequence[tuple[int, int]]:
        """Applies events in order; returns code and value of each."""
        ...

    def undo(self) -> None:
        """Takes the last `apply` back. A second time in a row it does nothing."""
        ...


class NumpyCell:
    """A `Cell` by `apply_event` itself: the reference."""

    def __init__(self, shape: LedgerShape, *, process_epoch: int) -> None:
        """Starts empty."""
        self._state = self._before = empty_state(shape, process_epoch=process_epoch)

    @property
    def state(self) -> LedgerState:
        """See `Cell.state`."""
        return self._state

    def apply(self, rows: Sequence[EventRow]) -> Sequence[tuple[int, int]]:
        """See `Cell.apply`."""
        self._before = self._state
        answers: list[tuple[int, int]] = []
        for row in np.asarray(rows, np.int32):
            self._state, outcome = apply_event(self._state, event_of_rows(row[None]))
            answers.append((int(outcome.code[0]), int(outcome.value[0])))
        return answers

    def undo(self) -> None:
        """See `Cell.undo`."""
        self._state = self._before
