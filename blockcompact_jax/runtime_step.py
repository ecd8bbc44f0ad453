"""One step of the runtime: planned in full only where something changes.

A step that changes no list keeps the very arrays it was given. It is published all the same, with a
transfer of no rows.
"""

# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import Array
from jaxtyping import Float32

from blockcompact_jax.errors import raise_for_result
from blockcompact_jax.geometry import ModelGeometry
from blockcompact_jax.ownership import Ownership
from blockcompact_jax.residency import Residency, publish_selection
from blockcompact_jax.scores import reduce_heads
from blockcompact_jax.step import (
    StepPlan,
    StepPolicy,
    commit_step,
    plan_step,
)
from blockcompact_jax.typed_jit import typed_jit
from blockcompact_jax.upload import UploadPlan, plan_no_upload
from blockcompact_jax.zero_delta import find_zero_delta

_reduce_heads = typed_jit(static_argnames=("head_reduction",))(reduce_heads)


class Committed(NamedTuple):
    """The state after a step.

    Attributes:
        residency: the new lists.
        ownership: the new reference counts.
        num_released: physical blocks freed.
    """

    residency: Residency
    ownership: Ownership
    num_released: int


@dataclass(frozen=True, kw_only=True)
class RuntimeStep:
    """What a step moves, and how to commit it.

    Attributes:
        upload: rows to move; none where nothing changes.
        commit: gives the new state once the rows are moved; raises PlanError if refused.
    """

    upload: UploadPlan
    commit: Callable[[], Committed]


@dataclass(frozen=True, kw_only=True)
class StepPlanner:
    """Plans the steps of one runtime.

    Attributes:
        geometry: static facts.
        policy: static choices.
        first_cpu_destination: first block of the CPU compaction area, with CPU_COPY.
    """

    geometry: ModelGeometry
    policy: StepPolicy
    first_cpu_destination: int

    def plan(
        self,
        scores: Float32[Array, "row *heads max_blocks"],
        num_candidate_blocks: int,
        residency: Residency,
        ownership: Ownership,
        *,
        budget_blocks: int,
    ) -> RuntimeStep:
        """Plans a step, with the arguments of `plan_step`.

        Raises:
            PlanError: if a stage refuses its input.
        """
        scores = self._reduce_heads(scores)
        zero = find_zero_delta(
            scores, num_candidate_blocks, residency, budget_blocks=budget_blocks, **self._static
        )
        if zero.is_zero:
            published = publish_selection(residency, zero.selection_revision)
            return RuntimeStep(
                upload=plan_no_upload(published.revisions, source_kind=self.policy.source_kind),
                commit=lambda: Committed(published, ownership, 0),
            )
        plan, reserved = self._plan_step(
            scores, num_candidate_blocks, residency, ownership, budget_blocks=budget_blocks
        )
        raise_for_result(plan.result)

        def commit() -> Committed:
            done = commit_step(plan, residency, reserved, **self._static)
            raise_for_result(done.result)
            num_released = int(done.retirement.physical_blocks_released)
            return Committed(done.residency, done.ownership, num_released)

        return RuntimeStep(upload=plan.upload, commit=commit)

    def warm_up(
        self,
        scores: Float32[Array, "row *heads max_blocks"],
        residency: Residency,
        ownership: Ownership,
    ) -> None:
        """Compiles every call that a step makes, for finite scores like these."""
        scores = self._reduce_heads(scores)
        find_zero_delta(scores, 0, residency, budget_blocks=0, **self._static)
        plan, reserved = self._plan_step(scores, 0, residency, ownership, budget_blocks=0)
        jax.block_until_ready(commit_step(plan, residency, reserved, **self._static))

    @property
    def _static(self) -> dict[str, Any]:
        return {"geometry": self.geometry, "policy": self.policy}

    def _reduce_heads(self, scores: Array) -> Array:
        """Reduces heads once, for both the check and the plan."""
        if scores.ndim == 2:
            return scores
        return _reduce_heads(scores, head_reduction=self.policy.selection.head_reduction)

    def _plan_step(
        self,
        scores: Array,
        num_candidate_blocks: int,
        residency: Residency,
        ownership: Ownership,
        *,
        budget_blocks: int,
    ) -> tuple[StepPlan, Ownership]:
        return plan_step(
            scores,
            num_candidate_blocks,
            residency,
            ownership,
            budget_blocks=budget_blocks,
            first_cpu_destination=self.first_cpu_destination,
            **self._static,
        )
