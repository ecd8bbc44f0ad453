"""The composed step, driven over a simulated pool of bytes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockcompact_jax import step as step_module
from blockcompact_jax.errors import ResultCode, raise_for_result
from blockcompact_jax.geometry import OwnershipGranularity, TableSupport
from blockcompact_jax.ownership import ReferenceKind, acquire, empty_ownership
from blockcompact_jax.residency import check_residency, empty_residency, graduate
from blockcompact_jax.retention import RetentionKind, RetentionPolicy
from blockcompact_jax.selection import SelectionPolicy
from blockcompact_jax.step import (
    StepPolicy,
    abort_step,
    commit_step,
    plan_requests,
    plan_step,
)
from blockcompact_jax.upload import SourceKind, check_upload_plan

from . import builders as b
from .reference import retain as ref_retain
from .reference import select as ref_select

GEOMETRY = b.geometry(((0, 1), (3,)), windows=None)
MIXED = b.geometry(((0, 2), (1,), (3,)), windows={1: 8})
MAX_BLOCKS = 24
NUM_PHYSICAL = 32


def policy(tables, *, union=False, margin=0.0, source_kind=SourceKind.SOURCE_ONLY):
    return StepPolicy(
        selection=SelectionPolicy(max_want=8, max_tail=MAX_BLOCKS, resident_margin=margin),
        retention=RetentionPolicy(tables=tables, allow_union=union),
        max_upload=12,
        source_kind=source_kind,
    )


def start(geometry, granularity):
    return (
        empty_residency(geometry, max_slots=16),
        empty_ownership(geometry, granularity=granularity, num_physical_blocks=NUM_PHYSICAL),
    )


class Pool:
    """Cells [row, physical]; each holds the (row, logical) whose bytes were last written there."""

    def __init__(self, num_rows):
        self.cells = [[None] * NUM_PHYSICAL for _ in range(num_rows)]

    def upload(self, plan):
        rows = zip(
            np.asarray(plan.layer_row).tolist(),
            np.asarray(plan.source_block).tolist(),
            np.asarray(plan.physical_block).tolist(),
            strict=True,
        )
        for row, source, physical in rows:
            if row >= 0:
                self.cells[row][physical] = (row, source)

    def move(self, retention):
        pairs = np.stack([np.asarray(retention.move_from), np.asarray(retention.move_to)], -1)
        for row, moves in enumerate(pairs):
            before = list(self.cells[row])
            for source, target in moves:
                if source >= 0:
                    self.cells[row][target] = before[source]

    def read(self, residency):
        logical = b.lists(residency.logical_by_slot, residency.num_valid)
        physical = b.lists(residency.physical_by_slot, residency.num_valid)
        for row, (blocks, table) in enumerate(zip(logical, physical, strict=True)):
            assert [self.cells[row][p] for p in table] == [(row, x) for x in blocks]
        return logical


def check_conservation(residencies, ownership, geometry):
    """A block has references exactly where some request's table reads it."""
    owner = geometry.owner_by_row(ownership.granularity)
    expected = np.zeros(ownership.references.shape[1:], np.int32)
    for residency in residencies:
        used = np.zeros(expected.shape, bool)
        for row, table in enumerate(b.lists(residency.physical_by_slot, residency.num_valid)):
            used[owner[row], table] = True
        expected += used
    references = np.asarray(ownership.references)
    assert references[ReferenceKind.REGULAR].tolist() == expected.tolist()
    assert not references[ReferenceKind.TRANSFER].any()


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
    residency, ownership = start(MIXED, granularity)
    pool = Pool(MIXED.num_rows)
    chosen = policy(tables, union=union)
    longest = 0
    for seed, length, budget, verb in rounds:
        num_candidates = longest = max(longest, length)
        scores = np.random.default_rng(seed).integers(0, 6, (3, MAX_BLOCKS)).astype(np.float32)
        plan, reserving = plan_step(
            scores,
            np.int32(num_candidates),
            residency,
            ownership,
            budget_blocks=np.int32(budget),
            geometry=MIXED,
            policy=chosen,
            force_full=np.bool_(verb == "full"),
        )
        if int(plan.result.code) == ResultCode.POOL_EXHAUSTED:
            assert np.array_equal(reserving.references, ownership.references)
            continue
        raise_for_result(plan.result)
        is_owned = np.asarray(reserving.references)[ReferenceKind.TRANSFER] > 0
        check_upload_plan(
            plan.upload,
            MIXED,
            num_source_blocks=MAX_BLOCKS,
            num_physical_blocks=NUM_PHYSICAL,
            is_owned=is_owned[MIXED.owner_by_row(granularity)],
        )
        pool.upload(plan.upload)
        pool.read(residency)  # the old state stays readable until the commit
        if verb == "abort":
            ownership, result = abort_step(plan, reserving, geometry=MIXED)
            raise_for_result(result)
            check_conservation([residency], ownership, MIXED)
            continue
        done = commit_step(
            plan,
            residency,
            reserving,
            geometry=MIXED,
            policy=chosen,
            is_retention_due=np.bool_(verb != "not_due"),
        )
        if int(done.result.code) == ResultCode.RESIDENCY_FULL:
            ownership, _ = abort_step(plan, reserving, geometry=MIXED)
            continue
        raise_for_result(done.result)
        pool.move(done.retention)
        before = int((~np.asarray(reserving.is_free)).sum())
        residency, ownership = done.residency, done.ownership
        held = pool.read(residency)
        check_residency(residency, MIXED, num_blocks=max(num_candidates, 1))
        check_conservation([residency], ownership, MIXED)
        after = int((~np.asarray(ownership.is_free)).sum())
        assert int(done.retirement.physical_blocks_released) == before - after
        wants, _ = ref_select.select(
            scores, num_candidates, budgets=[budget] * 3, sink=1, recent=1, max_tail=0
        )
        for row in range(3):
            assert set(wants[row]) <= set(held[row])
            kind = int(np.asarray(done.retention.kind)[MIXED.group_place_by_row[row]])
            if verb != "not_due" and kind != RetentionKind.UNION:
                assert set(wants[row]) == set(held[row])


