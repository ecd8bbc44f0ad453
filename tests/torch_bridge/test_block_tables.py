"""Tables that are replayed: their address never changes, their entries only between replays."""

import threading
import time

import numpy as np
import pytest

from blockcompact_jax.ids import HOLE
from torch_bridge.tables import BlockTables, TablesBusyError


def tables_of(value):
    """Two rows whose entries all are `value`, so that a torn table shows."""
    return [np.full(3 + value % 5, value, np.int32), np.full(7 - value % 5, value, np.int32)]


def addresses(tables):
    return tables.physical_blocks.ctypes.data, tables.num_entries.ctypes.data


def test_OWN_3_a_swap_during_replays_waits_for_a_safe_point():
    """OWN-3: replays through the captured address see one revision each, never a mixture."""
    tables = BlockTables(num_rows=2, max_entries=8)
    captured, counts = tables.physical_blocks, tables.num_entries  # As a graph captures them.
    before = addresses(tables)
    tables.swap(tables_of(0))
    torn, replayed, is_over = [], set(), threading.Event()

    def replay():
        while not is_over.is_set():
            with tables.reading():
                seen = set()
                for _ in range(20):
                    for row in range(2):
                        seen.update(captured[row, : counts[row]].tolist())
                    time.sleep(0)
                replayed.update(seen)
                if len(seen) != 1:
                    torn.append(seen)
            time.sleep(0.0005)

    threads = [threading.Thread(target=replay) for _ in range(2)]
    for thread in threads:
        thread.start()
    for value in range(1, 13):
        tables.swap(tables_of(value), wait_seconds=30)
        deadline = time.monotonic() + 30
        while value not in replayed and time.monotonic() < deadline:
            time.sleep(0.001)
    is_over.set()
    for thread in threads:
        thread.join()
    assert torn == []
    assert replayed == set(range(13))
    assert tables.revision == 13
    assert addresses(tables) == before


def test_OWN_3_a_swap_within_a_replay_is_refused_and_changes_nothing():
    """OWN-3: "the next step" proves nothing; the replay itself must have ended."""
    tables = BlockTables(num_rows=2, max_entries=8)
    tables.swap(tables_of(1))
    before = tables.physical_blocks.copy()
    with tables.reading(), pytest.raises(TablesBusyError, match="1 replays read"):
        tables.swap(tables_of(2), wait_seconds=0.05)
    np.testing.assert_array_equal(tables.physical_blocks, before)
    assert tables.revision == 1
    assert tables.swap(tables_of(2)) == 10


def test_a_shorter_table_leaves_no_old_entry_behind():
    tables = BlockTables(num_rows=1, max_entries=4)
    tables.swap([np.array([3, 1, 2], np.int32)])
    tables.swap([np.array([5], np.int32)])
    assert tables.physical_blocks.tolist() == [[5, HOLE, HOLE, HOLE]]
    assert tables.row(0).tolist() == [5]


@pytest.mark.parametrize("shape", [[1], [1, 1, 1], [1, 9]])
def test_tables_that_do_not_fit_are_refused(shape):
    tables = BlockTables(num_rows=2, max_entries=8)
    with pytest.raises(ValueError, match="expected 2 of at most 8"):
        tables.swap([np.zeros(length, np.int32) for length in shape])
    assert tables.revision == 0


@pytest.mark.parametrize(
    "malformed",
    [np.array([[1, 2]], np.int32), np.array(3, np.int32), np.array([2**40]), np.array([0.5])],
    ids=["two axes", "no axis", "int64", "float"],
)
def test_OWN_3_a_malformed_row_changes_no_other(malformed):
    """OWN-3: every row is checked before the first is written."""
    tables = BlockTables(num_rows=2, max_entries=8)
    tables.swap(tables_of(1))
    before, counts = tables.physical_blocks.copy(), tables.num_entries.copy()
    with pytest.raises(ValueError, match="for row 1; expected int32"):
        tables.swap([np.array([2, 2], np.int32), malformed])
    np.testing.assert_array_equal(tables.physical_blocks, before)
    np.testing.assert_array_equal(tables.num_entries, counts)
    assert tables.revision == 1
