"""Registration, closing and what a pool keeps alive."""

import gc
import weakref

import numpy as np
import pytest

from blockcompact_jax import kernels
from blockcompact_jax.kernels import (
    KernelCode,
    Layout,
    PlainStrides,
    PoolClosedError,
    RegisteredPool,
    raise_for_status,
)

from .helpers import assert_same_bytes, column, random_blocks
from .pool_memory import CALLS, call, plain_memory, register_packed, register_plain
from .reference import pack_block


@pytest.mark.parametrize("kind", CALLS)
def test_a_closed_pool_is_refused_not_touched(kind, rng):
    memory, view = plain_memory(random_blocks(rng, (1, 3, 2, 1, 4, 8), np.uint16), "hnd")
    pool = register_plain(memory, view)
    ord_now = pool.current_ord()
    pool.close()
    moved = call(kind, "pool_block_move")(ord_now, 0, column(0), column(1), pool=pool)
    assert np.asarray(moved.status).tolist() == [KernelCode.UNKNOWN_POOL, -1]
    read = call(kind, "pool_gather")(ord_now, 0, column(0), pool=pool, dtype=np.uint16)
    assert np.asarray(read.status).tolist() == [KernelCode.UNKNOWN_POOL, -1]
    with pytest.raises(PoolClosedError, match="closed"):
        pool.current_ord()
    with pytest.raises(PoolClosedError, match="closed already"):
        pool.close()


def test_a_pool_id_is_never_used_again(rng):
    memory, view = plain_memory(random_blocks(rng, (1, 3, 2, 1, 4, 8), np.uint16), "hnd")
    first = register_plain(memory, view)
    first.close()
    with register_plain(memory, view) as second:
        assert second.pool_id > first.pool_id


def test_UPL_4_the_owner_is_held_until_close():
    """The memory behind a registered pool cannot go away while it is registered."""

    class Owner:
        def __init__(self):
            self.memory = np.zeros((1, 3, 2, 1, 4, 8), np.uint16)

    owner = Owner()
    seen = weakref.ref(owner)
    pool = RegisteredPool.register_plain(
        owner.memory.ctypes.data,
        num_layers=1,
        num_blocks=3,
        num_kv_heads=1,
        block_tokens=4,
        head_dim=8,
        element_bytes=2,
        strides=PlainStrides(layer=192, kv=32, block=64, head=32, token=8),
        size_bytes=owner.memory.nbytes,
        keepalive=owner,
    )
    del owner
    gc.collect()
    assert seen() is not None
    pool.close()
    gc.collect()
    assert seen() is None


def test_a_dropped_pool_warns_and_is_closed(rng):
    memory, view = plain_memory(random_blocks(rng, (1, 3, 2, 1, 4, 8), np.uint16), "hnd")
    pools = [register_plain(memory, view)]
    with pytest.warns(ResourceWarning, match="without close"):
        pools.clear()


def test_a_read_only_pool_is_never_written(rng):
    memory, view = plain_memory(random_blocks(rng, (1, 3, 2, 1, 4, 8), np.uint16), "hnd")
    before = memory.copy()
    with register_plain(memory, view, is_writable=False) as pool:
        result = kernels.host_pool_block_move(
            pool.current_ord(), 0, column(0), column(1), pool=pool
        )
    assert result.status.tolist() == [KernelCode.READ_ONLY_POOL, -1]
    assert_same_bytes(memory, before)


def test_pools_that_share_memory_are_refused(rng):
    store = random_blocks(rng, (1, 4, 1, 64, 32), np.uint16)
    view = store.reshape(1, 4, 2, 1, 32, 32)
    before = store.copy()
    with register_packed(store, Layout.AMX) as packed, register_plain(store, view) as plain:
        result = kernels.host_pool_upload(
            packed.current_ord(),
            plain.current_ord(),
            0,
            column(0),
            column(1),
            packed_pool=packed,
            plain_pool=plain,
        )
    assert result.status.tolist() == [KernelCode.OVERLAPPING_POOLS, -1]
    assert_same_bytes(store, before)


def test_two_views_of_one_memory_keep_their_own_strides(rng):
    memory = random_blocks(rng, (1, 4, 2, 4, 4, 8), np.uint16)
    with (
        register_plain(memory, memory) as hnd,
        register_plain(memory, memory.transpose(0, 1, 2, 4, 3, 5)) as nhd,
    ):
        for pool, expected in ((hnd, memory), (nhd, memory.transpose(0, 1, 2, 4, 3, 5))):
            read = kernels.host_pool_gather(
                pool.current_ord(), 0, column(2), pool=pool, dtype=np.uint16
            )
            assert_same_bytes(read.blocks[0], np.ascontiguousarray(expected[0, 2]))


