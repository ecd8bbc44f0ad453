"""The rank processes of a session, and the shared memory of their resident pools.

Every rank process moves its KV heads from the server's memory into its own part of the resident
pool. Attention, which stock models run in one process, reads all parts there.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

from blockcompact_jax.kernels import RegisteredPool
from blockcompact_jax.ranks import wire
from blockcompact_jax.ranks.group import RankGroup
from blockcompact_jax.ranks.shares import share_heads
from blockcompact_jax.remote.segment import MemoryAllowance, SharedSegment
from blockcompact_jax.remote.wire import SegmentWire
from torch_bridge.huggingface.sizes import COPIES_REGION
from torch_bridge.memory import SharedMemory
from torch_bridge.pools import KVShape
from torch_bridge.resident import RESIDENT_REGION, ResidentKV


class ResidentRanks:
    """Ranks that fill one session's resident pool.

    Attributes:
        group: the processes.
    """

    def __init__(self, shape: KVShape, num_ranks: int) -> None:
        """Starts nothing yet.

        Args:
            shape: sizes of the stores.
            num_ranks: how many ranks share its KV heads.

        Raises:
            CompactionError: if there are more ranks than KV heads.
        """
        self._shape = shape
        self.group = RankGroup(share_heads(shape.num_kv_heads, num_ranks))
        self._segment = SharedSegment(MemoryAllowance(sys.maxsize))

    def start(self, num_physical_blocks: int) -> ResidentKV:
        """Allocates the resident pool in shared memory and starts every rank with its part."""
        with ExitStack() as undo:
            undo.callback(self.close)
            resident = ResidentKV(self._shape, num_physical_blocks, SharedMemory(self._segment))
            undo.callback(resident.pool.close)
            segment = SegmentWire.of(self._segment.seal())
            self.group.open_pool(
                self._pool(segment, RESIDENT_REGION, num_physical_blocks, self._shape.num_rows)
            )
            undo.pop_all()
        return resident

    def open_source(self, pool: RegisteredPool, segment: SegmentWire, *, region: str) -> None:
        """Has every rank read packed blocks of another process from now on.

        Args:
            pool: their registration in this process.
            segment: the segment that they lie in.
            region: their region in it.
        """
        layout = pool.layout
        if layout is None:
            raise ValueError("`pool` is plain; expected a packed pool")
        num_stored_layers = 1 if region == COPIES_REGION else self._shape.num_rows
        source = self._pool(segment, region, pool.shape.num_blocks, num_stored_layers)
        self.group.open_source(source, layout)

    def close(self) -> None:
        """Ends every rank and lets go of the memory."""
        self.group.close()
        self._segment.close()

    def _pool(
        self, segment: SegmentWire, region: str, num_blocks: int, num_layers: int
    ) -> wire.PoolWire:
        shape = self._shape
        return wire.PoolWire(
            segment=segment,
            region=region,
            num_layers=num_layers,
            num_blocks=num_blocks,
            num_kv_heads=shape.num_kv_heads,
            block_tokens=shape.block_tokens,
            head_dim=shape.head_dim,
            element_bytes=shape.dtype.itemsize,
        )
