"""Selection against residency: which blocks each layer uploads.

Set arithmetic runs on place maps, O(layers x blocks). Only blocks whose KV exists are uploaded, no
wanted block is ever dropped, and the final order is ascending logical block.
"""

# pyright: reportUnknownMemberType=false

from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int32

from .checks import Check, first_failing
from .errors import CompactionError, Result, ResultCode, first_fault
from .geometry import ModelGeometry
from .ids import HOLE, AnyArray, LogicalBlocks, as_logical_blocks
from .masks import choose, count_true, place_mask, take_in_rows
from .operations import PURE_OPERATIONS, PlanOperations
from .residency import Residency, Revisions
from .selection import Selection


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class BlockDiffPlan:
    """What each layer uploads to get from the residency to the selection.

    On a fault nothing is uploaded.

    Attributes:
        basis: Revisions of the residency the plan was made from, with the new selection revision.
        is_full: Whether everything held is replaced. Shape ().
        upload_logical_blocks: Blocks to upload, ascending. HOLE padded.
        num_upload: Filled places of `upload_logical_blocks`: num_new + num_pad.
        num_new: Wanted blocks to upload.
        num_pad: Ranked-tail blocks that fill up to the common count.
        num_truncated: Wanted blocks that a delta plan would have cut; more than 0 only in a full
            plan, which cuts nothing.
        common_new_slots: Equal upload count of the group's layers, for shared tables; the largest
            count where tables are per layer. Groups in `ModelGeometry.full_groups` order.
        result: The first fault.
    """

    basis: Revisions
    is_full: Bool[Array, ""]
    upload_logical_blocks: Int32[LogicalBlocks, "row max_upload"]
    num_upload: Int32[Array, " row"]
    num_new: Int32[Array, " row"]
    num_pad: Int32[Array, " row"]
    num_truncated: Int32[Array, " row"]
    common_new_slots: Int32[Array, " group"]
    result: Result


def diff(
    selection: Selection,
    residency: Residency,
    *,
    geometry: ModelGeometry,
    max_upload: int,
    common_slots: bool,
    force_full: AnyArray | bool = False,
    operations: PlanOperations = PURE_OPERATIONS,
) -> BlockDiffPlan:
    """Plans the upload of the wanted blocks that are not held.

    Args:
        selection: What each layer wants; its fault, if any, is handed on.
        residency: What each layer holds.
        geometry: Static facts.
        max_upload: Static upload capacity per layer.
        common_slots: True for shared-table engines: the layers of a group upload equally many
            blocks, filled up from the ranked tail. False: exact counts, no padding.
        force_full: Replace everything held. Shape ().
        operations: What compares and orders the lists (static); the result is the same.

    Raises:
        CompactionError: If block sizes or row counts differ (at trace time).
    """
    _check_static(selection, residency, geometry)
    max_want, max_blocks = selection.want.shape[1], selection.max_blocks
    is_want = place_mask(selection.num_want, max_want)
    is_tail = place_mask(selection.num_ranked_tail, selection.ranked_tail.shape[1])
    is_listed = jnp.concatenate([is_want, is_tail], axis=1)
    listed = jnp.concatenate([selection.want, selection.ranked_tail], axis=1)
    is_valid_slot = place_mask(residency.num_valid, residency.max_slots)
    held = residency.logical_by_slot
    members = operations.find_members(
        listed,
        is_listed,
        held,
        is_valid_slot,
        bound=jnp.minimum(selection.num_candidate_blocks, max_blocks),
        max_ids=max_blocks,
    )
    fresh = is_listed & ~members.is_member
    delta = _fill(fresh[:, :max_want], fresh[:, max_want:], geometry, common_slots)
    full = _fill(is_want, is_tail, geometry, common_slots)
    is_full = jnp.any(delta.num_missing > 0) | jnp.asarray(force_full)
    chosen = choose(is_full, full, delta)
    fault = first_failing(
        _count_check(selection.num_want, max_want),
        _count_check(selection.num_ranked_tail, selection.ranked_tail.shape[1]),
        _count_check(residency.num_valid, residency.max_slots),
        *_list_checks(listed, members.outside_id, members.repeated_id),
        *_list_checks(held, members.outside_other, members.repeated_other),
        *_capacity_checks(chosen, max_upload),
        layer_by_row=geometry.layer_by_row,
    )
    result = first_fault(selection.result, fault)
    num_new = jnp.where(result.is_ok, chosen.num_new, 0)
    num_pad, num_truncated, num_upload = delta.num_pad, delta.num_truncated, num_new
    if common_slots:
        num_pad = jnp.where(result.is_ok, chosen.num_pad, 0)
        num_truncated = jnp.where(result.is_ok, delta.num_truncated, 0)
        num_upload = num_new + num_pad
    uploaded = operations.sort_ids(
        listed,
        chosen.is_uploaded & result.is_ok,
        max_ids=max_blocks,
        capacity=max_upload,
    )
    return BlockDiffPlan(
        basis=_basis(residency, selection),
        is_full=is_full & result.is_ok,
        upload_logical_blocks=as_logical_blocks(uploaded),
        num_upload=num_upload,
        num_new=num_new,
        num_pad=cast(Array, num_pad),
        num_truncated=cast(Array, num_truncated),
        common_new_slots=_group_max(num_upload, geometry),
        result=result,
    )


