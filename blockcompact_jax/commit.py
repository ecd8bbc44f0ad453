"""What a commit does once the bytes of a plan are on every rank.

A plan that changes no list publishes its selection revision and nothing else: the same bytes as the
whole commit, without its passes over every list.
"""

# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Int32

from .errors import first_fault
from .geometry import ModelGeometry
from .ids import HOLE, PhysicalBlocks, as_physical_blocks
from .masks import choose
from .mesh_axes import varying_axes
from .ownership import Ownership, by_row, commit_ownership, owned_blocks, retire_nothing
from .residency import (
    Residency,
    commit_upload,
    fits_basis,
    publish_selection,
    replace_slots,
)
from .retention import (
    keep_every_slot,
    kind_of_all_slots,
    plan_retention,
    with_lists,
    without_lists,
)
from .step_types import StepCommit, StepPlan, StepPolicy


def commit_plan(
    plan: StepPlan,
    residency: Residency,
    ownership: Ownership,
    *,
    geometry: ModelGeometry,
    policy: StepPolicy,
    is_retention_due: Array,
) -> StepCommit:
    """See `step.commit_step`, which compiles this."""
    static: Any = {"geometry": geometry, "policy": policy}

    def change() -> StepCommit:
        return change_lists(plan, residency, ownership, is_due=is_retention_due, **static)

    def publish() -> StepCommit:
        return publish_revision(plan, residency, ownership, **static)

    # JAX cannot batch a condition whose operands vary over a mesh axis.
    if varying_axes((plan, residency, ownership, is_retention_due)):
        return change()
    is_idle = _is_no_change(plan, residency, is_retention_due)

    # A condition writes all that it gives out to memory, so it gives out nothing twice.
    def without_known(commit: Callable[[], StepCommit]) -> Callable[[], StepCommit]:
        def stripped() -> StepCommit:
            done = commit()
            return replace(done, retention=without_lists(done.retention, policy.retention))

        return stripped

    done = cast(StepCommit, lax.cond(is_idle, without_known(publish), without_known(change)))
    return replace(done, retention=with_lists(done.retention, done.residency, policy.retention))


def _is_no_change(plan: StepPlan, residency: Residency, is_due: Array) -> Bool[Array, ""]:
    """Returns whether a commit of this plan only publishes its selection revision.

    Nothing to upload and as many blocks held as wanted: what is held is what is wanted.
    """
    keeps_all = jnp.all(plan.selection.num_want == residency.num_valid) | ~is_due
    is_idle = jnp.all(plan.diff.num_upload == 0) & jnp.all(plan.reserved == HOLE)
    is_current = fits_basis(residency, plan.diff.basis)
    return plan.result.is_ok & is_idle & ~plan.diff.is_full & keeps_all & is_current


def publish_revision(
    plan: StepPlan,
    residency: Residency,
    ownership: Ownership,
    *,
    geometry: ModelGeometry,
    policy: StepPolicy,
) -> StepCommit:
    """The commit of a plan that changes no list: a new selection revision."""
    revision = jnp.asarray(plan.diff.basis.selection_revision, jnp.int32)
    published = publish_selection(residency, revision)
    kind = kind_of_all_slots(residency, geometry=geometry, policy=policy.retention)
    return StepCommit(
        residency=published,
        ownership=ownership,
        retention=keep_every_slot(published, kind),
        retirement=retire_nothing(ownership),
        result=plan.result,
    )


def change_lists(
    plan: StepPlan,
    residency: Residency,
    ownership: Ownership,
    *,
    geometry: ModelGeometry,
    policy: StepPolicy,
    is_due: Array,
) -> StepCommit:
    """The commit of any plan: append, retain, and move references."""
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
        is_due=is_due,
        operations=policy.operations,
    )
    retained = replace_slots(
        uploaded, retention.logical_by_slot, retention.physical_by_slot, retention.num_keep
    )
    operations = policy.operations
    is_before, is_after = (
        owned_blocks(state.physical_by_slot, state.num_valid, ownership, geometry, operations)
        for state in (residency, retained)
    )
    owned, retirement, owner_result = commit_ownership(
        ownership,
        plan.reserved,
        plan.reserved_generation,
        is_before,
        is_after,
        geometry=geometry,
        operations=operations,
    )
    result = first_fault(plan.result, upload_result, owner_result)
    unchanged = (
        residency,
        ownership,
        keep_every_slot(residency, retention.kind),
        retire_nothing(ownership),
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


def _destinations(
    plan: StepPlan, ownership: Ownership, geometry: ModelGeometry
) -> Int32[PhysicalBlocks, "row max_upload"]:
    return as_physical_blocks(by_row(plan.reserved, geometry, ownership.granularity))
