"""The row operations that planning is made of, and their pure implementation.

Planning runs on any implementation of `PlanOperations`; all give the same bytes. `PURE_OPERATIONS`
is plain JAX: it runs on every backend and is the reference. `kernels.NativeOperations` runs on CPU,
several times faster. Which one a plan uses is a static choice of its caller, never a fallback.
"""

# pyright: reportUnknownMemberType=false

import enum
from dataclasses import dataclass
from typing import NamedTuple, Protocol

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
from .ranking import has_best, rank_keys, rank_top


class Ranking(NamedTuple):
    """The best blocks of each row.

    Attributes:
        blocks: logical blocks, best first, HOLE padded. int32 [row, capacity].
        first_non_finite: lowest candidate whose score is NaN or infinite, HOLE where there is none.
            Such a row lists nothing. int32 [row].
    """

    blocks: Int32[Array, "row capacity"]
    first_non_finite: Int32[Array, " row"]


class Members(NamedTuple):
    """Which IDs of a list another list has.

    Attributes:
        is_member: False at places without an ID. bool [row, place].
        repeated_id: first place of the list whose ID comes again, HOLE if none. int32 [row].
        repeated_other: likewise of the other list.
    """

    is_member: Bool[Array, "row place"]
    repeated_id: Int32[Array, " row"]
    repeated_other: Int32[Array, " row"]


class Kept(NamedTuple):
    """Two columns of equal lists, cut to the places that are kept; all HOLE padded.

    Attributes:
        places: the kept places, ascending.
        first: the first column there.
        second: the second column there.
    """

    places: Int32[Array, "row place"]
    first: Int32[Array, "row place"]
    second: Int32[Array, "row place"]


class ReferenceCheck(enum.IntEnum):
    """What moving references refuses, in this order; last axis of `ReferenceMoves.faults`."""

    OUT_OF_RANGE = 0
    REPEATED = 1
    STALE = 2
    NOT_RESERVED = 3
    NOT_LANDED = 4
    NOT_OWNED = 5


class ReferenceMoves(NamedTuple):
    """Reference counts after a commit. All but `faults` holds only where there is no fault.

    Attributes:
        references: the new counts.
        is_released: blocks that had references and have none now.
        num_retired: blocks per owner that left its tables.
        faults: the first faulty block of each `ReferenceCheck`, HOLE where there is none.
    """

    references: Int32[Array, "kind owner physical"]
    is_released: Bool[Array, "owner physical"]
    num_retired: Int32[Array, " owner"]
    faults: Int32[Array, "owner check"]


