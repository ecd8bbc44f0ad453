"""What an attention call takes and returns."""

from typing import Any, NamedTuple

import numpy as np

from blockcompact_jax.kernels.pools import RegisteredPool
from blockcompact_jax.kernels.results import AnyArray


class AttendSegment(NamedTuple):
    """Keys and values of one layer of one pool: the first `num_keys` tokens that a table lists.

    Attributes:
        pool: Plain or packed; bfloat16 (2 bytes) or float32 elements, as the queries.
        ord: uint32 `[1]` of `pool`.
        layer: Place on the pool's layer axis, in [0, num_layers). An int, or int32 `[1]`.
        block_table: int32 `[num_entries]`, physical (or source) blocks in sequence order. Entries
            past the last key are not looked at.
        num_keys: Valid tokens, in [0, num_entries * block_tokens]; the last block may be partial.
            An int, or int32 `[1]`.
    """

    pool: RegisteredPool
    ord: AnyArray
    layer: int | AnyArray
    block_table: AnyArray
    num_keys: int | AnyArray


def operand_of(value: int | AnyArray) -> AnyArray:
    """An int as int32 `[1]`; what is one stays as it is."""
    return np.full(1, value, np.int32) if isinstance(value, int) else value


def number_of(value: int | AnyArray) -> int:
    """An int, or the value of an int32 `[1]`."""
    return value if isinstance(value, int) else int(value[0])


class RowsAt(NamedTuple):
    """Rows `[num_heads, num_queries, contiguous last axis]` somewhere in memory.

    Attributes:
        address: Of head 0, query 0.
        head_stride: Distance of two heads in elements.
        query_stride: Distance of two queries in elements.
    """

    address: int
    head_stride: int
    query_stride: int


class PoolAttendResult(NamedTuple):
    """Of `pool_attend`.

    Attributes:
        out: `[num_query_heads, num_queries, head_dim]` in the dtype of the queries.
        block_mass: float32 `[num_query_heads, num_queries, max_blocks]`: softmax mass of each used
            table entry, the second segment's after the first's; 0 beyond.
        log_sum_exp: float32 `[num_query_heads, num_queries]`: natural log of the softmax
            denominator of the scaled scores.
        ords: Each segment's `ord`, unchanged.
        status: int32 `[2]`.
    """

    out: AnyArray
    block_mass: AnyArray
    log_sum_exp: AnyArray
    ords: tuple[AnyArray, ...]
    status: AnyArray


class HostAttendOutputs(NamedTuple):
    """Arrays that `host_pool_attend` writes into; any strides, last axis contiguous.

    Attributes:
        out: `[num_query_heads, num_queries, head_dim]` in the dtype of the queries.
        block_mass: float32 `[num_query_heads, num_queries, max_blocks]`, or None.
        log_sum_exp: float32 `[num_query_heads, num_queries]`, dense, or None.
    """

    out: np.ndarray[Any, Any]
    block_mass: np.ndarray[Any, Any] | None = None
    log_sum_exp: np.ndarray[Any, Any] | None = None
