"""SEL: scores to selection, against a sorting twin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockcompact_jax.diff import diff
from blockcompact_jax.errors import CompactionError, PlanError, ResultCode, raise_for_result
from blockcompact_jax.geometry import num_candidate_blocks
from blockcompact_jax.scores import BlockReduction, HeadReduction, block_scores_from_tokens
from blockcompact_jax.selection import (
    LayerBudget,
    SelectionPolicy,
    SmallBudget,
    select,
    validate_whole_blocks,
)

from . import builders as b
from .reference import select as ref

GEOMETRY = b.geometry(((0, 1), (3,)))
MAX_BLOCKS = 40
jit_select = jax.jit(select, static_argnames=("geometry", "policy"))


def run(scores, num_candidates, budget, policy, geometry=GEOMETRY, **kwargs):
    return jit_select(
        np.asarray(scores, np.float32),
        jnp.int32(num_candidates),
        budget_blocks=jnp.int32(budget),
        selection_revision=jnp.int32(1),
        geometry=geometry,
        policy=policy,
        **kwargs,
    )


# Few distinct values make ties common; signed zeros, denormals and extremes are among them.
SCORE = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 1e-42, -1e-42, 3.4e38, -3.4e38, 2.0])


@st.composite
def score_rows(draw, num_rows=3, num_blocks=MAX_BLOCKS):
    row = st.lists(SCORE, min_size=num_blocks, max_size=num_blocks)
    rows = draw(st.lists(row, min_size=num_rows, max_size=num_rows))
    return np.asarray(rows, np.float32)


@given(scores=score_rows(), num_candidates=st.integers(0, MAX_BLOCKS), budget=st.integers(3, 12))
def test_SEL_3_matches_sorting_twin(scores, num_candidates, budget):
    """SEL-3, SEL-6: rank by (-score, block); the tail keeps score order."""
    policy = SelectionPolicy(max_want=12, max_tail=7, sink_blocks=2, recent_blocks=1)
    got = run(scores, num_candidates, budget, policy)
    raise_for_result(got.result)
    want, tail = ref.select(
        scores, num_candidates, budgets=[budget] * 3, sink=2, recent=1, max_tail=7
    )
    assert b.lists(got.want, got.num_want) == want
    assert b.lists(got.ranked_tail, got.num_ranked_tail) == tail
    filled = np.arange(12) < np.asarray(got.num_want)[:, None]
    assert (np.asarray(got.want)[~filled] == -1).all()


@given(scores=score_rows(num_rows=3, num_blocks=200), budget=st.integers(2, 90))
def test_SEL_3_long_lists_use_the_sort_path(scores, budget):
    """SEL-3: lists longer than the compared-rank limit rank alike."""
    policy = SelectionPolicy(max_want=90, max_tail=70)
    got = run(scores, 190, budget, policy)
    want, tail = ref.select(scores, 190, budgets=[budget] * 3, sink=1, recent=1, max_tail=70)
    assert b.lists(got.want, got.num_want) == want
    assert b.lists(got.ranked_tail, got.num_ranked_tail) == tail


def test_SEL_3_thousands_of_equal_scores_give_the_lowest_blocks():
    """SEL-3: 4,096 equal scores give the lowest IDs."""
    policy = SelectionPolicy(max_want=100, sink_blocks=0, recent_blocks=0)
    got = run(np.full((3, 4096), 0.25), 4096, 100, policy)
    assert b.lists(got.want, got.num_want) == [list(range(100))] * 3


def test_SEL_3_signed_zeros_tie():
    """SEL-3: -0.0 and +0.0 are the same score."""
    policy = SelectionPolicy(max_want=4, sink_blocks=0, recent_blocks=0)
    scores = np.zeros((3, 8), np.float32)
    scores[:, ::2] = -0.0
    got = run(scores, 8, 4, policy)
    assert b.lists(got.want, got.num_want) == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("row", "block"), [(0, 0), (1, 7), (2, 19)])
def test_SEL_4_non_finite_candidate_is_refused(bad, row, block):
    """SEL-4: the error names layer and block; nothing is selected."""
    scores = np.ones((3, MAX_BLOCKS), np.float32)
    scores[row, block] = bad
    got = run(scores, 20, 6, SelectionPolicy(max_want=8))
    layer = GEOMETRY.full_layers[row]
    assert b.fault(got.result) == (ResultCode.NON_FINITE_SCORE, layer, block)
    assert (np.asarray(got.want) == -1).all()
    assert not np.asarray(got.num_want).any()
    with pytest.raises(PlanError, match=rf"block {block} in layer {layer} is NaN or infinite"):
        raise_for_result(got.result)


def test_SEL_4_first_fault_is_deterministic():
    """SEL-4: of several bad scores the lowest (layer, block) is named."""
    scores = np.full((3, MAX_BLOCKS), np.nan, np.float32)
    scores[0] = 1.0
    scores[1, :5] = 1.0
    got = run(scores, 20, 6, SelectionPolicy(max_want=8))
    assert b.fault(got.result) == (ResultCode.NON_FINITE_SCORE, 1, 5)


def test_SEL_4_row_of_only_nan_is_refused():
    """SEL-4: no ID comes out of a row of NaN."""
    got = run(np.full((3, MAX_BLOCKS), np.nan), MAX_BLOCKS, 6, SelectionPolicy(max_want=8))
    assert b.fault(got.result) == (ResultCode.NON_FINITE_SCORE, 0, 0)
    assert not np.asarray(got.num_want).any()


@pytest.mark.parametrize("masked", [np.nan, np.inf, -np.inf, 3e38])
def test_SEL_4_masked_places_may_hold_anything(masked):
    """SEL-2, SEL-4: places past the last candidate are never read as scores."""
    scores = np.ones((3, MAX_BLOCKS), np.float32)
    scores[:, 20:] = masked
    got = run(scores, 20, 25, SelectionPolicy(max_want=30, max_tail=6))
    raise_for_result(got.result)
    assert b.lists(got.want, got.num_want) == [list(range(20))] * 3
    assert not np.asarray(got.num_ranked_tail).any()


@pytest.mark.parametrize("block_tokens", [1, 2, 32, 64])
def test_SEL_2_candidates_are_whole_blocks_before_the_tail(block_tokens):
    """SEL-2: seq_len = B - 1, B, B + 1 give 0, 1 and 1 whole blocks."""
    for extra, whole in ((-1, 0), (0, 1), (1, 1 if block_tokens > 1 else 2)):
        assert num_candidate_blocks(block_tokens + extra, block_tokens, 0) == whole
        assert num_candidate_blocks(block_tokens + extra, block_tokens, 2) == 0
    assert num_candidate_blocks(10 * block_tokens, block_tokens, 3) == 7


def test_SEL_2_no_candidate_selects_nothing():
    """SEL-2: an empty selection is not an error."""
    got = run(np.full((3, MAX_BLOCKS), np.nan), 0, 6, SelectionPolicy(max_want=8))
    raise_for_result(got.result)
    assert not np.asarray(got.num_want).any()


def test_SEL_5_small_budget_is_an_error_by_policy():
    """SEL-5: sink + recent over the budget is refused and nothing is selected."""
    policy = SelectionPolicy(max_want=8, sink_blocks=2, recent_blocks=3)
    got = run(np.ones((3, MAX_BLOCKS)), 20, 4, policy)
    assert b.fault(got.result) == (ResultCode.BUDGET_TOO_SMALL, 0, 4)
    assert not np.asarray(got.num_want).any()
    raise_for_result(run(np.ones((3, MAX_BLOCKS)), 20, 5, policy).result)


def test_SEL_5_small_budget_is_recorded_as_effective():
    """SEL-5: the larger effective budget is what is applied and what is recorded."""
    policy = SelectionPolicy(
        max_want=8, sink_blocks=2, recent_blocks=3, on_small_budget=SmallBudget.EFFECTIVE
    )
    got = run(np.ones((3, MAX_BLOCKS)), 20, 4, policy)
    raise_for_result(got.result)
    assert np.asarray(got.effective_budget_blocks).tolist() == [5, 5, 5]
    assert b.lists(got.want, got.num_want) == [[0, 1]] * 3


def test_SEL_5_want_over_capacity_is_refused():
    """SEL-5: a budget past the static capacity is never cut silently."""
    got = run(np.ones((3, MAX_BLOCKS)), 20, 12, SelectionPolicy(max_want=8))
    assert b.fault(got.result) == (ResultCode.WANT_EXCEEDS_CAPACITY, 0, 11)


@pytest.mark.parametrize("count", [-1, MAX_BLOCKS + 1])
def test_SEL_2_candidate_count_out_of_range_is_refused(count):
    """SEL-2: a count outside the capacity is refused."""
    got = run(np.ones((3, MAX_BLOCKS)), count, 6, SelectionPolicy(max_want=8))
    assert b.fault(got.result) == (ResultCode.CANDIDATES_OUT_OF_RANGE, -1, count)


@pytest.mark.parametrize("percent", [0, 33, 100])
@pytest.mark.parametrize("budget", [6, 9])
def test_SEL_5_pyramid_keeps_the_sum(percent, budget):
    """SEL-5: a pyramid spreads the budget and loses none of it."""
    policy = SelectionPolicy(
        max_want=20,
        sink_blocks=0,
        recent_blocks=0,
        layer_budget=LayerBudget.PYRAMID,
        pyramid_percent=percent,
    )
    rng = np.random.default_rng(percent)
    scores = rng.random((3, MAX_BLOCKS)).astype(np.float32)
    got = run(scores, 30, budget, policy)
    raise_for_result(got.result)
    budgets = ref.pyramid(budget, 3, percent)
    assert sum(budgets) == 3 * budget
    assert np.asarray(got.effective_budget_blocks).tolist() == budgets
    want, _ = ref.select(scores, 30, budgets=budgets, sink=0, recent=0, max_tail=0)
    assert b.lists(got.want, got.num_want) == want


@given(scores=score_rows(), budget=st.integers(2, 10))
def test_SEL_5_score_mass_matches_twin(scores, budget):
    """SEL-5: layers compete for the sum of their budgets; each layer's share is recorded."""
    policy = SelectionPolicy(max_want=MAX_BLOCKS, layer_budget=LayerBudget.SCORE_MASS)
    got = run(scores, 35, budget, policy)
    raise_for_result(got.result)
    want = ref.select_by_mass(scores, 35, budget=budget, sink=1, recent=1)
    assert b.lists(got.want, got.num_want) == want
    assert np.asarray(got.effective_budget_blocks).tolist() == [len(row) + 1 for row in want]


