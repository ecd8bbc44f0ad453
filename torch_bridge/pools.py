"""Shapes of torch-owned KV stores, and their registration with the native calls.

XLA must never own or donate this memory (a torch-owned buffer is copied silently when donated), so
each store registers its address, bounds and strides once and the native calls work on that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blockcompact_jax.kernels.layouts import Layout
from blockcompact_jax.kernels.pools import PlainStrides, RegisteredPool


def owner_stream(name: str, tensor: torch.Tensor) -> tuple[int | None, int]:
    """The CUDA device of a tensor, and the stream that torch works on there now.

    Args:
        name: what an error calls the tensor.
        tensor: of the CPU or of a CUDA device.

    Returns:
        `device` and `stream` as `RegisteredPool.register_plain` takes them.

    Raises:
        ValueError: for a tensor of another kind of device.
    """
    if tensor.device.type == "cpu":
        return None, 0
    if tensor.device.type != "cuda":
        raise ValueError(f"`{name}` is on {tensor.device}; expected a CPU or CUDA tensor")
    return tensor.device.index, torch.cuda.current_stream(tensor.device).cuda_stream


@dataclass(frozen=True, kw_only=True)
class KVShape:
    """Sizes that all stores of one model share.

    Attributes:
        num_rows: full-attention layers (one row each).
        num_kv_heads: KV heads a layer.
        block_tokens: tokens a block.
        head_dim: elements a head.
        dtype: element type.
    """

    num_rows: int
    num_kv_heads: int
    block_tokens: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer, keys and values."""
        return 2 * self.num_kv_heads * self.block_tokens * self.head_dim * self.dtype.itemsize

    def check_kv(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Refuses keys and values that a store would cast.

        Args:
            key: new keys, [num_kv_heads, num_new, head_dim].
            value: as `key`.

        Raises:
            ValueError: for another element type, another number of heads or another head size.
        """
        for name, tensor in (("key", key), ("value", value)):
            heads, _, dim = tensor.shape
            if (heads, dim, tensor.dtype) != (self.num_kv_heads, self.head_dim, self.dtype):
                raise ValueError(
                    f"`{name}` is {tensor.dtype} {list(tensor.shape)}; expected {self.dtype} "
                    f"[{self.num_kv_heads}, num_new, {self.head_dim}], as the cache was made for. "
                    "Nothing is cast: load the model in the dtype it is to run in, and leave "
                    "autocast off."
                )

    def register_plain(
        self, tensor: torch.Tensor, num_blocks: int, *, is_writable: bool = True
    ) -> RegisteredPool:
        """Registers plain blocks.

        Args:
            tensor: [num_rows, 2, num_kv_heads, num_blocks * block_tokens, head_dim] of the CPU or a
                CUDA device; with one row it stands for every row of the pool.
            num_blocks: blocks a row.
            is_writable: False refuses every call that writes the blocks.

        Raises:
            ValueError: for a last axis with gaps, another element size, another kind of device, and
                for a CUDA tensor without the CUDA component.
        """
        device, stream = self._check("tensor", tensor)
        layer, kv, head, token, _ = tensor.stride()
        is_shared = tensor.shape[0] == 1
        return RegisteredPool.register_plain(
            [tensor.data_ptr()] * self.num_rows if is_shared else tensor.data_ptr(),
            num_layers=self.num_rows,
            num_blocks=num_blocks,
            num_kv_heads=self.num_kv_heads,
            block_tokens=self.block_tokens,
            head_dim=self.head_dim,
            element_bytes=self.dtype.itemsize,
            strides=PlainStrides(
                layer=layer, kv=kv, block=self.block_tokens * token, head=head, token=token
            ),
            size_bytes=tensor.numel() * tensor.element_size(),
            keepalive=tensor,
            is_writable=is_writable,
            device=device,
            stream=stream,
        )

    def register_packed(
        self, tensor: torch.Tensor, num_blocks: int, layout: Layout, *, is_writable: bool = True
    ) -> RegisteredPool:
        """Registers a [num_rows, num_blocks, num_kv_heads, 2 * block_tokens, head_dim] tensor.

        With one row it stands for every row of the pool. Rows of the CPU are read by a CUDA device
        where they are pinned (`pin_memory()`, or `RegisteredPool.pin`).

        Raises:
            ValueError: as `register_plain`, and for a tensor that is not contiguous.
        """
        device, stream = self._check("tensor", tensor)
        if not tensor.is_contiguous():
            raise ValueError(
                f"`tensor` has shape {tuple(tensor.shape)} and strides {tensor.stride()}; expected "
                "it contiguous"
            )
        is_shared = tensor.shape[0] == 1
        return RegisteredPool.register_packed(
            [tensor.data_ptr()] * self.num_rows if is_shared else tensor.data_ptr(),
            layout=layout,
            num_layers=self.num_rows,
            num_blocks=num_blocks,
            num_kv_heads=self.num_kv_heads,
            block_tokens=self.block_tokens,
            head_dim=self.head_dim,
            element_bytes=self.dtype.itemsize,
            size_bytes=tensor.numel() * tensor.element_size(),
            keepalive=tensor,
            is_writable=is_writable,
            device=device,
            stream=stream,
        )

    def _check(self, name: str, tensor: torch.Tensor) -> tuple[int | None, int]:
        """Refuses what the registry could not see; device and stream of the tensor."""
        if tensor.element_size() != self.dtype.itemsize:
            raise ValueError(
                f"`{name}` is {tensor.dtype} of {tensor.element_size()} bytes; expected "
                f"{self.dtype.itemsize} bytes an element, as {self.dtype} has"
            )
        if tensor.stride(-1) != 1:
            raise ValueError(
                f"`{name}` has strides {tensor.stride()}; expected a contiguous last axis"
            )
        return owner_stream(name, tensor)
