"""Whether a step changes nothing, known before it is planned."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from blockcompact_jax import zero_delta
from blockcompact_jax.errors import CompactionError, ResultCode
from blockcompact_jax.geometry import OwnershipGranularity, TableSupport
from blockcompact_jax.kernels import NativeOperations
from blockcompact_jax.operations import PURE_OPERATIONS
from blockcompact_jax.ownership import empty_ownership
from blockcompact_jax.residency import publish_selection
from blockcompact_jax.retention import RetentionPolicy
from blockcompact_jax.scores import HeadReduction, reduce_heads
from blockcompact_jax.selection import LayerBudget, SelectionPolicy, SmallBudget
from blockcompact_jax.step import StepPolicy, commit_step, plan_step
from blockcompact_jax.zero_delta import find_zero_delta

from . import builders as b
from . import step_cases as cases
from .reference import select as ref

GEOMETRY, MAX_BLOCKS = cases.GEOMETRY, cases.MAX_BLOCKS
LARGEST = np.finfo(np.float32).max
SCORES = np.float32([0.0, -0.0, 1.0, -1.0, 0.75, 1e-42, -1e-42, 3.4e38, -3.4e38])
SELECTIONS = {
    "plain": SelectionPolicy(max_want=8, sink_blocks=0, recent_blocks=0),
    "sinks and recent": SelectionPolicy(max_want=8, sink_blocks=2, recent_blocks=2),
    "effective budget": SelectionPolicy(
        max_want=8, sink_blocks=3, recent_blocks=1, on_small_budget=SmallBudget.EFFECTIVE
    ),
    "pyramid": SelectionPolicy(
        max_want=9, layer_budget=LayerBudget.PYRAMID, on_small_budget=SmallBudget.EFFECTIVE
    ),
    "score mass": SelectionPolicy(max_want=20, layer_budget=LayerBudget.SCORE_MASS),
    "margin": SelectionPolicy(max_want=8, resident_margin=0.5),
}
OPERATIONS = {"pure": PURE_OPERATIONS, "native": NativeOperations()}


def step_policy(selection, operations=PURE_OPERATIONS):
    return StepPolicy(
        selection=selection,
        retention=RetentionPolicy(tables=TableSupport.LAYER),
        max_upload=12,
        operations=operations,
    )


def is_zero(scores, num_candidates, helds, budget, policy):
    """What the check says of concrete arrays, and as part of a trace."""
    residency = b.residency(helds, max_slots=cases.MAX_SLOTS, selection_revision=6)
    arguments = (scores, np.int32(num_candidates), residency, np.int32(budget))
    found, traced = checker(policy)(*arguments), jax.jit(checker(policy))(*arguments)
    for one in (found, traced):
        assert int(one.selection_revision) == 7
        assert bool(one.is_zero) == bool(found.is_zero)
    return bool(found.is_zero)


@functools.cache
def checker(policy):
    def check(scores, num_candidates, residency, budget):
        return find_zero_delta(
            scores,
            num_candidates,
            residency,
            budget_blocks=budget,
            geometry=GEOMETRY,
            policy=policy,
        )

    return check


def twin_wants(scores, num_candidates, budget, selection):
    """What sorted lists want; None where they would give a fault."""
    sink, recent = selection.sink_blocks, selection.recent_blocks
    num_rows = len(scores)
    if not 0 <= num_candidates <= MAX_BLOCKS or ref.first_non_finite(scores, num_candidates):
        return None
    budgets = [budget] * num_rows
    if selection.layer_budget is LayerBudget.PYRAMID:
        budgets = ref.pyramid(budget, num_rows, selection.pyramid_percent)
    is_error = selection.on_small_budget is SmallBudget.ERROR
    if min(budgets) < (sink + recent if is_error else 0):
        return None
    facts = {"sink": sink, "recent": recent}
    if selection.layer_budget is LayerBudget.SCORE_MASS:
        wants = ref.select_by_mass(scores, num_candidates, budget=budget, **facts)
    else:
        wants, _ = ref.select(scores, num_candidates, budgets=budgets, max_tail=0, **facts)
    return wants if max(map(len, wants)) <= selection.max_want else None


def twin_says(scores, num_candidates, helds, budget, selection):
    raised = scores.copy()
    for row, held in enumerate(helds):
        values = raised[row, held] + np.float32(selection.resident_margin)
        raised[row, held] = np.minimum(values, LARGEST)
    raised = np.where(np.isfinite(scores), raised, scores)
    wants = twin_wants(raised, num_candidates, budget, selection)
    return wants is not None and list(map(sorted, wants)) == list(map(sorted, helds))


CHANGES = ("none", "score", "budget", "candidates", "bad", "held", "dropped", "added")


@pytest.mark.parametrize("operations", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("name", SELECTIONS)
@given(
    seed=st.integers(0, 2**31 - 1),
    sizes=st.tuples(st.integers(0, MAX_BLOCKS), st.integers(2, 10)),
    change=st.sampled_from(CHANGES),
)
def test_DIF_6_the_twin_says_the_same(name, operations, seed, sizes, change):
    """DIF-6, SEL-3, SEL-4, SEL-5: for every policy, right after a step and one change later."""
    selection, (num_candidates, budget) = SELECTIONS[name], sizes
    policy = step_policy(selection, operations)
    rng = np.random.default_rng(seed)
    scores = rng.choice(SCORES, (GEOMETRY.num_rows, MAX_BLOCKS))
    helds = twin_wants(scores, num_candidates, budget, selection)
    if helds is None:
        helds = [list(range(min(budget, num_candidates)))] * GEOMETRY.num_rows
    helds = [rng.permutation(held).astype(int).tolist() for held in helds]
    row = int(rng.integers(GEOMETRY.num_rows))
    match change:
        case "score":
            scores[row, rng.integers(MAX_BLOCKS)] = rng.choice(SCORES)
        case "budget":
            budget += int(rng.choice([-1, 1]))
        case "candidates":
            num_candidates += int(rng.choice([-1, 1]))
        case "bad":
            scores[row, rng.integers(MAX_BLOCKS)] = rng.choice([np.nan, np.inf, -np.inf])
        case "held" if helds[row]:
            others = sorted(set(range(MAX_BLOCKS)) - set(helds[row]))
            helds[row][0] = int(rng.choice(others))
        case "dropped":
            helds[row] = helds[row][1:]
        case "added":
            others = sorted(set(range(MAX_BLOCKS)) - set(helds[row]))
            helds[row] = [*helds[row], int(rng.choice(others))][: cases.MAX_SLOTS]
    if max(map(len, helds)) > cases.MAX_SLOTS:
        return
    expected = twin_says(scores, num_candidates, helds, budget, selection)
    assert is_zero(scores, num_candidates, helds, budget, policy) == expected


@functools.cache
def planned(name):
    """Plans, commits and checks one case of `step_cases`, whose jitted calls are shared."""
    kind = cases.KINDS[name]

    def run(scores, num_candidates, residency, ownership, budgets):
        static = {"geometry": GEOMETRY, "policy": kind.policy}
        zero = find_zero_delta(scores, num_candidates, residency, budget_blocks=budgets, **static)
        plan, reserving = plan_step(
            scores, num_candidates, residency, ownership, budget_blocks=budgets, **static
        )
        return zero, plan, commit_step(plan, residency, reserving, **static)

    return run


@pytest.mark.parametrize("name", list(cases.KINDS))
@given(
    seed=st.integers(0, 2**31 - 1),
    change=st.sampled_from(["none", "score", "budget", "candidates", "bad"]),
)
def test_DIF_6_a_step_is_zero_exactly_where_its_commit_changes_nothing(name, seed, change):
    """DIF-6, COM-2: against `plan_step` and `commit_step`, whose bytes a zero step publishes."""
    kind = cases.KINDS[name]
    run = planned(name)
    case = cases.make(seed, kind)
    scores, num_candidates, residency, ownership, budgets, *_ = cases.inputs(case, kind)
    _, plan, done = run(scores, num_candidates, residency, ownership, budgets)
    if int(done.result.code) == 0:
        residency, ownership = done.residency, done.ownership
    rng = np.random.default_rng(seed)
    scores, budgets = scores.copy(), budgets.copy()
    row = rng.integers(len(scores))
    match change:
        case "score":
            scores[row, rng.integers(MAX_BLOCKS)] += rng.choice(np.float32([-2, 2]))
        case "budget":
            budgets[row] += rng.choice(np.int32([-1, 1]))
        case "candidates":
            num_candidates = np.int32(num_candidates + rng.choice([-1, 1]))
        case "bad":
            scores[row, rng.integers(MAX_BLOCKS)] = np.nan
    zero, plan, done = run(scores, num_candidates, residency, ownership, budgets)
    is_same = (
        int(plan.result.code) == 0
        and not np.asarray(plan.diff.num_upload).any()
        and not bool(plan.diff.is_full)
        and (np.asarray(plan.reserved) == -1).all()
        and int(done.result.code) == 0
        and np.array_equal(plan.selection.num_want, residency.num_valid)
    )
    assert bool(zero.is_zero) == is_same
    if is_same:
        published = publish_selection(residency, zero.selection_revision)
        cases.assert_same_bytes(published, done.residency)
        cases.assert_same_bytes(ownership, done.ownership)
        assert int(done.retention.num_moves.sum()) == 0
        assert int(done.retention.table_entries_written) == 0
        assert int(done.retirement.physical_blocks_released) == 0


def small_case(operations=PURE_OPERATIONS, **selection):
    """Rows that hold their best four blocks."""
    policy = step_policy(
        SelectionPolicy(max_want=8, sink_blocks=1, recent_blocks=0, **selection), operations
    )
    scores = np.tile(np.arange(MAX_BLOCKS, 0, -1, dtype=np.float32), (GEOMETRY.num_rows, 1))
    residency = b.residency([[3, 0, 2, 1]] * GEOMETRY.num_rows, max_slots=16, map_revision=2)
    return scores, residency, policy


@pytest.mark.parametrize("operations", OPERATIONS.values(), ids=OPERATIONS)
def test_COM_2_a_zero_step_publishes_its_revision_and_copies_nothing(operations):
    """COM-2, DIF-6: the lists stay the same arrays; only the selection revision moves on."""
    scores, residency, policy = small_case(operations)
    zero = find_zero_delta(scores, 20, residency, budget_blocks=4, geometry=GEOMETRY, policy=policy)
    assert bool(zero.is_zero)
    published = publish_selection(residency, zero.selection_revision)
    for name in ("logical_by_slot", "physical_by_slot", "num_valid"):
        assert getattr(published, name) is getattr(residency, name)
    assert int(published.revisions.selection_revision) == 1
    assert int(published.revisions.map_revision) == 2


@pytest.mark.parametrize("operations", OPERATIONS.values(), ids=OPERATIONS)
def test_SEL_9_scores_per_head_are_reduced_as_the_plan_reduces_them(operations):
    """SEL-9: per head and reduced beforehand the answer is the same; heads can tip it."""
    scores, residency, policy = small_case(operations, head_reduction=HeadReduction.MEAN)
    by_head = np.stack([scores, scores * 0.5], axis=1)
    by_head[1, 0, 9] = 20.0
    facts = {"budget_blocks": 4, "geometry": GEOMETRY, "policy": policy}
    for last, expected in ((0.0, True), (60.0, False)):
        by_head[1, 1, 9] = last
        reduced = reduce_heads(by_head, head_reduction=HeadReduction.MEAN)
        for given_scores in (by_head, np.asarray(reduced)):
            zero = find_zero_delta(given_scores, 20, residency, **facts)
            assert bool(zero.is_zero) == expected


def test_DIF_6_a_cond_in_a_scan_skips_the_plan():
    """DIF-6: in the user's own jit `lax.cond` on the check gives what always planning gives."""
    kind = cases.KINDS["layer"]
    case = cases.make(7, kind, num_candidates=20)
    scores, num_candidates, residency, ownership, budgets, *_ = cases.inputs(case, kind)
    static = {"geometry": GEOMETRY, "policy": kind.policy}
    residency, ownership = jax.tree.map(jax.numpy.asarray, (residency, ownership))

    def step(state, scores):
        residency, ownership = state
        plan, reserving = plan_step(
            scores, num_candidates, residency, ownership, budget_blocks=budgets, **static
        )
        done = commit_step(plan, residency, reserving, **static)
        return (done.residency, done.ownership), done.result.code

    def step_or_publish(state, scores):
        residency, ownership = state
        zero = find_zero_delta(scores, num_candidates, residency, budget_blocks=budgets, **static)
        published = publish_selection(residency, zero.selection_revision), ownership
        after = lax.cond(zero.is_zero, lambda: published, lambda: step(state, scores)[0])
        return after, zero.is_zero

    sequence = np.stack([scores, scores, -scores, -scores, -scores])
    always, codes = jax.jit(lambda: lax.scan(step, (residency, ownership), sequence))()
    got, were_zero = jax.jit(lambda: lax.scan(step_or_publish, (residency, ownership), sequence))()
    assert not np.asarray(codes).any()
    assert np.asarray(were_zero).tolist() == [False, True, False, True, True]
    cases.assert_same_bytes(got, always)


