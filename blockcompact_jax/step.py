"""The stages composed, in the order they run: plan, (transfer), commit or abort.

Each function is one jitted call for all layers of a request and traces under vmap and scan. Nothing
is retraced as long as shapes, geometry and policy stay.
"""

# pyright: reportUnknownMemberType=false

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Int32

from .commit import commit_plan
from .diff import BlockDiffPlan, diff
from .errors import Result, first_fault
from .geometry import ModelGeometry, OwnershipGranularity, TableSupport
from .ids import HOLE, AnyArray, SourceBlocks, as_physical_blocks
from .ownership import (
    Ownership,
    ReferenceKind,
    by_row,
    generation_of,
    release,
    reserve,
)
from .residency import Residency
from .selection import Selection, select
from .shared_results import jit_with_shared_results
from .step_types import StepCommit, StepPlan, StepPolicy
from .typed_jit import typed_jit
from .upload import plan_upload
from .zero_delta import scores_to_rank


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
    scores, is_resident = scores_to_rank(scores, residency, policy)
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
    destinations = by_row(reserved, geometry, ownership.granularity)
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


@jit_with_shared_results(static_argnames=("geometry", "policy"))
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


@jit_with_shared_results(static_argnames=("geometry", "policy"))
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
    return commit_plan(
        plan,
        residency,
        ownership,
        geometry=geometry,
        policy=policy,
        is_retention_due=jnp.asarray(is_retention_due),
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
