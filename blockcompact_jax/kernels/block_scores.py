"""Scores and summaries of blocks straight from their keys, as JAX functions.

`score_blocks` reads q·k from blocks where they lie, packed or plain, and reduces over the tokens of
each block; `blockcompact_jax.scores.reduce_heads` reduces over query heads and draft positions.
`summarize_blocks` gives the element-wise bounds of each block's keys, for
`blockcompact_jax.scores.page_bound_scores`. Both come for JAX arrays and, as `pool_...`, for
registered pools; elements of 2 bytes in a pool are bfloat16.

Every query meets every key: there is no causal mask, and no softmax. The bits of a score depend on
its query, the keys of its block and the implementation in use alone.
"""

from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from blockcompact_jax.kernels._checks import check_column, check_on_host, check_ord, describe
from blockcompact_jax.kernels.attend_types import AttendSegment, RowsAt, operand_of
from blockcompact_jax.kernels.layouts import Layout, check_layout
from blockcompact_jax.kernels.native import load_native
from blockcompact_jax.kernels.results import AnyArray
from blockcompact_jax.scores import BlockReduction
from blockcompact_jax.typed_jit import typed_jit

_ORD = jax.ShapeDtypeStruct((1,), np.uint32)
_STATUS = jax.ShapeDtypeStruct((2,), np.int32)
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_DTYPES = {2: _BFLOAT16, 4: np.dtype(np.float32)}
_REDUCTIONS = {
    None: 0,
    BlockReduction.MAX: 1,
    BlockReduction.MEAN: 2,
    BlockReduction.SUM: 3,
    BlockReduction.LOG_SUM_EXP: 4,
}  # the values are those of the native code


class ScoreResult(NamedTuple):
    """Of `score_blocks`: the scores (float32) and the status (int32 `[2]`)."""

    scores: AnyArray
    status: AnyArray


class PoolScoreResult(NamedTuple):
    """Of `pool_score_blocks`: the scores, the pool's `ord` (uint32 `[1]`), the status."""

    scores: AnyArray
    ord: AnyArray
    status: AnyArray


class ScoreSequence(NamedTuple):
    """One of several sequences that `host_pool_score_sequences_at` scores.

    Attributes:
        block_table: dense int32 numpy `[num_entries]`, physical or source blocks.
        num_keys: Valid tokens, in [0, num_entries * block_tokens].
        queries: `[num_query_heads, num_queries, head_dim]`.
        scores_address: Of float32 scores, whose first `num_entries` columns are written.
    """

    block_table: np.ndarray[Any, Any]
    num_keys: int
    queries: RowsAt
    scores_address: int


class SummaryResult(NamedTuple):
    """Of `summarize_blocks`: the bounds, each `[num_kv_heads, num_entries, head_dim]`; status."""

    min_keys: AnyArray
    max_keys: AnyArray
    status: AnyArray


class PoolSummaryResult(NamedTuple):
    """Of `pool_summarize_blocks`: the bounds, the pool's `ord` (uint32 `[1]`), the status."""

    min_keys: AnyArray
    max_keys: AnyArray
    ord: AnyArray
    status: AnyArray


def score_blocks(
    queries: AnyArray,
    blocks: AnyArray,
    block_table: AnyArray,
    num_keys: int | AnyArray,
    *,
    layout: Layout,
    block_reduction: BlockReduction | None,
    layer: int | AnyArray = 0,
    scale: float = 1.0,
) -> ScoreResult:
    """Scores the blocks that a table lists by q·k of their keys.

    Args:
        queries: `[num_query_heads, num_queries, head_dim]`, bfloat16 or float32; the queries of
            several draft positions count one by one. Query head h meets KV head
            h // (num_query_heads / num_kv_heads).
        blocks: Of one dtype with the queries: packed `[num_blocks, num_kv_heads, 2 * block_tokens,
            head_dim]` or plain `[num_blocks, 2, ...]`, or this with a leading layer axis.
        block_table: int32 `[num_entries]`, source or physical blocks. Entries past the last key are
            not looked at.
        num_keys: Valid tokens, in [0, num_entries * block_tokens]; the last block may be partial.
            An int, or int32 `[1]`.
        layout: Layout of `blocks`. Static.
        block_reduction: MAX, MEAN, SUM or LOG_SUM_EXP over the valid tokens of a block; None:
            every token's score. Static.
        layer: Place on the layer axis. An int, or int32 `[1]`.
        scale: Factor of every q·k. Static.

    Returns:
        float32 `[num_query_heads, num_queries, num_entries]`, with None `[..., num_entries *
        block_tokens]`; -inf where there is no key, zeros of a refused call. NaN among a block's
        scores makes its score NaN.

    Raises:
        ValueError: For shapes, dtypes, layouts and TOP_MEAN (reduce token scores with
            `block_scores_from_tokens` instead). Faults of values go into the status.
    """
    reduction = check_reduction(block_reduction)
    num_entries = check_column("block_table", block_table)
    heads, tokens, dim = _block_shape(blocks, layout)
    check_queries(queries, heads, dim, blocks.dtype.itemsize)
    load_native()
    columns = num_entries * (tokens if reduction == 0 else 1)
    return _score_blocks(
        queries,
        blocks,
        operand_of(layer),
        block_table,
        operand_of(num_keys),
        columns=columns,
        layout=int(layout),
        reduction=reduction,
        scale=float(scale),
    )


