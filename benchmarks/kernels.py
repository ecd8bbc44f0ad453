"""Kernels that move and score KV blocks against what else gives the same bytes, in one process.

    python benchmarks/kernels.py --json benchmarks/results/kernels.json

Implementations take turns on blocks of real geometries, each turn on other blocks of pools of
`--pool-mib`, in random order. Every answer is compared before it is timed; a wrong one ends the
run. `bytes` are read plus written; `ratio_to_memcpy` compares with one contiguous copy of as many
bytes in the same turns, and for scores with a sum over as many bytes (`read`). All samples are
stored, in microseconds. All run on one processor, or on `--threads` of them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import kernel_rivals as rivals
import numpy as np
import torch
from kernel_pools import BF16, GEOMETRIES, Bench, Geometry, aligned
from stored import store

from blockcompact_jax import kernels
from blockcompact_jax.kernels import AttendSegment
from blockcompact_jax.scores import BlockReduction

OURS = "blockcompact"
BASES = ("memcpy", "read")
SLOW = ("numpy", "xla uint16")  # far behind: fewer turns

Call = Callable[[int], Any]


def torch_of(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.view(np.int16))


def copy_of(array: np.ndarray) -> np.ndarray:
    copy = aligned(array.shape, array.dtype)
    copy[...] = array
    return copy


def index(rows: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(rows.astype(np.int64))


class OnXla:
    """A donated array and a jitted update of it."""

    def __init__(self, array: np.ndarray, update: Callable[..., Any]) -> None:
        self.array = jax.block_until_ready(jnp.array(array))  # a copy: it will be donated
        self.update = update

    def __call__(self, *operands: Any) -> jax.Array:
        self.array = jax.block_until_ready(self.update(self.array, *operands))
        return self.array


def memcpy_call(num_bytes: int, pool_bytes: int) -> Call:
    """A contiguous copy of as many bytes, elsewhere in two regions each turn."""
    source, target = (aligned((pool_bytes,), np.uint8) for _ in range(2))
    places = max(1, pool_bytes // num_bytes)

    def call(turn: int) -> None:
        part = slice(turn % places * num_bytes, (turn % places + 1) * num_bytes)
        np.copyto(target[part], source[part])

    return call


def on_rows(bench: Bench, job: Any, to: np.ndarray, source: np.ndarray, turn: int) -> np.ndarray:
    job(to, source, *bench.rows(turn), bench.geometry.layout.label)
    return to


def on_torch_rows(
    bench: Bench, job: Any, to: np.ndarray, source: np.ndarray, turn: int
) -> np.ndarray:
    rows = [index(r) for r in bench.rows(turn)]
    job(torch_of(to), torch_of(source), *rows, bench.geometry.layout.label)
    return to


def upload_calls(bench: Bench) -> dict[str, Call]:
    mine, packed, layout = copy_of(bench.plain), bench.packed, bench.geometry.layout.label
    source = jnp.array(packed)
    xla = OnXla(mine, lambda pool, *rows: rivals.xla_upload(pool, source, *rows, layout))
    return {
        OURS: bench.upload,
        "torch": lambda turn: on_torch_rows(bench, rivals.torch_upload, mine, packed, turn),
        "numpy": lambda turn: on_rows(bench, rivals.numpy_upload, mine, packed, turn),
        "xla uint16": lambda turn: xla(*bench.rows(turn)),
    }


def pack_calls(bench: Bench) -> dict[str, Call]:
    mine, plain, layout = copy_of(bench.packed), bench.plain, bench.geometry.layout.label
    source = jnp.array(plain)
    xla = OnXla(mine, lambda store, *rows: rivals.xla_pack(store, source, *rows, layout))
    return {
        OURS: bench.pack,
        "torch": lambda turn: on_torch_rows(bench, rivals.torch_pack, mine, plain, turn),
        "numpy": lambda turn: on_rows(bench, rivals.numpy_pack, mine, plain, turn),
        "xla uint16": lambda turn: xla(*bench.rows(turn)),
    }


def gather_calls(bench: Bench) -> dict[str, Call]:
    plain, xla_plain = bench.plain, jnp.array(bench.plain)
    ours, mine = (aligned((bench.per_turn, *plain.shape[1:])) for _ in range(2))

    def on_torch(turn: int) -> np.ndarray:
        rows = index(bench.rows(turn)[0])
        torch.index_select(torch_of(plain), 0, rows, out=torch_of(mine))
        return mine

    def by_block(turn: int) -> np.ndarray:
        for row, block in enumerate(bench.rows(turn)[0]):
            mine[row] = plain[block]
        return mine

    def on_xla(turn: int) -> jax.Array:
        return jax.block_until_ready(rivals.xla_gather(xla_plain, bench.rows(turn)[0]))

    return {
        OURS: lambda turn: bench.gather(turn, ours),
        "memcpy by block": by_block,
        "torch": on_torch,
        "numpy": lambda turn: np.take(plain, bench.rows(turn)[0], axis=0, out=mine),
        "xla uint16": on_xla,
    }


def move_calls(bench: Bench) -> dict[str, Call]:
    mine = copy_of(bench.plain)
    xla = OnXla(mine, rivals.xla_move)

    def on_torch(turn: int) -> np.ndarray:
        source, target = (index(r) for r in bench.halves(turn))
        torch_of(mine).index_copy_(0, target, torch_of(mine).index_select(0, source))
        return mine

    def on_numpy(turn: int) -> np.ndarray:
        source, target = bench.halves(turn)
        mine[target] = mine[source]
        return mine

    return {
        OURS: bench.move,
        "torch": on_torch,
        "numpy": on_numpy,
        "xla uint16": lambda turn: xla(*bench.halves(turn)),
    }


MOVEMENTS = {
    "upload": upload_calls,
    "pack": pack_calls,
    "gather": gather_calls,
    "block_move": move_calls,
}


def score_calls(bench: Bench, num_queries: int) -> tuple[int, dict[str, Call]]:
    """Bytes of K read in a turn, and the implementations of the largest q.k of each block."""
    g = bench.geometry
    num_tokens = bench.per_turn * g.tokens
    rows = np.random.default_rng(1).standard_normal((g.heads * g.group, num_queries, g.dims))
    queries = rows.astype(BF16)
    folded = torch.from_numpy(queries.view(np.int16)).view(torch.bfloat16)
    folded = folded.reshape(g.heads, g.group * num_queries, g.dims)
    turns = bench.num_blocks // bench.per_turn
    blocks = torch_of(bench.plain).view(turns, bench.per_turn, 2, g.heads, g.tokens, g.dims)
    keys = blocks[:, :, 0].permute(0, 2, 1, 3, 4).reshape(turns, g.heads, num_tokens, g.dims)
    keys = keys.contiguous().view(torch.bfloat16)
    flat = torch.from_numpy(bench.packed.reshape(-1).view(np.float32))
    num_floats = num_tokens * g.heads * g.dims // 2

    def table(turn: int) -> np.ndarray:
        return np.arange(bench.per_turn, dtype=np.int32) + turn % turns * bench.per_turn

    def ours(turn: int) -> np.ndarray:
        pool = bench.pools["packed"]
        segment = AttendSegment(pool, pool.current_ord(), 0, table(turn), num_tokens)
        result = kernels.host_pool_score_blocks(
            queries,
            segment,
            block_reduction=BlockReduction.MAX,
            num_threads=torch.get_num_threads(),
        )
        return result.scores

    def matmul(plain: torch.Tensor) -> np.ndarray:
        scores = rivals.torch_scores(plain, folded, g.tokens)
        return scores.float().numpy().reshape(*queries.shape[:2], -1)

    def unpack_then_matmul(turn: int) -> np.ndarray:
        rows = torch_of(bench.packed)[int(table(turn)[0]) :][: bench.per_turn]
        k, _ = rivals.unpack_rows(rows, g.layout.label, g.tokens, g.dims, "permute")
        k = k.permute(1, 0, 2, 3).reshape(g.heads, num_tokens, g.dims).contiguous()
        return matmul(k.view(torch.bfloat16))

    calls: dict[str, Call] = {
        OURS: ours,
        "torch on plain K": lambda turn: matmul(keys[turn % turns]),
        "unpack, then torch": unpack_then_matmul,
        "read": lambda turn: flat[turn % turns * num_floats :][:num_floats].sum(),
    }
    return num_floats * 4, calls


def check_scores(calls: dict[str, Call], name: str) -> None:
    expected = np.asarray(calls["torch on plain K"](0))
    for implementation, call in calls.items():
        if implementation == "read":
            continue
        error = np.abs(np.asarray(call(0)) - expected).max()
        if error > 0.02 * np.abs(expected).max():
            raise SystemExit(f"{name}: {implementation} is off by {error}; nothing was timed")


def check_bytes(calls: dict[str, Call], name: str) -> None:
    expected = np.array(calls[OURS](0))
    for implementation, call in calls.items():
        if not np.array_equal(np.asarray(call(0)), expected):
            raise SystemExit(f"{name}: {implementation} gave other bytes; nothing was timed")


def time_in_turns(calls: dict[str, Call], num_samples: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(num_samples):
        for name, call in calls.items():
            if name in SLOW and turn >= max(2, num_samples // 3):
                continue
            start = time.perf_counter()
            call(turn + 1)
            samples[name].append(1e6 * (time.perf_counter() - start))
    return samples


def rows_of(
    job: str, geometry: Geometry, num_bytes: int, samples: dict[str, list[float]]
) -> list[dict[str, Any]]:
    median = {name: statistics.median(values) for name, values in samples.items()}
    (base,) = (name for name in BASES if name in median)
    best = min(value for name, value in median.items() if name not in (OURS, base))
    return [
        {
            "workload": f"{job}: {geometry.name}",
            "implementation": name,
            "median_us": median[name],
            "bytes": num_bytes,
            f"ratio_to_{base}": median[base] / median[name],
            "ratio_to_best_alternative": best / median[name],
            "samples_us": samples[name],
        }
        for name in median
    ]


def run_geometry(geometry: Geometry, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    pool_bytes, turn_bytes = arguments.pool_mib << 20, arguments.turn_mib << 20
    bench = Bench(geometry, pool_bytes, turn_bytes)
    rows: list[dict[str, Any]] = []
    for job, calls_of in MOVEMENTS.items():
        calls = calls_of(bench)
        num_bytes = bench.per_turn * geometry.block_bytes // (2 if job == "block_move" else 1)
        check_bytes(calls, f"{job}: {geometry.name}")
        calls["memcpy"] = memcpy_call(num_bytes, pool_bytes)
        rows += rows_of(job, geometry, 2 * num_bytes, time_in_turns(calls, arguments.samples))
    bench.pack_all()
    for num_queries in (1, 5):
        job = f"score_blocks, {geometry.group} heads x {num_queries} queries"
        num_bytes, calls = score_calls(bench, num_queries)
        check_scores(calls, job)
        rows += rows_of(job, geometry, num_bytes, time_in_turns(calls, arguments.samples))
    bench.close()
    return rows


def simd_and_caches() -> dict[str, Any]:
    caches = {
        f"l{level}_cache_bytes": os.sysconf(f"SC_LEVEL{level}_{kind}CACHE_SIZE")
        for level, kind in ((1, "D"), (2, ""), (3, ""))
        if f"SC_LEVEL{level}_{kind}CACHE_SIZE" in os.sysconf_names
    }
    return {"simd": kernels.build_info()["simd_chosen"], **caches}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="file to write results to")
    parser.add_argument("--samples", type=int, default=9, help="timed turns (default 9)")
    parser.add_argument("--pool-mib", type=int, default=256, help="each pool (default 256)")
    parser.add_argument("--turn-mib", type=int, default=32, help="moved a turn (default 32)")
    parser.add_argument("--threads", type=int, default=1, help="processors to use (default 1)")
    parser.add_argument("--only", default="", help="geometries whose name contains this")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: a smoke run")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.samples, arguments.pool_mib, arguments.turn_mib = 3, 4, 1
    if hasattr(os, "sched_setaffinity"):  # XLA has a thread for each processor it may use
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    torch.set_num_threads(arguments.threads)
    rows = []
    for geometry in GEOMETRIES:
        if arguments.only in geometry.name:
            print(geometry.name, file=sys.stderr, flush=True)
            rows += run_geometry(geometry, arguments)
    settings = {k: v for k, v in vars(arguments).items() if k != "json"}
    store(arguments.json, rows, machine_facts=simd_and_caches(), settings=settings)
    for row in rows:
        base = next(key for key in row if key in ("ratio_to_memcpy", "ratio_to_read"))
        print(
            f"{row['workload']:<58} {row['implementation']:<20} {row['median_us']:10.0f} us "
            f"{base[9:]} x{row[base]:5.2f}  "
            f"best alternative x{row['ratio_to_best_alternative']:5.2f}"
        )
    slower = [r for r in rows if r["implementation"] == OURS and r["ratio_to_best_alternative"] < 1]
    print(
        "slower than their best alternative:"
        if slower
        else "no row is slower than its best alternative"
    )
    for row in slower:
        print(f"  {row['workload']}: x{row['ratio_to_best_alternative']:.2f}")


if __name__ == "__main__":
    main()
