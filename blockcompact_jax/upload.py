"""The upload plan: one row per block to move, with every ID the transfer needs.

One plan serves the normal verify path and the upload-only resume path. Rows are [layer row, place]
flattened: a layer's rows are neighbours, and unused places are HOLE rows that a transfer skips.
"""

# pyright: reportUnknownMemberType=false

import enum
from dataclasses import dataclass, field
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int32

from .checks import Check, first_failing
from .diff import BlockDiffPlan
from .errors import CompactionError, Result, ResultCode, first_fault
from .geometry import ModelGeometry
from .ids import (
    HOLE,
    AnyArray,
    DestinationBlocks,
    Groups,
    LayerRows,
    Layers,
    LogicalBlocks,
    PhysicalBlocks,
    SourceBlocks,
    as_destination_blocks,
    as_groups,
    as_layer_rows,
    as_layers,
    as_logical_blocks,
    as_physical_blocks,
    as_source_blocks,
)
from .masks import first_true, place_mask, take_in_rows
from .residency import Revisions


class SourceKind(enum.Enum):
    """Where an upload reads: the CPU source blocks, or copies gathered into `[K, N)` first."""

    SOURCE_ONLY = "source_only"
    CPU_COPY = "cpu_copy"


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class UploadPlan:
    """Rows of a transfer, HOLE in unused rows.

    Attributes:
        basis: Revisions of the residency the plan was made from, with the new selection revision.
        layer: Decoder layer ID.
        layer_row: Row of that layer among the full-attention layers.
        group: KV-cache group ID.
        logical_block: The block of the sequence.
        source_block: CPU pool block that holds it.
        cpu_destination_block: CPU compaction-area block it is gathered into first; HOLE with
            SOURCE_ONLY.
        physical_block: Accelerator pool block it goes to.
        valid_tokens: Tokens of the block to write; 0 in unused rows.
        num_rows: Rows in use. Shape ().
        result: The first fault.
        source_kind: What a transfer reads (static).
    """

    basis: Revisions
    layer: Int32[Layers, " upload_row"]
    layer_row: Int32[LayerRows, " upload_row"]
    group: Int32[Groups, " upload_row"]
    logical_block: Int32[LogicalBlocks, " upload_row"]
    source_block: Int32[SourceBlocks, " upload_row"]
    cpu_destination_block: Int32[DestinationBlocks, " upload_row"]
    physical_block: Int32[PhysicalBlocks, " upload_row"]
    valid_tokens: Int32[Array, " upload_row"]
    num_rows: Int32[Array, ""]
    result: Result
    source_kind: SourceKind = field(metadata={"static": True})