def pool_score_blocks(
    queries: AnyArray,
    segment: AttendSegment,
    *,
    block_reduction: BlockReduction | None,
    scale: float = 1.0,
) -> PoolScoreResult:
    """`score_blocks` of a registered pool.

    Args:
        queries: As `score_blocks`.
        segment: Pool, `ord`, layer, block table and number of keys.
        block_reduction: As `score_blocks`.
        scale: As `score_blocks`.

    Raises:
        ValueError: For shapes, dtypes and TOP_MEAN. Faults of values go into the status.
    """
    reduction, columns = check_score(queries, segment, block_reduction)
    if queries.dtype == np.uint16:
        raise ValueError("`queries` is uint16; view it as bfloat16")
    load_native()
    return _pool_score_blocks(
        queries,
        segment.ord,
        operand_of(segment.layer),
        segment.block_table,
        operand_of(segment.num_keys),
        columns=columns,
        pool=segment.pool.pool_id,
        block_tokens=segment.pool.shape.block_tokens,
        reduction=reduction,
        scale=float(scale),
    )


def summarize_blocks(
    blocks: AnyArray,
    block_table: AnyArray,
    num_keys: int | AnyArray,
    *,
    layout: Layout,
    layer: int | AnyArray = 0,
) -> SummaryResult:
    """Element-wise minimum and maximum of the keys of each block that a table lists.

    Args:
        blocks: As `score_blocks`.
        block_table: As `score_blocks`.
        num_keys: As `score_blocks`; only valid keys count.
        layout: As `score_blocks`.
        layer: As `score_blocks`.

    Returns:
        The bounds in the dtype of `blocks`. Both are NaN where a key is NaN; an entry without keys,
        and a refused call, gives zeros.

    Raises:
        ValueError: For shapes, dtypes and layouts. Faults of values go into the status.
    """
    num_entries = check_column("block_table", block_table)
    heads, _, dim = _block_shape(blocks, layout)
    load_native()
    return _summarize_blocks(
        blocks,
        operand_of(layer),
        block_table,
        operand_of(num_keys),
        shape=(heads, num_entries, dim),
        layout=int(layout),
    )


def pool_summarize_blocks(segment: AttendSegment) -> PoolSummaryResult:
    """`summarize_blocks` of a registered pool.

    Args:
        segment: Pool, `ord`, layer, block table and number of keys.

    Raises:
        ValueError: For shapes and dtypes. Faults of values go into the status.
    """
    shape, dtype = check_summary(segment)
    load_native()
    return _pool_summarize_blocks(
        segment.ord,
        operand_of(segment.layer),
        segment.block_table,
        operand_of(segment.num_keys),
        shape=shape,
        dtype=dtype,
        pool=segment.pool.pool_id,
    )


def check_reduction(block_reduction: BlockReduction | None) -> int:
    """The native code of a reduction."""
    if block_reduction not in _REDUCTIONS:
        raise ValueError(
            f"`block_reduction` is {block_reduction}; expected MAX, MEAN, SUM, LOG_SUM_EXP "
            "or None. For TOP_MEAN take the token scores (None) and `block_scores_from_tokens`"
        )
    return _REDUCTIONS[block_reduction]


def check_queries(queries: AnyArray, num_kv_heads: int, head_dim: int, element_bytes: int) -> None:
    """Checks queries against the blocks they meet."""
    if element_bytes not in _DTYPES:
        raise ValueError(
            f"the blocks have elements of {element_bytes} bytes; expected bfloat16 or float32"
        )
    is_typed = queries.dtype == _DTYPES[element_bytes] or (
        element_bytes == 2 and queries.dtype == np.uint16
    )
    if queries.ndim != 3 or not is_typed:
        raise ValueError(
            f"`queries` is {describe(queries)}; expected [num_query_heads, num_queries, head_dim] "
            f"of {_DTYPES[element_bytes]}, as the blocks have elements of {element_bytes} bytes"
        )
    heads, _, dim = queries.shape
    if dim != head_dim or heads % num_kv_heads != 0 or queries.size == 0:
        raise ValueError(
            f"`queries` is {describe(queries)}; expected head_dim = {head_dim}, a multiple of "
            f"{num_kv_heads} heads and at least one query, as the blocks have"
        )


