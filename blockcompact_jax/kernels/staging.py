"""Host buffers that packed rows are staged in, not reused before what reads them is done."""

import mmap
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from blockcompact_jax.kernels.layouts import Layout
from blockcompact_jax.kernels.native import load_native
from blockcompact_jax.kernels.pools import RegisteredPool

_ALIGNMENT_BYTES = 64


class StagingInUseError(RuntimeError):
    """A staging buffer was asked for while an upload still reads it."""


class StagingBuffer:
    """Packed rows of our own memory, written by the caller and read by `start_pool_upload`.

    Attributes:
        name: What errors call it.
        pool: Its registration, a packed pool.
    """

    def __init__(
        self,
        name: str,
        *,
        layout: Layout,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_tokens: int,
        head_dim: int,
        dtype: Any,
        is_pinned: bool = False,
    ) -> None:
        """Allocates zeroed rows and registers them.

        Args:
            name: What errors call it.
            layout: `AMX` or `VEC`.
            num_layers: Layers; rows name them 0 ... num_layers - 1.
            num_blocks: Rows of each layer.
            num_kv_heads: KV heads.
            block_tokens: Tokens of a block.
            head_dim: Elements of one head of one token.
            dtype: Element type of `rows`, of 1, 2 or 4 bytes.
            is_pinned: Whether CUDA devices read the rows (`RegisteredPool.pin`).

        Raises:
            ValueError: Where layout or shape are wrong, and as `RegisteredPool.pin`.
            RuntimeError: As `RegisteredPool.pin`.
        """
        shape = (num_layers, num_blocks, num_kv_heads, 2 * block_tokens, head_dim)
        self.name = name
        # Pages are pinned as wholes: none may be another's too.
        alignment_bytes = mmap.PAGESIZE if is_pinned else _ALIGNMENT_BYTES
        self._rows = _aligned_zeros(shape, np.dtype(dtype), alignment_bytes)
        self.pool = RegisteredPool.register_packed(
            self._rows.ctypes.data,
            layout=layout,
            num_layers=num_layers,
            num_blocks=num_blocks,
            num_kv_heads=num_kv_heads,
            block_tokens=block_tokens,
            head_dim=head_dim,
            element_bytes=self._rows.itemsize,
            size_bytes=self._rows.nbytes,
            keepalive=self._rows,
        )
        if is_pinned:
            try:
                self.pool.pin()
            except (ValueError, RuntimeError):
                self.pool.close()
                raise

    @property
    def is_in_use(self) -> bool:
        """Whether an upload that reads the buffer is still open."""
        return load_native().num_open_transfers(self.pool.pool_id)[0] > 0

    def rows(self) -> NDArray[Any]:
        """The rows, to write them: `[num_layers, num_blocks, num_kv_heads, 2 * block_tokens, dim]`.

        Ask for them before each filling instead of keeping them: the buffer cannot know of writes
        through an array that was handed out earlier.

        Raises:
            StagingInUseError: Where an upload still reads the buffer.
        """
        self._refuse_if_in_use("written")
        return self._rows.view()

    def close(self) -> None:
        """Unregisters the buffer.

        Raises:
            StagingInUseError: Where an upload still reads the buffer.
            PoolClosedError: Where it is closed already.
        """
        self._refuse_if_in_use("closed")
        self.pool.close()

    def _refuse_if_in_use(self, action: str) -> None:
        if self.is_in_use:
            raise StagingInUseError(
                f"staging buffer `{self.name}` (pool {self.pool.pool_id}) cannot be {action}: an "
                "upload still reads it; wait for that upload's event, or stage in another buffer"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self.pool.is_closed:
            self.close()


def _aligned_zeros(
    shape: tuple[int, ...], dtype: np.dtype[Any], alignment_bytes: int
) -> NDArray[Any]:
    """Zeros that share no piece of `alignment_bytes` with anything else."""
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.zeros(num_bytes + 2 * alignment_bytes, np.uint8)
    start = -memory.ctypes.data % alignment_bytes
    return memory[start : start + num_bytes].view(dtype).reshape(shape)
