"""Pools of a CUDA device, on an emulated one: numpy memory that only its streams may touch.

The emulated device runs the bodies of the CUDA kernels on the host, and nothing before somebody
waits. What a real one does is for the `gpu` tests and `benchmarks/gpu_check.py`.
"""

import mmap
import weakref

import jax
import numpy as np
import pytest

from blockcompact_jax import kernels
from blockcompact_jax.kernels import (
    AttendSegment,
    KernelCode,
    KernelStatusError,
    Layout,
    RegisteredPool,
    StagingBuffer,
    StagingInUseError,
    UploadFailedError,
    raise_for_status,
)
from blockcompact_jax.kernels.native import load_native
from blockcompact_jax.scores import BlockReduction

from .helpers import assert_same_bytes, column, random_blocks
from .pool_memory import CALLS, PLACES, call, plain_memory, register_packed, register_plain
from .uploads import Lease, after_upload, start

SHAPE = (2, 4, 2, 1, 32, 32)  # [layers, blocks, K/V, heads, tokens, dims]
STORE = (2, 5, 1, 64, 32)


@pytest.fixture
def pair(rng, on_device):
    """As the `pair` of the host tests: a plain pool on the device, and a pinned packed one."""
    memory, view = plain_memory(random_blocks(rng, SHAPE, np.uint16), "nhd")
    store = random_blocks(rng, STORE, np.uint16)
    with on_device(memory, view) as plain, register_packed(store, Layout.AMX) as packed:
        packed.pin()
        yield plain, packed, memory, store


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_UPL_6_every_pool_call_does_on_a_device_what_it_does_on_the_host(
    kind, place, dtype, rng, on_device
):
    """UPL-6: upload, move (RET-7: a cycle too), gather and pack, anywhere in memory."""
    blocks = random_blocks(rng, SHAPE, dtype)
    store = random_blocks(rng, STORE, dtype)
    layer, source, target = column(0, 1, -1, 1), column(4, 0, -1, 2), column(3, 3, -1, 1)
    valid = column(32, 5, 0, 31)
    results = []
    for is_on_device in (True, False):
        memory, view = plain_memory(blocks, place)
        rows = store.copy()
        plain = on_device(memory, view) if is_on_device else register_plain(memory, view)
        with plain, register_packed(rows, Layout.VEC) as packed:
            if is_on_device:
                packed.pin()
            ords = (packed.current_ord(), plain.current_ord())
            pools = {"packed_pool": packed, "plain_pool": plain}
            uploaded = call(kind, "pool_upload")(*ords, layer, source, target, valid, **pools)
            cycle = column(0, 1, 2), column(1, 2, 0)
            moved = call(kind, "pool_block_move")(uploaded.ord_plain, 1, *cycle, pool=plain)
            gathered = call(kind, "pool_gather")(moved.ord, layer, target, pool=plain, dtype=dtype)
            packed_again = call(kind, "pool_pack")(
                moved.ord, uploaded.ord_packed, 0, column(3, 0), column(1, 2), **pools
            )
            raise_for_status(packed_again.status)
            results.append([*uploaded, *moved, *gathered, *packed_again, memory, rows])
    for ours, expected in zip(*results, strict=True):
        assert_same_bytes(np.asarray(ours), np.asarray(expected))


def test_UPL_4_nothing_moves_before_the_event_and_the_lease_is_held_until_it(pair, device):
    """UPL-4: source blocks, destination blocks and the lease are free with the event."""
    plain, packed, memory, store = pair
    before, expected = memory.copy(), after_upload(pair, (3, 0), (1, 2))
    lease = Lease()
    seen = weakref.ref(lease)
    device.hold(True)
    event = start(pair, source=(3, 0), target=(1, 2), lease=lease)
    del lease
    assert device.num_pending() > 0
    assert not event.is_done
    assert_same_bytes(memory, before)
    staged = store.copy()
    refused = kernels.host_pool_pack(
        event.ord_plain,
        packed.current_ord(),
        0,
        column(3),
        column(3),
        plain_pool=plain,
        packed_pool=packed,
    )
    assert refused.status.tolist() == [KernelCode.OPEN_TRANSFER, 0]
    assert_same_bytes(store, staged)
    assert seen() is not None
    device.hold(False)
    event.wait()
    assert seen() is None
    assert_same_bytes(memory, expected)


