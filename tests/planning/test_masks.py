"""Set arithmetic on masks, against Python lists."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockcompact_jax.masks import ids_from_mask, lookup, place_by_id, sort_ascending

jit_ids = jax.jit(ids_from_mask, static_argnames="capacity")


@pytest.mark.parametrize("max_ids", [1, 31, 32, 33, 100, 2500])
@pytest.mark.parametrize("capacity", [1, 7, 120])
@given(seed=st.integers(0, 2**31 - 1), density=st.sampled_from([0.0, 0.02, 0.5, 1.0]))
def test_ids_from_mask_lists_ascending(max_ids, capacity, seed, density):
    """DIF-2: ascending, cut at the capacity, HOLE padded; both word searches."""
    mask = np.random.default_rng(seed).random((2, max_ids)) < density
    got = np.asarray(jit_ids(mask, capacity=capacity))
    for row in range(2):
        expected = np.flatnonzero(mask[row])[:capacity].tolist()
        assert got[row].tolist() == expected + [-1] * (capacity - len(expected))


@pytest.mark.parametrize(("max_ids", "capacity"), [(0, 3), (5, 0), (0, 0)])
def test_empty_sizes(max_ids, capacity):
    """DIF-6: nothing to list is an empty list."""
    got = ids_from_mask(np.ones((2, max_ids), bool), capacity)
    assert got.tolist() == [[-1] * capacity] * 2


def test_place_map_inverts_and_leaves_out_what_is_out_of_range():
    """DIF-7: IDs out of range and unfilled places are never members."""
    ids = np.asarray([[3, 9, -1, 0], [1, 1, 4, 2]], np.int32)
    filled = np.asarray([[True, True, True, False], [True, True, False, True]])
    table = place_by_id(ids, filled, 5)
    assert table.tolist() == [[-1, -1, -1, 0, -1], [-1, 1, 3, -1, -1]]
    assert lookup(table, ids, filled).tolist() == [[0, -1, -1, -1], [1, 1, -1, 3]]
    assert lookup(np.zeros((2, 0), np.int32), ids, filled).tolist() == [[-1] * 4] * 2


def test_sort_ascending_pads_and_cuts():
    """DIF-2: members ascending."""
    ids = np.asarray([[5, 1, 9]], np.int32)
    member = np.asarray([[True, False, True]])
    assert sort_ascending(ids, member, 4).tolist() == [[5, 9, -1, -1]]
    assert sort_ascending(ids, member, 1).tolist() == [[5]]
