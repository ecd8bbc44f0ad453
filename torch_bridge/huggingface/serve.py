"""The verifier that `blockcompact serve` runs: one model, one full KV a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from blockcompact_jax.geometry import ModelGeometry
from blockcompact_jax.kernels import Layout
from blockcompact_jax.protocol import Capabilities
from blockcompact_jax.remote.segment import SharedSegment
from blockcompact_jax.upload import SourceKind
from torch_bridge.huggingface.attention import register
from torch_bridge.huggingface.cache import CompactedCache
from torch_bridge.huggingface.identity import capabilities
from torch_bridge.huggingface.options import AttentionName
from torch_bridge.huggingface.sizes import StoreSizes, store_sizes
from torch_bridge.huggingface.verifier import BlockForward, LocalVerifier
from torch_bridge.memory import SharedMemory


@dataclass
class ModelEngine:
    """A loaded model as `remote.service` uses it.

    Attributes:
        model: a model with stock SDPA attention; its attention is replaced for good.
        block_tokens: tokens a block.
        layout: packed layout of the full KV.
        attention: "blocks" or "gathered".
        max_tokens: longest sequence that is accepted.
    """

    model: PreTrainedModel
    block_tokens: int
    layout: Layout
    attention: AttentionName
    max_tokens: int

    def __post_init__(self) -> None:
        self.geometry: ModelGeometry = self._sizes(self.max_tokens, 1).geometry
        self.num_vocabulary: int = self.model.config.get_text_config(decoder=True).vocab_size
        self.model.set_attn_implementation(register())

    def capabilities(self, process_epoch: int) -> Capabilities:
        """What this side says of itself."""
        return capabilities(
            self.model,
            self.geometry,
            attention=self.attention,
            process_epoch=process_epoch,
            source_kinds=frozenset(SourceKind),
        )

    def open(
        self,
        segment: SharedSegment,
        *,
        max_tokens: int,
        num_draft_tokens: int,
        num_copy_blocks: int,
    ) -> RequestVerifier:
        """Allocates a request's stores in a segment."""
        sizes = self._sizes(max_tokens, num_draft_tokens)
        return RequestVerifier(self, sizes, segment, num_copy_blocks)

    def _sizes(self, max_tokens: int, num_draft_tokens: int) -> StoreSizes:
        return store_sizes(
            self.model,
            block_tokens=self.block_tokens,
            layout=self.layout,
            attention=self.attention,
            max_tokens=max_tokens,
            num_draft_tokens=num_draft_tokens,
        )


class RequestVerifier:
    """The full KV, windows, block mass and logits of one request, in shared memory."""

    def __init__(
        self, engine: ModelEngine, sizes: StoreSizes, segment: SharedSegment, num_copy_blocks: int
    ) -> None:
        memory = SharedMemory(segment)
        config = engine.model.config.get_text_config(decoder=True)
        self._geometry = sizes.geometry
        self._full = sizes.full_kv(memory)
        self._copies = sizes.copies(num_copy_blocks, memory)
        self._cache = CompactedCache(config, self._full, None)
        self._cache.is_gathering = engine.attention == "gathered"
        blocks = sizes.block_attention(self._cache, memory)
        self._windows = sizes.windows(memory)
        self._logits = sizes.logits(memory)
        forward = BlockForward(engine.model, self._cache)
        self._verifier = LocalVerifier(forward, self._cache, self._full, blocks)

    def prefill(self, token_ids: tuple[int, ...]) -> None:
        """Verifies the context; row 0 of the logits is what follows it."""
        self._logits[0] = self._verifier.prefill(list(token_ids))
        self._export_windows(0)

    def verify(self, token_ids: tuple[int, ...], *, is_scoring: bool) -> None:
        """Verifies tokens after the confirmed ones."""
        first = self._cache.get_seq_length()
        logits = self._verifier.verify(list(token_ids), is_scored=is_scoring)
        self._logits[: len(token_ids)] = logits
        self._export_windows(first)

    def confirm(self, num_tokens: int) -> None:
        """Forgets all but the first `num_tokens` tokens and packs their whole blocks."""
        self._verifier.keep(num_tokens)
        self._verifier.pack(num_tokens)

    def gather(
        self, layers: Sequence[int], source_blocks: Sequence[int], copy_blocks: Sequence[int]
    ) -> None:
        """Copies packed blocks into the compaction area."""
        rows = [self._geometry.row_of_layer(layer) for layer in layers]
        self._copies[list(copy_blocks)] = self._full.packed[rows, list(source_blocks)]

    def close(self) -> None:
        """Unregisters the stores and lets go of their memory."""
        self._full.close()
        self._cache.layers.clear()  # Layers know their cache; without them nothing holds memory.
        empty = torch.empty(0)
        self._full.packed = self._full.newest = self._full.plain_layer = empty
        del self._full, self._copies, self._windows, self._logits, self._verifier

    def _export_windows(self, first: int) -> None:
        """Shows the newest keys and values of sliding layers to the reader."""
        for row, layer in enumerate(self._cache.sliding_layers):
            held = layer.keys.shape[2]
            num_new = min(held, layer.cumulative_length - first)
            position = layer.cumulative_length - num_new
            key, value = layer.keys[0, :, held - num_new :], layer.values[0, :, held - num_new :]
            self._windows.write(row, position, key, value)
