"""Cache compression of kvpress on jobs that `quality.py` made; runs in kvpress's own environment.

    python benchmarks/quality_rivals.py JOBS

kvpress needs an older transformers than this project, so nothing of the project is imported here.
Each context is prefilled once; the presses then compress what that prefill left. Every result is a
line of JSON on the standard output.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.utils import logging


def measures(logits: torch.Tensor, full: torch.Tensor, tokens: list[int]) -> dict[str, list[Any]]:
    """Compares predictions position by position.

    Args:
        logits: [positions, vocabulary] of the compressed cache.
        full: as `logits`, of the whole cache.
        tokens: the tokens that really come.
    """
    reference = full.float().log_softmax(-1)
    kl = (reference.exp() * (reference - logits.float().log_softmax(-1))).sum(-1)
    best = logits.argmax(-1)
    return {
        "kl": [round(value, 6) for value in kl.tolist()],
        "is_top1_equal": (best == full.argmax(-1)).int().tolist(),
        "is_token_found": (best == torch.tensor(tokens)).int().tolist(),
    }


def presses() -> dict[str, Callable[[float], Any]]:
    """The presses compared with, by name; each takes the share of tokens to remove."""
    from kvpress import (
        ChunkKVPress,
        ExpectedAttentionPress,
        SnapKVPress,
        StreamingLLMPress,
        TOVAPress,
    )

    def snap(ratio: float) -> Any:
        return SnapKVPress(compression_ratio=ratio, window_size=32)

    def expected(ratio: float) -> Any:
        return ExpectedAttentionPress(compression_ratio=ratio)

    def chunked(inner: Callable[[float], Any], size: int) -> Callable[[float], Any]:
        return lambda ratio: ChunkKVPress(press=inner(ratio), chunk_length=size)

    return {
        "SnapKV": snap,
        "TOVA": lambda ratio: TOVAPress(compression_ratio=ratio),
        "ExpectedAttention": expected,
        "StreamingLLM": lambda ratio: StreamingLLMPress(compression_ratio=ratio),
        **{f"ChunkKV(SnapKV), {size}": chunked(snap, size) for size in (8, 16, 32)},
        "ChunkKV(ExpectedAttention), 16": chunked(expected, 16),
    }


def full_rotation(rotary: Any) -> Any:
    """The rotary embedding of full-attention layers, where a model has others as well."""
    if not hasattr(rotary, "full_attention_inv_freq"):
        return rotary
    return functools.partial(rotary, layer_type="full_attention")


class Prefill:
    """A prefilled context: its cache, and what each full-attention layer saw."""

    def __init__(self, model: Any, context: list[int]) -> None:
        self.model, self.num_tokens = model, len(context)
        self.cache = DynamicCache(config=model.config)
        self.seen: dict[int, tuple[Any, dict[str, Any]]] = {}
        attentions = [
            layer.self_attn
            for layer in model.model.layers
            if getattr(layer.self_attn, "sliding_window", None) is None
        ]
        hooks = [each.register_forward_hook(self._see, with_kwargs=True) for each in attentions]
        for attention in attentions:  # some presses rotate queries themselves
            attention.rotary_emb = full_rotation(model.model.rotary_emb)
        output = model(torch.tensor([context]), past_key_values=self.cache, logits_to_keep=1)
        self.first_logits = output.logits[0]
        for hook in hooks:
            hook.remove()

    def _see(self, module: Any, _: Any, kwargs: dict[str, Any], output: Any) -> None:
        self.seen[module.layer_idx] = (module, kwargs)

    def compressed(self, press: Any | None) -> tuple[DynamicCache, int]:
        """A cache to decode from, and the tokens it keeps in a full-attention layer."""
        cache: Any = DynamicCache(config=self.model.config)
        num_kept = self.num_tokens
        if press is not None:
            press.post_init_from_model(self.model)
        for index, (ours, stock) in enumerate(zip(cache.layers, self.cache.layers, strict=True)):
            keys, values = stock.keys.clone(), stock.values.clone()
            if press is not None and index in self.seen:
                module, kwargs = self.seen[index]
                hidden = kwargs["hidden_states"]
                keys, values = press.compress(module, hidden, keys, values, None, kwargs)
                num_kept = keys.shape[2]
            ours.update(keys, values)
            if index not in self.seen:
                ours.cumulative_length = stock.cumulative_length
        return cache, num_kept

    def logits(self, cache: DynamicCache, num_kept: int, tokens: list[int]) -> torch.Tensor:
        """Predictions of each of `tokens` in turn, [positions, vocabulary], in one forward."""
        num_new = len(tokens) - 1
        inputs = torch.tensor([tokens[:-1]])
        positions = torch.arange(self.num_tokens, self.num_tokens + num_new)
        visible = torch.ones(1, 1, num_new, num_kept + num_new, dtype=torch.bool).tril(num_kept)
        masks: Any = visible  # of the positions kept, whatever their numbers
        if any(cache.is_sliding):
            window = create_sliding_window_causal_mask(
                config=self.model.config,
                inputs_embeds=self.model.get_input_embeddings()(inputs),
                attention_mask=None,
                cache_position=positions,
                past_key_values=cache,
            )
            masks = {"full_attention": visible, "sliding_attention": window}
        output = self.model(
            inputs,
            past_key_values=cache,
            attention_mask=masks,
            position_ids=positions[None],
            cache_position=positions,
        )
        return torch.cat([self.first_logits, output.logits[0]])


def main() -> None:
    (jobs_path,) = map(Path, sys.argv[1:])
    given = json.loads(jobs_path.read_text())
    done = {tuple(unit) for unit in given["done"]}
    logging.disable_progress_bar()
    dtype = getattr(torch, given["dtype"])
    model = AutoModelForCausalLM.from_pretrained(given["model_path"], dtype=dtype).eval()
    with torch.inference_mode():
        for job in given["jobs"]:
            methods = {
                name: make for name, make in presses().items() if (job["name"], name) not in done
            }
            if not methods:
                continue
            prefill, tokens = Prefill(model, job["context"]), job["tokens"]
            full = prefill.logits(*prefill.compressed(None), tokens)
            for name, make in methods.items():
                for budget in given["budgets"]:
                    cache, num_kept = prefill.compressed(make(1 - budget))
                    sample = measures(prefill.logits(cache, num_kept, tokens), full, tokens)
                    labels = {"job": job["name"], "method": name, "budget": budget}
                    print(json.dumps({**labels, "num_kept_tokens": num_kept, **sample}), flush=True)


if __name__ == "__main__":
    main()
