"""Ours for `quality.py`: known tokens fed one by one to a cache that attends to selected blocks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from quality_rivals import measures
from quality_texts import Job
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from torch_bridge.huggingface.attend_cache import AttendCache, AttendLayer

BUDGETS = (0.1, 0.25, 0.5)


@dataclass(frozen=True, kw_only=True)
class Method:
    """One of ours. Presses select once; ours may select again, as they keep the full KV.

    Attributes:
        name: in the table.
        block_tokens: tokens a block.
        every_tokens: tokens between two selections by measured attention; None where every token
            selects by an estimate.
    """

    name: str
    block_tokens: int
    every_tokens: int | None

    def num_blocks(self, num_kept_tokens: float, *, num_context: int, num_steps: int) -> int:
        """Most blocks with which so many tokens are kept, over all steps.

        Kept are those attended to, but for the generated ones. Steps that attend to everything do
        not count. Presses keep all that is generated on top of their budget; in ours it is in it.

        Args:
            num_kept_tokens: what is allowed, on average.
            num_context: tokens of the context.
            num_steps: tokens fed after it.
        """
        tails, num_selected_at = [], num_context
        for num_own in range(1, num_steps + 1):
            num_tokens = num_context + num_own
            if self.every_tokens is None:
                num_selected_at = num_tokens
            elif num_tokens - num_selected_at >= self.every_tokens:
                num_selected_at = num_tokens
                continue
            num_whole = num_selected_at // self.block_tokens * self.block_tokens
            tails.append(num_tokens - num_whole - num_own)
        return math.floor((num_kept_tokens - statistics.fmean(tails)) / self.block_tokens)


OURS = (
    Method(name="estimated, blocks of 8", block_tokens=8, every_tokens=None),
    Method(name="estimated, blocks of 16", block_tokens=16, every_tokens=None),
    Method(name="estimated, blocks of 32", block_tokens=32, every_tokens=None),
    Method(name="measured every 4, blocks of 16", block_tokens=16, every_tokens=4),
)


class Prefill:
    """A context prefilled with stock attention: queries, keys and values of every layer."""

    def __init__(self, model: Any, context: list[int]) -> None:
        self._model, self._seen = model, []
        AttentionInterface.register("quality_prefill", self._attend)
        AttentionMaskInterface.register("quality_prefill", sdpa_mask)
        model.set_attn_implementation("quality_prefill")
        output = model(torch.tensor([context]), logits_to_keep=1)
        model.set_attn_implementation("sdpa")
        self.first_logits = output.logits[0]

    def _attend(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any
    ) -> Any:
        self._seen.append((query, key, value, kwargs["scaling"]))
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    def fill(self, cache: Any) -> Any:
        """Brings an empty cache to where the prefill would have left it."""
        row = 0
        for layer, (query, key, value, scale) in zip(cache.layers, self._seen, strict=True):
            layer.update(key.clone(), value)  # a cache may leave its mark on what it is handed
            if not isinstance(layer, AttendLayer):
                continue
            # As its `attend` does, without computing once more what the prefill computed.
            if row == 0:
                cache.begin_forward(key, None, is_first=True)
            for place, sequence in enumerate(cache.sequences):
                sequence.append(row, key[place], value[place])
                sequence.score(row, query[place], scale)
            cache.end_row(row)
            row += 1
        return cache

    def logits(self, cache: Any, tokens: list[int]) -> torch.Tensor:
        """Predictions of each of `tokens` in turn, [positions, vocabulary]."""
        rows = [self.first_logits]
        for token in tokens[:-1]:
            rows.append(self._model(torch.tensor([[token]]), past_key_values=cache).logits[0])
        return torch.cat(rows)

    def full_logits(self, tokens: list[int]) -> torch.Tensor:
        """As `logits` of the whole cache, in one forward."""
        cache = self.fill(DynamicCache(config=self._model.config))
        output = self._model(torch.tensor([tokens[:-1]]), past_key_values=cache)
        return torch.cat([self.first_logits, output.logits[0]])


def our_results(model: Any, job: Job, *, methods: list[Method]) -> Iterator[dict[str, Any]]:
    """One result a method and budget, of one job."""
    prefill = Prefill(model, job.context)
    full = prefill.full_logits(job.tokens)
    for method in methods:
        for budget in BUDGETS:
            yield _our_result(model, job, prefill, full, budget=budget, method=method)


def _our_result(
    model: Any, job: Job, prefill: Prefill, full: torch.Tensor, *, budget: float, method: Method
) -> dict[str, Any]:
    num_steps = len(job.tokens) - 1
    num_blocks = method.num_blocks(
        budget * len(job.context), num_context=len(job.context), num_steps=num_steps
    )
    with AttendCache(
        model,
        budget=f"{num_blocks}b",
        select_by="estimate" if method.every_tokens is None else "attention",
        reselect_every_tokens=method.every_tokens,
        block_tokens=method.block_tokens,
        layout="amx" if method.block_tokens % 32 == 0 else "vec",
        max_tokens=len(job.context) + len(job.tokens),
    ) as cache:
        prefill.fill(cache)
        sample = measures(prefill.logits(cache, job.tokens), full, job.tokens)
        (sequence,) = cache.sequences
        num_scored = max(sequence.num_scored - 1, 0)
    # A scored forward sees everything; its position says nothing of the selection.
    for place in range(num_scored):
        for values in sample.values():
            values[(place + 1) * (method.every_tokens or 0)] = None
    num_own = num_steps * (num_steps + 1) // 2
    seen = sequence.num_keys - num_own - num_scored * len(job.context)
    return {
        "job": job.name,
        "method": method.name,
        "budget": budget,
        "num_kept_tokens": round(seen / max(num_steps - num_scored, 1), 1),
        **sample,
    }
