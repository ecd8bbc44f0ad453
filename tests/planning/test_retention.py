"""RET: which table rewrite is exact, against a list twin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockcompact_jax.geometry import TableSupport
from blockcompact_jax.retention import (
    ExistingByteMovePlan,
    LayerTableRemap,
    RetentionKind,
    RetentionPolicy,
    SharedTableRemap,
    plan_retention,
    resolve,
)

from . import builders as b
from .reference import retain as ref

GEOMETRY = b.geometry(((0, 1), (3,)))
GROUPS = [0, 0, 1]
jit_retention = jax.jit(plan_retention, static_argnames=("geometry", "policy"))


def run(residency, wants, *, tables, union=False, geometry=GEOMETRY, is_due=True):
    return jit_retention(
        residency,
        b.selection(wants),
        geometry=geometry,
        policy=RetentionPolicy(tables=tables, allow_union=union),
        is_due=jnp.asarray(is_due),
    )


@st.composite
def states(draw):
    """Held lists, tables (shared by the first group or not) and wants."""
    is_shared_table = draw(st.booleans())
    is_same_want = draw(st.booleans())
    table = draw(st.permutations(range(8)))
    helds, tables, wants = [], [], []
    length = draw(st.integers(0, 8))
    for row in range(3):
        size = length if is_shared_table else draw(st.integers(0, 8))
        helds.append(list(draw(st.permutations(range(16)))[:size]))
        own = table if is_shared_table else draw(st.permutations(range(8)))
        tables.append(list(own[:size]))
        if row == 1 and is_same_want and is_shared_table:
            helds[1], wants_row = list(helds[0]), list(wants[0])
        else:
            wants_row = list(draw(st.permutations(range(16)))[: draw(st.integers(0, 8))])
        wants.append(wants_row)
    return helds, tables, wants


@given(state=states(), layer_tables=st.booleans(), union=st.booleans())
def test_RET_1_matches_list_twin(state, layer_tables, union):
    """RET-1, RET-2, RET-4, RET-5: kind, kept slots, tables and moves equal the twin's."""
    helds, tables, wants = state
    support = TableSupport.LAYER if layer_tables else TableSupport.SHARED
    got = run(b.residency(helds, tables), wants, tables=support, union=union)
    expected = ref.retain(helds, tables, wants, GROUPS, layer_tables=layer_tables, union=union)
    kinds = [RetentionKind(int(k)).name for k in np.asarray(got.kind)]
    assert kinds == [expected["kinds"][g] for g in (0, 1)]
    assert b.lists(got.keep_slots, got.num_keep) == expected["keeps"]
    assert b.lists(got.physical_by_slot, got.num_keep) == expected["tables"]
    assert b.lists(got.logical_by_slot, got.num_keep) == expected["logical"]
    pairs = np.stack([np.asarray(got.move_from), np.asarray(got.move_to)], axis=-1)
    moves = [[tuple(map(int, m)) for m in row if m[0] != -1] for row in pairs]
    assert moves == expected["moves"]
    assert np.asarray(got.num_moves).tolist() == [len(m) for m in moves]


SLOTS = [[10, 11, 12], [10, 11, 12], [0]]
SAME_TABLE = [[4, 6, 5], [4, 6, 5], [1]]


def test_RET_3_unequal_slots_are_not_shareable():
    """RET-3: layer 0 keeps slots [0, 2], layer 1 keeps [1, 2]: byte move, never a shared table."""
    residency = b.residency(SLOTS, SAME_TABLE)
    got = run(residency, [[10, 12], [11, 12], [0]], tables=TableSupport.SHARED)
    moved, other = resolve(got, GEOMETRY)
    assert isinstance(moved, ExistingByteMovePlan)
    assert moved.moves[0].tolist() == [[5, 6]]
    assert moved.moves[1].tolist() == [[6, 4], [5, 6]]
    assert moved.num_keep == {0: 2, 1: 2}
    assert isinstance(other, SharedTableRemap)


def test_RET_1_the_table_is_rewritten_from_the_actual_slots():
    """RET-1: equal lists give one table of the kept slots, not a shortened prefix."""
    residency = b.residency(SLOTS, SAME_TABLE)
    got = run(residency, [[12, 10], [10, 12], [0]], tables=TableSupport.SHARED)
    remap, _ = resolve(got, GEOMETRY)
    assert isinstance(remap, SharedTableRemap)
    assert remap.table.tolist() == [4, 5]
    assert not remap.is_union
    assert int(got.table_entries_written) == 1
    assert not np.asarray(got.num_moves).any()


def test_RET_1_equal_slots_over_different_tables_are_not_shareable():
    """RET-1: the same slots of layers whose tables differ are no shared table."""
    residency = b.residency(SLOTS, [[4, 6, 5], [4, 6, 7], [1]])
    got = run(residency, [[10, 12], [10, 12], [0]], tables=TableSupport.LAYER)
    remap, _ = resolve(got, GEOMETRY)
    assert isinstance(remap, LayerTableRemap)
    assert {k: v.tolist() for k, v in remap.tables.items()} == {0: [4, 5], 1: [4, 7]}


