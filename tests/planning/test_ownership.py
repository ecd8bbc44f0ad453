"""OWN: references, reservation, release; against a twin of explicit reference lists."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockcompact_jax.errors import ResultCode, raise_for_result
from blockcompact_jax.geometry import OwnershipGranularity
from blockcompact_jax.ownership import (
    ReferenceKind,
    acquire,
    commit_ownership,
    empty_ownership,
    generation_of,
    release,
    reserve,
)

from . import builders as b
from .reference.references import Pool

GEOMETRY = b.geometry(((0, 1), (3,)))
NUM_PHYSICAL = 8
jit_reserve = jax.jit(reserve, static_argnames=("geometry", "max_reserve"))
jit_acquire = jax.jit(acquire, static_argnames=("geometry", "kind"))
jit_release = jax.jit(release, static_argnames=("geometry", "kind"))


@functools.partial(jax.jit, static_argnames="geometry")
def jit_commit(ownership, reserved, before, after, *, geometry):
    generation = generation_of(ownership, reserved)
    return commit_ownership(ownership, reserved, generation, before, after, geometry=geometry)


def pool(granularity=OwnershipGranularity.GROUP):
    return empty_ownership(GEOMETRY, granularity=granularity, num_physical_blocks=NUM_PHYSICAL)


def take(ownership, numbers):
    return jit_reserve(
        ownership, np.asarray(numbers, np.int32), geometry=GEOMETRY, max_reserve=NUM_PHYSICAL
    )


def blocks(*rows):
    return b.pad(rows, 4)


def unchanged(before, after):
    return np.array_equal(np.asarray(before.references), np.asarray(after.references))


def test_OWN_1_a_block_in_flight_is_not_handed_out():
    """OWN-1: another request gets other blocks until the transfer is terminal."""
    ownership, first, result = take(pool(), [6, 0])
    raise_for_result(result)
    assert b.lists(first, [6, 0]) == [[0, 1, 2, 3, 4, 5], []]
    ownership, second, result = take(ownership, [2, 0])
    raise_for_result(result)
    assert b.lists(second, [2, 0]) == [[6, 7], []]
    _, _, result = take(ownership, [1, 0])
    assert b.fault(result) == (ResultCode.POOL_EXHAUSTED, 0, 0)
    ended, _, result = jit_release(
        ownership, blocks([5], []), geometry=GEOMETRY, kind=ReferenceKind.TRANSFER
    )
    raise_for_result(result)
    _, third, result = take(ended, [1, 0])
    raise_for_result(result)
    assert b.lists(third, [1, 0]) == [[5], []]


def test_OWN_1_a_reader_in_flight_keeps_a_retired_block():
    """OWN-1, OWN-2: source freed during a transfer: the last reference decides."""
    ownership, _ = jit_acquire(
        pool(), blocks([3], []), geometry=GEOMETRY, kind=ReferenceKind.REGULAR
    )
    reading, result = jit_acquire(
        ownership, blocks([3], []), geometry=GEOMETRY, kind=ReferenceKind.TRANSFER
    )
    raise_for_result(result)
    retired, retirement, result = jit_release(
        reading, blocks([3], []), geometry=GEOMETRY, kind=ReferenceKind.REGULAR
    )
    raise_for_result(result)
    assert int(retirement.physical_blocks_released) == 0
    assert not bool(retired.is_free[0, 3])
    done, retirement, _ = jit_release(
        retired, blocks([3], []), geometry=GEOMETRY, kind=ReferenceKind.TRANSFER
    )
    assert int(retirement.physical_blocks_released) == 1
    assert bool(done.is_free.all())


def test_OWN_2_a_shared_block_loses_one_reference():
    """OWN-2, OWN-4: a prefix-shared block is retired, and not freed while a sharer is left."""
    shared = pool()
    for kind in (ReferenceKind.REGULAR, ReferenceKind.PREFIX):
        shared, result = jit_acquire(shared, blocks([2], [2]), geometry=GEOMETRY, kind=kind)
        raise_for_result(result)
    before = np.zeros((2, NUM_PHYSICAL), bool)
    before[:, 2] = True
    after, retirement, result = jit_commit(
        shared, blocks([], []), before, np.zeros_like(before), geometry=GEOMETRY
    )
    raise_for_result(result)
    assert np.asarray(retirement.num_retired).tolist() == [1, 1]
    assert int(retirement.physical_blocks_released) == 0
    assert np.asarray(after.references)[ReferenceKind.PREFIX, :, 2].tolist() == [1, 1]


def test_OWN_5_one_call_with_a_block_twice_is_refused_whole():
    """OWN-5: release([7, 7]) releases nothing, not even the other blocks."""
    ownership, _ = jit_acquire(
        pool(), blocks([5, 7], []), geometry=GEOMETRY, kind=ReferenceKind.REGULAR
    )
    after, retirement, result = jit_release(
        ownership, blocks([5, 7, 7], []), geometry=GEOMETRY, kind=ReferenceKind.REGULAR
    )
    assert b.fault(result) == (ResultCode.DOUBLE_RELEASE, 0, 7)
    assert unchanged(ownership, after)
    assert int(retirement.physical_blocks_released) == 0


def test_OWN_5_double_release_is_refused():
    """OWN-5: the second release of one reference is an error, never a repair."""
    ownership, _ = jit_acquire(
        pool(), blocks([], [4]), geometry=GEOMETRY, kind=ReferenceKind.REGULAR
    )
    once, _, result = jit_release(
        ownership, blocks([], [4]), geometry=GEOMETRY, kind=ReferenceKind.REGULAR
    )
    raise_for_result(result)
    twice, _, result = jit_release(
        once, blocks([], [4]), geometry=GEOMETRY, kind=ReferenceKind.REGULAR
    )
    assert b.fault(result) == (ResultCode.DOUBLE_RELEASE, 3, 4)
    assert unchanged(once, twice)


@pytest.mark.parametrize("block", [-2, NUM_PHYSICAL, 1 << 30])
def test_OWN_5_blocks_out_of_range_are_refused(block):
    """OWN-5: one past the end is an error, not a clamp."""
    after, result = jit_acquire(
        pool(), blocks([0, block], []), geometry=GEOMETRY, kind=ReferenceKind.REGULAR
    )
    assert b.fault(result) == (ResultCode.BLOCK_OUT_OF_RANGE, 0, block)
    assert unchanged(pool(), after)


@pytest.mark.parametrize("kind", [ReferenceKind.PREFIX, ReferenceKind.TRANSFER])
def test_OWN_5_a_free_block_cannot_be_shared_or_read(kind):
    """OWN-5: the bytes of a free block belong to nobody."""
    after, result = jit_acquire(pool(), blocks([1], []), geometry=GEOMETRY, kind=kind)
    assert b.fault(result) == (ResultCode.NOT_OWNED, 0, 1)
    assert unchanged(pool(), after)


def test_OWN_5_reservation_is_all_or_nothing():
    """OWN-5: one owner short of blocks leaves every owner as it was."""
    after, reserved, result = take(pool(), [2, NUM_PHYSICAL + 1])
    assert int(result.code) == ResultCode.COUNT_OUT_OF_RANGE
    assert unchanged(pool(), after)
    used, _, _ = take(pool(), [0, 7])
    after, reserved, result = take(used, [3, 2])
    assert b.fault(result) == (ResultCode.POOL_EXHAUSTED, 3, 1)
    assert unchanged(used, after)
    assert (np.asarray(reserved) == -1).all()


def test_OWN_5_commit_of_unreserved_blocks_is_refused():
    """OWN-5: a table may only gain blocks that this commit's transfer wrote."""
    after_mask = np.zeros((2, NUM_PHYSICAL), bool)
    after_mask[0, 6] = True
    after, _, result = jit_commit(
        pool(), blocks([], []), np.zeros_like(after_mask), after_mask, geometry=GEOMETRY
    )
    assert b.fault(result) == (ResultCode.NOT_OWNED, 0, 6)
    assert unchanged(pool(), after)


