"""numpy, jit and the compiled module are one function: equal bytes for any events, sane or not."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.kernels.ledger import NativeCell
from blockcompact_jax.kernels.native import load_native
from blockcompact_jax.ledger import apply_event, apply_events, empty_state, make_event
from blockcompact_jax.ledger.batch import count_dispositions
from blockcompact_jax.ledger.cell import NumpyCell
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


def lane_of(state, lane):
    return jax.tree.map(lambda column: np.asarray(column)[lane : lane + 1], state)


def run_all(rows):
    """Applies a table every way; returns the numpy result after comparing every byte."""
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
    for lane in range(rows.shape[1]):
        cell = NativeCell(SHAPE, process_epoch=1)
        answers = cell.apply([tuple(row) for row in rows[:, lane].tolist()])
        found = np.asarray([outcomes.code, outcomes.value])[:, :, lane].T.tolist()
        assert [list(answer) for answer in answers] == found
        assert_same_bytes(cell.state, lane_of(state, lane))
    return state


def test_all_paths_agree_on_simulated_worlds():
    """Byte for byte, state and outcomes, over events with all faults."""
    trace = record((11, 12, 13, 14), NUM_STEPS, WorldOptions(shape=SHAPE))
    state = run_all(trace.rows)
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
def test_all_paths_agree_on_anything(noise, kinds):
    """Any numbers: the same answers, and every invariant holds after each."""
    run_all(np.concatenate([kinds[..., None], noise], axis=-1))


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
        run_all(chunk)


@pytest.mark.parametrize("kind", [-1, int(EventKind.NONE) + 1, np.iinfo(np.int32).max])
def test_an_unknown_kind_is_refused(kind):
    """A kind that does not exist is no event: refused, counted, nothing moves."""
    row = (kind, *make_event(EventKind.STAGE, process_epoch=1)[1:])
    state = run_all(np.asarray([[row] * NUM_LANES] * NUM_STEPS, np.int32))
    assert count_dispositions(state)[Disposition.REFUSED] == NUM_LANES * NUM_STEPS


def test_a_place_without_an_event_changes_nothing():
    """NONE is inert and is not counted."""
    rows = np.asarray([[make_event(EventKind.NONE)] * NUM_LANES] * NUM_STEPS, np.int32)
    state = run_all(rows)
    assert_same_bytes(state, empty_state(SHAPE, num_lanes=NUM_LANES))


@pytest.mark.parametrize("num_events", [1, 64])
def test_cells_of_a_host_can_be_taken_back(num_events):
    """Both implementations return to the state before the last call, to the bit."""
    trace = record((5,), num_events + 8, WorldOptions(shape=SHAPE))
    rows = [tuple(row) for row in trace.rows[:, 0].tolist()]
    for new_cell in (NumpyCell, NativeCell):
        cell, other = (new_cell(SHAPE, process_epoch=1) for _ in range(2))
        cell.undo()
        first = cell.apply(rows[:num_events])
        assert [code for code, _ in first] == trace.codes[:num_events, 0].tolist()
        other.apply(rows[:num_events])
        for _ in range(2):
            again = cell.apply(rows[num_events:])
            cell.undo()
            cell.undo()
            assert_same_bytes(cell.state, other.state)
        assert [code for code, _ in again] == trace.codes[num_events:, 0].tolist()


def test_the_compiled_module_refuses_memory_that_is_no_ledger():
    """Wrong columns, types or lengths are refused before anything is written."""
    native = load_native()
    columns = jax.tree.leaves(empty_state(SHAPE))
    for bad in (
        columns[:-1],
        [np.zeros(3, np.int64), *columns[1:]],
        jax.tree.leaves(empty_state(SHAPE, num_lanes=2)),
    ):
        with pytest.raises(ValueError, match="`columns`"):
            native.Ledger(bad, SHAPE.num_ranks)
    with pytest.raises(TypeError):
        native.Ledger(columns, SHAPE.num_ranks).apply([(1, 2, 3)])


def test_an_unknown_field_and_an_impossible_shape_are_refused():
    """Errors name what was given."""
    with pytest.raises(CompactionError, match="`rnak` is not a field"):
        make_event(EventKind.REACH, rnak=1)
    with pytest.raises(CompactionError, match="`max_slots` is 0"):
        empty_state(LedgerShape(max_requests=1, max_operations=1, max_slots=0, num_ranks=1))
    with pytest.raises(CompactionError, match="`num_ranks` is 31"):
        empty_state(LedgerShape(max_requests=1, max_operations=1, max_slots=1, num_ranks=31))