def plan_upload(
    plan: BlockDiffPlan,
    destinations: Int32[PhysicalBlocks, "row max_upload"],
    *,
    geometry: ModelGeometry,
    source_kind: SourceKind = SourceKind.SOURCE_ONLY,
    source_by_logical: Int32[SourceBlocks, " max_blocks"] | None = None,
    first_cpu_destination: AnyArray | int = 0,
) -> UploadPlan:
    """Joins each block to upload with its source and its destination.

    Args:
        plan: What each layer uploads; its fault, if any, is handed on.
        destinations: Reserved physical blocks; the first `num_upload` of each row are used.
        geometry: Static facts.
        source_kind: What a transfer reads.
        source_by_logical: CPU pool block of each logical block, HOLE where there is none.
            Identity if None.
        first_cpu_destination: First CPU destination block, with CPU_COPY. Shape ().
    """
    blocks = plan.upload_logical_blocks
    num_rows, max_upload = blocks.shape
    num_used = jnp.clip(plan.num_upload, 0, max_upload)
    is_used = place_mask(num_used, max_upload)
    if source_by_logical is None:
        source: AnyArray = blocks
    else:
        max_blocks = source_by_logical.shape[0]
        found = jnp.asarray(source_by_logical)[jnp.clip(blocks, 0, max_blocks - 1)]
        source = jnp.where(blocks < max_blocks, found, HOLE)
    layers = geometry.layer_by_row
    fault = first_failing(
        _place_check(is_used & (source < 0), ResultCode.SOURCE_MISSING, blocks),
        _place_check(is_used & (destinations < 0), ResultCode.NOT_OWNED, destinations),
        layer_by_row=layers,
    )
    result = first_fault(plan.result, fault)
    is_used = is_used & result.is_ok

    def flatten(values: AnyArray, unused: int = HOLE) -> Array:
        column = jnp.asarray(values, jnp.int32)
        column = column[:, None] if column.ndim == 1 else column
        return jnp.where(is_used, column, unused).reshape(num_rows * max_upload)

    is_used_flat = is_used.reshape(-1)
    if source_kind is SourceKind.CPU_COPY:
        rank = jnp.cumsum(is_used_flat, dtype=jnp.int32) - 1
        copies = jnp.where(is_used_flat, rank + jnp.asarray(first_cpu_destination, jnp.int32), HOLE)
    else:
        copies = np.full(is_used_flat.shape, HOLE, np.int32)
    # Equal columns are one array, see `jit_with_shared_results`.
    rows = np.arange(num_rows)
    layer = flatten(layers)
    logical = flatten(blocks)
    return UploadPlan(
        basis=plan.basis,
        layer=as_layers(layer),
        layer_row=as_layer_rows(layer if np.array_equal(layers, rows) else flatten(rows)),
        group=as_groups(flatten(geometry.group_by_row)),
        logical_block=as_logical_blocks(logical),
        source_block=as_source_blocks(logical if source is blocks else flatten(source)),
        cpu_destination_block=as_destination_blocks(copies),
        physical_block=as_physical_blocks(flatten(destinations)),
        valid_tokens=flatten(np.full(num_rows, geometry.block_tokens), unused=0),
        num_rows=jnp.where(result.is_ok, jnp.sum(num_used, dtype=jnp.int32), 0),
        result=result,
        source_kind=source_kind,
    )


def _place_check(is_faulty: AnyArray, code: ResultCode, blocks: AnyArray) -> Check:
    """Returns the check that no place of a row is faulty; it names the block of the first."""
    place = first_true(is_faulty)
    if blocks.shape[1] == 0:
        return Check(place != HOLE, code, HOLE)
    return Check(place != HOLE, code, take_in_rows(blocks, jnp.maximum(place, 0)[:, None])[:, 0])


def plan_no_upload(basis: Revisions, *, source_kind: SourceKind) -> UploadPlan:
    """Returns a plan without rows, in NumPy arrays: what a selection that moves nothing publishes.

    Args:
        basis: Revisions of the residency, with the new selection revision.
        source_kind: What a transfer would read.
    """
    none = np.empty(0, np.int32)
    zero, hole = (cast(Array, np.int32(value)) for value in (0, HOLE))
    return UploadPlan(
        basis=basis,
        layer=as_layers(none),
        layer_row=as_layer_rows(none),
        group=as_groups(none),
        logical_block=as_logical_blocks(none),
        source_block=as_source_blocks(none),
        cpu_destination_block=as_destination_blocks(none),
        physical_block=as_physical_blocks(none),
        valid_tokens=cast(Array, none),
        num_rows=zero,
        result=Result(code=zero, layer=hole, block=hole),
        source_kind=source_kind,
    )