def test_OWN_5_committing_twice_is_refused():
    """OWN-5: the transfer reference of a destination ends once."""
    ownership, reserved, _ = take(pool(), [1, 0])
    after_mask = np.zeros((2, NUM_PHYSICAL), bool)
    after_mask[0, 0] = True
    before = np.zeros_like(after_mask)
    committed, _, result = jit_commit(ownership, reserved, before, after_mask, geometry=GEOMETRY)
    raise_for_result(result)
    again, _, result = jit_commit(committed, reserved, before, after_mask, geometry=GEOMETRY)
    assert b.fault(result) == (ResultCode.DOUBLE_RELEASE, 0, 0)
    assert unchanged(committed, again)


OPERATION = st.tuples(
    st.sampled_from(["acquire", "release", "reserve"]),
    st.sampled_from(list(ReferenceKind)),
    st.lists(st.integers(-1, NUM_PHYSICAL), min_size=4, max_size=4),
    st.lists(st.integers(-1, NUM_PHYSICAL), min_size=4, max_size=4),
)


@given(operations=st.lists(OPERATION, max_size=12))
def test_OWN_5_any_sequence_matches_explicit_references(operations):
    """OWN-1, OWN-2, OWN-5: counts equal a twin that keeps every reference as a list entry."""
    ownership = pool()
    twin = Pool(2, NUM_PHYSICAL, ReferenceKind.TRANSFER, ReferenceKind.REGULAR)
    for verb, kind, first, second in operations:
        rows = [[block for block in row if block != -1] for row in (first, second)]
        listed = [(owner, block) for owner, row in enumerate(rows) for block in row]
        array = np.asarray([first, second], np.int32)
        if verb == "reserve":
            numbers = [len(row) for row in rows]
            ownership, reserved, result = take(ownership, numbers)
            granted = twin.reserve(numbers)
            assert bool(result.is_ok) == (granted is not None)
            assert granted is None or b.lists(reserved, numbers) == granted
        elif verb == "acquire":
            ownership, result = jit_acquire(ownership, array, geometry=GEOMETRY, kind=kind)
            assert bool(result.is_ok) == twin.acquire(listed, kind)
        else:
            ownership, retirement, result = jit_release(
                ownership, array, geometry=GEOMETRY, kind=kind
            )
            released = twin.release(listed, kind)
            assert bool(result.is_ok) == (released is not None)
            assert int(retirement.physical_blocks_released) == (released or 0)
        references_now = np.asarray(ownership.references)
        for (owner, block), references in twin.held.items():
            got = [int(references_now[k, owner, block]) for k in ReferenceKind]
            assert got == [references.count(k) for k in ReferenceKind]


