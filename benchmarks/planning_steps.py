"""What the planning benchmark times of this package: rankings, and whole steps."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from planning_rivals import Call, Inputs, Workload, best_mask, check, padded

from blockcompact_jax import (
    ModelGeometry,
    OwnershipGranularity,
    PlanOperations,
    RetentionPolicy,
    SelectionPolicy,
    StepPolicy,
    TableSupport,
    commit_step,
    empty_ownership,
    empty_residency,
    find_zero_delta,
    plan_step,
    publish_selection,
    raise_for_result,
)
from blockcompact_jax.kernels import RankOrder, rank
from blockcompact_jax.masks import ids_from_mask
from blockcompact_jax.ranking import score_keys, top_mask

NUM_HEADS, NUM_REQUESTS = 4, 64


@partial(jax.jit, static_argnames="wanted")
def rank_pure(scores: jax.Array, is_held: jax.Array, wanted: int) -> jax.Array:
    count = jnp.full(scores.shape[:1], wanted, jnp.int32)
    return ids_from_mask(top_mask(score_keys(scores), count) & ~is_held, wanted)


@partial(jax.jit, static_argnames="wanted")
def rank_native(scores: jax.Array, is_held: jax.Array, wanted: int) -> jax.Array:
    count = jnp.full(scores.shape[:1], wanted, jnp.int32)
    order = RankOrder.BLOCK
    return rank(scores, count, capacity=wanted, order=order, is_excluded=is_held).blocks


@partial(jax.jit, static_argnames="wanted")
def dispatch(scores: jax.Array, is_held: jax.Array, wanted: int) -> jax.Array:
    chosen = jnp.where(is_held[:, :1], 0, scores[:, :1].astype(jnp.int32))
    return jnp.broadcast_to(chosen, (scores.shape[0], wanted))


class Step:
    """The whole step of one workload, from the state in which the old scores' blocks are held."""

    def __init__(self, workload: Workload, inputs: Inputs, operations: PlanOperations) -> None:
        self.inputs = inputs
        self.name = f"step, {operations.name}"
        self.num_blocks, self.wanted = np.int32(workload.blocks), np.int32(workload.wanted)
        self.geometry = ModelGeometry.uniform(
            num_layers=workload.layers,
            num_query_heads=NUM_HEADS,
            num_kv_heads=1,
            head_dim=64,
            block_tokens=32,
            dtype="bfloat16",
            layout="vec",
        )
        self.policy = StepPolicy(
            selection=SelectionPolicy(max_want=workload.wanted, sink_blocks=0, recent_blocks=0),
            retention=RetentionPolicy(tables=TableSupport.LAYER),
            max_upload=workload.wanted,
            operations=operations,
        )
        self.residency = empty_residency(self.geometry, max_slots=2 * workload.wanted)
        self.ownership = empty_ownership(
            self.geometry,
            granularity=OwnershipGranularity.LAYER,
            num_physical_blocks=2 * workload.wanted,
        )
        done = self.run(jnp.asarray(inputs.old_scores))[1]
        self.residency, self.ownership = done.residency, done.ownership

    def plan(self, scores: jax.Array) -> Any:
        """Selects, compares, reserves and lists the uploads."""
        return plan_step(
            scores,
            self.num_blocks,
            self.residency,
            self.ownership,
            budget_blocks=self.wanted,
            geometry=self.geometry,
            policy=self.policy,
        )

    def zero(self, scores: jax.Array) -> Any:
        """Checks whether anything changes; the residency to go on with where nothing does."""
        found = find_zero_delta(
            scores,
            self.num_blocks,
            self.residency,
            budget_blocks=self.wanted,
            geometry=self.geometry,
            policy=self.policy,
        )
        if not found.is_zero:
            return None
        return publish_selection(self.residency, found.selection_revision)

    def run(self, scores: jax.Array) -> tuple[Any, Any]:
        """Plans, commits, retains and frees, and waits for it."""
        plan, reserving = self.plan(scores)
        done = commit_step(
            plan, self.residency, reserving, geometry=self.geometry, policy=self.policy
        )
        return jax.block_until_ready((plan, done))

    def full_call(self) -> Call:
        """The call that plans and commits, checked."""
        scores = jnp.asarray(self.inputs.scores)
        self.run_checked(scores)
        return lambda: self.run(scores)

    def run_checked(self, scores: jax.Array) -> Any:
        """Plans and commits; what is uploaded and held then is the reference's answer."""
        plan, done = self.run(scores)
        raise_for_result(done.result)
        check("step", plan.diff.upload_logical_blocks, self.inputs.expected)
        held = np.sort(np.asarray(done.residency.logical_by_slot)[:, : int(self.wanted)], axis=1)
        is_wanted = best_mask(self.inputs.scores, int(self.wanted))
        check("step", held, padded(is_wanted, int(self.wanted)))
        return done

    def calls(self) -> dict[str, Call]:
        """The step's calls, each checked."""
        scores = jnp.asarray(self.inputs.scores)
        by_head = jnp.stack([scores] * NUM_HEADS, axis=1)
        done = self.run_checked(scores)
        from_heads = self.run(by_head)[0].diff.upload_logical_blocks
        check("step with heads", from_heads, self.inputs.expected)
        again = copy.copy(self)
        again.residency, again.ownership = done.residency, done.ownership
        zero, zero_done = again.run(scores)
        raise_for_result(zero_done.result)
        num_upload = np.asarray(zero.diff.num_upload)
        check("0-delta step", num_upload, np.zeros_like(num_upload))
        published = again.zero(scores)
        is_right = published is not None and self.zero(scores) is None
        check("0-delta check", np.asarray(is_right), np.asarray(True))
        held_again = np.asarray(zero_done.residency.logical_by_slot)
        check("0-delta step", published.logical_by_slot, held_again)
        return {
            f"{self.name}: plan only": lambda: jax.block_until_ready(self.plan(scores)),
            f"{self.name}: plan and commit": lambda: self.run(scores),
            f"{self.name}: plan and commit, {NUM_HEADS} heads": lambda: self.run(by_head),
            f"{self.name}: 0-delta": lambda: again.zero(scores),
            f"{self.name}: 0-delta, planned": lambda: again.run(scores),
            f"{self.name}: check that finds a change": lambda: self.zero(scores),
        }

    def floor(self) -> Call:
        """Calls that take what a plan and a commit take, give what they compute, and do nothing."""
        scores = jnp.asarray(self.inputs.scores)
        plan, done = self.run(scores)
        state = (scores, self.num_blocks, self.residency, self.ownership, self.wanted)
        given = (plan, self.residency, self.ownership)
        again, done_again = self.run(scores)

        def blank(result: Any, repeated: Any) -> Any:
            # A leaf that is the same array in both is an argument or a constant.
            pairs = zip(jax.tree.leaves(result), jax.tree.leaves(repeated), strict=True)
            computed = {id(leaf): leaf for leaf, other in pairs if leaf is not other}
            zeros = lambda leaf: jnp.zeros(leaf.shape, leaf.dtype)  # noqa: E731
            return jax.jit(lambda _: jax.tree.map(zeros, list(computed.values())), keep_unused=True)

        reserving, reserving_again = (self.plan(scores)[1] for _ in range(2))
        plan_floor = blank((plan, reserving), (again, reserving_again))
        commit_floor = blank(done, done_again)
        return lambda: jax.block_until_ready((plan_floor(state), commit_floor(given)))

    def batch_calls(self) -> dict[str, Call]:
        """Plans of many requests: under vmap, and one call after another."""
        rng = np.random.default_rng(1)
        batch = [jnp.asarray(rng.permuted(self.inputs.scores, axis=1)) for _ in range(NUM_REQUESTS)]
        stacked = jnp.stack(batch)
        vmapped = jax.jit(jax.vmap(self.plan))

        def together() -> Any:
            return jax.block_until_ready(vmapped(stacked))

        def apart() -> Any:
            return [jax.block_until_ready(self.plan(scores)) for scores in batch]

        plans = together()
        for place, single in enumerate(apart()):
            for left, right in zip(jax.tree.leaves(plans), jax.tree.leaves(single), strict=True):
                check("vmap", left[place], np.asarray(right))
        return {
            f"{self.name}: {NUM_REQUESTS} requests, vmap": together,
            f"{self.name}: {NUM_REQUESTS} requests, one by one": apart,
        }