def check_upload_plan(
    plan: UploadPlan,
    geometry: ModelGeometry,
    *,
    num_source_blocks: int,
    num_physical_blocks: int,
    is_owned: np.ndarray,
    num_cpu_blocks: int | None = None,
) -> None:
    """Checks an upload plan on the host, before the first byte moves.

    Args:
        plan: The plan, also one that came from another process.
        geometry: Static facts.
        num_source_blocks: Blocks of the CPU pool that hold sources.
        num_physical_blocks: Blocks of the accelerator pool.
        is_owned: Physical blocks that this operation reserved, per layer row.
            bool [row, physical].
        num_cpu_blocks: All blocks of the CPU pool, its compaction area included; needed with
            CPU_COPY, whose destinations lie in [num_source_blocks, num_cpu_blocks).

    Raises:
        CompactionError: Naming the row, if a layer, group, block, source, destination, owner or
            count is wrong, or two rows name the same destination.
    """
    fields = _host_rows(plan)
    num_rows = int(np.asarray(plan.num_rows))
    if fields["layer"].size != num_rows:
        raise CompactionError(
            f"`num_rows` is {num_rows} but {fields['layer'].size} rows are in use; recount them."
        )
    if is_owned.shape != (geometry.num_rows, num_physical_blocks):
        raise CompactionError(
            f"`is_owned` has shape {is_owned.shape}; expected "
            f"[{geometry.num_rows}, {num_physical_blocks}], layer rows by physical blocks."
        )
    is_copy = plan.source_kind is SourceKind.CPU_COPY
    if is_copy and num_cpu_blocks is None:
        raise CompactionError("`num_cpu_blocks` is None; a CPU_COPY plan needs the pool's size.")
    copy_bounds = (num_source_blocks, num_cpu_blocks or 0) if is_copy else None
    seen: dict[tuple[str, int, int], int] = {}
    for row in range(num_rows):
        facts = {name: int(values[row]) for name, values in fields.items()}
        fault = _row_fault(facts, geometry, num_source_blocks, num_physical_blocks, is_owned)
        fault = fault or _copy_fault(facts["cpu_destination_block"], copy_bounds)
        targets = [("physical block", facts["physical_block"], facts["layer_row"])]
        targets += [("CPU destination block", facts["cpu_destination_block"], 0)] if is_copy else []
        for target in targets:
            if fault is None and target in seen:
                fault = (
                    f"names {target[0]} {target[1]}, which row {seen[target]} writes too; give "
                    "every row its own destination"
                )
            seen[target] = row
        if fault is not None:
            raise CompactionError(
                f"Row {row} of the upload plan (layer {facts['layer']}) {fault}. Nothing was moved."
            )


def _host_rows(plan: UploadPlan) -> dict[str, np.ndarray]:
    """Returns the used rows of a plan as dense numpy columns, in plan order."""
    names = ("layer", "layer_row", "group", "logical_block", "source_block", "physical_block")
    columns = {
        name: np.asarray(getattr(plan, name))
        for name in (*names, "cpu_destination_block", "valid_tokens")
    }
    is_used = np.zeros(columns["layer"].shape, bool)
    for name in (*names, "cpu_destination_block"):
        is_used |= columns[name] != HOLE
    return {name: values[is_used] for name, values in columns.items()}


def _row_fault(
    facts: dict[str, int],
    geometry: ModelGeometry,
    num_source_blocks: int,
    num_physical_blocks: int,
    is_owned: np.ndarray,
) -> str | None:
    layer, layer_row = facts["layer"], facts["layer_row"]
    if layer not in geometry.full_layers or geometry.full_layers.index(layer) != layer_row:
        return (
            f"has layer row {layer_row}; the full-attention layers are {geometry.full_layers}, "
            "and a row is its layer's place among them"
        )
    group, source, target = facts["group"], facts["source_block"], facts["physical_block"]
    expected_group = int(geometry.group_by_row[layer_row])
    in_pool = 0 <= target < num_physical_blocks
    logical = facts["logical_block"]
    checks = (
        (logical >= 0, f"moves logical block {logical}; give a block of the sequence"),
        (
            group == expected_group,
            f"names group {group}, but its layer belongs to group {expected_group}",
        ),
        (
            0 <= source < num_source_blocks,
            f"reads source block {source}, outside [0, {num_source_blocks})",
        ),
        (in_pool, f"writes physical block {target}, outside [0, {num_physical_blocks})"),
        (
            in_pool and bool(is_owned[layer_row, target]),
            f"writes physical block {target}, which this operation has not reserved; reserve it",
        ),
        (
            1 <= facts["valid_tokens"] <= geometry.block_tokens,
            f"has {facts['valid_tokens']} valid tokens; give 1 … {geometry.block_tokens}",
        ),
    )
    return next((fault for is_fine, fault in checks if not is_fine), None)


def _copy_fault(destination: int, bounds: tuple[int, int] | None) -> str | None:
    if bounds is None:
        if destination != HOLE:
            return f"names CPU destination block {destination}, but SOURCE_ONLY copies nothing"
    elif not bounds[0] <= destination < bounds[1]:
        return (
            f"copies to CPU destination block {destination}, outside the compaction area "
            f"[{bounds[0]}, {bounds[1]})"
        )
    return None