def test_offsets_past_four_gibibytes_reach_the_right_bytes(tmp_path):
    """The last block of the second layer, 10 GiB into a region whose pages are never touched."""
    layer_bytes, block_bytes = 5 * 2**30, 2 * 32 * 32 * 2
    memory = np.memmap(tmp_path / "sparse", np.uint16, "w+", shape=layer_bytes)
    num_blocks = layer_bytes // block_bytes
    view = memory.reshape(2, num_blocks, 2, 1, 32, 32)
    view[1, num_blocks - 1] = np.arange(2048, dtype=np.uint16).reshape(2, 1, 32, 32)
    store = np.zeros((2, 1, 1, 64, 32), np.uint16)
    with register_plain(memory, view) as plain, register_packed(store, Layout.AMX) as packed:
        ords = plain.current_ord(), packed.current_ord()
        packed_result = kernels.host_pool_pack(
            *ords, 1, column(num_blocks - 1), column(0), plain_pool=plain, packed_pool=packed
        )
        raise_for_status(packed_result.status)
        assert_same_bytes(store[1, 0], pack_block(view[1, num_blocks - 1], "amx"))
        uploaded = kernels.pool_upload(
            packed_result.ord_packed,
            packed_result.ord_plain,
            1,
            column(0),
            column(num_blocks - 2),
            packed_pool=packed,
            plain_pool=plain,
        )
        raise_for_status(uploaded.status)
        assert_same_bytes(view[1, num_blocks - 2], view[1, num_blocks - 1])
        assert not view[0, num_blocks - 2].any()


# Registration


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_blocks": 5}, "size_bytes"),
        ({"num_layers": 2}, "size_bytes"),
        ({"num_layers": 0}, "num_layers"),
        ({"num_blocks": -1}, "num_blocks"),
        ({"element_bytes": 3}, "element_bytes"),
        ({"element_bytes": 8}, "element_bytes"),
        ({"head_dim": 0}, "head_dim"),
        ({"strides": PlainStrides(layer=256, kv=32, block=64, head=32, token=7)}, "token"),
        ({"strides": PlainStrides(layer=256, kv=16, block=64, head=32, token=8)}, "overlap"),
        ({"strides": PlainStrides(layer=256, kv=32, block=-64, head=32, token=8)}, "block"),
    ],
)
def test_a_pool_that_does_not_fit_is_not_registered(change, words):
    memory = np.zeros((4, 2, 1, 4, 8), np.uint16)
    facts = {
        "num_layers": 1,
        "num_blocks": 4,
        "num_kv_heads": 1,
        "block_tokens": 4,
        "head_dim": 8,
        "element_bytes": 2,
        "strides": PlainStrides(layer=256, kv=32, block=64, head=32, token=8),
        "size_bytes": memory.nbytes,
        "keepalive": memory,
    }
    RegisteredPool.register_plain(memory.ctypes.data, **facts).close()  # it fits unchanged
    with pytest.raises(ValueError, match=words):
        RegisteredPool.register_plain(memory.ctypes.data, **(facts | change))


@pytest.mark.parametrize("pointer", [0, 1, [0x1000, 0x2000]])
def test_a_wrong_pointer_is_refused(pointer):
    with pytest.raises(ValueError, match="pointer"):
        RegisteredPool.register_packed(
            pointer,
            layout=Layout.VEC,
            num_layers=3,
            num_blocks=1,
            num_kv_heads=1,
            block_tokens=4,
            head_dim=8,
            element_bytes=2,
            size_bytes=1 << 20,
            keepalive=None,
        )


def test_UPL_5_a_pool_of_the_other_kind_is_refused_by_its_declared_layout(pair):
    """UPL-5: a packed pool given as plain, or the reverse, is refused before the call."""
    plain, packed, _, store = pair
    with pytest.raises(ValueError, match="`packed_pool` is a plain pool"):
        kernels.host_pool_upload(
            packed.current_ord(),
            plain.current_ord(),
            0,
            column(0),
            column(0),
            packed_pool=plain,
            plain_pool=plain,
        )
    with pytest.raises(ValueError, match="is a packed pool"):
        kernels.pool_gather(packed.current_ord(), 0, column(0), pool=packed, dtype=np.uint16)
    with pytest.raises(ValueError, match="expected `amx` or `vec`"):
        register_packed(store, Layout.PLAIN_HND)
    with pytest.raises(ValueError, match="elements have 2"):
        kernels.pool_gather(plain.current_ord(), 0, column(0), pool=plain, dtype=np.float32)


def test_pools_of_different_geometry_are_refused(pair, rng):
    plain, _, _, _ = pair
    other = random_blocks(rng, (2, 5, 2, 64, 32), np.uint16)
    with (
        register_packed(other, Layout.AMX) as packed,
        pytest.raises(ValueError, match="num_kv_heads = 1"),
    ):
        kernels.host_pool_pack(
            plain.current_ord(),
            packed.current_ord(),
            0,
            column(0),
            column(0),
            plain_pool=plain,
            packed_pool=packed,
        )


def test_wrong_columns_and_ords_are_refused(pair):
    plain, _, _, _ = pair
    with pytest.raises(ValueError, match=r"`ord` is int64\[1\]"):
        kernels.host_pool_block_move(np.array([0]), 0, column(0), column(1), pool=plain)
    with pytest.raises(ValueError, match=r"`from_block` is int64\[1\]"):
        kernels.host_pool_block_move(plain.current_ord(), 0, np.array([0]), column(1), pool=plain)
    with pytest.raises(ValueError, match="`to_block` has 2 rows"):
        kernels.pool_block_move(plain.current_ord(), 0, column(0), column(1, 2), pool=plain)
    with pytest.raises(ValueError, match="`layer` has 3 rows"):
        kernels.pool_block_move(
            plain.current_ord(), column(0, 0, 0), column(0), column(1), pool=plain
        )
