"""The attend policy with selections by estimates: layers select in the midst of a forward.

Every so many steps all requests select together, each layer by the very queries that then attend:
what they will attend to is estimated from the means and variances of the keys of every block, so
that no step reads all keys. What always is attended to is scored exactly.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from blockcompact_jax.budget import SINK_BLOCKS
from blockcompact_jax.errors import PlanError, ResultCode
from blockcompact_jax.geometry import ModelGeometry
from blockcompact_jax.kernels import (
    EstimateSequence,
    RowsAt,
    has_open_mp_threads,
    host_pool_choose_by_estimate_at,
    raise_for_status,
)
from torch_bridge.vllm.compaction import GroupCompaction, StepCompaction
from torch_bridge.vllm.config import AttendConfig
from torch_bridge.vllm.key_summaries import KeySummaries, NewBlocks
from torch_bridge.vllm.kv_blocks import KVBlocks
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
            query=query,
            first_query=first_query,
            scale=scale,
        )
        self.period.scoring_us += (time.perf_counter() - begin) * 1e6


class SelectingRequests:
    """The requests that select in one step, layer by layer."""

    def __init__(
        self,
        requests: Mapping[int, DecodingRequest],
        tables: StepTables,
        *,
        summaries: KeySummaries,
        new_blocks: NewBlocks | None,
        blocks: KVBlocks,
        geometry: ModelGeometry,
    ) -> None:
        """Plans the step's selections.

        Args:
            requests: by batch row, each with room for its selection in `selected`.
            tables: of the step, with room for the selected blocks.
            summaries: of the keys, after `begin`.
            new_blocks: what it returned.
            blocks: the group's KV.
            geometry: of the group's layers.
        """
        self._requests = dict(requests)
        self._tables = tables
        self._summaries, self._new_blocks, self._blocks = summaries, new_blocks, blocks
        self._geometry = geometry
        self._num_query_heads = geometry.layer_geometry(geometry.full_layers[0]).num_query_heads
        self._sequences = [self._sequence(place, request) for place, request in requests.items()]
        self._tokens: list[int] | None = None
        self._rows_left = set(range(geometry.num_rows))

    @property
    def is_done(self) -> bool:
        """Whether all layers have selected."""
        return not self._rows_left

    def cancel(self) -> None:
        """Drops the selections and the summaries of all its requests.

        They select anew in their next step: a selection that lacks a layer must not be served.
        """
        for request in self._requests.values():
            request.selected = None
        self._summaries.forget(self._requests.values())

    def _sequence(self, place: int, request: DecodingRequest) -> EstimateSequence:
        selected, num_candidates = request.selected, request.num_candidate_blocks
        if selected is None:
            raise ValueError("`requests` has one without room for its selection")
        own, block_tokens = request.physical_blocks, self._geometry.block_tokens
        table = self._tables.block_table[:, place]
        return EstimateSequence(
            moments_table=self._summaries.entries_of(request),
            num_candidates=num_candidates,
            exact_table=np.concatenate([own[:SINK_BLOCKS], own[num_candidates:]]),
            num_exact_keys=request.num_tokens - (num_candidates - SINK_BLOCKS) * block_tokens,
            physical_blocks=own,
            num_chosen=selected.shape[1],
            chosen_address=selected.ctypes.data,
            chosen_stride=selected.shape[1],
            table_address=table.ctypes.data,
            table_stride=table.strides[0] // table.itemsize,
        )

    def select(
        self,
        row: int,
        kv_cache: torch.Tensor,
        *,
        query: torch.Tensor,
        first_query: torch.Tensor,
        scale: float,
    ) -> None:
        """Selects for one layer, and writes its tables.

        Where that fails, none of the requests has a selection or summaries any longer.

        Args:
            row: layer row.
            kv_cache: its KV tensor.
            query: [tokens, num_query_heads, head_dim], of the KV's dtype.
            first_query: [batch + 1], token of each row's query.
            scale: softmax scale.

        Raises:
            ValueError: for a query whose last axis is not contiguous, or of another dtype.
            PlanError: for attention mass that is not finite.
        """
        try:
            self._select(row, kv_cache, query=query, first_query=first_query, scale=scale)
        except BaseException:
            self.cancel()
            raise
        self._rows_left.discard(row)

    def _select(
        self,
        row: int,
        kv_cache: torch.Tensor,
        *,
        query: torch.Tensor,
        first_query: torch.Tensor,
        scale: float,
    ) -> None:
        if query.stride(2) != 1 or query.dtype != kv_cache.dtype:
            raise ValueError(
                f"`query` has strides {query.stride()} and dtype {query.dtype}; expected a "
                f"contiguous last axis and the KV's dtype, {kv_cache.dtype}"
            )
        if self._tokens is None:  # the same in all layers
            self._tokens = first_query[list(self._requests)].tolist()
        if self._new_blocks is not None:
            self._summaries.add(row, kv_cache, self._new_blocks)
        token_stride, head_stride, _ = query.stride()
        status = host_pool_choose_by_estimate_at(
            self._summaries.pool,
            self._blocks.pool(row, kv_cache),
            self._sequences,
            row=row,
            queries=RowsAt(query.data_ptr(), head_stride, token_stride),
            tokens=self._tokens,
            num_query_heads=self._num_query_heads,
            num_sinks=SINK_BLOCKS,
            scale=scale,
            is_on_open_mp=has_open_mp_threads(),  # vLLM's kernels run on them
        )
        raise_for_status(np.array(status[:2], np.int32), call="choose_by_estimate")
        if status.sequence >= 0:
            layer = self._geometry.full_layers[row]
            raise PlanError(ResultCode.NON_FINITE_SCORE, layer=layer, block=status.block)


class GroupEstimation(GroupCompaction):
    """Serves the steps of one group, whose requests select by estimates, all in the same steps."""

    def __init__(self, config: AttendConfig, **kwargs: Any) -> None:
        """As `GroupCompaction`."""
        super().__init__(config, **kwargs)
        self._summaries = KeySummaries(self._geometry, layout=kwargs["layout"])
        self._num_steps_left = 0  # until all select
        self._selecting: dict[int, DecodingRequest] = {}  # by batch row, in this step
        self._planned: SelectingRequests | None = None  # in the step before

    def _apply_selections(self, requests: list[DecodingRequest | None]) -> None:
        """Says which requests select in the step, and makes room for their selections."""
        if self._planned is not None and not self._planned.is_done:  # its forward failed
            self._planned.cancel()
        self._planned = None
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
        self._selecting = selecting

    def _begin_selection(self, request: DecodingRequest) -> None:
        length = request.num_tokens
        request.num_candidate_blocks = self._selector.num_candidate_blocks(length)
        shape = (self._geometry.num_rows, self._selector.num_selected(length))
        request.selected = np.zeros(shape, np.int32)
        request.selected_at_tokens = length

    def _plan(self, tables: StepTables) -> SelectingRequests | None:
        if not self._selecting:
            return None
        requests = list(self._selecting.values())
        candidates = [request.num_candidate_blocks for request in requests]
        self._planned = SelectingRequests(
            self._selecting,
            tables,
            new_blocks=self._summaries.begin(requests, candidates),
            summaries=self._summaries,
            blocks=self._blocks,
            geometry=self._geometry,
        )
        return self._planned

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
            selecting=self._plan(tables),
        )