def _basis(residency: Residency, selection: Selection) -> Revisions:
    """Returns the revisions that the plan starts from, and the selection's own."""
    old = residency.revisions
    return Revisions(
        request_epoch=jnp.asarray(old.request_epoch),
        pool_generation=jnp.asarray(old.pool_generation),
        map_revision=jnp.asarray(old.map_revision),
        selection_revision=selection.selection_revision,
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class _Filled:
    """An upload set per row: wanted blocks plus padding up to the group's common count."""

    is_uploaded: Bool[Array, "row listed"]
    num_new: Int32[Array, " row"]
    num_pad: Int32[AnyArray, " row"]
    num_missing: Int32[AnyArray, " row"]
    num_truncated: Int32[AnyArray, " row"]


def _fill(
    is_new: Bool[Array, "row want"],
    is_spare: Bool[Array, "row tail"],
    geometry: ModelGeometry,
    common_slots: bool,
) -> _Filled:
    num_new = count_true(is_new)
    if not common_slots:
        none = np.zeros(num_new.shape, np.int32)
        is_uploaded = jnp.concatenate([is_new, jnp.zeros_like(is_spare)], axis=1)
        return _Filled(
            is_uploaded=is_uploaded,
            num_new=num_new,
            num_pad=none,
            num_missing=none,
            num_truncated=none,
        )
    place = geometry.group_place_by_row
    num_wanted_pad = _group_max(num_new, geometry)[place] - num_new
    spare_rank = jnp.cumsum(is_spare, axis=1, dtype=jnp.int32)
    is_pad = is_spare & (spare_rank <= num_wanted_pad[:, None])
    num_pad = count_true(is_pad)
    num_available = num_new + count_true(is_spare)
    shortest = -_group_max(-num_available, geometry)[place]
    return _Filled(
        is_uploaded=jnp.concatenate([is_new, is_pad], axis=1),
        num_new=num_new,
        num_pad=num_pad,
        num_missing=num_wanted_pad - num_pad,
        num_truncated=jnp.maximum(num_new - shortest, 0),
    )


def _capacity_checks(filled: _Filled, max_upload: int) -> tuple[Check, Check]:
    num_upload = filled.num_new + filled.num_pad
    num_wanted = num_upload + filled.num_missing
    return (
        Check(filled.num_missing > 0, ResultCode.PADDING_EXHAUSTED, num_wanted),
        Check(num_upload > max_upload, ResultCode.UPLOAD_EXCEEDS_CAPACITY, num_upload),
    )


def _group_max(values: Int32[Array, " row"], geometry: ModelGeometry) -> Int32[Array, " group"]:
    """Returns the largest value among each group's rows."""
    groups = np.arange(len(geometry.full_groups), dtype=np.int32)
    is_member = geometry.group_place_by_row[None, :] == groups[:, None]
    smallest = jnp.iinfo(jnp.int32).min
    return jnp.max(jnp.where(is_member, values[None, :], smallest), axis=1, initial=smallest)


def _count_check(count: AnyArray, capacity: int) -> Check:
    return Check((count < 0) | (count > capacity), ResultCode.COUNT_OUT_OF_RANGE, count)


def _list_checks(
    ids: AnyArray, outside: Int32[Array, " row"], repeated: Int32[Array, " row"]
) -> list[Check]:
    """Returns the checks of lists whose first IDs out of range, and repeated, stand there."""
    if ids.shape[1] == 0:
        return []

    def check_of(places: Array, code: ResultCode) -> Check:
        return Check(places != HOLE, code, take_in_rows(ids, jnp.maximum(places, 0)[:, None])[:, 0])

    return [
        check_of(outside, ResultCode.BLOCK_OUT_OF_RANGE),
        check_of(repeated, ResultCode.DUPLICATE_BLOCK),
    ]


def _check_static(selection: Selection, residency: Residency, geometry: ModelGeometry) -> None:
    sizes = (selection.block_tokens, residency.block_tokens, geometry.block_tokens)
    if len(set(sizes)) != 1:
        raise CompactionError(
            f"`block_tokens` is {sizes[0]} in the selection, {sizes[1]} in the residency and "
            f"{sizes[2]} in the geometry; all three must be equal."
        )
    rows = (selection.want.shape[0], residency.logical_by_slot.shape[0], geometry.num_rows)
    if len(set(rows)) != 1:
        raise CompactionError(
            f"The selection has {rows[0]} rows, the residency {rows[1]} and the geometry {rows[2]} "
            "full-attention layers; all three must be equal."
        )
