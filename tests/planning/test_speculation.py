"""Acceptance of drafts: exact distributions by exhausting small vocabularies."""

from fractions import Fraction
from itertools import pairwise, product

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.speculation import accept_greedy, accept_sampled, sample_from_weights

from .reference.speculate import output_distribution

jit_greedy = jax.jit(accept_greedy)
jit_sampled = jax.jit(accept_sampled)
sweep_accept = jax.jit(jax.vmap(accept_sampled, in_axes=(None, None, None, 0, None)))
sweep_last = jax.jit(jax.vmap(accept_sampled, in_axes=(None, None, None, None, 0)))
EIGHTHS = 8
# Every threshold k/m with m ≤ 8 is a line of this grid, so its midpoints measure exactly.
GRID = ((np.arange(840) + 0.5) / 840).astype(np.float32)


def shares(tokens):
    return [Fraction(int((np.asarray(tokens) == token).sum()), GRID.size) for token in range(3)]


@given(
    draft=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    target=st.lists(st.integers(0, 2), min_size=5, max_size=5),
)
def test_greedy_output_is_the_targets_own(draft, target):
    """The accepted prefix and one correction: exactly what the target alone would have said."""
    got = jit_greedy(np.asarray(draft, np.int32), np.asarray(target, np.int32))
    expected = []
    for j in range(5):
        expected.append(target[j])
        if j == 4 or draft[j] != target[j]:
            break
    num = int(got.num_tokens)
    assert np.asarray(got.tokens)[:num].tolist() == expected
    assert (np.asarray(got.tokens)[num:] == -1).all()
    assert int(got.num_accepted) == num - 1


def eighths(draw, vocab):
    """A distribution in eighths, zeros included."""
    cuts = sorted(draw(st.lists(st.integers(0, EIGHTHS), min_size=vocab - 1, max_size=vocab - 1)))
    edges = [0, *cuts, EIGHTHS]
    return [Fraction(high - low, EIGHTHS) for low, high in pairwise(edges)]


@st.composite
def distributions(draw, num_draft=2, vocab=3):
    q = [eighths(draw, vocab) for _ in range(num_draft)]
    p = [eighths(draw, vocab) for _ in range(num_draft + 1)]
    return q, p


@given(pair=distributions())
def test_the_rule_emits_the_target_distribution_exactly(pair):
    """The reference rule's first token has distribution p, and every later one given it too."""
    q, p = pair
    out = output_distribution(q, p)
    assert sum(out.values()) == 1
    for token in range(3):
        first = sum(weight for tokens, weight in out.items() if tokens[0] == token)
        assert first == p[0][token]
    for token in range(3):
        long = {t: w for t, w in out.items() if len(t) > 1}
        total = sum(long.values())
        second = sum(weight for tokens, weight in long.items() if tokens[1] == token)
        assert second == total * p[1][token]


@given(pair=distributions(num_draft=1))
def test_sampling_emits_the_target_distribution(pair):
    """Midpoints of a grid fine enough for eighths integrate both uniforms exactly.

    Per draft token: the accepted share, then the share of each token after a rejection and after
    an acceptance. Their mixture is the target's distribution.
    """
    (q,), p = pair
    probs = (np.asarray([q], np.float32), np.asarray(p, np.float32))
    first = [Fraction(0)] * 3
    for draft in range(3):
        if q[draft] == 0:
            continue
        tokens = np.asarray([draft], np.int32)
        got = sweep_accept(tokens, *probs, GRID[:, None], np.float32(0.0))
        accepted = Fraction(int(np.asarray(got.num_accepted).sum()), GRID.size)
        assert accepted == min(Fraction(1), p[0][draft] / q[draft])
        first[draft] += q[draft] * accepted
        if accepted < 1:
            above = np.asarray([(accepted + 1) / 2], np.float32)
            got = sweep_last(tokens, *probs, above, GRID)
            assert not np.asarray(got.num_accepted).any()
            for token, share in enumerate(shares(got.tokens[:, 0])):
                first[token] += q[draft] * (1 - accepted) * share
        if accepted > 0:
            got = sweep_last(tokens, *probs, np.zeros(1, np.float32), GRID)
            assert (np.asarray(got.tokens)[:, 0] == draft).all()
            assert shares(got.tokens[:, 1]) == p[1]
    assert first == p[0]


