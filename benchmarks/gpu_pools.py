"""Pools on a CUDA device against the same pools on the host, for `gpu_check.py`.

Memory of the device comes from the CUDA component alone, so neither torch nor JAX needs a device.
"""

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from blockcompact_jax import kernels
from blockcompact_jax.kernels import (
    AttendSegment,
    Layout,
    PlainStrides,
    RegisteredPool,
    RowsAt,
    ScoreSequence,
    StagingBuffer,
    raise_for_status,
)
from blockcompact_jax.scores import BlockReduction

BF16 = np.dtype(ml_dtypes.bfloat16)


class PoolCase(NamedTuple):
    """One geometry: a pool on the device, and a pinned store of as many blocks."""

    layout: Layout
    num_layers: int
    num_blocks: int
    num_kv_heads: int
    block_tokens: int
    head_dim: int
    dtype: np.dtype[Any] = BF16

    @property
    def shape(self) -> tuple[int, ...]:
        """[layers, blocks, 2, H, B, D]."""
        return (
            self.num_layers,
            self.num_blocks,
            2,
            self.num_kv_heads,
            self.block_tokens,
            self.head_dim,
        )

    @property
    def row_bytes(self) -> int:
        """K and V of one block of one layer."""
        return int(np.prod(self.shape[2:])) * self.dtype.itemsize

    def name(self) -> dict[str, Any]:
        """For the report."""
        return {**self._asdict(), "layout": self.layout.label, "dtype": self.dtype.name}


SMALL_CASES = [
    PoolCase(Layout.AMX, 3, 9, 2, 32, 64),
    PoolCase(Layout.AMX, 2, 8, 1, 64, 32, np.dtype(np.float32)),
    PoolCase(Layout.VEC, 3, 9, 2, 17, 33, np.dtype(np.float32)),
    PoolCase(Layout.VEC, 2, 9, 2, 16, 80),
]
LARGE_CASE = PoolCase(Layout.AMX, 32, 64, 8, 32, 128)  # rows of 128 KiB, 256 MiB
NUM_RUNS = 20
NUM_CALLS = 8  # of attention, beside an upload
UPLOAD, CALLS, BOTH = "start_pool_upload", f"attend_blocks x {NUM_CALLS}", "both at once"


class Pools(NamedTuple):
    """A plain pool on the device and its twin on the host, over the same values; a pinned store."""

    case: PoolCase
    memory: Any
    on_device: RegisteredPool
    on_host: RegisteredPool
    host: NDArray[Any]
    staging: StagingBuffer

    def read(self) -> NDArray[Any]:
        """What the device holds; waits for it."""
        blocks = np.zeros_like(self.host)
        self.memory.read(blocks.view(np.uint8))
        return blocks


