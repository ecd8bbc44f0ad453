"""vLLM's own KV tensors, read in place to score their blocks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, Int32

from blockcompact_jax.kernels import (
    Layout,
    PackedStrides,
    RegisteredPool,
    RowsAt,
    ScoreSequence,
    has_open_mp_threads,
    host_pool_score_sequences_at,
    packed_k_offsets,
    raise_for_status,
)
from blockcompact_jax.scores import BlockReduction

LAYOUTS = {"amx": Layout.AMX, "vec": Layout.VEC}
"""Our names of the layouts that vLLM's CPU attention packs."""

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
"""Of the elements that it packs, by the geometry's names."""


class ScoredQuery(NamedTuple):
    """A query that meets all keys of its sequence.

    Attributes:
        query: [num_query_heads, head_dim].
        block_table: physical blocks in sequence order.
        num_keys: tokens in them.
        log_sum_exps: float32 [num_query_heads, columns], written: of the scaled scores of each
            block of the table; the columns after it are left alone.
    """

    query: torch.Tensor
    block_table: Int32[np.ndarray, " blocks"]
    num_keys: int
    log_sum_exps: Float32[np.ndarray, "query_head columns"]


def read_keys(kv_cache: torch.Tensor, blocks: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Unpacks the keys of blocks.

    Args:
        kv_cache: a layer's KV, [num_blocks, num_kv_heads, block_tokens, 2 * head_dim].
        blocks: int64 [block], physical blocks.
        layout: how they are packed.

    Returns:
        [block, num_kv_heads, block_tokens, head_dim], a copy.
    """
    num_blocks, num_kv_heads, block_tokens, both = kv_cache.shape
    offsets = packed_k_offsets(
        layout,
        block_tokens=block_tokens,
        head_dim=both // 2,
        element_bytes=kv_cache.element_size(),
    )
    halves = kv_cache.view(num_blocks, num_kv_heads, 2, offsets.size)
    packed = halves[:, :, 0].index_select(0, blocks)
    return packed[..., torch.from_numpy(offsets)]


class KVBlocks:
    """The KV-cache tensors of a group's layers, registered as they are seen.

    Attributes:
        close: call it to unregister the tensors; the end of the object or of the process does too.
    """

    def __init__(self, *, layout: Layout, num_layer_rows: int) -> None:
        self._layout = layout
        self._pools: list[RegisteredPool | None] = [None] * num_layer_rows
        self._addresses = [0] * num_layer_rows
        # Engines drop their attention objects without a word.
        self.close = weakref.finalize(self, _close, self._pools)

    def score(
        self, row: int, kv_cache: torch.Tensor, queries: Sequence[ScoredQuery], *, scale: float
    ) -> None:
        """Scores the blocks of several sequences in one call, in place.

        Args:
            row: layer row.
            kv_cache: the layer's KV, [num_blocks, num_kv_heads, block_tokens, 2 * head_dim].
            queries: one of each sequence; their `log_sum_exps` have one shape.
            scale: softmax scale.

        Raises:
            ValueError: for arrays whose last axis is not contiguous.
            KernelStatusError: for a table or a length that does not fit; nothing is written then.
        """
        pool = self.pool(row, kv_cache)
        num_query_heads, row_stride = queries[0].log_sum_exps.shape
        sequences = [_sequence(query) for query in queries]
        status = host_pool_score_sequences_at(
            pool,
            sequences,
            num_query_heads=num_query_heads,
            num_queries=1,
            block_reduction=BlockReduction.LOG_SUM_EXP,
            row_stride=row_stride,
            scale=scale,
            is_on_open_mp=has_open_mp_threads(),  # vLLM's kernels run on them
        )
        if status[0]:
            tables = np.concatenate([query.block_table for query in queries])
            raise_for_status(np.array(status, np.int32), call="score_blocks", block_table=tables)

    def pool(self, row: int, kv_cache: torch.Tensor) -> RegisteredPool:
        """A layer's KV, registered; arguments as `score`.

        Raises:
            ValueError: for blocks that are not contiguous.
        """
        if not kv_cache[0].is_contiguous():
            raise ValueError(
                f"`kv_cache` has strides {kv_cache.stride()}; expected blocks that are contiguous "
                "[num_kv_heads, block_tokens, 2 * head_dim]"
            )
        pool = self._pools[row]
        if pool is not None and self._addresses[row] == kv_cache.data_ptr():
            return pool
        if pool is not None:
            pool.close()
            self._pools[row] = None
        num_blocks, num_kv_heads, block_tokens, both = kv_cache.shape
        block = kv_cache.stride(0)
        pool = RegisteredPool.register_packed(
            kv_cache.data_ptr(),
            layout=self._layout,
            num_layers=1,
            num_blocks=num_blocks,
            num_kv_heads=num_kv_heads,
            block_tokens=block_tokens,
            head_dim=both // 2,
            element_bytes=kv_cache.element_size(),
            size_bytes=((num_blocks - 1) * block + num_kv_heads * block_tokens * both)
            * kv_cache.element_size(),
            keepalive=kv_cache,
            strides=PackedStrides(layer=num_blocks * block, block=block),
        )
        self._pools[row], self._addresses[row] = pool, kv_cache.data_ptr()
        return pool


def _sequence(given: ScoredQuery) -> ScoreSequence:
    query, _, _, log_sum_exps = given
    if query.stride(1) != 1 or not log_sum_exps.flags.c_contiguous:
        raise ValueError(
            f"`query` has strides {query.stride()} and `log_sum_exps` {log_sum_exps.strides} "
            "bytes; expected a contiguous last axis and a dense array"
        )
    return ScoreSequence(
        given.block_table,
        given.num_keys,
        RowsAt(query.data_ptr(), query.stride(0), 0),
        log_sum_exps.ctypes.data,
    )


def _close(pools: list[RegisteredPool | None]) -> None:
    for pool in pools:
        if pool is not None:
            pool.close()
    pools[:] = [None] * len(pools)
