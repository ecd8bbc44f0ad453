"""One sequence of an attend cache: its full KV, packed, and which of its blocks decoding reads."""

from __future__ import annotations

import time

import numpy as np
import torch
from jaxtyping import Int32

from torch_bridge.attend import attend_blocks
from torch_bridge.dlpack import aligned_zeros
from torch_bridge.full import FullKV, SkippedBlocks
from torch_bridge.held import Blocks, HoldingPeriod
from torch_bridge.huggingface.attention import causal_tail_attention
from torch_bridge.huggingface.sizes import StoreSizes
from torch_bridge.key_moments import KeyMoments
from torch_bridge.selector import Selector

MAX_SCORED_QUERIES = 16
"""Queries that score blocks at a prompt's end, where one alone sees too little of what comes.

In decoding those since the last selection do, at most as many: older ones say less of what comes.
"""

ESTIMATED_TOKENS = 8
"""Tokens whose keys share one summary, where a block has a multiple of them."""


class AttendSequence:
    """Attends over all blocks or over the selected ones, forward by forward.

    A forward is `begin`, then `attend` or (for the first one) `append` and `score` for every row,
    then `finish`. The partial block and everything since the last selection is always attended to.

    Attributes:
        full: the sequence's KV.
        num_tokens: tokens, those of the present forward included; padding is not among them.
        num_keys: keys that decoding attended to so far, in one layer.
        num_full_keys: keys that full attention would have attended to.
        num_scored: times the blocks were scored.
        period: decoded tokens between two selections.
    """

    def __init__(
        self,
        sizes: StoreSizes,
        selector: Selector,
        *,
        period: HoldingPeriod,
        place: int,
        is_gathering: bool,
        is_estimating: bool = False,
    ) -> None:
        """Allocates the stores.

        Args:
            sizes: of the stores.
            selector: chooses blocks from their attention mass.
            period: decoded tokens between two selections.
            place: of the sequence in its batch, for the log of decisions.
            is_gathering: whether decoding unpacks blocks for stock attention.
            is_estimating: whether every decoded token selects its own blocks, by an estimate of
                what it will attend to; nothing is scored then.
        """
        block_tokens = sizes.geometry.block_tokens
        self._moments = _key_moments(sizes) if is_estimating else None
        self.full = FullKV(
            sizes.shape,
            max_blocks=sizes.max_blocks,
            max_unpacked_tokens=block_tokens,
            num_kept_blocks=0,
            layout=sizes.layout,
        )
        self._selector = selector
        self.period = period
        self._place = place
        self._is_gathering = is_gathering
        self._mass = aligned_zeros(
            sizes.geometry.num_rows,
            sizes.geometry.layer_geometry(sizes.geometry.full_layers[0]).num_query_heads,
            MAX_SCORED_QUERIES,
            sizes.max_blocks,
            dtype=torch.float32,
        )
        self.num_tokens = 0
        self._selected: Int32[np.ndarray, "row selected"] | None = None
        self._num_candidate_blocks = 0  # as of the selection
        self._num_selected_at_tokens = 0
        self._newest_queries: list[torch.Tensor | None] = [None] * sizes.geometry.num_rows
        self._num_scored_queries = 0
        self._is_held = False  # whether the selection was attended to until this forward
        self._score_us = 0.0
        self._is_selecting = False
        self.num_keys = self.num_full_keys = self.num_scored = 0

    def begin(self, num_new_tokens: int) -> None:
        """Starts a forward.

        Args:
            num_new_tokens: its tokens; more than one are always computed with full attention.
        """
        is_decoding = num_new_tokens == 1 and self.num_tokens > 0
        self.num_tokens += num_new_tokens
        needs_all = self._selector.needs_all(self.num_tokens)
        self._is_selecting = is_decoding and not needs_all and self._moments is not None
        if needs_all or self._moments is not None:
            self._selected = None
            self._num_scored_queries = 0
        else:
            self._num_scored_queries = self._num_queries_to_score(is_decoding=is_decoding)
        is_scored = self._num_scored_queries > 0
        self._is_held = is_scored and is_decoding and self._selected is not None
        if is_decoding:
            self.num_full_keys += self.num_tokens
            self.num_keys += self.num_tokens
            if self._is_selecting:
                self._num_candidate_blocks = self._selector.num_candidate_blocks(self.num_tokens)
                num_skipped = self._num_candidate_blocks - self._selector.num_selected(
                    self.num_tokens
                )
                self.num_keys -= num_skipped * self.full.shape.block_tokens
            elif self._selected is not None and not is_scored:
                num_skipped = self._num_candidate_blocks - self._selected.shape[1]
                self.num_keys -= num_skipped * self.full.shape.block_tokens

    def _num_queries_to_score(self, *, is_decoding: bool) -> int:
        """Newest queries that score this forward's blocks; 0 where no selection is due."""
        if not is_decoding or self._selected is None:
            return min(self.num_tokens, MAX_SCORED_QUERIES)
        age = self.num_tokens - self._num_selected_at_tokens
        return min(age, MAX_SCORED_QUERIES) if age >= self.period.choice.period else 0

    def append(self, row: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Writes the forward's keys and values [num_kv_heads, num_new, head_dim] of a row."""
        token_position = self.num_tokens - key.shape[1]
        self.full.append(row, token_position, key, value)
        if self._moments is not None:
            self._moments.add(row, token_position, key)

    def attend(self, row: int, query: torch.Tensor, out: torch.Tensor, scale: float) -> None:
        """Attends, after `append`, and scores where this forward is scored.

        Args:
            row: full-attention layer row.
            query: [num_query_heads, num_new, head_dim], contiguous last axis.
            out: as `query`, written.
            scale: softmax scale.
        """
        num_queries = query.shape[1]
        skipped = self._skipped(row, query, scale)
        if num_queries > 1 or self._is_gathering:
            key, value = self.full.read(row, self.num_tokens, skipped)
            out.copy_(causal_tail_attention(query[None], key[None], value[None], scale)[0])
        else:
            segments = self.full.segments(row, self.num_tokens, skipped)
            attend_blocks(query, segments, out=out, scale=scale)
        self.score(row, query, scale)

    def score(self, row: int, query: torch.Tensor, scale: float) -> None:
        """Remembers a row's queries, and scores its blocks where this forward is scored.

        Args:
            row: full-attention layer row.
            query: [num_query_heads, num_new, head_dim] of the forward.
            scale: softmax scale.
        """
        if self._moments is not None:
            return
        newest = self._remember(row, query)
        if not self._num_scored_queries:
            return
        newest = newest[:, -self._num_scored_queries :]
        begin = time.perf_counter()
        attend_blocks(
            newest,
            self.full.segments(row, self.num_tokens),
            out=torch.empty_like(newest),
            scale=scale,
            mass=self._mass[row, :, : self._num_scored_queries],
        )
        self._score_us += (time.perf_counter() - begin) * 1e6

    def _remember(self, row: int, query: torch.Tensor) -> torch.Tensor:
        newest = query[:, -MAX_SCORED_QUERIES:]
        before = self._newest_queries[row]
        if before is None:
            newest = newest.clone()
        else:
            newest = torch.cat([before, newest], 1)[:, -MAX_SCORED_QUERIES:]
        self._newest_queries[row] = newest
        return newest

    def finish(self) -> None:
        """Ends a forward: its scores, if any, become the selection."""
        if not self._num_scored_queries:
            return
        begin = time.perf_counter()
        mass = self._mass[:, :, : self._num_scored_queries].mean(2).numpy()
        held, age_tokens = self._blocks(), self.num_tokens - self._num_selected_at_tokens
        self._selected = self._selector.choose(mass, num_tokens=self.num_tokens)
        self._num_candidate_blocks = self._selector.num_candidate_blocks(self.num_tokens)
        self._num_selected_at_tokens = self.num_tokens
        self.num_scored += 1
        select_us = self._score_us + (time.perf_counter() - begin) * 1e6
        self._score_us = 0.0
        if self.period.is_asking and self._is_held and held is not None:
            self.period.book(
                self._mass[:, :, self._num_scored_queries - 1].mean(1).numpy(),
                held=held,
                age_tokens=age_tokens,
                num_tokens=self.num_tokens,
                select_us=select_us,
                sequence=self._place,
            )

    def _blocks(self) -> Blocks | None:
        if self._selected is None:
            return None
        return Blocks(self._selected, self._num_candidate_blocks)

    def close(self) -> None:
        """Unregisters the stores."""
        self.full.close()

    def _skipped(self, row: int, query: torch.Tensor, scale: float) -> SkippedBlocks | None:
        """What a row leaves out in this forward; a scored forward leaves out nothing."""
        if self._is_selecting and self._moments is not None:
            mass = self._moments.mass(
                row,
                query[:, 0],
                num_tokens=self.num_tokens,
                block_tokens=self.full.shape.block_tokens,
                scale=scale,
            )
            chosen = self._selector.choose_row(row, mass.numpy(), num_tokens=self.num_tokens)
            return SkippedBlocks(chosen, self._num_candidate_blocks)
        if self._selected is None or self._num_scored_queries:
            return None
        return SkippedBlocks(self._selected[row], self._num_candidate_blocks)


def _key_moments(sizes: StoreSizes) -> KeyMoments:
    block_tokens = sizes.geometry.block_tokens
    is_divided = block_tokens % ESTIMATED_TOKENS == 0
    return KeyMoments(
        num_rows=sizes.geometry.num_rows,
        num_kv_heads=sizes.shape.num_kv_heads,
        head_dim=sizes.shape.head_dim,
        max_tokens=sizes.max_blocks * block_tokens,
        part_tokens=ESTIMATED_TOKENS if is_divided else block_tokens,
    )
