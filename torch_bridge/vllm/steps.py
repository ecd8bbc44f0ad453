"""What each row of a step attends to: all its blocks, or each layer's own and the tail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from torch_bridge.vllm.requests import DecodingRequest

_ENTRY_STEP = 16  # tables grow by so many entries at once


@dataclass(frozen=True, kw_only=True)
class StepTables:
    """Block tables and lengths of one step.

    Attributes:
        block_table: int32 [layer row, batch, entries], physical blocks; 0 past a row's length.
        num_keys: int32 [batch], keys that each row attends to, the same in every layer.
    """

    block_table: Int32[np.ndarray, "row batch entries"]
    num_keys: Int32[np.ndarray, " batch"]


class TableKeeper:
    """Builds each step's tables in arrays that it keeps, and writes only rows that changed.

    A table changes where its request selects anew or gains a block, which most steps do not see.
    """

    def __init__(self, *, num_layer_rows: int, block_tokens: int) -> None:
        """Starts without tables.

        Args:
            num_layer_rows: full-attention layers of the group.
            block_tokens: tokens a block.
        """
        self._block_tokens = block_tokens
        self._tables = np.zeros((num_layer_rows, 0, 0), np.int32)
        self._num_skipped_tokens = np.zeros(0, np.int32)
        self._written: list[_Written | None] = []  # by place; None: always written anew

    def build(
        self,
        requests: Sequence[DecodingRequest | None],
        block_table: Int32[np.ndarray, "batch max_blocks"],
        num_tokens: Int32[np.ndarray, " batch"],
    ) -> StepTables:
        """Builds the tables of one step; those of the step before are overwritten.

        A row without a selection keeps its own table.

        Args:
            requests: the request of each row, None for rows that attend to everything. A row may
                have several queries: they are its newest tokens, all of them behind the candidates.
                The blocks that a request has in one step stay where they are in later ones.
            block_table: vLLM's table.
            num_tokens: vLLM's lengths.

        Returns:
            Tables, the same array as in the step before where it is large enough.
        """
        all_blocks = (-(-num_tokens // self._block_tokens)).tolist()
        num_entries = max(
            _num_entries(request, num_blocks)
            for request, num_blocks in zip(requests, all_blocks, strict=True)
        )
        self._reserve(len(requests), num_entries)
        for place, (request, num_blocks) in enumerate(zip(requests, all_blocks, strict=True)):
            self._update(place, request, block_table[place, :num_blocks])
        return StepTables(block_table=self._tables, num_keys=num_tokens - self._num_skipped_tokens)

    def _reserve(self, num_places: int, num_entries: int) -> None:
        num_rows, num_held, max_entries = self._tables.shape
        if num_places == num_held and num_entries <= max_entries:
            return
        num_entries = max(max_entries, -(-num_entries // _ENTRY_STEP) * _ENTRY_STEP)
        self._tables = np.zeros((num_rows, num_places, num_entries), np.int32)
        self._num_skipped_tokens = np.zeros(num_places, np.int32)
        self._written = [None] * num_places

    def _update(
        self, place: int, request: DecodingRequest | None, blocks: Int32[np.ndarray, " blocks"]
    ) -> None:
        if request is None or request.selected is None:
            self._write(place, blocks.size, blocks[:0], blocks)
            self._written[place], self._num_skipped_tokens[place] = None, 0
            return
        before = self._written[place]
        if before is not None and before.is_of(request.selected, blocks.size):
            return
        if request.is_retained:  # it knows of blocks that came back, vLLM's table does not
            blocks = request.physical_blocks
        num_candidates = request.num_candidate_blocks
        num_selected = request.selected.shape[1]
        num_used = num_selected + blocks.size - num_candidates
        self._write(place, num_used, blocks[request.selected], blocks[num_candidates:])
        self._written[place] = _Written(request.selected, blocks.size)
        self._num_skipped_tokens[place] = (num_candidates - num_selected) * self._block_tokens

    def _write(
        self,
        place: int,
        num_used: int,
        selected: Int32[np.ndarray, "*rows selected"],
        tail: Int32[np.ndarray, " tail"],
    ) -> None:
        table = self._tables[:, place]
        num_selected = num_used - tail.size
        table[:, :num_selected] = selected
        table[:, num_selected:num_used] = tail
        table[:, num_used:] = 0


def build_tables(
    requests: Sequence[DecodingRequest | None],
    block_table: Int32[np.ndarray, "batch max_blocks"],
    num_tokens: Int32[np.ndarray, " batch"],
    *,
    num_layer_rows: int,
    block_tokens: int,
) -> StepTables:
    """Builds the tables of one step alone.

    Args:
        requests: as `TableKeeper.build`.
        block_table: vLLM's table.
        num_tokens: vLLM's lengths.
        num_layer_rows: full-attention layers of the group.
        block_tokens: tokens a block.
    """
    keeper = TableKeeper(num_layer_rows=num_layer_rows, block_tokens=block_tokens)
    return keeper.build(requests, block_table, num_tokens)


@dataclass(frozen=True, eq=False)
class _Written:
    """What a row's table was made of.

    A selection is one request's. Where its layers select in the midst of a forward, they fill its
    array, and the table with it, in the one step it is made in; after that it never changes.
    """

    selected: Int32[np.ndarray, "row selected"]
    num_blocks: int

    def is_of(self, selected: Int32[np.ndarray, "row selected"], num_blocks: int) -> bool:
        return self.selected is selected and self.num_blocks == num_blocks


def _num_entries(request: DecodingRequest | None, num_blocks: int) -> int:
    if request is None or request.selected is None:
        return num_blocks
    return num_blocks - request.num_candidate_blocks + request.selected.shape[1]
