"""The retain policy with host memory: what is not selected is given back to the engine, not lost.

Blocks are copied to the host in the step in which they leave a request's selection, before the
engine frees them. They are scored with the others, and one that is selected again is awaited: the
owner of the blocks allocates an empty one of the engine for it before the request's next step,
which copies the KV back before it attends to it. Until then the selection before it holds.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int32

from blockcompact_jax.kernels import Layout
from blockcompact_jax.scores import mass_from_log_sum_exp
from torch_bridge.vllm.compaction import GroupCompaction, ScoredRequest, StepCompaction
from torch_bridge.vllm.config import AttendConfig
from torch_bridge.vllm.host_blocks import BlockMoves, HostBlocks, HostedBlocks
from torch_bridge.vllm.kv_blocks import ScoredQuery
from torch_bridge.vllm.requests import DecodingRequest, RetainedRequests, Selection
from torch_bridge.vllm.steps import StepTables


@dataclass(frozen=True)
class HostScores:
    """What a scored request has on the host alone.

    Attributes:
        logical_blocks: ascending.
        host_blocks: theirs.
        log_sum_exps: written layer by layer: of the scaled scores in each of them. All requests of
            a step have equally many columns.
    """

    logical_blocks: Int32[np.ndarray, " hosted"]
    host_blocks: Int32[np.ndarray, " hosted"]
    log_sum_exps: Float32[np.ndarray, "row query_head columns"]


@dataclass(frozen=True)
class HostingStep(StepCompaction):
    """One step of a group with host memory.

    Attributes:
        host: the group's host blocks.
        kept: blocks that are copied to the host.
        uploaded: blocks that are copied back.
        host_scores: of the scored rows that have blocks on the host alone, by batch row.
        block_tokens: tokens a block.
    """

    host: HostBlocks
    kept: BlockMoves
    uploaded: BlockMoves
    host_scores: dict[int, HostScores]
    block_tokens: int

    def move(self, layer_name: str, kv_cache: torch.Tensor) -> None:
        """Moves a layer's blocks, before it attends to any."""
        row = self.row_by_layer_name[layer_name]
        if self.kept.host_blocks:
            self.host.keep(row, kv_cache, self.kept)
        if self.uploaded.host_blocks:
            self.host.upload(row, kv_cache, self.uploaded)

    def score(
        self,
        layer_name: str,
        kv_cache: torch.Tensor,
        *,
        query: torch.Tensor,
        first_query: torch.Tensor,
        scale: float,
    ) -> None:
        """Scores the blocks on the host too."""
        super().score(layer_name, kv_cache, query=query, first_query=first_query, scale=scale)
        row = self.row_by_layer_name[layer_name]
        queries = [
            ScoredQuery(
                query[int(first_query[place])],
                scores.host_blocks,
                scores.host_blocks.size * self.block_tokens,
                scores.log_sum_exps[row],
            )
            for place, scores in self.host_scores.items()
        ]
        if queries:
            self.host.score(row, kv_cache, queries, scale=scale)


@dataclass(frozen=True)
class _Choice:
    """A selection that the request's next step applies.

    Attributes:
        selection: of blocks that are its own or on the host.
        best_first: all of these blocks by falling attention mass.
    """

    selection: Selection
    best_first: list[int]


