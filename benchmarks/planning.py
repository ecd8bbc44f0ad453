"""Planning against what else would give the same answer, side by side in one process.

    python benchmarks/planning.py --json benchmarks/results/planning.json

The common job of all `rank` rows: the best `wanted` of `blocks` by (-score, block) in each layer,
without the held ones, ascending, HOLE padded. NumPy, PyTorch and the C++ twin do only that; the
`step` rows of this package also reserve, plan the upload, commit, retain and free. Every answer is
compared with a stable sort before it is timed, and a wrong one ends the run. Implementations take
turns, so noise meets all alike. All samples are stored, in microseconds.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from planning_rivals import (
    Call,
    Inputs,
    Workload,
    best_mask,
    build_twin,
    check,
    cpp_ranks,
    make_inputs,
    numpy_rank,
    padded,
    torch_rank,
)

from blockcompact_jax import (
    ModelGeometry,
    OwnershipGranularity,
    RetentionPolicy,
    SelectionPolicy,
    StepPolicy,
    TableSupport,
    commit_step,
    empty_ownership,
    empty_residency,
    plan_step,
    raise_for_result,
)
from blockcompact_jax.masks import ids_from_mask
from blockcompact_jax.ranking import score_keys, top_mask

NUM_HEADS, NUM_REQUESTS = 4, 64


WORKLOADS = (
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


@partial(jax.jit, static_argnames="wanted")
def _rank(scores: jax.Array, is_held: jax.Array, wanted: int) -> jax.Array:
    count = jnp.full(scores.shape[:1], wanted, jnp.int32)
    return ids_from_mask(top_mask(score_keys(scores), count) & ~is_held, wanted)


class Step:
    """The whole step of one workload, from the state in which the old scores' blocks are held."""

    def __init__(self, workload: Workload, inputs: Inputs) -> None:
        self.inputs = inputs
        self.num_blocks, self.wanted = np.int32(workload.blocks), np.int32(workload.wanted)
        self.geometry = ModelGeometry.uniform(
            num_layers=workload.layers,
            num_query_heads=NUM_HEADS,
            num_kv_heads=1,
            head_dim=64,
            block_tokens=32,
            dtype="bfloat16",
            layout="vec",
        )
        self.policy = StepPolicy(
            selection=SelectionPolicy(max_want=workload.wanted, sink_blocks=0, recent_blocks=0),
            retention=RetentionPolicy(tables=TableSupport.LAYER),
            max_upload=workload.wanted,
        )
        self.residency = empty_residency(self.geometry, max_slots=2 * workload.wanted)
        self.ownership = empty_ownership(
            self.geometry,
            granularity=OwnershipGranularity.LAYER,
            num_physical_blocks=2 * workload.wanted,
        )
        done = self.run(jnp.asarray(inputs.old_scores))[1]
        self.residency, self.ownership = done.residency, done.ownership

    def plan(self, scores: jax.Array) -> Any:
        """Selects, compares, reserves and lists the uploads."""
        return plan_step(
            scores,
            self.num_blocks,
            self.residency,
            self.ownership,
            budget_blocks=self.wanted,
            geometry=self.geometry,
            policy=self.policy,
        )

    def run(self, scores: jax.Array) -> tuple[Any, Any]:
        """Plans, commits, retains and frees, and waits for it."""
        plan, reserving = self.plan(scores)
        done = commit_step(
            plan, self.residency, reserving, geometry=self.geometry, policy=self.policy
        )
        return jax.block_until_ready((plan, done))

    def calls(self) -> dict[str, Call]:
        """The step's calls, each checked."""
        scores = jnp.asarray(self.inputs.scores)
        by_head = jnp.stack([scores] * NUM_HEADS, axis=1)
        plan, done = self.run(scores)
        raise_for_result(done.result)
        check("step", plan.diff.upload_logical_blocks, self.inputs.expected)
        held = np.sort(np.asarray(done.residency.logical_by_slot)[:, : int(self.wanted)], axis=1)
        is_wanted = best_mask(self.inputs.scores, int(self.wanted))
        check("step", held, padded(is_wanted, int(self.wanted)))
        from_heads = self.run(by_head)[0].diff.upload_logical_blocks
        check("step with heads", from_heads, self.inputs.expected)
        again = copy.copy(self)
        again.residency, again.ownership = done.residency, done.ownership
        zero, zero_done = again.run(scores)
        raise_for_result(zero_done.result)
        check("0-delta step", zero.diff.num_upload, np.zeros(len(held), np.int32))
        return {
            "step: plan only": lambda: jax.block_until_ready(self.plan(scores)),
            "step: plan and commit": lambda: self.run(scores),
            f"step: plan and commit, {NUM_HEADS} heads": lambda: self.run(by_head),
            "step: 0-delta": lambda: again.run(scores),
        }

    def batch_calls(self) -> dict[str, Call]:
        """Plans of many requests: under vmap, and one call after another."""
        rng = np.random.default_rng(1)
        batch = [jnp.asarray(rng.permuted(self.inputs.scores, axis=1)) for _ in range(NUM_REQUESTS)]
        stacked = jnp.stack(batch)
        vmapped = jax.jit(jax.vmap(self.plan))

        def together() -> Any:
            return jax.block_until_ready(vmapped(stacked))

        def apart() -> Any:
            return [jax.block_until_ready(self.plan(scores)) for scores in batch]

        plans = together()
        for place, single in enumerate(apart()):
            for left, right in zip(jax.tree.leaves(plans), jax.tree.leaves(single), strict=True):
                check("vmap", left[place], np.asarray(right))
        return {
            f"{NUM_REQUESTS} requests: vmap": together,
            f"{NUM_REQUESTS} requests: one by one": apart,
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
        "rank: jit": lambda: _rank(scores, is_held, workload.wanted).block_until_ready(),
        "rank: numpy": numpy_rank(workload, inputs),
    }
    with_torch = torch_rank(workload, inputs)
    if with_torch is not None:
        calls["rank: torch"] = with_torch
    return calls | cpp_ranks(workload, inputs, library)