def test_UPL_4_pinned_staging_is_not_filled_before_its_event(rng, on_device, device):
    """UPL-4: the buffer refuses by its name; afterwards it may be filled again."""
    memory, view = plain_memory(random_blocks(rng, SHAPE, np.uint16), "hnd")
    staging = StagingBuffer(
        "uploads",
        layout=Layout.AMX,
        num_layers=2,
        num_blocks=5,
        num_kv_heads=1,
        block_tokens=32,
        head_dim=32,
        dtype=np.uint16,
        is_pinned=True,
    )
    with on_device(memory, view) as plain, staging:
        assert staging.rows().ctypes.data % mmap.PAGESIZE == 0
        staging.rows()[...] = random_blocks(rng, STORE, np.uint16)
        device.hold(True)
        event = start((plain, staging.pool, None, None))
        with pytest.raises(StagingInUseError, match="uploads"):
            staging.rows()
        device.hold(False)
        event.wait()
        staging.rows()


def test_the_owner_may_wait_in_its_stream_and_the_host_does_not(pair, device):
    device.hold(True)
    event = start(pair)
    event.wait_in_stream()
    assert not event.is_done
    device.hold(False)
    event.wait()


def test_on_the_host_waiting_in_the_stream_is_waiting(rng):
    memory, view = plain_memory(random_blocks(rng, SHAPE, np.uint16), "nhd")
    store = random_blocks(rng, STORE, np.uint16)
    native = load_native()
    with register_plain(memory, view) as plain, register_packed(store, Layout.AMX) as packed:
        event = start((plain, packed, memory, store))
        event.wait_in_stream()
        assert event.is_done
        native.hold_uploads(True)
        failing = start((plain, packed, memory, store))
        native.hold_uploads(False, "no bus")
        with pytest.raises(UploadFailedError, match="no bus"):
            failing.wait_in_stream()


def test_a_failure_of_the_device_is_a_failed_upload_and_its_blocks_are_free(pair, device):
    device.hold(True)
    event = start(pair, target=(1,))
    device.fail_next_wait("the device fell off the bus")
    device.hold(False)
    with pytest.raises(UploadFailedError, match="fell off the bus"):
        event.wait()
    start(pair, target=(1,)).wait()


@pytest.mark.parametrize("kind", CALLS)
def test_a_failure_of_the_device_is_an_error_of_the_call(kind, pair, device):
    plain, _, _, _ = pair
    device.fail_next_wait("the device fell off the bus")
    with pytest.raises((RuntimeError, jax.errors.JaxRuntimeError), match="fell off the bus"):
        np.asarray(
            call(kind, "pool_block_move")(
                plain.current_ord(), 0, column(0), column(1), pool=plain
            ).status
        )


@pytest.mark.parametrize("kind", CALLS)
def test_UPL_7_memory_that_the_device_cannot_read_is_refused(kind, rng, on_device):
    """UPL-7: pageable rows, and a packed pool of another device; nothing moves."""
    memory, view = plain_memory(random_blocks(rng, SHAPE, np.uint16), "nhd")
    store = random_blocks(rng, STORE, np.uint16)
    before = memory.copy()
    with on_device(memory, view) as plain, register_packed(store, Layout.AMX) as packed:
        result = call(kind, "pool_upload")(
            packed.current_ord(),
            plain.current_ord(),
            0,
            column(0),
            column(1),
            packed_pool=packed,
            plain_pool=plain,
        )
        with pytest.raises(KernelStatusError, match="pinned host memory") as refused:
            raise_for_status(result.status)
        assert refused.value.code is KernelCode.OTHER_DEVICE
        with pytest.raises(KernelStatusError, match="pinned host memory"):
            start((plain, packed, memory, store))
        assert np.asarray(result.ord_plain).tolist() == plain.current_ord().tolist() == [0]
    assert_same_bytes(memory, before)


