"""A resident pool without bytes: what a path of selections uploads, moves, holds and releases.

Every selection is planned and committed by the stages that a real pool goes through, so that each
count is one of the plans and of the reference counts, and no estimate. Nothing is moved and nothing
is timed.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int32

from blockcompact_jax.errors import raise_for_result
from blockcompact_jax.geometry import ModelGeometry, OwnershipGranularity
from blockcompact_jax.ids import HOLE, as_logical_blocks, as_physical_blocks
from blockcompact_jax.kernels import NativeOperations
from blockcompact_jax.metrics import CompactionMetrics
from blockcompact_jax.ownership import Ownership, ReferenceKind, by_row, empty_ownership, reserve
from blockcompact_jax.residency import Residency, empty_residency, graduate
from blockcompact_jax.retention import RetentionKind
from blockcompact_jax.retention_path import RetentionPath
from blockcompact_jax.selection import SelectionPolicy
from blockcompact_jax.step import StepCommit, StepPlan, StepPolicy, commit_step, plan_step
from blockcompact_jax.transfer import ROW_COLUMNS
from blockcompact_jax.typed_jit import typed_jit

_graduate = typed_jit(static_argnames=("geometry",))(graduate)
_reserve = typed_jit(static_argnames=("geometry", "max_reserve", "kind", "operations"))(reserve)


@dataclass(frozen=True, kw_only=True)
class PathCounts:
    """What the selections of a path came to.

    Attributes:
        metrics: bytes, blocks and table entries by the names of the MET contracts, counted from
            plans; times are unmeasured.
        resident_blocks: blocks a layer held after a selection, the tail apart (mean).
        unwanted_blocks: of these, blocks that the layer did not want (mean); of a union alone.
        released_bytes: pool bytes that were given back.
        pool_peak_bytes: most pool bytes owned at once, the tail and uploads on their way included.
        num_retentions: retentions of a group by what was done, `RetentionKind` in lower case.
    """

    metrics: CompactionMetrics
    resident_blocks: float
    unwanted_blocks: float
    released_bytes: int
    pool_peak_bytes: int
    num_retentions: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class PlannedSelection:
    """One committed selection.

    Attributes:
        is_wanted: what each layer selected.
        is_held: what each layer attends to of the candidates; more than it wants after a union.
        num_upload: blocks that each layer uploads, padding included.
        budget_blocks: the budget of each layer as it was applied.
    """

    is_wanted: Bool[np.ndarray, "row block"]
    is_held: Bool[np.ndarray, "row block"]
    num_upload: Int32[np.ndarray, " row"]
    budget_blocks: Int32[np.ndarray, " row"]


@dataclass
class _Sums:
    metrics: CompactionMetrics = field(default_factory=CompactionMetrics)
    held: list[float] = field(default_factory=list[float])
    unwanted: list[float] = field(default_factory=list[float])
    peak_blocks: int = 0
    kinds: list[int] = field(default_factory=list[int])


class PlannedPath:
    """One request's lists and reference counts, selection after selection."""

    def __init__(
        self,
        geometry: ModelGeometry,
        selection: SelectionPolicy,
        *,
        max_blocks: int,
        max_unselected_tokens: int,
        retention: RetentionPath,
        ownership: OwnershipGranularity,
    ) -> None:
        """Sizes the pool so that it never runs out.

        Args:
            geometry: of layers of equal shape in one group.
            selection: how blocks are chosen; `max_want` is at least what is wanted.
            max_blocks: logical blocks of the whole text.
            max_unselected_tokens: most tokens between two selections.
            retention: how what is selected is kept.
            ownership: what one physical block spans.
        """
        self._geometry, self._retention = geometry, retention
        self._max_blocks = max_blocks
        self._recent_blocks = selection.recent_blocks
        self._num_tail_blocks = (
            selection.recent_blocks + 1 + -(-max_unselected_tokens // geometry.block_tokens)
        )
        # Layers that upload different blocks need a physical block each where it spans them all.
        is_wide = ownership is OwnershipGranularity.GROUP and not retention.has_shared_table
        num_physical = max_blocks * (geometry.num_rows if is_wide else 1) + max_blocks
        layer_bytes = [geometry.block_bytes(int(layer)) for layer in geometry.layer_by_row]
        self._layer_bytes = np.array(layer_bytes, np.int64)
        spans_all = ownership is OwnershipGranularity.GROUP
        self._owned_bytes = sum(layer_bytes) if spans_all else layer_bytes[0]
        self._policy = StepPolicy(
            selection=replace(selection, max_tail=max_blocks if retention.has_shared_table else 0),
            retention=retention.policy,
            max_upload=max_blocks,
            operations=NativeOperations(),
        )
        self._residency: Residency = empty_residency(geometry, max_slots=max_blocks)
        self._ownership: Ownership = empty_ownership(
            geometry,
            granularity=ownership,
            num_physical_blocks=num_physical + self._num_tail_blocks,
        )
        self._tail = self._take_tail(self._num_tail_blocks)
        self._num_candidates: int | None = None
        self._sums = _Sums()

    def select(
        self,
        scores: Float32[np.ndarray, "row block"],
        *,
        num_candidate_blocks: int,
        budget_blocks: int,
    ) -> PlannedSelection:
        """Selects, plans the upload, commits and retains.

        Args:
            scores: one for each layer and block; finite where a block may be selected.
            num_candidate_blocks: whole blocks before the tail; never fewer than before.
            budget_blocks: blocks of each layer, sink and recent ones included.

        Raises:
            PlanError: if a stage refuses its input.
        """
        if self._retention is RetentionPath.SHARED_TABLE:
            scores = np.broadcast_to(scores.mean(axis=0), scores.shape).astype(np.float32)
        num_leaving = num_candidate_blocks - (
            num_candidate_blocks if self._num_candidates is None else self._num_candidates
        )
        if num_leaving:
            self._leave_tail(num_leaving)
        static: Any = {"geometry": self._geometry, "policy": self._policy}
        plan, reserving = plan_step(
            scores,
            np.array(num_candidate_blocks, np.int32),
            self._residency,
            self._ownership,
            budget_blocks=np.array(budget_blocks, np.int32),
            **static,
        )
        raise_for_result(plan.result)
        done = commit_step(plan, self._residency, reserving, **static)
        raise_for_result(done.result)
        # Before the commit, what is uploaded and what it replaces are both in the pool.
        num_owned = int((~np.asarray(reserving.is_free)).sum())
        self._sums.peak_blocks = max(self._sums.peak_blocks, num_owned)
        self._residency, self._ownership = done.residency, done.ownership
        self._num_candidates = num_candidate_blocks
        if num_leaving:
            self._tail = np.concatenate(
                [self._tail[:, num_leaving:], self._take_tail(num_leaving)], axis=1
            )
        return self._booked(plan, done)

    def counts(self) -> PathCounts:
        """All selections so far; at least one."""
        sums = self._sums
        kinds = {kind.name.lower(): sums.kinds.count(kind) for kind in RetentionKind}
        return PathCounts(
            metrics=sums.metrics,
            resident_blocks=float(np.mean(sums.held)),
            unwanted_blocks=float(np.mean(sums.unwanted)),
            released_bytes=sums.metrics.physical_blocks_released * self._owned_bytes,
            pool_peak_bytes=sums.peak_blocks * self._owned_bytes,
            num_retentions={name: number for name, number in kinds.items() if number},
        )

    def _booked(self, plan: StepPlan, done: StepCommit) -> PlannedSelection:
        num_upload = np.asarray(plan.diff.num_upload)
        num_moves, num_unwanted = (
            np.asarray(getattr(done.retention, name)) for name in ("num_moves", "num_unwanted")
        )
        num_bytes = int((num_upload * self._layer_bytes).sum())
        sums = self._sums
        sums.metrics = sums.metrics.add(
            CompactionMetrics(
                h2d_bytes=num_bytes,
                unpack_bytes=num_bytes,
                scatter_bytes=num_bytes,
                resident_move_bytes=int((num_moves * self._layer_bytes).sum()),
                table_entries_written=int(done.retention.table_entries_written),
                metadata_elements=int(num_upload.sum()) * len(ROW_COLUMNS),
                physical_blocks_released=int(done.retirement.physical_blocks_released),
            )
        )
        sums.held.append(float(np.asarray(self._residency.num_valid).mean()))
        sums.unwanted.append(float(num_unwanted.mean()))
        sums.kinds += np.asarray(done.retention.kind).tolist()
        return PlannedSelection(
            is_wanted=_mask(np.asarray(plan.selection.want), self._max_blocks),
            is_held=_mask(np.asarray(self._residency.logical_by_slot), self._max_blocks),
            num_upload=num_upload,
            budget_blocks=np.asarray(plan.selection.effective_budget_blocks),
        )

    def _leave_tail(self, num_leaving: int) -> None:
        """Turns the oldest blocks of the tail into resident ones; nothing is uploaded."""
        shape = (self._geometry.num_rows, self._num_tail_blocks)
        logical, physical = np.full(shape, HOLE, np.int32), np.full(shape, HOLE, np.int32)
        logical[:, :num_leaving] = (self._num_candidates or 0) + np.arange(num_leaving)
        physical[:, :num_leaving] = self._tail[:, :num_leaving]
        self._residency, result = _graduate(
            self._residency,
            as_logical_blocks(logical),
            as_physical_blocks(physical),
            geometry=self._geometry,
        )
        raise_for_result(result)

    def _take_tail(self, num_blocks: int) -> Int32[np.ndarray, "row tail"]:
        num_owners = self._geometry.num_owners(self._ownership.granularity)
        owned, blocks, result = _reserve(
            self._ownership,
            np.full(num_owners, num_blocks, np.int32),
            geometry=self._geometry,
            max_reserve=self._num_tail_blocks,
            kind=ReferenceKind.REGULAR,
            operations=self._policy.operations,
        )
        raise_for_result(result)
        self._ownership = owned
        rows = by_row(blocks, self._geometry, owned.granularity)
        return np.asarray(rows)[:, :num_blocks]


def _mask(
    blocks: Int32[np.ndarray, "row place"], max_blocks: int
) -> Bool[np.ndarray, "row max_blocks"]:
    is_listed = np.zeros((blocks.shape[0], max_blocks), bool)
    rows, places = np.nonzero(blocks != HOLE)
    is_listed[rows, blocks[rows, places]] = True
    return is_listed
