"""Scores of an engine's packed blocks in place, against float64."""

import numpy as np
import pytest
import torch

from torch_bridge.vllm.kv_blocks import LAYOUTS, KVBlocks, ScoredQuery

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


def scored(blocks, kv, tables, *, row=0, dtype=torch.float32, seed=1):
    """Queries and log-sum-exps of sequences, given as (table, number of keys)."""
    generator = torch.Generator().manual_seed(seed)
    queries = [
        ScoredQuery(
            torch.randn((HEADS * GROUP, DIMS), generator=generator).to(dtype),
            np.array(table, np.int32),
            num_keys,
            np.full((HEADS * GROUP, MAX_BLOCKS), -np.inf, np.float32),
        )
        for table, num_keys in tables
    ]
    blocks.score(row, kv.tensor, queries, scale=0.3)
    return queries


def assert_scored(queries, kv, tolerance):
    """Against float64 attention: the masses of every block, all in order of the table."""
    for query, table, num_keys, log_sum_exps in queries:
        _, weights = attend(query, *kv.read(table.tolist(), num_keys), 0.3)
        total = np.logaddexp.reduce(log_sum_exps.astype(np.float64), axis=1)
        for place in range(MAX_BLOCKS):
            block = weights[:, place * B : (place + 1) * B].sum(-1)
            mass = np.exp(log_sum_exps[:, place] - total)
            np.testing.assert_allclose(mass, block, atol=tolerance)


@pytest.mark.parametrize("gap", [0, 64 * 4])
@pytest.mark.parametrize("num_keys", [1, B - 1, B, B + 1, 3 * B - 5])
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("vec", torch.float32), ("vec", torch.bfloat16), ("amx", torch.bfloat16)],
)
def test_UPL_5_the_blocks_of_several_tables_are_scored_where_they_lie(layout, dtype, num_keys, gap):
    """UPL-5: order of the tables, keys past the length never read, mass of every block."""
    kv = filled(layout, dtype, gap=gap)
    blocks = KVBlocks(layout=LAYOUTS[layout], num_layer_rows=2)
    tables = [([7, 2, 5][: -(-num_keys // B)], num_keys), ([0, 8], B + 7), ([4], 3)]
    queries = scored(blocks, kv, tables, row=1, dtype=dtype)
    assert_scored(queries, kv, 2e-5 if dtype == torch.float32 else 2e-2)


def test_each_layer_has_its_tensor_and_a_new_tensor_replaces_the_old():
    blocks = KVBlocks(layout=LAYOUTS["vec"], num_layer_rows=2)
    kvs = [filled("vec", torch.float32, seed=seed) for seed in range(3)]
    for row, kv in [(0, kvs[0]), (1, kvs[1]), (0, kvs[2]), (1, kvs[1])]:
        assert_scored(scored(blocks, kv, [([3, 1], B + 4)], row=row), kv, 2e-5)


def test_UPL_7_a_block_outside_the_tensor_is_refused_and_nothing_is_written():
    """UPL-7: of no sequence, and the fault is named though it is the second one's."""
    kv = filled("vec", torch.float32)
    blocks = KVBlocks(layout=LAYOUTS["vec"], num_layer_rows=1)
    queries = [
        ScoredQuery(
            torch.zeros((HEADS * GROUP, DIMS)),
            np.array(table, np.int32),
            B + 3,
            np.full((HEADS * GROUP, MAX_BLOCKS), 7.0, np.float32),
        )
        for table in ([0, 1], [5, 9])
    ]
    with pytest.raises(ValueError, match="= 9"):
        blocks.score(0, kv.tensor, queries, scale=1.0)
    assert all((query.log_sum_exps == 7.0).all() for query in queries)


def test_rows_with_gaps_inside_are_refused():
    kv = filled("vec", torch.float32)
    blocks = KVBlocks(layout=LAYOUTS["vec"], num_layer_rows=1)
    wide = torch.zeros((HEADS * GROUP, 2 * DIMS))
    scores = np.zeros((HEADS * GROUP, MAX_BLOCKS), np.float32)
    given = ScoredQuery(wide[:, ::2].contiguous(), np.array([1], np.int32), 3, scores)
    with pytest.raises(ValueError, match="`query` has strides"):
        blocks.score(0, kv.tensor, [given._replace(query=wide[:, ::2])], scale=1.0)
    with pytest.raises(ValueError, match="`kv_cache` has strides"):
        blocks.score(0, kv.tensor.transpose(1, 2), [given], scale=1.0)


def test_close_gives_the_tensors_back():
    kv = filled("vec", torch.float32, num_blocks=2)
    blocks = KVBlocks(layout=LAYOUTS["vec"], num_layer_rows=1)
    scored(blocks, kv, [([1], 3)])
    blocks.close()
    blocks.close()
    assert not blocks.close.alive
