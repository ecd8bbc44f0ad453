"""Block tables of engines, against loops that place every key by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_bridge.engine_tables import (
    FlashInferTables,
    VllmTables,
    from_flashinfer,
    from_vllm,
    to_flashinfer,
    to_vllm,
)


@st.composite
def requests(draw):
    """(block_tokens, ragged tables, keys); tables may hold entries past the last key, HOLEs too."""
    block_tokens = draw(st.sampled_from([1, 2, 7, 32]))
    tables, num_keys = [], []
    for _ in range(draw(st.integers(0, 5))):
        keys = draw(st.integers(0, 4 * block_tokens))
        needed = -(-keys // block_tokens)
        blocks = draw(st.lists(st.integers(0, 99), min_size=needed, max_size=needed))
        spare = draw(st.lists(st.sampled_from([-1, 5]), max_size=2))
        tables.append(np.array(blocks + spare, np.int32))
        num_keys.append(keys)
    return block_tokens, tables, num_keys


def places(tables, num_keys, block_tokens):
    """Every key's (physical block, offset), key by key."""
    return [
        [(int(table[key // block_tokens]), key % block_tokens) for key in range(keys)]
        for table, keys in zip(tables, num_keys, strict=True)
    ]


@given(requests())
def test_flashinfer_pages_place_every_key_where_the_tables_do(case):
    block_tokens, tables, num_keys = case
    indptr, indices, last = to_flashinfer(tables, num_keys, block_tokens=block_tokens)
    assert {indptr.dtype, indices.dtype, last.dtype} == {np.dtype(np.int32)}
    found = []
    for request in range(len(tables)):
        pages = indices[indptr[request] : indptr[request + 1]]
        tokens = [(int(page), offset) for page in pages for offset in range(block_tokens)]
        num_unused = block_tokens - int(last[request]) if len(pages) else 0
        found.append(tokens[: len(tokens) - num_unused])
    assert found == places(tables, num_keys, block_tokens)
    blocks, keys = from_flashinfer(
        FlashInferTables(indptr, indices, last), block_tokens=block_tokens
    )
    assert keys == num_keys
    assert places(blocks, keys, block_tokens) == found


@given(requests(), st.integers(0, 2), st.integers(0, 3))
def test_vllm_tables_place_every_key_where_the_tables_do(case, num_spare_rows, num_spare_columns):
    block_tokens, tables, num_keys = case
    exact = to_vllm(tables, num_keys, block_tokens=block_tokens)
    assert places(exact.block_table, exact.seq_lens.tolist(), block_tokens) == places(
        tables, num_keys, block_tokens
    )
    rows, columns = exact.block_table.shape
    persistent = VllmTables(
        np.full((rows + num_spare_rows, columns + num_spare_columns), 77, np.int32),
        np.full(rows + num_spare_rows, 77, np.int32),
    )
    addresses = [array.ctypes.data for array in persistent]
    found = to_vllm(tables, num_keys, block_tokens=block_tokens, out=persistent)
    assert [array.ctypes.data for array in found] == addresses
    assert np.array_equal(found.block_table[:rows, :columns], exact.block_table)
    assert not found.block_table[rows:].any()
    assert not found.block_table[:, columns:].any()
    assert found.seq_lens.tolist() == num_keys + [0] * num_spare_rows
    ragged = from_vllm(exact, block_tokens=block_tokens)
    assert places(ragged, num_keys, block_tokens) == places(tables, num_keys, block_tokens)


@pytest.mark.parametrize("convert", [to_vllm, to_flashinfer])
@pytest.mark.parametrize(
    ("table", "keys", "message"),
    [
        ([3, 4], 17, r"`num_keys\[0\]` is 17; expected 0 to 16"),
        ([3, 4], -1, r"`num_keys\[0\]` is -1"),
        ([3, -1], 9, "HOLE before the last key"),
    ],
)
def test_tables_that_do_not_hold_their_keys_are_refused(convert, table, keys, message):
    with pytest.raises(ValueError, match=message):
        convert([np.array(table, np.int32)], [keys], block_tokens=8)


def test_other_dtypes_counts_and_sizes_are_refused():
    table = np.zeros(2, np.int32)
    with pytest.raises(ValueError, match="expected int32"):
        to_vllm([table.astype(np.int64)], [3], block_tokens=8)
    with pytest.raises(ValueError, match="expected as many"):
        to_vllm([table], [3, 4], block_tokens=8)
    with pytest.raises(ValueError, match="`block_tokens` is 0"):
        to_vllm([table], [3], block_tokens=0)
    small = VllmTables(np.full((1, 1), 7, np.int32), np.full(1, 7, np.int32))
    with pytest.raises(ValueError, match="at least 1 x 2"):
        to_vllm([table], [9], block_tokens=8, out=small)
    assert small.block_table.tolist() == [[7]]  # refused before anything is written


@pytest.mark.parametrize(
    ("indptr", "last", "message"),
    [
        ([0, 2], [9], "expected 1 to 8"),
        ([0, 2], [0], "expected 1 to 8"),
        ([0, 3], [8], "rise from 0"),
        ([0, 2, 1], [8, 1], "rise from 0"),
        ([1, 2], [8], "rise from 0"),
        ([0, 2], [8, 8], "one entry more"),
        ([0, 1, 2], [8, 8, 8], "one entry more"),
        ([], [], "one entry more"),
    ],
)
def test_flashinfer_arrays_that_contradict_each_other_are_refused(indptr, last, message):
    tables = FlashInferTables(
        np.array(indptr, np.int32), np.zeros(2, np.int32), np.array(last, np.int32)
    )
    with pytest.raises(ValueError, match=message):
        from_flashinfer(tables, block_tokens=8)


def test_a_hole_among_the_pages_of_flashinfer_is_refused():
    pages = FlashInferTables(
        *(np.array(each, np.int32) for each in ([0, 1, 3], [4, -1, 3], [8, 4]))
    )
    with pytest.raises(ValueError, match=r"`physical_blocks\[1\]` is \[-1, 3\].*HOLE"):
        from_flashinfer(pages, block_tokens=8)
