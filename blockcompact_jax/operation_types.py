"""What planning does with whole rows: the operations that any implementation gives, and results."""

import enum
from typing import NamedTuple, Protocol

import numpy as np
from jax import Array
from jaxtyping import Bool, Float32, Int32

from .ids import AnyArray


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
    """Which IDs of a list another list has, and what is wrong with either.

    Attributes:
        is_member: False at places without an ID. bool [row, place].
        repeated_id: first filled place of the list whose ID comes again, HOLE if none. int32 [row].
        repeated_other: likewise of the other list.
        outside_id: first filled place of the list whose ID is outside [0, bound), HOLE if none.
            int32 [row].
        outside_other: likewise of the other list.
    """

    is_member: Bool[Array, "row place"]
    repeated_id: Int32[Array, " row"]
    repeated_other: Int32[Array, " row"]
    outside_id: Int32[Array, " row"]
    outside_other: Int32[Array, " row"]


class FreeBlocks(NamedTuple):
    """The blocks of each owner that nothing references.

    Attributes:
        blocks: the lowest, ascending, HOLE padded. int32 [owner, capacity].
        num_free: how many there are in all. int32 [owner].
    """

    blocks: Int32[Array, "owner capacity"]
    num_free: Int32[Array, " owner"]


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
        is_filled: Bool[AnyArray, "row place"],
        others: Int32[AnyArray, "row other"],
        is_other_filled: Bool[AnyArray, "row other"],
        *,
        bound: AnyArray | int,
        max_ids: int,
    ) -> Members:
        """Finds which IDs of a list are in `others`, and what is wrong with either list.

        Args:
            ids: places that are not filled may hold anything.
            is_filled: places of `ids` that count.
            others: as `ids`.
            is_other_filled: places of `others` that count.
            bound: where IDs end that may be listed. Shape () or [row].
            max_ids: static bound of the IDs that are compared.
        """
        ...

    def sort_ids(
        self,
        ids: Int32[AnyArray, "row place"],
        is_filled: Bool[AnyArray, "row place"],
        *,
        max_ids: int,
        capacity: int,
    ) -> Int32[Array, "row capacity"]:
        """Lists the IDs at the filled places of each row ascending, cut or HOLE padded.

        They are distinct.
        """
        ...

    def list_free(
        self, references: Int32[AnyArray, "kind owner physical"], *, capacity: int
    ) -> FreeBlocks:
        """Lists the lowest blocks of each owner whose counts are 0 for every kind."""
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


class HostOperations(Protocol):
    """Operations of planning on concrete arrays in a CPU's memory."""

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
        """`PlanOperations.are_best`; False too where `num_listed` is not `num_wanted`.

        None where an array has no dense memory on the host that could be viewed as it is: one of
        another device, traced, strided, or of another dtype or shape than stated.
        """
        ...
