"""Attention over blocks of registered pools, as a JAX function."""

from collections.abc import Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from blockcompact_jax.kernels._checks import check_column, check_on_host, check_ord, describe
from blockcompact_jax.kernels.attend_types import AttendSegment, PoolAttendResult, operand_of
from blockcompact_jax.kernels.native import load_native
from blockcompact_jax.kernels.results import AnyArray
from blockcompact_jax.typed_jit import typed_jit

_ORD = jax.ShapeDtypeStruct((1,), np.uint32)
_STATUS = jax.ShapeDtypeStruct((2,), np.int32)
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_ELEMENT_BYTES = {_BFLOAT16: 2, np.dtype(np.uint16): 2, np.dtype(np.float32): 4}


def pool_attend(
    queries: AnyArray,
    segments: Sequence[AttendSegment],
    *,
    scale: float,
    window_tokens: int = 0,
    max_blocks: int = 0,
) -> PoolAttendResult:
    """Causal attention of the newest queries over the keys that block tables list.

    The keys of the segments, one after the other, are the sequence, and its last `num_queries` keys
    are the queries' own: query i sees the keys up to its own. Query head h uses KV head
    h // (num_query_heads / num_kv_heads). Sums are float32. The bits of a result row depend on its
    query and on the keys and values it sees alone: not on the other queries, the threads, the
    layout, or how the keys are cut into blocks and segments. Places of a block past the last key
    may hold anything.

    Args:
        queries: `[num_query_heads, num_queries, head_dim]`, bfloat16 or float32, rotated already.
        segments: 1 or 2, of one block shape; all are checked before anything is computed.
        scale: Softmax scale, static.
        window_tokens: Newest keys a query sees, its own included; 0: all. Static.
        max_blocks: Columns of `block_mass`; entries past them are left out of it. Static.

    Returns:
        The results; those of a refused call are zero. Use the status, and give `ords` to a later
        writer of the pools, so that XLA keeps it after this read.

    Raises:
        ValueError: For shapes, dtypes and pool kinds. Faults of values go into the status, whose
            row counts table entries over all segments.
    """
    check_attend(queries, segments, window_tokens=window_tokens, max_blocks=max_blocks)
    if queries.dtype == np.uint16:
        raise ValueError("`queries` is uint16; view it as bfloat16")
    load_native()
    operands: list[Any] = []
    for segment in segments:
        operands += [
            segment.ord,
            operand_of(segment.layer),
            segment.block_table,
            operand_of(segment.num_keys),
        ]
    if len(segments) == 1:
        zero = np.zeros(1, np.int32)
        operands += [np.zeros(1, np.uint32), zero, np.zeros(0, np.int32), zero]
    out, block_mass, log_sum_exp, ord_0, ord_1, status = _pool_attend(
        queries,
        *operands,
        pools=tuple(segment.pool.pool_id for segment in segments),
        scale=float(scale),
        window_tokens=window_tokens,
        max_blocks=max_blocks,
    )
    ords = (ord_0, ord_1)[: len(segments)]
    return PoolAttendResult(out, block_mass, log_sum_exp, ords, status)


def check_attend(
    queries: AnyArray, segments: Sequence[AttendSegment], *, window_tokens: int, max_blocks: int
) -> None:
    """Checks shapes, dtypes and pool kinds of an attention call."""
    if not 1 <= len(segments) <= 2:
        raise ValueError(f"`segments` has {len(segments)} entries; expected 1 or 2")
    shape = segments[0].pool.shape
    if queries.ndim != 3 or _ELEMENT_BYTES.get(queries.dtype) != shape.element_bytes:
        raise ValueError(
            f"`queries` is {describe(queries)}; expected [num_query_heads, num_queries, head_dim] "
            f"of {'bfloat16' if shape.element_bytes == 2 else 'float32'}, as the pool has "
            f"elements of {shape.element_bytes} bytes"
        )
    heads, _, head_dim = queries.shape
    if head_dim != shape.head_dim or heads % shape.num_kv_heads != 0 or queries.size == 0:
        raise ValueError(
            f"`queries` is {describe(queries)}; expected head_dim = {shape.head_dim}, a multiple "
            f"of {shape.num_kv_heads} heads and at least one query, as the pool has"
        )
    for place, segment in enumerate(segments):
        check_column(f"segments[{place}].block_table", segment.block_table)
        check_ord(f"segments[{place}].ord", segment.ord)
        check_on_host(f"segments[{place}].pool", segment.pool)
        if place == 0:
            continue
        for name in ("num_kv_heads", "block_tokens", "head_dim", "element_bytes"):
            ours, first = getattr(segment.pool.shape, name), getattr(shape, name)
            if ours != first:
                raise ValueError(
                    f"`segments[{place}].pool` has {name} = {ours} and `segments[0].pool` {first}; "
                    "register both with one block shape"
                )
    if window_tokens < 0 or max_blocks < 0:
        raise ValueError(
            f"`window_tokens` is {window_tokens} and `max_blocks` {max_blocks}; neither may be "
            "negative"
        )


@typed_jit(static_argnames=("pools", "scale", "window_tokens", "max_blocks"))
def _pool_attend(
    queries: Any,
    *operands: Any,
    pools: tuple[int, ...],
    scale: float,
    window_tokens: int,
    max_blocks: int,
) -> Any:
    heads, num_queries, _ = queries.shape
    results = (
        jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        jax.ShapeDtypeStruct((heads, num_queries, max_blocks), np.float32),
        jax.ShapeDtypeStruct((heads, num_queries), np.float32),
        _ORD,
        _ORD,
        _STATUS,
    )
    call = jax.ffi.ffi_call("blockcompact_pool_attend", results)
    return call(
        queries,
        *operands,
        pool_0=np.int64(pools[0]),
        pool_1=np.int64(pools[1] if len(pools) > 1 else 0),
        scale=np.float32(scale),
        window_tokens=np.int64(window_tokens),
    )
