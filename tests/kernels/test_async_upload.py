"""Uploads beside Python. `held` keeps every started upload from moving its first byte."""

import contextlib
import threading
import weakref

import numpy as np
import pytest

from blockcompact_jax import kernels
from blockcompact_jax.kernels import (
    AttendSegment,
    KernelCode,
    KernelStatusError,
    Layout,
    UploadFailedError,
    raise_for_status,
)
from blockcompact_jax.kernels.native import load_native
from blockcompact_jax.scores import BlockReduction

from .helpers import assert_same_bytes, column, random_blocks
from .pool_memory import CALLS, call, plain_memory, register_packed, register_plain
from .uploads import Lease, after_upload, start


def test_UPL_4_nothing_moves_before_the_event_and_all_has_moved_after_it(pair, held):
    """UPL-4, UPL-6: the event is open while the copy provably has not begun."""
    _, _, memory, _ = pair
    before, expected = memory.copy(), after_upload(pair, (3, 0), (1, 2))
    event = start(pair, source=(3, 0), target=(1, 2))
    with pytest.raises(TimeoutError, match="still open"):
        event.wait(0.01)
    assert not event.is_done
    assert event.error is None
    assert_same_bytes(memory, before)
    held()
    event.wait()
    assert event.is_done
    assert_same_bytes(memory, expected)


def test_UPL_4_columns_that_change_after_the_start_change_nothing(pair, held):
    """UPL-4: what was asked for is what arrives, though its arrays are used anew at once."""
    plain, packed, memory, _ = pair
    expected = after_upload(pair, (3,), (1,))
    source, target, valid = column(3), column(1), column(plain.shape.block_tokens)
    event = kernels.start_pool_upload(
        packed.current_ord(),
        plain.current_ord(),
        0,
        source,
        target,
        valid,
        packed_pool=packed,
        plain_pool=plain,
    )
    source[:], target[:], valid[:] = 0, 2, 1
    held()
    event.wait()
    assert_same_bytes(memory, expected)


def test_waiting_releases_the_gil(pair, held):
    event = start(pair)
    threading.Timer(0.05, held).start()  # never fires where `wait` keeps the GIL
    event.wait(30)


def test_the_next_ord_counts_from_the_start(pair, held):
    plain, _, _, _ = pair
    ord_before = int(plain.current_ord()[0])
    event = start(pair)
    assert event.ord_plain.tolist() == plain.current_ord().tolist() == [ord_before + 1]
    held()
    event.wait()
    assert plain.current_ord().tolist() == [ord_before + 1]


@pytest.mark.parametrize("kind", CALLS)
def test_UPL_4_a_source_block_is_not_overwritten_before_its_event(kind, pair, held):
    """UPL-4: the call that would catch early reuse; the bytes that arrive are those staged."""
    plain, packed, memory, store = pair
    expected, staged = after_upload(pair, (2,), (1,)), store.copy()
    event = start(pair, source=(2,), target=(1,))

    def pack_into(source_block):
        return call(kind, "pool_pack")(
            event.ord_plain,
            packed.current_ord(),
            0,
            column(3, 3),
            column(4, source_block),
            plain_pool=plain,
            packed_pool=packed,
        )

    refused = pack_into(2)
    assert np.asarray(refused.status).tolist() == [KernelCode.OPEN_TRANSFER, 1]
    assert_same_bytes(store, staged)
    raise_for_status(pack_into(3).status)  # other source blocks may be filled meanwhile
    held()
    event.wait()
    assert_same_bytes(memory, expected)
    raise_for_status(pack_into(2).status)


