"""Attention over registered pools on the host: numpy arrays or addresses, done on return.

The calls release the GIL and share the work between threads, `num_threads()` unless they say
otherwise; results do not depend on the number.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from blockcompact_jax.kernels._checks import check_device_call, check_on_host, describe
from blockcompact_jax.kernels.attend_types import (
    AttendSegment,
    HostAttendOutputs,
    PoolAttendResult,
    RowsAt,
    number_of,
)
from blockcompact_jax.kernels.native import load_native
from blockcompact_jax.kernels.pool_attend import check_attend


def host_pool_attend(
    queries: np.ndarray[Any, Any],
    segments: Sequence[AttendSegment],
    *,
    scale: float,
    window_tokens: int = 0,
    max_blocks: int = 0,
    outputs: HostAttendOutputs | None = None,
    num_threads: int | None = None,
    is_on_open_mp: bool = False,
) -> PoolAttendResult:
    """`pool_attend` on the host.

    Args:
        queries: As `pool_attend`; numpy, any strides with a contiguous last axis. uint16 is taken
            as the bits of bfloat16.
        segments: As `pool_attend`.
        scale: As `pool_attend`.
        window_tokens: As `pool_attend`.
        max_blocks: Columns of `block_mass`; where `outputs` has a `block_mass`, those of it.
        outputs: Arrays to write into; None: new ones. A refused call leaves them as they are. What
            is None in them is not computed, and empty in the result.
        num_threads: Threads that share the call, the caller included, in [1, 1024]; None: as many
            as `num_threads()` says.
        is_on_open_mp: Whether the work is spread over the OpenMP threads of the process instead, as
            many as OpenMP is set to; `num_threads` is None then. Beside an engine whose own kernels
            run on them (torch on CPUs), threads of ours would share the processors with their
            workers, which spin for a while after each kernel. Results do not depend on it.

    Raises:
        ValueError: As `pool_attend`, for arrays that cannot be written in place, for a number of
            threads outside, and for OpenMP threads where `has_open_mp_threads()` is False.
    """
    check_attend(queries, segments, window_tokens=window_tokens, max_blocks=max_blocks)
    heads, num_queries, _ = queries.shape
    if outputs is None:
        outputs = HostAttendOutputs(
            out=np.zeros(queries.shape, queries.dtype),
            block_mass=np.zeros((heads, num_queries, max_blocks), np.float32),
            log_sum_exp=np.zeros((heads, num_queries), np.float32),
        )
    else:
        _check_outputs(queries, outputs)
    mass, log_sum_exp = outputs.block_mass, outputs.log_sum_exp
    if mass is not None and mass.shape[2] > 0:
        mass_at, num_columns = _rows_at("outputs.block_mass", mass), mass.shape[2]
    else:
        mass_at, num_columns = None, 0
    status = host_pool_attend_at(
        _rows_at("queries", queries),
        segments,
        out=_rows_at("outputs.out", outputs.out),
        num_query_heads=heads,
        num_queries=num_queries,
        scale=scale,
        window_tokens=window_tokens,
        block_mass=mass_at,
        max_blocks=num_columns,
        log_sum_exp=0 if log_sum_exp is None else load_native().address_of(log_sum_exp),
        num_threads=num_threads,
        is_on_open_mp=is_on_open_mp,
    )
    return PoolAttendResult(
        out=outputs.out,
        block_mass=np.zeros((heads, num_queries, 0), np.float32) if mass is None else mass,
        log_sum_exp=np.zeros((0, 0), np.float32) if log_sum_exp is None else log_sum_exp,
        ords=tuple(segment.ord for segment in segments),
        status=np.array(status, np.int32),
    )


def host_pool_attend_at(
    queries: RowsAt,
    segments: Sequence[AttendSegment],
    *,
    out: RowsAt,
    num_query_heads: int,
    num_queries: int,
    scale: float,
    window_tokens: int = 0,
    block_mass: RowsAt | None = None,
    max_blocks: int = 0,
    log_sum_exp: int = 0,
    num_threads: int | None = None,
    is_on_open_mp: bool = False,
) -> tuple[int, int]:
    """`pool_attend` on addresses, for engines that have no numpy dtype for their tensors.

    Nothing can be checked about the memory: the caller answers for addresses, strides and lifetime.

    For a pool on a CUDA device queries and results lie there, the call is enqueued on the stream of
    the pool's owner and returns at once: what comes after it there sees the results. It takes one
    segment and no threads.

    Args:
        queries: `[num_query_heads, num_queries, head_dim]`; elements as those of the pools: 2 bytes
            are bfloat16, 4 float32.
        segments: 1 or 2, `layer` and `num_keys` as ints, `block_table` dense int32 numpy.
        out: As `queries`, written.
        num_query_heads: A multiple of the pools' `num_kv_heads`.
        num_queries: The last keys of the sequence are theirs.
        scale: Softmax scale.
        window_tokens: Newest keys a query sees, its own included; 0: all.
        block_mass: float32 `[num_query_heads, num_queries, max_blocks]`, written; None: not wanted.
        max_blocks: Columns of `block_mass`.
        log_sum_exp: Address of dense float32 `[num_query_heads, num_queries]`; 0: not wanted.
        num_threads: As `host_pool_attend`.
        is_on_open_mp: As `host_pool_attend`.

    Returns:
        Code and faulty entry, as in a status; a refused call has written nothing.

    Raises:
        ValueError: For a block table that is not dense int32 numpy, for threads as
            `host_pool_attend`, and for what a pool on a device does not take.
        RuntimeError: Where the device refuses.
    """
    pool = segments[0].pool
    if pool.device is not None:
        check_device_call(num_threads, is_on_open_mp=is_on_open_mp)
        if len(segments) > 1:
            raise ValueError(
                f"`segments` has {len(segments)} entries; expected 1 for a pool on "
                f"cuda:{pool.device}"
            )
    elif len(segments) > 1:
        check_on_host("segments[1].pool", segments[1].pool)
    shape = pool.shape
    return load_native().pool_attend(
        tuple(
            (
                segment.pool.pool_id,
                int(segment.ord[0]),
                number_of(segment.layer),
                segment.block_table,
                number_of(segment.num_keys),
            )
            for segment in segments
        ),
        (num_query_heads, num_queries, shape.head_dim, shape.element_bytes),
        scale,
        window_tokens,
        queries,
        out,
        block_mass,
        max_blocks,
        log_sum_exp,
        num_threads,
        is_on_open_mp,
        pool.device is not None,
    )


def num_threads() -> int:
    """Threads of a host call that names none: `BLOCKCOMPACT_NUM_THREADS`, else one a processor."""
    return load_native().num_threads()


def has_open_mp_threads() -> bool:
    """Whether calls may run on the OpenMP threads that this process has already.

    Not without an OpenMP runtime that all libraries see, and not in a forked child of a process
    that ran such a call: the child's runtime has lost its threads.
    """
    return load_native().has_open_mp_threads()


def _rows_at(name: str, array: np.ndarray[Any, Any]) -> RowsAt:
    strides, itemsize = array.strides, array.itemsize
    if array.size > 0 and array.shape[2] > 1 and strides[2] != itemsize:
        raise ValueError(
            f"`{name}` has a last axis with a stride of {strides[2]} bytes; give an array whose "
            "last axis is contiguous"
        )
    return RowsAt(load_native().address_of(array), strides[0] // itemsize, strides[1] // itemsize)


def _check_outputs(queries: np.ndarray[Any, Any], outputs: HostAttendOutputs) -> None:
    heads, num_queries, _ = queries.shape
    out, mass, log_sum_exp = outputs
    if out.shape != queries.shape or out.dtype != queries.dtype:
        raise ValueError(
            f"`outputs.out` is {describe(out)}; expected {describe(queries)} as the queries"
        )
    if mass is not None and (
        mass.ndim != 3 or mass.shape[:2] != (heads, num_queries) or mass.dtype != np.float32
    ):
        raise ValueError(
            f"`outputs.block_mass` is {describe(mass)}; expected float32[{heads}, {num_queries}, "
            "max_blocks]"
        )
    if log_sum_exp is not None and (
        log_sum_exp.shape != (heads, num_queries)
        or log_sum_exp.dtype != np.float32
        or not log_sum_exp.flags.c_contiguous
    ):
        raise ValueError(
            f"`outputs.log_sum_exp` is {describe(log_sum_exp)}; expected dense float32[{heads}, "
            f"{num_queries}]"
        )
    for name, array in (("out", out), ("block_mass", mass), ("log_sum_exp", log_sum_exp)):
        if array is not None and not array.flags.writeable:
            raise ValueError(f"`outputs.{name}` is read-only; give a writable array")
