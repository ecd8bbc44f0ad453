"""Whether a step changes nothing but the selection revision, known before it is planned."""

# pyright: reportUnknownMemberType=false

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jaxtyping import Bool, Int32

from .geometry import ModelGeometry
from .ids import AnyArray
from .residency import Residency, check_fits_geometry
from .scores import reduce_heads
from .selection import is_selected, is_selected_on_host
from .step_types import StepPolicy, ZeroDelta
from .typed_jit import typed_jit


def scores_to_rank(
    scores: AnyArray, residency: Residency, policy: StepPolicy
) -> tuple[AnyArray, Bool[Array, "row max_blocks"] | None]:
    """Returns one score per row and block, and which are resident where the policy asks for it."""
    if scores.ndim > 2:
        scores = reduce_heads(scores, head_reduction=policy.selection.head_reduction)
    if policy.selection.resident_margin == 0.0:
        return scores, None
    num_rows, max_blocks = scores.shape
    is_resident = policy.operations.mark_ids(
        residency.logical_by_slot,
        residency.num_valid,
        np.arange(num_rows, dtype=np.int32),
        num_owners=num_rows,
        max_ids=max_blocks,
    )
    return scores, is_resident


def find_zero_delta(
    scores: AnyArray,
    num_candidate_blocks: AnyArray | int,
    residency: Residency,
    *,
    budget_blocks: AnyArray | int,
    geometry: ModelGeometry,
    policy: StepPolicy,
) -> ZeroDelta:
    """Tells whether a step would change nothing but the selection revision, before planning it.

    It holds exactly where what is wanted is what is held, in every layer: then `plan_step` uploads
    nothing, and a commit drops nothing. Reading the scores once answers it, and no plan is made:

        zero = find_zero_delta(scores, ...)
        if zero.is_zero:
            residency = publish_selection(residency, zero.selection_revision)
        else:
            plan, reserving = plan_step(scores, ...)

    Under jit, `lax.cond` chooses in place of `if`. Called with arrays in a CPU's memory and
    operations that check on the host (`HostOperations`, such as `kernels.NativeOperations`), it
    dispatches nothing: `is_zero` is a NumPy bool, and the revision is one of NumPy too unless the
    residency is committed to a device.

    Where a stage would refuse its input, nothing is zero: `plan_step` says why. A step that uploads
    nothing but drops blocks is not zero either, nor one that keeps unwanted blocks because
    retention is not due.

    Args:
        scores: As in `plan_step`. Scores per head are reduced here and once more when planning;
            give both calls the result of `reduce_heads` to do it once.
        num_candidate_blocks: As in `plan_step`.
        residency: What is resident now.
        budget_blocks: As in `plan_step`.
        geometry: Static facts.
        policy: Static choices.

    Raises:
        CompactionError: If the shape or dtype of `scores`, a block size or a row count is wrong
            (at trace time).
    """
    is_zero = _is_zero_on_host(
        scores,
        num_candidate_blocks,
        residency,
        budget_blocks=budget_blocks,
        geometry=geometry,
        policy=policy,
    )
    if is_zero is not None:
        revision = _next_revision_on_host(residency.revisions.selection_revision)
        return ZeroDelta(is_zero=np.bool_(is_zero), selection_revision=revision)
    check_fits_geometry(residency, geometry)
    return _find_zero_delta(
        scores,
        num_candidate_blocks,
        residency,
        budget_blocks=budget_blocks,
        geometry=geometry,
        policy=policy,
    )


def _is_zero_on_host(
    scores: AnyArray,
    num_candidate_blocks: AnyArray | int,
    residency: Residency,
    *,
    budget_blocks: AnyArray | int,
    geometry: ModelGeometry,
    policy: StepPolicy,
) -> bool | None:
    """Returns None where the host cannot tell, or where a shape or dtype is to be refused."""
    operations = policy.host_operations
    if (
        operations is None
        or _is_traced(num_candidate_blocks)
        or _is_traced(budget_blocks)
        or residency.block_tokens != geometry.block_tokens
    ):
        return None
    return is_selected_on_host(
        scores,
        num_candidate_blocks,
        residency.logical_by_slot,
        residency.num_valid,
        budget_blocks=budget_blocks,
        geometry=geometry,
        policy=policy.selection,
        operations=operations,
    )


def _is_traced(value: AnyArray | int) -> bool:
    return isinstance(value, Tracer)


def _next_revision_on_host(revision: AnyArray) -> Int32[AnyArray, ""]:
    """Returns the next revision; a NumPy array of it spares the dispatch of a call that adds 1."""
    if isinstance(revision, Array) and (_is_traced(revision) or revision.committed):
        # Beside arrays that are committed to a device a NumPy one would compile later calls anew.
        return _next_revision(revision)
    return np.asarray(np.asarray(revision, np.int32) + np.int32(1))


@typed_jit(inline=True)
def _next_revision(selection_revision: AnyArray) -> Int32[Array, ""]:
    return jnp.asarray(selection_revision, jnp.int32) + 1


@typed_jit(static_argnames=("geometry", "policy"))
def _find_zero_delta(
    scores: AnyArray,
    num_candidate_blocks: AnyArray | int,
    residency: Residency,
    *,
    budget_blocks: AnyArray | int,
    geometry: ModelGeometry,
    policy: StepPolicy,
) -> ZeroDelta:
    scores, is_resident = scores_to_rank(scores, residency, policy)
    is_zero = is_selected(
        scores,
        num_candidate_blocks,
        residency.logical_by_slot,
        residency.num_valid,
        budget_blocks=budget_blocks,
        geometry=geometry,
        policy=policy.selection,
        is_resident=is_resident,
        operations=policy.operations,
    )
    revision = _next_revision(residency.revisions.selection_revision)
    return ZeroDelta(is_zero=is_zero, selection_revision=revision)
