"""The selection of a sequence against sorting its scores."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockcompact_jax.errors import PlanError
from blockcompact_jax.geometry import ModelGeometry
from blockcompact_jax.scores import mass_from_log_sum_exp
from torch_bridge.budget import Budget, parse_budget
from torch_bridge.selector import Selector

B, HEADS, LAYERS, MAX_BLOCKS = 4, 4, 3, 20


def make_selector(budget):
    geometry = ModelGeometry.uniform(
        num_layers=LAYERS,
        num_query_heads=HEADS,
        num_kv_heads=2,
        head_dim=8,
        block_tokens=B,
        dtype="float32",
        layout="vec",
    )
    return Selector(geometry, budget, MAX_BLOCKS, mass_of=mass_from_log_sum_exp)


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


def test_only_blocks_that_are_still_there_are_selected():
    """Columns of the scores are the sequence's own blocks; names in the result are logical."""
    selector = make_selector(Budget(blocks=4))
    own = np.array([0, 3, 4, 7, 9, 10], np.int32)
    scores = np.full((LAYERS, HEADS, MAX_BLOCKS), -np.inf, np.float32)
    scores[..., : own.size] = [0, 1, 5, 3, 2, 9]  # the last two are the tail of 10 whole blocks
    selected = selector.choose(scores, num_tokens=10 * B + 1, own_blocks=own)
    assert selected.tolist() == [[0, 4, 7]] * LAYERS
