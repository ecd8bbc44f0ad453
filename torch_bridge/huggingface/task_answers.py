"""What a model answers: the best token at each place of the answer, the answer itself being forced.

An answer whose every token is the best is what greedy decoding gives.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from torch_bridge.huggingface.attend_cache import AttendCache
from torch_bridge.tasks import TaskCase

_CAPACITY_TOKENS = 256
"""Caches of a few sizes: a selection is compiled once for each."""


def answer_with_all(model: PreTrainedModel, case: TaskCase) -> list[int]:
    """Best tokens with full attention, in one forward.

    Args:
        model: A model with stock attention.
        case: Context and answer.

    Returns:
        Vocabulary IDs, as many as the answer has.
    """
    tokens = torch.tensor([[*case.context, *case.answer[:-1]]])
    with torch.inference_mode():
        logits = model(tokens, use_cache=False, logits_to_keep=len(case.answer)).logits[0]
    return logits.argmax(dim=-1).tolist()


def answer_with_blocks(model: PreTrainedModel, case: TaskCase, **options: Any) -> list[int]:
    """Best tokens where every forward of one token sees the selected blocks only.

    The context is computed with full attention but for its last token, which already decodes: no
    token of the answer is a gift of the context's own forward. Forwards that select anew see
    everything, as they do in decoding.

    Args:
        model: A model with stock attention.
        case: Context and answer.
        **options: Of `AttendCache`.

    Returns:
        Vocabulary IDs, as many as the answer has.
    """
    best: list[int] = []
    num_tokens = len(case.context) + len(case.answer)
    max_tokens = -(-num_tokens // _CAPACITY_TOKENS) * _CAPACITY_TOKENS
    *context, last = case.context
    with torch.inference_mode(), AttendCache(model, max_tokens=max_tokens, **options) as cache:
        model(torch.tensor([context]), past_key_values=cache, logits_to_keep=1)
        for token in (last, *case.answer[:-1]):
            out = model(torch.tensor([[token]]), past_key_values=cache)
            best.append(int(out.logits[0, -1].argmax()))
    return best