def test_DIF_6_vmap_answers_for_each_request():
    """DIF-6: requests are told apart, on either operations."""
    for operations in OPERATIONS.values():
        scores, residency, policy = small_case(operations)
        batch = np.stack([scores, -scores, scores])

        def check(scores, policy=policy, residency=residency):
            return find_zero_delta(
                scores, 20, residency, budget_blocks=4, geometry=GEOMETRY, policy=policy
            ).is_zero

        assert np.asarray(jax.vmap(check)(batch)).tolist() == [True, False, True]


def test_SEL_4_what_a_plan_refuses_is_not_zero_and_the_plan_says_why():
    """SEL-4, SEL-5: the check gives no fault of its own."""
    kind = cases.KINDS["layer"]
    case = cases.make(7, kind, num_candidates=20)
    scores, num_candidates, residency, ownership, budgets, *_ = cases.inputs(case, kind)
    scores = scores.copy()
    scores[1, 5] = np.nan
    zero, plan, done = planned("layer")(scores, num_candidates, residency, ownership, budgets)
    assert not bool(zero.is_zero)
    assert int(plan.result.code) == ResultCode.NON_FINITE_SCORE
    assert int(done.result.code) == ResultCode.NON_FINITE_SCORE


def test_DIF_7_a_residency_of_another_shape_is_refused():
    """DIF-7: block size and rows are compared when the call is traced."""
    scores, residency, policy = small_case()
    facts = {"budget_blocks": 4, "geometry": GEOMETRY, "policy": policy}
    with pytest.raises(CompactionError, match="`block_tokens` is 8 in the residency and 4"):
        find_zero_delta(scores, 20, dataclasses.replace(residency, block_tokens=8), **facts)
    fewer = b.residency([[0]] * (GEOMETRY.num_rows - 1))
    with pytest.raises(CompactionError, match="The residency has 2 rows and the geometry 3"):
        find_zero_delta(scores, 20, fewer, **facts)
    with pytest.raises(CompactionError, match=r"`scores` has shape \(2, 24\)"):
        find_zero_delta(scores[:2], 20, residency, **facts)


