"""Steps of `generate()` with an `AttendCache`, by what selects, against stock SDPA, interleaved.

    python benchmarks/attend_cache.py --json benchmarks/results/attend_cache.json

One model decodes with three caches in turn, a few steps each: transformers' own (every key is
read), and two with a budget of 10 %: `attention`, which selects anew every 4 tokens in a step that
attends to everything, and `estimate`, which selects at every token. The KV of the prompt is random
and put into the caches as a prompt's, without computing attention over it: what a step takes
depends on the lengths alone. All samples are stored; a mean is over whole periods of re-selection.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from stored import store
from transformers import DynamicCache

from torch_bridge.huggingface.attend_cache import AttendCache, AttendLayer
from torch_bridge.models.load import load_model

MODEL, BUDGET, EVERY_TOKENS = "smollm2-135m", "10%", 4
STOCK = "stock SDPA"
SELECTIONS = {"attention": {"reselect_every_tokens": EVERY_TOKENS}, "estimate": {}}
NUM_QUERIES = 16  # newest ones of a prompt, which score it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write results to")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8000])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3, help="phases of each cache")
    parser.add_argument("--steps", type=int, default=8, help="of a phase; whole periods")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.steps % EVERY_TOKENS:
        parser.error(f"`--steps` is {arguments.steps}, expected a multiple of {EVERY_TOKENS}")
    torch.set_num_threads(arguments.threads)
    results = []
    for dtype in arguments.dtypes:
        model = load_model(MODEL, dtype=getattr(torch, dtype)).model
        for context in arguments.contexts:
            samples = measure(model, context, arguments.rounds, arguments.steps)
            results += list(rows(samples, dtype=dtype, context=context))
    store(
        arguments.json,
        results,
        model=MODEL,
        budget=BUDGET,
        reselect_every_tokens=EVERY_TOKENS,
        num_threads=arguments.threads,
    )


def rows(samples: dict[str, list[float]], *, dtype: str, context: int) -> list[dict[str, Any]]:
    """One row of each contender."""
    stock_ms = statistics.fmean(samples[STOCK])
    print(f"{dtype}, {context} tokens")
    for name, steps in samples.items():
        print(f"  {name:12s} {statistics.fmean(steps):7.1f} ms", end="")
        print(f"  {statistics.fmean(steps) / stock_ms:5.2f} x stock")
    return [
        {
            "workload": f"{MODEL}, {dtype}, {context} tokens, budget {BUDGET}",
            "implementation": name,
            "dtype": dtype,
            "context": context,
            "mean_step_ms": round(statistics.fmean(steps), 2),
            "median_step_ms": round(statistics.median(steps), 2),
            "step_time_of_stock": round(statistics.fmean(steps) / stock_ms, 3),
            "samples_ms": [round(step, 2) for step in steps],
        }
        for name, steps in samples.items()
    ]


def measure(model: Any, context: int, num_rounds: int, num_steps: int) -> dict[str, list[float]]:
    """Milliseconds of every step."""
    samples: dict[str, list[float]] = {name: [] for name in (STOCK, *SELECTIONS)}
    with ExitStack() as stack, torch.inference_mode():
        caches: dict[str, Any] = {STOCK: filled_stock(model, context)}
        for name, options in SELECTIONS.items():
            cache = AttendCache(model, budget=BUDGET, select_by=name, **options)
            caches[name] = stack.enter_context(cache)
            fill(cache, model, context)
        order, ours = list(caches), model.config._attn_implementation
        for number in range(-1, num_rounds):  # the first is thrown away
            first = number % len(order)
            for name in order[first:] + order[:first]:
                model.set_attn_implementation("sdpa" if name == STOCK else ours)
                steps = [step(model, caches[name]) for _ in range(num_steps)]
                samples[name] += steps if number >= 0 else []
        model.set_attn_implementation(ours)
    return samples


def step(model: Any, cache: Any) -> float:
    """Milliseconds of one decoded token."""
    begun = time.perf_counter()
    out = model(input_ids=torch.tensor([[7]]), past_key_values=cache, use_cache=True)
    out.logits[0, -1].argmax()
    return (time.perf_counter() - begun) * 1e3


def filled_stock(model: Any, context: int) -> DynamicCache:
    """Transformers' own cache with a prompt of so many tokens."""
    cache = DynamicCache(config=model.config)
    for row in range(model.config.num_hidden_layers):
        draw = drawing(model, row)
        heads = model.config.num_key_value_heads
        cache.update(draw(heads, context)[None], draw(heads, context)[None], row)
    return cache


def fill(cache: AttendCache, model: Any, context: int) -> None:
    """The same prompt in an attend cache, written, summarized and scored as any."""
    config = model.config
    for row, layer in enumerate(cache.layers):
        if not isinstance(layer, AttendLayer):
            raise SystemExit("the model has sliding-window layers; take one without")
        draw = drawing(model, row)
        key, value = (draw(config.num_key_value_heads, context) for _ in range(2))
        layer.update(key[None], value[None])
        if row == 0:
            cache.begin_forward(key[None], None, is_first=True)
        (sequence,) = cache.sequences
        sequence.append(row, key, value)
        query = draw(config.num_attention_heads, NUM_QUERIES)
        sequence.score(row, query, config.head_dim**-0.5)
        cache.end_row(row)


def drawing(model: Any, row: int) -> Callable[[int, int], torch.Tensor]:
    """Draws [heads, tokens, head_dim], the same in every cache."""
    generator = torch.Generator().manual_seed(row)
    dims, dtype = model.config.head_dim, model.dtype

    def draw(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(heads, tokens, dims, generator=generator).to(dtype)

    return draw


if __name__ == "__main__":
    main()
