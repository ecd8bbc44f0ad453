"""Means and variances of the keys of whole blocks, beside the engine's KV.

Summaries go by request and logical block, and are made from the engine's own KV when a request
selects for the first time, later for each block that it gained: nothing is done when tokens are
inserted, and a block that the engine gives to another request leaves nothing behind.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int32

from blockcompact_jax.geometry import ModelGeometry
from blockcompact_jax.kernels import (
    Layout,
    RegisteredPool,
    packed_k_offsets,
)
from torch_bridge.key_moments import moments_of
from torch_bridge.vllm.kv_blocks import TORCH_DTYPES, read_keys
from torch_bridge.vllm.requests import DecodingRequest

_ENTRY_SUMMARIES = 32  # of one entry of the store, which is a block of a packed pool
_MAP_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
_MIN_ENTRIES = 4  # of a store
_CHUNK_BLOCKS = 64  # summarized at once, so that what is read and unpacked stays in the cache


@dataclass
class _Place:
    """Where a request's summaries lie.

    Attributes:
        entries: of the store, in sequence order.
        num_blocks: blocks that have summaries, in every layer.
    """

    entries: list[int] = field(default_factory=list[int])
    num_blocks: int = 0


class NewBlocks(NamedTuple):
    """Blocks that have no summaries yet.

    Attributes:
        physical_blocks: int64 [block].
        entries: int64 [block], entries of the store.
        places: int64 [block], places in them.
    """

    physical_blocks: torch.Tensor
    entries: torch.Tensor
    places: torch.Tensor


class KeySummaries:
    """The summaries of a group's layers, for as many requests as there are at a time.

    A packed pool of the native calls, in which the moments of a block stand for one key of twice
    the head's dims. Its entries are given out as requests grow, and lie in pages that take memory
    once they are written: a V half never is, so it takes none where it is whole pages. What gone
    requests leave is given out again, and goes back to the system when no request is left.

    Attributes:
        close: call it to unregister the store; the end of the object or of the process does too.
    """

    def __init__(self, geometry: ModelGeometry, *, layout: Layout) -> None:
        """Starts with little room; `begin` makes more.

        Args:
            geometry: of the group's layers.
            layout: how the engine packs KV, and the summaries are packed.
        """
        self._geometry = geometry
        self._layout = layout
        layer = geometry.layer_geometry(geometry.full_layers[0])
        self._num_kv_heads = layer.num_kv_heads
        self._num_moments = 2 * layer.head_dim
        self.dtype = TORCH_DTYPES[geometry.dtype]
        offsets = packed_k_offsets(
            layout,
            block_tokens=_ENTRY_SUMMARIES,
            head_dim=self._num_moments,
            element_bytes=self.dtype.itemsize,
        )
        self._offsets = torch.from_numpy(offsets)
        self._places: dict[DecodingRequest, _Place] = {}
        self._begun: dict[DecodingRequest, int] = {}  # blocks that `add` is to bring each to
        self._rows_left: set[int] = set()  # for which it must still be called
        self._free: list[int] = []
        self._num_entries = 0
        self._pools: list[RegisteredPool] = []
        self.close = weakref.finalize(self, _close, self._pools)
        self._grow(_MIN_ENTRIES)

    @property
    def pool(self) -> RegisteredPool:
        """The store, as it is until the next `begin`."""
        return self._pools[0]

    def keep(self, requests: Sequence[DecodingRequest | None]) -> None:
        """Forgets all requests but these."""
        self.forget(self._places.keys() - set(requests))

    def forget(self, requests: Iterable[DecodingRequest]) -> None:
        """Forgets requests; those that have no summaries change nothing."""
        for gone in requests:
            place = self._places.pop(gone, None)
            self._begun.pop(gone, None)
            if place is not None:
                self._free.extend(reversed(place.entries))
                if not self._places:
                    self._memory.madvise(mmap.MADV_DONTNEED)

    def begin(
        self, requests: Sequence[DecodingRequest], num_blocks: Sequence[int]
    ) -> NewBlocks | None:
        """Makes room for a step's selections.

        Blocks have summaries once `add` was called for every layer; those of a step that ended
        before that are new again.

        Args:
            requests: which select.
            num_blocks: first blocks of each that must have summaries.

        Returns:
            What `add` must summarize in every layer of the step; None where it has nothing to do.
        """
        self._begun = dict(zip(requests, num_blocks, strict=True))
        self._rows_left = set(range(self._geometry.num_rows))
        physical, entries, places = [], [], []
        for request, end in self._begun.items():
            place = self._places.setdefault(request, _Place())
            self._extend(place, -(-end // _ENTRY_SUMMARIES))
            blocks = np.arange(place.num_blocks, end)
            physical.append(request.physical_blocks[blocks])
            entries.append(np.array(place.entries, np.int64)[blocks // _ENTRY_SUMMARIES])
            places.append(blocks % _ENTRY_SUMMARIES)
        columns = [
            np.concatenate(column).astype(np.int64) for column in (physical, entries, places)
        ]
        return NewBlocks(*map(torch.from_numpy, columns)) if columns[0].size else None

    def add(self, row: int, kv_cache: torch.Tensor, new: NewBlocks) -> None:
        """Summarizes blocks of one layer.

        Args:
            row: layer row.
            kv_cache: the layer's KV, [num_blocks, num_kv_heads, block_tokens, 2 * head_dim].
            new: of `begin`.
        """
        keys_of_row = self._keys[row]
        heads = torch.arange(self._num_kv_heads)[:, None]
        for blocks, entries, places in zip(*(c.split(_CHUNK_BLOCKS) for c in new), strict=True):
            moments = moments_of(read_keys(kv_cache, blocks, self._layout)).to(self.dtype)
            keys_of_row[entries[:, None, None], heads, self._offsets[places][:, None]] = moments
        self._rows_left.discard(row)
        if not self._rows_left:
            for request, end in self._begun.items():
                place = self._places[request]
                place.num_blocks = max(place.num_blocks, end)
            self._begun = {}

    def entries_of(self, request: DecodingRequest) -> Int32[np.ndarray, " entries"]:
        """Entries of `pool` that have a request's summaries, in sequence order."""
        return np.array(self._places[request].entries, np.int32)

    def _extend(self, place: _Place, num_entries: int) -> None:
        num_missing = num_entries - len(place.entries)
        if num_missing > len(self._free):
            self._grow(self._num_entries + max(num_missing, self._num_entries))
        for _ in range(num_missing):
            place.entries.append(self._free.pop())

    def _grow(self, num_entries: int) -> None:
        """Makes room for so many entries in all; what is there stays."""
        before, self._num_entries = self._num_entries, num_entries
        half = _ENTRY_SUMMARIES * self._num_moments
        shape = (self._geometry.num_rows, num_entries, self._num_kv_heads, 2 * half)
        memory = mmap.mmap(-1, math.prod(shape) * self.dtype.itemsize, flags=_MAP_FLAGS)
        memory.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page would span V halves and free entries
        store = torch.frombuffer(memory, dtype=self.dtype).view(shape)
        if before:
            store[:, :before, :, :half] = self._keys
        _close(self._pools)
        self._memory = memory
        self._pools.append(
            RegisteredPool.register_packed(
                store.data_ptr(),
                layout=self._layout,
                num_layers=self._geometry.num_rows,
                num_blocks=num_entries,
                num_kv_heads=self._num_kv_heads,
                block_tokens=_ENTRY_SUMMARIES,
                head_dim=self._num_moments,
                element_bytes=self.dtype.itemsize,
                size_bytes=store.numel() * self.dtype.itemsize,
                keepalive=store,
            )
        )
        self._keys = store[..., :half]
        self._free.extend(reversed(range(before, num_entries)))


def _close(pools: list[RegisteredPool]) -> None:
    for pool in pools:
        pool.close()
    pools.clear()
