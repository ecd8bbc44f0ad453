"""Sizes of a sequence's stores, from the model and a few limits: equal on both sides of a wire."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from blockcompact_jax.budget import RECENT_BLOCKS
from blockcompact_jax.geometry import LayerGeometry, ModelGeometry
from blockcompact_jax.kernels import Layout
from torch_bridge.full import FullKV
from torch_bridge.huggingface.block_attention import BLOCK_ATTENTION_DTYPES, BlockAttention
from torch_bridge.huggingface.cache import CompactedCache
from torch_bridge.huggingface.geometry import geometry_of
from torch_bridge.huggingface.layers import UnsupportedModelError
from torch_bridge.huggingface.options import AttentionName
from torch_bridge.memory import KVMemory
from torch_bridge.pools import KVShape
from torch_bridge.ring import TokenRing

COPIES_REGION = "copies"
"""Name of the compaction area's memory."""


@dataclass(frozen=True, kw_only=True)
class StoreSizes:
    """What a verifier's stores are sized by.

    Attributes:
        geometry: layers, groups, block size, element type.
        layout: packed layout of the full KV.
        dtype: element type.
        max_blocks: logical blocks of the longest sequence.
        num_draft_tokens: tokens drafted a round.
        num_vocabulary: logits a token.
    """

    geometry: ModelGeometry
    layout: Layout
    dtype: torch.dtype
    max_blocks: int
    num_draft_tokens: int
    num_vocabulary: int

    @property
    def shape(self) -> KVShape:
        """Sizes that the full KV and the resident pool share."""
        layer = self._full_layer
        return KVShape(
            num_rows=self.geometry.num_rows,
            num_kv_heads=layer.num_kv_heads,
            block_tokens=self.geometry.block_tokens,
            head_dim=layer.head_dim,
            dtype=self.dtype,
        )

    def full_kv(self, memory: KVMemory) -> FullKV:
        """Allocates the full KV, or opens it to read."""
        return FullKV(
            self.shape,
            max_blocks=self.max_blocks,
            max_unpacked_tokens=self.geometry.block_tokens + self.num_draft_tokens,
            num_kept_blocks=RECENT_BLOCKS,
            layout=self.layout,
            memory=memory,
        )

    def copies(self, num_copy_blocks: int, memory: KVMemory) -> torch.Tensor:
        """Allocates the compaction area, or opens it to read.

        Its shape is [num_copy_blocks, num_kv_heads, 2 * block_tokens, head_dim]: packed blocks of
        any layer.
        """
        shape = self.shape
        return memory.tensor(
            COPIES_REGION,
            num_copy_blocks,
            shape.num_kv_heads,
            2 * shape.block_tokens,
            shape.head_dim,
            dtype=self.dtype,
        )

    def block_attention(self, cache: CompactedCache, memory: KVMemory) -> BlockAttention:
        """Allocates the block mass, or opens it to read."""
        return BlockAttention(
            cache,
            num_query_heads=self._full_layer.num_query_heads,
            num_positions=self.num_draft_tokens + 1,
            max_blocks=self.max_blocks,
            memory=memory,
        )

    def windows(self, memory: KVMemory) -> TokenRing:
        """Allocates a ring with the window of every sliding layer, or opens it to read."""
        sliding = [layer for layer in self.geometry.layers if layer.window_tokens is not None]
        first = sliding[0] if sliding else self._full_layer
        num_tokens = (first.window_tokens or 0) + self.num_draft_tokens + 1
        shape = (len(sliding), 2, first.num_kv_heads, num_tokens, first.head_dim)
        return TokenRing(memory.tensor("windows", *shape, dtype=self.dtype))

    def logits(self, memory: KVMemory) -> torch.Tensor:
        """Allocates [num_draft_tokens + 1, num_vocabulary] logits, or opens them to read."""
        shape = (self.num_draft_tokens + 1, self.num_vocabulary)
        return memory.tensor("logits", *shape, dtype=self.dtype)

    @property
    def _full_layer(self) -> LayerGeometry:
        return self.geometry.layers[self.geometry.full_layers[0]]


def store_sizes(
    model: PreTrainedModel,
    *,
    block_tokens: int,
    layout: Layout,
    attention: AttentionName,
    max_tokens: int,
    num_draft_tokens: int,
) -> StoreSizes:
    """Returns the sizes of one sequence's stores.

    Args:
        model: a model with stock attention.
        block_tokens: tokens a block.
        layout: packed layout of the full KV.
        attention: "blocks" or "gathered".
        max_tokens: longest sequence, drafts included.
        num_draft_tokens: tokens drafted a round.

    Raises:
        UnsupportedModelError: for an architecture or a dtype that is not supported.
    """
    if attention == "blocks" and model.dtype not in BLOCK_ATTENTION_DTYPES:
        raise UnsupportedModelError(
            f"`attention` is 'blocks' and the model's dtype {model.dtype}; expected one of "
            f"{', '.join(map(str, BLOCK_ATTENTION_DTYPES))}. Use attention='gathered'."
        )
    config = model.config.get_text_config(decoder=True)
    return StoreSizes(
        geometry=geometry_of(config, block_tokens=block_tokens, dtype=model.dtype, layout=layout),
        layout=layout,
        dtype=model.dtype,
        max_blocks=-(-max_tokens // block_tokens),
        num_draft_tokens=num_draft_tokens,
        num_vocabulary=config.vocab_size,
    )
