"""Kept places, marks and reference counts: native, pure and brute force give the same bytes."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockcompact_jax.kernels import NativeOperations
from blockcompact_jax.operations import PURE_OPERATIONS

from . import references_twin as twin
from .test_rank import assert_same, each_native

NATIVE = NativeOperations()
OPERATIONS = [NATIVE, PURE_OPERATIONS]
NUM_OWNERS = 3


@functools.cache
def keeper(operations):
    return jax.jit(operations.keep_places)


@functools.cache
def marker(operations, max_ids):
    return jax.jit(functools.partial(operations.mark_ids, num_owners=NUM_OWNERS, max_ids=max_ids))


@functools.cache
def mover(operations):
    def run(counts, landing, tables):
        before, after = tables
        return operations.move_references(
            *counts,
            *landing,
            is_before=before,
            is_after=after,
            regular=0,
            transfer=2,
        )

    return jax.jit(run)


def moves(seed, num_blocks, num_places):
    """A commit without a fault, or one with a few of any kind."""
    rng = np.random.default_rng(seed)
    shape = (NUM_OWNERS, num_blocks)
    before, after = rng.random(shape) < 0.5, rng.random(shape) < 0.5
    generation = rng.integers(0, 3, shape).astype(np.int32)
    references = rng.integers(0, 2, (3, *shape)).astype(np.int32)
    references[0] |= before
    references[2] = 0
    landed = np.full((NUM_OWNERS, num_places), -1, np.int32)
    landed_generation = np.full(landed.shape, -1, np.int32)
    for owner in range(NUM_OWNERS):
        gained = np.flatnonzero(after[owner] & ~before[owner])
        after[owner, gained[num_places:]] = False
        gained = gained[:num_places]
        references[2, owner, gained] = rng.integers(1, 3, len(gained))
        landed[owner, : len(gained)] = gained
        landed_generation[owner, : len(gained)] = generation[owner, gained]
    arrays = [references, generation, landed, landed_generation, before, after]
    for array in arrays if seed % 2 else []:
        if array.size and rng.random() < 0.4:
            places = tuple(rng.integers(size) for size in array.shape)
            wild = rng.choice([-5, -1, 0, num_blocks - 1, num_blocks])
            is_list = array is landed
            array[places] = wild if is_list else not array[places]
    return arrays[:2], arrays[2:4], arrays[4:]


@pytest.mark.parametrize("size", [(1, 1), (17, 4), (64, 70), (300, 90)])
@given(seed=st.integers(0, 2**31 - 1))
def test_OWN_1_OWN_5_moved_references_equal_the_twin(size, seed):
    """OWN-1, OWN-2, OWN-5: counts, freed and retired blocks, and the first fault of each check."""
    arguments = moves(seed, *size)
    expected = twin.move_references(*arguments)
    assert seed % 2 or (expected[-1] == -1).all()
    assert_same(mover(PURE_OPERATIONS)(*arguments), expected, "pure")
    assert_same(mover(NATIVE)(*arguments), expected, "native")


@pytest.mark.parametrize("size", [(1, 1), (5, 40), (65, 130)])
@given(seed=st.integers(0, 2**31 - 1))
def test_RET_5_kept_places_and_marks_equal_the_twin(size, seed):
    """RET-5, OWN-1: kept slots in their order; what any layer of an owner has in its table."""
    num_places, max_ids = size
    rng = np.random.default_rng(seed)
    is_kept = rng.random((4, num_places)) < rng.random()
    first, second = rng.integers(-2, max_ids + 2, (2, 4, num_places)).astype(np.int32)
    num_filled = rng.integers(-1, num_places + 1, 4).astype(np.int32)
    owners = rng.integers(0, NUM_OWNERS, 4).astype(np.int32)
    kept = twin.keep_places(is_kept, first, second)
    marked = twin.mark_ids(first, num_filled, owners, NUM_OWNERS, max_ids)
    for operations in OPERATIONS:
        got = marker(operations, max_ids)(first, num_filled, owners)
        assert_same(got, marked, operations.name)
    assert_same(keeper(PURE_OPERATIONS)(is_kept, first, second), kept, "pure")
    for impl, got in each_native(lambda: keeper(NATIVE)(is_kept, first, second)):
        assert_same(got, kept, impl)


def test_OWN_1_vmap_is_one_call():
    """OWN-1: a batch of pools under vmap gives the bytes of single calls, in one native call."""
    batch = [moves(seed, 40, 9) for seed in range(5)]
    one = mover(NATIVE)
    expected = jax.tree.map(lambda *parts: np.stack(parts), *[one(*case) for case in batch])
    stacked = jax.tree.map(lambda *parts: np.stack(parts), *batch)
    batched = jax.jit(jax.vmap(one))
    assert_same(batched(*stacked), expected, "vmap")
    assert batched.lower(*stacked).as_text().count("@blockcompact_move_references") == 1


def test_wrong_operands_are_refused_by_name():
    """Shapes and dtypes are checked when the call is traced."""
    (references, generation), (landed, landed_generation), (before, after) = moves(2, 6, 3)
    marks = {"is_before": before, "is_after": after, "regular": 0, "transfer": 2}
    with pytest.raises(ValueError, match="`references` is int64"):
        NATIVE.move_references(
            references.astype(np.int64), generation, landed, landed_generation, **marks
        )
    with pytest.raises(ValueError, match=r"`landed_generation` is int32\[3, 2\]"):
        NATIVE.move_references(references, generation, landed, landed_generation[:, :2], **marks)
    with pytest.raises(ValueError, match=r"`second` is int32\[3, 5\]"):
        NATIVE.keep_places(before, generation, generation[:, :5])
    with pytest.raises(ValueError, match=r"`num_filled` is int32\[2\]"):
        NATIVE.mark_ids(landed, np.int32([1, 1]), np.int32([0, 1, 2]), num_owners=3, max_ids=6)
