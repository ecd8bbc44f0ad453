"""vLLM's own KV tensors, read in place by attention over blocks."""

from __future__ import annotations

import weakref

import numpy as np
import torch
from jaxtyping import Float32, Int32

from blockcompact_jax.kernels import AttendSegment, Layout, PackedStrides, RegisteredPool
from torch_bridge.attend import attend_blocks

LAYOUTS = {"amx": Layout.AMX, "vec": Layout.VEC}
"""Our names of the layouts that vLLM's CPU attention packs."""


class KVBlocks:
    """The KV-cache tensors of a group's layers, registered as they are seen.

    Attributes:
        close: call it to unregister the tensors; the end of the object or of the process does too.
    """

    def __init__(self, *, layout: Layout, num_layer_rows: int) -> None:
        self._layout = layout
        self._pools: list[RegisteredPool | None] = [None] * num_layer_rows
        self._addresses = [0] * num_layer_rows
        # Engines drop their attention objects without a word.
        self.close = weakref.finalize(self, _close, self._pools)

    def attend(
        self,
        row: int,
        kv_cache: torch.Tensor,
        block_table: Int32[np.ndarray, " blocks"],
        num_keys: int,
        *,
        query: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        mass: Float32[np.ndarray, "query_head max_blocks"],
    ) -> None:
        """Attends with one query over a table's blocks, in place.

        Args:
            row: layer row.
            kv_cache: the layer's KV, [num_blocks, num_kv_heads, block_tokens, 2 * head_dim].
            block_table: physical blocks in sequence order.
            num_keys: tokens in them; the last is the query's own.
            query: [num_query_heads, head_dim].
            out: as `query`, written.
            scale: softmax scale.
            mass: written: the softmax mass of each block of the table.
        """
        pool = self._pool(row, kv_cache)
        attend_blocks(
            query.unsqueeze(1),
            [AttendSegment(pool, pool.current_ord(), 0, block_table, num_keys)],
            out=out.unsqueeze(1),
            scale=scale,
            mass=torch.from_numpy(mass).unsqueeze(1),
        )

    def _pool(self, row: int, kv_cache: torch.Tensor) -> RegisteredPool:
        if not kv_cache[0].is_contiguous():
            raise ValueError(
                f"`kv_cache` has strides {kv_cache.stride()}; expected blocks that are contiguous "
                "[num_kv_heads, block_tokens, 2 * head_dim]"
            )
        pool = self._pools[row]
        if pool is not None and self._addresses[row] == kv_cache.data_ptr():
            return pool
        if pool is not None:
            pool.close()
            self._pools[row] = None
        num_blocks, num_kv_heads, block_tokens, both = kv_cache.shape
        block = kv_cache.stride(0)
        pool = RegisteredPool.register_packed(
            kv_cache.data_ptr(),
            layout=self._layout,
            num_layers=1,
            num_blocks=num_blocks,
            num_kv_heads=num_kv_heads,
            block_tokens=block_tokens,
            head_dim=both // 2,
            element_bytes=kv_cache.element_size(),
            size_bytes=((num_blocks - 1) * block + num_kv_heads * block_tokens * both)
            * kv_cache.element_size(),
            keepalive=kv_cache,
            strides=PackedStrides(layer=num_blocks * block, block=block),
        )
        self._pools[row], self._addresses[row] = pool, kv_cache.data_ptr()
        return pool


def _close(pools: list[RegisteredPool | None]) -> None:
    for pool in pools:
        if pool is not None:
            pool.close()
    pools[:] = [None] * len(pools)
