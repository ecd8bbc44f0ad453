"""The selection of a sequence against sorting its scores."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockcompact_jax.budget import Budget, parse_budget
from blockcompact_jax.errors import PlanError
from blockcompact_jax.geometry import ModelGeometry
from blockcompact_jax.scores import mass_from_log_sum_exp
from torch_bridge.selector import Selector

B, HEADS, LAYERS, MAX_BLOCKS = 4, 4, 3, 20


def make_selector(budget, max_blocks=MAX_BLOCKS, *, is_shared=False):
    geometry = ModelGeometry.uniform(
        num_layers=LAYERS,
        num_query_heads=HEADS,
        num_kv_heads=2,
        head_dim=8,
        block_tokens=B,
        dtype="float32",
        layout="vec",
    )
    return Selector(
        geometry, budget, max_blocks, mass_of=mass_from_log_sum_exp, is_shared=is_shared
    )


def brute_force(mass, num_candidates, count):
    """Sink block 0, then the best by (-mean over heads, block), ascending."""
    mass = mass / mass.sum(-1, keepdims=True)
    rows = []
    for row in mass:
        scores = [float(np.mean(row[:, block])) for block in range(MAX_BLOCKS)]
        ranked = sorted(range(1, num_candidates), key=lambda block: (-scores[block], block))
        rows.append(sorted([0, *ranked][:count]))
    return rows


budgets = st.one_of(
    st.sampled_from([2, 3, 7, MAX_BLOCKS, MAX_BLOCKS + 2]).map(lambda n: Budget(blocks=n)),
    st.sampled_from(["1%", "10%", "25%", "50%", "100%"]).map(parse_budget),
)


@given(
    budget=budgets,
    num_tokens=st.integers(1, MAX_BLOCKS * B),
    seed=st.integers(0, 2**32 - 1),
    has_ties=st.booleans(),
)
def test_SEL_3_a_request_gets_the_best_blocks_and_ties_go_to_the_first(
    budget, num_tokens, seed, has_ties
):
    """SEL-2, SEL-3, SEL-5: whole blocks before the recent one; garbage past them counts nothing."""
    whole = num_tokens // B
    num_candidates = max(whole - 1, 0)
    rng = np.random.default_rng(seed)
    mass = rng.random((LAYERS, HEADS, MAX_BLOCKS)) + 1e-3
    if has_ties:  # equal in every head, so that means are equal, too
        mass = np.broadcast_to(
            rng.integers(0, 3, (LAYERS, 1, MAX_BLOCKS)) + 1e-9, mass.shape
        ).copy()
    log_sum_exps = np.log(mass).astype(np.float32)
    garbage = slice(num_candidates + 1, None)
    log_sum_exps[:, :, garbage], mass[:, :, garbage] = np.nan, 0

    selector = make_selector(budget)
    selected = selector.choose(log_sum_exps, num_tokens=num_tokens)

    applied = max(budget.num_blocks(whole), 2)  # sink and recent always
    count = min(applied - 1, num_candidates)  # the recent block comes without being selected
    assert selected.tolist() == brute_force(mass, num_candidates, count)
    assert selector.num_candidate_blocks(num_tokens) == num_candidates
    assert selector.needs_all(num_tokens) == (applied >= whole)


def test_SEL_4_scores_that_are_not_finite_are_refused():
    """SEL-4."""
    selector = make_selector(Budget(blocks=4))
    scores = np.random.default_rng(1).random((LAYERS, HEADS, MAX_BLOCKS)).astype(np.float32)
    scores[1, 2, 5] = np.nan
    with pytest.raises(PlanError, match=r"layer 1.*block 5|block 5.*layer 1"):
        selector.choose(scores, num_tokens=10 * B)


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_SEL_4_a_fault_is_named_by_its_layer_and_its_logical_block(is_shared, value):
    """SEL-4: also where layers select together, and where columns are the blocks that are left."""
    selector = make_selector(Budget(blocks=4), is_shared=is_shared)
    own = np.array([0, 3, 4, 7, 9, 10], np.int32)
    scores = np.random.default_rng(1).random((LAYERS, HEADS, MAX_BLOCKS)).astype(np.float32)
    scores[1, 2, 3] = value
    with pytest.raises(PlanError) as refused:
        selector.choose(scores, num_tokens=10 * B + 1, own_blocks=own)
    assert (refused.value.layer, refused.value.block) == (1, 7)


@given(seed=st.integers(0, 2**32 - 1), num_tokens=st.integers(1, MAX_BLOCKS * B))
def test_layers_that_select_together_select_by_the_mean_of_all_their_heads(seed, num_tokens):
    mass = np.random.default_rng(seed).random((LAYERS, HEADS, MAX_BLOCKS)) + 1e-3
    selector = make_selector(Budget(blocks=7), is_shared=True)
    selected = selector.choose(np.log(mass).astype(np.float32), num_tokens=num_tokens)
    num_candidates = max(num_tokens // B - 1, 0)
    mass = (mass / mass.sum(-1, keepdims=True)).reshape(1, LAYERS * HEADS, MAX_BLOCKS)
    assert selected.tolist() == brute_force(mass, num_candidates, min(6, num_candidates)) * LAYERS


def test_scores_take_columns_for_their_own_blocks_in_few_sizes(monkeypatch):
    """All sizes are compiled before the first step; the longest sequence counts in none else."""
    selector = make_selector(Budget(blocks=4), 300)
    assert [selector.num_columns(n) for n in (0, 1, 64, 65, 128, 129, 257, 300)] == [
        *[64] * 3,
        *[128] * 2,
        256,
        *[300] * 2,
    ]
    assert make_selector(Budget(blocks=4)).num_columns(1) == MAX_BLOCKS
    shapes, choose = [], Selector.choose

    def remember(self, scores, **options):
        shapes.append(scores.shape)
        return choose(self, scores, **options)

    monkeypatch.setattr(Selector, "choose", remember)
    selector.warm_up()
    assert shapes == [(LAYERS, HEADS, columns) for columns in (64, 128, 256, 300)]


@pytest.mark.parametrize("columns", [12, MAX_BLOCKS])
@pytest.mark.parametrize("budget", ["3b", "60%", "100%"])
def test_the_number_of_columns_does_not_change_the_selection(columns, budget):
    """Of a long sequence that has few blocks left: more are wanted than there are."""
    selector = make_selector(parse_budget(budget))
    own = np.array([0, 1, 2, 3, 4, 5, 6, 8, 9, 15, 18, 19], np.int32)
    scores = np.full((LAYERS, HEADS, columns), -np.inf, np.float32)
    scores[..., : own.size] = np.arange(own.size)
    selected = selector.choose(scores, num_tokens=20 * B - 1, own_blocks=own)
    kept = {"3b": [0, 15], "60%": own[:10].tolist(), "100%": own[:10].tolist()}[budget]
    assert selected.tolist() == [kept] * LAYERS


def test_only_blocks_that_are_still_there_are_selected():
    """Columns of the scores are the sequence's own blocks; names in the result are logical."""
    selector = make_selector(Budget(blocks=4))
    own = np.array([0, 3, 4, 7, 9, 10], np.int32)
    scores = np.full((LAYERS, HEADS, MAX_BLOCKS), -np.inf, np.float32)
    scores[..., : own.size] = [0, 1, 5, 3, 2, 9]  # the last two are the tail of 10 whole blocks
    selected = selector.choose(scores, num_tokens=10 * B + 1, own_blocks=own)
    assert selected.tolist() == [[0, 4, 7]] * LAYERS


