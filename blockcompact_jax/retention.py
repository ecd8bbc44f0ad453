"""Retention: drop what is no longer wanted, by rewriting tables where that is exact.

Per KV-cache group the plan is one of: one shared table (only where every layer keeps the same
ordered slots), one table per layer, an explicit union, or moving bytes. Under jit all share one
structure; on the host `resolve` names which one it is.
"""

# pyright: reportUnknownMemberType=false

import enum
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int32

from .geometry import ModelGeometry, TableSupport
from .ids import (
    HOLE,
    AnyArray,
    LogicalBlocks,
    PhysicalBlocks,
    ResidentSlots,
    as_logical_blocks,
    as_physical_blocks,
    as_resident_slots,
)
from .masks import count_true, place_mask
from .operations import PURE_OPERATIONS, PlanOperations
from .residency import Residency
from .selection import Selection


class RetentionKind(enum.IntEnum):
    """How a group's retention is carried out.

    UNION keeps blocks that some layer did not want: attention is over more than was selected, and
    the kind says so.
    """

    SHARED_TABLE = 0
    LAYER_TABLES = 1
    UNION = 2
    BYTE_MOVE = 3


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """What the engine can read and what is allowed. Frozen and hashable: a static argument.

    Attributes:
        tables: Whether the engine reads one table per group or one per layer.
        allow_union: Where layers differ and tables are shared, keep the union of their slots
            instead of moving bytes.
    """

    tables: TableSupport
    allow_union: bool = False


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RetentionPlan:
    """The slots each layer keeps and the tables they give, in stable order.

    Attributes:
        kind: `RetentionKind` per group, groups in `ModelGeometry.full_groups` order.
        keep_slots: Slots to keep, ascending. HOLE padded.
        num_keep: Filled places of `keep_slots`.
        logical_by_slot: The new logical lists.
        physical_by_slot: The new tables. After a byte move: the first slots of the old table.
        move_from: Physical block whose bytes new slot j needs; HOLE where slot j stays. Only with
            BYTE_MOVE. All moves of a layer happen at once: every read before every write.
        move_to: Physical block of new slot j, HOLE where `move_from` is.
        num_moves: Blocks to move per row.
        num_unwanted: Blocks kept per row that the layer did not want (UNION only).
        table_entries_written: Entries rewritten over all groups. Shape ().
    """

    kind: Int32[Array, " group"]
    keep_slots: Int32[ResidentSlots, "row slot"]
    num_keep: Int32[Array, " row"]
    logical_by_slot: Int32[LogicalBlocks, "row slot"]
    physical_by_slot: Int32[PhysicalBlocks, "row slot"]
    move_from: Int32[PhysicalBlocks, "row slot"]
    move_to: Int32[PhysicalBlocks, "row slot"]
    num_moves: Int32[Array, " row"]
    num_unwanted: Int32[Array, " row"]
    table_entries_written: Int32[Array, ""]


@dataclass(frozen=True, kw_only=True)
class SharedTableRemap:
    """One new table for all layers of a group.

    Attributes:
        group: KV-cache group ID.
        table: The new table, int32 [keep], physical blocks.
        is_union: True where some layer did not want all of it.
    """

    group: int
    table: np.ndarray
    is_union: bool


