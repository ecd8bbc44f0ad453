"""The one mutable object: runs the effects of pure plans in order and keeps the state they return.

A `reselect` goes graduate → plan → upload → commit → retain → free → publish; where nothing would
change, graduate → publish. The state changes at its very end, so a fault anywhere before leaves the
old tables, bytes and reference counts valid.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import numpy as np
from jax import Array
from jaxtyping import Float32, Int32

from blockcompact_jax.course import SelectionRecord, record_selection
from blockcompact_jax.errors import raise_for_result
from blockcompact_jax.geometry import ModelGeometry, OwnershipGranularity, TableSupport
from blockcompact_jax.ids import HOLE, as_logical_blocks, as_physical_blocks
from blockcompact_jax.kernels import NativeOperations
from blockcompact_jax.ledger import CommitLedger
from blockcompact_jax.ledger_transfers import LedgerTransfers
from blockcompact_jax.metrics import CompactionMetrics
from blockcompact_jax.ownership import Ownership, ReferenceKind, empty_ownership, reserve
from blockcompact_jax.residency import Residency, empty_residency, graduate
from blockcompact_jax.retention import RetentionPolicy
from blockcompact_jax.runtime_step import Committed, StepPlanner
from blockcompact_jax.selection import SelectionPolicy
from blockcompact_jax.step import StepPolicy
from blockcompact_jax.transfer import (
    ROW_COLUMNS,
    Mover,
    Pools,
    Rows,
    Transaction,
    move_rows,
    used_rows,
)
from blockcompact_jax.typed_jit import typed_jit
from blockcompact_jax.upload import SourceKind, UploadPlan

# Tables are per layer, so a retention moves no bytes and takes no time doing so. Metadata goes to
# nobody, so its time stays unmeasured.
_NO_COSTS = CompactionMetrics(plan_us=0.0, table_us=0.0, wait_us=0.0, allocator_us=0.0, move_us=0.0)

_graduate = typed_jit(static_argnames=("geometry",))(graduate)
_reserve = typed_jit(static_argnames=("geometry", "max_reserve", "kind", "operations"))(reserve)


@dataclass(frozen=True, kw_only=True)
class RuntimeLimits:
    """Capacities fixed for the life of a runtime.

    Attributes:
        max_blocks: logical blocks of the longest sequence.
        max_unselected_tokens: most tokens that may be written between two selections.
    """

    max_blocks: int
    max_unselected_tokens: int


@dataclass(frozen=True, kw_only=True)
class Tables:
    """What each row's block table is after a selection.

    Attributes:
        selected_physical_blocks: per row, int32 [num_selected], slot order.
        tail_physical_blocks: int32 [row, tail]: blocks of the always-resident tail, in sequence
            order; the first holds token position `tail_start_token_position`.
        tail_start_token_position: first token position of the tail.
        unfilled_token_position: confirmed tokens from here on are not in the tail's blocks yet; the
            caller writes them. The sequence length where there are none.
    """

    selected_physical_blocks: list[Int32[np.ndarray, " selected"]]
    tail_physical_blocks: Int32[np.ndarray, "row tail"]
    tail_start_token_position: int
    unfilled_token_position: int


@dataclass(frozen=True, kw_only=True)
class _State:
    residency: Residency
    ownership: Ownership
    tail: Int32[np.ndarray, "row tail"]
    num_candidate_blocks: int
    has_selection: bool = False


class CompactionRuntime:
    """Keeps one request's resident pool in step with its selections.

    Attributes:
        metrics: everything booked so far.
        last_booked: what the last selection booked.
        on_selection: hears of each committed selection; None, and nothing is made for it.
        num_physical_blocks: blocks a layer of the resident pool must have.
        num_tail_blocks: of these, blocks of the always-resident tail.
        num_selections: selections committed so far; its owner may carry it over, as `metrics`.
    """

    def __init__(
        self,
        *,
        geometry: ModelGeometry,
        selection: SelectionPolicy,
        limits: RuntimeLimits,
        source_kind: SourceKind = SourceKind.SOURCE_ONLY,
    ) -> None:
        """Plans the capacities; `attach` the pools before use.

        Until a commit, old and new blocks are both resident, so the pool has room for both.

        Args:
            geometry: static facts.
            selection: how blocks are chosen.
            limits: capacities.
            source_kind: what transfers read; with CPU_COPY the source blocks are [0, max_blocks)
                and the compaction area follows.
        """
        self._geometry = geometry
        self._limits = limits
        self._recent_blocks = selection.recent_blocks
        num_unselected_blocks = -(-limits.max_unselected_tokens // geometry.block_tokens)
        self.num_tail_blocks = selection.recent_blocks + 1 + num_unselected_blocks
        max_slots = min(2 * selection.max_want + self.num_tail_blocks, limits.max_blocks)
        self.num_physical_blocks = max_slots + self.num_tail_blocks
        self._policy = StepPolicy(
            selection=selection,
            retention=RetentionPolicy(tables=TableSupport.LAYER),
            max_upload=selection.max_want,
            source_kind=source_kind,
            operations=NativeOperations(),
        )
        self._planner = StepPlanner(
            geometry=geometry, policy=self._policy, first_cpu_destination=limits.max_blocks
        )
        self.metrics = _NO_COSTS
        self.last_booked = _NO_COSTS
        self.on_selection: Callable[[SelectionRecord], None] | None = None
        self.num_selections = 0
        self._pools: Pools | None = None
        self._transfers = LedgerTransfers("local")
        self._transaction: Transaction = self._transfers.transaction
        self._mover: Mover = self._move_here
        # Scores arrive committed to a device, and so do the states that follow from them. Starting
        # committed spares a second compilation.
        residency, ownership = jax.device_put(
            (
                empty_residency(geometry, max_slots=max_slots),
                empty_ownership(
                    geometry,
                    granularity=OwnershipGranularity.LAYER,
                    num_physical_blocks=self.num_physical_blocks,
                ),
            ),
            cast(Any, jax.local_devices(backend="cpu")[0]),
        )
        ownership, tail = self._take_tail_blocks(ownership, self.num_tail_blocks)
        self._state = _State(
            residency=residency, ownership=ownership, tail=tail, num_candidate_blocks=0
        )

    @property
    def policy(self) -> StepPolicy:
        """The static choices of every step, and which operations it runs on."""
        return self._policy

    @property
    def residency(self) -> Residency:
        """What is resident now."""
        return self._state.residency

    @property
    def ledger(self) -> CommitLedger:
        """The ledger that a selection goes through where `attach` was given no transaction."""
        return self._transfers.ledger

    @property
    def has_selection(self) -> bool:
        """Whether this very runtime has committed one; if not, the next one is a full plan."""
        return self._state.has_selection

    @property
    def num_candidate_blocks(self) -> int:
        """Whole confirmed blocks before the always-resident tail."""
        return self._state.num_candidate_blocks

    def attach(
        self, pools: Pools, transaction: Transaction | None = None, mover: Mover | None = None
    ) -> None:
        """Names the stores that `reselect` moves bytes between.

        Args:
            pools: the stores.
            transaction: what surrounds each transfer and hears that it has landed; if None, the
                runtime's own commit ledger.
            mover: what moves the bytes; this thread, from pool to pool, if None.

        Raises:
            ValueError: if the resident pool is smaller than `num_physical_blocks`.
        """
        if pools.resident.shape.num_blocks < self.num_physical_blocks:
            raise ValueError(
                f"`pools.resident` has {pools.resident.shape.num_blocks} blocks a layer; expected "
                f"at least `num_physical_blocks` = {self.num_physical_blocks}."
            )
        self._pools = pools
        own, move = self._transfers, mover or self._move_here

        def move_and_say_so(rows: Rows) -> None:
            move(rows)
            own.landed(0, own.open_key)

        self._transaction = transaction or own.transaction
        self._mover = move if transaction else move_and_say_so

    def warm_up(self, scores: Float32[Array, "row *heads max_blocks"]) -> None:
        """Compiles the planning calls, so that no selection pays for it. Changes nothing.

        Args:
            scores: finite scores of the shape, dtype and device that `reselect` will get.
        """
        residency = self._graduate(self._state, 0)
        self._planner.warm_up(scores, residency, self._state.ownership)

    def reselect(
        self,
        scores: Float32[Array, "row *heads max_blocks"],
        *,
        num_tokens: int,
        budget_blocks: int,
        publish: Callable[[Tables], int] | None = None,
    ) -> Tables:
        """Selects, uploads what is missing, commits, retains, frees and publishes.

        Args:
            scores: block scores, per row or per head as `plan_step` takes them.
            num_tokens: confirmed tokens; their whole blocks are packed.
            budget_blocks: blocks a layer, sink and recent blocks included.
            publish: writes the new tables where the engine reads them and returns how many entries
                it wrote; what it raises undoes the selection (OWN-3).

        Returns:
            The new block tables.

        Raises:
            PlanError: if a stage refuses its input; nothing has changed then.
            KernelStatusError: if the transfer is refused; nothing has changed then.
            Exception: what the transaction or `publish` raises; nothing has changed then.
        """
        begin = time.perf_counter()
        state = self._state
        num_whole_blocks = num_tokens // self._geometry.block_tokens
        num_candidates = max(num_whole_blocks - self._recent_blocks, 0)
        num_leaving = num_candidates - state.num_candidate_blocks if state.has_selection else 0
        residency = self._graduate(state, num_leaving) if num_leaving else state.residency
        step = self._planner.plan(
            scores, num_candidates, residency, state.ownership, budget_blocks=budget_blocks
        )
        planned = time.perf_counter()
        with self._transaction(step.upload, num_tokens) as check_landed:
            self._move(step.upload)
            check_landed()  # Whoever reads the new tables reads the new bytes.
            uploaded = time.perf_counter()
            done = step.commit()
            committed = time.perf_counter()
            selected = self._select(done, state.tail, num_candidates, num_leaving)
            tables = self._tables(selected, num_tokens, is_first=not state.has_selection)
            allocated = time.perf_counter()
            num_entries = publish(tables) if publish else 0
            published = time.perf_counter()
        left = time.perf_counter()
        self._state = selected
        self.num_selections += 1
        self._book(
            int(step.upload.num_rows),
            replace(
                _NO_COSTS,
                plan_us=(planned - begin + committed - uploaded) * 1e6,
                wait_us=(uploaded - planned + left - published) * 1e6,
                allocator_us=(allocated - committed) * 1e6,
                table_us=(published - allocated) * 1e6,
                table_entries_written=num_entries,
                physical_blocks_released=done.num_released,
            ),
        )
        if self.on_selection is not None:
            self.on_selection(self._record(state, step.upload, num_tokens, budget_blocks))
        return tables

    def _attached(self) -> Pools:
        if self._pools is None:
            raise RuntimeError("the runtime has no pools yet; call `attach` first")
        return self._pools

    def _graduate(self, state: _State, num_leaving: int) -> Residency:
        """Turns blocks that leave the tail into resident slots; their bytes stay where they are."""
        shape = (self._geometry.num_rows, self.num_tail_blocks)
        logical, physical = np.full(shape, HOLE, np.int32), np.full(shape, HOLE, np.int32)
        logical[:, :num_leaving] = state.num_candidate_blocks + np.arange(num_leaving)
        physical[:, :num_leaving] = state.tail[:, :num_leaving]
        residency, result = _graduate(
            state.residency,
            as_logical_blocks(logical),
            as_physical_blocks(physical),
            geometry=self._geometry,
        )
        raise_for_result(result)
        return residency

    def _select(
        self,
        done: Committed,
        tail: Int32[np.ndarray, "row tail"],
        num_candidate_blocks: int,
        num_leaving: int,
    ) -> _State:
        """The state after a step; new blocks take the places of those that left the tail."""
        ownership, fresh = self._take_tail_blocks(done.ownership, num_leaving)
        return _State(
            residency=done.residency,
            ownership=ownership,
            tail=np.concatenate([tail[:, num_leaving:], fresh], axis=1),
            num_candidate_blocks=num_candidate_blocks,
            has_selection=True,
        )

    def _move(self, upload: UploadPlan) -> None:
        """Moves the bytes of a plan from the packed pool into the resident pool."""
        self._mover(used_rows(upload, first_copy_block=self._limits.max_blocks))

    def _move_here(self, rows: Rows) -> None:
        move_rows(self._attached(), rows)

    def _take_tail_blocks(
        self, ownership: Ownership, num_blocks: int
    ) -> tuple[Ownership, Int32[np.ndarray, "row tail"]]:
        """Allocates blocks for the tail of every row; the engine writes them, no transfer does."""
        num_rows = self._geometry.num_rows
        if num_blocks == 0:
            return ownership, np.empty((num_rows, 0), np.int32)
        owned, blocks, result = _reserve(
            ownership,
            np.full(num_rows, num_blocks, np.int32),
            geometry=self._geometry,
            max_reserve=self.num_tail_blocks,
            kind=ReferenceKind.REGULAR,
            operations=self._policy.operations,
        )
        raise_for_result(result)
        return owned, np.asarray(blocks)[:, :num_blocks]

    def _tables(self, state: _State, num_tokens: int, *, is_first: bool) -> Tables:
        physical = np.asarray(state.residency.physical_by_slot)
        num_valid = np.asarray(state.residency.num_valid)
        tail_start = state.num_candidate_blocks * self._geometry.block_tokens
        return Tables(
            selected_physical_blocks=[
                row[:count] for row, count in zip(physical, num_valid, strict=True)
            ],
            tail_physical_blocks=state.tail,
            tail_start_token_position=tail_start,
            unfilled_token_position=tail_start if is_first else num_tokens,
        )

    def _book(self, num_rows: int, costs: CompactionMetrics) -> None:
        """Adds one selection to the metrics: its costs so far, and the bytes of its rows."""
        upload_bytes = num_rows * self._attached().resident.shape.block_bytes
        is_copy = self._policy.source_kind is SourceKind.CPU_COPY
        self.last_booked = replace(
            costs,
            cpu_gather_bytes=upload_bytes if is_copy else 0,
            cpu_destination_blocks=num_rows if is_copy else 0,
            h2d_bytes=upload_bytes,
            unpack_bytes=upload_bytes,
            scatter_bytes=upload_bytes,
            metadata_elements=num_rows * len(ROW_COLUMNS),
        )
        self.metrics = self.metrics.add(self.last_booked)

    def _record(
        self, before: _State, upload: UploadPlan, num_tokens: int, budget_blocks: int
    ) -> SelectionRecord:
        return record_selection(
            before.residency,
            self.residency,
            upload,
            num_tokens=num_tokens,
            num_candidate_blocks=self.num_candidate_blocks,
            budget_blocks=budget_blocks,
            booked=self.last_booked,
        )
