"""Torch-owned KV stores, registered with the native calls so that no byte is copied to share them.

XLA must never own or donate this memory (a torch-owned buffer is copied silently when donated), so
each store registers its address, bounds and strides once and the native calls work on that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blockcompact_jax.kernels.layouts import Layout
from blockcompact_jax.kernels.pools import PlainStrides, RegisteredPool
from torch_bridge.dlpack import aligned_zeros


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

    def register_plain(self, tensor: torch.Tensor, num_blocks: int) -> RegisteredPool:
        """Registers a [num_rows, 2, num_kv_heads, num_blocks * block_tokens, head_dim] tensor."""
        layer, kv, head, token, _ = tensor.stride()
        return RegisteredPool.register_plain(
            tensor.data_ptr(),
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
        )


class FullKV:
    """Every token's KV, plain, in sequence order: what the verifier attends to.

    Attributes:
        tensor: [num_rows, 2, num_kv_heads, max_tokens, head_dim].
        pool: its registration; block b of a row is the tokens [b * B, (b + 1) * B).
    """

    def __init__(self, shape: KVShape, max_blocks: int) -> None:
        self.max_tokens = max_blocks * shape.block_tokens
        self.tensor = aligned_zeros(
            shape.num_rows,
            2,
            shape.num_kv_heads,
            self.max_tokens,
            shape.head_dim,
            dtype=shape.dtype,
        )
        self.pool = shape.register_plain(self.tensor, max_blocks)

    def write(self, row: int, token_position: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Writes [num_kv_heads, num_new, head_dim] keys and values from `token_position` on.

        Raises:
            ValueError: if they do not fit.
        """
        end = token_position + key.shape[1]
        if end > self.max_tokens:
            raise ValueError(
                f"`token_position` {token_position} plus {key.shape[1]} new tokens exceeds the "
                f"capacity of {self.max_tokens} tokens. Allocate more blocks."
            )
        self.tensor[row, 0, :, token_position:end] = key
        self.tensor[row, 1, :, token_position:end] = value

    def read(self, row: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the first `num_tokens` keys and values, [num_kv_heads, num_tokens, head_dim]."""
        key, value = self.tensor[row, :, :, :num_tokens].unbind(0)
        return key, value


class PackedKV:
    """Every whole confirmed block, packed: the CPU pool that uploads read from.

    Attributes:
        tensor: [num_rows, max_blocks, num_kv_heads, 2 * block_tokens, head_dim], element order as
            `layout` says.
        pool: its registration; a source block is an index of axis 1.
    """

    def __init__(self, shape: KVShape, max_blocks: int, layout: Layout) -> None:
        self.layout = layout
        self.tensor = aligned_zeros(
            shape.num_rows,
            max_blocks,
            shape.num_kv_heads,
            2 * shape.block_tokens,
            shape.head_dim,
            dtype=shape.dtype,
        )
        self.pool = RegisteredPool.register_packed(
            self.tensor.data_ptr(),
            layout=layout,
            num_layers=shape.num_rows,
            num_blocks=max_blocks,
            num_kv_heads=shape.num_kv_heads,
            block_tokens=shape.block_tokens,
            head_dim=shape.head_dim,
            element_bytes=shape.dtype.itemsize,
            size_bytes=self.tensor.numel() * self.tensor.element_size(),
            keepalive=self.tensor,
        )