def test_first_rejection_ends_the_round():
    """Later draft tokens do not count after a rejection, even where they would be accepted."""
    q = np.asarray([[0.5, 0.5], [0.5, 0.5]], np.float32)
    p = np.asarray([[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]], np.float32)
    uniforms = np.asarray([0.0, 0.0], np.float32)
    got = jit_sampled(np.asarray([0, 1], np.int32), q, p, uniforms, np.float32(0.3))
    assert np.asarray(got.tokens).tolist() == [1, -1, -1]
    assert int(got.num_accepted) == 0


def test_all_accepted_gives_a_bonus_token():
    """The last token comes from the target's last distribution."""
    q = p0 = np.asarray([[0.5, 0.5]], np.float32)
    p = np.concatenate([p0, np.asarray([[0.25, 0.75]], np.float32)])
    draft = np.asarray([1], np.int32)
    for uniform, token in ((0.2, 0), (0.25, 1), (0.999, 1)):
        got = jit_sampled(draft, q, p, np.asarray([0.99], np.float32), np.float32(uniform))
        assert np.asarray(got.tokens).tolist() == [1, token]


def test_a_rejection_without_residual_draws_from_the_target():
    """Rounding may leave p below q everywhere; an impossible token must not come out of that."""
    q = np.asarray([[0.5, 0.5, 0.0]], np.float32)
    p = np.asarray([[0.4999, 0.4999, 0.0], [1.0, 0.0, 0.0]], np.float32)
    almost_one = np.asarray([1.0 - 2**-24], np.float32)
    got = jit_sampled(np.asarray([0], np.int32), q, p, almost_one, np.float32(0.75))
    assert np.asarray(got.tokens).tolist() == [1, -1]


@pytest.mark.parametrize("uniform", [0.0, 0.5, np.float32(1.0) - np.float32(2**-24)])
def test_impossible_tokens_are_never_drawn(uniform):
    """Zero weights at either end are out of reach of every uniform below 1."""
    weights = np.asarray([0.0, 0.1, 0.0, 0.7, 0.0, 0.0], np.float32)
    assert int(sample_from_weights(weights, np.float32(uniform))) in (1, 3)


def test_the_same_draws_give_the_same_tokens():
    """No hidden randomness: repeating a round repeats its result, with and without jit."""
    rng = np.random.default_rng(0)
    q = rng.dirichlet(np.ones(5), 3).astype(np.float32)
    p = rng.dirichlet(np.ones(5), 4).astype(np.float32)
    for draft in product(range(2), repeat=3):
        args = (np.asarray(draft, np.int32), q, p, rng.random(3, np.float32), np.float32(0.4))
        left, right = accept_sampled(*args), jit_sampled(*args)
        assert np.asarray(left.tokens).tobytes() == np.asarray(right.tokens).tobytes()


def test_wrong_shapes_and_dtypes_are_refused():
    """Off-by-one targets and float64 probabilities are never guessed around."""
    with pytest.raises(CompactionError, match=r"`target_argmax` has shape \(2,\); expected \(3,\)"):
        accept_greedy(np.zeros(2, np.int32), np.zeros(2, np.int32))
    good = [np.zeros(1, np.int32), np.ones((1, 2)), np.ones((2, 2)), np.zeros(1), np.zeros(())]
    with pytest.raises(CompactionError, match="`draft_probs` has dtype float64"):
        accept_sampled(*good)
    with pytest.raises(CompactionError, match="`draft_probs` has shape"):
        accept_sampled(good[0], np.ones((1, 3)), *good[2:])
