"""The attend policy with selections by estimates: layers select in the midst of a forward.

Every so many steps all requests select together, each layer by the very queries that then attend:
what they will attend to is estimated from the means and variances of the keys of every block, so
that no step reads all keys. What always is attended to is scored exactly.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int32

from blockcompact_jax.budget import SINK_BLOCKS
from torch_bridge.selector import Selector
from torch_bridge.vllm.compaction import GroupCompaction, StepCompaction
from torch_bridge.vllm.config import AttendConfig
from torch_bridge.vllm.key_summaries import Estimator, KeySummaries, NewBlocks
from torch_bridge.vllm.kv_blocks import KVBlocks, ScoredQuery
from torch_bridge.vllm.requests import DecodingRequest
from torch_bridge.vllm.steps import StepTables


@dataclass(frozen=True, kw_only=True)
class EstimatingStep(StepCompaction):
    """One step of a group in which a row attends to selected blocks.

    Attributes:
        selecting: what selects in this step; None where nothing does.
    """

    selecting: SelectingRequests | None

    def select(
        self,
        layer_name: str,
        kv_cache: torch.Tensor,
        *,
        query: torch.Tensor,
        first_query: torch.Tensor,
        scale: float,
    ) -> None:
        """Writes the layer's tables of the requests that select in this step."""
        if self.selecting is None:
            return
        begin = time.perf_counter()
        self.selecting.select(
            self.row_by_layer_name[layer_name],
            kv_cache,
            queries=query.index_select(0, first_query[self.selecting.places].long()),
            tables=self.tables,
            scale=scale,
        )
        self.period.scoring_us += (time.perf_counter() - begin) * 1e6


class SelectingRequests:
    """The requests that select in one step, layer by layer.

    Attributes:
        places: int64 [request], their batch rows.
    """

    def __init__(
        self,
        requests: Mapping[int, DecodingRequest],
        *,
        selector: Selector,
        summaries: KeySummaries,
        new_blocks: NewBlocks | None,
        blocks: KVBlocks,
        block_tokens: int,
    ) -> None:
        """Plans the step's selections; each request has room for its own.

        Args:
            requests: by batch row, each with an empty `selected` and its `num_candidate_blocks`.
            selector: chooses blocks from their attention mass.
            summaries: of the keys, after `begin`.
            new_blocks: what it returned.
            blocks: the group's KV.
            block_tokens: tokens a block.
        """
        given = list(requests.values())
        self.places = torch.tensor(list(requests))
        self._requests = given
        self._selector, self._summaries, self._blocks = selector, summaries, blocks
        self._new_blocks = new_blocks
        self._log_block_tokens = math.log(block_tokens)
        candidates = [request.num_candidate_blocks for request in given]
        self._num_candidates = np.array(candidates, np.int32)
        self._num_selected = np.array([_num_selected(request) for request in given], np.int32)
        self._physical = np.zeros((len(given), max(candidates)), np.int32)
        for row, request in zip(self._physical, given, strict=True):
            row[: request.num_candidate_blocks] = request.physical_blocks[: row.size][
                : request.num_candidate_blocks
            ]
        self._estimator: Estimator = summaries.estimator(given, candidates)
        self._always = [_always_attended(request, block_tokens) for request in given]
        heads = self._estimator.logits.shape[1]
        width = max(table.size for table, _ in self._always)
        self._exact = torch.full((len(given), heads, width), -torch.inf)
        self._groups = list(self._equally_many(list(requests)))

    def _equally_many(self, places: list[int]) -> Iterator[_Group]:
        """Requests that select equally many blocks are written at once."""
        for count in np.unique(self._num_selected).tolist():
            members = np.flatnonzero(self._num_selected == count)
            yield _Group(count, members, np.array(places)[members])

    def select(
        self,
        row: int,
        kv_cache: torch.Tensor,
        *,
        queries: torch.Tensor,
        tables: StepTables,
        scale: float,
    ) -> None:
        """Selects for one layer.

        Args:
            row: layer row.
            kv_cache: the layer's KV.
            queries: [request, num_query_heads, head_dim], contiguous.
            tables: of the step, written.
            scale: softmax scale.

        Raises:
            PlanError: for masses that are not finite.
        """
        if self._new_blocks is not None:
            self._summaries.add(row, kv_cache, self._new_blocks)
        mass = self._mass(row, kv_cache, queries=queries, scale=scale)
        chosen = self._selector.choose_together(
            row, mass, num_candidates=self._num_candidates, num_selected=self._num_selected
        )
        physical = np.take_along_axis(self._physical, np.maximum(chosen, 0), 1)
        table = tables.block_table[row]
        for group in self._groups:
            table[group.places, : group.num_selected] = physical[
                group.members, : group.num_selected
            ]
        for request, blocks in zip(self._requests, chosen, strict=True):
            selected = request.selected
            if selected is not None:
                selected[row] = blocks[: selected.shape[1]]

    def _mass(
        self, row: int, kv_cache: torch.Tensor, *, queries: torch.Tensor, scale: float
    ) -> np.ndarray[Any, Any]:
        """Estimated attention mass [request, block], the mean over query heads."""
        estimated = self._estimator.estimate(row, queries, scale=scale)
        # The first block is among what is scored exactly.
        estimated[..., :SINK_BLOCKS] = -torch.inf
        exact = self._exact.numpy()
        scored = [
            ScoredQuery(query, table, num_keys, log_sum_exps)
            for query, (table, num_keys), log_sum_exps in zip(
                queries, self._always, exact, strict=True
            )
        ]
        self._blocks.score(row, kv_cache, scored, scale=scale)
        weights = torch.cat([estimated, self._exact - self._log_block_tokens], -1).softmax(-1)
        return weights[..., : estimated.shape[-1]].mean(1).numpy()


