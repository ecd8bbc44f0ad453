"""numpy and the compiled call are one function: the same bytes for any events, sane or not."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.ledger import apply_event, apply_events, empty_state, make_event
from blockcompact_jax.ledger.batch import count_dispositions, run_events
from blockcompact_jax.ledger.invariants import find_bad_steps, find_violations
from blockcompact_jax.ledger.kinds import Disposition, EventKind
from blockcompact_jax.ledger.state import EVENT_FIELDS, LedgerShape, event_of_rows
from blockcompact_jax.simulation.check import record
from blockcompact_jax.simulation.world import WorldOptions

SHAPE = LedgerShape(max_requests=3, max_operations=6, max_slots=8, num_ranks=2)
NUM_LANES, NUM_STEPS = 4, 64


def assert_same_bytes(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    leaves = (map(np.asarray, jax.tree.leaves(tree)) for tree in (left, right))
    for one, other in zip(*leaves, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()


def run_both(rows):
    """Applies a table both ways; returns the numpy result after comparing every byte."""
    start = empty_state(SHAPE, num_lanes=rows.shape[1])
    compiled, outcomes = apply_events(start, rows)
    state = start
    for step in range(rows.shape[0]):
        event = event_of_rows(rows[step])
        after, outcome = apply_event(state, event)
        assert np.asarray(outcomes.code)[step].tobytes() == outcome.code.tobytes()
        assert np.asarray(outcomes.value)[step].tobytes() == outcome.value.tobytes()
        assert find_violations(after) | find_bad_steps(state, event, after, outcome) == {}
        state = after
    assert_same_bytes(compiled, state)
    return state


def test_both_paths_agree_on_simulated_worlds():
    """Byte for byte, state and outcomes, over events with all faults."""
    trace = record((11, 12, 13, 14), NUM_STEPS, WorldOptions(shape=SHAPE))
    state = run_both(trace.rows)
    assert count_dispositions(state).sum() == NUM_LANES * NUM_STEPS
    assert count_dispositions(state)[Disposition.APPLIED] > NUM_STEPS


@given(
    noise=hnp.arrays(
        np.int32, (NUM_STEPS, NUM_LANES, len(EVENT_FIELDS) - 1), elements=st.integers(-2, 9)
    ),
    kinds=hnp.arrays(
        np.int32, (NUM_STEPS, NUM_LANES), elements=st.integers(-1, int(EventKind.NONE) + 1)
    ),
)
def test_both_paths_agree_on_anything(noise, kinds):
    """Any numbers: the same answers, and every invariant holds after each."""
    run_both(np.concatenate([kinds[..., None], noise], axis=-1))


@pytest.mark.parametrize("value", [np.iinfo(np.int32).max, np.iinfo(np.int32).min])
def test_extreme_fields_are_refused_and_change_nothing(value):
    """A field at the edge of int32 is out of range, or of no known operation; nothing wraps."""
    rows = [[make_event(EventKind.ADMIT, request=0, process_epoch=1)] * NUM_LANES]
    for kind in EventKind:
        for name in EVENT_FIELDS[1:]:
            fields = {"process_epoch": 1, "request_epoch": 1} | {name: value}
            is_restart = kind is EventKind.RESTART and name == "process_epoch" and value > 0
            rows.append([make_event(EventKind.NONE if is_restart else kind, **fields)] * NUM_LANES)
    rows += [[make_event(EventKind.NONE)] * NUM_LANES] * (-len(rows) % NUM_STEPS)
    table = np.asarray(rows, np.int32).reshape(-1, NUM_STEPS, NUM_LANES, len(EVENT_FIELDS))
    for chunk in table:
        run_both(chunk)


@pytest.mark.parametrize("kind", [-1, int(EventKind.NONE) + 1, np.iinfo(np.int32).max])
def test_an_unknown_kind_is_refused(kind):
    """A kind that does not exist is no event: refused, counted, nothing moves."""
    row = (kind, *make_event(EventKind.STAGE, process_epoch=1)[1:])
    state = run_both(np.asarray([[row] * NUM_LANES] * NUM_STEPS, np.int32))
    assert count_dispositions(state)[Disposition.REFUSED] == NUM_LANES * NUM_STEPS


def test_a_place_without_an_event_changes_nothing():
    """NONE is inert and is not counted."""
    rows = np.asarray([[make_event(EventKind.NONE)] * NUM_LANES] * NUM_STEPS, np.int32)
    state = run_both(rows)
    assert_same_bytes(state, empty_state(SHAPE, num_lanes=NUM_LANES))


@pytest.mark.parametrize("num_events", [1, 16, 17, 40])
def test_chunks_of_the_host_are_seamless(num_events):
    """The host's compiled chunks and its numpy steps give the same answers and state."""
    trace = record((5,), num_events, WorldOptions(shape=SHAPE))
    results = [
        run_events(empty_state(SHAPE), trace.rows[:, 0], is_compiled=is_compiled)
        for is_compiled in (False, True)
    ]
    assert_same_bytes(results[0], results[1])
    assert results[0][1].tolist() == trace.codes[:, 0].tolist()


def test_an_unknown_field_and_an_impossible_shape_are_refused():
    """Errors name what was given."""
    with pytest.raises(CompactionError, match="`rnak` is not a field"):
        make_event(EventKind.REACH, rnak=1)
    with pytest.raises(CompactionError, match="`max_slots` is 0"):
        empty_state(LedgerShape(max_requests=1, max_operations=1, max_slots=0, num_ranks=1))
    with pytest.raises(CompactionError, match="`num_ranks` is 31"):
        empty_state(LedgerShape(max_requests=1, max_operations=1, max_slots=1, num_ranks=31))
