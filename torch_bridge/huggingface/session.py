"""One sequence on one model: prefill, draft steps, verification, and what follows from it."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from transformers import PreTrainedModel

from blockcompact_jax.budget import Budget, effective_budget_blocks
from blockcompact_jax.costs import RetainCosts, Term, TermSource, assumed, costs_from_metrics
from blockcompact_jax.course import RoundRecord, RunCourse
from blockcompact_jax.kernels import Layout
from blockcompact_jax.reselection import (
    OnlineReselection,
    Reselection,
    RoundDecision,
)
from blockcompact_jax.round_curves import RoundSample
from blockcompact_jax.runtime import CompactionRuntime, RuntimeLimits
from blockcompact_jax.transfer import Pools
from blockcompact_jax.upload import SourceKind
from torch_bridge.dlpack import to_jax
from torch_bridge.huggingface.attention import borrow_attention, check_attention, return_attention
from torch_bridge.huggingface.cache import CompactedCache, Phase
from torch_bridge.huggingface.options import AttentionName
from torch_bridge.huggingface.policies import ScoreSource
from torch_bridge.huggingface.sizes import store_sizes
from torch_bridge.huggingface.verifier import BlockForward, LocalVerifier, Verifier
from torch_bridge.memory import PrivateMemory
from torch_bridge.policy import selection_policy
from torch_bridge.resident import ResidentKV


@dataclass
class PartSeconds:
    """Wall-clock time of each part of decoding."""

    draft: float = 0.0
    verify: float = 0.0
    reselect: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """Sizes that are fixed when a session is made.

    Attributes:
        max_tokens: longest sequence, context and new tokens and drafts.
        num_draft_tokens: tokens drafted a round.
        num_lookup_tokens: most tokens of one draft forward that the text itself may suggest.
        reselect_every_rounds: rounds between two selections.
        block_tokens: tokens a block.
        budget: share or number of whole blocks that stay resident.
    """

    max_tokens: int
    num_draft_tokens: int
    num_lookup_tokens: int
    reselect_every_rounds: int
    block_tokens: int
    budget: Budget


@dataclass
class CompactionSession:
    """Decodes one sequence with a resident pool, and keeps every store consistent.

    The order of calls is `prefill`, then rounds of `begin_round`, `draft_step`…, `verify`,
    `confirm`, `end_round` and, where the round's decision says so, `reselect`. A caller that
    decides by itself leaves `begin_round` and `end_round` out. Between rounds the full KV and the
    resident tail hold exactly the verifier's own keys and values of the confirmed tokens.

    Attributes:
        model: a model with stock SDPA attention; its attention is replaced until `close`.
        limits: fixed sizes.
        score_source: turns recorded attention mass into block scores.
        layout: packed layout of the full KV.
        attention: "blocks" attends in place; "gathered" copies the blocks together for stock
            attention, bit for bit what a stock cache gives.
        online: chooses by costs when blocks are selected anew; None keeps the period of `limits`.
        has_course: whether the course of the run is recorded.
        num_tokens: confirmed tokens.
        seconds: time of each part.
        reselection: decides when blocks are selected anew.
        course: what was recorded; None if nothing is.
    """

    model: PreTrainedModel
    limits: SessionLimits
    score_source: ScoreSource
    layout: Layout
    attention: AttentionName = "blocks"
    online: OnlineReselection | None = None
    has_course: bool = False
    num_tokens: int = 0
    seconds: PartSeconds = field(default_factory=PartSeconds)

    def __post_init__(self) -> None:
        check_attention(self.model)
        limits = self.limits
        self.sizes = store_sizes(
            self.model,
            block_tokens=limits.block_tokens,
            layout=self.layout,
            attention=self.attention,
            max_tokens=limits.max_tokens,
            num_draft_tokens=limits.num_draft_tokens,
        )
        self.geometry = self.sizes.geometry
        self.reselection = self._new_reselection()
        self.course = self._new_course() if self.has_course else None
        self.runtime = self._new_runtime()
        self.full = self.sizes.full_kv(PrivateMemory())
        self.resident = self._new_resident()
        config = self.model.config.get_text_config(decoder=True)
        self.cache = CompactedCache(config, self.full, self.resident)
        self.cache.is_gathering = self.attention == "gathered"
        self.blocks = self.sizes.block_attention(self.cache, PrivateMemory())
        self.runtime.attach(Pools(packed=self.full.packed_pool, resident=self.resident.pool))
        self._forward = BlockForward(self.model, self.cache)
        self.verifier = self._new_verifier()
        borrow_attention(self.model)
        self._return_attention = weakref.finalize(self, return_attention, self.model)

    @property
    def source_kind(self) -> SourceKind:
        """What uploads read."""
        return SourceKind.SOURCE_ONLY

    @property
    def metadata_cost(self) -> Term:
        """What telling the other side takes: in one process there is none, so it is 0."""
        return assumed(0.0)

    def _new_reselection(self) -> Reselection:
        online = self.online
        if online is not None:
            online = replace(online, costs=tuple(map(self._completed, online.costs)))
        return Reselection(
            period_rounds=self.limits.reselect_every_rounds,
            online=online,
            is_recorded=self.has_course,
        )

    def _completed(self, costs: RetainCosts) -> RetainCosts:
        """Costs with what this session answers for."""
        is_missing = costs.metadata.source is TermSource.UNMEASURED
        return replace(costs, metadata=self.metadata_cost) if is_missing else costs

    def _new_course(self) -> RunCourse:
        return RunCourse(layers=self.geometry.full_layers, block_tokens=self.geometry.block_tokens)

    def _new_runtime(self) -> CompactionRuntime:
        limits, max_blocks = self.limits, self.sizes.max_blocks
        runtime = CompactionRuntime(
            geometry=self.geometry,
            selection=selection_policy(max_want=effective_budget_blocks(limits.budget, max_blocks)),
            limits=RuntimeLimits(
                max_blocks=max_blocks,
                max_unselected_tokens=(self.reselection.max_period_rounds + 1)
                * (limits.num_draft_tokens + 1),
            ),
            source_kind=self.source_kind,
        )
        runtime.on_selection = self.course.add_selection if self.course else None
        return runtime

    def _new_resident(self) -> ResidentKV:
        return ResidentKV(self.sizes.shape, self.runtime.num_physical_blocks)

    def _new_verifier(self) -> Verifier:
        return LocalVerifier(self._forward, self.cache, self.full, self.blocks)

    def warm_up(self) -> None:
        """Compiles the planning calls before the first selection needs them."""
        self.runtime.warm_up(self.score_source(to_jax(self.blocks.mass)))

    def prefill(self, token_ids: list[int]) -> torch.Tensor:
        """Runs the whole context, packs its blocks and makes the first selection.

        Args:
            token_ids: the context.

        Returns:
            Logits [vocabulary] of the token after the context.
        """
        logits = self.verifier.prefill(token_ids)
        self.num_tokens = len(token_ids)
        self.reselect()
        self.seconds = PartSeconds()
        return logits

    def begin_round(self) -> RoundDecision:
        """Decides whether the round that begins ends with a new selection.

        Its verification is to be scored then, and `reselect` to follow `end_round`.
        """
        self._round = self.reselection.decide()
        self._round_begin = time.perf_counter()
        return self._round

    def end_round(self, *, num_drafted: int, num_accepted: int, num_gained: int) -> None:
        """Books the round that `begin_round` began, after its `confirm`.

        Args:
            num_drafted: tokens drafted, those past the last wanted one left out.
            num_accepted: of these, tokens accepted.
            num_gained: tokens gained, the verifier's own one included.
        """
        decision, round_us = self._round, (time.perf_counter() - self._round_begin) * 1e6
        self.reselection.book_round(
            RoundSample(
                age_rounds=decision.age_rounds, round_us=round_us, num_gained_tokens=num_gained
            )
        )
        if self.course is not None:
            self.course.add_round(
                RoundRecord(
                    num_drafted=num_drafted,
                    num_accepted=num_accepted,
                    num_gained=num_gained,
                    round_us=round_us,
                    decision=decision,
                )
            )

    def draft_step(self, token_ids: list[int]) -> torch.Tensor:
        """Runs tokens over the resident KV only; their KV is provisional.

        Returns:
            Logits [num_tokens, vocabulary].
        """
        begin = time.perf_counter()
        with self.resident.tables.reading():
            logits = self._forward(Phase.DRAFT, self.blocks, token_ids)
        self.seconds.draft += time.perf_counter() - begin
        return logits

    def forget_draft(self, num_tokens: int) -> None:
        """Forgets the newest `num_tokens` drafted tokens."""
        self.cache.rollback(num_tokens)

    def verify(self, token_ids: list[int], *, is_scored: bool) -> torch.Tensor:
        """Forgets the draft's KV, then runs its tokens over the full KV.

        Args:
            token_ids: the last chosen token, then the drafted ones.
            is_scored: whether to record block mass for a selection.

        Returns:
            Logits [num_tokens, vocabulary].
        """
        begin = time.perf_counter()
        self.cache.rollback(self.cache.get_seq_length() - self.num_tokens)
        logits = self.verifier.verify(token_ids, is_scored=is_scored)
        self.seconds.verify += time.perf_counter() - begin
        return logits

    def confirm(self, num_tokens: int) -> None:
        """Keeps the first `num_tokens` verified tokens, exactly, in every store."""
        begin = time.perf_counter()
        first = self.num_tokens
        self.num_tokens += num_tokens
        self.verifier.keep(self.num_tokens)
        self.resident.write_confirmed(first, self.full.read_newest(first, self.num_tokens))
        self.verifier.pack(self.num_tokens)
        self.seconds.verify += time.perf_counter() - begin

    def reselect(self) -> None:
        """Selects, uploads and retains from the scores of the last scored forward."""
        begin = time.perf_counter()
        limits = self.limits
        scores = self.score_source(to_jax(self.blocks.mass))
        num_whole_blocks = self.num_tokens // limits.block_tokens
        budget = effective_budget_blocks(limits.budget, num_whole_blocks)
        is_first = not self.runtime.has_selection
        tables = self.runtime.reselect(
            scores,
            num_tokens=self.num_tokens,
            budget_blocks=budget,
            publish=lambda tables: self.resident.set_tables(
                tables.selected_physical_blocks,
                tables.tail_physical_blocks,
                tables.tail_start_token_position,
            ),
        )
        tail = self.full.read_newest(tables.unfilled_token_position, self.num_tokens)
        self.resident.write_confirmed(tables.unfilled_token_position, tail)
        # The first selection uploads everything, which says nothing of the later ones.
        booked = costs_from_metrics(self.runtime.last_booked)
        self.reselection.book_selection(None if is_first else self._completed(booked))
        self.seconds.reselect += time.perf_counter() - begin

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of every store, by the names of the run report."""
        return {
            "full_kv_packed": self.full.packed.nbytes,
            "full_kv_newest": self.full.newest.nbytes,
            "resident_pool": self.resident.tensor.nbytes,
            "scratch": self.blocks.mass.nbytes + self.full.plain_layer.nbytes,
        }

    def close(self) -> None:
        """Gives the model its own attention back and unregisters every store, for good.

        A second call does nothing.
        """
        if not self._return_attention.alive:
            return
        self._return_attention()
        self.full.close()
        self.resident.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
