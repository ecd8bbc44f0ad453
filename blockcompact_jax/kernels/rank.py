"""Ranking, membership and ascending lists as native calls on CPU.

`NativeOperations` is what planning uses; its reference is `operations.PureOperations`. Leading axes
are rows, so `vmap` makes one call of a batch; rows run in parallel on XLA's own threads.
"""

# pyright: reportUnknownMemberType=false

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float32, Int32

from blockcompact_jax.ids import AnyArray
from blockcompact_jax.kernels._checks import describe
from blockcompact_jax.kernels.native import load_native
from blockcompact_jax.mesh_axes import result_type, vary_over, varying_axes
from blockcompact_jax.operation_types import (
    FreeBlocks,
    Kept,
    Members,
    Ranking,
    ReferenceCheck,
    ReferenceMoves,
)


class RankOrder(enum.IntEnum):
    """How `rank` lists the chosen blocks: best first, or ascending."""

    SCORE = 0
    BLOCK = 1


def rank(
    scores: Float32[AnyArray, "row block"],
    count: Int32[AnyArray, " row"],
    *,
    capacity: int,
    num_candidates: AnyArray | None = None,
    num_sinks: int = 0,
    order: RankOrder = RankOrder.SCORE,
    is_excluded: Bool[AnyArray, "row block"] | None = None,
) -> Ranking:
    """Lists the best candidates of each row by (-score, logical block), without a full sort.

    -0.0 and 0.0 tie, denormals are told apart, and a row with a candidate that is NaN or infinite
    lists nothing.

    Args:
        scores: block scores, float32 [row, block]; places past the candidates may hold anything.
        count: blocks to take, int32 [row], cut to 0 … min(candidates, capacity).
        capacity: static length of a list.
        num_candidates: the first blocks of a row, which alone are looked at. int32, shape () or
            [row]; all blocks if None.
        num_sinks: first blocks, which rank before all others (static).
        order: best first, or ascending (static).
        is_excluded: blocks that are taken but not listed, such as held ones. bool [row, block].

    Returns:
        The logical blocks, int32 [row, capacity], HOLE padded, and each row's first non-finite
        candidate.

    Raises:
        ValueError: For shapes and dtypes.
        NativeModuleError: Where the compiled module is missing.
    """
    _check("scores", scores, np.float32)
    num_rows, num_blocks = scores.shape
    _check("count", count, np.int32, (num_rows,))
    limit = num_blocks if num_candidates is None else num_candidates
    has_excluded = is_excluded is not None
    if has_excluded:
        _check("is_excluded", is_excluded, np.bool_, scores.shape)
    blocks, first_non_finite = _call(
        "blockcompact_rank",
        [((num_rows, capacity), np.int32), ((num_rows,), np.int32)],
        scores,
        jnp.broadcast_to(jnp.asarray(limit, jnp.int32), (num_rows,)),
        count,
        is_excluded if has_excluded else np.zeros(0, bool),
        num_sinks=np.int64(num_sinks),
        order=np.int64(order),
        has_excluded=np.bool_(has_excluded),
    )
    return Ranking(blocks, first_non_finite)


