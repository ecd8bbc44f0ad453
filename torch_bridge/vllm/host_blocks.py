"""Host memory for KV blocks that requests gave back to the engine, packed as the engine keeps them.

The host may be the very memory of a CPU engine: what counts is that the engine's own KV cache,
whose size bounds how many requests run, has the blocks back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from blockcompact_jax.kernels import Layout
from torch_bridge.dlpack import aligned_zeros
from torch_bridge.vllm.kv_blocks import KVBlocks, ScoredQuery


@dataclass(frozen=True)
class BlockMoves:
    """Whole blocks that move in one step, the same in every layer of the group.

    Attributes:
        physical_blocks: in the engine's tensors.
        host_blocks: in the host's, of the same places.
    """

    physical_blocks: list[int] = field(default_factory=list[int])
    host_blocks: list[int] = field(default_factory=list[int])

    def add(self, physical_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Adds blocks, equally many of both."""
        self.physical_blocks.extend(physical_blocks)
        self.host_blocks.extend(host_blocks)


class HostBlocks:
    """The host blocks of one KV-cache group.

    Attributes:
        max_blocks: as many blocks it holds, of all layers.
        num_kept: blocks that were copied to the host so far.
        num_uploaded: blocks that were copied back so far.
        num_dropped: copies that made room for others, of blocks that the engine had too.
        num_lost: blocks that neither the engine nor a full host had room for, and are gone.
    """

    def __init__(self, *, layout: Layout, num_layer_rows: int, max_blocks: int) -> None:
        """Allocates nothing yet: the engine's tensors say what a block is.

        Args:
            layout: how the engine packs KV.
            num_layer_rows: layers of the group.
            max_blocks: of each layer.
        """
        self.max_blocks = max_blocks
        self.num_kept = self.num_uploaded = self.num_dropped = self.num_lost = 0
        self._kv_blocks = KVBlocks(layout=layout, num_layer_rows=num_layer_rows)
        self._tensors: list[torch.Tensor | None] = [None] * num_layer_rows
        self._free = list(range(max_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    def take(self, num_blocks: int) -> list[int]:
        """Reserves as many blocks as there are, at most `num_blocks`."""
        return [self._free.pop() for _ in range(min(num_blocks, len(self._free)))]

    def give_back(self, host_blocks: Sequence[int]) -> None:
        """Frees reserved blocks.

        Args:
            host_blocks: from `take`, each once.

        Raises:
            ValueError: for a block that is free.
        """
        twice = set(host_blocks) & set(self._free)
        if twice:
            raise ValueError(
                f"`host_blocks` has {min(twice)}, which is free; expected blocks that are in use"
            )
        self._free.extend(host_blocks)

    def keep(self, row: int, kv_cache: torch.Tensor, moves: BlockMoves) -> None:
        """Copies a layer's blocks to the host, byte for byte.

        Args:
            row: layer row.
            kv_cache: the layer's KV, [num_blocks, num_kv_heads, block_tokens, 2 * head_dim].
            moves: what to copy.
        """
        self._tensor(row, kv_cache)[moves.host_blocks] = kv_cache[moves.physical_blocks]

    def upload(self, row: int, kv_cache: torch.Tensor, moves: BlockMoves) -> None:
        """Copies a layer's blocks back; arguments as those of `keep`."""
        kv_cache[moves.physical_blocks] = self._tensor(row, kv_cache)[moves.host_blocks]

    def score(
        self, row: int, kv_cache: torch.Tensor, queries: Sequence[ScoredQuery], *, scale: float
    ) -> None:
        """Scores host blocks in place.

        Args:
            row: layer row.
            kv_cache: the layer's KV, which says what a block is.
            queries: their block tables name host blocks.
            scale: softmax scale.
        """
        self._kv_blocks.score(row, self._tensor(row, kv_cache), queries, scale=scale)

    def _tensor(self, row: int, kv_cache: torch.Tensor) -> torch.Tensor:
        tensor = self._tensors[row]
        if tensor is None:
            shape = (self.max_blocks, *kv_cache.shape[1:])
            tensor = self._tensors[row] = aligned_zeros(*shape, dtype=kv_cache.dtype)
        return tensor


class HostedBlocks:
    """The host blocks of one request.

    Attributes:
        host_block_of: by logical block.
    """

    def __init__(self, host: HostBlocks) -> None:
        """Starts with none of `host`."""
        self._host = host
        self.host_block_of: dict[int, int] = {}

    def keep_best(self, alone: Sequence[int], also_in_engine: Sequence[int]) -> list[int]:
        """Gives host blocks to what leaves the engine, and makes room for it where there is none.

        Copies of what the engine has are dropped first: they can be made again. Then what is
        attended to least is given up, whether it leaves now or lay on the host.

        Args:
            alone: logical blocks that the engine is not to have, best first; those without a host
                block leave it now.
            also_in_engine: logical blocks that the engine keeps, in the order in which their
                copies, where there are any, are dropped.

        Returns:
            The blocks of `alone` that have a host block only now.
        """
        leaving = [block for block in alone if block not in self.host_block_of]
        num_missing = max(len(leaving) - self._host.num_free, 0)
        copies = [block for block in also_in_engine if block in self.host_block_of]
        dropped = copies[:num_missing]
        num_lost = num_missing - len(dropped)
        lost = set(alone[len(alone) - num_lost :])
        self._drop(dropped)
        self._drop([block for block in lost if block in self.host_block_of])
        self._host.num_dropped += len(dropped)
        self._host.num_lost += num_lost
        given = [block for block in leaving if block not in lost]
        self.host_block_of.update(zip(given, self._host.take(len(given)), strict=True))
        return given

    def _drop(self, logical_blocks: Sequence[int]) -> None:
        self._host.give_back([self.host_block_of.pop(block) for block in logical_blocks])

    def release(self) -> None:
        """Frees all of them; the request is gone."""
        self._host.give_back(list(self.host_block_of.values()))
        self.host_block_of.clear()
