"""Who references each physical block, and when a block is free.

A physical block is free exactly when no reference of any kind is left. References are counted per
owner (a KV-cache group or one layer, `OwnershipGranularity`), block and kind. Every function
refuses an inconsistent call whole: the ownership comes back unchanged with a fault.
"""

# pyright: reportUnknownMemberType=false

import enum
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int32

from .checks import Check, first_failing
from .errors import Result, ResultCode, fault_at, first_fault, ok_result
from .geometry import ModelGeometry, OwnershipGranularity
from .ids import HOLE, AnyArray, PhysicalBlocks, as_physical_blocks
from .masks import count_by_id, count_true, lookup, place_mask, take_in_rows
from .operations import PURE_OPERATIONS, PlanOperations, ReferenceCheck


class ReferenceKind(enum.IntEnum):
    """Why a block is referenced; also the first index of `Ownership.references`.

    REGULAR is one request's use in any layer of the owner, PREFIX a prefix cache's or another
    sharer's, TRANSFER a copy in flight that reads or writes the block.
    """

    REGULAR = 0
    PREFIX = 1
    TRANSFER = 2


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Ownership:
    """Reference counts of a pool's physical blocks.

    Attributes:
        references: Counts by `ReferenceKind`; never negative.
        generation: How often each block was freed. Who looked a block up, or reserved it, knows by
            this whether it is still the same one.
        granularity: What one owner is (static).
    """

    references: Int32[Array, "kind owner physical"]
    generation: Int32[Array, "owner physical"]
    granularity: OwnershipGranularity = field(metadata={"static": True})

    @property
    def num_physical_blocks(self) -> int:
        """Physical blocks per owner."""
        return self.references.shape[-1]

    @property
    def is_free(self) -> Bool[Array, "owner physical"]:
        """Blocks without any reference."""
        return jnp.all(self.references == 0, axis=-3)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Retirement:
    """What a commit retired and what that freed; measured, never inferred from bytes moved.

    Attributes:
        is_released: Blocks that had references before and have none now.
        num_retired: Blocks per owner that the request no longer references.
        physical_blocks_released: Blocks freed over all owners. Shape ().
    """

    is_released: Bool[Array, "owner physical"]
    num_retired: Int32[Array, " owner"]
    physical_blocks_released: Int32[Array, ""]


_CODE_OF_CHECK = {
    ReferenceCheck.OUT_OF_RANGE: ResultCode.BLOCK_OUT_OF_RANGE,
    ReferenceCheck.REPEATED: ResultCode.DOUBLE_RELEASE,
    ReferenceCheck.STALE: ResultCode.STALE_BLOCK,
    ReferenceCheck.NOT_RESERVED: ResultCode.DOUBLE_RELEASE,
    ReferenceCheck.NOT_LANDED: ResultCode.NOT_OWNED,
    ReferenceCheck.NOT_OWNED: ResultCode.DOUBLE_RELEASE,
}


def empty_ownership(
    geometry: ModelGeometry, *, granularity: OwnershipGranularity, num_physical_blocks: int
) -> Ownership:
    """Returns the ownership of a pool in which every block is free."""
    shape = (len(ReferenceKind), geometry.num_owners(granularity), num_physical_blocks)
    return Ownership(
        references=jnp.zeros(shape, jnp.int32),
        generation=jnp.zeros(shape[1:], jnp.int32),
        granularity=granularity,
    )


def reserve(
    ownership: Ownership,
    num_blocks: Int32[AnyArray, " owner"],
    *,
    geometry: ModelGeometry,
    max_reserve: int,
    kind: ReferenceKind = ReferenceKind.TRANSFER,
    operations: PlanOperations = PURE_OPERATIONS,
) -> tuple[Ownership, Int32[PhysicalBlocks, "owner max_reserve"], Result]:
    """Reserves the lowest free blocks of each owner.

    Each reserved block gets one reference. With TRANSFER it is the destination of a transfer, which
    nobody else is handed until the transfer is committed or aborted.

    Args:
        ownership: Current counts.
        num_blocks: Blocks to reserve per owner.
        geometry: Static facts, to name a layer in a fault.
        max_reserve: Static capacity of the result.
        kind: TRANSFER, or REGULAR for blocks that the engine itself writes.
        operations: What lists the free blocks (static); the result is the same.

    Returns:
        The new ownership, reserved blocks ascending and HOLE padded, and the first fault. Either
        every owner gets its blocks or nothing is reserved.
    """
    layers = geometry.layer_by_owner(ownership.granularity)
    free = operations.list_free(ownership.references, capacity=max_reserve)
    is_outside = (num_blocks < 0) | (num_blocks > max_reserve)
    result = first_failing(
        Check(is_outside, ResultCode.COUNT_OUT_OF_RANGE, num_blocks),
        Check(free.num_free < num_blocks, ResultCode.POOL_EXHAUSTED, free.num_free),
        layer_by_row=layers,
    )
    granted = jnp.where(result.is_ok, num_blocks, 0)
    reserved = jnp.where(place_mask(granted, max_reserve), free.blocks, HOLE)
    last = _last_filled(reserved, granted)
    blocks = jnp.arange(ownership.num_physical_blocks, dtype=jnp.int32)
    is_reserved = ownership.is_free & (blocks <= last[:, None])
    # Not `.at[kind].add`: that copies all counts first, and adds on one thread.
    kinds = np.arange(ownership.references.shape[0], dtype=np.int32)[:, None, None]
    references = ownership.references + (is_reserved & (kinds == kind)).astype(jnp.int32)
    return replace(ownership, references=references), as_physical_blocks(reserved), result


