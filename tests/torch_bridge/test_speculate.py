"""Self-speculative decoding: the output is the full model's, whatever the draft reads."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockcompact_jax.budget import Budget
from blockcompact_jax.kernels import Layout
from torch_bridge.huggingface.baseline import StockPrefix, decode_full
from torch_bridge.huggingface.lookup import NgramLookup
from torch_bridge.huggingface.policies import score_source
from torch_bridge.huggingface.sampling import Sampler
from torch_bridge.huggingface.session import CompactionSession, SessionLimits
from torch_bridge.huggingface.speculate import _accept, _draft, decode_speculative

NUM_NEW_TOKENS = 60


def _decode(model, token_ids, *, budget, policy="attention", temperature=0.0, seed=0, **kwargs):
    session = CompactionSession(
        model=model,
        limits=SessionLimits(
            max_tokens=len(token_ids) + NUM_NEW_TOKENS + 8,
            num_draft_tokens=kwargs.pop("num_draft_tokens", 3),
            num_lookup_tokens=kwargs.pop("num_lookup_tokens", 2),
            reselect_every_rounds=kwargs.pop("reselect_every_rounds", 2),
            block_tokens=kwargs.pop("block_tokens", 16),
            budget=budget,
        ),
        score_source=score_source(policy, seed=seed),
        layout=Layout.VEC,
    )
    try:
        sampler = Sampler(temperature=temperature, seed=seed)
        first_token = sampler.choose(session.prefill(token_ids))
        prefix = StockPrefix(session.cache)
        pieces: list[int] = []
        decoded = decode_speculative(
            session,
            token_ids,
            first_token=first_token,
            num_tokens=NUM_NEW_TOKENS,
            sampler=sampler,
            eos_token_ids=kwargs.pop("eos_token_ids", frozenset()),
            on_tokens=pieces.extend,
        )
        assert pieces == decoded.tokens
        return decoded, prefix.to_stock(model.config), first_token
    finally:
        session.close()


def _full_tokens(model, stock, first_token, compare_with=()):
    model.set_attn_implementation("sdpa")
    return decode_full(
        model,
        copy.deepcopy(stock),
        first_token=first_token,
        num_tokens=NUM_NEW_TOKENS,
        sampler=Sampler(temperature=0, seed=0),
        eos_token_ids=frozenset(),
        compare_with=list(compare_with),
        on_progress=lambda _: None,
    )


@pytest.mark.parametrize("policy", ["attention", "recency", "random"])
@pytest.mark.parametrize("budget", [Budget(blocks=2), Budget(fraction=0.3), Budget(fraction=1.0)])
def test_greedy_tokens_are_those_of_full_decoding(model, token_ids, budget, policy):
    decoded, stock, first_token = _decode(model, token_ids[:200], budget=budget, policy=policy)
    full = _full_tokens(model, stock, first_token, decoded.tokens)
    assert decoded.tokens == full.tokens
    assert full.divergence is None
    assert decoded.num_accepted <= decoded.num_drafted <= 3 * decoded.num_rounds
    assert decoded.num_drafted > 3 * (decoded.num_rounds - 1)


def test_lookups_save_forwards_and_change_no_token(model):
    """A repeating context makes guesses stand and fall; window layers roll back several times."""
    context = [7, 3, 9, 4, 1, 8] * 30
    plain, stock, first_token = _decode(
        model, context, budget=Budget(blocks=4), num_draft_tokens=6, num_lookup_tokens=0
    )
    guided, _, _ = _decode(
        model, context, budget=Budget(blocks=4), num_draft_tokens=6, num_lookup_tokens=4
    )
    assert guided.tokens == plain.tokens == _full_tokens(model, stock, first_token).tokens
    assert plain.num_draft_forwards == 6 * plain.num_rounds
    assert guided.num_draft_forwards < plain.num_draft_forwards


def _ngram_guess(tokens, drafted, num_tokens):
    """Brute force: the latest place where the newest 4, 3 or 2 tokens stood before."""
    newest = [*tokens, *drafted]
    for size in (4, 3, 2):
        for end in range(len(tokens) - 1, size - 1, -1):
            if size <= len(newest) and tokens[end - size : end] == newest[-size:]:
                return tokens[end : end + num_tokens]
    return []


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.lists(st.integers(0, 2), max_size=3),
    st.integers(0, 4),
)
def test_lookup_finds_the_latest_longest_ngram(tokens, drafted, num_tokens):
    lookup = NgramLookup(tokens[:5])
    lookup.extend(tokens[5:])
    assert lookup.propose(drafted, num_tokens) == _ngram_guess(tokens, drafted, num_tokens)


@pytest.mark.parametrize("num_context", [1, 15, 16, 17, 33])
def test_short_contexts_around_block_boundaries(model, token_ids, num_context):
    """Fixture: sequence lengths B - 1, B and B + 1; nothing to select is no error."""
    decoded, stock, first_token = _decode(
        model, token_ids[:num_context], budget=Budget(fraction=0.5)
    )
    assert decoded.tokens == _full_tokens(model, stock, first_token).tokens


def test_full_budget_accepts_every_draft(llama, token_ids):
    decoded, _, _ = _decode(llama, token_ids[:200], budget=Budget(fraction=1.0))
    assert decoded.num_accepted == decoded.num_drafted > 0


def test_decoding_ends_with_the_end_of_text_token(llama, token_ids):
    plain, _, _ = _decode(llama, token_ids[:200], budget=Budget(blocks=3))
    end = plain.tokens[10]
    decoded, _, _ = _decode(
        llama, token_ids[:200], budget=Budget(blocks=3), eos_token_ids=frozenset({end})
    )
    assert decoded.tokens == plain.tokens[: plain.tokens.index(end) + 1]


def test_sampling_is_seeded(llama, token_ids):
    """The same seed draws the same tokens, another seed others."""
    settings = {"budget": Budget(blocks=3), "temperature": 1.0}
    first, _, _ = _decode(llama, token_ids[:100], seed=1, **settings)
    again, _, _ = _decode(llama, token_ids[:100], seed=1, **settings)
    other, _, _ = _decode(llama, token_ids[:100], seed=2, **settings)
    assert first.tokens == again.tokens != other.tokens


def test_sampled_tokens_follow_the_full_models_distribution(llama, token_ids):
    """Drafts from two blocks propose other tokens; what is accepted or redrawn must not show it."""
    session = CompactionSession(
        model=llama,
        limits=SessionLimits(
            max_tokens=128,
            num_draft_tokens=2,
            num_lookup_tokens=1,
            reselect_every_rounds=2,
            block_tokens=16,
            budget=Budget(blocks=2),
        ),
        score_source=score_source("random", seed=0),
        layout=Layout.VEC,
    )
    with session:
        sampler = Sampler(temperature=0.04, seed=3)
        session.prefill(token_ids[:100])
        expected = sampler.probabilities(session.verify([5], is_scored=False)[0])
        lookup = NgramLookup(token_ids[:100])
        counts = np.zeros(97)
        num_rejected = 0
        for _ in range(600):
            session.verify([5], is_scored=False)  # rolls back the draft of the round before
            session.cache.rollback(1)
            draft = _draft(session, lookup, 5, sampler)
            logits = session.verify([5, *draft.tokens], is_scored=False)
            num_kept, next_token = _accept(draft, logits, sampler)
            counts[draft.tokens[0] if num_kept else next_token] += 1
            num_rejected += num_kept == 0
        by_chance = np.random.default_rng(0).multinomial(600, expected / expected.sum(), 300) / 600
        bound = np.abs(by_chance - expected).sum(-1).max() / 2
        drafted = draft.probabilities[0]
        assert num_rejected > 30
        assert np.abs(counts / 600 - expected).sum() / 2 <= bound
        assert np.abs(drafted - expected).sum() / 2 > bound  # drafting alone would not pass


def test_sampling_from_a_full_budget_draft_rejects_nothing(llama, token_ids):
    decoded, _, _ = _decode(llama, token_ids[:100], budget=Budget(fraction=1.0), temperature=1.0)
    assert decoded.num_accepted >= decoded.num_drafted - 1  # rounding may reject one


def test_a_divergence_is_reported_with_its_margin(llama, token_ids):
    _, stock, first_token = _decode(llama, token_ids[:100], budget=Budget(fraction=1.0))
    full = _full_tokens(llama, stock, first_token)
    other = [*full.tokens[:5], (full.tokens[5] + 1) % 97, *full.tokens[6:]]
    compared = _full_tokens(llama, stock, first_token, other)
    assert compared.divergence is not None
    assert compared.divergence.token_position == 105
    assert compared.divergence.logit_margin > 0


def test_sampler_draws_by_the_distribution():
    sampler = Sampler(temperature=1.0, seed=0)
    probabilities = np.array([0.0, 0.5, 0.0, 0.3, 0.2, 0.0], np.float32)
    drawn = np.bincount([sampler.draw(probabilities) for _ in range(4000)], minlength=6) / 4000
    assert (drawn[[0, 2, 5]] == 0).all()
    np.testing.assert_allclose(drawn, probabilities, atol=0.03)
    assert Sampler(temperature=0, seed=0).choose(torch.tensor([0.0, 3.0, 1.0])) == 1
