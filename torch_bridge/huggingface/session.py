"""One sequence on one model: prefill, draft steps, verification, and what follows from it."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass, field
from typing import Self

import torch
from transformers import PreTrainedModel

from blockcompact_jax.kernels import Layout
from blockcompact_jax.runtime import CompactionRuntime, RuntimeLimits
from blockcompact_jax.transfer import Pools
from blockcompact_jax.upload import SourceKind
from torch_bridge.budget import Budget, effective_budget_blocks
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

    The order of calls is `prefill`, then rounds of `draft_step`…, `verify`, `confirm` and, every so
    often, `reselect`. Between rounds the full KV and the resident tail hold exactly the verifier's
    own keys and values of the confirmed tokens.

    Attributes:
        model: a model with stock SDPA attention; its attention is replaced until `close`.
        limits: fixed sizes.
        score_source: turns recorded attention mass into block scores.
        layout: packed layout of the full KV.
        attention: "blocks" attends in place; "gathered" copies the blocks together for stock
            attention, bit for bit what a stock cache gives.
        num_tokens: confirmed tokens.
        seconds: time of each part.
    """

    model: PreTrainedModel
    limits: SessionLimits
    score_source: ScoreSource
    layout: Layout
    attention: AttentionName = "blocks"
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

    def _new_runtime(self) -> CompactionRuntime:
        limits, max_blocks = self.limits, self.sizes.max_blocks
        return CompactionRuntime(
            geometry=self.geometry,
            selection=selection_policy(max_want=effective_budget_blocks(limits.budget, max_blocks)),
            limits=RuntimeLimits(
                max_blocks=max_blocks,
                max_unselected_tokens=(limits.reselect_every_rounds + 1)
                * (limits.num_draft_tokens + 1),
            ),
            source_kind=self.source_kind,
        )

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
