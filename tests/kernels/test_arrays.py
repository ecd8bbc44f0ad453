"""Calls on JAX-owned arrays: exact bytes, and pools that stay where they are."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from blockcompact_jax.kernels import (
    KernelCode,
    Layout,
    PoolCopiedError,
    block_move,
    gather,
    pack,
    raise_for_status,
    unpack,
    unpack_scatter,
)

from .helpers import as_bytes, assert_same_bytes, column, random_blocks
from .reference import move, pack_block, upload

HND, NHD, AMX, VEC = Layout.PLAIN_HND, Layout.PLAIN_NHD, Layout.AMX, Layout.VEC
BF16 = np.dtype(ml_dtypes.bfloat16)

SHAPES = [  # layout, heads, block_tokens, head_dim, dtype
    (AMX, 2, 32, 32, BF16),
    (AMX, 1, 64, 96, np.float16),
    (AMX, 2, 32, 32, np.float32),
    (VEC, 2, 1, 16, BF16),
    (VEC, 1, 2, 80, np.uint16),
    (VEC, 3, 32, 64, BF16),
    (VEC, 2, 33, 17, np.float32),
    (VEC, 2, 20, 24, np.uint8),
]


def in_order(blocks, order):
    """[..., 2, H, B, D] into the plain order (its own inverse)."""
    return blocks if order is HND else np.swapaxes(blocks, -3, -2).copy()


def test_UPL_6_pack_and_unpack_move_exact_bytes(impl, rng):
    """UPL-5, UPL-6: every layout, dtype and plain order, bytewise, NaN payloads included."""
    for layout, heads, tokens, dims, dtype in SHAPES:
        blocks = random_blocks(rng, (3, 2, heads, tokens, dims), dtype)
        expected = np.stack([pack_block(block, layout.label) for block in blocks])
        for order in (HND, NHD):
            plain = in_order(blocks, order)
            packed = pack(jnp.asarray(plain), layout=layout, plain_layout=order)
            assert_same_bytes(packed, expected)
            back = unpack(packed, layout=layout, plain_layout=order)
            assert_same_bytes(back, plain)


def test_pack_keeps_a_layer_axis(rng):
    blocks = random_blocks(rng, (2, 3, 2, 1, 32, 32), np.uint16)
    packed = pack(jnp.asarray(blocks), layout=AMX, plain_layout=HND)
    assert packed.shape == (2, 3, 1, 64, 32)
    assert_same_bytes(packed[1, 2], pack_block(blocks[1, 2], "amx"))
    assert_same_bytes(unpack(packed, layout=AMX, plain_layout=HND), blocks)


@st.composite
def upload_rows(draw):
    """Rows (layer, from, to, valid) with distinct (layer, to) and some padding."""
    cells = draw(st.lists(st.integers(0, 2 * 6 - 1), unique=True, max_size=7))
    rows = []
    for cell in cells:
        if draw(st.integers(0, 4)) == 0:
            rows.append((draw(st.integers(-5, 9)), -1, -1, draw(st.integers(-5, 99))))
        else:
            source = draw(st.integers(0, 3))
            rows.append((cell // 6, source, cell % 6, draw(st.integers(0, 8))))
    return rows + [(0, -1, -1, 0)] * (7 - len(rows))


@given(rows=upload_rows(), order=st.sampled_from([HND, NHD]))
def test_UPL_6_unpack_scatter_writes_valid_tokens_and_nothing_else(rows, order):
    """UPL-6: the whole pool is compared, so every byte that no row owns is a canary."""
    rng = np.random.default_rng(len(rows))
    source = random_blocks(rng, (2, 4, 2, 2, 8, 16), BF16)
    pool = random_blocks(rng, (2, 6, 2, 2, 8, 16), BF16)
    packed = np.stack([[pack_block(block, "vec") for block in layer] for layer in source])
    layer, from_block, to_block, valid = (column(*values) for values in zip(*rows, strict=True))
    result = unpack_scatter(
        jnp.asarray(in_order(pool, order)),
        packed,
        from_block,
        to_block,
        valid,
        layout=VEC,
        pool_layout=order,
        layer=layer,
    )
    raise_for_status(result.status)
    assert_same_bytes(in_order(np.asarray(result.pool), order), upload(pool, source, rows))


def test_unpack_scatter_into_one_layer_and_rows_shared_by_all_layers(rng):
    source = random_blocks(rng, (3, 2, 1, 32, 32), np.uint16)
    packed = np.stack([pack_block(block, "amx") for block in source])
    single = random_blocks(rng, (4, 2, 1, 32, 32), np.uint16)
    result = unpack_scatter(
        jnp.asarray(single), packed, column(2), column(3), layout=AMX, pool_layout=HND
    )
    expected = single.copy()
    expected[3] = source[2]
    assert_same_bytes(result.pool, expected)
    stacked = random_blocks(rng, (2, 4, 2, 1, 32, 32), np.uint16)
    result = unpack_scatter(
        jnp.asarray(stacked),
        packed,
        column(2, 2),
        column(3, 0),
        layout=AMX,
        pool_layout=HND,
        layer=column(0, 1),
    )
    expected = stacked.copy()
    expected[0, 3] = expected[1, 0] = source[2]
    assert_same_bytes(result.pool, expected)


FAULTS = [  # layer, from, to, valid, code, row
    ((0, 2), (0, 0), (0, 1), (8, 8), KernelCode.LAYER_OUT_OF_RANGE, 1),
    ((0, -1), (0, 0), (0, 1), (8, 8), KernelCode.LAYER_OUT_OF_RANGE, 1),
    ((0, 0), (0, 4), (0, 1), (8, 8), KernelCode.FROM_BLOCK_OUT_OF_RANGE, 1),
    ((0, 0), (0, 0), (0, 6), (8, 8), KernelCode.TO_BLOCK_OUT_OF_RANGE, 1),
    ((0, 0), (0, 0), (0, -2), (8, 8), KernelCode.TO_BLOCK_OUT_OF_RANGE, 1),
    ((0, 0), (0, 1), (5, 5), (8, 8), KernelCode.DUPLICATE_DESTINATION, 1),
    ((0, 0), (0, -1), (0, 1), (8, 8), KernelCode.PARTIAL_HOLE, 1),
    ((0, 0), (0, 1), (0, -1), (8, 8), KernelCode.PARTIAL_HOLE, 1),
    ((0, 0), (0, 1), (0, 1), (8, 9), KernelCode.VALID_TOKENS_OUT_OF_RANGE, 1),
    ((0, 0), (0, 1), (0, 1), (-1, 8), KernelCode.VALID_TOKENS_OUT_OF_RANGE, 0),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_UPL_7_a_faulty_row_is_refused_before_the_first_byte(fault, rng):
    """UPL-7: the good rows around a bad one move nothing either, and the pool survives."""
    layer, source, target, valid, code, row = fault
    pool = random_blocks(rng, (2, 6, 2, 1, 8, 16), np.uint16)
    packed = random_blocks(rng, (2, 4, 1, 16, 16), np.uint16)
    result = unpack_scatter(
        jnp.asarray(pool),
        packed,
        column(*source),
        column(*target),
        column(*valid),
        layout=VEC,
        pool_layout=HND,
        layer=column(*layer),
    )
    assert np.asarray(result.status).tolist() == [code, row]
    assert_same_bytes(result.pool, pool)


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 6), st.integers(0, 6)),
        max_size=10,
        unique_by=lambda row: (row[0], row[2]),
    )
)
def test_RET_7_block_move_reads_all_before_it_writes_any(rows):
    """RET-7: chains, cycles, fans and fixed points, against a simultaneous model."""
    padded = rows + [(9, -1, -1)] * (10 - len(rows))
    pool = np.random.default_rng(3).integers(0, 2**16, (2, 7, 5), dtype=np.uint16)
    layer, from_block, to_block = (column(*values) for values in zip(*padded, strict=True))
    result = block_move(jnp.asarray(pool), from_block, to_block, layer=layer)
    raise_for_status(result.status)
    assert_same_bytes(result.pool, move(pool, padded))


def test_RET_7_a_long_cycle_and_a_chain_into_it(rng):
    """RET-7: one cycle through every block but the last, which is also read from the cycle."""
    pool = random_blocks(rng, (64, 2, 1, 4, 8), np.float32)
    from_block = column(*range(1, 63), 0, 5)
    to_block = column(*range(63), 63)
    result = block_move(jnp.asarray(pool), from_block, to_block)
    raise_for_status(result.status)
    expected = pool.copy()
    expected[np.asarray(to_block)] = pool[np.asarray(from_block)]
    assert_same_bytes(result.pool, expected)


def test_UPL_7_block_move_refuses_a_destination_named_twice(rng):
    """UPL-7: refused whole."""
    pool = random_blocks(rng, (4, 3), np.uint16)
    result = block_move(jnp.asarray(pool), column(0, 1), column(2, 2))
    assert np.asarray(result.status).tolist() == [KernelCode.DUPLICATE_DESTINATION, 1]
    assert_same_bytes(result.pool, pool)


@pytest.mark.parametrize("order", [HND, NHD])
def test_gather_copies_blocks_and_makes_padding_zero(order, rng):
    pool = random_blocks(rng, (2, 5, 2, 3, 4, 16), BF16)
    plain = jnp.asarray(in_order(pool, order))
    rows, layer = column(4, -1, 0, 4), column(1, 7, 0, 0)
    expected = np.stack([pool[1, 4], np.zeros_like(pool[0, 0]), pool[0, 0], pool[0, 4]])
    result = gather(plain, rows, pool_layout=order, layer=layer)
    raise_for_status(result.status)
    assert_same_bytes(result.blocks, in_order(expected, order))
    result = gather(plain, rows, pool_layout=order, layer=layer, is_token_contiguous=True)
    raise_for_status(result.status)
    assert_same_bytes(result.blocks, np.concatenate(list(expected), axis=2))


def test_gather_refuses_one_past_the_end_and_returns_zeros(rng):
    pool = random_blocks(rng, (3, 2, 1, 4, 8), np.uint16)
    result = gather(jnp.asarray(pool), column(2, 3), pool_layout=HND)
    assert np.asarray(result.status).tolist() == [KernelCode.FROM_BLOCK_OUT_OF_RANGE, 1]
    assert not as_bytes(result.blocks).any()


def test_no_rows_and_only_padding_move_nothing(rng):
    pool = random_blocks(rng, (3, 2, 1, 4, 8), np.uint16)
    for rows in (column(), column(-1, -1)):
        result = block_move(jnp.asarray(pool), rows, rows)
        raise_for_status(result.status)
        assert_same_bytes(result.pool, pool)
        gathered = gather(jnp.asarray(pool), rows, pool_layout=HND)
        raise_for_status(gathered.status)
        assert gathered.blocks.shape[0] == len(rows)


def test_unwritten_rows_keep_their_nan_payload():
    """A signalling NaN pattern in row 9 survives a scatter of rows 2 and 3, to the bit."""
    bits = np.zeros((16, 2, 1, 2, 16), np.uint16)
    bits[9] = 0x7F81
    source = np.zeros((2, 1, 4, 16), BF16)
    result = unpack_scatter(
        jnp.asarray(bits.view(BF16)),
        source,
        column(0, 1),
        column(2, 3),
        layout=VEC,
        pool_layout=HND,
    )
    assert_same_bytes(result.pool, bits.view(BF16))


# In place


def test_an_eager_writer_keeps_the_buffer(rng):
    pool = jnp.asarray(random_blocks(rng, (8, 2, 1, 32, 32), np.uint16))
    address = pool.unsafe_buffer_pointer()
    pool = block_move(pool, column(1), column(2)).pool
    packed = np.zeros((1, 1, 64, 32), np.uint16)
    pool = unpack_scatter(pool, packed, column(0), column(3), layout=AMX, pool_layout=HND).pool
    assert pool.unsafe_buffer_pointer() == address


def test_a_pool_that_is_still_shared_is_reported_as_copied(rng):
    pool = jnp.asarray(random_blocks(rng, (8, 2, 1, 32, 32), np.uint16))
    view = np.asarray(pool)  # an outside reference: the buffer cannot be donated
    with pytest.raises(PoolCopiedError, match="block_move"):
        block_move(pool, column(1), column(2))
    assert view.shape == (8, 2, 1, 32, 32)


def test_a_pool_closed_over_by_a_trace_is_refused(rng):
    pool = jnp.asarray(random_blocks(rng, (8, 2, 1, 32, 32), np.uint16))
    with pytest.raises(ValueError, match="constant of the traced function"):
        jax.jit(lambda rows: block_move(pool, rows, rows))(column(1))


def swap_once(pool, i, j):
    return block_move(pool, i, j).pool


def swap_in_scan(pool, i, j):
    return lax.scan(lambda p, _: (block_move(p, i, j).pool, None), pool, length=3)[0]


def swap_in_fori_loop(pool, i, j):
    return lax.fori_loop(0, 3, lambda _, p: block_move(p, i, j).pool, pool)


def swap_in_cond(pool, i, j):
    return lax.cond(i[0] >= 0, lambda p: block_move(p, i, j).pool, lambda p: p, pool)


def read_then_swap(pool, i, j):
    read = gather(pool, i, pool_layout=HND)
    return block_move(pool, i, j, after=(read.blocks,)).pool, read.blocks


def upload_in_scan(pool, i, j):
    packed = jnp.zeros((3, 2, 64, 64), jnp.uint16)

    def body(carried, _):
        written = unpack_scatter(carried, packed, i, j, layout=AMX, pool_layout=HND)
        return written.pool, written.status

    return lax.scan(body, pool, length=2)


@pytest.mark.parametrize(
    "function",
    [swap_once, swap_in_scan, swap_in_fori_loop, swap_in_cond, read_then_swap, upload_in_scan],
)
def test_a_donated_pool_is_written_in_place_under_jit(function, rng):
    """The compiler aliases the whole pool and keeps no second one; the address stays."""
    pool = jnp.asarray(random_blocks(rng, (64, 2, 2, 32, 64), np.uint16))
    before = np.array(pool)
    compiled = jax.jit(function, donate_argnums=0).lower(pool, column(1, 2), column(2, 1)).compile()
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes >= pool.nbytes
    assert analysis.temp_size_in_bytes < pool.nbytes
    address = pool.unsafe_buffer_pointer()
    result = jax.tree.leaves(compiled(pool, column(1, 2), column(2, 1)))[0]
    assert result.unsafe_buffer_pointer() == address
    if function is not upload_in_scan:
        before[[1, 2]] = before[[2, 1]]  # 1 or 3 swaps
        assert_same_bytes(result, before)


def test_a_reader_that_the_writer_does_not_come_after_costs_a_copy(rng):
    """Why `after` exists. Should this fail one day, `after` can go."""

    @partial(jax.jit, donate_argnums=0)
    def careless(pool, i, j):
        read = gather(pool, i, pool_layout=HND)
        return block_move(pool, i, j).pool, read.blocks

    pool = jnp.asarray(random_blocks(rng, (64, 2, 2, 32, 64), np.uint16))
    analysis = careless.lower(pool, column(1, 2), column(2, 1)).compile().memory_analysis()
    assert analysis.temp_size_in_bytes >= pool.nbytes


def test_the_reader_sees_the_pool_before_the_write(rng):
    pool = random_blocks(rng, (8, 2, 2, 4, 16), np.uint16)
    swapped, read = jax.jit(read_then_swap, donate_argnums=0)(
        jnp.asarray(pool), column(1, 2), column(2, 1)
    )
    assert_same_bytes(read, pool[[1, 2]])
    assert_same_bytes(swapped[1], pool[2])


# Static faults


def test_UPL_5_static_faults_are_named_before_anything_runs():
    """UPL-5: shapes, dtypes and layouts that do not fit are refused when traced."""
    pool = jnp.zeros((4, 2, 1, 32, 32), jnp.uint16)
    packed = np.zeros((2, 1, 64, 32), np.uint16)
    scatter = partial(unpack_scatter, layout=AMX, pool_layout=HND)
    with pytest.raises(ValueError, match="`source_block` is int64"):
        scatter(pool, packed, np.array([0]), column(0))
    with pytest.raises(ValueError, match="`physical_block` has 2 rows"):
        scatter(pool, packed, column(0), column(0, 1))
    with pytest.raises(ValueError, match="dtype must be equal"):
        scatter(pool, packed.astype(np.float16), column(0), column(0))
    with pytest.raises(ValueError, match="block_tokens, head_dim and dtype must be equal"):
        scatter(pool, np.zeros((2, 1, 128, 32), np.uint16), column(0), column(0))
    with pytest.raises(ValueError, match="rank"):
        scatter(pool, packed, column(0), column(0), layer=column(0))
    with pytest.raises(ValueError, match="expected `amx` or `vec`"):
        pack(pool, layout=HND, plain_layout=HND)
    with pytest.raises(ValueError, match="expected `plain_nhd` or `plain_hnd`"):
        pack(pool, layout=AMX, plain_layout=VEC)
    with pytest.raises(ValueError, match=r"`amx` needs `block_tokens`.*`vec`"):
        pack(jnp.zeros((4, 2, 1, 16, 32), jnp.uint16), layout=AMX, plain_layout=HND)
