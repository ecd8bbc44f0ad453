"""Planning against what else would give the same answer, side by side in one process.

    python benchmarks/planning.py --json benchmarks/results/planning.json
    python benchmarks/planning.py --json benchmarks/results/planning.json --workload 32x4096x512

A run with `--workload` replaces the rows of that workload (or growth axis) in the file.

The common job of all `rank` rows: the best `wanted` of `blocks` by (-score, block) in each layer,
without the held ones, ascending, HOLE padded. All do only that: `rank: native` is the custom call,
`rank: pure` plain JAX. The `step` rows also reserve, plan the upload, commit, retain and free, on
either operations. `0-delta` checks first, as the runtime does, and publishes the revision;
`0-delta, planned` plans and commits all the same, and `check that finds a change` is what checking
first adds to a full step. `dispatch floor` is a jitted call of the same operands and result that
ranks nothing. Every answer is compared with a stable sort before it is timed, and a wrong one ends
the run. Implementations take turns, so noise meets all alike. All samples are stored, in
microseconds. `step floor` are two jitted calls that take what a plan and a commit take, give the
arrays that those compute, and compute nothing. `was_machine_shared` says whether other processes
ran meanwhile; null where that is not measured.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from planning_load import Others
from planning_rivals import (
    Call,
    Inputs,
    Workload,
    build_twin,
    check,
    cpp_ranks,
    make_inputs,
    numpy_rank,
    torch_rank,
)
from planning_steps import NUM_REQUESTS, Step, dispatch, rank_native, rank_pure

from blockcompact_jax.kernels import NativeOperations, build_info
from blockcompact_jax.operations import PURE_OPERATIONS, PlanOperations
from blockcompact_jax.provenance import machine, package_versions

SETTLE_S = 0.005
"""Before each call: the workers of the last one, such as OpenMP's, stop spinning meanwhile."""