def test_DIF_6_arrays_that_are_not_dense_are_answered_all_the_same():
    """DIF-6: strided scores and wider counts of NumPy go into the compiled call."""
    scores, residency, policy = small_case(NativeOperations())
    strided = np.repeat(scores, 2, axis=1)[:, ::2]
    wider = dataclasses.replace(residency, num_valid=np.asarray(residency.num_valid, np.int64))
    for given_scores, held in ((strided, residency), (scores, wider)):
        facts = {"budget_blocks": 4, "geometry": GEOMETRY, "policy": policy}
        assert bool(find_zero_delta(given_scores, 20, held, **facts).is_zero)
        assert not bool(find_zero_delta(-given_scores, 20, held, **facts).is_zero)


@pytest.mark.parametrize("name", SELECTIONS)
def test_DIF_6_on_the_host_nothing_is_traced(name):
    """DIF-6: native checks of concrete arrays compile nothing, unless the policy looks wider."""
    selection = SELECTIONS[name]
    policy = step_policy(dataclasses.replace(selection, max_tail=1), NativeOperations())
    scores = np.zeros((GEOMETRY.num_rows, MAX_BLOCKS), np.float32)
    residency = b.residency([[0, 1, 2, 3]] * GEOMETRY.num_rows, max_slots=8)
    with pytest.MonkeyPatch.context() as patch:
        calls = []
        patch.setattr(zero_delta, "_find_zero_delta", lambda *a, **k: calls.append(1))
        checker(policy)(scores, np.int32(20), residency, np.int32(4))
        checker(policy)(*jax.tree.map(jax.numpy.asarray, (scores, 20, residency, 4)))
    assert len(calls) == (0 if selection.is_by_score_alone else 2)


