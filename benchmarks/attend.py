"""Attention over blocks against torch's on contiguous K and V, interleaved in one process.

Usage: python benchmarks/attend.py [--num-keys 8000] [--threads 2] [--json results.json]

Every sample uses another layer, so that K and V come from memory, not from a cache. A sum over as
many bytes takes its turn with the contenders: the read bandwidth at that time. Results are compared
before anything is timed. Figures are ratios within one run; the machine decides the rest.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from kernel_pools import aligned
from stored import store
from torch.nn import functional

from blockcompact_jax import kernels
from blockcompact_jax.kernels import AttendSegment, HostAttendOutputs, Layout, RegisteredPool

NUM_LAYERS = 24
NUM_KV_HEADS, HEADS_PER_KV, BLOCK_TOKENS, HEAD_DIM = 3, 3, 32, 64
BF16 = np.dtype(ml_dtypes.bfloat16)

Call = Callable[[int], object]


def build_pools(num_keys: int) -> tuple[dict[str, RegisteredPool], torch.Tensor]:
    """The same random KV as packed rows, as plain blocks and as contiguous torch tensors."""
    num_blocks = -(-num_keys // BLOCK_TOKENS)
    rng = np.random.default_rng(0)
    shape = (NUM_LAYERS, num_blocks, 2, NUM_KV_HEADS, BLOCK_TOKENS, HEAD_DIM)
    plain = aligned(shape)
    plain[...] = rng.standard_normal(shape, np.float32).astype(BF16).view(np.uint16)
    geometry = {
        "num_layers": NUM_LAYERS,
        "num_blocks": num_blocks,
        "num_kv_heads": NUM_KV_HEADS,
        "block_tokens": BLOCK_TOKENS,
        "head_dim": HEAD_DIM,
        "element_bytes": 2,
        "size_bytes": plain.nbytes,
    }
    head = BLOCK_TOKENS * HEAD_DIM
    block = 2 * NUM_KV_HEADS * head
    strides = kernels.PlainStrides(
        layer=num_blocks * block, kv=NUM_KV_HEADS * head, block=block, head=head, token=HEAD_DIM
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
    for layer in range(NUM_LAYERS):
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
    contiguous = contiguous.reshape(NUM_LAYERS, 2, NUM_KV_HEADS, -1, HEAD_DIM)
    return pools, torch.from_numpy(contiguous).view(torch.bfloat16)


def build_calls(
    pools: dict[str, RegisteredPool], contiguous: torch.Tensor, num_keys: int, num_queries: int
) -> dict[str, Call]:
    """The contenders for one number of queries; each takes a layer and returns float32 results."""
    num_heads = NUM_KV_HEADS * HEADS_PER_KV
    num_blocks = pools["amx"].shape.num_blocks
    queries = np.random.default_rng(1).standard_normal((num_heads, num_queries, HEAD_DIM))
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
                    scale=HEAD_DIM**-0.5,
                    outputs=outputs,
                    num_threads=torch.get_num_threads(),
                )
                return outputs.out

            calls[name + suffix] = attend
    folded = torch.from_numpy(queries.view(np.uint16)).view(torch.bfloat16)
    folded = folded.reshape(1, NUM_KV_HEADS, HEADS_PER_KV * num_queries, HEAD_DIM)
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    mask = mask.repeat(HEADS_PER_KV, 1) if num_queries > 1 else None

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


def measure(calls: dict[str, Call], num_samples: int) -> dict[str, list[float]]:
    """Microseconds of every sample, the contenders taking turns."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for sample in range(num_samples):
        for name, call in calls.items():
            start = time.perf_counter()
            call(sample % NUM_LAYERS)
            samples[name].append(1e6 * (time.perf_counter() - start))
    return samples


def build_read(num_layers: int, layer_bytes: int) -> Call:
    """A sum over as many bytes as a layer holds, elsewhere for each layer."""
    layers = torch.from_numpy(aligned((num_layers, layer_bytes // 4), np.float32))
    return lambda layer: layers[layer].sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-keys", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--samples", type=int, default=72)
    parser.add_argument("--json", type=Path, dest="output")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    pools, contiguous = build_pools(arguments.num_keys)
    kv_bytes = arguments.num_keys * NUM_KV_HEADS * 2 * HEAD_DIM * 2
    read = build_read(NUM_LAYERS, kv_bytes)
    results: list[dict[str, object]] = []
    for num_queries in (1, 5, 9):
        calls = build_calls(pools, contiguous, arguments.num_keys, num_queries)
        check(calls)
        samples = measure({**calls, "read": read}, arguments.samples)
        medians = {name: statistics.median(times) for name, times in samples.items()}
        for name, median in medians.items():
            results.append(
                {
                    "workload": f"SmolLM2 3x64, {arguments.num_keys} keys, {num_queries} queries",
                    "implementation": name,
                    "median_us": median,
                    "ratio_to_read": medians["read"] / median,
                    "samples_us": samples[name],
                }
            )
            print(
                f"{num_queries} queries, {name:12s} {median:8.0f} us  "
                f"{kv_bytes / median / 1e3:6.1f} GB/s  {medians['read'] / median:5.2f} x read  "
                f"{median / medians['torch']:5.2f} x torch"
            )
    for pool in pools.values():
        pool.close()
    if arguments.output:
        settings = {"num_threads": arguments.threads, **kernels.build_info()}
        store(arguments.output, results, settings=settings)


if __name__ == "__main__":
    main()