@dataclass(frozen=True, kw_only=True)
class LayerTableRemap:
    """One new table per layer of a group.

    Attributes:
        group: KV-cache group ID.
        tables: Decoder layer ID → int32 [keep], physical blocks.
    """

    group: int
    tables: dict[int, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class ExistingByteMovePlan:
    """Bytes to move, per layer of a group, into the first slots of the table that exists.

    Attributes:
        group: KV-cache group ID.
        moves: Decoder layer ID → int32 [move, 2], physical (from, to); reads before writes.
        num_keep: Decoder layer ID → valid slots afterwards.
    """

    group: int
    moves: dict[int, np.ndarray]
    num_keep: dict[int, int]


GroupRetention = SharedTableRemap | LayerTableRemap | ExistingByteMovePlan


def plan_retention(
    residency: Residency,
    selection: Selection,
    *,
    geometry: ModelGeometry,
    policy: RetentionPolicy,
    is_due: AnyArray | bool = True,
    operations: PlanOperations = PURE_OPERATIONS,
) -> RetentionPlan:
    """Plans which resident slots each layer keeps: held, after the upload, and wanted.

    Args:
        residency: State after the upload was committed.
        selection: What each layer wants.
        geometry: Static facts.
        policy: Static policy.
        is_due: False keeps every slot (retaining now would not pay). Shape ().
        operations: What compares and orders the lists (static); the result is the same.
    """
    slots = jnp.arange(residency.max_slots, dtype=jnp.int32)
    is_valid = place_mask(residency.num_valid, residency.max_slots)
    is_want = place_mask(selection.num_want, selection.want.shape[1])
    is_wanted = operations.find_members(
        residency.logical_by_slot,
        is_valid,
        selection.want,
        is_want,
        bound=selection.max_blocks,
        max_ids=selection.max_blocks,
    ).is_member
    is_exact = jnp.where(jnp.asarray(is_due), is_wanted, is_valid)
    kind, is_kept = _choose_kind(is_exact, is_valid, residency, geometry, policy)
    num_keep = count_true(is_kept)
    keep_slots, logical, remapped = operations.keep_places(
        is_kept, residency.logical_by_slot, residency.physical_by_slot
    )
    is_filled, is_changed = keep_slots >= 0, keep_slots != slots
    physical = remapped
    moves: dict[str, Any] = _unmoved(keep_slots, policy)
    if not moves:
        kind_by_row = kind[geometry.group_place_by_row][:, None]
        is_byte_move = (kind_by_row == RetentionKind.BYTE_MOVE) & is_filled
        is_moved = is_byte_move & is_changed
        physical = jnp.where(is_byte_move, residency.physical_by_slot, remapped)
        moves = {
            "move_from": jnp.where(is_moved, remapped, HOLE),
            "move_to": jnp.where(is_moved, physical, HOLE),
            "num_moves": count_true(is_moved),
            "num_unwanted": count_true(is_kept & ~is_exact),
        }
    return RetentionPlan(
        kind=kind,
        keep_slots=as_resident_slots(keep_slots),
        num_keep=num_keep,
        logical_by_slot=as_logical_blocks(logical),
        physical_by_slot=as_physical_blocks(physical),
        table_entries_written=_count_entries(kind, is_filled, is_changed, geometry),
        **moves,
    )


def kind_of_all_slots(
    residency: Residency, *, geometry: ModelGeometry, policy: RetentionPolicy
) -> Int32[Array, " group"]:
    """Returns each group's `RetentionKind` where every slot is kept."""
    is_valid = place_mask(residency.num_valid, residency.max_slots)
    return _choose_kind(is_valid, is_valid, residency, geometry, policy)[0]


def keep_every_slot(residency: Residency, kind: Int32[Array, " group"]) -> RetentionPlan:
    """Returns a plan that keeps a residency exactly as it is.

    Args:
        residency: What stays.
        kind: `RetentionKind` of each group.
    """
    is_valid = place_mask(residency.num_valid, residency.max_slots)
    slots = jnp.arange(residency.max_slots, dtype=jnp.int32)
    holes = as_physical_blocks(jnp.full(is_valid.shape, HOLE, jnp.int32))
    zeros = jnp.zeros(is_valid.shape[:1], jnp.int32)
    return RetentionPlan(
        kind=kind,
        keep_slots=as_resident_slots(jnp.where(is_valid, slots, HOLE)),
        num_keep=jnp.asarray(residency.num_valid),
        logical_by_slot=residency.logical_by_slot,
        physical_by_slot=residency.physical_by_slot,
        move_from=holes,
        move_to=holes,
        num_moves=zeros,
        num_unwanted=zeros,
        table_entries_written=jnp.int32(0),
    )


def without_lists(plan: RetentionPlan, policy: RetentionPolicy) -> RetentionPlan:
    """Leaves out what `with_lists` knows; no array is given out twice."""
    return replace(plan, **dict.fromkeys((*_RESIDENT, *_unmoved(plan.keep_slots, policy))))


def with_lists(plan: RetentionPlan, residency: Residency, policy: RetentionPolicy) -> RetentionPlan:
    """Completes a plan from the residency that it leaves; what moves nothing is constant."""
    resident: dict[str, Any] = {name: getattr(residency, of) for name, of in _RESIDENT.items()}
    return replace(plan, **resident, **_unmoved(plan.keep_slots, policy))


_RESIDENT = {
    "num_keep": "num_valid",
    "logical_by_slot": "logical_by_slot",
    "physical_by_slot": "physical_by_slot",
}


def _unmoved(keep_slots: Array, policy: RetentionPolicy) -> dict[str, Any]:
    """Returns the fields that tables per layer make constant: nothing moves, no union is kept."""
    if policy.tables is not TableSupport.LAYER:
        return {}
    holes = np.full(keep_slots.shape, HOLE, np.int32)
    zeros = np.zeros(keep_slots.shape[:1], np.int32)
    return {"move_from": holes, "move_to": holes, "num_moves": zeros, "num_unwanted": zeros}


def resolve(plan: RetentionPlan, geometry: ModelGeometry) -> tuple[GroupRetention, ...]:
    """Names, on the host, what each group has to carry out.

    Args:
        plan: One request's plan.
        geometry: Static facts.

    Returns:
        One entry per group with a full-attention layer, in `ModelGeometry.full_groups` order.
    """
    num_keep = np.asarray(plan.num_keep)
    tables = np.asarray(plan.physical_by_slot)
    moves = np.stack([np.asarray(plan.move_from), np.asarray(plan.move_to)], axis=-1)
    resolved: list[GroupRetention] = []
    for place, group in enumerate(geometry.full_groups):
        rows = np.flatnonzero(geometry.group_place_by_row == place)
        layers = [int(geometry.layer_by_row[row]) for row in rows]
        kind = RetentionKind(int(np.asarray(plan.kind)[place]))
        match kind:
            case RetentionKind.SHARED_TABLE | RetentionKind.UNION:
                first = rows[0]
                table = tables[first, : num_keep[first]]
                is_union = kind is RetentionKind.UNION
                resolved.append(SharedTableRemap(group=group, table=table, is_union=is_union))
            case RetentionKind.LAYER_TABLES:
                by_layer = {
                    layer: tables[row, : num_keep[row]]
                    for layer, row in zip(layers, rows, strict=True)
                }
                resolved.append(LayerTableRemap(group=group, tables=by_layer))
            case RetentionKind.BYTE_MOVE:
                resolved.append(
                    ExistingByteMovePlan(
                        group=group,
                        moves={
                            layer: moves[row][moves[row, :, 0] != HOLE]
                            for layer, row in zip(layers, rows, strict=True)
                        },
                        num_keep={
                            layer: int(num_keep[row])
                            for layer, row in zip(layers, rows, strict=True)
                        },
                    )
                )
    return tuple(resolved)


def _choose_kind(
    is_exact: Bool[Array, "row slot"],
    is_valid: Bool[Array, "row slot"],
    residency: Residency,
    geometry: ModelGeometry,
    policy: RetentionPolicy,
) -> tuple[Int32[Array, " group"], Bool[Array, "row slot"]]:
    """Returns each group's kind and the slots its rows keep.

    A shared table needs equal ordered slots in every row of the group, and the same physical block
    behind each of them.
    """
    num_groups = len(geometry.full_groups)
    place = geometry.group_place_by_row
    first_row = np.asarray([np.flatnonzero(place == g)[0] for g in range(num_groups)], np.int32)
    first_of_row = first_row[place] if num_groups else place
    physical = jnp.asarray(residency.physical_by_slot)
    is_same_block = (physical == physical[first_of_row]) & (is_valid == is_valid[first_of_row])

    def agrees(is_kept: Array) -> Array:
        is_same = (is_kept == is_kept[first_of_row]) & (~is_kept | is_same_block)
        return _all_rows(jnp.all(is_same, axis=1), geometry)

    is_shareable = agrees(is_exact)
    if policy.tables is TableSupport.LAYER:
        otherwise = jnp.int32(RetentionKind.LAYER_TABLES)
        return jnp.where(is_shareable, RetentionKind.SHARED_TABLE, otherwise), is_exact
    if not policy.allow_union:
        otherwise = jnp.int32(RetentionKind.BYTE_MOVE)
        return jnp.where(is_shareable, RetentionKind.SHARED_TABLE, otherwise), is_exact
    groups = np.arange(num_groups, dtype=np.int32)
    is_member = (place[None, :] == groups[:, None])[:, :, None]
    is_union = jnp.any(is_exact[None] & is_member, axis=1)[place]
    has_union = agrees(is_union)
    kind = jnp.where(
        is_shareable,
        jnp.int32(RetentionKind.SHARED_TABLE),
        jnp.where(has_union, jnp.int32(RetentionKind.UNION), jnp.int32(RetentionKind.BYTE_MOVE)),
    )
    takes_union = (kind == RetentionKind.UNION)[place][:, None]
    return kind, jnp.where(takes_union, is_union, is_exact)


def _all_rows(is_row: Bool[Array, " row"], geometry: ModelGeometry) -> Bool[Array, " group"]:
    groups = np.arange(len(geometry.full_groups), dtype=np.int32)
    is_other = geometry.group_place_by_row[None, :] != groups[:, None]
    return jnp.all(is_row[None, :] | is_other, axis=1)


def _count_entries(
    kind: Int32[Array, " group"],
    is_filled: Bool[Array, "row slot"],
    is_changed: Bool[Array, "row slot"],
    geometry: ModelGeometry,
) -> Int32[Array, ""]:
    """Counts changed table entries: once for a shared table, per layer for layer tables."""
    changed = count_true(is_filled & is_changed)
    total = jnp.int32(0)
    for place in range(len(geometry.full_groups)):
        rows = np.flatnonzero(geometry.group_place_by_row == place)
        shared, per_layer = changed[rows[0]], jnp.sum(changed[rows])
        is_shared = (kind[place] == RetentionKind.SHARED_TABLE) | (
            kind[place] == RetentionKind.UNION
        )
        written = jnp.where(is_shared, shared, per_layer)
        total = total + jnp.where(kind[place] == RetentionKind.BYTE_MOVE, 0, written)
    return total
