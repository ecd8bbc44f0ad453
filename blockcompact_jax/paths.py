"""One selection on two paths each: copied or read from the source, retained by table or by move.

Every path has pools of its own, gets the same scores, and is compared bytewise with the first one:
what it holds of the wanted blocks, in the order of their logical IDs.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32, Shaped

from blockcompact_jax.compare import BytesComparison, compare_kv
from blockcompact_jax.errors import CompactionError, raise_for_result
from blockcompact_jax.geometry import ModelGeometry, OwnershipGranularity, TableSupport
from blockcompact_jax.ids import HOLE
from blockcompact_jax.kernels import (
    Layout,
    PlainStrides,
    RegisteredPool,
    host_pool_block_move,
    host_pool_upload,
    raise_for_status,
)
from blockcompact_jax.metrics import CompactionMetrics
from blockcompact_jax.ownership import Ownership, empty_ownership
from blockcompact_jax.residency import Residency, empty_residency
from blockcompact_jax.retention import RetentionKind, RetentionPolicy
from blockcompact_jax.selection import SelectionPolicy
from blockcompact_jax.step import StepPolicy, commit_step, plan_step


@dataclass(frozen=True, kw_only=True)
class PathComparison:
    """What `compare_paths` found.

    Attributes:
        num_selections: selections that every path made, one after another.
        transport: source-only reload against copy and reload, over all selections.
        retention: table remap against byte move, over all selections; a kind of retention that no
            selection called for is not in `retention_kinds`.
        retention_kinds: retentions that the byte-move path made, by name.
        source_only: what the path with source reads and layer tables booked.
        copied: what the path that copies first booked.
        moved: what the path with one table for all layers booked.
    """

    num_selections: int
    transport: tuple[BytesComparison, ...]
    retention: tuple[BytesComparison, ...]
    retention_kinds: tuple[str, ...]
    source_only: CompactionMetrics
    copied: CompactionMetrics
    moved: CompactionMetrics

    @property
    def is_equal(self) -> bool:
        """Whether every byte was equal on all paths."""
        return all(each.is_equal for each in (*self.transport, *self.retention))


def compare_paths(
    packed: Shaped[np.ndarray, "row source_block head two_block_tokens dim"],
    scores: Sequence[Float32[np.ndarray, "row block"]],
    *,
    geometry: ModelGeometry,
    layout: Layout,
    num_candidate_blocks: int,
    budget_blocks: int,
) -> PathComparison:
    """Makes the same selections on three paths, and compares what each holds after each of them.

    Args:
        packed: packed KV of all full-attention layers, unsigned integers of the element's size;
            source block b is logical block b. It is copied, never written.
        scores: finite scores of each selection, in order.
        geometry: the model's layers.
        layout: layout of `packed`.
        num_candidate_blocks: whole blocks that may be selected.
        budget_blocks: blocks that each layer wants, the first block among them.

    Raises:
        CompactionError: if sizes do not fit each other, or a path lost a wanted block.
    """
    _check(packed, scores, num_candidate_blocks, budget_blocks)
    ways = {
        "source_only": (False, TableSupport.LAYER),
        "copied": (True, TableSupport.LAYER),
        "moved": (False, TableSupport.SHARED),
    }
    common: dict[str, Any] = {
        "geometry": geometry,
        "layout": layout,
        "num_candidate_blocks": num_candidate_blocks,
        "budget_blocks": budget_blocks,
    }
    layers = geometry.layer_by_row.tolist()
    transport: list[BytesComparison] = []
    retention: list[BytesComparison] = []
    paths: dict[str, _Path] = {}
    try:
        for name, (is_copied, tables) in ways.items():
            paths[name] = _Path(packed, is_copied=is_copied, tables=tables, **common)
        for each in scores:
            held = {name: path.select(each) for name, path in paths.items()}
            expected, num_valid = held["source_only"]
            for name, found in (("copied", transport), ("moved", retention)):
                found.append(
                    compare_kv(
                        expected, held[name][0], num_valid_tokens=num_valid, layer_by_row=layers
                    )
                )
        return PathComparison(
            num_selections=len(scores),
            transport=tuple(transport),
            retention=tuple(retention),
            retention_kinds=tuple(sorted(paths["moved"].retention_kinds)),
            **{name: path.metrics for name, path in paths.items()},
        )
    finally:
        for path in paths.values():
            path.close()


def _check(
    packed: np.ndarray[Any, Any],
    scores: Sequence[np.ndarray[Any, Any]],
    num_candidate_blocks: int,
    budget_blocks: int,
) -> None:
    if packed.ndim != 5 or packed.dtype.kind != "u":
        raise CompactionError(
            f"`packed` is {packed.dtype}{list(packed.shape)}; give unsigned integers "
            "[row, source_block, head, 2 * block_tokens, dim]."
        )
    if not 0 < budget_blocks <= num_candidate_blocks <= packed.shape[1]:
        raise CompactionError(
            f"`budget_blocks` is {budget_blocks}, `num_candidate_blocks` {num_candidate_blocks}; "
            f"expected 1 … candidates … the {packed.shape[1]} blocks of `packed`."
        )
    for each in scores:
        if each.shape != packed.shape[:2]:
            raise CompactionError(
                f"`scores` has shape {list(each.shape)}; expected {list(packed.shape[:2])}."
            )


class _Path:
    """One request's pools and state, on one transport and one retention."""

    def __init__(
        self,
        packed: np.ndarray[Any, Any],
        *,
        is_copied: bool,
        tables: TableSupport,
        geometry: ModelGeometry,
        layout: Layout,
        num_candidate_blocks: int,
        budget_blocks: int,
    ) -> None:
        rows, num_source, heads, two_block_tokens, dim = packed.shape
        self.is_copied, self.geometry = is_copied, geometry
        self.num_source, self.num_candidate_blocks = num_source, num_candidate_blocks
        self.budget_blocks = budget_blocks
        self.metrics = CompactionMetrics()
        self.retention_kinds: set[str] = set()
        max_slots = 2 * budget_blocks + 2
        num_physical = 2 * max_slots
        # The area [num_source, …) that the copying path gathers into.
        self.store = np.zeros((rows, num_source + budget_blocks, *packed.shape[2:]), packed.dtype)
        self.store[:, :num_source] = packed
        block_tokens = two_block_tokens // 2
        self.memory = np.zeros((rows, num_physical, 2, heads, block_tokens, dim), packed.dtype)
        self.packed, self.plain = self._register(layout)
        self.policy = StepPolicy(
            selection=SelectionPolicy(max_want=budget_blocks, max_tail=num_source, recent_blocks=0),
            retention=RetentionPolicy(tables=tables),
            max_upload=budget_blocks,
        )
        self.residency: Residency = empty_residency(geometry, max_slots=max_slots)
        is_shared = tables is TableSupport.SHARED
        self.ownership: Ownership = empty_ownership(
            geometry,
            granularity=OwnershipGranularity.GROUP if is_shared else OwnershipGranularity.LAYER,
            num_physical_blocks=num_physical,
        )

    def _register(self, layout: Layout) -> tuple[RegisteredPool, RegisteredPool]:
        rows, num_physical, _, heads, block_tokens, dim = self.memory.shape
        shape: dict[str, Any] = {
            "num_layers": rows,
            "num_kv_heads": heads,
            "block_tokens": block_tokens,
            "head_dim": dim,
            "element_bytes": self.memory.itemsize,
        }
        packed = RegisteredPool.register_packed(
            self.store.ctypes.data,
            layout=layout,
            num_blocks=self.store.shape[1],
            size_bytes=self.store.nbytes,
            keepalive=self.store,
            **shape,
        )
        head = block_tokens * dim
        strides = PlainStrides(
            layer=num_physical * 2 * heads * head,
            kv=heads * head,
            block=2 * heads * head,
            head=head,
            token=dim,
        )
        plain = RegisteredPool.register_plain(
            self.memory.ctypes.data,
            num_blocks=num_physical,
            size_bytes=self.memory.nbytes,
            keepalive=self.memory,
            strides=strides,
            **shape,
        )
        return packed, plain

    def select(
        self, scores: Float32[np.ndarray, "row block"]
    ) -> tuple[Shaped[np.ndarray, "row 2 head token dim"], Int32[np.ndarray, " row"]]:
        """Selects, uploads, commits and retains; returns the KV of the wanted blocks."""
        static: Any = {"geometry": self.geometry, "policy": self.policy}
        plan, reserving = plan_step(
            scores,
            self.num_candidate_blocks,
            self.residency,
            self.ownership,
            budget_blocks=self.budget_blocks,
            **static,
        )
        raise_for_result(plan.result)
        self._upload(plan)
        done = commit_step(plan, self.residency, reserving, **static)
        raise_for_result(done.result)
        self._move(done.retention)
        self.residency, self.ownership = done.residency, done.ownership
        kinds = np.unique(np.asarray(done.retention.kind)).tolist()
        self.retention_kinds |= {RetentionKind(kind).name.lower() for kind in kinds}
        released = int(done.retirement.physical_blocks_released)
        self.metrics = self.metrics.add(CompactionMetrics(physical_blocks_released=released))
        return self._held(np.asarray(plan.selection.want))

    def _upload(self, plan: Any) -> None:
        is_used = np.asarray(plan.upload.physical_block) != HOLE
        names = ("layer_row", "source_block", "physical_block")
        row, source, physical = (np.asarray(getattr(plan.upload, name))[is_used] for name in names)
        num_bytes = int(row.size) * self.plain.shape.block_bytes
        booked = CompactionMetrics(
            h2d_bytes=num_bytes, unpack_bytes=num_bytes, scatter_bytes=num_bytes
        )
        self.metrics = self.metrics.add(booked)
        if self.is_copied:
            source = self._copy(row, source, num_bytes)
        moved = host_pool_upload(
            self.packed.current_ord(),
            self.plain.current_ord(),
            row,
            source,
            physical,
            packed_pool=self.packed,
            plain_pool=self.plain,
        )
        raise_for_status(moved.status)

    def _copy(
        self, row: np.ndarray[Any, Any], source: np.ndarray[Any, Any], num_bytes: int
    ) -> np.ndarray[Any, Any]:
        """Gathers each row's blocks into the area behind the sources, and returns where to."""
        place = np.zeros_like(source)
        for layer_row in np.unique(row):
            is_row = row == layer_row
            place[is_row] = self.num_source + np.arange(is_row.sum())
        copied = host_pool_block_move(
            self.packed.current_ord(), row, source, place, pool=self.packed
        )
        raise_for_status(copied.status)
        booked = CompactionMetrics(cpu_gather_bytes=num_bytes, cpu_destination_blocks=int(row.size))
        self.metrics = self.metrics.add(booked)
        return place

    def _move(self, retention: Any) -> None:
        start, target = (np.asarray(getattr(retention, name)) for name in ("move_from", "move_to"))
        row, slot = np.nonzero(start != HOLE)
        if not row.size:
            return
        moved = host_pool_block_move(
            self.plain.current_ord(),
            row.astype(np.int32),
            start[row, slot],
            target[row, slot],
            pool=self.plain,
        )
        raise_for_status(moved.status)
        num_bytes = int(row.size) * self.plain.shape.block_bytes
        self.metrics = self.metrics.add(CompactionMetrics(resident_move_bytes=num_bytes))

    def _held(
        self, want: Int32[np.ndarray, "row max_want"]
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        logical = np.asarray(self.residency.logical_by_slot)
        physical = np.asarray(self.residency.physical_by_slot)
        rows, _, _, heads, block_tokens, dim = self.memory.shape
        kv = np.zeros((rows, 2, heads, want.shape[1], block_tokens, dim), self.memory.dtype)
        num_valid = np.zeros(rows, np.int32)
        for row in range(rows):
            blocks = np.sort(want[row][want[row] != HOLE])
            for place, block in enumerate(blocks):
                slots = np.flatnonzero(logical[row] == block)
                if slots.size != 1:
                    raise CompactionError(
                        f"layer row {row} holds the wanted logical block {block} {slots.size} "
                        "times, expected once: a fault of this program."
                    )
                kv[row, :, :, place] = self.memory[row, physical[row, slots[0]]]
            num_valid[row] = blocks.size * block_tokens
        return kv.reshape(rows, 2, heads, -1, dim), num_valid

    def close(self) -> None:
        """Unregisters both pools."""
        self.packed.close()
        self.plain.close()
