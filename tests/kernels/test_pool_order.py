"""Refusals of pool calls, and the order that the ord keeps."""

import threading

import jax
import numpy as np
import pytest
from jax import lax

from blockcompact_jax import kernels
from blockcompact_jax.kernels import (
    KernelCode,
    KernelStatusError,
    raise_for_status,
)

from .helpers import assert_same_bytes, column
from .pool_memory import CALLS, call


def upload_row(kind, pair, ord_packed, ord_plain, *, layer=0, source=0, target=1, valid=32):
    plain, packed, _, _ = pair
    return call(kind, "pool_upload")(
        ord_packed,
        ord_plain,
        column(0, layer),
        column(0, source),
        column(0, target),
        column(32, valid),
        packed_pool=packed,
        plain_pool=plain,
    )


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ({"layer": 2}, KernelCode.LAYER_OUT_OF_RANGE),
        ({"source": 5}, KernelCode.FROM_BLOCK_OUT_OF_RANGE),
        ({"target": 4}, KernelCode.TO_BLOCK_OUT_OF_RANGE),
        ({"target": 0}, KernelCode.DUPLICATE_DESTINATION),
        ({"source": -1}, KernelCode.PARTIAL_HOLE),
        ({"valid": 33}, KernelCode.VALID_TOKENS_OUT_OF_RANGE),
    ],
)
def test_UPL_7_a_faulty_row_moves_nothing_and_keeps_the_ord(kind, fault, code, pair):
    """UPL-7: refused before the first byte; the same ord can be used again."""
    plain, packed, memory, _ = pair
    before = memory.copy()
    ord_packed, ord_plain = packed.current_ord(), plain.current_ord()
    result = upload_row(kind, pair, ord_packed, ord_plain, **fault)
    assert np.asarray(result.status).tolist() == [code, 1]
    assert_same_bytes(memory, before)
    result = upload_row(kind, pair, result.ord_packed, result.ord_plain)
    raise_for_status(result.status)
    assert np.asarray(result.ord_plain).tolist() == [int(ord_plain[0]) + 1]


@pytest.mark.parametrize("kind", CALLS)
def test_a_stale_ord_is_refused(kind, pair):
    plain, packed, memory, _ = pair
    stale = plain.current_ord()
    raise_for_status(upload_row(kind, pair, packed.current_ord(), stale).status)
    before = memory.copy()
    result = upload_row(kind, pair, packed.current_ord(), stale)
    with pytest.raises(KernelStatusError, match="current_ord"):
        raise_for_status(result.status)
    read = call(kind, "pool_gather")(stale, 0, column(1), pool=plain, dtype=np.uint16)
    assert np.asarray(read.status).tolist() == [KernelCode.STALE_ORD, -1]
    assert not np.asarray(read.blocks).any()
    assert_same_bytes(memory, before)


def test_of_two_writers_with_one_ord_exactly_one_wins(pair):
    plain, packed, _, _ = pair
    for _ in range(20):
        ord_packed, ord_plain = packed.current_ord(), plain.current_ord()
        codes = []
        start = threading.Barrier(2)

        def write(ord_packed=ord_packed, ord_plain=ord_plain, start=start, codes=codes):
            start.wait()
            result = upload_row("host", pair, ord_packed, ord_plain)
            codes.append(int(result.status[0]))

        threads = [threading.Thread(target=write) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(codes) == [KernelCode.OK, KernelCode.STALE_ORD]


def test_calls_chained_by_ord_run_in_order_under_jit_and_scan(pair):
    """gather → move → gather in one jit, then moves in a scan: the ord alone orders them."""
    plain, _, memory, _ = pair
    before = memory.copy()

    @jax.jit
    def read_move_read(ord_now):
        first = kernels.pool_gather(ord_now, 0, column(0, 1), pool=plain, dtype=np.uint16)
        moved = kernels.pool_block_move(first.ord, 0, column(0, 1), column(1, 0), pool=plain)
        second = kernels.pool_gather(moved.ord, 0, column(0, 1), pool=plain, dtype=np.uint16)
        return first, moved.status, second

    first, status, second = read_move_read(plain.current_ord())
    for outcome in (first.status, status, second.status):
        raise_for_status(outcome)
    expected = before[0, [0, 1]].transpose(0, 1, 3, 2, 4)
    assert_same_bytes(first.blocks, expected)
    assert_same_bytes(second.blocks, expected[[1, 0]])

    def body(ord_now, _):
        moved = kernels.pool_block_move(ord_now, 0, column(0, 1), column(1, 0), pool=plain)
        return moved.ord, moved.status

    last, statuses = jax.jit(lambda o: lax.scan(body, o, length=5))(second.ord)
    assert not np.asarray(statuses)[:, 0].any()
    assert np.asarray(last).tolist() == [6]
    assert_same_bytes(memory, before)  # six swaps


def test_rows_changed_right_after_dispatch_do_not_reach_the_call(pair):
    """What is moved is what the columns held when the call was made."""
    plain, packed, memory, _ = pair
    ord_packed, ord_plain = packed.current_ord(), plain.current_ord()
    before = memory.copy()
    for _ in range(30):
        target = column(1)
        result = kernels.pool_upload(
            ord_packed, ord_plain, 0, column(0), target, packed_pool=packed, plain_pool=plain
        )
        target[0] = 3
        raise_for_status(result.status)
        ord_packed, ord_plain = result.ord_packed, result.ord_plain
    assert_same_bytes(memory[0, 3], before[0, 3])


def test_a_pool_may_be_a_static_argument_and_is_not_retraced(pair):
    plain, _, _, _ = pair
    num_traces = 0

    def move_once(ord_now, source, pool):
        nonlocal num_traces
        num_traces += 1
        return kernels.pool_block_move(ord_now, 0, source, column(2), pool=pool)

    jitted = jax.jit(move_once, static_argnames="pool")
    result = jitted(plain.current_ord(), column(0), pool=plain)
    result = jitted(result.ord, column(1), pool=plain)
    raise_for_status(result.status)
    assert num_traces == 1
