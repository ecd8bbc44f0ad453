"""Plain full-KV decoding with stock cache and attention: what compaction is compared to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from torch_bridge.huggingface.cache import CompactedCache, CompactedLayer
from torch_bridge.huggingface.sampling import Sampler


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where two greedy decodings part.

    Attributes:
        token_position: position in the sequence of the first differing token.
        logit_margin: the full model's best logit minus its logit of the other token.
    """

    token_position: int
    logit_margin: float


@dataclass(frozen=True, kw_only=True)
class FullDecode:
    """Result of a plain decoding.

    Attributes:
        tokens: the new tokens.
        seconds: wall-clock time of all steps, prefill excluded.
        divergence: where `tokens` first differs from the tokens compared with, None if nowhere.
    """

    tokens: list[int]
    seconds: float
    divergence: Divergence | None


class StockPrefix:
    """The prefilled context, kept aside so that a stock decoding can start from the same bytes.

    Full-attention layers are copied only when asked for (their context never changes); the windows
    of sliding layers move on, so they are copied at once.
    """

    def __init__(self, cache: CompactedCache) -> None:
        """Remembers the context that `cache` holds now, right after the prefill."""
        self._num_tokens = cache.get_seq_length()
        self._cache = cache
        self._windows = [
            None
            if isinstance(layer, CompactedLayer)
            else (layer.keys.clone(), layer.values.clone())
            for layer in cache.layers
        ]

    def to_stock(self, config: PreTrainedConfig) -> DynamicCache:
        """Builds the cache that a stock prefill of the same tokens would have left."""
        stock = DynamicCache(config=config)
        full_rows = iter(range(len(self._windows)))
        layers: list[Any] = stock.layers
        for layer, window in zip(layers, self._windows, strict=True):
            if window is None:
                key, value = self._cache.full.read(next(full_rows), self._num_tokens)
                layer.update(key[None].clone(), value[None].clone())
            else:
                layer.update(*window)
                layer.cumulative_length = self._num_tokens
        return stock


def decode_full(
    model: PreTrainedModel,
    stock: DynamicCache,
    *,
    first_token: int,
    num_tokens: int,
    sampler: Sampler,
    eos_token_ids: frozenset[int],
    compare_with: list[int],
    on_progress: Callable[[int], None],
) -> FullDecode:
    """Decodes step by step with stock attention over the full KV.

    Args:
        model: a model whose attention implementation is the stock "sdpa".
        stock: prefilled cache; extended in place.
        first_token: the first new token, which the prefill's logits gave.
        num_tokens: new tokens to decode, `first_token` included.
        sampler: chooses the tokens.
        eos_token_ids: tokens that end the text.
        compare_with: tokens to look for a divergence from (greedy only).
        on_progress: called with the number of tokens done.

    Returns:
        Tokens, time and divergence.
    """
    tokens = [first_token]
    divergence: Divergence | None = None
    start_token_position = stock.get_seq_length()
    begin = time.perf_counter()
    with torch.inference_mode():
        while len(tokens) < num_tokens and tokens[-1] not in eos_token_ids:
            inputs = torch.tensor([tokens[-1:]])
            logits = model(inputs, past_key_values=stock, use_cache=True).logits[0, -1]
            token = sampler.choose(logits)
            if divergence is None and sampler.is_greedy and len(tokens) < len(compare_with):
                other = compare_with[len(tokens)]
                if other != token:
                    divergence = Divergence(
                        token_position=start_token_position + len(tokens),
                        logit_margin=float(logits[token].float() - logits[other].float()),
                    )
            tokens.append(token)
            on_progress(len(tokens))
    return FullDecode(tokens=tokens, seconds=time.perf_counter() - begin, divergence=divergence)
