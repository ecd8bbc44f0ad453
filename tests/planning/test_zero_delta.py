"""A step that changes no list gives the bytes of the whole commit."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockcompact_jax import commit as commit_module
from blockcompact_jax.errors import ResultCode, raise_for_result
from blockcompact_jax.step import commit_step, plan_step

from . import step_cases as cases

KINDS = {name: cases.KINDS[name] for name in ("shared", "layer")}
GEOMETRY = cases.GEOMETRY


@functools.cache
def jitted(function):
    return jax.jit(function, static_argnames=("geometry", "policy"))


def whole_commit(plan, residency, ownership, policy, is_due):
    return jitted(commit_module.change_lists)(
        plan, residency, ownership, geometry=GEOMETRY, policy=policy, is_due=np.bool_(is_due)
    )


def after_one_step(seed, kind):
    """A state that holds what random scores want, and a function that plans from it."""
    case = cases.make(seed, kind)
    scores, num_candidates, residency, ownership, budgets, *_ = cases.inputs(case, kind)

    def plan(residency, ownership, budgets):
        return plan_step(
            scores,
            num_candidates,
            residency,
            ownership,
            budget_blocks=budgets,
            geometry=GEOMETRY,
            policy=kind.policy,
        )

    first, reserving = plan(residency, ownership, budgets)
    done = commit_step(first, residency, reserving, geometry=GEOMETRY, policy=kind.policy)
    raise_for_result(done.result)
    return done.residency, done.ownership, budgets, plan


@pytest.mark.parametrize("name", list(KINDS))
@given(seed=st.integers(0, 2**31 - 1), is_due=st.booleans(), is_smaller=st.booleans())
def test_DIF_6_zero_delta_commits_the_bytes_of_the_whole_commit(name, seed, is_due, is_smaller):
    """DIF-6, COM-2: nothing to upload; also where a smaller budget still drops blocks."""
    kind = KINDS[name]
    residency, ownership, budgets, plan_from = after_one_step(seed, kind)
    if is_smaller:
        budgets = np.maximum(budgets - 1, 2).astype(np.int32)
    plan, reserving = plan_from(residency, ownership, budgets)
    raise_for_result(plan.result)
    got = commit_step(
        plan,
        residency,
        reserving,
        geometry=GEOMETRY,
        policy=kind.policy,
        is_retention_due=np.bool_(is_due),
    )
    raise_for_result(got.result)
    cases.assert_same_bytes(got, whole_commit(plan, residency, reserving, kind.policy, is_due))


@pytest.mark.parametrize("name", list(KINDS))
def test_DIF_6_a_zero_delta_takes_the_short_way(name, monkeypatch):
    """DIF-6: the whole commit is not what ran, and the revision is published all the same."""
    kind = KINDS[name]
    residency, ownership, budgets, plan_from = after_one_step(3, kind)
    plan, reserving = plan_from(residency, ownership, budgets)
    assert not np.asarray(plan.diff.num_upload).any()

    def broken(*args, **kwargs):
        done = commit_module.publish_revision(
            *args[:3], geometry=kwargs["geometry"], policy=kwargs["policy"]
        )
        return dataclasses.replace(done, ownership=jax.tree.map(lambda x: x - 1, done.ownership))

    monkeypatch.setattr(commit_module, "change_lists", broken)
    done = jax.jit(
        lambda *trees: commit_module.commit_plan(
            *trees, geometry=GEOMETRY, policy=kind.policy, is_retention_due=np.bool_(True)
        )
    )(plan, residency, reserving)
    cases.assert_same_bytes(done.ownership, reserving)
    before, after = residency.revisions, done.residency.revisions
    assert int(after.selection_revision) == int(before.selection_revision) + 1
    assert int(after.map_revision) == int(before.map_revision)


def test_DIF_6_a_stale_zero_delta_is_refused():
    """DIF-6, COM-3: published once; the second commit of the same plan is stale."""
    kind = KINDS["layer"]
    residency, ownership, budgets, plan_from = after_one_step(5, kind)
    plan, reserving = plan_from(residency, ownership, budgets)
    static = {"geometry": GEOMETRY, "policy": kind.policy}
    done = commit_step(plan, residency, reserving, **static)
    raise_for_result(done.result)
    again = commit_step(plan, done.residency, done.ownership, **static)
    assert int(again.result.code) == ResultCode.STALE_PLAN
    cases.assert_same_bytes(again.residency, done.residency)