@given(
    budget=budgets,
    num_tokens=st.integers(1, MAX_BLOCKS * B),
    seed=st.integers(0, 2**32 - 1),
    has_ties=st.booleans(),
)
def test_SEL_3_one_layer_at_once_is_a_row_of_all(budget, num_tokens, seed, has_ties):
    """SEL-2, SEL-3, SEL-5: `choose_row` against sorting, garbage past the candidates included."""
    whole = num_tokens // B
    num_candidates = max(whole - 1, 0)
    rng = np.random.default_rng(seed)
    mass = rng.random((HEADS, MAX_BLOCKS)).astype(np.float32)
    if has_ties:
        mass[:] = rng.integers(0, 3, MAX_BLOCKS)
    mass[:, num_candidates:] = np.nan
    selector = make_selector(budget)
    count = min(max(budget.num_blocks(whole), 2) - 1, num_candidates)
    scores = [float(np.mean(mass[:, b], dtype=np.float64)) for b in range(num_candidates)]
    ranked = sorted(range(1, num_candidates), key=lambda b: (-scores[b], b))
    selected = selector.choose_row(1, mass, num_tokens=num_tokens)
    assert selected.tolist() == sorted([0, *ranked][:count])
    assert selected.dtype == np.int32
    assert selector.num_selected(num_tokens) == count


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_SEL_4_one_layer_at_once_refuses_scores_that_are_not_finite(bad):
    mass = np.ones((HEADS, MAX_BLOCKS), np.float32)
    mass[2, 5] = bad
    with pytest.raises(PlanError, match="block 5 in layer 1"):
        make_selector(Budget(blocks=3)).choose_row(1, mass, num_tokens=MAX_BLOCKS * B)
