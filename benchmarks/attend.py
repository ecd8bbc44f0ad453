"""Attention over blocks against torch's on contiguous K and V, interleaved in one process.

Usage: python benchmarks/attend.py [--models SmolLM2 Llama-3-8B] [--num-keys 8000]
           [--threads 2] [--json results.json]

Every sample uses another layer, so that K and V come from memory, not from a cache. A sum over as
many bytes takes its turn with the contenders: the read bandwidth at that time. Results are compared
before anything is timed. Figures are ratios within one run; the machine decides the rest.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from kernel_pools import BF16, GEOMETRIES, Geometry, aligned
from stored import store
from torch.nn import functional

from blockcompact_jax import kernels
from blockcompact_jax.kernels import AttendSegment, HostAttendOutputs, Layout, RegisteredPool

POOL_BYTES = 150 << 20  # about, of all layers
MIN_LAYERS = 4
MODELS = {g.model: g for g in GEOMETRIES if g.tokens == 32}

Call = Callable[[int], object]


def build_pools(
    g: Geometry, num_layers: int, num_keys: int
) -> tuple[dict[str, RegisteredPool], torch.Tensor]:
    """The same random KV as packed rows, as plain blocks and as contiguous torch tensors."""
    num_blocks = -(-num_keys // g.tokens)
    rng = np.random.default_rng(0)
    shape = (num_layers, num_blocks, 2, g.heads, g.tokens, g.dims)
    plain = aligned(shape)
    for layer in range(num_layers):
        values = rng.standard_normal(shape[1:], np.float32)
        plain[layer] = values.astype(BF16).view(np.uint16)
    geometry = {
        "num_layers": num_layers,
        "num_blocks": num_blocks,
        "num_kv_heads": g.heads,
        "block_tokens": g.tokens,
        "head_dim": g.dims,
        "element_bytes": 2,
        "size_bytes": plain.nbytes,
    }
    head = g.tokens * g.dims
    block = 2 * g.heads * head
    strides = kernels.PlainStrides(
        layer=num_blocks * block, kv=g.heads * head, block=block, head=head, token=g.dims
    )
    packed = aligned((plain.size,))
    pools = {
        "plain": RegisteredPool.register_plain(
            plain.ctypes.data, strides=strides, keepalive=plain, **geometry
        ),
        "amx": RegisteredPool.register_packed(
            packed.ctypes.data, layout=Layout.AMX, keepalive=packed, **geometry
        ),
    }
    blocks = np.arange(num_blocks, dtype=np.int32)
    for layer in range(num_layers):
        result = kernels.host_pool_pack(
            pools["plain"].current_ord(),
            pools["amx"].current_ord(),
            layer,
            blocks,
            blocks,
            plain_pool=pools["plain"],
            packed_pool=pools["amx"],
        )
        kernels.raise_for_status(result.status)
    contiguous = np.ascontiguousarray(plain.transpose(0, 2, 3, 1, 4, 5))
    contiguous = contiguous.reshape(num_layers, 2, g.heads, -1, g.dims)
    return pools, torch.from_numpy(contiguous).view(torch.bfloat16)


def build_calls(
    g: Geometry,
    pools: dict[str, RegisteredPool],
    contiguous: torch.Tensor,
    num_keys: int,
    num_queries: int,
) -> dict[str, Call]:
    """The contenders for one number of queries; each takes a layer and returns float32 results."""
    num_heads = g.heads * g.group
    num_blocks = pools["amx"].shape.num_blocks
    queries = np.random.default_rng(1).standard_normal((num_heads, num_queries, g.dims))
    queries = queries.astype(BF16)
    table = np.arange(num_blocks, dtype=np.int32)
    calls: dict[str, Call] = {}
    for name, pool in pools.items():
        ord_now = pool.current_ord()
        for suffix, has_mass in (("", False), (" + mass", True)):
            mass = np.zeros((num_heads, num_queries, num_blocks), np.float32)
            outputs = HostAttendOutputs(np.zeros_like(queries), mass if has_mass else None)

            def attend(layer: int, pool=pool, ord_now=ord_now, outputs=outputs) -> object:
                segment = AttendSegment(pool, ord_now, layer, table, num_keys)
                kernels.host_pool_attend(
                    queries,
                    [segment],
                    scale=g.dims**-0.5,
                    outputs=outputs,
                    num_threads=torch.get_num_threads(),
                )
                return outputs.out

            calls[name + suffix] = attend
    folded = torch.from_numpy(queries.view(np.uint16)).view(torch.bfloat16)
    folded = folded.reshape(1, g.heads, g.group * num_queries, g.dims)
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    mask = mask.repeat(g.group, 1) if num_queries > 1 else None

    def attend_torch(layer: int) -> object:
        key, value = contiguous[layer, :, None, :, :num_keys]
        out = functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask)
        return out.view(torch.uint16).numpy().reshape(queries.shape).view(BF16)

    calls["torch"] = attend_torch
    return calls


def check(calls: dict[str, Call]) -> None:
    """Refuses to time a wrong answer."""
    expected = np.array(calls["torch"](0), np.float32)
    for name, call in calls.items():
        got = np.array(call(0), np.float32)
        if not np.allclose(got, expected, atol=0.02):
            raise SystemExit(f"{name} differs from torch by {np.abs(got - expected).max()}")


def measure(calls: dict[str, Call], num_layers: int, num_samples: int) -> dict[str, list[float]]:
    """Microseconds of every sample, the contenders taking turns."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for sample in range(num_samples):
        for name, call in calls.items():
            start = time.perf_counter()
            call(sample % num_layers)
            samples[name].append(1e6 * (time.perf_counter() - start))
    return samples