def test_RET_2_layer_tables_where_the_engine_has_them():
    """RET-2: unequal lists give one table per layer."""
    residency = b.residency(SLOTS, SAME_TABLE)
    got = run(residency, [[10, 12], [11, 12], [0]], tables=TableSupport.LAYER)
    remap, _ = resolve(got, GEOMETRY)
    assert isinstance(remap, LayerTableRemap)
    assert remap.group == 0
    assert {k: v.tolist() for k, v in remap.tables.items()} == {0: [4, 5], 1: [6, 5]}


def test_RET_4_a_union_is_explicit_and_labelled():
    """RET-4: only by policy, called a union, with the unwanted blocks counted."""
    residency = b.residency(SLOTS, SAME_TABLE)
    got = run(residency, [[10, 12], [11, 12], [0]], tables=TableSupport.SHARED, union=True)
    remap, other = resolve(got, GEOMETRY)
    assert isinstance(remap, SharedTableRemap)
    assert remap.is_union
    assert remap.table.tolist() == [4, 6, 5]
    assert np.asarray(got.num_unwanted).tolist() == [1, 1, 0]
    assert isinstance(other, SharedTableRemap)
    assert not other.is_union


def test_RET_5_resident_order_is_stable():
    """RET-5: kept slots keep their relative order, whatever the want order is."""
    residency = b.residency([[9, 3, 7, 1], [9, 3, 7, 1], []])
    got = run(residency, [[1, 7, 9], [1, 7, 9], []], tables=TableSupport.SHARED)
    assert b.lists(got.logical_by_slot, got.num_keep) == [[9, 7, 1], [9, 7, 1], []]


def test_RET_5_not_due_keeps_every_slot():
    """RET-5: a retention that would not pay drops and moves nothing."""
    residency = b.residency(SLOTS, SAME_TABLE)
    got = run(residency, [[10], [11], []], tables=TableSupport.SHARED, is_due=False)
    assert b.lists(got.physical_by_slot, got.num_keep) == SAME_TABLE
    assert not np.asarray(got.num_moves).any()


def test_RET_1_several_full_groups_are_judged_apart():
    """RET-1: one group's disagreement does not cost another its shared table."""
    geometry = b.geometry(((0, 2), (1, 3)))
    residency = b.residency([[5, 6]] * 4)
    got = run(residency, [[5], [6], [5], [5]], tables=TableSupport.SHARED, geometry=geometry)
    kinds = np.asarray(got.kind).tolist()
    assert kinds == [RetentionKind.SHARED_TABLE, RetentionKind.BYTE_MOVE]


def test_RET_8_sliding_layers_have_no_row():
    """RET-8, UPL-2: a sliding layer is no row, so no retention can clear its window."""
    geometry = b.geometry(((1, 3), (0, 2)), windows={0: 32, 2: 64})
    residency = b.residency([[5, 6], [5, 6]])
    got = run(residency, [[6], [6]], tables=TableSupport.SHARED, geometry=geometry)
    assert got.keep_slots.shape[0] == 2
    (remap,) = resolve(got, geometry)
    assert remap.group == 0


@pytest.mark.parametrize("order", [[[0, 1], [1, 2]], [[1, 2], [2, 3]], [[0, 3], [3, 0]]])
def test_RET_6_remap_and_byte_move_give_the_same_kv(order):
    """RET-6, RET-7: reading through the new table gives the same bytes in the same order."""
    helds = [[0, 1, 2, 3], [3, 2, 1, 0], []]
    table = [2, 0, 3, 1]
    residency = b.residency(helds, [table, table, []])
    wants = [*order, []]
    pool = np.arange(3 * 8 * 4, dtype=np.uint16).reshape(3, 8, 4)
    remapped = run(residency, wants, tables=TableSupport.LAYER)
    moved = run(residency, wants, tables=TableSupport.SHARED)
    after = pool.copy()
    for row in range(3):
        source, target = np.asarray(moved.move_from)[row], np.asarray(moved.move_to)[row]
        after[row, target[target >= 0]] = pool[row, source[source >= 0]]
    for row in range(3):
        n = int(remapped.num_keep[row])
        left = pool[row, np.asarray(remapped.physical_by_slot)[row, :n]]
        right = after[row, np.asarray(moved.physical_by_slot)[row, :n]]
        assert left.tobytes() == right.tobytes()


@pytest.mark.parametrize("keep", [[1, 2, 3], [3], [0, 2, 3], [2, 3]])
def test_RET_7_moves_in_plan_order_are_safe_one_by_one(keep):
    """RET-7: sources and destinations overlap, yet no move reads a block that an earlier wrote."""
    residency = b.residency([[0, 1, 2, 3], [9, 1, 2, 3], []], [[2, 0, 3, 1], [2, 0, 3, 1], []])
    moved = run(residency, [keep, [1], []], tables=TableSupport.SHARED)
    pairs = zip(np.asarray(moved.move_from)[0], np.asarray(moved.move_to)[0], strict=True)
    pool = [f"block of {physical}" for physical in range(8)]
    after = list(pool)
    for source, target in pairs:
        if source >= 0:
            after[target] = after[source]
    table = np.asarray(moved.physical_by_slot)[0, : len(keep)]
    assert [after[block] for block in table] == [pool[[2, 0, 3, 1][slot]] for slot in keep]