@pytest.mark.parametrize("kind", CALLS)
def test_OWN_1_open_blocks_are_refused_and_others_are_not(kind, pair, held):
    """OWN-1: no call reads or writes a block while an upload writes it."""
    plain, packed, _, _ = pair
    event = start(pair, target=(1,))

    def gather(block):
        return call(kind, "pool_gather")(
            event.ord_plain, 0, column(0, block), pool=plain, dtype=np.uint16
        )

    def move(from_block, to_block):
        return call(kind, "pool_block_move")(
            plain.current_ord(), 0, column(from_block), column(to_block), pool=plain
        )

    def upload(to_block):
        return call(kind, "pool_upload")(
            packed.current_ord(),
            plain.current_ord(),
            0,
            column(4),
            column(to_block),
            packed_pool=packed,
            plain_pool=plain,
        )

    assert np.asarray(gather(1).status).tolist() == [KernelCode.OPEN_TRANSFER, 1]
    for refused in (move(1, 2), move(2, 1), upload(1)):
        assert np.asarray(refused.status).tolist() == [KernelCode.OPEN_TRANSFER, 0]
    raise_for_status(gather(2).status)
    raise_for_status(move(2, 3).status)
    raise_for_status(upload(0).status)
    with pytest.raises(KernelStatusError, match=r"event.* physical_block = 1"):
        start(pair, source=(4,), target=(1,))
    held()
    event.wait()
    raise_for_status(move(1, 2).status)


def test_OWN_1_attention_over_an_open_block_is_refused(rng, held):
    """OWN-1: the draft goes on over resident blocks, not over those still arriving."""
    memory, view = plain_memory(random_blocks(rng, (1, 4, 2, 1, 32, 32), np.uint16) & 0x3FFF, "hnd")
    store = random_blocks(rng, (1, 2, 1, 64, 32), np.uint16) & 0x3FFF
    queries = np.ones((1, 1, 32), np.uint16)
    with register_plain(memory, view) as plain, register_packed(store, Layout.AMX) as packed:
        event = start((plain, packed, memory, store), target=(1,))

        def attend(*table):
            segment = AttendSegment(
                pool=plain,
                ord=event.ord_plain,
                layer=0,
                block_table=column(*table),
                num_keys=32 * 2,
            )
            return kernels.host_pool_attend(queries, [segment], scale=1.0).status

        def score(*table):
            segment = AttendSegment(plain, event.ord_plain, 0, column(*table), 32 * 2)
            scored = kernels.host_pool_score_blocks(
                queries, segment, block_reduction=BlockReduction.MAX
            )
            return scored.status

        assert attend(0, 1, 2).tolist() == [KernelCode.OPEN_TRANSFER, 1]
        assert score(0, 1, 2).tolist() == [KernelCode.OPEN_TRANSFER, 1]
        raise_for_status(score(0, 2, 1))
        raise_for_status(attend(0, 2, 1))  # the third entry holds no key of the sequence
        held()
        event.wait()
        raise_for_status(attend(0, 1, 2))


def test_OWN_1_another_pool_over_the_same_memory_is_refused(pair, held):
    """OWN-1: a second registration is no way around an open transfer."""
    _, _, memory, _ = pair
    event = start(pair)
    with register_plain(memory, memory.transpose(0, 1, 2, 4, 3, 5)) as alias:

        def gather():
            return kernels.host_pool_gather(
                alias.current_ord(), 0, column(3), pool=alias, dtype=np.uint16
            )

        assert gather().status.tolist() == [KernelCode.OPEN_TRANSFER, -1]
        held()
        event.wait()
        raise_for_status(gather().status)


def test_OWN_1_an_engine_can_ask_before_it_writes_its_own_tensor(pair, held):
    """OWN-1: writes that no call of ours sees."""
    plain, packed, _, _ = pair
    event = start(pair, source=(2,), target=(1,))
    with pytest.raises(KernelStatusError, match=r"Row 1 has layer = 0, block = 1"):
        kernels.check_not_open(plain, 0, column(-1, 1), is_write=True)
    with pytest.raises(KernelStatusError, match="block = 1"):
        kernels.check_not_open(plain, 0, column(1), is_write=False)
    with pytest.raises(KernelStatusError, match="block = 2"):
        kernels.check_not_open(packed, 0, column(2), is_write=True)
    kernels.check_not_open(packed, 0, column(2), is_write=False)
    kernels.check_not_open(plain, 0, column(0, 2, 3), is_write=True)
    kernels.check_not_open(plain, 1, column(1), is_write=True)
    held()
    event.wait()
    kernels.check_not_open(plain, 0, column(1), is_write=True)


