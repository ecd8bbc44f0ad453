"""OWN-5: a pin is released once, by the holder and operation that took it."""

import jax
import numpy as np
import pytest

from blockcompact_jax.errors import ResultCode, raise_for_result
from blockcompact_jax.geometry import OwnershipGranularity
from blockcompact_jax.ownership import ReferenceKind, acquire, empty_ownership
from blockcompact_jax.pins import empty_pins, pin, unpin

from . import builders as b

GEOMETRY = b.geometry(((0, 1),))
jit_pin = jax.jit(pin, static_argnames="geometry")
jit_unpin = jax.jit(unpin, static_argnames="geometry")


@pytest.fixture
def pool():
    ownership = empty_ownership(
        GEOMETRY, granularity=OwnershipGranularity.GROUP, num_physical_blocks=8
    )
    ownership, result = acquire(
        ownership, b.pad([[2, 3, 5]], 3), geometry=GEOMETRY, kind=ReferenceKind.REGULAR
    )
    raise_for_result(result)
    return ownership, empty_pins(ownership, max_pins=2, max_blocks=2)


def take(pool, holder, operation, blocks):
    ownership, pins, result = jit_pin(
        *pool, np.int32(holder), np.int32(operation), b.pad([blocks], 2), geometry=GEOMETRY
    )
    return (ownership, pins), result


def drop(pool, holder, operation):
    ownership, pins, _, result = jit_unpin(
        *pool, np.int32(holder), np.int32(operation), geometry=GEOMETRY
    )
    return (ownership, pins), result


def same(left, right):
    return all(
        np.array_equal(x, y)
        for x, y in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    )


def test_OWN_5_the_second_unpin_of_one_owner_is_refused(pool):
    """OWN-5: it must not take the other holder's reference to the same block."""
    both, result = take(pool, 1, 7, [5])
    raise_for_result(result)
    both, result = take(both, 2, 7, [5, 3])
    raise_for_result(result)
    assert int(both[0].references[ReferenceKind.TRANSFER, 0, 5]) == 2
    one, result = drop(both, 1, 7)
    raise_for_result(result)
    again, result = drop(one, 1, 7)
    assert b.fault(result) == (ResultCode.PIN_UNKNOWN, -1, 7)
    assert same(one, again)
    assert int(again[0].references[ReferenceKind.TRANSFER, 0, 5]) == 1
    none, result = drop(again, 2, 7)
    raise_for_result(result)
    assert same(none, pool)


def test_OWN_5_one_operation_pins_once(pool):
    """OWN-5: a retried pin takes no second reference."""
    pinned, _ = take(pool, 1, 7, [5])
    again, result = take(pinned, 1, 7, [5])
    assert b.fault(result) == (ResultCode.PIN_EXISTS, -1, 7)
    assert same(pinned, again)


def test_OWN_5_pins_have_a_bound(pool):
    """OWN-5: no place left is an error, and a freed place serves again."""
    full, _ = take(take(pool, 1, 1, [2])[0], 1, 2, [2])
    after, result = take(full, 1, 3, [2])
    assert b.fault(result) == (ResultCode.PINS_FULL, -1, 2)
    assert same(full, after)
    _, result = take(drop(full, 1, 1)[0], 1, 3, [2])
    raise_for_result(result)


@pytest.mark.parametrize(
    ("blocks", "code"),
    [
        ([4], ResultCode.NOT_OWNED),
        ([5, 5], ResultCode.DOUBLE_RELEASE),
        ([8], ResultCode.BLOCK_OUT_OF_RANGE),
    ],
)
def test_OWN_5_bad_pins_change_nothing(pool, blocks, code):
    """OWN-5: free, repeated and out-of-range blocks are refused whole."""
    after, result = take(pool, 1, 1, blocks)
    assert b.fault(result) == (code, 0, blocks[0])
    assert same(pool, after)