@dataclass(frozen=True)
class NativeOperations:
    """`PlanOperations` as native calls, on CPU alone.

    Every call raises NativeModuleError where the compiled module is missing.
    """

    @property
    def name(self) -> str:
        """What a record of a run calls this implementation."""
        return "native"

    def rank(
        self,
        scores: Float32[AnyArray, "row block"],
        count: Int32[AnyArray, " row"],
        *,
        num_candidates: AnyArray,
        num_sinks: int,
        capacity: int,
    ) -> Ranking:
        """See `PlanOperations.rank`."""
        return rank(
            scores,
            count,
            capacity=capacity,
            num_candidates=num_candidates,
            num_sinks=num_sinks,
        )

    def are_best(
        self,
        scores: Float32[AnyArray, "row block"],
        listed: Int32[AnyArray, "row place"],
        num_listed: Int32[AnyArray, " row"],
        *,
        num_candidates: AnyArray,
        num_sinks: int,
    ) -> Bool[Array, ""]:
        """See `PlanOperations.are_best`."""
        _check("scores", scores, np.float32)
        num_rows = scores.shape[0]
        _check("listed", listed, np.int32, (num_rows, listed.shape[-1]))
        _check("num_listed", num_listed, np.int32, (num_rows,))
        return _call(
            "blockcompact_are_best",
            [((), np.bool_)],
            scores,
            jnp.broadcast_to(jnp.asarray(num_candidates, jnp.int32), (num_rows,)),
            listed,
            num_listed,
            num_sinks=np.int64(num_sinks),
        )[0]

    def are_best_on_host(
        self,
        scores: Float32[AnyArray, "row block"],
        listed: Int32[AnyArray, "row place"],
        num_listed: Int32[AnyArray, " row"],
        *,
        num_wanted: Int32[np.ndarray, " row"],
        num_candidates: int,
        num_sinks: int,
    ) -> bool | None:
        """See `HostOperations.are_best_on_host`; runs on the module's threads for host calls."""
        return load_native().are_best(
            scores, num_candidates, listed, num_listed, num_wanted, num_sinks
        )

    def find_members(
        self,
        ids: Int32[AnyArray, "row place"],
        is_filled: Bool[AnyArray, "row place"],
        others: Int32[AnyArray, "row other"],
        is_other_filled: Bool[AnyArray, "row other"],
        *,
        bound: AnyArray | int,
        max_ids: int,
    ) -> Members:
        """See `PlanOperations.find_members`."""
        _check("ids", ids, np.int32)
        num_rows = ids.shape[0]
        _check("is_filled", is_filled, np.bool_, ids.shape)
        _check("others", others, np.int32, (num_rows, others.shape[-1]))
        _check("is_other_filled", is_other_filled, np.bool_, others.shape)
        results = _call(
            "blockcompact_find_members",
            [(ids.shape, np.bool_), *[((num_rows,), np.int32)] * 4],
            ids,
            is_filled,
            others,
            is_other_filled,
            jnp.broadcast_to(jnp.asarray(bound, jnp.int32), (num_rows,)),
            max_ids=np.int64(max_ids),
        )
        return Members(*results)

    def sort_ids(
        self,
        ids: Int32[AnyArray, "row place"],
        is_filled: Bool[AnyArray, "row place"],
        *,
        max_ids: int,
        capacity: int,
    ) -> Int32[Array, "row capacity"]:
        """See `PlanOperations.sort_ids`."""
        _check("ids", ids, np.int32)
        _check("is_filled", is_filled, np.bool_, ids.shape)
        results = [((ids.shape[0], capacity), np.int32)]
        return _call("blockcompact_sort_ids", results, ids, is_filled, max_ids=np.int64(max_ids))[0]

    def list_free(
        self, references: Int32[AnyArray, "kind owner physical"], *, capacity: int
    ) -> FreeBlocks:
        """See `PlanOperations.list_free`."""
        _check("references", references, np.int32, (references.shape[0], *references.shape[-2:]))
        num_owners = references.shape[1]
        results = [((num_owners, capacity), np.int32), ((num_owners,), np.int32)]
        return FreeBlocks(*_call("blockcompact_list_free", results, references))

    def keep_places(
        self,
        is_kept: Bool[AnyArray, "row place"],
        first: Int32[AnyArray, "row place"],
        second: Int32[AnyArray, "row place"],
    ) -> Kept:
        """See `PlanOperations.keep_places`."""
        _check("is_kept", is_kept, np.bool_)
        _check("first", first, np.int32, is_kept.shape)
        _check("second", second, np.int32, is_kept.shape)
        columns = [(is_kept.shape, np.int32)] * 3
        return Kept(*_call("blockcompact_keep_places", columns, is_kept, first, second))

    def mark_ids(
        self,
        ids: Int32[AnyArray, "row place"],
        num_filled: Int32[AnyArray, " row"],
        owner_by_row: Int32[AnyArray, " row"],
        *,
        num_owners: int,
        max_ids: int,
    ) -> Bool[Array, "owner max_ids"]:
        """See `PlanOperations.mark_ids`."""
        _check("ids", ids, np.int32)
        _check("num_filled", num_filled, np.int32, ids.shape[:1])
        _check("owner_by_row", owner_by_row, np.int32, ids.shape[:1])
        marks = [((num_owners, max_ids), np.bool_)]
        return _call("blockcompact_mark_ids", marks, ids, num_filled, owner_by_row)[0]

    def move_references(
        self,
        references: Int32[AnyArray, "kind owner physical"],
        generation: Int32[AnyArray, "owner physical"],
        landed: Int32[AnyArray, "owner place"],
        landed_generation: Int32[AnyArray, "owner place"],
        *,
        is_before: Bool[AnyArray, "owner physical"],
        is_after: Bool[AnyArray, "owner physical"],
        regular: int,
        transfer: int,
    ) -> ReferenceMoves:
        """See `PlanOperations.move_references`."""
        owners, blocks = generation.shape
        _check("references", references, np.int32, (references.shape[0], owners, blocks))
        _check("generation", generation, np.int32)
        _check("landed", landed, np.int32, (owners, landed.shape[-1]))
        _check("landed_generation", landed_generation, np.int32, landed.shape)
        _check("is_before", is_before, np.bool_, generation.shape)
        _check("is_after", is_after, np.bool_, generation.shape)
        results = _call(
            "blockcompact_move_references",
            [
                (references.shape, np.int32),
                (generation.shape, np.bool_),
                ((owners,), np.int32),
                ((owners, len(ReferenceCheck)), np.int32),
            ],
            references,
            generation,
            landed,
            landed_generation,
            is_before,
            is_after,
            regular=np.int64(regular),
            transfer=np.int64(transfer),
        )
        return ReferenceMoves(*results)


def _call(
    target: str, results: Sequence[tuple[tuple[int, ...], Any]], *operands: Any, **attributes: Any
) -> Sequence[Array]:
    """Calls a target whose operands are rows; inside `shard_map` all vary over the same axes."""
    load_native()
    arrays = [jnp.asarray(operand) for operand in operands]
    axes = varying_axes(arrays)
    types = [result_type(shape, dtype, axes) for shape, dtype in results]
    call = jax.ffi.ffi_call(target, types, vmap_method="broadcast_all")
    return call(*vary_over(arrays, axes), **attributes)


def _check(name: str, array: Any, dtype: Any, shape: tuple[int, ...] | None = None) -> None:
    is_fine = array.dtype == dtype and (array.ndim == 2 if shape is None else array.shape == shape)
    if not is_fine:
        expected = "[row, place]" if shape is None else list(shape)
        raise ValueError(f"`{name}` is {describe(array)}; expected {np.dtype(dtype)} {expected}")