def test_uploads_to_other_blocks_queue_up_and_arrive_in_order(pair, held):
    _, _, memory, _ = pair
    expected = after_upload(pair, (0, 1, 2), (1, 2, 3))
    first = start(pair, source=(0,), target=(1,))
    second = start(pair, source=(1,), target=(2,), ord_plain=first.ord_plain)
    third = start(pair, source=(2,), target=(3,), ord_plain=second.ord_plain)
    held()
    third.wait()
    assert first.is_done
    assert second.is_done
    assert_same_bytes(memory, expected)


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ({"target": (9,)}, KernelCode.TO_BLOCK_OUT_OF_RANGE),
        ({"source": (0, 1), "target": (1, 1)}, KernelCode.DUPLICATE_DESTINATION),
        ({"ord_plain": np.array([7], np.uint32)}, KernelCode.STALE_ORD),
    ],
)
def test_UPL_7_a_faulty_upload_is_refused_at_the_start(fault, code, pair):
    """UPL-7: at once and with nothing left open, so the next upload with the same ord is taken."""
    plain, _, memory, _ = pair
    before, ord_before = memory.copy(), plain.current_ord()
    with pytest.raises(KernelStatusError) as refused:
        start(pair, **fault)
    assert refused.value.code is code
    assert plain.current_ord().tolist() == ord_before.tolist()
    assert load_native().num_open_transfers(plain.pool_id) == (0, 0)
    assert_same_bytes(memory, before)
    start(pair).wait()


def test_columns_changed_after_the_start_do_not_reach_the_upload(pair, held):
    plain, packed, memory, _ = pair
    expected = after_upload(pair, (0,), (1,))
    target = column(1)
    event = kernels.start_pool_upload(
        packed.current_ord(),
        plain.current_ord(),
        0,
        column(0),
        target,
        packed_pool=packed,
        plain_pool=plain,
    )
    target[0] = 3
    held()
    event.wait()
    assert_same_bytes(memory, expected)


def test_COM_7_a_failed_upload_says_so_and_lets_go_of_its_blocks(pair, held):
    """COM-7: the error is the waiter's, blocks and leases are free again."""
    plain, _, memory, _ = pair
    before = memory.copy()
    lease = Lease()
    seen = weakref.ref(lease)
    event = start(pair, lease=lease)
    del lease
    held(fault="the bus is gone")
    with pytest.raises(UploadFailedError, match="the bus is gone"):
        event.wait()
    assert event.error == "the bus is gone"
    assert seen() is None
    assert_same_bytes(memory, before)
    moved = kernels.host_pool_block_move(event.ord_plain, 0, column(1), column(2), pool=plain)
    raise_for_status(moved.status)
    start(pair).wait()


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan"), float("inf")])
def test_a_timeout_that_is_no_time_is_refused(timeout_s, pair):
    event = start(pair)
    with pytest.raises(ValueError, match="`timeout_s`"):
        event.wait(timeout_s)
    event.wait()


def test_readers_go_on_while_uploads_run(pair):
    """Uploads to three blocks, over and over, beside gathers of the fourth, which never change."""
    plain, _, memory, _ = pair
    fixed = memory[0, 0].transpose(0, 2, 1, 3).copy()
    is_over = threading.Event()
    wrong = []

    def read():
        while not is_over.is_set():
            read = kernels.host_pool_gather(
                plain.current_ord(), 0, column(0), pool=plain, dtype=np.uint16
            )
            if read.status[0] == KernelCode.OK and not np.array_equal(read.blocks[0], fixed):
                wrong.append(read.blocks)

    reader = threading.Thread(target=read)
    reader.start()
    with contextlib.ExitStack() as stack:
        stack.callback(reader.join)
        stack.callback(is_over.set)
        for number in range(200):
            start(pair, source=(number % 5,), target=(1 + number % 3,), layer=0).wait()
    assert not wrong