def test_registrations_of_wrong_memory_are_refused_in_a_sentence(rng, on_device):
    memory, view = plain_memory(random_blocks(rng, SHAPE, np.uint16), "nhd")
    with on_device(memory, view, device_ordinal=1) as plain:
        assert plain.device == 1
        assert "cuda:1" in repr(plain)
        with pytest.raises(ValueError, match="memory of device 1, not of `device` 0"):
            register_plain(memory, view, device=0)
        with pytest.raises(ValueError, match="the pool's memory is a device's"):
            plain.pin()
    other = memory.copy()
    with pytest.raises(ValueError, match="memory of the host, not of `device` 0"):
        register_plain(other, view, device=0)
    with pytest.raises(ValueError, match="ordinal"):
        register_plain(memory, view, device=-1)
    with pytest.raises(ValueError, match="give both or neither"):
        register_plain(memory, view, stream=7)


def test_without_the_cuda_component_a_device_is_refused(rng):
    memory, view = plain_memory(random_blocks(rng, SHAPE, np.uint16), "nhd")
    native = load_native()
    before = native.set_device_runtime(None)
    try:
        with pytest.raises(ValueError, match="BLOCKCOMPACT_CUDA=ON"):
            register_plain(memory, view, device=0)
        with register_plain(memory, view) as plain, pytest.raises(ValueError, match="CUDA"):
            plain.pin()
        with pytest.raises(ValueError, match="CUDA"):
            StagingBuffer(
                "uploads",
                layout=Layout.VEC,
                num_layers=1,
                num_blocks=1,
                num_kv_heads=1,
                block_tokens=4,
                head_dim=4,
                dtype=np.uint16,
                is_pinned=True,
            )
    finally:
        native.set_device_runtime(before)


def test_calls_that_only_the_cpu_has_refuse_the_pool_by_its_device(pair):
    plain, _, _, _ = pair
    queries = np.zeros((1, 1, 32), np.uint16)
    segment = AttendSegment(plain, plain.current_ord(), 0, column(0), 32)
    calls = (
        lambda: kernels.host_pool_attend(queries, [segment], scale=1.0, max_blocks=1),
        lambda: kernels.host_pool_score_blocks(
            queries, segment, block_reduction=BlockReduction.MAX
        ),
        lambda: kernels.host_pool_summarize_blocks(segment),
    )
    for each in calls:
        with pytest.raises(ValueError, match="cuda:0"):
            each()


def test_a_packed_pool_of_the_device_is_a_source_and_moves_there(rng, on_device, device):
    memory, view = plain_memory(random_blocks(rng, SHAPE, np.uint16), "nhd")
    store = random_blocks(rng, STORE, np.uint16)
    expected_store = store.copy()
    expected_store[1, [3, 4]] = store[1, [4, 3]]
    device.add_memory(store.ctypes.data, store.nbytes, 0)
    with (
        on_device(memory, view) as plain,
        RegisteredPool.register_packed(
            store.ctypes.data,
            layout=Layout.AMX,
            num_layers=2,
            num_blocks=5,
            num_kv_heads=1,
            block_tokens=32,
            head_dim=32,
            element_bytes=2,
            size_bytes=store.nbytes,
            keepalive=store,
            device=0,
        ) as packed,
    ):
        expected = after_upload((plain, packed, memory, store), (2,), (0,))
        start((plain, packed, memory, store), source=(2,), target=(0,)).wait()
        moved = kernels.host_pool_block_move(
            packed.current_ord(), 1, column(3, 4), column(4, 3), pool=packed
        )
        raise_for_status(moved.status)
    device.remove_memory(store.ctypes.data)
    assert_same_bytes(memory, expected)
    assert_same_bytes(store, expected_store)