@dataclass(frozen=True)
class _Group:
    """Requests that select equally many blocks.

    Attributes:
        num_selected: blocks that each selects.
        members: which of the selecting requests they are.
        places: their batch rows.
    """

    num_selected: int
    members: np.ndarray[Any, Any]
    places: np.ndarray[Any, Any]


def _num_selected(request: DecodingRequest) -> int:
    return 0 if request.selected is None else request.selected.shape[1]


def _always_attended(
    request: DecodingRequest, block_tokens: int
) -> tuple[Int32[np.ndarray, " blocks"], int]:
    """Physical blocks that every selection has, the first and the tail, and the tokens in them."""
    num_candidates = request.num_candidate_blocks
    table = request.physical_blocks
    blocks = np.concatenate([table[:SINK_BLOCKS], table[num_candidates:]])
    return blocks, request.num_tokens - (num_candidates - SINK_BLOCKS) * block_tokens


class GroupEstimation(GroupCompaction):
    """Serves the steps of one group, whose requests select by estimates, all in the same steps."""

    def __init__(self, config: AttendConfig, **kwargs: Any) -> None:
        """As `GroupCompaction`."""
        super().__init__(config, **kwargs)
        self._summaries = KeySummaries(
            self._geometry, layout=kwargs["layout"], max_blocks=self._selector.max_blocks
        )
        self._num_steps_left = 0  # until all select
        self._selecting: SelectingRequests | None = None

    def _apply_selections(self, requests: list[DecodingRequest | None]) -> None:
        """Says which requests select in the step, and makes room for their selections."""
        self._summaries.keep(requests)
        self._num_steps_left -= 1
        is_turn = self._num_steps_left <= 0
        if is_turn:
            self._num_steps_left = self._period.every_tokens
        selecting: dict[int, DecodingRequest] = {}
        for place, request in enumerate(requests):
            if request is None:
                continue
            if self._selector.needs_all(request.num_tokens):
                request.selected = None
            elif is_turn or request.selected is None:
                selecting[place] = request
                self._begin_selection(request)
        self.counts.num_scored += len(selecting)
        self._selecting = self._plan(selecting) if selecting else None

    def _begin_selection(self, request: DecodingRequest) -> None:
        length = request.num_tokens
        request.num_candidate_blocks = self._selector.num_candidate_blocks(length)
        shape = (self._geometry.num_rows, self._selector.num_selected(length))
        request.selected = np.zeros(shape, np.int32)
        request.selected_at_tokens = length

    def _plan(self, selecting: Mapping[int, DecodingRequest]) -> SelectingRequests:
        requests = list(selecting.values())
        candidates = [request.num_candidate_blocks for request in requests]
        return SelectingRequests(
            selecting,
            selector=self._selector,
            summaries=self._summaries,
            new_blocks=self._summaries.begin(requests, candidates),
            blocks=self._blocks,
            block_tokens=self._block_tokens,
        )

    def _is_due(self, request: DecodingRequest) -> bool:
        """Nothing is scored by all keys."""
        return False

    def _step(
        self, requests: list[DecodingRequest | None], is_scored: list[bool], tables: StepTables
    ) -> StepCompaction:
        return EstimatingStep(
            tables=tables,
            block_table_by_layer_name=self._layer_tables.of(tables),
            row_by_layer_name=self._row_by_layer_name,
            scored={},
            blocks=self._blocks,
            period=self._period,
            selecting=self._selecting,
        )