OPERATIONS: tuple[PlanOperations, ...] = (NativeOperations(), PURE_OPERATIONS)
WORKLOADS = (
    Workload(layers=30, blocks=250, wanted=25),
    Workload(layers=32, blocks=512, wanted=64),
    Workload(layers=32, blocks=4096, wanted=512),
    Workload(layers=80, blocks=4096, wanted=512),
    Workload(layers=80, blocks=32768, wanted=2048),
)
QUICK = (Workload(layers=4, blocks=256, wanted=32),)
GROWTH = {
    "blocks": [Workload(layers=32, blocks=n, wanted=n // 8) for n in (1024, 2048, 4096, 8192)],
    "layers": [Workload(layers=n, blocks=4096, wanted=512) for n in (16, 32, 64, 128)],
}
QUICK_GROWTH = {
    "blocks": [Workload(layers=4, blocks=n, wanted=n // 8) for n in (128, 256)],
    "layers": [Workload(layers=n, blocks=128, wanted=16) for n in (2, 4)],
}


def rank_calls(workload: Workload, inputs: Inputs, library: ctypes.CDLL | None) -> dict[str, Call]:
    """Every ranking, checked on these inputs and on tied ones."""
    tied = make_inputs(workload, has_ties=True)
    for name, call in _rank_calls(workload, tied, library).items():
        check(f"{name} with ties ({workload.name})", call(), tied.expected)
    calls = _rank_calls(workload, inputs, library)
    for name, call in calls.items():
        check(f"{name} ({workload.name})", call(), inputs.expected)
    return calls


def _rank_calls(workload: Workload, inputs: Inputs, library: ctypes.CDLL | None) -> dict[str, Call]:
    scores, is_held = jnp.asarray(inputs.scores), jnp.asarray(inputs.is_held)
    calls: dict[str, Call] = {
        "rank: native": lambda: rank_native(scores, is_held, workload.wanted).block_until_ready(),
        "rank: pure": lambda: rank_pure(scores, is_held, workload.wanted).block_until_ready(),
        "rank: numpy": numpy_rank(workload, inputs),
    }
    for num_threads in dict.fromkeys((1, os.cpu_count() or 1)):
        with_torch = torch_rank(workload, inputs, num_threads)
        if with_torch is not None:
            calls[f"rank: torch, {num_threads} threads"] = with_torch
    return calls | cpp_ranks(workload, inputs, library)


def time_in_turns(calls: dict[str, Call], num_samples: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(num_samples + 1):
        for name, call in calls.items():
            time.sleep(SETTLE_S)
            start = time.perf_counter()
            call()
            elapsed_us = (time.perf_counter() - start) * 1e6
            if repeat > 0:  # the first turn warms up
                samples[name].append(elapsed_us)
    return samples


def rows_of(
    workload: Workload, samples: dict[str, list[float]], others: Others
) -> list[dict[str, Any]]:
    return [
        {
            "workload": workload.name,
            "implementation": name,
            "median_us": statistics.median(values),
            "samples": values,
            "machine": machine()["processor"],
            "was_machine_shared": others.were_running(),
        }
        for name, values in samples.items()
    ]


def growth_rows(axis: str, workloads: list[Workload], num_samples: int) -> list[dict[str, Any]]:
    """Exponent of time in blocks or layers, by least squares on logarithms."""
    medians: dict[str, list[float]] = {}
    others = Others()
    for workload in workloads:
        inputs = make_inputs(workload)
        ranks = rank_calls(workload, inputs, None)
        calls = {name: ranks[name] for name in ("rank: native", "rank: pure")}
        for operations in OPERATIONS:
            name = f"step, {operations.name}: plan and commit"
            calls[name] = Step(workload, inputs, operations).full_call()
        for name, values in time_in_turns(calls, num_samples).items():
            medians.setdefault(name, []).append(statistics.median(values))
    sizes = [getattr(workload, axis) for workload in workloads]
    return [
        {
            "axis": axis,
            "implementation": name,
            "exponent": float(np.polyfit(np.log(sizes), np.log(values), 1)[0]),
            "sizes": sizes,
            "median_us": values,
            "was_machine_shared": others.were_running(),
        }
        for name, values in medians.items()
    ]


def ratios_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every rival's time under ours, within one workload of one run."""
    ratios = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        median = {r["implementation"]: r["median_us"] for r in rows if r["workload"] == workload}
        ours = ("rank: native", "rank: pure")
        rivals = [key for key in median if key.startswith("rank: ") and key not in ours]
        pairs = [(o, r) for o in ours for r in rivals]
        pairs.append(("rank: native", "dispatch floor"))
        for step in (f"step, {operations.name}" for operations in OPERATIONS):
            full = f"{step}: plan and commit"
            for part in ("0-delta", "0-delta, planned", "check that finds a change"):
                if f"{step}: {part}" in median:  # older files have fewer rows
                    pairs.append((f"{step}: {part}", full))
            pairs.append((f"{step}: plan and commit", "step floor"))
            requests = f"{step}: {NUM_REQUESTS} requests"
            if f"{requests}, vmap" in median:
                pairs.append((f"{requests}, vmap", f"{requests}, one by one"))
        ratios.append(
            {"workload": workload} | {f"{a} / {b}": median[a] / median[b] for a, b in pairs}
        )
    return ratios


def measure(workload: Workload, num_samples: int, *, has_batch: bool) -> list[dict[str, Any]]:
    """The rows of one workload."""
    inputs = make_inputs(workload)
    scores, is_held = jnp.asarray(inputs.scores), jnp.asarray(inputs.is_held)
    floor: Call = lambda: dispatch(scores, is_held, workload.wanted).block_until_ready()  # noqa: E731
    with tempfile.TemporaryDirectory() as folder:
        calls = {"dispatch floor": floor}
        calls |= rank_calls(workload, inputs, build_twin(Path(folder)))
        for operations in OPERATIONS:
            step = Step(workload, inputs, operations)
            calls |= step.calls()
            calls["step floor"] = step.floor()
            if has_batch:
                calls |= step.batch_calls()
        others = Others()
        samples = time_in_turns(calls, num_samples)
        return rows_of(workload, samples, others)


def read(path: Path) -> dict[str, Any]:
    """What earlier runs stored."""
    blank = {"results": [], "growth": []}
    return json.loads(path.read_text()) if path.exists() else blank


def replaced(
    old: list[dict[str, Any]], new: list[dict[str, Any]], key: str
) -> list[dict[str, Any]]:
    names = {row[key] for row in new}
    return [row for row in old if row[key] not in names] + new


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="file to write results to")
    parser.add_argument("--samples", type=int, default=30, help="timed turns (default 30)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, three turns: a smoke run")
    parser.add_argument("--workload", help="one workload, such as 32x512x64, or `blocks`/`layers`")
    arguments = parser.parse_args()
    num_samples = 3 if arguments.quick else arguments.samples
    workloads = QUICK if arguments.quick else WORKLOADS
    growth = QUICK_GROWTH if arguments.quick else GROWTH
    only = arguments.workload
    if only is not None and only not in {w.name for w in workloads} | set(growth):
        parser.error(
            f"`--workload` is {only}; give one of {[w.name for w in workloads]} or an axis"
        )
    rows, grown = [], []
    for place, workload in enumerate(workloads):
        if only in (None, workload.name):
            print(workload.name, file=sys.stderr, flush=True)
            rows += measure(workload, num_samples, has_batch=place == 0)
    for axis, sizes in growth.items():
        if only in (None, axis):
            print(f"growth in {axis}", file=sys.stderr, flush=True)
            grown += growth_rows(axis, sizes, num_samples)
    old = {"results": [], "growth": []} if only is None else read(arguments.json)
    results = replaced(old["results"], rows, "workload")
    document = {
        "machine": machine(),
        "versions": package_versions(),
        "simd": build_info()["simd_chosen"],
        "results": results,
        "ratios": ratios_of(results),
        "growth": replaced(old["growth"], grown, "axis"),
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    for row in rows:
        print(f"{row['workload']:>16}  {row['implementation']:<44} {row['median_us']:12.1f} us")
    for row in (*ratios_of(rows), *grown):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
