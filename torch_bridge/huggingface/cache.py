"""A transformers cache that verifies against the full KV and drafts against the resident pool.

One cache serves both phases of self-speculation. Every layer reports the original logical length,
so RoPE positions never notice compaction; what a full-attention layer hands to attention depends on
the phase:

* VERIFY: keys and values are written to the full KV, and all of it is attended to;
* DRAFT: they are written to the resident tail, and what the layer's block table names is.

`segments` names the blocks for attention that reads them in place. A cache that `is_gathering`
serves any attention function: it copies those blocks together and returns plain keys and values.

Sliding-window layers are the stock ones. `rollback` forgets the newest tokens after a phase, and
`trim_windows` ends a round.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import DynamicSlidingWindowLayer

from blockcompact_jax.kernels import AttendSegment
from torch_bridge.full import FullKV
from torch_bridge.huggingface.full_layer import FullAttentionLayer
from torch_bridge.huggingface.layers import layer_types
from torch_bridge.resident import ResidentKV
from torch_bridge.ring import TokenRing


class Phase(enum.Enum):
    """Which KV the full-attention layers read and write."""

    VERIFY = "verify"
    DRAFT = "draft"


class CompactedLayer(FullAttentionLayer):
    """One full-attention layer: the full KV when verifying, the resident blocks when drafting."""

    is_croppable = True

    def __init__(self, cache: CompactedCache, layer_row: int) -> None:
        super().__init__()
        self._cache = cache
        self.layer_row = layer_row
        self.is_all_handed_out = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes new keys and values, returns those to attend to.

        Args:
            key_states: [1, num_kv_heads, num_new, head_dim], rotated.
            value_states: as `key_states`.
            *args: ignored.
            **kwargs: ignored.

        Returns:
            Keys and values [1, num_kv_heads, num_keys, head_dim], the newest num_new last: all to
            attend to where the cache is gathering or this is the prefill, else only the new ones.
        """
        cache, row = self._cache, self.layer_row
        if key_states.shape[0] != 1:
            raise ValueError(
                f"`key_states` has batch size {key_states.shape[0]}; expected 1. "
                "Run the sequences one by one."
            )
        key, value, token_position = key_states[0], value_states[0], self.length
        is_prefill = token_position == 0 and cache.phase is Phase.VERIFY
        store = cache.store
        if is_prefill:
            cache.full.prefill(row, key, value)
        else:
            store.write(row, token_position, key, value)
        self.length = token_position + key.shape[1]
        self.is_all_handed_out = is_prefill or cache.is_gathering
        if is_prefill or not cache.is_gathering:
            return key_states, value_states
        key, value = store.read(row, self.length)
        return key.unsqueeze(0), value.unsqueeze(0)

    def get_max_length(self) -> int:
        """Capacity in tokens."""
        return self._cache.full.max_tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the newest `-tokens_to_remove` tokens (transformers counts them negative)."""
        if tokens_to_remove > 0 or -tokens_to_remove > self.length:
            raise ValueError(
                f"`tokens_to_remove` is {tokens_to_remove}; expected a negative count of at most "
                f"{self.length} tokens."
            )
        self.length += tokens_to_remove

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Refused: one sequence has no beams."""
        raise NotImplementedError("beam search is not supported; decode with `num_beams=1`.")


class CompactedCache(Cache):
    """Cache of a whole model: `CompactedLayer` where attention is full, stock layers elsewhere.

    Attributes:
        full: every token's KV of the full-attention layers, read when verifying.
        resident: the blocks the draft reads; None where nothing is drafted.
        phase: set it before a forward pass.
        is_gathering: whether layers hand out gathered copies of their blocks.
    """

    layers: list[Any]

    def __init__(self, config: PreTrainedConfig, full: FullKV, resident: ResidentKV | None) -> None:
        """Builds one cache layer a decoder layer.

        Args:
            config: the model's text config.
            full: store with one row a full-attention layer, in decoder order.
            resident: store with the same rows; None for a cache that only verifies.
        """
        self.full = full
        self.resident = resident
        self.phase = Phase.VERIFY
        self.is_gathering = True
        layers: list[Any] = []
        layer_row = 0
        for layer_type in layer_types(config):
            if layer_type == "full_attention":
                layers.append(CompactedLayer(self, layer_row))
                layer_row += 1
            else:
                sliding = DynamicSlidingWindowLayer(sliding_window=config.sliding_window)
                sliding.activate_past_recording()
                layers.append(sliding)
        super().__init__(layers=layers)

    @property
    def store(self) -> FullKV | ResidentKV:
        """The store of the present phase."""
        if self.phase is Phase.VERIFY:
            return self.full
        if self.resident is None:
            raise RuntimeError("this cache only verifies; give it a `resident` store to draft")
        return self.resident

    def segments(self, layer: int) -> list[AttendSegment]:
        """What a full-attention layer attends to in the present phase, its newest token last.

        Args:
            layer: decoder layer ID.
        """
        cache_layer: CompactedLayer = self.layers[layer]
        return self.store.segments(cache_layer.layer_row, cache_layer.length)

    @property
    def sliding_layers(self) -> list[Any]:
        """The sliding-window layers, in decoder order."""
        return [layer for layer in self.layers if not isinstance(layer, CompactedLayer)]

    def adopt(self, windows: TokenRing, num_tokens: int) -> None:
        """Takes over tokens that another process has verified, and forgets what has left windows.

        Args:
            windows: its sliding layers' newest keys and values, one row a layer.
            num_tokens: confirmed tokens.
        """
        for layer in self.layers:
            if isinstance(layer, CompactedLayer):
                layer.length = num_tokens
        for row, layer in enumerate(self.sliding_layers):
            first = max(layer.cumulative_length, num_tokens - windows.num_tokens)
            kv = windows.read(first, num_tokens - first)[row]
            layer.update(kv[0][None], kv[1][None])
            layer.cumulative_length = num_tokens
            layer.crop(0)

    def rollback(self, num_tokens: int) -> None:
        """Forgets the newest `num_tokens` tokens in every layer, any number of times in a round.

        The stock `crop` of a sliding layer also trims it to its window, after which a second
        rollback would lack the tokens before; here trimming waits for `trim_windows`.
        """
        if not num_tokens:
            return
        for layer in self.layers:
            if isinstance(layer, CompactedLayer):
                layer.crop(-num_tokens)
            else:
                layer.keys = layer.keys[:, :, :-num_tokens]
                layer.values = layer.values[:, :, :-num_tokens]
                layer.cumulative_length -= num_tokens

    def trim_windows(self) -> None:
        """Lets sliding layers drop what has left their windows; nothing older can come back."""
        for layer in self.sliding_layers:
            layer.crop(0)
