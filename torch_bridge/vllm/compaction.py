"""The attend policy of one KV-cache group: what each step attends to, and when requests are scored.

Knows blocks, tables and lengths; of vLLM it knows nothing but the tensors it is handed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int32

from blockcompact_jax.geometry import ModelGeometry
from blockcompact_jax.kernels import Layout
from blockcompact_jax.scores import mass_from_log_sum_exp
from torch_bridge.selector import Selector
from torch_bridge.vllm.config import AttendConfig
from torch_bridge.vllm.kv_blocks import KVBlocks, ScoredQuery
from torch_bridge.vllm.periods import ScoringPeriod, scoring_period
from torch_bridge.vllm.requests import DecodingRequest, RequestTracker, RetainedRequests
from torch_bridge.vllm.steps import StepTables, TableKeeper


@dataclass(frozen=True)
class ScoredRequest:
    """A request whose newest query meets all keys that are its own.

    Attributes:
        request: as of this step.
        own_blocks: logical blocks of these keys, ascending.
        block_table: their physical blocks.
        num_keys: tokens in them.
        log_sum_exps: written layer by layer: of the scaled scores in each of these blocks. All
            requests of a step have equally many columns.
    """

    request: DecodingRequest
    own_blocks: Int32[np.ndarray, " own"]
    block_table: Int32[np.ndarray, " own"]
    num_keys: int
    log_sum_exps: Float32[np.ndarray, "row query_head columns"]


@dataclass(frozen=True)
class StepCompaction:
    """One step of a group in which a row attends to selected blocks or is scored.

    Attributes:
        tables: block tables and lengths.
        block_table_by_layer_name: int32 [batch, entries], each layer's part of them.
        row_by_layer_name: place of each layer in them.
        scored: what is scored in this step, by batch row.
        blocks: the group's KV.
        period: hears how long scoring takes.
    """

    tables: StepTables
    block_table_by_layer_name: dict[str, torch.Tensor]
    row_by_layer_name: dict[str, int]
    scored: dict[int, ScoredRequest]
    blocks: KVBlocks
    period: ScoringPeriod

    @property
    def has_scored_rows(self) -> bool:
        """Whether `score` has anything to do."""
        return bool(self.scored)

    def move(self, layer_name: str, kv_cache: torch.Tensor) -> None:
        """Moves a layer's blocks between the engine and the host before it attends; here, none."""

    def select(
        self,
        layer_name: str,
        kv_cache: torch.Tensor,
        *,
        query: torch.Tensor,
        first_query: torch.Tensor,
        scale: float,
    ) -> None:
        """Selects a layer's blocks before it attends; here, nothing does. Arguments as `score`."""

    def score(
        self,
        layer_name: str,
        kv_cache: torch.Tensor,
        *,
        query: torch.Tensor,
        first_query: torch.Tensor,
        scale: float,
    ) -> None:
        """Scores all blocks of the scored rows, whatever the rows attend to.

        Args:
            layer_name: the layer.
            kv_cache: its KV tensor.
            query: [tokens, num_query_heads, head_dim].
            first_query: [batch + 1], token of each row's first query.
            scale: softmax scale.
        """
        begin = time.perf_counter()
        row = self.row_by_layer_name[layer_name]
        queries = [
            ScoredQuery(
                query[int(first_query[place])],
                scored.block_table,
                scored.num_keys,
                scored.log_sum_exps[row],
            )
            for place, scored in self.scored.items()
        ]
        self.blocks.score(row, kv_cache, queries, scale=scale)
        self.period.scoring_us += (time.perf_counter() - begin) * 1e6


class _LayerTables:
    """Each layer's part of a step's tables as a tensor, made anew where the arrays are others."""

    def __init__(self, layer_names: Iterable[str]) -> None:
        self._names = tuple(layer_names)
        self._array: Int32[np.ndarray, "row batch entries"] | None = None
        self._by_layer_name: dict[str, torch.Tensor] = {}

    def of(self, tables: StepTables) -> dict[str, torch.Tensor]:
        if self._array is not tables.block_table:
            self._array = tables.block_table
            by_row = torch.from_numpy(tables.block_table)
            self._by_layer_name = dict(zip(self._names, by_row, strict=True))
        return self._by_layer_name


@dataclass
class AttendCounts:
    """What the attend policy did so far.

    Attributes:
        num_steps: steps seen.
        num_scored: times a request was scored, or selected by an estimate.
        num_keys: keys that decoding rows attended to, summed over steps (of one layer).
        num_full_keys: keys that full attention would have attended to.
    """

    num_steps: int = 0
    num_scored: int = 0
    num_keys: int = 0
    num_full_keys: int = 0