def acquire(
    ownership: Ownership,
    physical_blocks: Int32[PhysicalBlocks, "owner place"],
    *,
    geometry: ModelGeometry,
    kind: ReferenceKind,
    generation: Int32[AnyArray, "owner place"] | None = None,
) -> tuple[Ownership, Result]:
    """Adds one reference to each given block.

    A REGULAR reference may take a free block (an engine hands over a block it allocated); a PREFIX
    or TRANSFER reference may not, because the bytes of a free block belong to nobody.

    Args:
        ownership: Current counts.
        physical_blocks: Blocks per owner, HOLE in unused places.
        geometry: Static facts, to name a layer in a fault.
        kind: Kind of the references.
        generation: Generation of each block when it was looked up; a block that was freed since is
            refused. Not compared if None.
    """
    counts, result = _count_references(ownership, physical_blocks, geometry)
    if generation is not None:
        stale = _stale_fault(ownership, physical_blocks, generation, geometry)
        result = first_fault(result, stale)
    if kind is not ReferenceKind.REGULAR:
        unowned = _block_fault(
            (counts > 0) & ownership.is_free, ResultCode.NOT_OWNED, ownership, geometry
        )
        result = first_fault(result, unowned)
    granted = jnp.where(result.is_ok, counts, 0)
    references = jnp.asarray(ownership.references).at[kind].add(granted)
    return replace(ownership, references=references), result


def release(
    ownership: Ownership,
    physical_blocks: Int32[PhysicalBlocks, "owner place"],
    *,
    geometry: ModelGeometry,
    kind: ReferenceKind,
    generation: Int32[AnyArray, "owner place"] | None = None,
) -> tuple[Ownership, Retirement, Result]:
    """Drops one reference from each given block; a block is freed with its last reference.

    A block listed twice, or without a reference of this kind, refuses the whole call.

    Args:
        ownership: Current counts.
        physical_blocks: Blocks per owner, HOLE in unused places.
        geometry: Static facts, to name a layer in a fault.
        kind: Kind of the references.
        generation: Generation of each block when it was taken; not compared if None.
    """
    counts, result = _count_references(ownership, physical_blocks, geometry)
    if generation is not None:
        stale = _stale_fault(ownership, physical_blocks, generation, geometry)
        result = first_fault(result, stale)
    result = first_fault(
        result,
        _block_fault(
            counts > ownership.references[kind], ResultCode.DOUBLE_RELEASE, ownership, geometry
        ),
    )
    dropped = jnp.where(result.is_ok, counts, 0)
    references = jnp.asarray(ownership.references).at[kind].add(-dropped)
    return (*_drop(ownership, references, dropped > 0), result)


def commit_ownership(
    ownership: Ownership,
    reserved: Int32[PhysicalBlocks, "owner place"],
    reserved_generation: Int32[AnyArray, "owner place"],
    is_owned_before: Bool[AnyArray, "owner physical"],
    is_owned_after: Bool[AnyArray, "owner physical"],
    *,
    geometry: ModelGeometry,
    operations: PlanOperations = PURE_OPERATIONS,
) -> tuple[Ownership, Retirement, Result]:
    """Moves a request's references from its old tables to its new ones.

    Transfer references of the destinations end, blocks that are new in the tables gain a regular
    reference, and retired = owned before minus referenced after lose one. Shared and prefix
    references of others stay.

    Args:
        ownership: Current counts, with the reservation.
        reserved: Destinations of the committed transfer, HOLE in unused places.
        reserved_generation: Their generations when they were reserved, see `generation_of`.
        is_owned_before: Blocks in the request's tables before the commit, see `owned_blocks`.
        is_owned_after: Blocks in its tables after upload and retention.
        geometry: Static facts, to name a layer in a fault.
        operations: What moves the counts (static); the result is the same.
    """
    moves = operations.move_references(
        ownership.references,
        ownership.generation,
        reserved,
        reserved_generation,
        is_before=is_owned_before,
        is_after=is_owned_after,
        regular=ReferenceKind.REGULAR,
        transfer=ReferenceKind.TRANSFER,
    )
    layers = geometry.layer_by_owner(ownership.granularity)
    result = first_failing(
        *(
            Check(blocks != HOLE, _CODE_OF_CHECK[check], blocks)
            for check in ReferenceCheck
            for blocks in (moves.faults[:, check],)
        ),
        layer_by_row=layers,
    )
    references = jnp.where(result.is_ok, moves.references, ownership.references)
    is_released = moves.is_released & result.is_ok
    num_retired = jnp.where(result.is_ok, moves.num_retired, 0)
    return (*_retire(ownership, references, is_released, num_retired), result)


