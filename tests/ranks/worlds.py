"""A server's memory and a resident pool without a model: plain numpy knows every byte."""

import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from blockcompact_jax.kernels import Layout
from blockcompact_jax.ranks import wire
from blockcompact_jax.ranks.group import WORKER_COMMAND, RankGroup
from blockcompact_jax.ranks.shares import share_heads
from blockcompact_jax.remote.segment import MemoryAllowance, SharedSegment
from blockcompact_jax.remote.wire import SegmentWire

TOKENS = 4
FAULTY = Path(__file__).with_name("faulty_rank.py")


def faulty(fault):
    return (sys.executable, "-P", str(FAULTY), fault)


class World:
    """Source blocks with random bytes, and where they are to go."""

    def __init__(self, *, layers=2, blocks=6, targets=8, heads=3, dim=8, seed=1):
        tokens = TOKENS
        self.sizes = SimpleNamespace(layers=layers, heads=heads, tokens=tokens, dim=dim)
        self.source = self._segment("packed", layers * blocks * heads * 2 * tokens * dim)
        self.packed = self.source.values.reshape(layers, blocks, heads, 2, tokens * dim)
        self.packed[:] = np.random.default_rng(seed).integers(1, 60000, self.packed.shape)
        self.pool = self._segment("resident", heads * layers * 2 * targets * tokens * dim)
        self.resident = self.pool.values.reshape(heads, layers, 2, targets, tokens, dim)
        self.wires = {
            "source": self._wire(self.source, "packed", blocks),
            "pool": self._wire(self.pool, "resident", targets),
        }

    def block(self, layer, source_block):
        """Plain [head, 2, token, dim] of one source block: `vec` holds K by dims, V by tokens."""
        tokens, dim = self.sizes.tokens, self.sizes.dim
        packed = self.packed[layer, source_block]
        keys = packed[:, 0].reshape(-1, dim, tokens).transpose(0, 2, 1)
        return np.stack([keys, packed[:, 1].reshape(-1, tokens, dim)], axis=1)

    def close(self):
        self.packed = self.resident = None
        self.source.segment.close()
        self.pool.segment.close()

    def _segment(self, region, num_elements):
        segment = SharedSegment(MemoryAllowance(1 << 40))
        values = np.frombuffer(segment.region(region, 2 * num_elements), np.uint16)
        return SimpleNamespace(segment=segment, values=values, handle=segment.seal())

    def _wire(self, memory, region, num_blocks):
        sizes = self.sizes
        return wire.PoolWire(
            segment=SegmentWire.of(memory.handle),
            region=region,
            num_layers=sizes.layers,
            num_blocks=num_blocks,
            num_kv_heads=sizes.heads,
            block_tokens=sizes.tokens,
            head_dim=sizes.dim,
            element_bytes=2,
        )


@contextmanager
def ranks_of(world, num_ranks, *, patience_seconds=30.0, command=WORKER_COMMAND):
    group = RankGroup(
        share_heads(world.sizes.heads, num_ranks),
        patience_seconds=patience_seconds,
        command=command,
    )
    try:
        group.open_pool(world.wires["pool"])
        group.open_source(world.wires["source"], Layout.VEC)
        yield group
    finally:
        group.close()


def rows(moves):
    """Columns of (layer row, source block, physical block) triples."""
    table = np.asarray(moves, np.int32).reshape(-1, 3)
    names = ("layer_row", "source_block", "physical_block")
    columns = {name: table[:, place] for place, name in enumerate(names)}
    return {**columns, "valid_tokens": np.full(len(table), TOKENS, np.int32)}
