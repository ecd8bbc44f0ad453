"""Attention over registered blocks on torch tensors, in place."""

from __future__ import annotations

import numpy as np
import torch

from blockcompact_jax.kernels import AttendSegment, RowsAt, host_pool_attend_at, raise_for_status

_DTYPES = {2: torch.bfloat16, 4: torch.float32}
"""What elements of so many bytes are."""


def attend_blocks(
    query: torch.Tensor,
    segments: list[AttendSegment],
    *,
    out: torch.Tensor,
    scale: float,
    mass: torch.Tensor | None = None,
    num_threads: int | None = None,
    is_on_open_mp: bool = False,
) -> None:
    """Attends with the newest queries of a sequence over its blocks.

    Args:
        query: [num_query_heads, num_queries, head_dim], any strides with a contiguous last axis, in
            bfloat16 or float32 as the blocks.
        segments: the blocks; their last keys are the queries' own.
        out: as `query`, written.
        scale: softmax scale.
        mass: float32 [num_query_heads, num_queries, max_blocks], contiguous last axis; written: the
            softmax mass of each block. None where it is not wanted.
        num_threads: threads that share the call; None: as many as `kernels.num_threads()` says.
        is_on_open_mp: whether it runs on torch's own threads instead, as `host_pool_attend` says.

    Raises:
        ValueError: for another dtype or shape, if a last axis is not contiguous, or the process has
            no such threads.
        KernelStatusError: if the call is refused; nothing is written then.
    """
    _check("query", query, segments)
    _check("out", out, segments)
    if out.shape != query.shape:
        raise ValueError(f"`out` is {list(out.shape)}; expected {list(query.shape)} as `query`")
    if mass is not None and (
        mass.dtype != torch.float32 or mass.shape[:2] != query.shape[:2] or mass.stride(2) != 1
    ):
        raise ValueError(
            f"`mass` is {mass.dtype} {list(mass.shape)} with strides {mass.stride()}; expected "
            f"torch.float32 {[*query.shape[:2]]} and max_blocks, the last axis contiguous"
        )
    status = host_pool_attend_at(
        _rows_at(query),
        segments,
        out=_rows_at(out),
        num_query_heads=query.shape[0],
        num_queries=query.shape[1],
        scale=scale,
        block_mass=None if mass is None else _rows_at(mass),
        max_blocks=0 if mass is None else mass.shape[2],
        num_threads=num_threads,
        is_on_open_mp=is_on_open_mp,
    )
    if status[0]:
        tables = np.concatenate([np.asarray(segment.block_table) for segment in segments])
        raise_for_status(np.array(status, np.int32), call="pool_attend", block_table=tables)


def _check(name: str, tensor: torch.Tensor, segments: list[AttendSegment]) -> None:
    """Refuses what the native call, which has an address only, would read as something else."""
    shape = segments[0].pool.shape
    dtype = _DTYPES[shape.element_bytes]
    if tensor.dtype != dtype or tensor.shape[2] != shape.head_dim or tensor.stride(2) != 1:
        raise ValueError(
            f"`{name}` is {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}; "
            f"expected {dtype} [num_query_heads, num_queries, {shape.head_dim}] as the blocks, the "
            "last axis contiguous. Nothing is cast."
        )


def _rows_at(tensor: torch.Tensor) -> RowsAt:
    return RowsAt(tensor.data_ptr(), tensor.stride(0), tensor.stride(1))