def test_OWN_1_owners_follow_the_granularity():
    """OWN-1: groups own all their layers' cells, or each layer owns its own."""
    assert pool().references.shape == (3, 2, NUM_PHYSICAL)
    assert pool(OwnershipGranularity.LAYER).references.shape == (3, 3, NUM_PHYSICAL)
    assert jnp.all(pool().is_free)


def test_OWN_5_blocks_the_engine_writes_are_reserved_as_regular():
    """OWN-5: a reservation may take a regular reference at once; it is released as one."""
    ownership, taken, result = reserve(
        pool(),
        np.asarray([2, 1], np.int32),
        geometry=GEOMETRY,
        max_reserve=4,
        kind=ReferenceKind.REGULAR,
    )
    raise_for_result(result)
    assert np.asarray(ownership.references).sum((1, 2)).tolist() == [3, 0, 0]
    freed, retirement, result = jit_release(
        ownership, taken, geometry=GEOMETRY, kind=ReferenceKind.REGULAR
    )
    raise_for_result(result)
    assert int(retirement.physical_blocks_released) == 3
    assert bool(freed.is_free.all())


def test_OWN_1_a_block_freed_and_reused_since_its_lookup_is_not_acquired():
    """OWN-1, OWN-5: a prefix hit on a block of an older generation fails; on a current one not."""
    found = blocks([5], [])
    ownership, _ = jit_acquire(pool(), found, geometry=GEOMETRY, kind=ReferenceKind.REGULAR)
    looked_up = generation_of(ownership, found)
    settings = {"geometry": GEOMETRY, "kind": ReferenceKind.PREFIX, "generation": looked_up}
    _, result = jit_acquire(ownership, found, **settings)
    raise_for_result(result)
    ownership, _, _ = jit_release(ownership, found, geometry=GEOMETRY, kind=ReferenceKind.REGULAR)
    reused, _ = jit_acquire(ownership, found, geometry=GEOMETRY, kind=ReferenceKind.REGULAR)
    after, result = jit_acquire(reused, found, **settings)
    assert b.fault(result) == (ResultCode.STALE_BLOCK, 0, 5)
    assert unchanged(reused, after)
    settings["generation"] = generation_of(reused, found)
    _, result = jit_acquire(reused, found, **settings)
    raise_for_result(result)


def test_OWN_1_a_skipped_block_with_an_open_read_is_no_destination():
    """OWN-1: a window moves past a block, but a read of it is open: not reserved until it ends."""
    ownership, _ = jit_acquire(
        pool(), blocks([0, 1], []), geometry=GEOMETRY, kind=ReferenceKind.REGULAR
    )
    reading, _ = jit_acquire(
        ownership, blocks([0], []), geometry=GEOMETRY, kind=ReferenceKind.TRANSFER
    )
    skipped, retirement, _ = jit_release(
        reading, blocks([0, 1], []), geometry=GEOMETRY, kind=ReferenceKind.REGULAR
    )
    assert np.flatnonzero(retirement.is_released[0]).tolist() == [1]
    _, reserved, _ = take(skipped, [2, 0])
    assert b.lists(reserved, [2, 0]) == [[1, 2], []]
    ended, _, _ = jit_release(
        skipped, blocks([0], []), geometry=GEOMETRY, kind=ReferenceKind.TRANSFER
    )
    _, reserved, _ = take(ended, [2, 0])
    assert b.lists(reserved, [2, 0]) == [[0, 1], []]


def test_OWN_5_a_block_that_grew_no_reader_keeps_its_generation():
    """OWN-5: only freeing a block ends its generation."""
    ownership, reserved, _ = take(pool(), [1, 0])
    assert not np.asarray(ownership.generation).any()
    aborted, _, _ = jit_release(ownership, reserved, geometry=GEOMETRY, kind=ReferenceKind.TRANSFER)
    assert np.argwhere(np.asarray(aborted.generation)).tolist() == [[0, 0]]