def build_read(num_layers: int, layer_bytes: int) -> Call:
    """A sum over as many bytes as a layer holds, elsewhere for each layer."""
    layers = torch.from_numpy(aligned((num_layers, layer_bytes // 4), np.float32))
    return lambda layer: layers[layer].sum()


def run(g: Geometry, num_keys: int, num_samples: int) -> list[dict[str, object]]:
    """The rows of one model: 1, 5 and 9 queries."""
    kv_bytes = num_keys * g.heads * 2 * g.dims * 2
    num_layers = max(MIN_LAYERS, POOL_BYTES // kv_bytes)
    pools, contiguous = build_pools(g, num_layers, num_keys)
    read = build_read(num_layers, kv_bytes)
    rows: list[dict[str, object]] = []
    for num_queries in (1, 5, 9):
        calls = build_calls(g, pools, contiguous, num_keys, num_queries)
        check(calls)
        samples = measure({**calls, "read": read}, num_layers, num_samples)
        medians = {name: statistics.median(times) for name, times in samples.items()}
        workload = f"{g.model} {g.heads}x{g.dims}, {num_keys} keys, {num_queries} queries"
        print(workload)
        for name, median in medians.items():
            rows.append(
                {
                    "workload": workload,
                    "implementation": name,
                    "median_us": median,
                    "ratio_to_read": medians["read"] / median,
                    "samples_us": samples[name],
                }
            )
            print(
                f"  {name:12s} {median:8.0f} us  "
                f"{kv_bytes / median / 1e3:6.1f} GB/s  {medians['read'] / median:5.2f} x read  "
                f"{median / medians['torch']:5.2f} x torch"
            )
    for pool in pools.values():
        pool.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["SmolLM2", "Llama-3-8B"])
    parser.add_argument("--num-keys", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--samples", type=int, default=48, help="of each contender")
    parser.add_argument("--json", type=Path, dest="output")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results: list[dict[str, object]] = []
    for model in arguments.models:
        results += run(MODELS[model], arguments.num_keys, arguments.samples)
    if arguments.output:
        settings = {"num_threads": arguments.threads, **kernels.build_info()}
        store(arguments.output, results, settings=settings)


if __name__ == "__main__":
    main()
