"""Self-speculative decoding: draft on the resident pool, verify on the full KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
import torch

from blockcompact_jax.speculation import accept_greedy, accept_sampled
from torch_bridge.huggingface.lookup import NgramLookup
from torch_bridge.huggingface.sampling import Sampler
from torch_bridge.huggingface.session import CompactionSession

_accept_greedy = jax.jit(accept_greedy)
_accept_sampled = jax.jit(accept_sampled)


@dataclass(frozen=True, kw_only=True)
class SpeculativeDecode:
    """Result of a self-speculative decoding.

    Attributes:
        tokens: the new tokens; each is the full model's own choice.
        num_rounds: draft-and-verify rounds.
        num_drafted: tokens drafted, those past the last wanted one left out.
        num_accepted: of these, tokens accepted.
        num_gained: tokens that the rounds gave, before the end of the text cut any.
        num_draft_forwards: forwards that drafted them; fewer than `num_drafted` where the lookup
            guessed right.
    """

    tokens: list[int]
    num_rounds: int
    num_drafted: int
    num_accepted: int
    num_gained: int
    num_draft_forwards: int

    @property
    def acceptance_rate(self) -> float | None:
        """Share of drafted tokens that were accepted; None if none was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None


@dataclass(kw_only=True)
class _Draft:
    tokens: list[int]
    probabilities: list[np.ndarray]
    num_forwards: int = 0


def decode_speculative(
    session: CompactionSession,
    context: list[int],
    *,
    first_token: int,
    num_tokens: int,
    sampler: Sampler,
    eos_token_ids: frozenset[int],
    on_tokens: Callable[[list[int]], bool | None],
) -> SpeculativeDecode:
    """Decodes until `num_tokens` tokens, the end of the text, or when `on_tokens` says so.

    Every round drafts, verifies, and gains the accepted tokens and one more. In the rounds that the
    session's reselection says the verification is scored and blocks are selected anew.

    Args:
        session: a prefilled session.
        context: the tokens it was prefilled with.
        first_token: the first new token, which the prefill's logits gave.
        num_tokens: new tokens to decode, `first_token` included.
        sampler: chooses tokens; all random draws come from it.
        eos_token_ids: tokens that end the text.
        on_tokens: called with the tokens gained, `first_token` included, as they come; True ends
            the decoding.

    Returns:
        Tokens and counts.
    """
    limits = session.limits
    tokens = [first_token]
    is_ended = on_tokens(tokens)
    lookup = NgramLookup([*context, first_token])
    num_rounds = num_drafted = num_accepted = num_gained = num_draft_forwards = 0
    while not is_ended and len(tokens) < num_tokens and tokens[-1] not in eos_token_ids:
        num_rounds += 1
        is_scored = session.begin_round().is_reselecting
        draft = _draft(session, lookup, tokens[-1], sampler)
        logits = session.verify([tokens[-1], *draft.tokens], is_scored=is_scored)
        num_kept, next_token = _accept(draft, logits, sampler)
        session.confirm(num_kept + 1)
        num_wanted = min(limits.num_draft_tokens, num_tokens - len(tokens))
        session.end_round(
            num_drafted=num_wanted,
            num_accepted=min(num_kept, num_wanted),
            num_gained=num_kept + 1,
        )
        gained = _until_end([*draft.tokens[:num_kept], next_token], eos_token_ids)
        gained = gained[: num_tokens - len(tokens)]
        tokens += gained
        lookup.extend(gained)
        num_draft_forwards += draft.num_forwards
        num_drafted += num_wanted
        num_accepted += min(num_kept, num_wanted)
        num_gained += num_kept + 1
        is_ended = on_tokens(gained)
        if is_scored:
            session.reselect()
    return SpeculativeDecode(
        tokens=tokens,
        num_rounds=num_rounds,
        num_drafted=num_drafted,
        num_accepted=num_accepted,
        num_gained=num_gained,
        num_draft_forwards=num_draft_forwards,
    )


def _draft(
    session: CompactionSession, lookup: NgramLookup, last_token: int, sampler: Sampler
) -> _Draft:
    """Drafts token by token, several a forward where the lookup guesses right.

    A guess stands only if it is the very token that the draft's own logits give, so the drafted
    tokens and their probabilities are those of drafting one by one.
    """
    limits = session.limits
    draft = _Draft(tokens=[], probabilities=[])
    while len(draft.tokens) < limits.num_draft_tokens:
        num_missing = limits.num_draft_tokens - len(draft.tokens)
        guess = lookup.propose(draft.tokens, min(limits.num_lookup_tokens, num_missing - 1))
        logits = session.draft_step([*(draft.tokens[-1:] or [last_token]), *guess])
        draft.num_forwards += 1
        num_standing = 0
        for row, guessed in zip(logits, [*guess, None], strict=True):
            draft.tokens.append(_draw(row, draft, sampler))
            if draft.tokens[-1] != guessed:
                break
            num_standing += 1
        session.forget_draft(len(guess) - num_standing)
    return draft


def _draw(logits: torch.Tensor, draft: _Draft, sampler: Sampler) -> int:
    if sampler.is_greedy:
        return sampler.choose(logits)
    draft.probabilities.append(sampler.probabilities(logits))
    return sampler.draw(draft.probabilities[-1])


def _accept(draft: _Draft, logits: torch.Tensor, sampler: Sampler) -> tuple[int, int]:
    """Returns how many drafted tokens stand, and the token after them."""
    drafted = np.asarray(draft.tokens, np.int32)
    if sampler.is_greedy:
        best = sampler.processed(logits).argmax(-1)
        acceptance = _accept_greedy(drafted, best.to(torch.int32).numpy())
    else:
        acceptance = _accept_sampled(
            drafted,
            np.stack(draft.probabilities),
            sampler.probabilities(logits),
            sampler.uniforms.random(len(drafted), dtype=np.float32),
            sampler.uniforms.random(1, dtype=np.float32)[0],
        )
    num_accepted = int(acceptance.num_accepted)
    return num_accepted, int(np.asarray(acceptance.tokens)[num_accepted])


def _until_end(tokens: list[int], eos_token_ids: frozenset[int]) -> list[int]:
    for place, token in enumerate(tokens):
        if token in eos_token_ids:
            return tokens[: place + 1]
    return tokens


def warm_up(sampler: Sampler, num_draft_tokens: int, num_vocabulary: int) -> None:
    """Compiles the acceptance of `num_draft_tokens` drafts, so that no round pays for it."""
    drafted = np.zeros(num_draft_tokens, np.int32)
    if sampler.is_greedy:
        acceptance = _accept_greedy(drafted, np.zeros(num_draft_tokens + 1, np.int32))
    else:
        uniform = np.full((num_draft_tokens + 1, num_vocabulary), 1 / num_vocabulary, np.float32)
        uniforms = np.zeros(num_draft_tokens, np.float32)
        acceptance = _accept_sampled(drafted, uniform[1:], uniform, uniforms, np.float32(0))
    acceptance.num_accepted.block_until_ready()