def one_step(residency, ownership, scores, *, budget=5, num_candidates=20, tables, **kwargs):
    return plan_step(
        jnp.asarray(scores, jnp.float32),
        np.int32(num_candidates),
        residency,
        ownership,
        budget_blocks=np.int32(budget),
        geometry=GEOMETRY,
        policy=policy(tables),
        **kwargs,
    )


def committed(tables=TableSupport.LAYER, granularity=OwnershipGranularity.GROUP, seed=0):
    residency, ownership = start(GEOMETRY, granularity)
    scores = np.random.default_rng(seed).random((3, MAX_BLOCKS))
    plan, reserving = one_step(residency, ownership, scores, tables=tables)
    raise_for_result(plan.result)
    done = commit_step(plan, residency, reserving, geometry=GEOMETRY, policy=policy(tables))
    raise_for_result(done.result)
    return scores, plan, done


def test_DIF_6_same_scores_again_are_a_published_zero_delta():
    """DIF-6: nothing moves, the generation stays, the selection revision advances."""
    scores, _, done = committed()
    plan, reserving = one_step(done.residency, done.ownership, scores, tables=TableSupport.LAYER)
    raise_for_result(plan.result)
    assert int(plan.upload.num_rows) == 0
    assert int(plan.diff.basis.selection_revision) == 2
    again = commit_step(
        plan, done.residency, reserving, geometry=GEOMETRY, policy=policy(TableSupport.LAYER)
    )
    raise_for_result(again.result)
    old, new = done.residency.revisions, again.residency.revisions
    assert int(new.selection_revision) == int(old.selection_revision) + 1
    assert int(new.pool_generation) == int(old.pool_generation)
    assert int(new.map_revision) == int(old.map_revision)
    assert int(again.retirement.physical_blocks_released) == 0


