"""The full KV on the CPU: whole confirmed blocks packed, the newest tokens plain."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int32

from blockcompact_jax.kernels import (
    AttendSegment,
    Layout,
    RegisteredPool,
    host_pool_pack,
    host_pool_upload,
    raise_for_status,
)
from torch_bridge.dlpack import aligned_zeros
from torch_bridge.memory import KVMemory, PrivateMemory
from torch_bridge.pools import KVShape
from torch_bridge.ring import TokenRing

PACKED_REGION = "packed"
"""Name of the packed pool's memory."""


class SkippedBlocks(NamedTuple):
    """All but the selected ones of a row's first `num_candidate_blocks` logical blocks.

    Attributes:
        selected: logical blocks that are attended to all the same, ascending.
        num_candidate_blocks: blocks the selection was made from; all of them are packed.
    """

    selected: Int32[np.ndarray, " selected"]
    num_candidate_blocks: int


class FullKV:
    """Every token's KV of the full-attention layers.

    Whole confirmed blocks are packed; source block b is logical block b. The newest tokens lie
    plain in a ring: logical block b in its block b modulo the ring's size, so that packing a block
    moves no other. The ring also keeps the newest `num_kept_blocks` packed blocks.

    Attributes:
        packed: [num_rows, max_blocks, num_kv_heads, 2 * block_tokens, head_dim], element order as
            `layout` says.
        packed_pool: its registration; uploads read from it.
        newest: [num_rows, 2, num_kv_heads, num_ring_blocks * block_tokens, head_dim], the ring.
        newest_pool: its registration.
        plain_layer: [1, 2, num_kv_heads, max_tokens, head_dim], scratch: one row's KV, plain.
        max_tokens: capacity.
    """

    def __init__(
        self,
        shape: KVShape,
        *,
        max_blocks: int,
        max_unpacked_tokens: int,
        num_kept_blocks: int,
        layout: Layout,
        memory: KVMemory | None = None,
    ) -> None:
        """Allocates and registers the stores, or opens those of another process to read them.

        Args:
            shape: sizes.
            max_blocks: logical blocks of the longest sequence.
            max_unpacked_tokens: most tokens that are written past the last whole confirmed block.
            num_kept_blocks: packed blocks that the ring keeps as well.
            layout: packed layout.
            memory: where `packed` and `newest` lie; memory of this process if not given. Where it
                is read-only, whoever writes it says by `mark_packed` what is packed.
        """
        memory = memory or PrivateMemory()
        self.shape = shape
        self.layout = layout
        self.max_tokens = max_blocks * shape.block_tokens
        self._max_unpacked_blocks = -(-max_unpacked_tokens // shape.block_tokens)
        self._num_kept_blocks = num_kept_blocks
        self._num_ring_blocks = self._max_unpacked_blocks + num_kept_blocks
        rows, heads, dim = shape.num_rows, shape.num_kv_heads, shape.head_dim
        num_ring_tokens = self._num_ring_blocks * shape.block_tokens
        self.packed = memory.tensor(
            PACKED_REGION, rows, max_blocks, heads, 2 * shape.block_tokens, dim, dtype=shape.dtype
        )
        self.newest = memory.tensor(
            "newest", rows, 2, heads, num_ring_tokens, dim, dtype=shape.dtype
        )
        self._ring = TokenRing(self.newest)
        self.plain_layer = aligned_zeros(1, 2, heads, self.max_tokens, dim, dtype=shape.dtype)
        is_writable = memory.is_writable
        self.packed_pool = shape.register_packed(
            self.packed, max_blocks, layout, is_writable=is_writable
        )
        self.newest_pool = shape.register_plain(
            self.newest, self._num_ring_blocks, is_writable=is_writable
        )
        self._plain_layer_pool = shape.register_plain(self.plain_layer, max_blocks)
        self._logical_blocks = np.arange(max_blocks, dtype=np.int32)
        self._num_packed_by_row = np.zeros(rows, np.int64)

    def close(self) -> None:
        """Unregisters every store."""
        for pool in (self.packed_pool, self.newest_pool, self._plain_layer_pool):
            pool.close()

    def prefill(self, row: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Takes the whole context of one row and packs its whole blocks.

        Args:
            row: full-attention layer row; empty so far.
            key: [num_kv_heads, num_tokens, head_dim], from token position 0 on.
            value: as `key`.

        Raises:
            ValueError: if the context does not fit, is of another dtype or shape than the store, or
                the row is not empty.
        """
        num_tokens, block_tokens = key.shape[1], self.shape.block_tokens
        if self._num_packed_by_row[row]:
            raise ValueError(f"`row` {row} holds tokens already; prefill a new store")
        self.shape.check_kv(key, value)
        self._check_capacity(0, num_tokens)
        num_blocks = num_tokens // block_tokens
        if num_blocks:
            self.plain_layer[0, 0, :, :num_tokens] = key
            self.plain_layer[0, 1, :, :num_tokens] = value
            self._pack(self._plain_layer_pool, row, self._logical_blocks[:num_blocks])
        self._ring.write(row, 0, key, value)
        self._num_packed_by_row[row] = num_blocks

    def write(self, row: int, token_position: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Writes [num_kv_heads, num_new, head_dim] keys and values past the packed blocks.

        Raises:
            ValueError: if they do not fit, are of another dtype or shape than the store, or would
                overwrite a packed block.
        """
        self.shape.check_kv(key, value)
        end = token_position + key.shape[1]
        self._check_capacity(token_position, end)
        block_tokens = self.shape.block_tokens
        first_free = int(self._num_packed_by_row[row]) * block_tokens
        last_free = first_free + self._max_unpacked_blocks * block_tokens
        if token_position < first_free or end > last_free:
            raise ValueError(
                f"`token_position` {token_position} with {key.shape[1]} new tokens lies outside of "
                f"the unpacked tokens [{first_free}, {last_free}) of row {row}. Pack confirmed "
                "tokens first, or allocate for more unpacked tokens."
            )
        self._ring.write(row, token_position, key, value)

    def append(self, row: int, token_position: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Writes final keys and values of one row, any number of them, and packs whole blocks.

        A row that is appended to packs by itself: `pack` is for tokens that are confirmed later.

        Args:
            row: full-attention layer row.
            token_position: the row's number of tokens so far.
            key: [num_kv_heads, num_new, head_dim].
            value: as `key`.

        Raises:
            ValueError: if they do not fit, or are of another dtype or shape than the store.
        """
        block_tokens = self.shape.block_tokens
        self._check_capacity(token_position, token_position + key.shape[1])
        begin = 0
        while begin < key.shape[1]:
            num_packed = int(self._num_packed_by_row[row])
            last_free = (num_packed + self._max_unpacked_blocks) * block_tokens
            end = min(key.shape[1], begin + last_free - (token_position + begin))
            self.write(row, token_position + begin, key[:, begin:end], value[:, begin:end])
            begin = end
            blocks = self._logical_blocks[num_packed : (token_position + end) // block_tokens]
            if blocks.size:
                self._pack(self.newest_pool, row, blocks)
                self._num_packed_by_row[row] += blocks.size

    def pack(self, num_tokens: int) -> None:
        """Packs the whole blocks among the first `num_tokens` tokens that are not packed yet.

        Args:
            num_tokens: confirmed tokens; their KV is final.
        """
        num_packed = int(self._num_packed_by_row[0])
        blocks = self._logical_blocks[num_packed : num_tokens // self.shape.block_tokens]
        if not blocks.size:
            return
        rows = np.arange(self.shape.num_rows, dtype=np.int32)
        self._pack(self.newest_pool, np.repeat(rows, blocks.size), np.tile(blocks, rows.size))
        self._num_packed_by_row[:] = num_packed + blocks.size

    def mark_packed(self, num_tokens: int) -> None:
        """Takes down that the writer of read-only stores has packed up to `num_tokens` tokens."""
        self._num_packed_by_row[:] = num_tokens // self.shape.block_tokens

    def segments(
        self,
        row: int,
        num_tokens: int,
        skipped: SkippedBlocks | None = None,
    ) -> list[AttendSegment]:
        """The first `num_tokens` tokens of one row, as attention over blocks takes them.

        Args:
            row: full-attention layer row.
            num_tokens: tokens of the row.
            skipped: blocks to leave out; none if not given. Columns of block mass are logical
                blocks only then.
        """
        block_tokens, num_packed = self.shape.block_tokens, int(self._num_packed_by_row[row])
        num_newest = num_tokens - num_packed * block_tokens
        blocks = self._logical_blocks[num_packed : num_packed - (-num_newest // block_tokens)]
        newest = AttendSegment(
            self.newest_pool,
            self.newest_pool.current_ord(),
            row,
            blocks % np.int32(self._num_ring_blocks),
            num_newest,
        )
        if not num_packed:
            return [newest]
        blocks = self._packed_blocks(num_packed, skipped)
        packed = AttendSegment(
            self.packed_pool,
            self.packed_pool.current_ord(),
            row,
            blocks,
            blocks.size * block_tokens,
        )
        return [packed, newest]

    def read(
        self, row: int, num_tokens: int, skipped: SkippedBlocks | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Unpacks one row into the scratch layer, which the next call overwrites.

        Args:
            row: full-attention layer row.
            num_tokens: tokens of the row.
            skipped: blocks to leave out; none if not given.

        Returns:
            Views of the keys and values of the first `num_tokens` tokens that are not left out,
            [num_kv_heads, num_keys, head_dim].
        """
        block_tokens = self.shape.block_tokens
        num_packed = min(int(self._num_packed_by_row[row]), -(-num_tokens // block_tokens))
        blocks = self._packed_blocks(num_packed, skipped)
        if num_packed:
            unpacked = host_pool_upload(
                self.packed_pool.current_ord(),
                self._plain_layer_pool.current_ord(),
                row,
                blocks,
                self._logical_blocks[: blocks.size],
                packed_pool=self.packed_pool,
                plain_pool=self._plain_layer_pool,
            )
            raise_for_status(unpacked.status, call="pool_upload", source_block=blocks)
        first, num_newest = (
            num_packed * block_tokens,
            max(num_tokens - num_packed * block_tokens, 0),
        )
        place = blocks.size * block_tokens
        for ring, begin, end in self._ring.pieces(first, num_newest):
            self.plain_layer[0, :, :, place + begin : place + end] = self.newest[row, :, :, ring]
        num_keys = min(num_tokens, first) - (first - place) + num_newest
        key, value = self.plain_layer[0, :, :, :num_keys].unbind(0)
        return key, value

    def _packed_blocks(
        self, num_packed: int, skipped: SkippedBlocks | None
    ) -> Int32[np.ndarray, " blocks"]:
        """The packed logical blocks that are attended to, ascending."""
        if skipped is None:
            return self._logical_blocks[:num_packed]
        newer = self._logical_blocks[skipped.num_candidate_blocks : num_packed]
        return np.concatenate([skipped.selected, newer])

    def read_newest(self, token_position: int, end_token_position: int) -> torch.Tensor:
        """The plain KV of new tokens of every row, from the ring.

        Args:
            token_position: the first; at most `num_kept_blocks` blocks before the unpacked ones.
            end_token_position: one past the last.

        Returns:
            [num_rows, 2, num_kv_heads, num_tokens, head_dim].

        Raises:
            ValueError: if the ring holds them no more.
        """
        num_packed = int(self._num_packed_by_row[0])
        first_kept = max(num_packed - self._num_kept_blocks, 0) * self.shape.block_tokens
        if token_position < first_kept:
            raise ValueError(
                f"`token_position` is {token_position}; expected at least {first_kept}, the first "
                "token still held plain. Read older ones with `read`."
            )
        return self._ring.read(token_position, end_token_position - token_position)

    def _check_capacity(self, token_position: int, end_token_position: int) -> None:
        if end_token_position > self.max_tokens:
            raise ValueError(
                f"`token_position` {token_position} plus {end_token_position - token_position} new "
                f"tokens exceeds the capacity of {self.max_tokens} tokens. Allocate more blocks."
            )

    def _pack(
        self,
        plain_pool: RegisteredPool,
        layer_row: int | Int32[np.ndarray, " moves"],
        logical_block: Int32[np.ndarray, " moves"],
    ) -> None:
        plain_block = logical_block % np.int32(plain_pool.shape.num_blocks)
        packed = host_pool_pack(
            plain_pool.current_ord(),
            self.packed_pool.current_ord(),
            layer_row,
            plain_block,
            logical_block,
            plain_pool=plain_pool,
            packed_pool=self.packed_pool,
        )
        raise_for_status(packed.status, call="pool_pack", source_block=logical_block)