class GroupHosting(GroupCompaction):
    """Serves the steps of one group of full-attention layers under "retain" with host memory.

    Attributes:
        host: the group's host blocks.
    """

    def __init__(
        self,
        config: AttendConfig,
        *,
        layout: Layout,
        retained: RetainedRequests | None,
        host_bytes: int,
        **kwargs: Any,
    ) -> None:
        """As `GroupCompaction`.

        Args:
            config: the policy.
            layout: how the engine packs KV.
            retained: shared with the owner of the blocks.
            host_bytes: most memory of the group's host blocks.
            kwargs: as those of `GroupCompaction`.

        Raises:
            ValueError: for too little memory for a block, or where `retained` is missing.
        """
        super().__init__(config, layout=layout, retained=retained, **kwargs)
        if retained is None:
            raise ValueError("`retained` is None; the policy 'retain' needs it")
        self._retained = retained
        block_bytes = self._geometry.num_rows * self._geometry.block_bytes(0)
        if host_bytes < block_bytes:
            raise ValueError(
                f"`host_bytes` is {host_bytes} for {self._geometry.num_rows} layers, expected at "
                f"least {block_bytes}, which one block of all of them takes; give more, or leave "
                "it out"
            )
        self.host = HostBlocks(
            layout=layout,
            num_layer_rows=self._geometry.num_rows,
            max_blocks=host_bytes // block_bytes,
        )
        self._choices: dict[DecodingRequest, _Choice] = {}
        self._host_scores: dict[DecodingRequest, HostScores] = {}
        self._kept, self._uploaded = BlockMoves(), BlockMoves()

    def _apply_selections(self, requests: list[DecodingRequest | None]) -> None:
        self._kept, self._uploaded = BlockMoves(), BlockMoves()
        for request in requests:
            if request is None:
                continue
            if request.awaited is not None:
                self._arrive(request, request.awaited)
            choice = self._choices.pop(request, None)
            if choice is not None:
                self._apply(request, choice)
        # Those of requests that are gone, or that vLLM did not schedule and are scored anew.
        waiting = {r: c for r, c in self._choices.items() if self._is_known(r)}
        self._choices = waiting

    def _is_known(self, request: DecodingRequest) -> bool:
        return self._retained.find(int(request.physical_blocks[0])) is request

    def _arrive(self, request: DecodingRequest, awaited: Selection) -> None:
        missing = [block for block in request.arriving if block not in request.came_back]
        if missing or request.hosted is None:
            raise RuntimeError(
                f"the request in physical block {request.physical_blocks[0]} is scheduled without "
                f"blocks for its logical blocks {missing}; this is a fault of blockcompact or a "
                "version of vLLM that it does not know"
            )
        arriving = list(request.arriving)
        host_blocks = [request.hosted.host_block_of[block] for block in arriving]
        self._uploaded.add(request.physical_blocks[arriving].tolist(), host_blocks)
        self.host.num_uploaded += len(arriving)
        request.selected = awaited.selected
        request.num_candidate_blocks = awaited.num_candidate_blocks
        request.awaited, request.arriving = None, ()

    def _apply(self, request: DecodingRequest, choice: _Choice) -> None:
        """Keeps what leaves the selection on the host; awaits what enters it from there."""
        request.hosted = request.hosted or HostedBlocks(self.host)
        own = set(request.own_blocks().tolist())
        wanted = set(choice.selection.blocks(request.physical_blocks.size).tolist())
        unwanted = set(chain(own, request.hosted.host_block_of)) - wanted
        staying = own & wanted  # what arrives is read from the host
        kept = request.hosted.keep_best(
            [block for block in choice.best_first if block in unwanted],
            [block for block in choice.best_first if block in staying],
        )
        host_blocks = [request.hosted.host_block_of[block] for block in kept]
        self._kept.add(request.physical_blocks[kept].tolist(), host_blocks)
        self.host.num_kept += len(kept)
        request.is_retained = True
        arriving = sorted(wanted - own)
        if arriving:
            request.awaited, request.arriving = choice.selection, tuple(arriving)
            for block in arriving:
                request.came_back.pop(block, None)
        else:
            request.selected = choice.selection.selected
            request.num_candidate_blocks = choice.selection.num_candidate_blocks
        self._retained.add(request)

    def _is_due(self, request: DecodingRequest) -> bool:
        return request.awaited is None and super()._is_due(request)

    def _step(
        self, requests: list[DecodingRequest | None], is_scored: list[bool], tables: StepTables
    ) -> StepCompaction:
        step = super()._step(requests, is_scored, tables)
        scores = self._begin_scoring_of_host(step.scored)
        self._host_scores = {step.scored[place].request: found for place, found in scores.items()}
        return HostingStep(
            **{f.name: getattr(step, f.name) for f in fields(step)},
            host=self.host,
            kept=self._kept,
            uploaded=self._uploaded,
            host_scores=scores,
            block_tokens=self._block_tokens,
        )

    def _begin_scoring_of_host(self, scored: dict[int, ScoredRequest]) -> dict[int, HostScores]:
        alone: dict[int, dict[int, int]] = {}  # host blocks by logical block, by batch row
        for place, found in scored.items():
            hosted, own = found.request.hosted, set(found.own_blocks.tolist())
            host_block_of = {} if hosted is None else hosted.host_block_of
            of_row = {block: host_block_of[block] for block in sorted(host_block_of.keys() - own)}
            if of_row:
                alone[place] = of_row
        most = max(map(len, alone.values()), default=0)
        heads = self._geometry.layer_geometry(0).num_query_heads
        shape = (self._geometry.num_rows, heads, self._selector.num_columns(most))
        return {
            place: HostScores(
                np.array(list(of_row), np.int32),
                np.array(list(of_row.values()), np.int32),
                np.full(shape, -np.inf, np.float32),
            )
            for place, of_row in alone.items()
        }

    def _select(self, scored: ScoredRequest) -> None:
        """Chooses among its own blocks and those on the host; its next step applies the choice."""
        request = scored.request
        blocks, log_sum_exps = scored.own_blocks, scored.log_sum_exps[..., : scored.own_blocks.size]
        on_host = self._host_scores.pop(request, None)
        if on_host is not None:
            blocks = np.concatenate([blocks, on_host.logical_blocks])
            of_host = on_host.log_sum_exps[..., : on_host.logical_blocks.size]
            order = np.argsort(blocks)
            blocks = blocks[order]
            log_sum_exps = np.concatenate([log_sum_exps, of_host], axis=-1)[..., order]
        padded = self._padded(log_sum_exps)
        selected = self._selector.choose(
            padded, num_tokens=request.num_tokens, own_blocks=blocks.astype(np.int32)
        )
        num_candidates = self._selector.num_candidate_blocks(request.num_tokens)
        mass = np.asarray(mass_from_log_sum_exp(padded)).mean(axis=(0, 1))[: blocks.size]
        self._choices[request] = _Choice(
            Selection(selected, num_candidates), blocks[np.argsort(-mass, kind="stable")].tolist()
        )

    def _padded(
        self, log_sum_exps: Float32[np.ndarray, "row query_head blocks"]
    ) -> Float32[np.ndarray, "row query_head columns"]:
        *rows, num_blocks = log_sum_exps.shape
        padded = np.full((*rows, self._selector.num_columns(num_blocks)), -np.inf, np.float32)
        padded[..., :num_blocks] = log_sum_exps
        return padded
