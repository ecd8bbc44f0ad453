"""How well compacted attention predicts, beside kvpress at equal budgets, in one run.

    python benchmarks/quality.py --json PATH [--kvpress-python ENV/bin/python]

Contexts are prefilled with full attention; then tokens that are known are fed one by one, and each
prediction is compared with that of the whole cache: KL divergence, equal best token, and for
needles whether the answer's own tokens are found. Texts are sources of the standard library and
Python's manual by turns; needles are numbers asked for at the end of a text. Ours never attend to
more tokens than the presses keep. All samples are stored. Nothing here is timed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from quality_rivals import measures
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from blockcompact_jax.provenance import machine, package_versions
from torch_bridge.huggingface.attend_cache import AttendCache, AttendLayer
from torch_bridge.models.load import LoadedModel, load_model
from torch_bridge.prompts import build_prompt
from torch_bridge.tasks import TaskText, make_case

MODELS = ("smollm2-135m", "gemma3-270m")
BUDGETS = (0.1, 0.25, 0.5)
NEVER = 10**9


@dataclass(frozen=True, kw_only=True)
class Method:
    """One of ours. Presses select once; ours may select again, as they keep the full KV.

    Attributes:
        name: in the table.
        block_tokens: tokens a block.
        every_tokens: tokens between two selections.
    """

    name: str
    block_tokens: int
    every_tokens: int


OURS = (
    Method(name="blocks of 16", block_tokens=16, every_tokens=4),
    Method(name="blocks of 16, once", block_tokens=16, every_tokens=NEVER),
    Method(name="blocks of 32", block_tokens=32, every_tokens=4),
    Method(name="blocks of 32, every 16", block_tokens=32, every_tokens=16),
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A context and the tokens that follow it."""

    name: str
    context: list[int]
    tokens: list[int]


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


