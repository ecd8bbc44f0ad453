"""One layer's block tables in the forms that engines take: vLLM's and FlashInfer's.

Our own form is ragged: for each request the physical blocks its keys lie in, in attention order,
and how many keys that are. Every function checks whole inputs before it writes anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

PhysicalBlocks = Int32[np.ndarray, " entries"]


class VllmTables(NamedTuple):
    """What vLLM's attention kernels take.

    Attributes:
        block_table: int32 [batch, max_blocks], physical blocks; 0 past a request's keys.
        seq_lens: int32 [batch], keys attended to.
    """

    block_table: Int32[np.ndarray, "batch max_blocks"]
    seq_lens: Int32[np.ndarray, " batch"]


class FlashInferTables(NamedTuple):
    """What FlashInfer's paged wrappers plan with; a page is a block.

    Attributes:
        kv_indptr: int32 [batch + 1], where each request's pages begin in `kv_indices`.
        kv_indices: int32 [num_pages], physical blocks of all requests, one after the other.
        kv_last_page_len: int32 [batch], keys in each request's last page: 1 to `block_tokens`, 0
            for a request without keys.
    """

    kv_indptr: Int32[np.ndarray, " batch+1"]
    kv_indices: Int32[np.ndarray, " num_pages"]
    kv_last_page_len: Int32[np.ndarray, " batch"]


def to_vllm(
    physical_blocks: Sequence[PhysicalBlocks],
    num_keys: Sequence[int],
    *,
    block_tokens: int,
    out: VllmTables | None = None,
) -> VllmTables:
    """Pads ragged tables to a rectangle.

    Args:
        physical_blocks: each request's blocks in attention order; entries past its last key are
            left out.
        num_keys: each request's keys; the last block may be partial.
        block_tokens: tokens a block.
        out: persistent buffers, which a captured graph may read; at least as many rows as requests
            and as many columns as blocks. Rows and columns that no request uses become 0.

    Returns:
        `out`, or new arrays of exactly the size needed.

    Raises:
        ValueError: if a request has more keys than its blocks hold or a negative block, or `out` is
            too small.
    """
    used = _used(physical_blocks, num_keys, block_tokens)
    num_columns = max((blocks.size for blocks in used), default=0)
    if out is None:
        out = VllmTables(
            np.zeros((len(used), num_columns), np.int32), np.zeros(len(used), np.int32)
        )
    _check_out(out, len(used), num_columns)
    out.block_table[:] = 0
    out.seq_lens[:] = 0
    out.seq_lens[: len(used)] = num_keys
    for row, blocks in zip(out.block_table, used, strict=False):
        row[: blocks.size] = blocks
    return out


def from_vllm(tables: VllmTables, *, block_tokens: int) -> list[PhysicalBlocks]:
    """Cuts each request's blocks out of a rectangle; what lies past its keys is not looked at.

    Raises:
        ValueError: if a row has fewer entries than its keys need, or a negative block among them.
    """
    return _used(list(tables.block_table), tables.seq_lens.tolist(), block_tokens)


def to_flashinfer(
    physical_blocks: Sequence[PhysicalBlocks], num_keys: Sequence[int], *, block_tokens: int
) -> FlashInferTables:
    """Concatenates ragged tables.

    Args:
        physical_blocks: each request's blocks in attention order; entries past its last key are
            left out.
        num_keys: each request's keys; the last block may be partial.
        block_tokens: tokens a block.

    Raises:
        ValueError: if a request has more keys than its blocks hold or a negative block.
    """
    used = _used(physical_blocks, num_keys, block_tokens)
    num_pages = np.array([blocks.size for blocks in used], np.int32)
    keys = np.asarray(num_keys, np.int32)
    return FlashInferTables(
        kv_indptr=np.concatenate([[0], np.cumsum(num_pages)]).astype(np.int32),
        kv_indices=np.concatenate([np.empty(0, np.int32), *used]),
        kv_last_page_len=keys - np.maximum(num_pages - 1, 0) * np.int32(block_tokens),
    )


def from_flashinfer(
    tables: FlashInferTables, *, block_tokens: int
) -> tuple[list[PhysicalBlocks], list[int]]:
    """Splits concatenated tables.

    Returns:
        Each request's physical blocks, and its keys.

    Raises:
        ValueError: if the arrays contradict each other, or a negative block is among the pages.
    """
    indptr, indices, last = tables
    is_rising = (
        indptr.size == last.size + 1
        and indptr[0] == 0
        and indptr[-1] == indices.size
        and bool((np.diff(indptr) >= 0).all())
    )
    if not is_rising:
        raise ValueError(
            f"`kv_indptr` is {indptr.tolist()} for {last.size} requests and {indices.size} pages; "
            "expected it to rise from 0 to the number of pages, one entry more than requests"
        )
    num_pages = np.diff(indptr)
    is_last_fine = np.where(num_pages > 0, (last >= 1) & (last <= block_tokens), last == 0)
    if not is_last_fine.all():
        raise ValueError(
            f"`kv_last_page_len` is {last.tolist()}; expected 1 to {block_tokens}, and 0 only "
            "where a request has no page"
        )
    num_keys: list[int] = (np.maximum(num_pages - 1, 0) * block_tokens + last).tolist()
    blocks = [indices[first:end] for first, end in pairwise(indptr)]
    return _used(blocks, num_keys, block_tokens), num_keys


def _used(
    physical_blocks: Sequence[PhysicalBlocks], num_keys: Sequence[int], block_tokens: int
) -> list[PhysicalBlocks]:
    """Each request's blocks up to its last key, checked."""
    if block_tokens < 1:
        raise ValueError(f"`block_tokens` is {block_tokens}; expected 1 or more")
    if len(physical_blocks) != len(num_keys):
        raise ValueError(
            f"`physical_blocks` has {len(physical_blocks)} requests and `num_keys` {len(num_keys)};"
            " expected as many"
        )
    used: list[PhysicalBlocks] = []
    for request, (blocks, keys) in enumerate(zip(physical_blocks, num_keys, strict=True)):
        num_blocks = -(-keys // block_tokens)
        if blocks.dtype != np.int32 or blocks.ndim != 1:
            raise ValueError(
                f"`physical_blocks[{request}]` is {blocks.dtype} with {blocks.ndim} axes; expected "
                "int32 with one"
            )
        if keys < 0 or num_blocks > blocks.size:
            raise ValueError(
                f"`num_keys[{request}]` is {keys}; expected 0 to {blocks.size * block_tokens}, "
                f"what the request's {blocks.size} blocks hold"
            )
        if (blocks[:num_blocks] < 0).any():
            raise ValueError(
                f"`physical_blocks[{request}]` is {blocks[:num_blocks].tolist()}; expected no "
                "HOLE before the last key. Compact the table first."
            )
        used.append(blocks[:num_blocks])
    return used


def _check_out(out: VllmTables, num_requests: int, num_columns: int) -> None:
    rows, columns = out.block_table.shape
    if rows < num_requests or columns < num_columns or out.seq_lens.size != rows:
        raise ValueError(
            f"`out` has a table of {rows} x {columns} and {out.seq_lens.size} lengths; expected at "
            f"least {num_requests} x {num_columns} and as many lengths as rows"
        )
    if out.block_table.dtype != np.int32 or out.seq_lens.dtype != np.int32:
        raise ValueError(
            f"`out` has {out.block_table.dtype} blocks and {out.seq_lens.dtype} lengths; expected "
            "int32 for both, as engines read them"
        )
