"""Blocks chosen on the host by an estimate of what queries will attend to, in one native call."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from blockcompact_jax.kernels.attend_types import RowsAt
from blockcompact_jax.kernels.native import load_native
from blockcompact_jax.kernels.pools import RegisteredPool


class EstimateSequence(NamedTuple):
    """One of several sequences whose blocks are chosen; addresses are of int32 elements.

    Attributes:
        moments_table: dense int32 numpy, entries of the pool of moments that hold those of its
            first blocks.
        num_candidates: its first blocks, of which are chosen.
        exact_table: dense int32 numpy, physical blocks that the keys are read of: the sinks, and
            what follows the candidates.
        num_exact_keys: valid tokens in them.
        physical_blocks: dense int32 numpy, of the candidates.
        num_chosen: the sinks included, at most `num_candidates`.
        chosen_address: of row 0 of the chosen logical blocks.
        chosen_stride: distance of two rows of them, in elements.
        table_address: of row 0 of their physical blocks.
        table_stride: distance of two rows of them, in elements.
    """

    moments_table: np.ndarray[Any, Any]
    num_candidates: int
    exact_table: np.ndarray[Any, Any]
    num_exact_keys: int
    physical_blocks: np.ndarray[Any, Any]
    num_chosen: int
    chosen_address: int
    chosen_stride: int
    table_address: int
    table_stride: int


class EstimateStatus(NamedTuple):
    """Outcome of a call.

    Attributes:
        code: as in a status.
        row: faulty entry, counted over all tables of one kind; -1 where none is.
        sequence: the first that has a block that weighs what is not finite, -1 where none has;
            nothing is written for any sequence then.
        block: its first such logical block, a candidate or behind them.
    """

    code: int
    row: int
    sequence: int
    block: int


def host_pool_choose_by_estimate_at(
    moments: RegisteredPool,
    keys: RegisteredPool,
    sequences: Sequence[EstimateSequence],
    *,
    row: int,
    queries: RowsAt,
    tokens: Sequence[int],
    num_query_heads: int,
    num_sinks: int,
    scale: float,
    is_on_open_mp: bool = False,
) -> EstimateStatus:
    """Chooses blocks of one layer by the attention mass that each query is estimated to give them.

    A block of n keys weighs n · exp(scale · q·mean + scale² · q²·variance / 2), as if its keys were
    normally distributed; the sinks and what follows the candidates weigh what their keys say. The
    mean of the mass over query heads ranks the candidates behind the sinks; of equal ones the lower
    block is chosen (SEL-2, SEL-3). Nothing can be checked about the memory: the caller answers for
    addresses, strides and lifetime.

    Args:
        moments: a packed pool in which one key of `2 * head_dim` elements stands for a block: the
            mean of its keys and their variance. Its layers are the rows.
        keys: the layer's keys and values, of the same dtype: elements of 2 bytes are bfloat16.
        sequences: their blocks, and where the choice goes: logical blocks, ascending, and their
            physical blocks.
        row: layer row: of the moments, of the chosen and of the tables.
        queries: of the first token; strides between tokens and between query heads.
        tokens: of each sequence, its place in the queries.
        num_query_heads: a multiple of the pools' `num_kv_heads`.
        num_sinks: first blocks of each sequence, always chosen.
        scale: softmax scale.
        is_on_open_mp: as `host_pool_attend`.

    Raises:
        ValueError: for tables that are not dense int32 numpy; unless 0 <= `num_sinks` <=
            `num_chosen` <= `num_candidates`; for `physical_blocks` that are fewer than the
            candidates or not in the pool; and for an `exact_table` without all sinks, or without a
            key behind them.
    """
    shape = keys.shape
    return EstimateStatus(
        *load_native().pool_choose_by_estimate(
            (moments.pool_id, int(moments.current_ord()[0]), row),
            (keys.pool_id, int(keys.current_ord()[0]), 0),
            sequences,
            tokens,
            row,
            queries,
            (
                num_query_heads,
                shape.head_dim,
                shape.element_bytes,
                shape.block_tokens,
                num_sinks,
                shape.num_blocks,
            ),
            scale,
            is_on_open_mp,
        )
    )
