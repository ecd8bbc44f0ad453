"""Attention over registered blocks on torch tensors, in place."""

from __future__ import annotations

import numpy as np
import torch

from blockcompact_jax.kernels import AttendSegment, RowsAt, host_pool_attend_at, raise_for_status


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
        query: [num_query_heads, num_queries, head_dim], any strides with a contiguous last axis.
        segments: the blocks; their last keys are the queries' own.
        out: as `query`, written.
        scale: softmax scale.
        mass: float32 [num_query_heads, num_queries, max_blocks], contiguous last axis; written: the
            softmax mass of each block. None where it is not wanted.
        num_threads: threads that share the call; None: as many as `kernels.num_threads()` says.
        is_on_open_mp: whether it runs on torch's own threads instead, as `host_pool_attend` says.

    Raises:
        ValueError: if a last axis is not contiguous, or the process has no such threads.
        KernelStatusError: if the call is refused; nothing is written then.
    """
    if query.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError(
            f"`query` and `out` have strides {query.stride()} and {out.stride()}; expected a "
            "contiguous last axis"
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


def _rows_at(tensor: torch.Tensor) -> RowsAt:
    return RowsAt(tensor.data_ptr(), tensor.stride(0), tensor.stride(1))
