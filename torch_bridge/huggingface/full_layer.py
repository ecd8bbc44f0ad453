"""What the full-attention layers of our transformers caches have in common."""

from __future__ import annotations

import torch
from transformers.cache_utils import CacheLayerMixin


class FullAttentionLayer(CacheLayerMixin):
    """Counts the tokens of a layer whose keys and values lie in stores of ours.

    Attributes:
        length: logical length in tokens, padding included.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the stores are not the layer's."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Logical (num_keys, offset), padding included; mask functions other than ours ask."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Logical length in tokens, padding included, whatever is attended to."""
        return self.length

    def reset(self) -> None:
        """Forgets every token."""
        self.length = 0