def check_score(
    queries: AnyArray, segment: AttendSegment, block_reduction: BlockReduction | None
) -> tuple[int, int]:
    """Checks a score call; the native code of its reduction and the columns of its scores."""
    reduction = check_reduction(block_reduction)
    num_entries = check_column("segment.block_table", segment.block_table)
    check_ord("segment.ord", segment.ord)
    check_on_host("segment.pool", segment.pool)
    shape = segment.pool.shape
    check_queries(queries, shape.num_kv_heads, shape.head_dim, shape.element_bytes)
    return reduction, num_entries * (shape.block_tokens if reduction == 0 else 1)


def check_summary(segment: AttendSegment) -> tuple[tuple[int, int, int], np.dtype[Any]]:
    """Checks a summary call; shape and dtype of its bounds."""
    num_entries = check_column("segment.block_table", segment.block_table)
    check_ord("segment.ord", segment.ord)
    check_on_host("segment.pool", segment.pool)
    shape = segment.pool.shape
    if shape.element_bytes not in _DTYPES:
        raise ValueError(
            f"`segment.pool` has elements of {shape.element_bytes} bytes; expected 2 (bfloat16) or "
            "4 (float32)"
        )
    return (shape.num_kv_heads, num_entries, shape.head_dim), _DTYPES[shape.element_bytes]


def _block_shape(blocks: AnyArray, layout: Layout) -> tuple[int, int, int]:
    """(num_kv_heads, block_tokens, head_dim) of an array of blocks."""
    if blocks.dtype not in _DTYPES.values():
        raise ValueError(
            f"`blocks` is {describe(blocks)}; expected bfloat16 or float32 (view the bits as such)"
        )
    rank = 4 if layout.is_packed else 5
    has_shape = blocks.ndim in (rank, rank + 1)
    if not has_shape or (blocks.shape[-2] % 2 if layout.is_packed else blocks.shape[-4] != 2):
        expected = "[num_blocks, num_kv_heads, 2 * block_tokens, head_dim]"
        raise ValueError(
            f"`blocks` is {describe(blocks)}; expected {expected if layout.is_packed else ''}"
            f"{'' if layout.is_packed else '[num_blocks, 2, ...]'} of layout `{layout.label}`, or "
            "this with a leading layer axis"
        )
    heads, tokens, dim = blocks.shape[-3:]
    if layout.is_packed:
        tokens //= 2
    elif layout is Layout.PLAIN_NHD:
        heads, tokens = tokens, heads
    check_layout(layout, block_tokens=tokens, head_dim=dim, element_bytes=blocks.dtype.itemsize)
    return heads, tokens, dim


@typed_jit(static_argnames=("columns", "layout", "reduction", "scale"))
def _score_blocks(
    queries: Any, *operands: Any, columns: int, layout: int, reduction: int, scale: float
) -> ScoreResult:
    scores = jax.ShapeDtypeStruct((*queries.shape[:2], columns), np.float32)
    call = jax.ffi.ffi_call("blockcompact_score_blocks", (scores, _STATUS))
    attributes = {"layout": np.int64(layout), "reduction": np.int64(reduction)}
    return ScoreResult(*call(queries, *operands, scale=np.float32(scale), **attributes))


@typed_jit(static_argnames=("columns", "pool", "block_tokens", "reduction", "scale"))
def _pool_score_blocks(
    queries: Any,
    *operands: Any,
    columns: int,
    pool: int,
    block_tokens: int,
    reduction: int,
    scale: float,
) -> PoolScoreResult:
    scores = jax.ShapeDtypeStruct((*queries.shape[:2], columns), np.float32)
    call = jax.ffi.ffi_call("blockcompact_pool_score_blocks", (scores, _ORD, _STATUS))
    results = call(
        queries,
        *operands,
        pool=np.int64(pool),
        block_tokens=np.int64(block_tokens),
        reduction=np.int64(reduction),
        scale=np.float32(scale),
    )
    return PoolScoreResult(*results)


@typed_jit(static_argnames=("shape", "layout"))
def _summarize_blocks(
    blocks: Any, *operands: Any, shape: tuple[int, int, int], layout: int
) -> SummaryResult:
    bound = jax.ShapeDtypeStruct(shape, blocks.dtype)
    call = jax.ffi.ffi_call("blockcompact_summarize_blocks", (bound, bound, _STATUS))
    return SummaryResult(*call(blocks, *operands, layout=np.int64(layout)))


@typed_jit(static_argnames=("shape", "dtype", "pool"))
def _pool_summarize_blocks(
    *operands: Any, shape: tuple[int, int, int], dtype: Any, pool: int
) -> PoolSummaryResult:
    bound = jax.ShapeDtypeStruct(shape, dtype)
    call = jax.ffi.ffi_call("blockcompact_pool_summarize_blocks", (bound, bound, _ORD, _STATUS))
    return PoolSummaryResult(*call(*operands, pool=np.int64(pool)))