def generation_of(
    ownership: Ownership, physical_blocks: Int32[PhysicalBlocks, "owner place"]
) -> Int32[Array, "owner place"]:
    """Returns the current generation of each block, HOLE in unused places."""
    return lookup(ownership.generation, physical_blocks, physical_blocks >= 0)


def owned_blocks(
    physical_by_slot: Int32[PhysicalBlocks, "row slot"],
    num_valid: Int32[AnyArray, " row"],
    ownership: Ownership,
    geometry: ModelGeometry,
    operations: PlanOperations = PURE_OPERATIONS,
) -> Bool[Array, "owner physical"]:
    """Marks the blocks that any layer of each owner has in its table."""
    return operations.mark_ids(
        physical_by_slot,
        num_valid,
        geometry.owner_by_row(ownership.granularity),
        num_owners=geometry.num_owners(ownership.granularity),
        max_ids=ownership.num_physical_blocks,
    )


def _last_filled(ids: Array, num_filled: Array) -> Int32[Array, " row"]:
    """Returns the last filled ID of each row, HOLE where there is none."""
    if ids.shape[1] == 0:
        return jnp.full(ids.shape[:1], HOLE, jnp.int32)
    place = jnp.clip(num_filled - 1, 0, ids.shape[1] - 1)
    return jnp.where(num_filled > 0, take_in_rows(ids, place[:, None])[:, 0], HOLE)


def by_row(
    values: AnyArray, geometry: ModelGeometry, granularity: OwnershipGranularity
) -> AnyArray:
    """Returns the values of each row's owner. Shape [owner, ...] to [row, ...]."""
    is_same = granularity is OwnershipGranularity.LAYER  # an owner a row
    return values if is_same else values[geometry.owner_by_row(granularity)]


def retire_nothing(ownership: Ownership) -> Retirement:
    """Returns a retirement that frees nothing."""
    shape = ownership.generation.shape
    return Retirement(
        is_released=jnp.zeros(shape, bool),
        num_retired=jnp.zeros(shape[0], jnp.int32),
        physical_blocks_released=jnp.int32(0),
    )


def _count_references(
    ownership: Ownership, physical_blocks: AnyArray, geometry: ModelGeometry
) -> tuple[Int32[Array, "owner physical"], Result]:
    """Counts each listed block; refuses IDs out of range and blocks listed twice."""
    if physical_blocks.shape[1] == 0:
        return jnp.zeros(ownership.references.shape[1:], jnp.int32), ok_result()
    num_physical = ownership.num_physical_blocks
    layers = geometry.layer_by_owner(ownership.granularity)
    out_of_range = (physical_blocks < HOLE) | (physical_blocks >= num_physical)
    num_owners = physical_blocks.shape[0]
    owners = np.arange(num_owners, dtype=np.int32)
    counts = count_by_id(physical_blocks, True, owners, (num_owners, num_physical))
    result = first_fault(
        fault_at(
            out_of_range,
            ResultCode.BLOCK_OUT_OF_RANGE,
            layer_by_row=layers,
            block=physical_blocks,
        ),
        _block_fault(counts > 1, ResultCode.DOUBLE_RELEASE, ownership, geometry),
    )
    return counts, result


def _block_fault(
    mask: AnyArray, code: ResultCode, ownership: Ownership, geometry: ModelGeometry
) -> Result:
    return fault_at(
        mask,
        code,
        layer_by_row=geometry.layer_by_owner(ownership.granularity),
        block=np.arange(ownership.num_physical_blocks, dtype=np.int32),
    )


def _stale_fault(
    ownership: Ownership, physical_blocks: AnyArray, generation: AnyArray, geometry: ModelGeometry
) -> Result:
    current = generation_of(ownership, as_physical_blocks(physical_blocks))
    return fault_at(
        (current != generation) & (current != HOLE),
        ResultCode.STALE_BLOCK,
        layer_by_row=geometry.layer_by_owner(ownership.granularity),
        block=physical_blocks,
    )


def _drop(
    ownership: Ownership, references: Array, is_retired: Array
) -> tuple[Ownership, Retirement]:
    """Replaces the counts, and measures and marks what that freed."""
    is_released = ~ownership.is_free & jnp.all(references == 0, axis=0)
    return _retire(ownership, references, is_released, count_true(is_retired))


def _retire(
    ownership: Ownership, references: Array, is_released: Array, num_retired: Array
) -> tuple[Ownership, Retirement]:
    generation = ownership.generation + is_released.astype(jnp.int32)
    retirement = Retirement(
        is_released=is_released,
        num_retired=num_retired,
        physical_blocks_released=jnp.sum(count_true(is_released), dtype=jnp.int32),
    )
    return replace(ownership, references=references, generation=generation), retirement