def test_SEL_3_resident_margin_keeps_residents_unless_clearly_beaten():
    """SEL-3: within the margin the resident block stays, beyond it the challenger wins."""
    policy = SelectionPolicy(max_want=1, sink_blocks=0, recent_blocks=0, resident_margin=0.25)
    scores = np.zeros((3, 4), np.float32)
    scores[:, 1] = 1.0
    scores[:, 2] = [1.125, 1.25, 1.5]
    is_resident = np.zeros((3, 4), bool)
    is_resident[:, 1] = True
    got = run(scores, 4, 1, policy, is_resident=is_resident)
    assert b.lists(got.want, got.num_want) == [[1], [1], [2]]


def test_SEL_1_selection_holds_blocks_and_records_its_policy():
    """SEL-1, SEL-9: blocks come out, with the policy that chose them."""
    policy = SelectionPolicy(
        max_want=4, head_reduction=HeadReduction.SUM, block_reduction=BlockReduction.MEAN
    )
    got = run(np.ones((3, MAX_BLOCKS)), 10, 4, policy)
    assert got.policy == policy
    assert got.block_tokens == GEOMETRY.block_tokens
    assert np.asarray(got.want).max() < 10


def test_SEL_8_a_token_selection_is_another_policy_not_a_fault():
    """SEL-8: tokens (B = 1) and blocks of equal scores differ, without a fault, and never mix."""
    tokens = np.zeros((3, 1, MAX_BLOCKS), np.float32)
    tokens[..., [3, 11, 19]] = 3.0  # the best tokens, one in each of three blocks
    tokens[..., 4:8] = 2.0  # the best block by sum
    policy = SelectionPolicy(max_want=8, sink_blocks=0, recent_blocks=0)
    chosen = {}
    for block_tokens in (1, 4):
        scores = block_scores_from_tokens(
            tokens,
            block_tokens=block_tokens,
            block_reduction=BlockReduction.SUM,
            head_reduction=HeadReduction.MAX,
        )
        geometry = b.geometry(((0, 1), (3,)), block_tokens=block_tokens)
        got = run(scores, scores.shape[1], 3 if block_tokens == 1 else 1, policy, geometry)
        raise_for_result(got.result)
        chosen[block_tokens] = got
    assert b.lists(chosen[1].want, chosen[1].num_want) == [[3, 11, 19]] * 3
    assert b.lists(chosen[4].want, chosen[4].num_want) == [[1]] * 3
    assert (chosen[1].block_tokens, chosen[4].block_tokens) == (1, 4)
    with pytest.raises(CompactionError, match="not a multiple"):
        validate_whole_blocks(chosen[1].want[0, :3], 4)
    with pytest.raises(CompactionError, match="`block_tokens` is 1 in the selection"):
        diff(
            chosen[1],
            b.residency([[], [], []]),
            geometry=GEOMETRY,
            max_upload=8,
            common_slots=False,
        )


