"""DIF: selection against residency, against a set twin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockcompact_jax.diff import diff
from blockcompact_jax.errors import CompactionError, PlanError, ResultCode, raise_for_result

from . import builders as b
from .reference import diff as ref

GEOMETRY = b.geometry(((0, 1), (3,)))
GROUPS = [0, 0, 1]
MAX_BLOCKS = 16
jit_diff = jax.jit(diff, static_argnames=("geometry", "max_upload", "common_slots"))


def run(selection, residency, *, common_slots, max_upload=16, geometry=GEOMETRY, force_full=False):
    return jit_diff(
        selection,
        residency,
        geometry=geometry,
        max_upload=max_upload,
        common_slots=common_slots,
        force_full=jnp.asarray(force_full),
    )


@st.composite
def states(draw):
    """Wants, tails and held lists of three rows; a tail may be short or complete."""
    num_candidates = draw(st.integers(0, MAX_BLOCKS))
    wants, tails, helds = [], [], []
    for _ in range(3):
        order = draw(st.permutations(range(num_candidates)))
        num_want = draw(st.integers(0, min(8, num_candidates)))
        num_tail = draw(st.integers(0, min(8, num_candidates - num_want)))
        wants.append(list(order[:num_want]))
        tails.append(list(order[num_want : num_want + num_tail]))
        held = draw(st.permutations(range(num_candidates)))
        helds.append(list(held[: draw(st.integers(0, min(8, num_candidates)))]))
    return num_candidates, wants, tails, helds


@given(state=states(), common=st.booleans(), force_full=st.booleans())
def test_DIF_1_matches_set_twin(state, common, force_full):
    """DIF-1, DIF-2, DIF-3, DIF-4, DIF-5: uploads, counts and full plans equal the twin's."""
    num_candidates, wants, tails, helds = state
    got = run(
        b.selection(wants, tails, num_candidates=num_candidates),
        b.residency(helds),
        common_slots=common,
        force_full=force_full,
    )
    expected = ref.delta(wants, tails, helds, GROUPS, common=common, force_full=force_full)
    if expected is None:
        assert int(got.result.code) == ResultCode.PADDING_EXHAUSTED
        assert not np.asarray(got.num_upload).any()
        return
    raise_for_result(got.result)
    assert bool(got.is_full) == expected["is_full"]
    assert b.lists(got.upload_logical_blocks, got.num_upload) == expected["uploads"]
    for name in ("num_new", "num_pad", "num_truncated"):
        assert np.asarray(getattr(got, name)).tolist() == expected[name], name
    lengths = [len(row) for row in expected["uploads"]]
    assert np.asarray(got.common_new_slots).tolist() == [max(lengths[:2]), lengths[2]]
    if common:
        assert lengths[0] == lengths[1]


def test_DIF_1_largest_id_is_not_the_tails_last():
    """SEL-6, DIF-1: want=[2], tail=[127,4,3], held=[1]; the largest ID is 127, not 3."""
    geometry = b.geometry(((0, 1),))
    selection = b.selection(
        [[2], [2, 5]], [[127, 4, 3], [127, 4, 3]], max_want=2, max_tail=3, max_blocks=128
    )
    got = run(selection, b.residency([[1], [1]]), common_slots=True, geometry=geometry)
    raise_for_result(got.result)
    assert b.lists(got.upload_logical_blocks, got.num_upload) == [[2, 127], [2, 5]]
    assert np.asarray(got.num_pad).tolist() == [1, 0]


def test_DIF_4_exhausted_tail_makes_a_full_plan():
    """DIF-4: a wanted block is not dropped when a layer cannot be padded; the plan is full."""
    wants = [[0, 1, 2], [0, 1, 2], [0]]
    helds = [[], [0, 1, 2], []]
    got = run(b.selection(wants, num_candidates=3), b.residency(helds), common_slots=True)
    raise_for_result(got.result)
    assert bool(got.is_full)
    assert b.lists(got.upload_logical_blocks, got.num_upload) == [[0, 1, 2], [0, 1, 2], [0]]
    assert np.asarray(got.num_truncated).tolist() == [3, 0, 0]


def test_DIF_4_one_missing_pad_is_enough_for_a_full_plan():
    """DIF-4: one layer short by one block turns the whole plan full; counts are per layer."""
    wants = [[0, 1], [0, 1], [2]]
    helds = [[0], [0, 1], [2]]
    got = run(b.selection(wants, num_candidates=3), b.residency(helds), common_slots=True)
    raise_for_result(got.result)
    assert bool(got.is_full)
    assert b.lists(got.upload_logical_blocks, got.num_upload) == wants
    assert np.asarray(got.num_truncated).tolist() == [1, 0, 0]


def test_DIF_4_a_full_plan_that_cannot_be_padded_is_refused():
    """DIF-4: nothing is dropped silently; the error says what to raise."""
    wants = [[0, 1, 2], [0, 1], [0]]
    got = run(b.selection(wants, num_candidates=9), b.residency([[], [], []]), common_slots=True)
    assert b.fault(got.result) == (ResultCode.PADDING_EXHAUSTED, 1, 3)
    with pytest.raises(PlanError, match="Raise `max_tail`"):
        raise_for_result(got.result)


