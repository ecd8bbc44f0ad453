"""Attention mass per block, computed from a forward's own queries and keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_bridge.dlpack import aligned_zeros


class BlockMassRecorder:
    """Collects every whole block's attention mass, for every full-attention layer of a forward.

    Attributes:
        mass: [num_rows, num_query_heads, num_positions, max_blocks] float32; one row a
            full-attention layer. Entry n of the last axis is the softmax mass that logical block n
            received from a query; blocks past the last whole block hold 0. 64-byte aligned, so
            that JAX reads it without a copy.
    """

    def __init__(
        self,
        *,
        layers: Sequence[int],
        num_query_heads: int,
        num_positions: int,
        max_blocks: int,
        block_tokens: int,
    ) -> None:
        """Allocates the recorder.

        Args:
            layers: decoder layer IDs of the full-attention layers, in row order.
            num_query_heads: query heads a layer.
            num_positions: newest queries of a forward that are scored.
            max_blocks: capacity of the block axis.
            block_tokens: tokens a block.
        """
        self._row_by_layer = {layer: row for row, layer in enumerate(layers)}
        self._block_tokens = block_tokens
        self.mass = aligned_zeros(
            len(layers), num_query_heads, num_positions, max_blocks, dtype=torch.float32
        )

    def record(self, layer: int, query: torch.Tensor, key: torch.Tensor, scale: float) -> None:
        """Scores one layer.

        A forward with fewer queries than `num_positions` repeats its oldest one: reductions over
        positions then see no made-up query.

        Args:
            layer: decoder layer ID.
            query: [1, num_query_heads, num_queries, head_dim], rotated.
            key: [1, num_kv_heads, num_keys, head_dim]; the last num_queries are the queries' own.
            scale: softmax scale.
        """
        row = self.mass[self._row_by_layer[layer]]
        num_heads, num_positions, max_blocks = row.shape
        num_kv_heads, num_keys, head_dim = key.shape[1:]
        num_scored = min(num_positions, query.shape[2])
        queries = query[0, :, -num_scored:].reshape(num_kv_heads, -1, head_dim)
        logits = torch.matmul(queries, key[0].transpose(1, 2)).float().mul_(scale)
        logits = logits.view(num_heads, num_scored, num_keys)
        hidden_from = torch.arange(num_keys - num_scored + 1, num_keys + 1)[:, None]
        logits.masked_fill_(torch.arange(num_keys) >= hidden_from, -torch.inf)
        num_blocks = min(num_keys // self._block_tokens, max_blocks)
        mass = logits.softmax(-1)[..., : num_blocks * self._block_tokens]
        mass = mass.view(num_heads, num_scored, num_blocks, self._block_tokens).sum(-1)
        row[:, num_positions - num_scored :, :num_blocks] = mass
        row[:, : num_positions - num_scored, :num_blocks] = mass[:, :1]
        row[..., num_blocks:] = 0
