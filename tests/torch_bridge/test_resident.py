"""The resident pool against a plain list of tokens per row."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_bridge.pools import KVShape
from torch_bridge.resident import ResidentKV

SHAPE = KVShape(num_rows=2, num_kv_heads=2, block_tokens=4, head_dim=8, dtype=torch.bfloat16)


def _random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.fixture
def resident():
    kv = ResidentKV(SHAPE, num_physical_blocks=9)
    kv.tensor.copy_(_random(*kv.tensor.shape, seed=0))
    yield kv
    kv.pool.close()


def _tables(selected, tail):
    return [np.array(row, np.int32) for row in selected], np.array(tail, np.int32)


def test_rows_read_their_own_blocks_in_table_order(resident):
    before = resident.tensor.clone()
    resident.set_tables(*_tables([[5, 0], [7]], [[3, 1], [2, 8]]), tail_start_token_position=12)
    for row, blocks in enumerate([[5, 0, 3, 1], [7, 2, 8]]):
        key, value = resident.read(row, 12 + 6)
        tokens = [4 * block + offset for block in blocks for offset in range(4)][:-2]
        assert torch.equal(key, before[row, 0][:, tokens])
        assert torch.equal(value, before[row, 1][:, tokens])


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 3))
def test_written_tokens_are_read_back_behind_the_selected_ones(lengths, num_selected):
    """RET-8: tail tokens are never part of the selected blocks, and no write touches those."""
    kv = ResidentKV(SHAPE, num_physical_blocks=9)
    try:
        kv.tensor.copy_(_random(*kv.tensor.shape, seed=1))
        before = kv.tensor.clone()
        selected, tail = list(range(num_selected)), [8, 3, 6, 4, 5, 7]
        kv.set_tables(*_tables([selected] * 2, [tail] * 2), tail_start_token_position=8)
        expected = [before[0, :, :, : 4 * num_selected]]
        position = 8
        for number, length in enumerate(lengths):
            new = _random(2, 2, length, 8, seed=number + 2)
            kv.write(0, position, new[0], new[1])
            expected.append(new)
            position += length
            key, value = kv.read(0, position)
            assert torch.equal(torch.stack([key, value]), torch.cat(expected, dim=2))
        assert torch.equal(kv.tensor[1], before[1])
        assert torch.equal(kv.tensor[0, :, :, :12], before[0, :, :, :12])
    finally:
        kv.pool.close()


def test_confirmed_tokens_reach_every_row(resident):
    resident.set_tables(*_tables([[], [7]], [[3, 1], [2, 8]]), tail_start_token_position=0)
    new = _random(2, 2, 2, 5, 8, seed=4)
    resident.write_confirmed(1, new)
    for row in range(2):
        num_selected = 4 * row
        key, value = resident.read(row, 6)
        assert torch.equal(torch.stack([key, value])[:, :, num_selected + 1 :], new[row])


def test_writes_outside_of_the_tail_are_refused(resident):
    resident.set_tables(*_tables([[], []], [[3], [2]]), tail_start_token_position=8)
    before = resident.tensor.clone()
    new = torch.zeros(2, 5, 8, dtype=torch.bfloat16)
    for position in (7, 8):
        with pytest.raises(ValueError, match="outside of the resident tail"):
            resident.write(0, position, new, new)
    assert torch.equal(resident.tensor, before)


def test_bad_tables_are_refused(resident):
    with pytest.raises(ValueError, match="multiple of the block size"):
        resident.set_tables(*_tables([[], []], [[3], [2]]), tail_start_token_position=6)
    with pytest.raises(ValueError, match="expected 2 of each"):
        resident.set_tables(*_tables([[]], [[3]]), tail_start_token_position=8)


def test_keys_of_another_dtype_are_refused_and_nothing_is_written(resident):
    resident.set_tables(*_tables([[0], [1]], [[8, 3], [2, 4]]), tail_start_token_position=4)
    before = resident.tensor.clone()
    key = torch.ones(2, 3, 8)
    with pytest.raises(ValueError, match=r"`key` is torch\.float32"):
        resident.write(0, 4, key, key.bfloat16())
    assert torch.equal(resident.tensor, before)
