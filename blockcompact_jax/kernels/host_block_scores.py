"""Scores and summaries of blocks of registered pools on the host: numpy in and out.

Arguments, results and refusals are those of `block_scores`; a refused call leaves zeros. The calls
release the GIL and share the work between threads: `num_threads` of a call, else `num_threads()`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from blockcompact_jax.kernels._checks import check_device_call
from blockcompact_jax.kernels.attend_types import AttendSegment, number_of
from blockcompact_jax.kernels.block_scores import (
    PoolScoreResult,
    PoolSummaryResult,
    ScoreSequence,
    check_reduction,
    check_score,
    check_summary,
)
from blockcompact_jax.kernels.native import load_native
from blockcompact_jax.kernels.pools import RegisteredPool
from blockcompact_jax.scores import BlockReduction


def host_pool_score_blocks(
    queries: np.ndarray[Any, Any],
    segment: AttendSegment,
    *,
    block_reduction: BlockReduction | None,
    scale: float = 1.0,
    num_threads: int | None = None,
) -> PoolScoreResult:
    """`pool_score_blocks` on the host; uint16 queries are taken as the bits of bfloat16.

    Args:
        queries: As `pool_score_blocks`; dense numpy.
        segment: As `pool_score_blocks`.
        block_reduction: As `pool_score_blocks`.
        scale: As `pool_score_blocks`.
        num_threads: Threads that share the call, the caller included, in [1, 1024]; None: as many
            as `num_threads()` says.

    Raises:
        ValueError: As `pool_score_blocks`, for queries that are not dense, and for a number of
            threads outside.
    """
    reduction, columns = check_score(queries, segment, block_reduction)
    if not queries.flags.c_contiguous:
        raise ValueError("`queries` is not dense; give a C-contiguous array")
    scores = np.zeros((*queries.shape[:2], columns), np.float32)
    status = load_native().pool_score_blocks(
        segment.pool.pool_id,
        int(segment.ord[0]),
        number_of(segment.layer),
        np.ascontiguousarray(np.asarray(segment.block_table)),
        number_of(segment.num_keys),
        queries.view(_unsigned(queries.dtype)),
        scale,
        reduction,
        scores,
        num_threads,
    )
    return PoolScoreResult(scores, np.array(segment.ord), np.array(status, np.int32))


def host_pool_score_sequences_at(
    pool: RegisteredPool,
    sequences: Sequence[ScoreSequence],
    *,
    num_query_heads: int,
    num_queries: int,
    block_reduction: BlockReduction,
    row_stride: int,
    layer: int = 0,
    scale: float = 1.0,
    is_on_open_mp: bool = False,
) -> tuple[int, int]:
    """`pool_score_blocks` of several sequences in one call, on addresses.

    Nothing can be checked about the memory: the caller answers for addresses, strides and lifetime.
    A pool on a CUDA device is served as by `host_pool_attend_at`: in the stream of its owner.

    Args:
        pool: As it is now; elements of 2 bytes are bfloat16.
        sequences: Their tables, queries and scores.
        num_query_heads: A multiple of the pool's `num_kv_heads`.
        num_queries: Queries of each sequence.
        block_reduction: As `pool_score_blocks`.
        row_stride: Distance of two rows (head, query) of every sequence's scores, in elements; at
            least as many as the entries of any of the tables.
        layer: Place on the pool's layer axis.
        scale: As `pool_score_blocks`.
        is_on_open_mp: As `host_pool_attend`.

    Returns:
        Code and faulty entry, counted over all tables, as in a status; a refused call has written
        nothing.

    Raises:
        ValueError: For rows that would overlap and for tables that are not dense int32 numpy;
            for OpenMP threads where `has_open_mp_threads()` is False.
    """
    if pool.device is not None:
        check_device_call(None, is_on_open_mp=is_on_open_mp)
    most = max((sequence.block_table.size for sequence in sequences), default=0)
    if row_stride < most:
        raise ValueError(f"`row_stride` is {row_stride}; expected {most} or more, as tables have")
    return load_native().pool_score_sequences(
        pool.pool_id,
        int(pool.current_ord()[0]),
        layer,
        sequences,
        (num_query_heads, num_queries, pool.shape.head_dim, pool.shape.element_bytes),
        scale,
        check_reduction(block_reduction),
        row_stride,
        is_on_open_mp,
        pool.device is not None,
    )


def host_pool_summarize_blocks(
    segment: AttendSegment, *, num_threads: int | None = None
) -> PoolSummaryResult:
    """`pool_summarize_blocks` on the host, `num_threads` as in `host_pool_score_blocks`."""
    shape, dtype = check_summary(segment)
    min_keys, max_keys = np.zeros(shape, dtype), np.zeros(shape, dtype)
    status = load_native().pool_summarize_blocks(
        segment.pool.pool_id,
        int(segment.ord[0]),
        number_of(segment.layer),
        np.ascontiguousarray(np.asarray(segment.block_table)),
        number_of(segment.num_keys),
        min_keys.view(_unsigned(dtype)),
        max_keys.view(_unsigned(dtype)),
        num_threads,
    )
    ord_now = np.array(segment.ord)
    return PoolSummaryResult(min_keys, max_keys, ord_now, np.array(status, np.int32))


def _unsigned(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"uint{8 * dtype.itemsize}")
