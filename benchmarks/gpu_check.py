"""Correctness and bandwidth of the CUDA component on the device at hand, in a few minutes.

    python benchmarks/gpu_check.py [--json results.json]

Every kernel is compared with the CPU kernels before it is timed: all bytes, for attention and
scores values within rounding. `reload` reads packed rows from pinned host memory and unpacks them
into the pool, one launch for all layers; it is held against one pinned memcpy of as many bytes, in
turns, medians of all samples. Registered pools on the device run every call that they have, and an
upload runs beside attention. Exit status: 0 where all is equal and fast enough, 1 where not, 3
where there is nothing to run on. The result names the device and the machine.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import gpu_pools

from blockcompact_jax.kernels import Layout, NativeModuleError
from blockcompact_jax.kernels.native import load_cuda
from blockcompact_jax.provenance import machine, package_versions

NOT_RUN = 3
MIN_RATIO_TO_MEMCPY = 0.93
MIN_ROW_BYTES_FOR_RATIO = 64 << 10
NUM_RUNS = 30
# (num_kv_heads, block_tokens, head_dim, element_bytes): rows of 16 KiB to 512 KiB.
GEOMETRIES = [(1, 32, 128, 2), (4, 32, 128, 2), (8, 32, 128, 2), (8, 64, 128, 2), (8, 64, 128, 4)]
NUM_LAYERS = 32
POOL_BYTES = 512 << 20
MOVED_BYTES = 128 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the JSON object to this file")
    arguments = parser.parse_args()
    try:
        cuda = load_cuda()
    except NativeModuleError as error:
        print(f"{error}: not run", file=sys.stderr)
        return NOT_RUN
    if cuda.num_devices() == 0:
        print("no CUDA device: not run", file=sys.stderr)
        return NOT_RUN
    start = time.monotonic()
    report = {
        "device": cuda.device_name(),
        "machine": machine(),
        "versions": package_versions(),
        **run_all(cuda),
        "seconds": time.monotonic() - start,
    }
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    return 0 if report["is_correct"] and report["is_fast_enough"] else 1


def run_all(cuda: Any) -> dict[str, Any]:
    """All cases; each names its kernel, layout and row size."""
    correctness = [case for case in small_cases() if not is_equal(cuda, case)]
    refused = cuda.check_refusal(cuda.DeviceCheck(**case_of(Layout.AMX, GEOMETRIES[0], 2, 8, 12)))
    pools = faults_of_pools(cuda)
    timings = [timing for case in timed_cases() for timing in time_case(cuda, case)]
    is_equal_everywhere = not correctness and not pools and all(t["is_equal"] for t in timings)
    return {
        "is_correct": is_equal_everywhere and refused,
        "is_fast_enough": all(t["is_fast_enough"] for t in timings),
        "unequal_cases": correctness,
        "unequal_pools": pools,
        "is_duplicate_refused": refused,
        "timings": timings,
        "pools": gpu_pools.timings(cuda),
    }


def faults_of_pools(cuda: Any) -> list[dict[str, Any]]:
    """Calls on registered pools of the device that differ from those on the host."""
    return [
        {"case": case.name(), "calls": faults}
        for case in gpu_pools.SMALL_CASES
        if (
            faults := [
                *gpu_pools.faults_of_movement(cuda, case),
                *gpu_pools.faults_of_attention(cuda, case),
            ]
        )
    ]


def case_of(
    layout: Layout, shape: tuple[int, ...], num_layers: int, num_blocks: int, num_rows: int
) -> dict[str, Any]:
    """The arguments of one device check."""
    return {
        "layout": int(layout),
        "shape": shape,
        "num_layers": num_layers,
        "num_blocks": num_blocks,
        "num_rows": num_rows,
    }


def small_cases() -> list[dict[str, Any]]:
    """Every layout and element size, aligned and not, with rows that are filled in part."""
    amx = [(2, 32, 64, 2), (1, 64, 96, 4), (3, 96, 32, 2)]
    vec = [(2, 17, 33, 1), (2, 16, 80, 2), (1, 7, 3, 4), (4, 32, 128, 1), (2, 64, 64, 2)]
    shapes = [(Layout.AMX, shape) for shape in amx] + [(Layout.VEC, shape) for shape in vec]
    return [
        case_of(layout, shape, 3, 16, 40)
        | {"has_partial_rows": True, "is_source_pinned": is_source_pinned}
        for layout, shape in shapes
        for is_source_pinned in (True, False)
    ]


def is_equal(cuda: Any, case: dict[str, Any]) -> bool:
    """Whether all three kernels leave the bytes of the CPU kernels."""
    check = cuda.DeviceCheck(**case)
    return all(run(check)[0] for run in (cuda.check_reload, cuda.check_gather, cuda.check_move))


def timed_cases() -> list[dict[str, Any]]:
    """128 MiB in rows of each size, from a store of 512 MiB."""
    cases: list[dict[str, Any]] = []
    for layout in (Layout.AMX, Layout.VEC):
        for shape in GEOMETRIES:
            row_bytes = bytes_of_row(shape)
            num_blocks = POOL_BYTES // row_bytes // NUM_LAYERS
            case = case_of(layout, shape, NUM_LAYERS, num_blocks, MOVED_BYTES // row_bytes)
            cases.append(case | {"num_runs": NUM_RUNS})
    return cases


def time_case(cuda: Any, case: dict[str, Any]) -> list[dict[str, Any]]:
    """Reload from pinned and from device memory, gather and move, each against a plain copy."""
    jobs = [
        ("reload_pinned", cuda.check_reload, True),
        ("reload_device", cuda.check_reload, False),
        ("gather", cuda.check_gather, False),
        ("block_move", cuda.check_move, False),
    ]
    return [
        {"kernel": name, "layout": Layout(case["layout"]).label}
        | summary(name, case, run(cuda.DeviceCheck(**case | {"is_source_pinned": is_pinned})))
        for name, run, is_pinned in jobs
    ]


def summary(name: str, case: dict[str, Any], result: tuple[Any, ...]) -> dict[str, Any]:
    """Medians, ratio and all samples of one job; only `reload_pinned` has a limit to keep."""
    equal, num_bytes, kernel_us, copy_us = result
    ratio = statistics.median(copy_us) / statistics.median(kernel_us)
    row_bytes = bytes_of_row(case["shape"])
    has_limit = name == "reload_pinned" and row_bytes >= MIN_ROW_BYTES_FOR_RATIO
    return {
        "row_bytes": row_bytes,
        "num_rows": case["num_rows"],
        "is_equal": equal,
        "gigabytes_per_second": num_bytes / statistics.median(kernel_us) / 1e3,
        "ratio_to_memcpy": ratio,
        "is_fast_enough": not has_limit or ratio >= MIN_RATIO_TO_MEMCPY,
        "kernel_us": kernel_us,
        "memcpy_us": copy_us,
    }


def bytes_of_row(shape: tuple[int, ...]) -> int:
    """Bytes of K and V of one block of one layer."""
    heads, block_tokens, dims, element_bytes = shape
    return 2 * heads * block_tokens * dims * element_bytes


if __name__ == "__main__":
    sys.exit(main())
