"""The row operations that planning is made of, and their pure implementation.

Planning runs on any implementation of `PlanOperations`; all give the same bytes. `PURE_OPERATIONS`
is plain JAX: it runs on every backend and is the reference. `kernels.NativeOperations` runs on CPU,
several times faster. Which one a plan uses is a static choice of its caller, never a fallback.
"""

# pyright: reportUnknownMemberType=false

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float32, Int32

from .ids import HOLE, AnyArray
from .masks import (
    count_by_id,
    count_true,
    first_true,
    ids_from_mask,
    lookup,
    place_by_id,
    place_mask,
    sort_ascending,
    take_in_rows,
)
from .operation_types import (
    FreeBlocks,
    Kept,
    Members,
    PlanOperations,
    Ranking,
    ReferenceCheck,
    ReferenceMoves,
)
from .ranking import has_best, rank_keys, rank_top


@dataclass(frozen=True)
class PureOperations:
    """`PlanOperations` in plain JAX, for every backend."""

    @property
    def name(self) -> str:
        """What a record of a run calls this implementation."""
        return "pure"

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
        num_rows, max_blocks = scores.shape
        blocks = jnp.arange(max_blocks, dtype=jnp.int32)
        limit = jnp.broadcast_to(jnp.asarray(num_candidates, jnp.int32), (num_rows,))
        first_bad = first_true((blocks < limit[:, None]) & ~jnp.isfinite(scores))
        most = jnp.minimum(limit, min(max_blocks, capacity))
        listed = jnp.where(first_bad == HOLE, jnp.clip(count, 0, jnp.maximum(most, 0)), 0)
        keys = rank_keys(scores, limit, num_sinks)
        return Ranking(rank_top(keys, listed, capacity), first_bad)

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
        num_rows, max_blocks = scores.shape
        limit = jnp.broadcast_to(jnp.asarray(num_candidates, jnp.int32), (num_rows,))
        is_candidate = place_mask(limit, max_blocks)
        is_finite = count_true(is_candidate & ~jnp.isfinite(scores)) == 0
        is_filled = place_mask(num_listed, listed.shape[1])
        is_listed = (place_by_id(listed, is_filled, max_blocks) >= 0) & is_candidate
        are_candidates = count_true(is_listed) == num_listed
        keys = rank_keys(scores, limit, num_sinks)
        return jnp.all(is_finite & are_candidates & has_best(keys, is_listed))

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
        place_of_id = place_by_id(ids, is_filled, max_ids)
        place_of_other = place_by_id(others, is_other_filled, max_ids)
        limit = jnp.asarray(bound)[..., None]
        return Members(
            lookup(place_of_other, ids, is_filled) >= 0,
            _first_repeated(ids, is_filled, place_of_id),
            _first_repeated(others, is_other_filled, place_of_other),
            first_true(is_filled & ((ids < 0) | (ids >= limit))),
            first_true(is_other_filled & ((others < 0) | (others >= limit))),
        )

    def sort_ids(
        self,
        ids: Int32[AnyArray, "row place"],
        is_filled: Bool[AnyArray, "row place"],
        *,
        max_ids: int,
        capacity: int,
    ) -> Int32[Array, "row capacity"]:
        """See `PlanOperations.sort_ids`."""
        return sort_ascending(ids, is_filled & (ids >= 0) & (ids < max_ids), capacity)

    def list_free(
        self, references: Int32[AnyArray, "kind owner physical"], *, capacity: int
    ) -> FreeBlocks:
        """See `PlanOperations.list_free`."""
        is_free = jnp.all(references == 0, axis=0)
        return FreeBlocks(ids_from_mask(is_free, capacity), count_true(is_free))

    def keep_places(
        self,
        is_kept: Bool[AnyArray, "row place"],
        first: Int32[AnyArray, "row place"],
        second: Int32[AnyArray, "row place"],
    ) -> Kept:
        """See `PlanOperations.keep_places`."""
        places = ids_from_mask(is_kept, is_kept.shape[1])
        is_filled = places >= 0
        return Kept(places, lookup(first, places, is_filled), lookup(second, places, is_filled))

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
        is_filled = place_mask(num_filled, ids.shape[1])
        return count_by_id(ids, is_filled, owner_by_row, (num_owners, max_ids)) > 0

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
        references = jnp.asarray(references)
        is_before, is_after = jnp.asarray(is_before), jnp.asarray(is_after)
        num_owners, num_blocks = generation.shape
        owners = np.arange(num_owners, dtype=np.int32)
        num_landed = count_by_id(landed, True, owners, (num_owners, num_blocks))
        is_gained, is_retired = is_after & ~is_before, is_before & ~is_after
        moved = references.at[transfer].add(-num_landed)
        moved = moved.at[regular].add(is_gained.astype(jnp.int32) - is_retired.astype(jnp.int32))
        was_used, is_used = (jnp.any(counts != 0, axis=0) for counts in (references, moved))
        current = lookup(generation, landed, landed >= 0)
        is_outside = (landed < HOLE) | (landed >= num_blocks)
        is_stale = (current != landed_generation) & (current != HOLE)
        faults = {
            ReferenceCheck.OUT_OF_RANGE: _first_id(landed, is_outside),
            ReferenceCheck.REPEATED: first_true(num_landed > 1),
            ReferenceCheck.STALE: _first_id(landed, is_stale),
            ReferenceCheck.NOT_RESERVED: first_true(num_landed > references[transfer]),
            ReferenceCheck.NOT_LANDED: first_true(is_gained & (num_landed == 0)),
            ReferenceCheck.NOT_OWNED: first_true(is_retired & (references[regular] == 0)),
        }
        return ReferenceMoves(
            moved,
            was_used & ~is_used,
            count_true(is_retired),
            jnp.stack([faults[check] for check in ReferenceCheck], axis=1),
        )


PURE_OPERATIONS: PlanOperations = PureOperations()
"""Plain JAX, on every backend."""


def _first_id(ids: AnyArray, is_faulty: AnyArray) -> Int32[Array, " row"]:
    """Returns the first ID of each row where a mask holds, HOLE where none does."""
    if ids.shape[1] == 0:
        return jnp.full(ids.shape[:1], HOLE, jnp.int32)
    place = first_true(is_faulty)
    found = take_in_rows(ids, jnp.maximum(place, 0)[:, None])[:, 0]
    return jnp.where(place >= 0, found, HOLE)


def _first_repeated(ids: AnyArray, is_filled: AnyArray, place_of_id: Array) -> Int32[Array, " row"]:
    places = jnp.arange(ids.shape[1], dtype=jnp.int32)
    last_place = lookup(place_of_id, ids, is_filled)
    return first_true((last_place >= 0) & (last_place != places))
