"""The composed step, driven over a simulated pool of bytes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockcompact_jax import step as step_module
from blockcompact_jax.errors import ResultCode, raise_for_result
from blockcompact_jax.geometry import OwnershipGranularity, TableSupport
from blockcompact_jax.ownership import ReferenceKind, acquire
from blockcompact_jax.residency import check_residency, graduate
from blockcompact_jax.retention import RetentionKind
from blockcompact_jax.step import abort_step, commit_step, plan_requests, plan_step
from blockcompact_jax.upload import check_upload_plan

from . import builders as b
from . import step_cases as cases
from .reference import retain as ref_retain
from .reference import select as ref_select
from .step_pool import (
    GEOMETRY,
    LAYER_TABLES,
    MAX_BLOCKS,
    MAX_SLOTS,
    NUM_PHYSICAL,
    Pool,
    check_conservation,
    commit_one,
    committed,
    one_step,
    plan_one,
    policy,
    same,
    start,
)

ROUND = st.tuples(
    st.integers(0, 2**31 - 1),  # score seed
    st.integers(0, MAX_BLOCKS),  # candidates
    st.integers(2, 8),  # budget
    st.sampled_from(["commit", "commit", "commit", "abort", "full", "not_due"]),
)


@pytest.mark.parametrize("granularity", list(OwnershipGranularity))
@pytest.mark.parametrize(
    ("tables", "union"),
    [(TableSupport.LAYER, False), (TableSupport.SHARED, False), (TableSupport.SHARED, True)],
)
@settings(max_examples=max(8, settings().max_examples // 4))
@given(rounds=st.lists(ROUND, min_size=2, max_size=6))
def test_OWN_1_any_run_keeps_bytes_tables_and_references_right(granularity, tables, union, rounds):
    """OWN-1, OWN-2, OWN-4, UPL-6, RET-6, DIF-1: after every step each slot reads its block."""
    residency, ownership = start(granularity)
    pool = Pool(GEOMETRY.num_rows)
    chosen = policy(tables, union=union)
    longest = 0
    for seed, length, budget, verb in rounds:
        num_candidates = longest = max(longest, length)
        scores = np.random.default_rng(seed).integers(0, 6, (3, MAX_BLOCKS)).astype(np.float32)
        plan, reserving = plan_one(
            residency,
            ownership,
            scores,
            budget=budget,
            num_candidates=num_candidates,
            chosen=chosen,
            force_full=verb == "full",
        )
        if int(plan.result.code) == ResultCode.POOL_EXHAUSTED:
            assert np.array_equal(reserving.references, ownership.references)
            continue
        raise_for_result(plan.result)
        is_owned = np.asarray(reserving.references)[ReferenceKind.TRANSFER] > 0
        check_upload_plan(
            plan.upload,
            GEOMETRY,
            num_source_blocks=MAX_BLOCKS,
            num_physical_blocks=NUM_PHYSICAL,
            is_owned=is_owned[GEOMETRY.owner_by_row(granularity)],
        )
        pool.upload(plan.upload)
        pool.read(residency)  # the old state stays readable until the commit
        if verb == "abort":
            ownership, result = abort_step(plan, reserving, geometry=GEOMETRY)
            raise_for_result(result)
            check_conservation([residency], ownership, GEOMETRY)
            continue
        done = commit_one(plan, residency, reserving, chosen=chosen, is_due=verb != "not_due")
        if int(done.result.code) == ResultCode.RESIDENCY_FULL:
            ownership, _ = abort_step(plan, reserving, geometry=GEOMETRY)
            continue
        raise_for_result(done.result)
        pool.move(done.retention)
        before = int((~np.asarray(reserving.is_free)).sum())
        residency, ownership = done.residency, done.ownership
        held = pool.read(residency)
        check_residency(residency, GEOMETRY, num_blocks=max(num_candidates, 1))
        check_conservation([residency], ownership, GEOMETRY)
        after = int((~np.asarray(ownership.is_free)).sum())
        assert int(done.retirement.physical_blocks_released) == before - after
        wants, _ = ref_select.select(
            scores, num_candidates, budgets=[budget] * 3, sink=1, recent=1, max_tail=0
        )
        for row in range(3):
            assert set(wants[row]) <= set(held[row])
            kind = int(np.asarray(done.retention.kind)[GEOMETRY.group_place_by_row[row]])
            if verb != "not_due" and kind != RetentionKind.UNION:
                assert set(wants[row]) == set(held[row])


def test_DIF_6_same_scores_again_are_a_published_zero_delta():
    """DIF-6: nothing moves, the generation stays, the selection revision advances."""
    scores, _, done = committed()
    plan, reserving = one_step(done.residency, done.ownership, scores)
    raise_for_result(plan.result)
    assert int(plan.upload.num_rows) == 0
    assert int(plan.diff.basis.selection_revision) == 2
    again = commit_one(plan, done.residency, reserving, chosen=LAYER_TABLES)
    raise_for_result(again.result)
    old, new = done.residency.revisions, again.residency.revisions
    assert int(new.selection_revision) == int(old.selection_revision) + 1
    assert int(new.pool_generation) == int(old.pool_generation)
    assert int(new.map_revision) == int(old.map_revision)
    assert int(again.retirement.physical_blocks_released) == 0


def test_OWN_5_committing_a_plan_twice_is_refused_as_stale():
    """OWN-5: a committed plan does not fit the residency it led to."""
    residency, ownership = start(OwnershipGranularity.GROUP)
    scores = np.random.default_rng(0).random((3, MAX_BLOCKS))
    plan, reserving = one_step(residency, ownership, scores)
    done = commit_one(plan, residency, reserving, chosen=LAYER_TABLES)
    again = commit_one(plan, done.residency, done.ownership, chosen=LAYER_TABLES)
    assert int(again.result.code) == ResultCode.STALE_PLAN
    assert same((again.residency, again.ownership), (done.residency, done.ownership))
    assert not np.asarray(again.retention.num_moves).any()


def test_OWN_5_a_request_readmitted_as_another_epoch_cannot_be_committed():
    """OWN-5: a plan of epoch 0 does not commit into epoch 1."""
    residency, ownership = start(OwnershipGranularity.GROUP)
    scores = np.random.default_rng(0).random((3, MAX_BLOCKS))
    plan, reserving = one_step(residency, ownership, scores)
    readmitted, _ = start(OwnershipGranularity.GROUP, request_epoch=1)
    done = commit_one(plan, readmitted, reserving, chosen=LAYER_TABLES)
    assert b.fault(done.result) == (ResultCode.STALE_PLAN, -1, 0)


def test_SEL_4_a_faulty_step_changes_nothing():
    """SEL-4: a NaN reserves nothing, uploads nothing, and its plan cannot be committed."""
    scores, _, done = committed()
    scores = scores.copy()
    scores[1, 3] = np.nan
    plan, reserving = one_step(done.residency, done.ownership, scores)
    assert b.fault(plan.result) == (ResultCode.NON_FINITE_SCORE, 2, 3)
    assert np.array_equal(reserving.references, done.ownership.references)
    assert int(plan.upload.num_rows) == 0
    assert (np.asarray(plan.reserved) == -1).all()
    tried = commit_one(plan, done.residency, reserving, chosen=LAYER_TABLES)
    assert b.fault(tried.result) == (ResultCode.NON_FINITE_SCORE, 2, 3)
    assert same(tried.residency, done.residency)


def test_UPL_3_sources_follow_the_map_and_a_missing_source_is_refused():
    """UPL-3: source IDs come from the map; a block that the CPU pool lacks is refused."""
    kind = cases.KINDS["shared"]
    case = cases.make(0, kind, num_candidates=20)
    plan, _ = cases.step(kind)(*cases.inputs(case, kind))
    raise_for_result(plan.result)
    used = np.asarray(plan.upload.layer) >= 0
    logical = np.asarray(plan.upload.logical_block)[used]
    assert logical.size > 0
    assert np.asarray(plan.upload.source_block)[used].tolist() == [
        case["sources"][block] for block in logical
    ]
    case["sources"][logical[0]] = -1
    plan, done = cases.step(kind)(*cases.inputs(case, kind))
    layer = GEOMETRY.full_layers[int(np.flatnonzero(used)[0]) // kind.policy.max_upload]
    assert b.fault(plan.result) == (ResultCode.SOURCE_MISSING, layer, logical[0])
    assert np.array_equal(done.ownership.references, case["references"])


def test_UPL_3_the_copy_path_names_its_cpu_destinations():
    """UPL-3: with cpu_copy every row has a CPU destination block of its own."""
    kind = cases.KINDS["layer"]
    case = cases.make(0, kind, num_candidates=20) | {"first_copy": 100}
    plan, _ = cases.step(kind)(*cases.inputs(case, kind))
    used = np.asarray(plan.upload.layer) >= 0
    copies = np.asarray(plan.upload.cpu_destination_block)
    assert used.sum() > 0
    assert copies[used].tolist() == list(range(100, 100 + used.sum()))
    assert (copies[~used] == -1).all()


def test_UPL_2_rows_carry_layer_group_and_valid_tokens():
    """UPL-2: only full-attention layers are packed, each row with its layer and group."""
    residency, ownership = start(OwnershipGranularity.GROUP)
    plan, _ = one_step(residency, ownership, np.zeros((3, MAX_BLOCKS)), budget=3)
    upload = plan.upload
    used = np.asarray(upload.layer) >= 0
    assert np.asarray(upload.layer)[used].tolist() == [0, 0, 2, 2, 3, 3]
    assert np.asarray(upload.layer_row)[used].tolist() == [0, 0, 1, 1, 2, 2]
    assert np.asarray(upload.group)[used].tolist() == [0, 0, 0, 0, 2, 2]
    assert (np.asarray(upload.valid_tokens) == np.where(used, GEOMETRY.block_tokens, 0)).all()
    assert int(upload.num_rows) == 6


def test_OWN_1_graduated_blocks_become_resident_without_an_upload():
    """OWN-1, RET-8: a block that leaves the tail is resident where it lies, and retires later."""
    _, _, done = committed()
    residency, ownership = done.residency, done.ownership
    ownership, result = acquire(
        ownership, np.asarray([[20], [20]], np.int32), geometry=GEOMETRY, kind=ReferenceKind.REGULAR
    )
    raise_for_result(result)
    column = np.full((3, 1), 20, np.int32)
    residency, result = graduate(residency, column, column, geometry=GEOMETRY)
    raise_for_result(result)
    scores = np.zeros((3, MAX_BLOCKS))
    scores[:, 20] = 1.0
    plan, reserving = one_step(residency, ownership, scores, num_candidates=21, budget=3)
    assert b.lists(plan.selection.want, plan.selection.num_want) == [[0, 20]] * 3
    assert 20 not in np.asarray(plan.upload.logical_block).tolist()
    done = commit_one(plan, residency, reserving, chosen=LAYER_TABLES)
    raise_for_result(done.result)
    check_conservation([done.residency], done.ownership, GEOMETRY)


def test_OWN_4_layer_tables_may_free_nothing():
    """OWN-4: each layer drops a block that the other keeps; the group frees none, layers two."""
    released = {}
    for granularity in OwnershipGranularity:
        residency, ownership = start(granularity)
        scores = np.zeros((3, MAX_BLOCKS))
        scores[:, [1, 2]] = 1.0
        second = scores.copy()
        second[0, 1] = second[1, 2] = 2.0
        for values, budget in ((scores, 4), (second, 3)):
            plan, reserving = one_step(residency, ownership, values, budget=budget)
            done = commit_one(plan, residency, reserving, chosen=LAYER_TABLES)
            raise_for_result(done.result)
            residency, ownership = done.residency, done.ownership
        assert int(done.retention.kind[0]) == RetentionKind.LAYER_TABLES
        rows = GEOMETRY.owner_by_row(granularity)[:2]  # layers 0 and 2, of one group
        is_released = np.asarray(done.retirement.is_released)[np.unique(rows)]
        released[granularity] = int(is_released.sum())
        assert done.retirement.physical_blocks_released == done.retirement.is_released.sum()
    assert released == {OwnershipGranularity.GROUP: 0, OwnershipGranularity.LAYER: 2}


@pytest.mark.parametrize("granularity", list(OwnershipGranularity))
def test_OWN_1_requests_of_one_pool_never_share_a_destination(granularity):
    """OWN-1, SEL-3: planning requests together equals planning them one after another."""
    rng = np.random.default_rng(1)
    scores = rng.integers(0, 5, (4, 3, MAX_BLOCKS)).astype(np.float32)
    scores[2, 0, 0] = np.inf
    single, ownership = start(granularity)
    stacked = jax.tree.map(lambda x: jnp.stack([x] * 4), single)
    budgets = np.asarray([4, 5, 6, 7], np.int32)
    plans, together = plan_requests(
        scores,
        np.full(4, 20, np.int32),
        stacked,
        ownership,
        budget_blocks=budgets,
        geometry=GEOMETRY,
        policy=LAYER_TABLES,
    )
    apart = ownership
    for i in range(4):
        plan, apart = one_step(single, apart, scores[i], budget=budgets[i])
        assert same(cases.item(plans, i), plan)
    assert np.array_equal(together.references, apart.references)
    assert np.asarray(together.references)[ReferenceKind.TRANSFER].max() == 1
    assert np.asarray(plans.result.code).tolist() == [0, 0, ResultCode.NON_FINITE_SCORE, 0]


def test_SEL_3_steps_run_in_the_users_own_scan():
    """SEL-3: a jitted scan that carries the state equals one call after another."""
    residency, ownership = start(OwnershipGranularity.LAYER)
    batch = np.random.default_rng(2).integers(0, 4, (3, 3, MAX_BLOCKS)).astype(np.float32)
    chosen = policy(TableSupport.SHARED)

    def body(carry, scores):
        plan, reserving = plan_step(
            scores,
            jnp.int32(20),
            *carry,
            budget_blocks=jnp.int32(6),
            geometry=GEOMETRY,
            policy=chosen,
        )
        done = commit_step(plan, carry[0], reserving, geometry=GEOMETRY, policy=chosen)
        return (done.residency, done.ownership), (plan, done)

    carry, outputs = jax.jit(lambda first, xs: jax.lax.scan(body, first, xs))(
        (residency, ownership), batch
    )
    for place, scores in enumerate(batch):
        plan, reserving = one_step(residency, ownership, scores, budget=6, chosen=chosen)
        done = commit_one(plan, residency, reserving, chosen=chosen)
        raise_for_result(done.result)
        assert same(cases.item(outputs, place), (plan, done))
        residency, ownership = done.residency, done.ownership
    assert same(carry, (residency, ownership))


def test_SEL_3_new_values_do_not_retrace(monkeypatch):
    """SEL-3: no value retraces: scores, counts, budgets, maps, flags, states or revisions."""
    traced = []

    def count(name):
        original = getattr(step_module, name)

        def counting(*args, **kwargs):
            traced.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(step_module, name, counting)

    for name in ("select", "commit_plan", "release"):
        count(name)
    kind = cases.KINDS["shared"]

    def run(seed):
        arguments = cases.inputs(cases.make(seed, kind), kind)
        scores, num_candidates, residency, ownership, budgets, *rest = arguments
        plan, done = cases.step(kind)(*arguments)
        raise_for_result(done.result)
        settings = {"geometry": GEOMETRY, "policy": kind.policy}
        plan, reserving = plan_step(
            scores,
            num_candidates,
            residency,
            ownership,
            budget_blocks=budgets,
            source_by_logical=rest[0],
            first_cpu_destination=rest[1],
            force_full=rest[2],
            **settings,
        )
        _, result = abort_step(plan, reserving, geometry=GEOMETRY)
        raise_for_result(result)

    run(0)
    before = len(traced)
    for seed in range(1, 6):
        run(seed)
    assert len(traced) == before
    # The counter counts: another static capacity is traced, though not compiled.
    other = dataclasses.replace(kind.policy, max_upload=11)
    arguments = cases.inputs(cases.make(0, kind), kind)
    replan = functools.partial(plan_step, geometry=GEOMETRY, policy=other)
    jax.eval_shape(replan, *arguments[:4], budget_blocks=arguments[4])
    assert traced[before:] == ["select"]


def test_RET_6_retention_of_a_step_matches_the_list_twin():
    """RET-6: the step's tables are the retention twin's on the uploaded state."""
    _, plan, done = committed()
    uploads = b.lists(plan.diff.upload_logical_blocks, plan.diff.num_upload)
    reserved = np.asarray(plan.reserved)[GEOMETRY.owner_by_row(OwnershipGranularity.GROUP)]
    tables = [list(map(int, reserved[row][: len(u)])) for row, u in enumerate(uploads)]
    wants = b.lists(plan.selection.want, plan.selection.num_want)
    expected = ref_retain.retain(uploads, tables, wants, [0, 0, 1], layer_tables=True, union=False)
    got = b.lists(done.residency.physical_by_slot, done.residency.num_valid)
    assert got == expected["tables"]


def test_SEL_9_a_step_takes_scores_per_head():
    """SEL-9: per-head scores are reduced by the policy, inside the same call."""
    residency, ownership = start(OwnershipGranularity.GROUP)
    heads = np.random.default_rng(0).random((3, 4, 2, MAX_BLOCKS), np.float32)
    left, _ = one_step(residency, ownership, heads)
    right, _ = one_step(residency, ownership, heads.max((1, 2)))
    assert np.array_equal(left.selection.want, right.selection.want)


def test_SEL_3_the_step_prefers_what_is_resident_within_the_margin():
    """SEL-3: with a margin, challengers that are not clearly better upload nothing."""
    _, ownership = start(OwnershipGranularity.GROUP)
    residency = b.residency([[0, 4, 5]] * 3, max_slots=MAX_SLOTS)
    scores = np.zeros((3, MAX_BLOCKS))
    scores[:, [4, 5]] = 1.0
    scores[:, 9] = [1.125, 1.25, 1.5]
    chosen = policy(TableSupport.LAYER, margin=0.25)
    plan, _ = one_step(residency, ownership, scores, budget=4, chosen=chosen)
    raise_for_result(plan.result)
    assert np.asarray(plan.diff.num_new).tolist() == [0, 0, 1]
    assert b.lists(plan.selection.want, plan.selection.num_want)[2] == [0, 9, 4]
