"""The lossless policy of one KV-cache group: what drafts attend to, and when requests are scored.

The engine's own steps verify: they attend to everything, and give the scores. Between them drafts
attend to each layer's selected blocks and to everything newer; in sliding-window layers, which
select nothing, to the window. Their KV lies in the slots behind the confirmed tokens, which the
next step writes anew before anything reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int32, Int64

from torch_bridge.vllm.compaction import AttendCounts, GroupCompaction, StepCompaction
from torch_bridge.vllm.config import AttendConfig
from torch_bridge.vllm.periods import DraftingPeriod
from torch_bridge.vllm.requests import DecodingRequest
from torch_bridge.vllm.steps import StepTables, build_tables


@dataclass(frozen=True, kw_only=True)
class DraftTables:
    """What the drafts of one round attend to.

    Attributes:
        tables: block tables and numbers of keys, for the longest draft.
        num_skipped_tokens: int32 [row], tokens of each request that its drafts do not attend to.
        block_table: int32 [row, blocks], each request's own table.
    """

    tables: StepTables
    num_skipped_tokens: Int32[np.ndarray, " row"]
    block_table: Int32[np.ndarray, "row blocks"]

    def slots(
        self, rows: list[int], positions: list[Int64[np.ndarray, " tokens"]], *, block_tokens: int
    ) -> Int64[np.ndarray, " all_tokens"]:
        """Where the KV of tokens goes: the physical block times its size, and the place in it.

        Args:
            rows: of the round.
            positions: token positions of each of them.
            block_tokens: tokens a block.
        """
        slots = [
            self.block_table[row, tokens // block_tokens].astype(np.int64) * block_tokens
            + tokens % block_tokens
            for row, tokens in zip(rows, positions, strict=True)
        ]
        return np.concatenate(slots)


@dataclass
class DraftCounts(AttendCounts):
    """What the lossless policy did so far; keys are those that drafts attended to.

    Attributes:
        num_draft_forwards: forwards that drafted.
        num_verified: drafted tokens that were verified.
        num_accepted: of these, tokens accepted.
    """

    num_draft_forwards: int = 0
    num_verified: int = 0
    num_accepted: int = 0


class GroupDrafting(GroupCompaction):
    """Serves the steps of one group of full-attention layers, each followed by a round of drafts.

    Attributes:
        counts: what was done so far.
    """

    counts: DraftCounts
    _rows: list[DecodingRequest | None]
    _block_table: Int32[np.ndarray, "batch max_blocks"]
    _num_verified: list[int]  # drafts of each row in the step

    def __init__(self, config: AttendConfig, **kwargs: Any) -> None:
        """As `GroupCompaction`."""
        super().__init__(config, **kwargs)
        self.counts = DraftCounts()

    def begin_verification(
        self,
        block_table: Int32[np.ndarray, "batch max_blocks"],
        num_tokens: Int32[np.ndarray, " batch"],
        num_queries: Int32[np.ndarray, " batch"],
        is_decoding: Bool[np.ndarray, " batch"],
    ) -> StepCompaction | None:
        """Plans a step that verifies the drafts before it.

        Args:
            block_table: physical blocks of every row; it must stay as it is until the drafts are
                made.
            num_tokens: length of every row, this step's tokens and drafts included.
            num_queries: tokens of every row that are computed; of a decoding row the first is
                confirmed and the others are drafts, but where the engine computes the tokens of
                a preempted request anew.
            is_decoding: rows past their prompt.

        Returns:
            A step that attends to everything and is scored, None where it is not.
        """
        self._finish_scoring()
        self._block_table = block_table
        self._rows = self._tracker.step(block_table, num_tokens - num_queries + 1, is_decoding)
        self._num_verified = [
            0 if request is None else min(request.num_drafts, num_others)
            for request, num_others in zip(self._rows, (num_queries - 1).tolist(), strict=True)
        ]
        if isinstance(self._period, DraftingPeriod):
            self._period.begin_rounds(self._verifying().values())
        is_scored = [request is not None and self._is_due(request) for request in self._rows]
        self.counts.num_steps += 1
        if not any(is_scored):
            return None
        own_table = torch.from_numpy(block_table)
        return StepCompaction(
            tables=StepTables(block_table=block_table[None], num_keys=num_tokens),
            block_table_by_layer_name=dict.fromkeys(self._row_by_layer_name, own_table),
            row_by_layer_name=self._row_by_layer_name,
            scored=self._begin_scoring(self._rows, is_scored),
            blocks=self._blocks,
            period=self._period,
        )

    def finish_verification(self, num_tokens: Int32[np.ndarray, " batch"]) -> list[int]:
        """Selects by the step's scores.

        Args:
            num_tokens: confirmed tokens of every row, the newest of which has no KV yet.

        Returns:
            The rows that have a selection to draft with.
        """
        self._end_rounds(num_tokens)
        self._finish_scoring()
        drafting: list[int] = []
        for place, (request, length) in enumerate(
            zip(self._rows, num_tokens.tolist(), strict=True)
        ):
            if request is None:
                continue
            if self._num_verified[place]:
                self.counts.num_verified += self._num_verified[place]
                self.counts.num_accepted += length - request.num_tokens - 1
            request.num_drafts, request.next_num_tokens = 0, length
            if request.selected is not None:
                drafting.append(place)
        return drafting

    def _end_rounds(self, num_tokens: Int32[np.ndarray, " batch"]) -> None:
        if not isinstance(self._period, DraftingPeriod):
            return
        gained = {
            request: int(num_tokens[place]) - request.num_tokens
            for place, request in self._verifying().items()
        }
        self._period.end_rounds(gained, is_alone=None not in self._rows)

    def _verifying(self) -> dict[int, DecodingRequest]:
        """Requests whose drafts the step verifies, by batch row."""
        return {
            place: request
            for place, request in enumerate(self._rows)
            if request is not None and self._num_verified[place]
        }

    def request_at(self, place: int) -> DecodingRequest:
        """The request of a row that `finish_verification` named."""
        request = self._rows[place]
        if request is None:
            raise ValueError(f"`place` is {place}, expected a row of a request that drafts")
        return request

    def draft_tables(
        self,
        places: list[int],
        num_tokens: Int32[np.ndarray, " row"],
        *,
        num_draft_tokens: int,
    ) -> DraftTables:
        """What a round of drafts attends to.

        Args:
            places: rows of the batch that draft, of those that `finish_verification` named.
            num_tokens: their confirmed tokens.
            num_draft_tokens: tokens drafted for each.
        """
        # The last draft is not attended to.
        max_tokens = num_tokens + np.int32(num_draft_tokens - 1)
        block_table = self._block_table[places]
        requests = [self.request_at(place) for place in places]
        for request in requests:
            request.num_drafts = num_draft_tokens
        tables = build_tables(
            requests,
            block_table,
            max_tokens,
            num_layer_rows=self._geometry.num_rows,
            block_tokens=self._block_tokens,
        )
        return DraftTables(
            tables=tables,
            num_skipped_tokens=max_tokens - tables.num_keys,
            block_table=block_table,
        )

    def draft_step(
        self, draft: DraftTables, rows: list[int], num_tokens: Int32[np.ndarray, " row"]
    ) -> StepCompaction:
        """One forward of a round.

        Args:
            draft: of the round.
            rows: rows of it that are in the forward.
            num_tokens: their lengths, the tokens of the forward included.
        """
        tables = StepTables(
            block_table=draft.tables.block_table[:, rows],
            num_keys=num_tokens - draft.num_skipped_tokens[rows],
        )
        self.counts.num_draft_forwards += 1
        self.counts.num_keys += int(tables.num_keys.sum())
        self.counts.num_full_keys += int(num_tokens.sum())
        return self._step([None] * len(rows), [False] * len(rows), tables)


class WindowDrafting:
    """Serves the drafts of one group of sliding-window layers.

    The engine's kernel keeps to the window by itself, over the confirmed tokens and the drafts. A
    step frees what lies behind the window of its own first token, and drafts come after that.
    """

    _block_table: Int32[np.ndarray, "batch max_blocks"]

    def begin_verification(self, block_table: Int32[np.ndarray, "batch max_blocks"]) -> None:
        """Remembers a step's table.

        Args:
            block_table: physical blocks of every row; it must stay as it is until the drafts are
                made.
        """
        self._block_table = block_table

    def draft_tables(
        self,
        places: list[int],
        num_tokens: Int32[np.ndarray, " row"],
        *,
        num_draft_tokens: int,
    ) -> DraftTables:
        """As `GroupDrafting`; nothing is skipped but by the kernel."""
        block_table = self._block_table[places]
        return DraftTables(
            tables=StepTables(
                block_table=block_table[None],
                num_keys=num_tokens + np.int32(num_draft_tokens - 1),
            ),
            num_skipped_tokens=np.zeros_like(num_tokens),
            block_table=block_table,
        )

    def draft_step(
        self, draft: DraftTables, rows: list[int], num_tokens: Int32[np.ndarray, " row"]
    ) -> StepTables:
        """As `GroupDrafting`, with the one table of all layers."""
        return StepTables(block_table=draft.block_table[rows][None], num_keys=num_tokens)