@pytest.mark.parametrize("is_committed", [False, True])
def test_COM_2_a_published_revision_compiles_no_call_anew(is_committed):
    """COM-2: the revision joins its residency's device, or is NumPy's beside uncommitted arrays."""
    scores, residency, policy = small_case(NativeOperations())
    residency = jax.tree.map(jax.numpy.asarray, residency)
    if is_committed:
        residency = jax.device_put(residency, jax.devices()[0])
    facts = {"budget_blocks": 4, "geometry": GEOMETRY, "policy": policy}
    ownership = empty_ownership(
        GEOMETRY, granularity=OwnershipGranularity.LAYER, num_physical_blocks=32
    )
    if is_committed:
        ownership = jax.device_put(ownership, jax.devices()[0])
    plan_step(scores, 20, residency, ownership, **facts)
    for revision in (1, 2):
        zero = find_zero_delta(scores, 20, residency, **facts)
        assert isinstance(zero.selection_revision, jax.Array if is_committed else np.ndarray)
        assert (zero.selection_revision.dtype, zero.selection_revision.shape) == (np.int32, ())
        residency = publish_selection(residency, zero.selection_revision)
        assert int(residency.revisions.selection_revision) == revision
    compiled: list[str] = []

    def listen(event: str, *_: float, **__: str) -> None:
        compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    plan, _ = plan_step(scores, 20, residency, ownership, **facts)
    jax.monitoring.unregister_event_duration_listener(listen)
    assert int(plan.selection.selection_revision) == 3
    assert [event for event in compiled if "compile" in event] == []


def test_SEL_3_new_values_do_not_retrace_the_check():
    """SEL-3: only values change."""
    scores, residency, policy = small_case()
    count = []

    @functools.partial(jax.jit, static_argnames=("policy",))
    def check(scores, num_candidates, residency, budget, policy):
        count.append(1)
        return find_zero_delta(
            scores,
            num_candidates,
            residency,
            budget_blocks=budget,
            geometry=GEOMETRY,
            policy=policy,
        )

    for place in range(3):
        check(scores + place, np.int32(10 + place), residency, np.int32(3 + place), policy)
    assert len(count) == 1
