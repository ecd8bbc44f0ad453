"""Attention of a cache's full-attention layers straight from their blocks, with block mass.

Nothing is gathered or unpacked: one native call reads packed and plain blocks through the block
table and gives, with the output, the attention mass of every block.
"""

from __future__ import annotations

import os

import torch

from blockcompact_jax.kernels import has_open_mp_threads, num_threads
from torch_bridge.attend import attend_blocks
from torch_bridge.huggingface.cache import CompactedCache
from torch_bridge.memory import KVMemory, PrivateMemory

BLOCK_ATTENTION_DTYPES = (torch.float32, torch.bfloat16)
"""KV dtypes that attention over blocks computes with."""


class BlockAttention:
    """Reads the blocks of one `CompactedCache` for attention, for scores, or for both.

    Attributes:
        mass: [num_rows, num_query_heads, num_positions, max_blocks] float32, one row a
            full-attention layer: the softmax mass that each logical block received from the newest
            queries of the last scored forward. 64-byte aligned, so that JAX reads it in place.
        is_scored: whether forwards record `mass`.
        num_layers_attended: full-attention layers that have attended since this was set to 0.
    """

    def __init__(
        self,
        cache: CompactedCache,
        *,
        num_query_heads: int,
        num_positions: int,
        max_blocks: int,
        memory: KVMemory | None = None,
    ) -> None:
        """Allocates the mass.

        Args:
            cache: where keys and values are.
            num_query_heads: query heads a layer.
            num_positions: newest queries of a forward that are scored.
            max_blocks: capacity of the block axis.
            memory: where the mass lies; memory of this process if not given.
        """
        self._cache = cache
        self._num_threads = num_threads() if "BLOCKCOMPACT_NUM_THREADS" in os.environ else None
        self.is_scored = False
        self.num_layers_attended = 0
        num_rows = cache.full.shape.num_rows
        self.mass = (memory or PrivateMemory()).tensor(
            "mass", num_rows, num_query_heads, num_positions, max_blocks, dtype=torch.float32
        )

    def has_more_than_handed_out(self, layer: int) -> bool:
        """Whether a layer attends to more keys than its cache layer just handed out."""
        return not self._cache.layers[layer].is_all_handed_out

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """Attends and, if `is_scored`, scores.

        Args:
            layer: decoder layer ID; its newest keys are the queries' own.
            query: [1, num_query_heads, num_queries, head_dim], rotated.
            scale: softmax scale.

        Returns:
            [1, num_queries, num_query_heads, head_dim].
        """
        self.num_layers_attended += 1
        row = self._cache.layers[layer].layer_row
        mass = self._mass_of(row, query.shape[2]) if self.is_scored else None
        return self._attend_blocks(query, layer, scale, mass)

    def score(self, layer: int, query: torch.Tensor, scale: float) -> None:
        """If `is_scored`, scores a layer whose output comes from elsewhere; else does nothing."""
        self.num_layers_attended += 1
        if self.is_scored:
            newest = query[:, :, -self.mass.shape[2] :]
            mass = self._mass_of(self._cache.layers[layer].layer_row, newest.shape[2])
            self._attend_blocks(newest, layer, scale, mass)

    def repeat_oldest(self, num_queries: int) -> None:
        """After a scored forward of fewer queries than positions, repeats the oldest one's mass.

        Reductions over positions then see no made-up query.
        """
        num_missing = self.mass.shape[2] - num_queries
        if num_missing > 0:
            self.mass[:, :, :num_missing] = self.mass[:, :, num_missing : num_missing + 1]

    def _mass_of(self, row: int, num_queries: int) -> torch.Tensor:
        if num_queries > self.mass.shape[2]:
            raise ValueError(
                f"a scored forward has {num_queries} queries; expected at most "
                f"`num_positions` = {self.mass.shape[2]}"
            )
        return self.mass[row, :, -num_queries:]

    def _attend_blocks(
        self, query: torch.Tensor, layer: int, scale: float, mass: torch.Tensor | None
    ) -> torch.Tensor:
        _, num_heads, num_queries, head_dim = query.shape
        rows = query if query.stride(3) == 1 else query.contiguous()
        out = torch.empty(1, num_queries, num_heads, head_dim, dtype=query.dtype)
        # On torch's own threads: its OpenMP workers spin after each operation, and threads of ours
        # would wait for their processors. Results do not depend on it.
        is_on_open_mp = self._num_threads is None and has_open_mp_threads()
        attend_blocks(
            rows[0],
            self._cache.segments(layer),
            out=out[0].transpose(0, 1),
            scale=scale,
            mass=mass,
            num_threads=None if is_on_open_mp else self._num_threads or 1,
            is_on_open_mp=is_on_open_mp,
        )
        return out