def test_SEL_3_wrong_scores_are_refused_at_trace_time():
    """SEL-3: no silent cast and no silent broadcast."""
    policy = SelectionPolicy(max_want=4)
    with pytest.raises(CompactionError, match="`scores` has shape"):
        run(np.ones((2, MAX_BLOCKS)), 10, 4, policy)
    with pytest.raises(CompactionError, match="`scores` has dtype float16"):
        jit_select(
            np.ones((3, MAX_BLOCKS), np.float16),
            jnp.int32(4),
            budget_blocks=jnp.int32(4),
            selection_revision=jnp.int32(1),
            geometry=GEOMETRY,
            policy=policy,
        )


@pytest.mark.parametrize("block_tokens", [1, 2, 32, 64])
def test_SEL_7_whole_blocks_come_back_in_order(block_tokens):
    """SEL-7: blocks in the given order."""
    blocks = [5, 0, 3]
    tokens = [
        t for block in blocks for t in range(block * block_tokens, (block + 1) * block_tokens)
    ]
    assert validate_whole_blocks(np.asarray(tokens), block_tokens).tolist() == blocks
    assert validate_whole_blocks(np.asarray([], np.int64), block_tokens).tolist() == []


@pytest.mark.parametrize(
    ("tokens", "block_tokens", "message"),
    [
        ([0, 1], 0, "`block_tokens` is 0"),
        ([0, 1], -2, "`block_tokens` is -2"),
        ([0, 1, 2], 2, "not a multiple"),
        ([-2, -1], 2, "negative position -2"),
        ([1, 2], 2, "misaligned: it starts at position 1"),
        ([0, 1, 2, 4], 2, "Row 1 .* not consecutive from position 2"),
        ([2, 3, 0, 1, 2, 3], 2, "Row 2 .* repeats the block that starts at position 2"),
        ([0.0, 1.0], 2, "dtype float64"),
    ],
)
def test_SEL_7_each_fault_has_its_own_message(tokens, block_tokens, message):
    """SEL-7: refused, each with its own message."""
    with pytest.raises(CompactionError, match=message):
        validate_whole_blocks(np.asarray(tokens), block_tokens)


@pytest.mark.parametrize(
    "fields",
    [{"max_want": -1}, {"sink_blocks": -1}, {"pyramid_percent": 101}, {"resident_margin": -0.5}],
)
def test_SEL_9_policy_refuses_values_out_of_range(fields):
    """SEL-9: a policy that could not be applied is refused where it is made."""
    with pytest.raises(CompactionError, match=f"`{next(iter(fields))}`"):
        SelectionPolicy(**({"max_want": 4} | fields))
