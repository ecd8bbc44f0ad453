"""What each row of a step attends to: all its blocks, or each layer's own and the tail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from torch_bridge.vllm.requests import DecodingRequest


@dataclass(frozen=True, kw_only=True)
class StepTables:
    """Block tables and lengths of one step.

    Attributes:
        block_table: int32 [layer row, batch, entries], physical blocks; 0 past a row's length.
        num_keys: int32 [batch], keys that each row attends to, the same in every layer.
    """

    block_table: Int32[np.ndarray, "row batch entries"]
    num_keys: Int32[np.ndarray, " batch"]


def build_tables(
    requests: Sequence[DecodingRequest | None],
    block_table: Int32[np.ndarray, "batch max_blocks"],
    num_tokens: Int32[np.ndarray, " batch"],
    *,
    num_layer_rows: int,
    block_tokens: int,
) -> StepTables:
    """Builds the tables of one step.

    A row without a selection keeps its own table.

    Args:
        requests: the request of each row, None for rows that attend to everything. A row may have
            several queries: they are its newest tokens, all of them behind the candidates.
        block_table: vLLM's table.
        num_tokens: vLLM's lengths.
        num_layer_rows: full-attention layers of the group.
        block_tokens: tokens a block.
    """
    num_keys = num_tokens.copy()
    tables: list[Int32[np.ndarray, "row entries"]] = []
    for place, request in enumerate(requests):
        length = int(num_tokens[place])
        blocks = block_table[place, : -(-length // block_tokens)]
        if request is None or request.selected is None:
            tables.append(blocks[None])
            continue
        if request.is_retained:  # it knows of blocks that came back, vLLM's table does not
            blocks = request.physical_blocks
        selected = blocks[request.selected]
        tail = blocks[request.num_candidate_blocks :]
        tables.append(
            np.concatenate([selected, np.broadcast_to(tail, (num_layer_rows, tail.size))], axis=1)
        )
        num_skipped = request.num_candidate_blocks - selected.shape[1]
        num_keys[place] = length - num_skipped * block_tokens
    num_entries = max(table.shape[1] for table in tables)
    merged = np.zeros((num_layer_rows, len(tables), num_entries), np.int32)
    for place, table in enumerate(tables):
        merged[:, place, : table.shape[1]] = table
    return StepTables(block_table=merged, num_keys=num_keys)
