"""What a model answers: the best token at each place of the answer, the answer itself being forced.

An answer whose every token is the best is what greedy decoding gives.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from torch_bridge.huggingface.attend_cache import AttendCache
from torch_bridge.tasks import TaskCase

_CAPACITY_TOKENS = 256
"""Caches of a few sizes: a selection is compiled once for each."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model answers, and how long it took.

    Attributes:
        token_ids: the best token at each place of the answer.
        prefill_seconds: the context but for its last token; with selected blocks, packing, the
            first selection, and the compilation of a new size too.
        decode_seconds: the forwards of one token, as many as the answer has; with selected blocks,
            those that select anew and see everything too.
    """

    token_ids: list[int]
    prefill_seconds: float
    decode_seconds: float


def answer_with_all(model: PreTrainedModel, case: TaskCase) -> Answer:
    """Best tokens with full attention and a stock cache.

    Args:
        model: A model with stock attention.
        case: Context and answer.
    """
    return _answer(model, case, DynamicCache(config=model.config))


def answer_with_blocks(model: PreTrainedModel, case: TaskCase, **options: Any) -> Answer:
    """Best tokens where every forward of one token sees the selected blocks only.

    The context is computed with full attention but for its last token, which already decodes: no
    token of the answer is a gift of the context's own forward. Forwards that select anew see
    everything, as they do in decoding.

    Args:
        model: A model with stock attention.
        case: Context and answer.
        **options: Of `AttendCache`.
    """
    num_tokens = len(case.context) + len(case.answer)
    max_tokens = -(-num_tokens // _CAPACITY_TOKENS) * _CAPACITY_TOKENS
    with AttendCache(model, max_tokens=max_tokens, **options) as cache:
        return _answer(model, case, cache)


def _answer(model: PreTrainedModel, case: TaskCase, cache: Cache) -> Answer:
    *context, last = case.context
    best: list[int] = []
    with torch.inference_mode():
        begin = time.perf_counter()
        model(torch.tensor([context]), past_key_values=cache, logits_to_keep=1)
        prefilled = time.perf_counter()
        for token in (last, *case.answer[:-1]):
            out = model(torch.tensor([[token]]), past_key_values=cache)
            best.append(int(out.logits[0, -1].argmax()))
        end = time.perf_counter()
    return Answer(token_ids=best, prefill_seconds=prefilled - begin, decode_seconds=end - prefilled)