class PlanOperations(Protocol):
    """What planning does with whole rows. Frozen and hashable: a static argument.

    IDs are bounded by a static `max_ids`; whatever lies outside [0, max_ids), HOLE too, is no ID.
    """

    @property
    def name(self) -> str:
        """What a record of a run calls this implementation."""
        ...

    def rank(
        self,
        scores: Float32[AnyArray, "row block"],
        count: Int32[AnyArray, " row"],
        *,
        num_candidates: AnyArray,
        num_sinks: int,
        capacity: int,
    ) -> Ranking:
        """Lists the best candidates of each row by (-score, block).

        -0.0 and 0.0 tie; denormals are told apart.

        Args:
            scores: block scores; places past the candidates may hold anything.
            count: blocks to list, cut to 0 … min(candidates, capacity).
            num_candidates: the first blocks of a row, which alone are looked at. Shape () or [row].
            num_sinks: first blocks, which rank before all others (static).
            capacity: static length of the result.
        """
        ...

    def are_best(
        self,
        scores: Float32[AnyArray, "row block"],
        listed: Int32[AnyArray, "row place"],
        num_listed: Int32[AnyArray, " row"],
        *,
        num_candidates: AnyArray,
        num_sinks: int,
    ) -> Bool[Array, ""]:
        """Tells whether the listed blocks of every row are its best candidates, in any order.

        They are those that `rank` would list for a count of `num_listed`. Not so where a candidate
        is NaN or infinite, a block is listed twice, or what is listed is no candidate.

        Args:
            scores: as in `rank`.
            listed: logical blocks; past `num_listed` places they may hold anything.
            num_listed: places that count.
            num_candidates: as in `rank`.
            num_sinks: as in `rank` (static).
        """
        ...

    def find_members(
        self,
        ids: Int32[AnyArray, "row place"],
        others: Int32[AnyArray, "row other"],
        *,
        max_ids: int,
    ) -> Members:
        """Finds which IDs of a list are in `others`, and what either list repeats."""
        ...

    def sort_ids(
        self, ids: Int32[AnyArray, "row place"], *, max_ids: int, capacity: int
    ) -> Int32[Array, "row capacity"]:
        """Lists the IDs of each row ascending, cut or HOLE padded. They are distinct."""
        ...

    def list_mask(
        self, is_set: Bool[AnyArray, "row id"], *, capacity: int
    ) -> Int32[Array, "row capacity"]:
        """Lists the IDs where a mask holds ascending, cut or HOLE padded."""
        ...

    def keep_places(
        self,
        is_kept: Bool[AnyArray, "row place"],
        first: Int32[AnyArray, "row place"],
        second: Int32[AnyArray, "row place"],
    ) -> Kept:
        """Cuts two columns to the places that are kept, in their order."""
        ...

    def mark_ids(
        self,
        ids: Int32[AnyArray, "row place"],
        num_filled: Int32[AnyArray, " row"],
        owner_by_row: Int32[AnyArray, " row"],
        *,
        num_owners: int,
        max_ids: int,
    ) -> Bool[Array, "owner max_ids"]:
        """Marks the IDs that the filled places of any row of an owner hold."""
        ...

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
        """Moves references from the tables before a commit to those after it.

        Landed blocks lose a transfer reference, blocks that are new in the tables gain a regular
        one, blocks that left the tables lose one.

        Args:
            references: counts, never negative.
            generation: current generation of each block.
            landed: destinations of the transfer, HOLE in unused places.
            landed_generation: their generations when they were reserved.
            is_before: blocks in the tables before the commit.
            is_after: blocks in the tables after it.
            regular: kind of a table's references (static).
            transfer: kind of a transfer's references (static).
        """
        ...


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
        others: Int32[AnyArray, "row other"],
        *,
        max_ids: int,
    ) -> Members:
        """See `PlanOperations.find_members`."""
        place_of_id = place_by_id(ids, _all(ids), max_ids)
        place_of_other = place_by_id(others, _all(others), max_ids)
        return Members(
            lookup(place_of_other, ids, _all(ids)) >= 0,
            _first_repeated(ids, place_of_id),
            _first_repeated(others, place_of_other),
        )

    def sort_ids(
        self, ids: Int32[AnyArray, "row place"], *, max_ids: int, capacity: int
    ) -> Int32[Array, "row capacity"]:
        """See `PlanOperations.sort_ids`."""
        return sort_ascending(ids, (ids >= 0) & (ids < max_ids), capacity)

    def list_mask(
        self, is_set: Bool[AnyArray, "row id"], *, capacity: int
    ) -> Int32[Array, "row capacity"]:
        """See `PlanOperations.list_mask`."""
        return ids_from_mask(is_set, capacity)

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


PURE_OPERATIONS = PureOperations()
"""Plain JAX, on every backend."""


def _all(ids: AnyArray) -> AnyArray:
    return np.ones(ids.shape, bool)


def _first_id(ids: AnyArray, is_faulty: AnyArray) -> Int32[Array, " row"]:
    """Returns the first ID of each row where a mask holds, HOLE where none does."""
    if ids.shape[1] == 0:
        return jnp.full(ids.shape[:1], HOLE, jnp.int32)
    place = first_true(is_faulty)
    found = take_in_rows(ids, jnp.maximum(place, 0)[:, None])[:, 0]
    return jnp.where(place >= 0, found, HOLE)


def _first_repeated(ids: AnyArray, place_of_id: Array) -> Int32[Array, " row"]:
    places = jnp.arange(ids.shape[1], dtype=jnp.int32)
    last_place = lookup(place_of_id, ids, _all(ids))
    return first_true((last_place >= 0) & (last_place != places))
