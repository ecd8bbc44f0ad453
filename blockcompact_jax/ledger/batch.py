"""Many events in one call: `apply_event` compiled, and scanned over an event table."""

# pyright: reportUnknownMemberType=false

from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Int32

from blockcompact_jax.ids import AnyArray
from blockcompact_jax.typed_jit import typed_jit

from .apply import apply_event
from .kinds import EventKind
from .rules import RULES, Rules
from .state import EVENT_FIELDS, Event, LedgerState, Outcome, event_of_rows

_COMPILED_STEPS = 16


@typed_jit(static_argnames=("rules",))
def apply_event_jit(
    state: LedgerState, event: Event, *, rules: Rules = RULES
) -> tuple[LedgerState, Outcome]:
    """`apply_event`, compiled: the same result to the bit."""
    return apply_event(state, event, rules=rules, xp=jnp)


@typed_jit(static_argnames=("rules",))
def _scan(state: LedgerState, events: Event, *, rules: Rules) -> tuple[LedgerState, Outcome]:
    step = partial(apply_event, rules=rules, xp=jnp)
    return lax.scan(step, state, events)


def apply_events(
    state: LedgerState, rows: Int32[np.ndarray, "step lane field"], *, rules: Rules = RULES
) -> tuple[LedgerState, Outcome]:
    """Applies a table of events in order, in one compiled call.

    Args:
        state: What is known.
        rows: int32 events in the order of `EVENT_FIELDS`; one per step and lane.
        rules: The tables.

    Returns:
        The last state, and the outcome of every event. Shape [step, lane].
    """
    return _scan(state, event_of_rows(rows), rules=rules)


def run_events(
    state: LedgerState, table: Int32[np.ndarray, "step field"], *, is_compiled: bool
) -> tuple[LedgerState, Int32[np.ndarray, " step"], Int32[np.ndarray, " step"]]:
    """Applies events to one ledger in order.

    Args:
        state: One lane.
        table: int32 events in the order of `EVENT_FIELDS`.
        is_compiled: In compiled chunks of equal size, or one after another in numpy.

    Returns:
        The last state, and code and value of every event.
    """
    num_steps = table.shape[0]
    if not is_compiled:
        answers = np.zeros((2, num_steps), np.int32)
        for step, row in enumerate(table):
            state, outcome = apply_event(state, event_of_rows(row[None]))
            answers[:, step] = int(outcome.code[0]), int(outcome.value[0])
        return state, answers[0], answers[1]
    num_chunks = -(-num_steps // _COMPILED_STEPS)
    padded = np.zeros((num_chunks * _COMPILED_STEPS, len(EVENT_FIELDS)), np.int32)
    padded[:, 0] = EventKind.NONE
    padded[:num_steps] = table
    answers = np.zeros((2, num_chunks, _COMPILED_STEPS), np.int32)
    for place in range(num_chunks):
        first = place * _COMPILED_STEPS
        chunk = padded[first : first + _COMPILED_STEPS, None]
        state, outcome = apply_events(state, chunk)
        answers[:, place] = np.asarray(outcome.code)[:, 0], np.asarray(outcome.value)[:, 0]
    codes, values = answers.reshape(2, -1)[:, :num_steps]
    return state, codes, values


def count_dispositions(state: LedgerState) -> Int32[AnyArray, " disposition"]:
    """Returns how many events were applied, repeated, ignored and refused, over all lanes."""
    return np.asarray(state.counts).sum(axis=0, dtype=np.int32)