def test_DIF_4_upload_over_capacity_is_refused():
    """DIF-4: a capacity never truncates."""
    got = run(
        b.selection([[0, 1], [2], [3]]),
        b.residency([[], [], []]),
        common_slots=False,
        max_upload=1,
    )
    assert b.fault(got.result) == (ResultCode.UPLOAD_EXCEEDS_CAPACITY, 0, 2)
    assert (np.asarray(got.upload_logical_blocks) == -1).all()


@pytest.mark.parametrize("common", [False, True])
def test_DIF_6_want_equal_held_is_a_plan_of_nothing(common):
    """DIF-6: a 0-delta plan has no upload and the next selection revision."""
    wants = [[3, 1], [2, 0], [5, 6]]
    helds = [[1, 3], [0, 2], [6, 5]]
    got = run(b.selection(wants), b.residency(helds), common_slots=common)
    raise_for_result(got.result)
    assert not np.asarray(got.num_upload).any()
    assert not bool(got.is_full)
    assert int(got.basis.selection_revision) == 1


def test_DIF_6_all_layers_empty():
    """DIF-6: nothing wanted and nothing held is a plan too."""
    got = run(
        b.selection([[], [], []], num_candidates=0), b.residency([[], [], []]), common_slots=True
    )
    raise_for_result(got.result)
    assert np.asarray(got.common_new_slots).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("wants", "tails", "helds", "expected"),
    [
        ([[1, 1], [0], [0]], None, [[], [], []], (ResultCode.DUPLICATE_BLOCK, 0, 1)),
        ([[1], [0], [0]], [[2], [3, 3], []], [[], [], []], (ResultCode.DUPLICATE_BLOCK, 1, 3)),
        ([[1], [0], [7]], [[], [], [7]], [[], [], []], (ResultCode.DUPLICATE_BLOCK, 3, 7)),
        ([[1], [0], [0]], None, [[], [4, 2, 4], []], (ResultCode.DUPLICATE_BLOCK, 1, 4)),
        ([[1], [-3], [0]], None, [[], [], []], (ResultCode.BLOCK_OUT_OF_RANGE, 1, -3)),
        ([[1], [0], [0]], [[], [-1], []], [[], [], []], (ResultCode.BLOCK_OUT_OF_RANGE, 1, -1)),
        ([[1], [0], [0]], [[], [], [16]], [[], [], []], (ResultCode.BLOCK_OUT_OF_RANGE, 3, 16)),
        ([[1], [0], [0]], None, [[-1], [], []], (ResultCode.BLOCK_OUT_OF_RANGE, 0, -1)),
        ([[1], [0], [0]], None, [[], [], [9999]], (ResultCode.BLOCK_OUT_OF_RANGE, 3, 9999)),
    ],
)
def test_DIF_7_bad_lists_are_refused_naming_the_layer(wants, tails, helds, expected):
    """DIF-7: duplicates, negatives and IDs past the last block, in want, tail and held."""
    got = run(b.selection(wants, tails), b.residency(helds), common_slots=False)
    assert b.fault(got.result) == expected
    assert not np.asarray(got.num_upload).any()


def test_DIF_7_counts_out_of_range_are_refused():
    """DIF-7: a count past the capacity is refused."""
    held = b.residency([[1], [2], [3]])
    bad = jax.tree.map(lambda x: x, held)
    object.__setattr__(bad, "num_valid", np.asarray([1, 9, 1], np.int32))
    got = run(b.selection([[1], [0], [0]]), bad, common_slots=False)
    assert b.fault(got.result) == (ResultCode.COUNT_OUT_OF_RANGE, 1, 9)


def test_DIF_7_unequal_block_sizes_are_refused():
    """DIF-7: the selection's, residency's and geometry's block sizes must agree."""
    with pytest.raises(CompactionError, match="`block_tokens` is 8 in the selection"):
        run(
            b.selection([[1], [0], [0]], block_tokens=8),
            b.residency([[], [], []]),
            common_slots=False,
        )


def test_DIF_7_unequal_layer_counts_are_refused():
    """DIF-7: a selection of another number of layers is refused."""
    with pytest.raises(CompactionError, match="2 rows, the residency 3"):
        run(b.selection([[1], [0]]), b.residency([[], [], []]), common_slots=False)


def test_DIF_7_holes_are_no_members():
    """DIF-7, SEL-6: values in unfilled places, HOLE or garbage, are never read as blocks."""
    selection = b.selection([[1], [0], [0]], [[2], [3], [4]])
    for name in ("want", "ranked_tail"):
        array = np.asarray(getattr(selection, name)).copy()
        array[array == -1] = 5
        object.__setattr__(selection, name, array)
    got = run(selection, b.residency([[], [], []]), common_slots=False)
    raise_for_result(got.result)
    assert b.lists(got.upload_logical_blocks, got.num_upload) == [[1], [0], [0]]
