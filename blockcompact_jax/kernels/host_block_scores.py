"""Scores and summaries of blocks of registered pools on the host: numpy in and out.

Arguments, results and refusals are those of `block_scores`; a refused call leaves zeros. The calls
release the GIL and share the work between threads: `num_threads` of a call, else `num_threads()`.
"""

from typing import Any

import numpy as np

from blockcompact_jax.kernels.attend_types import AttendSegment
from blockcompact_jax.kernels.block_scores import (
    PoolScoreResult,
    PoolSummaryResult,
    check_score,
    check_summary,
)
from blockcompact_jax.kernels.native import load_native
from blockcompact_jax.kernels.results import AnyArray
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
        _number(segment.layer),
        np.ascontiguousarray(np.asarray(segment.block_table)),
        _number(segment.num_keys),
        queries.view(_unsigned(queries.dtype)),
        scale,
        reduction,
        scores,
        num_threads,
    )
    return PoolScoreResult(scores, np.array(segment.ord), np.array(status, np.int32))


def host_pool_summarize_blocks(
    segment: AttendSegment, *, num_threads: int | None = None
) -> PoolSummaryResult:
    """`pool_summarize_blocks` on the host, `num_threads` as in `host_pool_score_blocks`."""
    shape, dtype = check_summary(segment)
    min_keys, max_keys = np.zeros(shape, dtype), np.zeros(shape, dtype)
    status = load_native().pool_summarize_blocks(
        segment.pool.pool_id,
        int(segment.ord[0]),
        _number(segment.layer),
        np.ascontiguousarray(np.asarray(segment.block_table)),
        _number(segment.num_keys),
        min_keys.view(_unsigned(dtype)),
        max_keys.view(_unsigned(dtype)),
        num_threads,
    )
    ord_now = np.array(segment.ord)
    return PoolSummaryResult(min_keys, max_keys, ord_now, np.array(status, np.int32))


def _number(value: int | AnyArray) -> int:
    return value if isinstance(value, int) else int(value[0])


def _unsigned(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"uint{8 * dtype.itemsize}")