def test_OWN_5_committing_a_plan_twice_is_refused_as_stale():
    """OWN-5: a committed plan does not fit the residency it led to."""
    residency, ownership = start(GEOMETRY, OwnershipGranularity.GROUP)
    scores = np.random.default_rng(0).random((3, MAX_BLOCKS))
    plan, reserving = one_step(residency, ownership, scores, tables=TableSupport.LAYER)
    settings = {"geometry": GEOMETRY, "policy": policy(TableSupport.LAYER)}
    done = commit_step(plan, residency, reserving, **settings)
    again = commit_step(plan, done.residency, done.ownership, **settings)
    assert int(again.result.code) == ResultCode.STALE_PLAN
    for left, right in zip(
        jax.tree.leaves((again.residency, again.ownership)),
        jax.tree.leaves((done.residency, done.ownership)),
        strict=True,
    ):
        assert np.array_equal(left, right)
    assert not np.asarray(again.retention.num_moves).any()


def test_OWN_5_a_request_readmitted_as_another_epoch_cannot_be_committed():
    """OWN-5: a plan of epoch 0 does not commit into epoch 1."""
    residency, ownership = start(GEOMETRY, OwnershipGranularity.GROUP)
    scores = np.random.default_rng(0).random((3, MAX_BLOCKS))
    plan, reserving = one_step(residency, ownership, scores, tables=TableSupport.LAYER)
    readmitted = empty_residency(GEOMETRY, max_slots=16, request_epoch=1)
    done = commit_step(
        plan, readmitted, reserving, geometry=GEOMETRY, policy=policy(TableSupport.LAYER)
    )
    assert b.fault(done.result) == (ResultCode.STALE_PLAN, -1, 0)


def test_SEL_4_a_faulty_step_changes_nothing():
    """SEL-4: a NaN reserves nothing, uploads nothing, and its plan cannot be committed."""
    scores, _, done = committed()
    scores = scores.copy()
    scores[1, 3] = np.nan
    plan, reserving = one_step(done.residency, done.ownership, scores, tables=TableSupport.LAYER)
    assert b.fault(plan.result) == (ResultCode.NON_FINITE_SCORE, 1, 3)
    assert np.array_equal(reserving.references, done.ownership.references)
    assert int(plan.upload.num_rows) == 0
    assert (np.asarray(plan.reserved) == -1).all()
    tried = commit_step(
        plan, done.residency, reserving, geometry=GEOMETRY, policy=policy(TableSupport.LAYER)
    )
    assert b.fault(tried.result) == (ResultCode.NON_FINITE_SCORE, 1, 3)
    for left, right in zip(
        jax.tree.leaves(tried.residency), jax.tree.leaves(done.residency), strict=True
    ):
        assert np.array_equal(left, right)


def test_UPL_3_sources_follow_the_map_and_a_missing_source_is_refused():
    """UPL-3: source IDs come from the map; a block that the CPU pool lacks is refused."""
    residency, ownership = start(GEOMETRY, OwnershipGranularity.GROUP)
    scores = np.zeros((3, MAX_BLOCKS))
    source = np.arange(MAX_BLOCKS, dtype=np.int32)[::-1].copy()
    plan, _ = one_step(
        residency, ownership, scores, tables=TableSupport.LAYER, source_by_logical=source
    )
    raise_for_result(plan.result)
    used = np.asarray(plan.upload.layer) >= 0
    logical = np.asarray(plan.upload.logical_block)[used]
    assert np.asarray(plan.upload.source_block)[used].tolist() == source[logical].tolist()
    source[2] = -1
    plan, reserving = one_step(
        residency, ownership, scores, tables=TableSupport.LAYER, source_by_logical=source
    )
    assert b.fault(plan.result) == (ResultCode.SOURCE_MISSING, 0, 2)
    assert np.array_equal(reserving.references, ownership.references)


def test_UPL_3_the_copy_path_names_its_cpu_destinations():
    """UPL-3: with cpu_copy every row has a CPU destination block of its own."""
    residency, ownership = start(GEOMETRY, OwnershipGranularity.GROUP)
    plan, _ = plan_step(
        np.zeros((3, MAX_BLOCKS), np.float32),
        np.int32(20),
        residency,
        ownership,
        budget_blocks=np.int32(4),
        geometry=GEOMETRY,
        policy=policy(TableSupport.LAYER, source_kind=SourceKind.CPU_COPY),
        first_cpu_destination=np.int32(100),
    )
    used = np.asarray(plan.upload.layer) >= 0
    copies = np.asarray(plan.upload.cpu_destination_block)
    assert copies[used].tolist() == list(range(100, 100 + used.sum()))
    assert (copies[~used] == -1).all()


