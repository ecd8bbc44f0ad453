"""Attention over an engine's packed tensors in place, against float64."""

import numpy as np
import pytest
import torch

from torch_bridge.vllm.kv_blocks import LAYOUTS, KVBlocks

from .packed import PackedKV, attend

DIMS, HEADS, GROUP, B = 32, 2, 3, 32
MAX_BLOCKS = 6


def filled(layout, dtype, *, num_blocks=9, gap=0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    kv = PackedKV(
        layout,
        num_blocks=num_blocks,
        heads=HEADS,
        block_tokens=B,
        dims=DIMS,
        dtype=dtype,
        gap=gap,
    )
    for block in range(num_blocks):
        for offset in range(B):
            drawn = torch.randn((2, HEADS, DIMS), generator=generator).to(dtype)
            kv.write(block, offset, *drawn)
    return kv


def call(blocks, kv, table, num_keys, *, row=0, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn((HEADS * GROUP, DIMS), generator=generator).to(dtype)
    out = torch.full_like(query, torch.nan)
    mass = np.full((HEADS * GROUP, MAX_BLOCKS), np.nan, np.float32)
    table = np.array(table, np.int32)
    blocks.attend(row, kv.tensor, table, num_keys, query=query, out=out, scale=0.3, mass=mass)
    return query, out, mass


@pytest.mark.parametrize("gap", [0, 64 * 4])
@pytest.mark.parametrize("num_keys", [1, B - 1, B, B + 1, 3 * B - 5])
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("vec", torch.float32), ("vec", torch.bfloat16), ("amx", torch.bfloat16)],
)
def test_UPL_5_a_tables_blocks_are_attended_where_they_lie(layout, dtype, num_keys, gap):
    """UPL-5: order of the table, keys past the length never read, mass of every block."""
    kv = filled(layout, dtype, gap=gap)
    table = [7, 2, 5][: -(-num_keys // B)]
    blocks = KVBlocks(layout=LAYOUTS[layout], num_layer_rows=2)

    query, out, mass = call(blocks, kv, table, num_keys, row=1, dtype=dtype)

    expected, weights = attend(query, *kv.read(table, num_keys), 0.3)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    for place in range(MAX_BLOCKS):
        block = weights[:, place * B : (place + 1) * B].sum(-1)
        np.testing.assert_allclose(mass[:, place], block, atol=tolerance)


def test_each_layer_has_its_tensor_and_a_new_tensor_replaces_the_old():
    blocks = KVBlocks(layout=LAYOUTS["vec"], num_layer_rows=2)
    kvs = [filled("vec", torch.float32, seed=seed) for seed in range(3)]
    for row, kv in [(0, kvs[0]), (1, kvs[1]), (0, kvs[2]), (1, kvs[1])]:
        query, out, _ = call(blocks, kv, [3, 1], B + 4, row=row)
        expected, _ = attend(query, *kv.read([3, 1], B + 4), 0.3)
        torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)


def test_UPL_7_a_block_outside_the_tensor_is_refused_and_nothing_is_written():
    """UPL-7."""
    kv = filled("vec", torch.float32)
    query = torch.zeros((HEADS * GROUP, DIMS))
    out = torch.full_like(query, torch.nan)
    mass = np.zeros((HEADS * GROUP, MAX_BLOCKS), np.float32)
    blocks = KVBlocks(layout=LAYOUTS["vec"], num_layer_rows=1)
    with pytest.raises(ValueError, match="9"):
        blocks.attend(
            0, kv.tensor, np.array([9], np.int32), 3, query=query, out=out, scale=1.0, mass=mass
        )
    assert out.isnan().all()


def test_rows_with_gaps_inside_are_refused():
    kv = filled("vec", torch.float32)
    blocks = KVBlocks(layout=LAYOUTS["vec"], num_layer_rows=1)
    mass = np.zeros((HEADS * GROUP, MAX_BLOCKS), np.float32)
    query = torch.zeros((HEADS * GROUP, 2 * DIMS))[:, ::2]
    args = {"out": query.contiguous(), "scale": 1.0, "mass": mass}
    table = np.array([1], np.int32)
    with pytest.raises(ValueError, match="`query` and `out` have strides"):
        blocks.attend(0, kv.tensor, table, 3, query=query, **args)
    with pytest.raises(ValueError, match="`kv_cache` has strides"):
        blocks.attend(0, kv.tensor.transpose(1, 2), table, 3, query=query.contiguous(), **args)


def test_close_gives_the_tensors_back():
    kv = filled("vec", torch.float32, num_blocks=2)
    blocks = KVBlocks(layout=LAYOUTS["vec"], num_layer_rows=1)
    call(blocks, kv, [1], 3)
    blocks.close()
    blocks.close()
    assert not blocks.close.alive
