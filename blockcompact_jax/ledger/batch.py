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
from .rules import RULES, Rules
from .state import Event, LedgerState, Outcome, event_of_rows


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


def count_dispositions(state: LedgerState) -> Int32[AnyArray, " disposition"]:
    """Returns how many events were applied, repeated, ignored and refused, over all lanes."""
    return np.asarray(state.counts).sum(axis=0, dtype=np.int32)