def test_UPL_2_rows_carry_layer_group_and_valid_tokens():
    """UPL-2: only full-attention layers are packed, each row with its layer and group."""
    residency, ownership = start(MIXED, OwnershipGranularity.GROUP)
    plan, _ = plan_step(
        np.zeros((3, MAX_BLOCKS), np.float32),
        np.int32(20),
        residency,
        ownership,
        budget_blocks=np.int32(3),
        geometry=MIXED,
        policy=policy(TableSupport.LAYER),
    )
    upload = plan.upload
    used = np.asarray(upload.layer) >= 0
    assert np.asarray(upload.layer)[used].tolist() == [0, 0, 2, 2, 3, 3]
    assert np.asarray(upload.layer_row)[used].tolist() == [0, 0, 1, 1, 2, 2]
    assert np.asarray(upload.group)[used].tolist() == [0, 0, 0, 0, 2, 2]
    assert (np.asarray(upload.valid_tokens) == np.where(used, MIXED.block_tokens, 0)).all()
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
    plan, reserving = one_step(
        residency, ownership, scores, num_candidates=21, budget=3, tables=TableSupport.LAYER
    )
    assert b.lists(plan.selection.want, plan.selection.num_want) == [[0, 20]] * 3
    assert 20 not in np.asarray(plan.upload.logical_block).tolist()
    done = commit_step(
        plan, residency, reserving, geometry=GEOMETRY, policy=policy(TableSupport.LAYER)
    )
    raise_for_result(done.result)
    check_conservation([done.residency], done.ownership, GEOMETRY)


def test_OWN_4_layer_tables_may_free_nothing():
    """OWN-4: each layer drops a block that the other keeps; the group frees none, layers two."""
    released = {}
    for granularity in OwnershipGranularity:
        geometry = b.geometry(((0, 1),))
        chosen = StepPolicy(
            selection=SelectionPolicy(max_want=4, sink_blocks=0, recent_blocks=0),
            retention=RetentionPolicy(tables=TableSupport.LAYER),
            max_upload=4,
        )
        residency = empty_residency(geometry, max_slots=4)
        ownership = empty_ownership(geometry, granularity=granularity, num_physical_blocks=8)
        for scores, budget in (([[1, 1, 0], [1, 1, 0]], 2), ([[1, 0, 0], [0, 1, 0]], 1)):
            plan, reserving = plan_step(
                np.asarray(scores, np.float32),
                np.int32(3),
                residency,
                ownership,
                budget_blocks=np.int32(budget),
                geometry=geometry,
                policy=chosen,
            )
            done = commit_step(plan, residency, reserving, geometry=geometry, policy=chosen)
            raise_for_result(done.result)
            residency, ownership = done.residency, done.ownership
        assert np.asarray(done.retention.kind).tolist() == [RetentionKind.LAYER_TABLES]
        released[granularity] = int(done.retirement.physical_blocks_released)
    assert released == {OwnershipGranularity.GROUP: 0, OwnershipGranularity.LAYER: 2}


