"""Lossless decoding against plain full-KV decoding, on real models, each run in its own process.

    python benchmarks/end_to_end.py --json benchmarks/results/end_to_end.json

A row is one configuration. Ratios come from within one process (`speedup_vs_full`); peak memory is
that of two processes, one that only decodes with the full KV and one that only decodes compacted.
All samples are stored.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stored import store

NUM_NEW_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One configuration of the main job."""

    model: str
    dtype: str
    context: int
    budget: str
    lookup_tokens: int


WORKLOADS = {
    "long": [
        Workload(model="smollm2-135m", dtype=dtype, context=8000, budget="10%", lookup_tokens=7)
        for dtype in ("bfloat16", "float32")
    ],
    "long-without-lookup": [
        Workload(model="smollm2-135m", dtype=dtype, context=8000, budget="10%", lookup_tokens=0)
        for dtype in ("bfloat16", "float32")
    ],
    "short": [
        Workload(model=model, dtype=dtype, context=2048, budget="25%", lookup_tokens=7)
        for model in ("smollm2-135m", "gemma3-270m")
        for dtype in ("float32", "bfloat16")
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="file to write results to")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each workload")
    parser.add_argument("--set", choices=[*WORKLOADS, "all"], default="all", dest="chosen")
    parser.add_argument("--plain", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plain is not None:
        print(json.dumps(plain_run(Workload(**json.loads(arguments.plain)))))
        return
    names = list(WORKLOADS) if arguments.chosen == "all" else [arguments.chosen]
    workloads = [workload for name in names for workload in WORKLOADS[name]]
    samples: list[list[dict[str, Any]]] = [[] for _ in workloads]
    for repeat in range(arguments.repeats):  # interleaved: noise meets every workload alike
        for workload, rows in zip(workloads, samples, strict=True):
            print(f"{repeat + 1}/{arguments.repeats} {workload}", file=sys.stderr, flush=True)
            rows.append(compacted_run(workload))
    results = []
    for workload, rows in zip(workloads, samples, strict=True):
        results.append(row_of(workload, rows, peaks_of(workload)))
    store(arguments.json, results)
    for result in results:
        summary = {key: value for key, value in result.items() if key != "samples"}
        print(json.dumps(summary))


def compacted_run(workload: Workload, *, compare_full: bool = True) -> dict[str, Any]:
    """Runs `blockcompact run --json` and returns its object."""
    command = [str(Path(sys.executable).with_name("blockcompact")), "run", "--json"]
    for option, value in asdict(workload).items():
        command += [f"--{option.replace('_', '-')}", str(value)]
    command += ["--new-tokens", str(NUM_NEW_TOKENS)]
    command += [] if compare_full else ["--no-compare-full"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return json.loads(done.stdout)


def peaks_of(workload: Workload) -> dict[str, int]:
    """Peak resident set of a process that decodes plainly, and of one that decodes compacted."""
    described = json.dumps(asdict(workload))
    command = [sys.executable, __file__, "--json", "-", "--plain", described]
    plain = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    compacted = compacted_run(workload, compare_full=False)
    return {
        "plain_peak_bytes": json.loads(plain.stdout)["peak_bytes"],
        "compacted_peak_bytes": compacted["memory_bytes"]["process_peak"],
    }


def plain_run(workload: Workload) -> dict[str, int]:
    """What a user without compaction runs: stock cache, stock attention, step by step."""
    import torch
    from transformers import DynamicCache

    from torch_bridge.models.load import load_model
    from torch_bridge.prompts import build_prompt

    loaded = load_model(workload.model, dtype=getattr(torch, workload.dtype))
    prompt = build_prompt(loaded.tokenizer, context_tokens=workload.context)
    cache = DynamicCache(config=loaded.model.config)
    inputs = torch.tensor([prompt.token_ids])
    with torch.inference_mode():
        for _ in range(NUM_NEW_TOKENS):
            logits = loaded.model(inputs, past_key_values=cache, logits_to_keep=1).logits
            inputs = logits[:, -1].argmax(-1, keepdim=True)
    return {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def row_of(
    workload: Workload, samples: list[dict[str, Any]], peaks: dict[str, int]
) -> dict[str, Any]:
    """Medians of a workload's samples beside the samples themselves."""
    return {
        "workload": asdict(workload),
        "speedup_vs_full": statistics.median(sample["speedup_vs_full"] for sample in samples),
        "tokens_identical_to_full": [sample["tokens_identical_to_full"] for sample in samples],
        "first_divergence": samples[0]["first_divergence"],
        "acceptance_rate": samples[0]["acceptance_rate"],
        "tokens_per_round": samples[0]["tokens_per_round"],
        "tokens_per_draft_forward": samples[0]["tokens_per_draft_forward"],
        "full_ms_per_token": _median_ms(samples, "full_decode"),
        "compacted_ms_per_token": _median_ms(samples, "compacted_decode"),
        "peak_ratio": peaks["compacted_peak_bytes"] / peaks["plain_peak_bytes"],
        **peaks,
        "samples": samples,
    }


def _median_ms(samples: list[dict[str, Any]], part: str) -> float:
    return statistics.median(
        1000 * sample["seconds"][part] / sample["new_tokens"] for sample in samples
    )


if __name__ == "__main__":
    main()