def time_in_turns(calls: dict[str, Call], num_samples: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(num_samples + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            elapsed_us = (time.perf_counter() - start) * 1e6
            if repeat > 0:  # the first turn warms up
                samples[name].append(elapsed_us)
    return samples


def rows_of(workload: Workload, samples: dict[str, list[float]]) -> list[dict[str, Any]]:
    return [
        {
            "workload": workload.name,
            "implementation": name,
            "median_us": statistics.median(values),
            "samples": values,
        }
        for name, values in samples.items()
    ]


def growth_rows(growth: dict[str, list[Workload]], num_samples: int) -> list[dict[str, Any]]:
    """Exponent of time in blocks and in layers, by least squares on logarithms."""
    rows = []
    for axis, workloads in growth.items():
        medians: dict[str, list[float]] = {}
        for workload in workloads:
            inputs = make_inputs(workload)
            calls = {"rank: jit": rank_calls(workload, inputs, None)["rank: jit"]}
            calls["step: plan and commit"] = Step(workload, inputs).calls()["step: plan and commit"]
            for name, values in time_in_turns(calls, num_samples).items():
                medians.setdefault(name, []).append(statistics.median(values))
        sizes = [getattr(workload, axis) for workload in workloads]
        for name, values in medians.items():
            exponent = float(np.polyfit(np.log(sizes), np.log(values), 1)[0])
            rows.append(
                {
                    "axis": axis,
                    "implementation": name,
                    "exponent": exponent,
                    "sizes": sizes,
                    "median_us": values,
                }
            )
    return rows


def ratios_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every implementation's time over ours, within one workload of this run."""
    ratios = []
    for name in dict.fromkeys(row["workload"] for row in rows):
        median = {r["implementation"]: r["median_us"] for r in rows if r["workload"] == name}
        ours = ("rank: jit", "step: plan and commit")
        rivals = [key for key in median if key.startswith("rank: ") and key != "rank: jit"]
        ratio = {f"{o} / {r}": median[o] / median[r] for o in ours for r in rivals}
        ratio["0-delta / step"] = median["step: 0-delta"] / median["step: plan and commit"]
        together, apart = (f"{NUM_REQUESTS} requests: {how}" for how in ("vmap", "one by one"))
        if together in median:
            ratio["vmap / one by one"] = median[together] / median[apart]
        ratios.append({"workload": name} | ratio)
    return ratios


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if platform.system() == "Linux" else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "num_cpus": os.cpu_count(),
        "system": platform.system(),
    }


def versions() -> dict[str, str]:
    found = {}
    for name in ("blockcompact-jax", "jax", "jaxlib", "numpy", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="file to write results to")
    parser.add_argument("--samples", type=int, default=30, help="timed turns (default 30)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, three turns: a smoke run")
    arguments = parser.parse_args()
    num_samples = 3 if arguments.quick else arguments.samples
    workloads = QUICK if arguments.quick else WORKLOADS
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        library = build_twin(Path(folder))
        for place, workload in enumerate(workloads):
            print(workload.name, file=sys.stderr, flush=True)
            inputs = make_inputs(workload)
            step = Step(workload, inputs)
            calls = rank_calls(workload, inputs, library) | step.calls()
            if place == 0:
                calls |= step.batch_calls()
            rows += rows_of(workload, time_in_turns(calls, num_samples))
    print("growth", file=sys.stderr, flush=True)
    growth = growth_rows(QUICK_GROWTH if arguments.quick else GROWTH, num_samples)
    document = {
        "machine": machine(),
        "versions": versions(),
        "results": rows,
        "ratios": ratios_of(rows),
        "growth": growth,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    for row in rows:
        print(f"{row['workload']:>16}  {row['implementation']:<36} {row['median_us']:12.1f} us")
    for row in (*document["ratios"], *growth):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
