"""Registered pools: KV memory that an engine or a CPU store owns and kernels reach by ID.

Such memory stays out of XLA: it cannot be donated, and XLA does not know who else writes it. A
registered pool is named by a static ID, and its writes are ordered by an `ord` array.
"""

import dataclasses
import sys
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from blockcompact_jax.kernels.layouts import Layout, check_layout
from blockcompact_jax.kernels.native import load_native


class PoolClosedError(RuntimeError):
    """A closed pool was used."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainStrides:
    """Distances in elements of a plain pool; the last dimension (head_dim) is contiguous."""

    layer: int
    kv: int
    block: int
    head: int
    token: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedStrides:
    """Distances in elements of the rows of a packed pool; a row itself is contiguous."""

    layer: int
    block: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolShape:
    """Static facts of a registered pool."""

    num_layers: int
    num_blocks: int
    num_kv_heads: int
    block_tokens: int
    head_dim: int
    element_bytes: int

    @property
    def block_elements(self) -> int:
        """Elements of K and V of one block of one layer."""
        return self.num_kv_heads * 2 * self.block_tokens * self.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of K and V of one block of one layer."""
        return self.block_elements * self.element_bytes


class RegisteredPool:
    """Memory owned elsewhere, registered under an ID that is never used again.

    `close()` ends it: later calls report `UNKNOWN_POOL`, never touch the memory. `keepalive` is
    held until `close()` and until calls that are running by then have ended. Equality and hash are
    identity, so that a pool can be a static argument of `jax.jit`.

    Attributes:
        pool_id: ID in the registry.
        shape: Layers, blocks and block shape.
        layout: The packed layout, or None for a plain pool.
        is_writable: Whether calls may write it.
        device: CUDA device whose memory it is; None: the host's.
    """

    def __init__(
        self,
        pool_id: int,
        *,
        shape: PoolShape,
        layout: Layout | None,
        is_writable: bool,
        device: int | None = None,
    ) -> None:
        """Use `register_plain` or `register_packed`."""
        self.pool_id = pool_id
        self.shape = shape
        self.layout = layout
        self.is_writable = is_writable
        self.device = device
        self._is_closed = False

    @classmethod
    def register_plain(
        cls,
        pointer: int | Sequence[int],
        *,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_tokens: int,
        head_dim: int,
        element_bytes: int,
        strides: PlainStrides,
        size_bytes: int,
        keepalive: object,
        is_writable: bool = True,
        device: int | None = None,
        stream: int = 0,
    ) -> Self:
        """Registers plain K and V, wherever `strides` puts them.

        Args:
            pointer: Address of layer 0, block 0, K, head 0, token 0; or one such address for each
                layer, where each layer is an allocation of its own (`strides.layer` is not used).
            num_layers: Layers; rows name them 0 ... num_layers - 1.
            num_blocks: Blocks of each layer.
            num_kv_heads: KV heads.
            block_tokens: Tokens of a block.
            head_dim: Elements of one head of one token.
            element_bytes: Bytes of one element: 1, 2 or 4.
            strides: Distances in elements.
            size_bytes: Bytes that may be touched from each address on.
            keepalive: Whatever owns the memory; held until the pool is closed.
            is_writable: False refuses every call that writes the pool.
            device: CUDA device whose memory it is; None: the host's.
            stream: Handle of the CUDA stream that the owner reads and writes the pool on (0: the
                default stream). Calls run on it, or after what is enqueued there.

        Raises:
            ValueError: Where shape, bounds, alignment, strides or device are wrong, and where there
                is no CUDA component for `device`; nothing is registered.
        """
        shape = PoolShape(
            num_layers=num_layers,
            num_blocks=num_blocks,
            num_kv_heads=num_kv_heads,
            block_tokens=block_tokens,
            head_dim=head_dim,
            element_bytes=element_bytes,
        )
        pool_id = load_native().register_plain(
            pointers=_pointers(pointer),
            size_bytes=size_bytes,
            num_layers=num_layers,
            num_blocks=num_blocks,
            shape=(num_kv_heads, block_tokens, head_dim, element_bytes),
            stride_bytes=[element_bytes * stride for stride in dataclasses.astuple(strides)],
            is_writable=is_writable,
            stream=_stream(device, stream),
            keepalive=keepalive,
        )
        return cls(pool_id, shape=shape, layout=None, is_writable=is_writable, device=device)

    @classmethod
    def register_packed(
        cls,
        pointer: int | Sequence[int],
        *,
        layout: Layout,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_tokens: int,
        head_dim: int,
        element_bytes: int,
        size_bytes: int,
        keepalive: object,
        strides: PackedStrides | None = None,
        is_writable: bool = True,
        device: int | None = None,
        stream: int = 0,
    ) -> Self:
        """Registers packed rows `[num_kv_heads, 2 * block_tokens, head_dim]`.

        Args:
            pointer: Address of layer 0, block 0; or one address for each layer.
            layout: `AMX` or `VEC`.
            num_layers: Layers; rows name them 0 ... num_layers - 1.
            num_blocks: Blocks (rows) of each layer.
            num_kv_heads: KV heads.
            block_tokens: Tokens of a block.
            head_dim: Elements of one head of one token.
            element_bytes: Bytes of one element: 1, 2 or 4.
            size_bytes: Bytes that may be touched from each address on.
            keepalive: Whatever owns the memory; held until the pool is closed.
            strides: Distances of rows in elements; None: dense `[num_layers, num_blocks, row]`.
            is_writable: False refuses every call that writes the pool.
            device: As `register_plain`. A pool of the host serves a device once it is pinned.
            stream: As `register_plain`.

        Raises:
            ValueError: Where layout, shape, bounds, alignment, strides or device are wrong; nothing
                is registered.
        """
        if not layout.is_packed:
            raise ValueError(
                f"`layout` is `{layout.label}`; expected `amx` or `vec`, or use `register_plain`"
            )
        shape = PoolShape(
            num_layers=num_layers,
            num_blocks=num_blocks,
            num_kv_heads=num_kv_heads,
            block_tokens=block_tokens,
            head_dim=head_dim,
            element_bytes=element_bytes,
        )
        check_layout(
            layout, block_tokens=block_tokens, head_dim=head_dim, element_bytes=element_bytes
        )
        if strides is None:
            row = shape.block_elements
            strides = PackedStrides(layer=num_blocks * row, block=row)
        pool_id = load_native().register_packed(
            pointers=_pointers(pointer),
            size_bytes=size_bytes,
            num_layers=num_layers,
            num_blocks=num_blocks,
            shape=(num_kv_heads, block_tokens, head_dim, element_bytes),
            layout=int(layout),
            stride_bytes=[element_bytes * stride for stride in dataclasses.astuple(strides)],
            is_writable=is_writable,
            stream=_stream(device, stream),
            keepalive=keepalive,
        )
        return cls(pool_id, shape=shape, layout=layout, is_writable=is_writable, device=device)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def current_ord(self) -> NDArray[np.uint32]:
        """The pool's present `ord`, uint32 `[1]`: the number of accepted writes.

        Start a chain of calls from it; every call returns the `ord` that the next one takes.

        Raises:
            PoolClosedError: Where the pool is closed.
        """
        ord_now = load_native().pool_ord(self.pool_id)
        if ord_now is None:
            raise PoolClosedError(f"pool {self.pool_id} is closed; register the memory again")
        return np.array([ord_now], np.uint32)

    def pin(self) -> None:
        """Lets CUDA devices read and write the pool's memory, until it is closed.

        Memory that something else has pinned (`pin_memory()` of torch) needs no `pin`.

        Raises:
            PoolClosedError: Where the pool is closed.
            ValueError: For a pool of a device, one that is pinned, and without a CUDA component.
            RuntimeError: Where the system refuses, e.g. as a page of the memory is pinned already.
        """
        if not load_native().pin_pool(self.pool_id):
            raise PoolClosedError(f"pool {self.pool_id} is closed; register the memory again")

    def close(self) -> None:
        """Unregisters the pool and lets go of `keepalive`.

        Raises:
            PoolClosedError: Where the pool is closed already.
        """
        if self._is_closed:
            raise PoolClosedError(f"pool {self.pool_id} is closed already; close it once")
        self._is_closed = True
        load_native().unregister(self.pool_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._is_closed:
            self.close()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True) and not sys.is_finalizing():
            warnings.warn(
                f"pool {self.pool_id} was dropped without close()", ResourceWarning, stacklevel=2
            )
            self.close()

    def __repr__(self) -> str:
        layout = "plain" if self.layout is None else self.layout.label
        place = "" if self.device is None else f", cuda:{self.device}"
        state = ", closed" if self._is_closed else ""
        return f"RegisteredPool(pool_id={self.pool_id}, {layout}, {self.shape}{place}{state})"


def _pointers(pointer: int | Sequence[int]) -> list[int]:
    return [pointer] if isinstance(pointer, int) else list(pointer)


def _stream(device: int | None, stream: int) -> tuple[int, int]:
    """Device and stream as the native registry takes them; -1 is the host."""
    if device is None:
        if stream != 0:
            raise ValueError(f"`stream` is {stream} but `device` is None; give both or neither")
        return -1, 0
    if device < 0:
        raise ValueError(f"`device` is {device}; expected the ordinal of a CUDA device, or None")
    return device, stream
