"""Residency: append, graduate, replace; and its host check."""

import numpy as np
import pytest

from blockcompact_jax.errors import CompactionError, ResultCode, raise_for_result
from blockcompact_jax.residency import check_residency, commit_upload, graduate

from . import builders as b

GEOMETRY = b.geometry(((0, 1), (3,)))


def commit(residency, rows, tables, *, is_full=False, **basis):
    revisions = {"selection_revision": 1} | basis
    return commit_upload(
        residency,
        b.revisions(**revisions),
        b.pad(rows, 4),
        b.pad(tables, 4),
        b.counts(rows),
        is_full=np.bool_(is_full),
        geometry=GEOMETRY,
    )


def test_RET_5_uploads_append_in_order():
    """RET-5: new blocks follow the held ones; other rows stay."""
    held = b.residency([[5, 2], [], [7]], [[1, 0], [], [3]])
    after, result = commit(held, [[0, 9], [4], []], [[6, 7], [2], []])
    raise_for_result(result)
    assert b.lists(after.logical_by_slot, after.num_valid) == [[5, 2, 0, 9], [4], [7]]
    assert b.lists(after.physical_by_slot, after.num_valid) == [[1, 0, 6, 7], [2], [3]]
    assert int(after.revisions.pool_generation) == 1
    assert int(after.revisions.map_revision) == 1
    check_residency(after, GEOMETRY, num_blocks=10)


def test_DIF_4_a_full_plan_replaces_everything():
    """DIF-4: a full plan's blocks are the whole new list."""
    held = b.residency([[5, 2], [1], [7]])
    after, result = commit(held, [[5], [6], [7]], [[8], [8], [8]], is_full=True)
    raise_for_result(result)
    assert b.lists(after.logical_by_slot, after.num_valid) == [[5], [6], [7]]
    assert (np.asarray(after.logical_by_slot)[:, 1:] == -1).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_epoch", 1),
        ("pool_generation", 4),
        ("map_revision", -1),
        ("selection_revision", 2),
        ("selection_revision", 0),
    ],
)
def test_OWN_5_a_plan_for_another_state_is_stale(field, value):
    """OWN-5: each revision is compared; nothing changes."""
    held = b.residency([[5], [], []])
    after, result = commit(held, [[1], [], []], [[1], [], []], **{field: value})
    assert b.fault(result) == (ResultCode.STALE_PLAN, -1, value)
    assert b.lists(after.logical_by_slot, after.num_valid) == [[5], [], []]


def test_OWN_5_more_blocks_than_slots_are_refused():
    """OWN-5: a full list is never overwritten."""
    held = b.residency([[1], list(range(8)), []])
    after, result = commit(held, [[2], [9], []], [[2], [9], []])
    assert b.fault(result) == (ResultCode.RESIDENCY_FULL, 1, 9)
    assert b.lists(after.logical_by_slot, after.num_valid) == [[1], list(range(8)), []]


@pytest.mark.parametrize(
    ("logical", "physical", "expected"),
    [
        ([[5], [6], [7]], [[1], [1], [1]], (ResultCode.DUPLICATE_BLOCK, 0, 5)),
        ([[6, 6], [6], []], [[1, 2], [1], []], (ResultCode.DUPLICATE_BLOCK, 0, 6)),
        ([[6], [6], [-4]], [[1], [1], [1]], (ResultCode.BLOCK_OUT_OF_RANGE, 3, -4)),
        ([[6], [6], []], [[1], [-1], []], (ResultCode.BLOCK_OUT_OF_RANGE, 1, 6)),
        ([[-1, 6], [], []], [[-1, 1], [], []], (ResultCode.BLOCK_OUT_OF_RANGE, 0, -1)),
    ],
)
def test_OWN_5_bad_graduates_are_refused(logical, physical, expected):
    """OWN-5: a held or repeated block, a bad ID or an unequal HOLE changes nothing."""
    held = b.residency([[5], [], []])
    after, result = graduate(held, b.pad(logical, 2), b.pad(physical, 2), geometry=GEOMETRY)
    assert b.fault(result) == expected
    assert b.lists(after.logical_by_slot, after.num_valid) == [[5], [], []]


def test_RET_8_graduates_append_and_keep_the_generation():
    """RET-8: no bytes move, so only the map revision advances; rows may graduate unequally."""
    held = b.residency([[5], [], []])
    after, result = graduate(
        held, b.pad([[8], [8, 9], []], 2), b.pad([[3], [3, 4], []], 2), geometry=GEOMETRY
    )
    raise_for_result(result)
    assert b.lists(after.logical_by_slot, after.num_valid) == [[5, 8], [8, 9], []]
    assert b.lists(after.physical_by_slot, after.num_valid) == [[5, 3], [3, 4], []]
    assert int(after.revisions.map_revision) == 1
    assert int(after.revisions.pool_generation) == 0


@pytest.mark.parametrize(
    ("logical", "physical", "count", "message"),
    [
        ([[1, 1], [], []], None, None, "Layer 0 holds a logical block twice"),
        ([[], [], [1, 2]], [[], [], [4, 4]], None, "Layer 3 holds a physical block twice"),
        ([[], [12], []], None, None, r"layer 1 hold a HOLE or a block outside \[0, 10\)"),
        ([[], [2], []], None, [0, 2, 0], "layer 1 hold a HOLE"),
        ([[], [2], []], None, [0, 9, 0], "`num_valid` of layer 1 is 9"),
        ([[], [2], []], None, [0, 0, 0], "Slots past `num_valid` 0 of layer 1 are not HOLE"),
    ],
)
def test_DIF_7_a_broken_residency_is_named(logical, physical, count, message):
    """DIF-7: the host check names the layer and what is wrong."""
    residency = b.residency(logical, physical)
    if count is not None:
        object.__setattr__(residency, "num_valid", np.asarray(count, np.int32))
    with pytest.raises(CompactionError, match=message):
        check_residency(residency, GEOMETRY, num_blocks=10)
