"""How many ledger operations a second one core applies, by numpy, jit and the compiled module.

    python benchmarks/ledger.py --json benchmarks/results/ledger.json

Events come from simulated worlds with all faults, so about a third of them is repeated, late or
wrong, as on a bad day. Every answer is compared with the second ledger's before it is timed.
Implementations take turns; all samples are stored, in events a second. The process is bound to one
core.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from stored import store

from blockcompact_jax.kernels import NativeCell
from blockcompact_jax.ledger import apply_event, apply_events, empty_state
from blockcompact_jax.ledger.state import LedgerShape, event_of_rows
from blockcompact_jax.simulation.check import Trace, record
from blockcompact_jax.simulation.world import WorldOptions

SHAPES = {
    "small": LedgerShape(max_requests=3, max_operations=6, max_slots=8, num_ranks=2),
    "large": LedgerShape(max_requests=16, max_operations=64, max_slots=1024, num_ranks=2),
}
CASES = (  # implementation, shape, ledgers side by side, events of each
    ("compiled", "small", 1, 4096),
    ("compiled", "small", 64, 256),
    ("compiled", "large", 1, 512),
    ("native", "small", 1, 4096),
    ("native", "large", 1, 512),
    ("numpy", "small", 1, 128),
    ("numpy", "small", 512, 16),
)


def make_call(implementation: str, trace: Trace, shape: LedgerShape) -> Callable[[], Any]:
    """Returns a call that applies a whole trace, after comparing its answers."""
    start = empty_state(shape, num_lanes=len(trace.seeds))

    def run_compiled() -> Any:
        return jax.block_until_ready(apply_events(start, trace.rows))[1].code

    def run_numpy() -> Any:
        state, codes = start, []
        for rows in trace.rows:
            state, outcome = apply_event(state, event_of_rows(rows))
            codes.append(outcome.code)
        return np.stack(codes)

    rows = [tuple(row) for row in trace.rows[:, 0].tolist()]

    def run_native() -> Any:
        cell = NativeCell(shape, process_epoch=1)
        return np.asarray([cell.apply([row])[0][0] for row in rows])[:, None]

    runs = {"compiled": run_compiled, "native": run_native, "numpy": run_numpy}
    run = runs[implementation]
    if not np.array_equal(np.asarray(run()), trace.codes):
        raise SystemExit(f"{implementation} gives other answers than the second ledger")
    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write rows with all samples")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    calls: list[tuple[dict[str, Any], int, Callable[[], Any]]] = []
    for implementation, name, num_lanes, num_steps in CASES:
        shape = SHAPES[name]
        trace = record(tuple(range(num_lanes)), num_steps, WorldOptions(shape=shape))
        row = {"implementation": implementation, "shape": name, "ledgers": num_lanes}
        calls.append((row, num_lanes * num_steps, make_call(implementation, trace, shape)))
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(arguments.samples):
        for place, (_, num_events, call) in enumerate(calls):
            begin = time.perf_counter()
            call()
            samples[place].append(num_events / (time.perf_counter() - begin))
    rows = [
        row | {"events_per_second": statistics.median(each), "samples": each}
        for (row, _, _), each in zip(calls, samples, strict=True)
    ]
    for row in rows:
        print(
            f"{row['implementation']:<9}{row['shape']:<6} {row['ledgers']:>4} ledgers: "
            f"{row['events_per_second']:>10,.0f} events/s "
            f"(from {min(row['samples']):,.0f} to {max(row['samples']):,.0f})"
        )
    if arguments.json:
        store(arguments.json, rows, machine_facts={"cores_used": 1})


if __name__ == "__main__":
    main()
