"""Bytes that pool calls move; host calls and jitted calls must agree."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockcompact_jax import kernels
from blockcompact_jax.kernels import (
    Layout,
    PackedStrides,
    PlainStrides,
    RegisteredPool,
    raise_for_status,
)
from blockcompact_jax.kernels.native import load_native

from .helpers import assert_same_bytes, column, random_blocks
from .pool_memory import CALLS, PLACES, call, plain_memory, register_packed, register_plain
from .reference import move, pack_block, upload


def pack_all(blocks, layout):
    return np.stack([[pack_block(block, layout.label) for block in layer] for layer in blocks])


SHAPES = [  # layout, heads, tokens, dims, dtype
    (Layout.AMX, 2, 32, 32, np.uint16),
    (Layout.AMX, 1, 32, 32, np.uint32),
    (Layout.AMX, 1, 32, 160, np.uint16),
    (Layout.VEC, 2, 16, 40, np.uint16),
    (Layout.VEC, 1, 32, 96, np.uint16),
    (Layout.VEC, 1, 5, 7, np.uint8),
    (Layout.VEC, 3, 20, 24, np.uint32),
]


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("place", PLACES)
def test_UPL_6_pool_pack_moves_exact_bytes(kind, place, impl, stores, rng):
    """UPL-5, UPL-6: any strides, every layout; the whole store is compared."""
    rows = [(0, 3, 4), (1, 0, 2), (0, -1, -1), (1, 2, 0)]
    layer, plain_block, source_block = (column(*values) for values in zip(*rows, strict=True))
    for layout, heads, tokens, dims, dtype in SHAPES:
        blocks = random_blocks(rng, (2, 4, 2, heads, tokens, dims), dtype)
        memory, view = plain_memory(blocks, place)
        before = memory.copy()
        store = random_blocks(rng, (2, 5, heads, 2 * tokens, dims), dtype)
        expected = store.copy()
        for row_layer, from_block, to_block in rows:
            if from_block != -1:
                block = pack_block(blocks[row_layer, from_block], layout.label)
                expected[row_layer, to_block] = block
        with register_plain(memory, view) as plain, register_packed(store, layout) as packed:
            result = call(kind, "pool_pack")(
                plain.current_ord(),
                packed.current_ord(),
                layer,
                plain_block,
                source_block,
                plain_pool=plain,
                packed_pool=packed,
            )
            raise_for_status(result.status)
        assert_same_bytes(store, expected)
        assert_same_bytes(memory, before)


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("place", PLACES)
def test_UPL_6_pool_upload_moves_exact_bytes(kind, place, impl, stores, rng):
    """UPL-5, UPL-6: the whole plain memory is compared, gaps and unwritten tokens included."""
    for layout, heads, tokens, dims, dtype in SHAPES:
        rows = [(1, 4, 0, tokens), (0, 0, 3, 1), (9, -1, -1, 9), (0, 2, 1, tokens - 1)]
        layer, source_block, physical_block, valid = (
            column(*values) for values in zip(*rows, strict=True)
        )
        source = random_blocks(rng, (2, 5, 2, heads, tokens, dims), dtype)
        store = pack_all(source, layout)
        blocks = random_blocks(rng, (2, 4, 2, heads, tokens, dims), dtype)
        memory, view = plain_memory(blocks, place)
        expected = memory.copy()
        np.lib.stride_tricks.as_strided(expected, view.shape, view.strides)[...] = upload(
            blocks, source, rows
        )
        with register_plain(memory, view) as plain, register_packed(store, layout) as packed:
            result = call(kind, "pool_upload")(
                packed.current_ord(),
                plain.current_ord(),
                layer,
                source_block,
                physical_block,
                valid,
                packed_pool=packed,
                plain_pool=plain,
            )
            raise_for_status(result.status)
        assert_same_bytes(memory, expected)


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("place", PLACES)
def test_UPL_6_pool_gather_in_both_orders(kind, place, impl, stores, rng):
    """UPL-6: blocks and padding rows, exactly."""
    blocks = random_blocks(rng, (2, 4, 2, 3, 8, 72), np.uint16)
    memory, view = plain_memory(blocks, place)
    with register_plain(memory, view) as pool:
        ord_now = pool.current_ord()
        rows = column(3, -1, 0)
        expected = np.stack([blocks[1, 3], np.zeros_like(blocks[0, 0]), blocks[1, 0]])
        result = call(kind, "pool_gather")(ord_now, 1, rows, pool=pool, dtype=np.uint16)
        raise_for_status(result.status)
        assert_same_bytes(result.blocks, expected)
        result = call(kind, "pool_gather")(
            result.ord, 1, rows, pool=pool, dtype=jnp.bfloat16, is_token_contiguous=True
        )
        raise_for_status(result.status)
        flat = np.asarray(result.blocks).view(np.uint16)
        assert_same_bytes(flat, np.concatenate(list(expected), axis=2))
        assert np.asarray(result.ord).tolist() == ord_now.tolist()


def test_a_gather_into_given_memory_writes_it_and_nothing_else(rng):
    blocks = random_blocks(rng, (1, 4, 2, 1, 8, 16), np.uint16)
    memory, view = plain_memory(blocks, "hnd")
    out = np.full((4, 2, 1, 8, 16), 7, np.uint16)
    with register_plain(memory, view) as pool:
        options = {"pool": pool, "dtype": np.uint16}
        ord_now, rows = pool.current_ord(), column(3, 0)
        result = kernels.host_pool_gather(ord_now, 0, rows, out=out[1:3], **options)
        raise_for_status(result.status)
        assert result.blocks.ctypes.data == out[1:].ctypes.data
        assert_same_bytes(out[1:3], blocks[0, rows])
        assert (out[[0, 3]] == 7).all()
        for wrong in (out, out[1:3].astype(np.int16), out[::2], out[1:3, ..., ::-1]):
            with pytest.raises(ValueError, match="`out` is"):
                kernels.host_pool_gather(ord_now, 0, rows, out=wrong, **options)
        stale = kernels.host_pool_gather(ord_now + 1, 0, rows, out=out[1:3], **options)
        assert int(stale.status[0]) == kernels.KernelCode.STALE_ORD
        assert_same_bytes(out[1:3], blocks[0, rows])


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 5), st.integers(0, 5)),
        max_size=8,
        unique_by=lambda row: (row[0], row[2]),
    ),
    kind=st.sampled_from(CALLS),
    place=st.sampled_from(PLACES),
    is_streamed=st.booleans(),
)
def test_RET_7_pool_block_move_is_simultaneous(rows, kind, place, is_streamed):
    """RET-7: chains and cycles in pools of any strides, in turns or one after the other."""
    load_native().force_streaming_from(0 if is_streamed else -1)
    padded = rows + [(0, -1, -1)] * (8 - len(rows))
    blocks = np.random.default_rng(1).integers(0, 2**16, (2, 6, 2, 2, 4, 64), dtype=np.uint16)
    memory, view = plain_memory(blocks, place)
    layer, from_block, to_block = (column(*v) for v in zip(*padded, strict=True))
    with register_plain(memory, view) as pool:
        result = call(kind, "pool_block_move")(
            pool.current_ord(), layer, from_block, to_block, pool=pool
        )
        load_native().force_streaming_from(-1)
        raise_for_status(result.status)
        assert_same_bytes(np.ascontiguousarray(view), move(blocks, rows))


def test_block_move_within_a_packed_pool(rng):
    store = random_blocks(rng, (2, 6, 2, 64, 32), np.uint16)
    expected = move(store, [(1, 0, 5), (1, 5, 0), (0, 2, 3)])
    with register_packed(store, Layout.AMX) as pool:
        result = kernels.host_pool_block_move(
            pool.current_ord(), column(1, 1, 0), column(0, 5, 2), column(5, 0, 3), pool=pool
        )
        raise_for_status(result.status)
    assert_same_bytes(store, expected)


@pytest.mark.parametrize("layout", [Layout.AMX, Layout.VEC])
def test_UPL_3_both_source_kinds_upload_the_same_bytes(layout, stores, rng):
    """UPL-3: `cpu_copy` gathers blocks into [K, N) first, `source_only` reads them there."""
    num_source, source = 4, column(2, 0, 3)
    gathered, physical = column(4, 5, 6), column(1, 3, 0)
    store = random_blocks(rng, (2, 7, 2, 64, 32), np.uint16)
    copied = store.copy()
    pools = [plain_memory(np.zeros((2, 4, 2, 2, 32, 32), np.uint16), "hnd") for _ in range(2)]
    with (
        register_packed(store, layout) as direct,
        register_packed(copied, layout) as packed,
        register_plain(*pools[0]) as one,
        register_plain(*pools[1]) as other,
    ):
        moved = kernels.host_pool_block_move(packed.current_ord(), 1, source, gathered, pool=packed)
        raise_for_status(moved.status)
        assert_same_bytes(copied[:, :num_source], store[:, :num_source])
        for read, blocks, plain in ((direct, source, one), (packed, gathered, other)):
            result = kernels.host_pool_upload(
                read.current_ord(),
                plain.current_ord(),
                1,
                blocks,
                physical,
                packed_pool=read,
                plain_pool=plain,
            )
            raise_for_status(result.status)
    assert_same_bytes(pools[0][0], pools[1][0])
    assert pools[0][0][1, physical].any(axis=(1, 2, 3, 4)).all()


def test_layers_in_their_own_allocations_serve_one_call(rng):
    layers = [random_blocks(rng, (3, 2, 1, 4, 8), np.uint16) for _ in range(3)]
    expected = [layer.copy() for layer in layers]
    with RegisteredPool.register_plain(
        [layer.ctypes.data for layer in layers],
        num_layers=3,
        num_blocks=3,
        num_kv_heads=1,
        block_tokens=4,
        head_dim=8,
        element_bytes=2,
        strides=PlainStrides(layer=0, kv=32, block=64, head=32, token=8),
        size_bytes=layers[0].nbytes,
        keepalive=layers,
    ) as pool:
        result = kernels.host_pool_block_move(
            pool.current_ord(), column(0, 2), column(0, 1), column(2, 0), pool=pool
        )
        raise_for_status(result.status)
    expected[0][2] = expected[0][0]
    expected[2][0] = expected[2][1]
    for got, wanted in zip(layers, expected, strict=True):
        assert_same_bytes(got, wanted)


def test_packed_rows_may_have_gaps(rng):
    memory = random_blocks(rng, (2, 3, 2 * 64 * 32 + 64), np.uint16)
    row, expected = memory.shape[-1], memory.copy()
    with RegisteredPool.register_packed(
        memory.ctypes.data,
        layout=Layout.AMX,
        num_layers=2,
        num_blocks=3,
        num_kv_heads=2,
        block_tokens=32,
        head_dim=32,
        element_bytes=2,
        strides=PackedStrides(layer=3 * row, block=row),
        size_bytes=memory.nbytes,
        keepalive=memory,
    ) as pool:
        moved = kernels.host_pool_block_move(pool.current_ord(), 1, column(0), column(2), pool=pool)
        raise_for_status(moved.status)
    expected[1, 2, : 2 * 64 * 32] = expected[1, 0, : 2 * 64 * 32]
    assert_same_bytes(memory, expected)