def text_jobs(tokenizer: Any, *, context_tokens: int, num_tokens: int, num_texts: int) -> list[Job]:
    step = context_tokens + num_tokens
    manual = "\n\n".join(topics[name] for name in sorted(topics))
    num_each = -(-num_texts // 2)
    ids_by_kind = {
        kind: build_prompt(tokenizer, context_tokens=num_each * step, prompt=text).token_ids
        for kind, text in (("code", None), ("manual", manual))
    }
    return [
        Job(
            name=f"text {place}, {kind}",
            context=ids[place * step :][:context_tokens],
            tokens=ids[place * step + context_tokens :][:num_tokens],
        )
        for place in range(num_each)
        for kind, ids in ids_by_kind.items()
    ][:num_texts]


def needle_jobs(tokenizer: Any, *, context_tokens: int, num_needles: int) -> list[Job]:
    """Numbers hidden at several depths of a text and asked for at its end."""
    text = TaskText(tokenizer)
    cases = [
        make_case(
            "needle", text, context_tokens=context_tokens, case=place, num_cases=num_needles, seed=0
        )
        for place in range(num_needles)
    ]
    return [
        Job(name=f"needle {place}", context=case.context, tokens=case.answer)
        for place, case in enumerate(cases)
    ]


def our_results(model: Any, jobs: list[Job]) -> list[dict[str, Any]]:
    results = []
    for job in jobs:
        prefill = Prefill(model, job.context)
        full = prefill.full_logits(job.tokens)
        for budget in BUDGETS:
            for method in OURS:
                results.append(_our_result(model, job, prefill, full, budget=budget, method=method))
        print(f"ours: {job.name}", file=sys.stderr, flush=True)
    return results


def _our_result(
    model: Any, job: Job, prefill: Prefill, full: torch.Tensor, *, budget: float, method: Method
) -> dict[str, Any]:
    num_blocks = math.floor(budget * len(job.context) / method.block_tokens)
    with AttendCache(
        model,
        budget=f"{num_blocks}b",
        reselect_every_tokens=method.every_tokens,
        block_tokens=method.block_tokens,
        layout="amx" if method.block_tokens % 32 == 0 else "vec",
    ) as cache:
        prefill.fill(cache)
        sample = measures(prefill.logits(cache, job.tokens), full, job.tokens)
        (sequence,) = cache.sequences
        num_scored = sequence.num_scored - 1
    # A scored forward sees everything; its position says nothing of the selection.
    for place in range(num_scored):
        for values in sample.values():
            values[(place + 1) * method.every_tokens] = None
    num_steps = len(job.tokens) - 1
    num_own = num_steps * (num_steps + 1) // 2
    seen = sequence.num_keys - num_own - num_scored * len(job.context)
    return {
        "job": job.name,
        "method": method.name,
        "budget": budget,
        "num_kept_tokens": round(seen / max(num_steps - num_scored, 1), 1),
        **sample,
    }


def kvpress_results(python: str, loaded: LoadedModel, jobs: list[Job]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder, "jobs.json"), Path(folder, "results.json")
        document = {
            "model_path": str(loaded.path),
            "budgets": BUDGETS,
            "block_tokens": sorted({method.block_tokens for method in OURS}),
            "jobs": [vars(job) for job in jobs],
        }
        given.write_text(json.dumps(document))
        script = Path(__file__).with_name("quality_rivals.py")
        subprocess.run([python, str(script), str(given), str(found)], check=True)
        return json.loads(found.read_text())


def kvpress_versions(python: str) -> dict[str, str]:
    """Versions in the environment of the presses."""
    program = (
        "import json; from importlib.metadata import version; "
        "print(json.dumps({name: version(name) for name in ('kvpress', 'torch', 'transformers')}))"
    )
    done = subprocess.run([python, "-c", program], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def rows_of(model: str, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a method and budget: over the same positions of a job for all of them.

    The first prediction comes from the prefill; where one of ours attended to everything, no
    method's prediction counts. `samples` holds every position of every job.
    """
    places_by_job = _common_places(results)
    rows = []
    for method, budget in dict.fromkeys((r["method"], r["budget"]) for r in results):
        mine = [r for r in results if (r["method"], r["budget"]) == (method, budget)]
        texts = [r for r in mine if r["job"].startswith("text")]
        needles = [r for r in mine if r["job"].startswith("needle")]
        values = {
            "kl": _values(texts, "kl", places_by_job),
            "top1": _values(texts, "is_top1_equal", places_by_job),
            "needle_recall": _values(needles, "is_token_found", places_by_job),
        }
        rows.append(
            {
                "model": model,
                "method": method,
                "budget": budget,
                "num_kept_tokens": statistics.fmean(r["num_kept_tokens"] for r in texts or mine),
                **{name: statistics.fmean(all_) if all_ else None for name, all_ in values.items()},
                "kl_median": statistics.median(values["kl"]) if texts else None,
                "samples": [
                    {name: value for name, value in r.items() if name not in ("method", "budget")}
                    for r in mine
                ],
            }
        )
    return sorted(rows, key=lambda row: (row["budget"], row["kl"] or 0.0))


def _common_places(results: list[dict[str, Any]]) -> dict[str, list[int]]:
    return {
        job: [
            place
            for place in range(1, len(given["kl"]))
            if all(r["kl"][place] is not None for r in results if r["job"] == job)
        ]
        for job, given in {r["job"]: r for r in results}.items()
    }


def _values(
    results: list[dict[str, Any]], name: str, places_by_job: dict[str, list[int]]
) -> list[Any]:
    return [r[name][place] for r in results for place in places_by_job[r["job"]]]


def print_rows(rows: list[dict[str, Any]]) -> None:
    print(f"{'method':32}{'budget':>7}{'kept':>8}{'KL':>8}{'median':>8}{'top-1':>8}{'needle':>8}")
    for row in rows:
        print(
            f"{row['method']:32}{row['budget']:7.0%}{row['num_kept_tokens']:8.0f}"
            + "".join(
                f"{'-' if row[key] is None else format(row[key], '.3f'):>8}"
                for key in ("kl", "kl_median", "top1", "needle_recall")
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="file to write results to")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="names or paths")
    parser.add_argument("--kvpress-python", help="interpreter of an environment with kvpress")
    parser.add_argument("--context", type=int, default=2048, help="tokens of each context")
    parser.add_argument("--tokens", type=int, default=40, help="tokens predicted after a text")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--needles", type=int, default=3)
    arguments = parser.parse_args()
    python = arguments.kvpress_python
    if python is None and importlib.util.find_spec("kvpress") is not None:
        python = sys.executable
    document: dict[str, Any] = {
        "machine": machine(),
        "versions": package_versions(),
        "kvpress_versions": "not installed" if python is None else kvpress_versions(python),
        "arguments": {
            name: value
            for name, value in vars(arguments).items()
            if name not in ("json", "kvpress_python")
        },
        "results": [],
    }
    for name in arguments.models:
        loaded = load_model(name, dtype=torch.float32)
        jobs = [
            *text_jobs(
                loaded.tokenizer,
                context_tokens=arguments.context,
                num_tokens=arguments.tokens,
                num_texts=arguments.texts,
            ),
            *needle_jobs(
                loaded.tokenizer, context_tokens=arguments.context, num_needles=arguments.needles
            ),
        ]
        with torch.inference_mode():
            results = our_results(loaded.model, jobs)
        if python is not None:
            results += kvpress_results(python, loaded, jobs)
        rows = rows_of(name, results)
        document["results"] += rows
        arguments.json.write_text(json.dumps(document) + "\n")
        print(f"\n{name}, {arguments.context:,} tokens")
        print_rows(rows)
    if python is None:
        print("kvpress: not installed")


if __name__ == "__main__":
    main()
