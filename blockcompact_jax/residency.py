"""What is resident on the accelerator: per layer, an ordered list of logical and physical blocks.

Slot order is stable: uploads and graduates append, retention keeps the relative order. The recent
tail, the partial block and draft tokens are resident too but never in these lists.
"""

# pyright: reportUnknownMemberType=false

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int32

from .checks import Check, first_failing
from .errors import CompactionError, Result, ResultCode, fault_at, first_fault
from .geometry import ModelGeometry
from .ids import (
    HOLE,
    AnyArray,
    LogicalBlocks,
    PhysicalBlocks,
    as_logical_blocks,
    as_physical_blocks,
)
from .masks import choose, count_true, place_mask, take_in_rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Revisions:
    """Which state a plan was made from, and which selection it publishes. All shape ().

    Attributes:
        request_epoch: Counts admissions of the request.
        pool_generation: Counts committed uploads.
        map_revision: Counts changes of the slot lists.
        selection_revision: Counts published selections, uploads or not; an array of NumPy where
            `find_zero_delta` found it on the host.
    """

    request_epoch: Int32[Array, ""]
    pool_generation: Int32[Array, ""]
    map_revision: Int32[Array, ""]
    selection_revision: Int32[AnyArray, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Residency:
    """One request's ordered resident lists, one row per full-attention layer.

    Invariants: the first `num_valid` slots of a row hold distinct logical blocks and their physical
    blocks, all later slots are HOLE.

    Attributes:
        revisions: State counters; `selection_revision` is the last published one.
        logical_by_slot: Logical block of each resident slot.
        physical_by_slot: Physical block of each resident slot.
        num_valid: Filled slots per row.
        block_tokens: Tokens per block (static).
    """

    revisions: Revisions
    logical_by_slot: Int32[LogicalBlocks, "row slot"]
    physical_by_slot: Int32[PhysicalBlocks, "row slot"]
    num_valid: Int32[Array, " row"]
    block_tokens: int = field(metadata={"static": True})

    @property
    def max_slots(self) -> int:
        """Static slot capacity per row."""
        return self.logical_by_slot.shape[-1]


def empty_residency(
    geometry: ModelGeometry, *, max_slots: int, request_epoch: int = 0, pool_generation: int = 0
) -> Residency:
    """Returns a residency that holds nothing.

    Args:
        geometry: Static facts; one row per full-attention layer.
        max_slots: Static slot capacity per row.
        request_epoch: Admission count of the request.
        pool_generation: Generation to start from.
    """
    holes = jnp.full((geometry.num_rows, max_slots), HOLE, jnp.int32)
    revisions = Revisions(
        request_epoch=jnp.int32(request_epoch),
        pool_generation=jnp.int32(pool_generation),
        map_revision=jnp.int32(0),
        selection_revision=jnp.int32(0),
    )
    return Residency(
        revisions=revisions,
        logical_by_slot=as_logical_blocks(holes),
        physical_by_slot=as_physical_blocks(holes),
        num_valid=jnp.zeros((geometry.num_rows,), jnp.int32),
        block_tokens=geometry.block_tokens,
    )


def commit_upload(
    residency: Residency,
    basis: Revisions,
    logical_blocks: Int32[LogicalBlocks, "row upload"],
    physical_blocks: Int32[PhysicalBlocks, "row upload"],
    num_upload: Int32[AnyArray, " row"],
    *,
    is_full: AnyArray,
    geometry: ModelGeometry,
) -> tuple[Residency, Result]:
    """Appends uploaded blocks after all their bytes have arrived.

    A full plan replaces the lists. With nothing uploaded the generation stays and only the
    selection revision advances. On a fault the residency is returned unchanged.

    Args:
        residency: The state the plan was made from.
        basis: The plan's revisions; must match the residency's.
        logical_blocks: Uploaded blocks, ascending. Shape [row, upload].
        physical_blocks: Where they lie. Shape [row, upload].
        num_upload: Filled places per row.
        is_full: Whether the plan replaces everything held. Shape ().
        geometry: Static facts.
    """
    start = jnp.where(is_full, 0, residency.num_valid)
    end = start + num_upload
    result = first_fault(
        _stale_fault(residency.revisions, basis),
        first_failing(
            Check(end > residency.max_slots, ResultCode.RESIDENCY_FULL, end),
            layer_by_row=geometry.layer_by_row,
        ),
    )
    has_upload = jnp.any(num_upload > 0)
    is_changed = has_upload | is_full
    old = residency.revisions
    committed = Residency(
        revisions=Revisions(
            request_epoch=old.request_epoch,
            pool_generation=old.pool_generation + has_upload.astype(jnp.int32),
            map_revision=old.map_revision + is_changed.astype(jnp.int32),
            selection_revision=jnp.asarray(basis.selection_revision, jnp.int32),
        ),
        logical_by_slot=as_logical_blocks(
            _append(residency.logical_by_slot, start, logical_blocks, end)
        ),
        physical_by_slot=as_physical_blocks(
            _append(residency.physical_by_slot, start, physical_blocks, end)
        ),
        num_valid=end,
        block_tokens=residency.block_tokens,
    )
    return choose(result.is_ok, committed, residency), result


def graduate(
    residency: Residency,
    logical_blocks: Int32[LogicalBlocks, "row block"],
    physical_blocks: Int32[PhysicalBlocks, "row block"],
    *,
    geometry: ModelGeometry,
) -> tuple[Residency, Result]:
    """Appends blocks that leave the recent tail. Their bytes are resident already: no upload.

    Args:
        residency: The current state.
        logical_blocks: Blocks per row, HOLE where a row graduates fewer; filled places first.
        physical_blocks: Where their bytes lie. HOLE at the same places.
        geometry: Static facts.

    Returns:
        The new residency with `map_revision` advanced, and the first fault: a block already held
        or repeated, an unequal HOLE, or no free slot. On a fault the residency is unchanged.
    """
    logical = jnp.asarray(logical_blocks)
    is_given = logical >= 0
    num_given = count_true(is_given)
    is_held = jnp.any(residency.logical_by_slot[:, :, None] == logical[:, None, :], axis=1)
    num_places = logical.shape[1]
    is_earlier = np.tri(num_places, k=-1, dtype=bool)
    is_repeated = jnp.any((logical[:, None, :] == logical[:, :, None]) & is_earlier, axis=2)
    is_prefix = is_given == place_mask(num_given, num_places)
    end = residency.num_valid + num_given
    layers = geometry.layer_by_row
    result = first_fault(
        fault_at(
            (logical < HOLE) | (is_given != (physical_blocks >= 0)) | ~is_prefix,
            ResultCode.BLOCK_OUT_OF_RANGE,
            layer_by_row=layers,
            block=logical,
        ),
        fault_at(
            is_given & (is_held | is_repeated),
            ResultCode.DUPLICATE_BLOCK,
            layer_by_row=layers,
            block=logical,
        ),
        fault_at(
            end > residency.max_slots, ResultCode.RESIDENCY_FULL, layer_by_row=layers, block=end
        ),
    )
    old = residency.revisions
    start = residency.num_valid
    graduated = Residency(
        revisions=Revisions(
            request_epoch=old.request_epoch,
            pool_generation=old.pool_generation,
            map_revision=old.map_revision + jnp.any(is_given).astype(jnp.int32),
            selection_revision=old.selection_revision,
        ),
        logical_by_slot=as_logical_blocks(_append(residency.logical_by_slot, start, logical, end)),
        physical_by_slot=as_physical_blocks(
            _append(residency.physical_by_slot, start, physical_blocks, end)
        ),
        num_valid=end,
        block_tokens=residency.block_tokens,
    )
    return choose(result.is_ok, graduated, residency), result


def replace_slots(
    residency: Residency,
    logical_by_slot: Int32[LogicalBlocks, "row slot"],
    physical_by_slot: Int32[PhysicalBlocks, "row slot"],
    num_valid: Int32[AnyArray, " row"],
) -> Residency:
    """Replaces the lists by retained ones; `map_revision` advances only where a slot is dropped.

    Args:
        residency: The current state.
        logical_by_slot: Kept blocks in stable order, HOLE padded.
        physical_by_slot: Where they lie now.
        num_valid: Filled slots per row.
    """
    old = residency.revisions
    is_changed = jnp.any(jnp.asarray(num_valid) != residency.num_valid)
    return Residency(
        revisions=Revisions(
            request_epoch=jnp.asarray(old.request_epoch),
            pool_generation=jnp.asarray(old.pool_generation),
            map_revision=old.map_revision + is_changed.astype(jnp.int32),
            selection_revision=jnp.asarray(old.selection_revision),
        ),
        logical_by_slot=logical_by_slot,
        physical_by_slot=physical_by_slot,
        num_valid=jnp.asarray(num_valid),
        block_tokens=residency.block_tokens,
    )


def check_fits_geometry(residency: Residency, geometry: ModelGeometry) -> None:
    """Checks the static facts of a residency; jitted code may call it.

    Args:
        residency: Of one request.
        geometry: Static facts.

    Raises:
        CompactionError: If block sizes or row counts differ.
    """
    sizes = (residency.block_tokens, geometry.block_tokens)
    if sizes[0] != sizes[1]:
        raise CompactionError(
            f"`block_tokens` is {sizes[0]} in the residency and {sizes[1]} in the geometry; they "
            "must be equal."
        )
    rows = (residency.logical_by_slot.shape[0], geometry.num_rows)
    if rows[0] != rows[1]:
        raise CompactionError(
            f"The residency has {rows[0]} rows and the geometry {rows[1]} full-attention layers; "
            "they must be equal."
        )


def publish_selection(residency: Residency, selection_revision: Int32[AnyArray, ""]) -> Residency:
    """Records a selection that changes no list; every other array stays the one it is.

    Args:
        residency: The current state.
        selection_revision: Number of that selection. Shape ().
    """
    old = residency.revisions
    # Not `replace`: that takes several times as long, in a call that does nothing else.
    revisions = Revisions(
        request_epoch=old.request_epoch,
        pool_generation=old.pool_generation,
        map_revision=old.map_revision,
        selection_revision=selection_revision,
    )
    return Residency(
        revisions=revisions,
        logical_by_slot=residency.logical_by_slot,
        physical_by_slot=residency.physical_by_slot,
        num_valid=residency.num_valid,
        block_tokens=residency.block_tokens,
    )


def check_residency(residency: Residency, geometry: ModelGeometry, *, num_blocks: int) -> None:
    """Checks a residency's values on the host.

    Args:
        residency: One request's residency.
        geometry: Static facts.
        num_blocks: Logical blocks of the sequence.

    Raises:
        CompactionError: Naming the layer, if a count, a block, a duplicate or a HOLE is wrong.
    """
    logical = np.asarray(residency.logical_by_slot)
    physical = np.asarray(residency.physical_by_slot)
    counts = np.asarray(residency.num_valid)
    if logical.shape[0] != geometry.num_rows or logical.shape != physical.shape:
        raise CompactionError(
            f"`residency` has slot lists of shape {logical.shape} and {physical.shape}; expected "
            f"{geometry.num_rows} rows of equal length, one per full-attention layer."
        )
    for row, layer in enumerate(geometry.full_layers):
        count = int(counts[row])
        if not 0 <= count <= logical.shape[1]:
            raise CompactionError(
                f"`num_valid` of layer {layer} is {count}; give 0 … {logical.shape[1]}."
            )
        held, blocks = logical[row, :count], physical[row, :count]
        if (held < 0).any() or (held >= num_blocks).any() or (blocks < 0).any():
            raise CompactionError(
                f"The first {count} slots of layer {layer} hold a HOLE or a block outside "
                f"[0, {num_blocks}); fill them with the sequence's own blocks."
            )
        for name, values in (("logical", held), ("physical", blocks)):
            if len(np.unique(values)) != count:
                raise CompactionError(
                    f"Layer {layer} holds a {name} block twice; each block has one slot."
                )
        if (logical[row, count:] != HOLE).any() or (physical[row, count:] != HOLE).any():
            raise CompactionError(
                f"Slots past `num_valid` {count} of layer {layer} are not HOLE; clear them."
            )


def _append(
    old: AnyArray, start: AnyArray, added: AnyArray, end: AnyArray
) -> Int32[Array, "row slot"]:
    """Keeps slots before `start`, fills [start, end) from `added`, clears the rest."""
    slots = jnp.arange(old.shape[1], dtype=jnp.int32)
    num_added = added.shape[1]
    if num_added == 0 or old.shape[1] == 0:
        return jnp.where(slots < jnp.asarray(start)[:, None], old, HOLE)
    place = jnp.clip(slots - jnp.asarray(start)[:, None], 0, num_added - 1)
    new = take_in_rows(added, place)
    kept = jnp.where(slots < jnp.asarray(start)[:, None], old, new)
    return jnp.where(slots < jnp.asarray(end)[:, None], kept, HOLE)


def fits_basis(residency: Residency, basis: Revisions) -> Bool[Array, ""]:
    """Returns whether a plan of this basis was made from this residency."""
    return ~jnp.any(_differing(residency.revisions, basis))


def _differing(current: Revisions, basis: Revisions) -> Bool[Array, "4"]:
    pairs = (
        (current.request_epoch, basis.request_epoch),
        (current.pool_generation, basis.pool_generation),
        (current.map_revision, basis.map_revision),
        (current.selection_revision + 1, basis.selection_revision),
    )
    return jnp.stack([jnp.asarray(a != b) for a, b in pairs])


def _stale_fault(current: Revisions, basis: Revisions) -> Result:
    revisions = (
        basis.request_epoch,
        basis.pool_generation,
        basis.map_revision,
        basis.selection_revision,
    )
    values = jnp.stack([jnp.asarray(revision, jnp.int32) for revision in revisions])
    return fault_at(
        _differing(current, basis),
        ResultCode.STALE_PLAN,
        layer_by_row=np.full(4, HOLE, np.int32),
        block=values,
    )
