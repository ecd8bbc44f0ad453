"""The stages composed, in the order they run: plan, (transfer), commit or abort.

Each function is one jitted call for all layers of a request and traces under vmap and scan. Nothing
is retraced as long as shapes, geometry and policy stay.
"""

# pyright: reportUnknownMemberType=false

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int32

from .diff import BlockDiffPlan, diff
from .errors import Result, first_fault
from .geometry import ModelGeometry, OwnershipGranularity, TableSupport
from .ids import HOLE, AnyArray, PhysicalBlocks, SourceBlocks, as_physical_blocks
from .masks import choose, place_by_id, place_mask
from .operations import PURE_OPERATIONS, PlanOperations
from .ownership import (
    Ownership,
    ReferenceKind,
    Retirement,
    commit_ownership,
    generation_of,
    owned_blocks,
    release,
    reserve,
    retire_nothing,
)
from .residency import Residency, commit_upload, replace_slots
from .retention import RetentionPlan, RetentionPolicy, keep_every_slot, plan_retention
from .scores import reduce_heads
from .selection import Selection, SelectionPolicy, select
from .typed_jit import typed_jit
from .upload import SourceKind, UploadPlan, plan_upload


@dataclass(frozen=True, kw_only=True)
class StepPolicy:
    """All static choices of a step. Frozen and hashable.

    Attributes:
        selection: How blocks are chosen.
        retention: What tables the engine reads; shared tables also make the layers of a group
            upload equally many blocks.
        max_upload: Static upload capacity per layer, in blocks.
        source_kind: What a transfer reads.
        operations: What ranks, compares and orders: plain JAX on any backend, or
            `kernels.NativeOperations` on CPU. The plans are the same.
    """

    selection: SelectionPolicy
    retention: RetentionPolicy
    max_upload: int
    source_kind: SourceKind = SourceKind.SOURCE_ONLY
    operations: PlanOperations = PURE_OPERATIONS


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One request's plan: what to select, upload, and where to.

    Attributes:
        selection: The wanted blocks.
        diff: The blocks to upload per layer.
        upload: The rows of the transfer.
        reserved: Reserved destinations per owner, HOLE padded.
        reserved_generation: Their generations, so that a late commit or abort cannot touch blocks
            that were freed and handed to another operation since.
        result: The first fault of any stage. On a fault nothing is reserved or uploaded.
    """

    selection: Selection
    diff: BlockDiffPlan
    upload: UploadPlan
    reserved: Int32[PhysicalBlocks, "owner max_upload"]
    reserved_generation: Int32[Array, "owner max_upload"]
    result: Result


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepCommit:
    """The state after a transfer landed on all ranks.

    Attributes:
        residency: New lists. With BYTE_MOVE they hold once the moves of `retention` are done.
        ownership: New reference counts.
        retention: What the retention rewrites or moves.
        retirement: What it retired and freed.
        result: The first fault. On a fault residency and ownership are the ones given.
    """

    residency: Residency
    ownership: Ownership
    retention: RetentionPlan
    retirement: Retirement
    result: Result


def _select_and_diff(
    scores: AnyArray,
    num_candidate_blocks: AnyArray | int,
    residency: Residency,
    *,
    budget_blocks: AnyArray | int,
    force_full: AnyArray | bool,
    geometry: ModelGeometry,
    policy: StepPolicy,
) -> tuple[Selection, BlockDiffPlan]:
    max_blocks = scores.shape[-1]
    if scores.ndim > 2:
        scores = reduce_heads(scores, head_reduction=policy.selection.head_reduction)
    is_resident = None
    if policy.selection.resident_margin > 0.0:
        is_valid = place_mask(residency.num_valid, residency.max_slots)
        is_resident = place_by_id(residency.logical_by_slot, is_valid, max_blocks) >= 0
    selection = select(
        scores,
        num_candidate_blocks,
        budget_blocks=budget_blocks,
        selection_revision=residency.revisions.selection_revision + 1,
        geometry=geometry,
        policy=policy.selection,
        is_resident=is_resident,
        operations=policy.operations,
    )
    plan = diff(
        selection,
        residency,
        geometry=geometry,
        max_upload=policy.max_upload,
        common_slots=policy.retention.tables is TableSupport.SHARED,
        force_full=force_full,
        operations=policy.operations,
    )
    return selection, plan


def _reserve_and_upload(
    selection: Selection,
    plan: BlockDiffPlan,
    ownership: Ownership,
    *,
    source_by_logical: SourceBlocks | None,
    first_cpu_destination: AnyArray | int,
    geometry: ModelGeometry,
    policy: StepPolicy,
) -> tuple[StepPlan, Ownership]:
    if ownership.granularity is OwnershipGranularity.GROUP:
        num_blocks = plan.common_new_slots
    else:
        num_blocks = plan.num_upload
    reserving, reserved, reserve_result = reserve(
        ownership,
        num_blocks,
        geometry=geometry,
        max_reserve=policy.max_upload,
        operations=policy.operations,
    )
    destinations = reserved[geometry.owner_by_row(ownership.granularity)]
    upload = plan_upload(
        plan,
        as_physical_blocks(destinations),
        geometry=geometry,
        source_kind=policy.source_kind,
        source_by_logical=source_by_logical,
        first_cpu_destination=first_cpu_destination,
    )
    result = first_fault(plan.result, reserve_result, upload.result)
    reserved = as_physical_blocks(jnp.where(result.is_ok, reserved, HOLE))
    step_plan = StepPlan(
        selection=selection,
        diff=plan,
        upload=upload,
        reserved=reserved,
        reserved_generation=generation_of(ownership, reserved),
        result=result,
    )
    references = jnp.where(result.is_ok, reserving.references, ownership.references)
    return step_plan, replace(ownership, references=references)


@typed_jit(static_argnames=("geometry", "policy"))
def plan_step(
    scores: AnyArray,
    num_candidate_blocks: AnyArray | int,
    residency: Residency,
    ownership: Ownership,
    *,
    budget_blocks: AnyArray | int,
    geometry: ModelGeometry,
    policy: StepPolicy,
    source_by_logical: Int32[SourceBlocks, " max_blocks"] | None = None,
    first_cpu_destination: AnyArray | int = 0,
    force_full: AnyArray | bool = False,
) -> tuple[StepPlan, Ownership]:
    """Plans one request's selection, upload and destinations, for all layers.

    Nothing to upload is still a plan, with the next selection revision.

    Args:
        scores: float32 [row, max_blocks]; or per head, as `reduce_heads` takes it.
        num_candidate_blocks: Whole, confirmed blocks before the recent tail. Shape ().
        residency: What is resident now.
        ownership: The pool's reference counts.
        budget_blocks: Sink + ranked + recent blocks per layer. Shape () or [row].
        geometry: Static facts.
        policy: Static choices.
        source_by_logical: CPU pool block of each logical block; identity if None.
        first_cpu_destination: First block of the CPU compaction area, with CPU_COPY.
        force_full: Replace everything held. Shape ().

    Returns:
        The plan, and the ownership with its destinations reserved.
    """
    selection, plan = _select_and_diff(
        scores,
        num_candidate_blocks,
        residency,
        budget_blocks=budget_blocks,
        force_full=force_full,
        geometry=geometry,
        policy=policy,
    )
    return _reserve_and_upload(
        selection,
        plan,
        ownership,
        source_by_logical=source_by_logical,
        first_cpu_destination=first_cpu_destination,
        geometry=geometry,
        policy=policy,
    )


@typed_jit(static_argnames=("geometry", "policy"))
def commit_step(
    plan: StepPlan,
    residency: Residency,
    ownership: Ownership,
    *,
    geometry: ModelGeometry,
    policy: StepPolicy,
    is_retention_due: AnyArray | bool = True,
) -> StepCommit:
    """Commits a plan whose bytes have arrived on every rank, then retains what is wanted.

    Args:
        plan: The plan of `plan_step`.
        residency: The residency it was made from; a changed one is refused as stale.
        ownership: The pool's current counts, with the plan's reservation.
        geometry: Static facts.
        policy: Static choices.
        is_retention_due: False keeps every resident slot this time. Shape ().

    Returns:
        The new state, or the given one with a fault.
    """
    uploaded, upload_result = commit_upload(
        residency,
        plan.diff.basis,
        plan.diff.upload_logical_blocks,
        _destinations(plan, ownership, geometry),
        plan.diff.num_upload,
        is_full=plan.diff.is_full,
        geometry=geometry,
    )
    retention = plan_retention(
        uploaded,
        plan.selection,
        geometry=geometry,
        policy=policy.retention,
        is_due=is_retention_due,
        operations=policy.operations,
    )
    retained = replace_slots(
        uploaded, retention.logical_by_slot, retention.physical_by_slot, retention.num_keep
    )
    owned, retirement, owner_result = commit_ownership(
        ownership,
        plan.reserved,
        plan.reserved_generation,
        owned_blocks(residency.physical_by_slot, residency.num_valid, ownership, geometry),
        owned_blocks(retained.physical_by_slot, retained.num_valid, ownership, geometry),
        geometry=geometry,
    )
    result = first_fault(plan.result, upload_result, owner_result)
    unchanged = (
        residency,
        ownership,
        keep_every_slot(residency, retention),
        retire_nothing(retirement),
    )
    committed = (retained, owned, retention, retirement)
    chosen = choose(result.is_ok, committed, unchanged)
    new_residency, new_ownership, new_retention, new_retirement = chosen
    return StepCommit(
        residency=new_residency,
        ownership=new_ownership,
        retention=new_retention,
        retirement=new_retirement,
        result=result,
    )


@typed_jit(static_argnames=("geometry",))
def abort_step(
    plan: StepPlan, ownership: Ownership, *, geometry: ModelGeometry
) -> tuple[Ownership, Result]:
    """Returns a plan's reservations after its transfer is known to have ended without a commit.

    Args:
        plan: The plan of `plan_step`.
        ownership: The pool's current counts, with the plan's reservation.
        geometry: Static facts.
    """
    aborted, _, result = release(
        ownership,
        plan.reserved,
        geometry=geometry,
        kind=ReferenceKind.TRANSFER,
        generation=plan.reserved_generation,
    )
    return aborted, result


@typed_jit(static_argnames=("geometry", "policy"))
def plan_requests(
    scores: AnyArray,
    num_candidate_blocks: AnyArray,
    residency: Residency,
    ownership: Ownership,
    *,
    budget_blocks: AnyArray,
    geometry: ModelGeometry,
    policy: StepPolicy,
) -> tuple[StepPlan, Ownership]:
    """Plans several requests that share one pool.

    Selection and diff run for all requests at once; reservations follow in request order, so that
    no block is handed out twice. A request with a fault reserves nothing and stops nobody.

    Args:
        scores: float32 [request, row, max_blocks], or per head.
        num_candidate_blocks: Shape [request].
        residency: Stacked on a leading request axis.
        ownership: The shared pool's reference counts, without a request axis.
        budget_blocks: Shape [request] or [request, row].
        geometry: Static facts.
        policy: Static choices; `source_by_logical` is the identity here.

    Returns:
        Plans stacked on a leading request axis, and the shared ownership.
    """

    def plan_one(
        scores: AnyArray, num_candidates: AnyArray, residency: Residency, budget: AnyArray
    ) -> tuple[Selection, BlockDiffPlan]:
        return _select_and_diff(
            scores,
            num_candidates,
            residency,
            budget_blocks=budget,
            force_full=False,
            geometry=geometry,
            policy=policy,
        )

    planned = jax.vmap(plan_one)(scores, num_candidate_blocks, residency, budget_blocks)

    def reserve_one(
        owned: Ownership, one: tuple[Selection, BlockDiffPlan]
    ) -> tuple[Ownership, StepPlan]:
        selection, plan = one
        step_plan, after = _reserve_and_upload(
            selection,
            plan,
            owned,
            source_by_logical=None,
            first_cpu_destination=0,
            geometry=geometry,
            policy=policy,
        )
        return after, step_plan

    owned, plans = lax.scan(reserve_one, ownership, planned)
    return plans, owned


def _destinations(
    plan: StepPlan, ownership: Ownership, geometry: ModelGeometry
) -> Int32[PhysicalBlocks, "row max_upload"]:
    return as_physical_blocks(plan.reserved[geometry.owner_by_row(ownership.granularity)])
