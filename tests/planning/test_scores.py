"""SEL-9 and SEL-2: reductions against NumPy loops, bit by bit where sums have an order."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.scores import (
    BlockReduction,
    HeadReduction,
    block_scores_from_tokens,
    mass_from_log_sum_exp,
    page_bound_scores,
    page_bounds,
    reduce_heads,
    reduce_over_ranks,
)

jit_heads = jax.jit(reduce_heads, static_argnames="head_reduction")
jit_tokens = jax.jit(
    block_scores_from_tokens,
    static_argnames=("block_tokens", "block_reduction", "head_reduction", "top_tokens"),
)


def ordered_sum(values):
    """Pairwise halving in float32: element i joins element i + ceil(n / 2)."""
    values = [np.float32(v) for v in values]
    while len(values) > 1:
        half = (len(values) + 1) // 2
        values = [
            np.float32(values[i] + values[half + i]) if half + i < len(values) else values[i]
            for i in range(half)
        ]
    return values[0]


def reduce_list(values, how, top=1):
    if how == "max":
        return np.float32(max(values))
    if how == "top_mean":
        values, how = sorted(values, reverse=True)[:top], "mean"
    total = ordered_sum(values)
    if how == "sum":
        return total
    return np.float32(total * (np.float32(1.0) / np.float32(len(values))))


@pytest.mark.parametrize("how", list(HeadReduction))
@pytest.mark.parametrize("shape", [(2, 1, 5), (2, 3, 5), (3, 9, 2, 7), (1, 4, 5, 6)])
def test_SEL_9_head_reduction_matches_a_loop_bitwise(how, shape):
    """SEL-9: max, mean and sum over query heads and draft positions, in one fixed order."""
    mass = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    got = np.asarray(jit_heads(mass, head_reduction=how))
    flat = mass.reshape(shape[0], -1, shape[-1])
    expected = [
        [reduce_list(flat[r, :, n].tolist(), how.value) for n in range(shape[-1])]
        for r in range(shape[0])
    ]
    assert got.tobytes() == np.asarray(expected, np.float32).tobytes()


@pytest.mark.parametrize("how", [how for how in BlockReduction if how.value != "log_sum_exp"])
@pytest.mark.parametrize("block_tokens", [1, 2, 32])
def test_SEL_9_block_reduction_matches_a_loop_bitwise(how, block_tokens):
    """SEL-9: max, mean, sum and top-m mean over the tokens of a block."""
    top = min(3, block_tokens)
    tokens = np.random.default_rng(1).standard_normal((2, 2, block_tokens * 3))
    tokens = tokens.astype(np.float32)
    got = jit_tokens(
        tokens,
        block_tokens=block_tokens,
        block_reduction=how,
        head_reduction=HeadReduction.MAX,
        top_tokens=top,
    )
    for row in range(2):
        for block in range(3):
            span = slice(block * block_tokens, (block + 1) * block_tokens)
            heads = [reduce_list(tokens[row, h, span].tolist(), how.value, top) for h in range(2)]
            assert np.asarray(got)[row, block].tobytes() == max(heads).tobytes()


@pytest.mark.parametrize("block_tokens", [1, 2, 32])
def test_SEL_9_log_sum_exps_of_blocks_give_the_mass_of_a_softmax_over_tokens(block_tokens):
    """SEL-9: whatever the size of the scores; a block without tokens has none."""
    tokens = 100 * np.random.default_rng(2).standard_normal((2, 3, 4 * block_tokens))
    tokens = tokens.astype(np.float32)
    tokens[..., :block_tokens] = -np.inf
    log_sum_exps = np.stack(
        [
            jit_tokens(
                tokens[:, head : head + 1],
                block_tokens=block_tokens,
                block_reduction=BlockReduction.LOG_SUM_EXP,
                head_reduction=HeadReduction.MAX,
            )
            for head in range(3)
        ],
        axis=1,
    )
    weights = np.exp(tokens.astype(np.float64) - tokens.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = weights.reshape(2, 3, 4, block_tokens).sum(-1)
    mass = np.asarray(mass_from_log_sum_exp(log_sum_exps))
    np.testing.assert_allclose(mass, expected, atol=2e-5)
    assert not mass[..., 0].any()


def test_SEL_4_what_is_not_finite_stays_in_its_block():
    """SEL-4: a selection must be able to name it, and the other blocks keep their mass."""
    log_sum_exps = np.zeros((1, 1, 4), np.float32)
    log_sum_exps[..., 1], log_sum_exps[..., 2] = np.nan, np.inf
    mass = np.asarray(mass_from_log_sum_exp(log_sum_exps))[0, 0]
    np.testing.assert_allclose(mass[[0, 3]], 0.5, rtol=1e-6)
    assert np.isnan(mass[1])
    assert mass[2] == np.inf
    with pytest.raises(CompactionError, match="`log_sum_exps` has dtype float64"):
        mass_from_log_sum_exp(np.zeros((1, 1, 1)))


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_SEL_2_tokens_past_the_last_whole_block_do_not_count(extra):
    """SEL-2: seq_len = B - 1, B, B + 1 give 0, 1, 1 blocks, whatever the odd tokens hold."""
    block_tokens = 4
    tokens = np.ones((1, 1, block_tokens + extra), np.float32)
    if extra == 1:
        tokens[..., -1] = np.nan
    got = jit_tokens(
        tokens,
        block_tokens=block_tokens,
        block_reduction=BlockReduction.SUM,
        head_reduction=HeadReduction.SUM,
    )
    assert np.asarray(got).tolist() == ([[]] if extra < 0 else [[4.0]])


@given(seed=st.integers(0, 2**31 - 1))
def test_SEL_9_page_bounds_bound_every_logit(seed):
    """SEL-9: the bound is at least every q·k of the block, and exact for one-token blocks."""
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((2, 2, 9, 8)).astype(np.float32)
    queries = rng.standard_normal((2, 4, 3, 8)).astype(np.float32)
    for block_tokens in (1, 4):
        low, high = page_bounds(keys, block_tokens=block_tokens)
        bounds = np.asarray(page_bound_scores(queries, low, high))
        assert bounds.shape == (2, 4, 3, 9 // block_tokens)
        logits = np.einsum("rhgpd,rhtd->rhgpt", queries.reshape(2, 2, 2, 3, 8), keys)
        logits = logits.reshape(2, 4, 3, 9)[..., : 9 // block_tokens * block_tokens]
        largest = logits.reshape(2, 4, 3, -1, block_tokens).max(-1)
        assert (bounds >= largest - 1e-4).all()
        if block_tokens == 1:
            np.testing.assert_allclose(bounds, largest, atol=1e-4)


def test_SEL_9_wrong_inputs_are_refused():
    """SEL-9: shapes and dtypes are never guessed."""
    with pytest.raises(CompactionError, match="`block_mass` has dtype float64"):
        reduce_heads(np.ones((1, 1, 1)), head_reduction=HeadReduction.MAX)
    with pytest.raises(CompactionError, match=r"`block_mass` has shape \(2, 2\)"):
        reduce_heads(np.ones((2, 2), np.float32), head_reduction=HeadReduction.MAX)
    with pytest.raises(CompactionError, match="`top_tokens` is 5"):
        block_scores_from_tokens(
            np.ones((1, 1, 8), np.float32),
            block_tokens=4,
            block_reduction=BlockReduction.TOP_MEAN,
            head_reduction=HeadReduction.MAX,
            top_tokens=5,
        )
    with pytest.raises(CompactionError, match="do not fit"):
        page_bound_scores(
            np.ones((1, 3, 1, 4), np.float32),
            np.ones((1, 2, 5, 4), np.float32),
            np.ones((1, 2, 5, 4), np.float32),
        )
    for wrong, message in (
        (np.ones((1, 1)), "`scores` has dtype float64"),
        (np.ones(3, np.float32), r"`scores` has shape \(3,\)"),
    ):
        with pytest.raises(CompactionError, match=message):
            reduce_over_ranks(wrong, rank_axis="rank", head_reduction=HeadReduction.MAX)
