"""The shipped numpy references against the naive models and against the kernels."""

import jax.numpy as jnp
import numpy as np
import pytest

from blockcompact_jax.kernels import Layout, block_move, gather, unpack_scatter
from blockcompact_jax.kernels.references import (
    reference_block_move,
    reference_gather,
    reference_pack,
    reference_unpack,
    reference_unpack_scatter,
)

from .helpers import assert_same_bytes, column, random_blocks
from .reference import move, pack_block, upload

LAYER, FROM, TO, VALID = (
    column(1, 0, 9, 1),
    column(3, 0, -1, 2),
    column(0, 4, -1, 3),
    column(32, 5, 7, 0),
)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [(Layout.AMX, np.uint16), (Layout.AMX, np.uint32), (Layout.VEC, np.uint8)],
)
def test_UPL_6_packing_references(layout, dtype, rng):
    """UPL-6: exact bytes, both ways."""
    blocks = random_blocks(rng, (2, 3, 2, 2, 32, 32), dtype)
    packed = reference_pack(blocks, layout)
    assert_same_bytes(packed[1, 2], pack_block(blocks[1, 2], layout.label))
    assert_same_bytes(reference_unpack(packed, layout), blocks)


def test_UPL_6_upload_reference(rng):
    """UPL-6: the model, the reference and the kernel agree on the whole pool."""
    pool = random_blocks(rng, (2, 5, 2, 2, 32, 32), np.uint16)
    source = random_blocks(rng, (2, 4, 2, 2, 32, 32), np.uint16)
    packed = reference_pack(source, Layout.AMX)
    expected = upload(pool, source, list(zip(LAYER, FROM, TO, VALID, strict=True)))
    columns = (LAYER, FROM, TO, VALID)
    assert_same_bytes(reference_unpack_scatter(pool, packed, *columns, layout=Layout.AMX), expected)
    written = unpack_scatter(
        jnp.asarray(pool),
        packed,
        FROM,
        TO,
        VALID,
        layout=Layout.AMX,
        pool_layout=Layout.PLAIN_HND,
        layer=LAYER,
    )
    assert_same_bytes(written.pool, expected)


def test_RET_7_move_reference(rng):
    """RET-7: the model, the reference and the kernel agree on a swap and a copy."""
    pool = random_blocks(rng, (2, 5, 7), np.uint16)
    rows = [(1, 0, 3), (1, 3, 0), (0, 3, 1), (0, -1, -1)]
    layer, from_block, to_block = (column(*values) for values in zip(*rows, strict=True))
    expected = move(pool, rows)
    assert_same_bytes(reference_block_move(pool, layer, from_block, to_block), expected)
    moved = block_move(jnp.asarray(pool), from_block, to_block, layer=layer)
    assert_same_bytes(moved.pool, expected)


@pytest.mark.parametrize("is_token_contiguous", [False, True])
def test_gather_reference(is_token_contiguous, rng):
    pool = random_blocks(rng, (2, 5, 2, 3, 4, 8), np.uint16)
    blocks = [pool[1, 3], pool[0, 0], np.zeros_like(pool[0, 0]), pool[1, 2]]
    expected = np.concatenate(blocks, axis=2) if is_token_contiguous else np.stack(blocks)
    got = reference_gather(pool, LAYER, FROM, is_token_contiguous=is_token_contiguous)
    assert_same_bytes(got, expected)
    result = gather(
        jnp.asarray(pool),
        FROM,
        pool_layout=Layout.PLAIN_HND,
        layer=LAYER,
        is_token_contiguous=is_token_contiguous,
    )
    assert_same_bytes(result.blocks, expected)