@contextlib.contextmanager
def pools_of(cuda: Any, case: PoolCase) -> Iterator[Pools]:
    """The pools of a case with random finite values."""
    rng = np.random.default_rng(7)
    host = rng.standard_normal(case.shape, np.float32).astype(case.dtype)
    memory = cuda.DeviceMemory(host.nbytes)
    memory.write(host.view(np.uint8))
    options = {
        "num_layers": case.num_layers,
        "num_blocks": case.num_blocks,
        "num_kv_heads": case.num_kv_heads,
        "block_tokens": case.block_tokens,
        "head_dim": case.head_dim,
    }
    layer, block, kv, head, token, _ = (step // host.itemsize for step in host.strides)
    register = functools.partial(
        RegisteredPool.register_plain,
        element_bytes=host.itemsize,
        size_bytes=host.nbytes,
        strides=PlainStrides(layer=layer, kv=kv, block=block, head=head, token=token),
        **options,
    )
    with (
        register(memory.address, keepalive=memory, device=0) as on_device,
        register(host.ctypes.data, keepalive=host) as on_host,
        StagingBuffer(
            "gpu_check", layout=case.layout, dtype=case.dtype, is_pinned=True, **options
        ) as staging,
    ):
        rows = staging.rows()
        rows[...] = rng.standard_normal(rows.shape, np.float32).astype(case.dtype)
        yield Pools(case, memory, on_device, on_host, host, staging)


def upload_rows(case: PoolCase, first_layer: int = 0) -> list[NDArray[np.int32]]:
    """Columns of an upload of half of all blocks from a layer on: random sources, partial rows."""
    rng = np.random.default_rng(8)
    cells = rng.permutation((case.num_layers - first_layer) * case.num_blocks)
    cells = cells[: cells.size // 2]
    source = rng.integers(0, case.num_blocks, cells.size)
    valid = rng.integers(0, case.block_tokens + 1, cells.size)
    layer = first_layer + cells // case.num_blocks
    columns = (layer, source, cells % case.num_blocks, valid)
    return [column.astype(np.int32) for column in columns]


def faults_of_movement(cuda: Any, case: PoolCase) -> list[str]:
    """Calls whose bytes are not those of the host."""
    with pools_of(cuda, case) as pools:
        faults = []
        columns = upload_rows(case)
        for name, upload in (("upload", upload_and_return), ("start_pool_upload", upload_beside)):
            upload(pools, pools.on_device, columns)
            upload_and_return(pools, pools.on_host, columns)
            if pools.read().tobytes() != pools.host.tobytes():
                faults.append(name)
        cycle = np.roll(np.arange(case.num_blocks, dtype=np.int32), 1)
        for pool in (pools.on_device, pools.on_host):
            order = np.arange(case.num_blocks, dtype=np.int32)
            moved = kernels.host_pool_block_move(pool.current_ord(), 1, order, cycle, pool=pool)
            raise_for_status(moved.status)
        if pools.read().tobytes() != pools.host.tobytes():
            faults.append("block_move")
        results = [gather_and_pack(pools, pool) for pool in (pools.on_device, pools.on_host)]
        return faults + [
            name
            for name, ours, expected in zip(("gather", "pack"), *results, strict=True)
            if ours != expected
        ]


def upload_and_return(pools: Pools, pool: RegisteredPool, columns: list[NDArray[np.int32]]) -> None:
    """An upload that is done when the call returns."""
    packed = pools.staging.pool
    result = kernels.host_pool_upload(
        packed.current_ord(), pool.current_ord(), *columns, packed_pool=packed, plain_pool=pool
    )
    raise_for_status(result.status)


def upload_beside(pools: Pools, pool: RegisteredPool, columns: list[NDArray[np.int32]]) -> None:
    """The same beside the caller, who waits."""
    start_upload(pools, pool, columns).wait()


def start_upload(
    pools: Pools, pool: RegisteredPool, columns: list[NDArray[np.int32]]
) -> kernels.UploadEvent:
    """The same, and nobody waits."""
    packed = pools.staging.pool
    return kernels.start_pool_upload(
        packed.current_ord(), pool.current_ord(), *columns, packed_pool=packed, plain_pool=pool
    )


def gather_and_pack(pools: Pools, pool: RegisteredPool) -> tuple[bytes, bytes]:
    """What both give of layer 0."""
    blocks = np.array([3, -1, 0], np.int32)
    unsigned = np.dtype(f"uint{8 * pools.case.dtype.itemsize}")
    gathered = kernels.host_pool_gather(pool.current_ord(), 0, blocks, pool=pool, dtype=unsigned)
    raise_for_status(gathered.status)
    packed = pools.staging.pool
    result = kernels.host_pool_pack(
        pool.current_ord(),
        packed.current_ord(),
        0,
        blocks,
        np.array([1, -1, 2], np.int32),
        plain_pool=pool,
        packed_pool=packed,
    )
    raise_for_status(result.status)
    return gathered.blocks.tobytes(), pools.staging.rows()[0, 1:3].tobytes()


class Attention:
    """Queries and results of attention and scores on a device, of layer 0."""

    def __init__(self, cuda: Any, pools: Pools, *, num_queries: int, num_keys: int) -> None:
        case = pools.case
        self.pools, self.num_queries, self.num_keys = pools, num_queries, num_keys
        self.heads = 2 * case.num_kv_heads
        shape = (self.heads, num_queries, case.head_dim)
        rng = np.random.default_rng(9)
        self.queries = rng.standard_normal(shape, np.float32).astype(case.dtype)
        used = -(-num_keys // case.block_tokens)
        self.table = rng.permutation(case.num_blocks)[:used].astype(np.int32)
        self.columns = self.table.size
        self.query_memory = cuda.DeviceMemory(self.queries.nbytes)
        self.query_memory.write(self.queries.view(np.uint8))
        self.out = cuda.DeviceMemory(self.queries.nbytes)
        self.mass = cuda.DeviceMemory(4 * self.heads * num_queries * self.columns)

    def rows(self, memory: Any, width: int) -> RowsAt:
        """Dense rows of some memory of the device."""
        return RowsAt(memory.address, self.num_queries * width, width)

    def segment(self, pool: RegisteredPool) -> AttendSegment:
        """All keys, by the table."""
        return AttendSegment(pool, pool.current_ord(), 0, self.table, self.num_keys)

    def enqueue_attend(self) -> None:
        """Attention on the device."""
        dims = self.pools.case.head_dim
        status = kernels.host_pool_attend_at(
            self.rows(self.query_memory, dims),
            [self.segment(self.pools.on_device)],
            out=self.rows(self.out, dims),
            num_query_heads=self.heads,
            num_queries=self.num_queries,
            scale=dims**-0.5,
            block_mass=self.rows(self.mass, self.columns),
            max_blocks=self.columns,
        )
        raise_for_status(np.array(status, np.int32))

    def enqueue_scores(self) -> None:
        """Maxima of q·k on the device, into the memory of the mass."""
        dims = self.pools.case.head_dim
        queries = self.rows(self.query_memory, dims)
        status = kernels.host_pool_score_sequences_at(
            self.pools.on_device,
            [ScoreSequence(self.table, self.num_keys, queries, self.mass.address)],
            num_query_heads=self.heads,
            num_queries=self.num_queries,
            block_reduction=BlockReduction.MAX,
            row_stride=self.columns,
        )
        raise_for_status(np.array(status, np.int32))

    def read_mass(self) -> NDArray[np.float32]:
        """The memory of the mass; waits for the device."""
        mass = np.zeros((self.heads, self.num_queries, self.columns), np.float32)
        self.mass.read(mass.view(np.uint8))
        return mass

    def read_out(self) -> NDArray[np.float32]:
        """The output; waits for the device."""
        out = np.zeros_like(self.queries)
        self.out.read(out.view(np.uint8))
        return out.astype(np.float32)


def faults_of_attention(cuda: Any, case: PoolCase) -> list[str]:
    """Results that are not those of the host, within rounding."""
    with pools_of(cuda, case) as pools:
        num_keys = case.block_tokens * (case.num_blocks - 2) - 1
        ours = Attention(cuda, pools, num_queries=3, num_keys=num_keys)
        unsigned = ours.queries.view(np.uint16) if case.dtype == BF16 else ours.queries
        expected = kernels.host_pool_attend(
            unsigned,
            [ours.segment(pools.on_host)],
            scale=case.head_dim**-0.5,
            max_blocks=ours.columns,
        )
        scores = kernels.host_pool_score_blocks(
            unsigned, ours.segment(pools.on_host), block_reduction=BlockReduction.MAX
        )
        ours.enqueue_attend()
        faults = []
        tolerance = 2e-2 if case.dtype == BF16 else 1e-4
        out = np.asarray(expected.out).view(case.dtype).astype(np.float32)
        if not np.allclose(ours.read_out(), out, tolerance, tolerance):
            faults.append("attend_blocks")
        if not np.allclose(ours.read_mass(), expected.block_mass, 1e-3, 1e-4):
            faults.append("block_mass")
        ours.enqueue_scores()
        if not np.allclose(ours.read_mass(), scores.scores, 1e-3, 1e-3):
            faults.append("score_blocks")
        return faults


def timings(cuda: Any) -> dict[str, Any]:
    """Host times, with the wait for the device, in turns; medians and all samples."""
    case = LARGE_CASE
    with pools_of(cuda, case) as pools:
        columns = upload_rows(case, first_layer=1)  # layer 0 is attended meanwhile
        columns[3][:] = case.block_tokens
        upload_bytes = columns[0].size * case.row_bytes
        kv_bytes = case.num_blocks * case.row_bytes
        target = cuda.DeviceMemory(upload_bytes)
        source = pools.staging.rows().reshape(-1).view(np.uint8)[:upload_bytes]
        num_keys = case.num_blocks * case.block_tokens
        one = Attention(cuda, pools, num_queries=1, num_keys=num_keys)
        several = Attention(cuda, pools, num_queries=5, num_keys=num_keys)

        def attend(attention: Attention, num_calls: int = 1) -> None:
            for _ in range(num_calls):
                attention.enqueue_attend()
            wait_for(attention.out)

        def score() -> None:
            one.enqueue_scores()
            wait_for(one.mass)

        def upload_and_attend() -> None:
            event = start_upload(pools, pools.on_device, columns)
            attend(several, NUM_CALLS)
            event.wait()

        jobs: dict[str, tuple[Callable[[], object], int]] = {
            "pinned_memcpy": (lambda: target.write(source), upload_bytes),
            UPLOAD: (lambda: upload_beside(pools, pools.on_device, columns), upload_bytes),
            CALLS: (lambda: attend(several, NUM_CALLS), NUM_CALLS * kv_bytes),
            BOTH: (upload_and_attend, upload_bytes + NUM_CALLS * kv_bytes),
            "attend_blocks, 1 query": (lambda: attend(one), kv_bytes),
            "attend_blocks, 5 queries": (lambda: attend(several), kv_bytes),
            "score_blocks, 1 query": (score, kv_bytes // 2),
        }
        samples = take_turns({name: job for name, (job, _) in jobs.items()}, NUM_RUNS)
    median = {name: statistics.median(values) for name, values in samples.items()}
    results = [
        {
            "job": name,
            "bytes": num_bytes,
            "median_us": median[name],
            "gigabytes_per_second": num_bytes / median[name] / 1e3,
            "samples_us": samples[name],
        }
        for name, (_, num_bytes) in jobs.items()
    ]
    saved_us = median[UPLOAD] + median[CALLS] - median[BOTH]
    return {
        "case": case.name(),
        "results": results,
        "upload_ratio_to_memcpy": median["pinned_memcpy"] / median[UPLOAD],
        "hidden_share_of_the_shorter": saved_us / min(median[UPLOAD], median[CALLS]),
    }


def take_turns(jobs: dict[str, Callable[[], object]], num_runs: int) -> dict[str, list[float]]:
    """Microseconds of each run; the first of each warms up and does not count."""
    samples: dict[str, list[float]] = {name: [] for name in jobs}
    for run in range(num_runs + 1):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if run > 0:
                samples[name].append((time.perf_counter() - start) * 1e6)
    return samples


def wait_for(memory: Any) -> None:
    """Returns when the default stream has done its work."""
    memory.read(np.zeros(1, np.uint8))
