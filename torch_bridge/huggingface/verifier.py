"""The half of a session with the full KV: what the target model itself says about a draft."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from torch_bridge.full import FullKV
from torch_bridge.huggingface.attention import BLOCKS_KEYWORD, attention_over_blocks
from torch_bridge.huggingface.block_attention import BlockAttention
from torch_bridge.huggingface.cache import CompactedCache, Phase
from torch_bridge.huggingface.layers import UnsupportedModelError


class BlockForward:
    """Runs a model over a cache whose full-attention layers attend over blocks."""

    def __init__(self, model: PreTrainedModel, cache: CompactedCache) -> None:
        self._model = model
        self._cache = cache

    def __call__(
        self,
        phase: Phase,
        blocks: BlockAttention,
        token_ids: list[int],
        *,
        is_scored: bool = False,
        logits_to_keep: int = 0,
    ) -> torch.Tensor:
        """Runs the next tokens.

        Args:
            phase: which KV is read and written.
            blocks: attention over the cache's blocks.
            token_ids: the next tokens.
            is_scored: whether to record block mass.
            logits_to_keep: newest tokens whose logits are computed; 0 for all.

        Returns:
            Logits [num_tokens, vocabulary].
        """
        cache = self._cache
        cache.phase = phase
        blocks.is_scored, blocks.num_layers_attended = is_scored, 0
        with torch.inference_mode(), attention_over_blocks():
            logits = self._model(
                torch.from_numpy(np.asarray([token_ids])),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=logits_to_keep,
                **{BLOCKS_KEYWORD: blocks},
            ).logits[0]
        num_rows = cache.full.shape.num_rows
        if blocks.num_layers_attended != num_rows:
            raise UnsupportedModelError(
                f"{type(self._model).__name__} attended over blocks in "
                f"{blocks.num_layers_attended} of {num_rows} full-attention "
                "layers; expected all. Its forward does not hand keywords to attention; this "
                "architecture is not supported."
            )
        if is_scored:
            blocks.repeat_oldest(len(token_ids))
        return logits


class Verifier(Protocol):
    """What a session asks of the half with the full KV, in this process or another.

    A round is `verify`, `keep`, `pack`.
    """

    def prefill(self, token_ids: list[int]) -> torch.Tensor:
        """Runs the whole context and scores it; returns logits [vocabulary] after it."""
        ...

    def verify(self, token_ids: list[int], *, is_scored: bool) -> torch.Tensor:
        """Runs tokens after the kept ones; returns logits [num_tokens, vocabulary]."""
        ...

    def keep(self, num_tokens: int) -> None:
        """Forgets all but the first `num_tokens` tokens; the session's cache has just these."""
        ...

    def pack(self, num_tokens: int) -> None:
        """Packs whole blocks of kept tokens, before the next verification or upload at latest."""
        ...


class LocalVerifier:
    """A `Verifier` in this process, whose cache may also be the draft's."""

    def __init__(
        self, forward: BlockForward, cache: CompactedCache, full: FullKV, blocks: BlockAttention
    ) -> None:
        self._forward = forward
        self._cache = cache
        self._full = full
        self._blocks = blocks

    def prefill(self, token_ids: list[int]) -> torch.Tensor:
        """Runs the whole context and scores it; returns logits [vocabulary] after it."""
        logits = self._forward(
            Phase.VERIFY, self._blocks, token_ids, is_scored=True, logits_to_keep=1
        )[0]
        self._cache.trim_windows()
        return logits

    def verify(self, token_ids: list[int], *, is_scored: bool) -> torch.Tensor:
        """Runs tokens after the kept ones; returns logits [num_tokens, vocabulary]."""
        return self._forward(Phase.VERIFY, self._blocks, token_ids, is_scored=is_scored)

    def keep(self, num_tokens: int) -> None:
        """Forgets all but the first `num_tokens` tokens."""
        self._cache.rollback(self._cache.get_seq_length() - num_tokens)
        self._cache.trim_windows()

    def pack(self, num_tokens: int) -> None:
        """Packs whole blocks of kept tokens."""
        self._full.pack(num_tokens)