@pytest.mark.parametrize("granularity", list(OwnershipGranularity))
def test_OWN_1_requests_of_one_pool_never_share_a_destination(granularity):
    """OWN-1, SEL-3: planning requests together equals planning them one after another."""
    rng = np.random.default_rng(1)
    scores = rng.integers(0, 5, (4, 3, MAX_BLOCKS)).astype(np.float32)
    scores[2, 0, 0] = np.inf
    single, ownership = start(GEOMETRY, granularity)
    stacked = jax.tree.map(lambda x: jnp.stack([x] * 4), single)
    chosen = policy(TableSupport.LAYER)
    budgets = np.asarray([4, 5, 6, 7], np.int32)
    plans, together = plan_requests(
        scores,
        np.full(4, 20, np.int32),
        stacked,
        ownership,
        budget_blocks=budgets,
        geometry=GEOMETRY,
        policy=chosen,
    )
    apart = ownership
    for i in range(4):
        plan, apart = plan_step(
            scores[i],
            np.int32(20),
            single,
            apart,
            budget_blocks=budgets[i],
            geometry=GEOMETRY,
            policy=chosen,
        )
        for left, right in zip(
            jax.tree.leaves(jax.tree.map(lambda x, i=i: x[i], plans)),
            jax.tree.leaves(plan),
            strict=True,
        ):
            assert np.asarray(left).tobytes() == np.asarray(right).tobytes()
    assert np.array_equal(together.references, apart.references)
    assert np.asarray(together.references)[ReferenceKind.TRANSFER].max() == 1
    assert np.asarray(plans.result.code).tolist() == [0, 0, ResultCode.NON_FINITE_SCORE, 0]


def test_SEL_3_a_step_runs_under_vmap_and_scan():
    """SEL-3: a whole step under vmap and scan equals the single call."""
    residency, ownership = start(GEOMETRY, OwnershipGranularity.LAYER)
    rng = np.random.default_rng(2)
    batch = rng.integers(0, 4, (3, 3, MAX_BLOCKS)).astype(np.float32)
    chosen = policy(TableSupport.SHARED)
    settings = {"geometry": GEOMETRY, "policy": chosen}

    def step(residency, ownership, scores):
        plan, reserving = plan_step(
            scores, jnp.int32(20), residency, ownership, budget_blocks=jnp.int32(6), **settings
        )
        done = commit_step(plan, residency, reserving, **settings)
        return done.residency, done.ownership, done.result

    def body(carry, scores):
        residency, ownership, result = step(*carry, scores)
        return (residency, ownership), result

    carry, results = jax.lax.scan(body, (residency, ownership), jnp.asarray(batch))
    raise_for_result(results)
    expected = (residency, ownership)
    for scores in batch:
        *expected, _ = step(*expected, scores)
    for left, right in zip(jax.tree.leaves(carry), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(left, right)
    mapped = jax.vmap(step, in_axes=(None, None, 0))(residency, ownership, jnp.asarray(batch))
    for i, scores in enumerate(batch):
        single = step(residency, ownership, scores)
        for left, right in zip(jax.tree.leaves(mapped), jax.tree.leaves(single), strict=True):
            assert np.array_equal(left[i], right)


def test_SEL_3_new_values_do_not_retrace(monkeypatch):
    """SEL-3: only shapes and static facts retrace; values, revisions and budgets do not."""
    traces = []
    original = step_module.select

    def counting(*args, **kwargs):
        traces.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(step_module, "select", counting)
    geometry = dataclasses.replace(GEOMETRY, layout="amx")  # a geometry no other test has traced
    residency = empty_residency(geometry, max_slots=16)
    ownership = empty_ownership(
        geometry, granularity=OwnershipGranularity.GROUP, num_physical_blocks=NUM_PHYSICAL
    )
    chosen = policy(TableSupport.LAYER)
    rng = np.random.default_rng(0)
    for budget in (4, 5, 6, 4):
        plan, reserving = plan_step(
            rng.random((3, MAX_BLOCKS), np.float32),
            np.int32(18 + budget // 6),
            residency,
            ownership,
            budget_blocks=np.int32(budget),
            geometry=geometry,
            policy=chosen,
        )
        done = commit_step(plan, residency, reserving, geometry=geometry, policy=chosen)
        raise_for_result(done.result)
        residency, ownership = done.residency, done.ownership
    assert len(traces) == 1


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
    residency, ownership = start(GEOMETRY, OwnershipGranularity.GROUP)
    heads = np.random.default_rng(0).random((3, 4, 2, MAX_BLOCKS), np.float32)
    left, _ = one_step(residency, ownership, heads, tables=TableSupport.LAYER)
    right, _ = one_step(residency, ownership, heads.max((1, 2)), tables=TableSupport.LAYER)
    assert np.array_equal(left.selection.want, right.selection.want)
