"""Means and variances of the keys of whole blocks, beside the engine's KV.

Summaries go by request and logical block, and are made from the engine's own KV when a request
selects for the first time, later for each block that it gained: nothing is done when tokens are
inserted, and a block that the engine gives to another request leaves nothing behind.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
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
from torch_bridge.dlpack import aligned_zeros
from torch_bridge.key_moments import moments_of
from torch_bridge.vllm.kv_blocks import TORCH_DTYPES, read_keys
from torch_bridge.vllm.requests import DecodingRequest

_ENTRY_SUMMARIES = 32  # of one entry of the store, which is a block of a packed pool
_CHUNK_BLOCKS = 64  # summarized at once, so that what is read and unpacked stays in the cache


@dataclass
class _Place:
    """Where a request's summaries lie.

    Attributes:
        slot: place in the store.
        num_blocks: blocks that have summaries, in every layer.
    """

    slot: int
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
    the head's dims; its V halves are never touched and take no memory.

    Attributes:
        close: call it to unregister the store; the end of the object or of the process does too.
    """

    def __init__(self, geometry: ModelGeometry, *, layout: Layout, max_blocks: int) -> None:
        """Starts without room; `begin` makes it.

        Args:
            geometry: of the group's layers.
            layout: how the engine packs KV, and the summaries are packed.
            max_blocks: of the longest sequence.
        """
        self._geometry = geometry
        self._layout = layout
        self._num_entries = -(-max_blocks // _ENTRY_SUMMARIES)
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
        self._free: list[int] = []
        self._pools: list[RegisteredPool] = []
        self.close = weakref.finalize(self, _close, self._pools)
        self._grow(1)

    @property
    def pool(self) -> RegisteredPool:
        """The store, as it is until the next `begin`."""
        return self._pools[0]

    def keep(self, requests: Sequence[DecodingRequest | None]) -> None:
        """Forgets all requests but these."""
        for gone in self._places.keys() - set(requests):
            self._free.append(self._places.pop(gone).slot)

    def begin(
        self, requests: Sequence[DecodingRequest], num_blocks: Sequence[int]
    ) -> NewBlocks | None:
        """Makes room for a step's selections.

        Args:
            requests: which select.
            num_blocks: first blocks of each that must have summaries.

        Returns:
            What `add` must summarize in every layer of the step; None where it has nothing to do.
        """
        num_missing = sum(request not in self._places for request in requests) - len(self._free)
        if num_missing > 0:
            self._grow(max(num_missing, len(self._places) + len(self._free)))
        physical, entries, places = [], [], []
        for request, end in zip(requests, num_blocks, strict=True):
            place = self._places.get(request)
            if place is None:
                place = self._places[request] = _Place(self._free.pop())
            blocks = np.arange(place.num_blocks, end)
            physical.append(request.physical_blocks[blocks])
            entries.append(place.slot * self._num_entries + blocks // _ENTRY_SUMMARIES)
            places.append(blocks % _ENTRY_SUMMARIES)
            place.num_blocks = max(place.num_blocks, end)
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

    def entries_of(self, request: DecodingRequest) -> Int32[np.ndarray, " entries"]:
        """Entries of `pool` that have a request's summaries, in sequence order."""
        place = self._places[request]
        num_used = -(-place.num_blocks // _ENTRY_SUMMARIES)
        return np.arange(num_used, dtype=np.int32) + np.int32(place.slot * self._num_entries)

    def _grow(self, num_slots: int) -> None:
        """Makes room for so many more requests; what is there stays."""
        before = len(self._places) + len(self._free)
        num_entries = (before + num_slots) * self._num_entries
        half = _ENTRY_SUMMARIES * self._num_moments
        store = aligned_zeros(
            self._geometry.num_rows, num_entries, self._num_kv_heads, 2 * half, dtype=self.dtype
        )
        if before:
            store[:, : before * self._num_entries, :, :half] = self._keys
        _close(self._pools)
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
        self._free.extend(range(before, before + num_slots))


def _close(pools: list[RegisteredPool]) -> None:
    for pool in pools:
        pool.close()
    pools.clear()
