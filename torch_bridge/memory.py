"""Where the stores of a sequence lie: in this process alone, or in memory that others map too."""

from __future__ import annotations

import math
import warnings
from typing import Protocol

import torch

from torch_bridge.dlpack import aligned_zeros


class KVMemory(Protocol):
    """Gives each store its memory, by name."""

    @property
    def is_writable(self) -> bool:
        """Whether the stores may be written here."""
        ...

    def tensor(self, name: str, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns contiguous zeros (or, of an opened store, what it holds), 64-byte aligned."""
        ...


class PrivateMemory:
    """Memory of this process alone."""

    is_writable = True

    def tensor(self, name: str, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocates zeros; `name` is for people."""
        return aligned_zeros(*shape, dtype=dtype)


class Regions(Protocol):
    """Named regions of shared memory, see `blockcompact_jax.remote.segment`."""

    @property
    def is_writable(self) -> bool:
        """Whether this process may write them."""
        ...

    def region(self, name: str, size_bytes: int) -> memoryview:
        """Returns a page-aligned region of exactly this size."""
        ...


class SharedMemory:
    """Memory of a shared segment: allocated by whoever writes it, mapped by whoever reads it."""

    def __init__(self, segment: Regions) -> None:
        self._segment = segment

    @property
    def is_writable(self) -> bool:
        """Whether this process allocated the segment."""
        return self._segment.is_writable

    def tensor(self, name: str, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns the region `name` as a tensor. A read-only one must never be written.

        Raises:
            SegmentError: if there is no room, or the region has another size.
        """
        num_elements = math.prod(shape)
        if not num_elements:
            return torch.empty(*shape, dtype=dtype)
        region = self._segment.region(name, num_elements * dtype.itemsize)
        with warnings.catch_warnings():
            # Torch knows no read-only tensors; the pages themselves are protected.
            warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
            return torch.frombuffer(region, dtype=dtype).view(*shape)
