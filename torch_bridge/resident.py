"""The resident pool and its per-layer block tables, as the draft reads and writes them.

Each row's table names physical blocks in attention order: first the selected blocks, then the
tail (recent, partial and draft tokens). The tail begins at the same token position in every row;
how many selected blocks stand before it is the row's own.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Int32

from blockcompact_jax.kernels import AttendSegment
from torch_bridge.memory import KVMemory, PrivateMemory
from torch_bridge.pools import KVShape
from torch_bridge.tables import BlockTables

RESIDENT_REGION = "resident"
"""Name of the pool's memory."""


class ResidentKV:
    """Torch-owned resident pool, read through one block table a row.

    Attributes:
        tensor: [num_rows, 2, num_kv_heads, num_physical_blocks * block_tokens, head_dim]: heads lie
            outside of blocks, so that gathering a table's blocks gives attention-ready keys. In
            memory they come first of all, so that the heads of a rank are one piece.
        pool: its registration.
        tables: each row's block table, at addresses that never change.
    """

    def __init__(
        self, shape: KVShape, num_physical_blocks: int, memory: KVMemory | None = None
    ) -> None:
        """Allocates and registers the pool.

        Args:
            shape: sizes.
            num_physical_blocks: blocks a row.
            memory: where the pool lies; memory of this process if not given.
        """
        self.shape = shape
        self.num_physical_blocks = num_physical_blocks
        by_head = (memory or PrivateMemory()).tensor(
            RESIDENT_REGION,
            shape.num_kv_heads,
            shape.num_rows,
            2,
            num_physical_blocks * shape.block_tokens,
            shape.head_dim,
            dtype=shape.dtype,
        )
        self.tensor = by_head.permute(1, 2, 0, 3, 4)
        self.pool = shape.register_plain(self.tensor, num_physical_blocks)
        self._blocks = self.tensor.view(
            shape.num_rows, 2, shape.num_kv_heads, num_physical_blocks, -1
        )
        self.tables = BlockTables(shape.num_rows, num_physical_blocks)
        self._num_selected: list[int] = []
        self._tail = np.empty((shape.num_rows, 0), dtype=np.int64)
        self._tail_start_token_position = 0

    def set_tables(
        self,
        selected_physical_blocks: list[Int32[np.ndarray, " num_selected"]],
        tail_physical_blocks: Int32[np.ndarray, "rows tail"],
        tail_start_token_position: int,
    ) -> int:
        """Replaces every row's table.

        Args:
            selected_physical_blocks: per row, physical blocks of the resident slots, slot order.
            tail_physical_blocks: per row, physical blocks of the tail in sequence order.
            tail_start_token_position: token position of the tail's first token, a multiple of the
                block size.

        Returns:
            Table entries written.

        Raises:
            ValueError: if the tail does not begin at a block boundary or rows are missing.
            TablesBusyError: if something reads the tables now.
        """
        num_rows, block_tokens = self.shape.num_rows, self.shape.block_tokens
        if tail_start_token_position % block_tokens:
            raise ValueError(
                f"`tail_start_token_position` is {tail_start_token_position}; expected a multiple "
                f"of the block size {block_tokens}."
            )
        if not len(selected_physical_blocks) == len(tail_physical_blocks) == num_rows:
            raise ValueError(
                f"`selected_physical_blocks` has {len(selected_physical_blocks)} rows and "
                f"`tail_physical_blocks` {len(tail_physical_blocks)}; expected {num_rows} of each."
            )
        num_entries = self.tables.swap(
            [
                np.concatenate([selected, tail]).astype(np.int32)
                for selected, tail in zip(
                    selected_physical_blocks, tail_physical_blocks, strict=True
                )
            ]
        )
        self._num_selected = [len(selected) for selected in selected_physical_blocks]
        self._tail = tail_physical_blocks.astype(np.int64)
        self._tail_start_token_position = tail_start_token_position
        return num_entries

    def write(self, row: int, token_position: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Writes draft keys and values [num_kv_heads, num_new, head_dim] into one row's tail.

        Raises:
            ValueError: if they lie outside of the tail, or are of another dtype or shape.
        """
        self.shape.check_kv(key, value)
        for tail_block, offset, begin, end in self._tail_pieces(token_position, key.shape[1]):
            token = int(self._tail[row, tail_block]) * self.shape.block_tokens + offset
            self.tensor[row, 0, :, token : token + end - begin] = key[:, begin:end]
            self.tensor[row, 1, :, token : token + end - begin] = value[:, begin:end]

    def segments(self, row: int, num_tokens: int) -> list[AttendSegment]:
        """One row's resident tokens, as attention over blocks takes them.

        Args:
            row: full-attention layer row.
            num_tokens: logical length of the sequence; tokens past it are not read.
        """
        num_tail_tokens = num_tokens - self._tail_start_token_position
        num_keys = self._num_selected[row] * self.shape.block_tokens + num_tail_tokens
        return [
            AttendSegment(self.pool, self.pool.current_ord(), row, self.tables.row(row), num_keys)
        ]

    def read(self, row: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gathers one row's resident keys and values through its table.

        Args:
            row: full-attention layer row.
            num_tokens: logical length of the sequence; tokens past it are not read.

        Returns:
            Keys and values [num_kv_heads, num_keys, head_dim], tail last.
        """
        shape, num_selected = self.shape, self._num_selected[row]
        num_tail_tokens = num_tokens - self._tail_start_token_position
        num_entries = num_selected + -(-num_tail_tokens // shape.block_tokens)
        table = torch.from_numpy(self.tables.row(row)[:num_entries])
        gathered = self._blocks[row].index_select(2, table)
        tokens = gathered.view(2, shape.num_kv_heads, -1, shape.head_dim)
        key, value = tokens[:, :, : num_selected * shape.block_tokens + num_tail_tokens].unbind(0)
        return key, value

    def write_confirmed(self, token_position: int, kv: torch.Tensor) -> None:
        """Overwrites the tail of every row with verified bytes.

        Args:
            token_position: first token position of `kv`, in the tail.
            kv: [num_rows, 2, num_kv_heads, num_new, head_dim], from the full KV.
        """
        shape = self.shape
        blocks = self._blocks.view(*self._blocks.shape[:4], shape.block_tokens, shape.head_dim)
        rows = torch.arange(shape.num_rows)
        for tail_block, offset, begin, end in self._tail_pieces(token_position, kv.shape[3]):
            physical = torch.from_numpy(self._tail[:, tail_block])
            # Two index arrays apart put the indexed axis first: [rows, 2, heads, …].
            blocks[rows, :, :, physical, offset : offset + end - begin] = kv[:, :, :, begin:end]

    def _tail_pieces(self, token_position: int, num_new: int) -> list[tuple[int, int, int, int]]:
        """Cuts new tokens at block boundaries: (tail block, offset in it, begin, end)."""
        block_tokens = self.shape.block_tokens
        first = token_position - self._tail_start_token_position
        capacity = self._tail.shape[1] * block_tokens
        if first < 0 or first + num_new > capacity:
            raise ValueError(
                f"`token_position` {token_position} with {num_new} new tokens lies outside of the "
                f"resident tail [{self._tail_start_token_position}, "
                f"{self._tail_start_token_position + capacity}). Re-select more often or allocate "
                "a longer tail."
            )
        pieces: list[tuple[int, int, int, int]] = []
        begin = 0
        while begin < num_new:
            tail_block, offset = divmod(first + begin, block_tokens)
            end = min(num_new, begin + block_tokens - offset)
            pieces.append((tail_block, offset, begin, end))
            begin = end
        return pieces