class GroupCompaction:
    """Serves the steps of one group of full-attention layers, in order.

    Attributes:
        counts: what was done so far.
    """

    def __init__(
        self,
        config: AttendConfig,
        *,
        geometry: ModelGeometry,
        layer_names: Sequence[str],
        layout: Layout,
        max_tokens: int,
        retained: RetainedRequests | None = None,
    ) -> None:
        """Compiles the selection.

        Args:
            config: the policy.
            geometry: of the group's layers, numbered in the order of `layer_names`.
            layer_names: the engine's names of the layers.
            layout: how the engine packs KV.
            max_tokens: longest sequence.
            retained: shared with the owner of the blocks where the policy is "retain".

        Raises:
            ValueError: where the policy is "retain" and `retained` is missing.
        """
        is_retaining = config.policy == "retain"
        if is_retaining and retained is None:
            raise ValueError("`retained` is None; the policy 'retain' needs it")
        self._period = scoring_period(config, layer_names=layer_names)
        self._geometry = geometry
        self._block_tokens = geometry.block_tokens
        self._row_by_layer_name = {name: row for row, name in enumerate(layer_names)}
        self._tracker = RequestTracker(self._block_tokens, retained if is_retaining else None)
        self._selector = Selector(
            geometry,
            config.budget,
            -(-max_tokens // self._block_tokens),
            mass_of=mass_from_log_sum_exp,
            is_shared=is_retaining,
        )
        self._is_retaining = is_retaining
        self._blocks = KVBlocks(layout=layout, num_layer_rows=geometry.num_rows)
        self._keeper = TableKeeper(
            num_layer_rows=geometry.num_rows, block_tokens=self._block_tokens
        )
        self._layer_tables = _LayerTables(self._row_by_layer_name)
        self._scoring: list[ScoredRequest] = []
        self.counts = AttendCounts()
        if config.select_by == "attention":
            self._selector.warm_up()

    def begin_step(
        self,
        block_table: Int32[np.ndarray, "batch max_blocks"],
        num_tokens: Int32[np.ndarray, " batch"],
        is_decoding: Bool[np.ndarray, " batch"],
    ) -> StepCompaction | None:
        """Finishes the step before (its scores become selections) and plans this one.

        Args:
            block_table: physical blocks of every row.
            num_tokens: length of every row, this step's tokens included.
            is_decoding: rows that compute one token.

        Returns:
            What the step attends to, None where that is everything.
        """
        self._finish_scoring()
        requests = self._tracker.step(block_table, num_tokens, is_decoding)
        self._apply_selections(requests)
        is_scored = [
            request is not None and is_row_decoding and self._is_due(request)
            for request, is_row_decoding in zip(requests, is_decoding.tolist(), strict=True)
        ]
        num_full_keys = int(num_tokens[is_decoding].sum())
        self.counts.num_steps += 1
        self.counts.num_full_keys += num_full_keys
        has_selection = any(r is not None and r.selected is not None for r in requests)
        if not has_selection and not any(is_scored):
            self.counts.num_keys += num_full_keys
            return None
        tables = self._keeper.build(requests, block_table, num_tokens)
        self.counts.num_keys += int(tables.num_keys[is_decoding].sum())
        return self._step(requests, is_scored, tables)

    def _apply_selections(self, requests: list[DecodingRequest | None]) -> None:
        """Of the requests in the step; here, they hold as soon as they are made."""

    def _step(
        self, requests: list[DecodingRequest | None], is_scored: list[bool], tables: StepTables
    ) -> StepCompaction:
        return StepCompaction(
            tables=tables,
            block_table_by_layer_name=self._layer_tables.of(tables),
            row_by_layer_name=self._row_by_layer_name,
            scored=self._begin_scoring(requests, is_scored),
            blocks=self._blocks,
            period=self._period,
        )

    def _begin_scoring(
        self, requests: list[DecodingRequest | None], is_scored: list[bool]
    ) -> dict[int, ScoredRequest]:
        """By batch row."""
        due_requests = {
            place: request
            for place, request in enumerate(requests)
            if request is not None and is_scored[place]
        }
        max_blocks = max((r.own_blocks().size for r in due_requests.values()), default=0)
        num_columns = self._selector.num_columns(max_blocks)
        scored = {
            place: self._scored(request, num_columns=num_columns)
            for place, request in due_requests.items()
        }
        self.counts.num_scored += len(scored)
        self._scoring = list(scored.values())
        return scored

    def _scored(self, request: DecodingRequest, *, num_columns: int) -> ScoredRequest:
        heads = self._geometry.layer_geometry(0).num_query_heads
        shape = (self._geometry.num_rows, heads, num_columns)
        own = request.own_blocks()
        num_gone = request.physical_blocks.size - own.size
        return ScoredRequest(
            request,
            own,
            request.physical_blocks[own],
            request.num_tokens - num_gone * self._block_tokens,
            np.full(shape, -np.inf, np.float32),
        )

    def _is_due(self, request: DecodingRequest) -> bool:
        if not request.is_retained and self._selector.needs_all(request.num_tokens):
            request.selected = None
            return False
        if request.selected is None:
            return True
        return request.num_tokens >= request.reselect_at_tokens

    def _finish_scoring(self) -> None:
        for scored in self._scoring:
            with self._period.selecting(scored, num_scored=len(self._scoring)):
                self._select(scored)
            every_tokens = self._period.every_tokens
            self._tracker.schedule(scored.request, every_tokens=every_tokens)
        self._scoring = []
        self._period.scoring_us = 0.0

    def _select(self, scored: ScoredRequest) -> None:
        request = scored.request
        num_columns = self._selector.num_columns(scored.own_blocks.size)
        request.selected = self._selector.choose(
            scored.log_sum_exps[..., :num_columns],
            num_tokens=request.num_tokens,
            own_blocks=scored.own_blocks,
        )
        request.num_candidate_blocks = self._selector.num_candidate_blocks(request.num_tokens)
        request.is_retained = self._is_retaining
