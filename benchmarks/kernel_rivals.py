"""What users would write without our kernels: NumPy, PyTorch and pure XLA on the same bytes.

All work on uint16 or uint32 (pairs), never on bfloat16, whose scatter is far slower in XLA on CPUs.
Blocks are `[num_blocks, 2, heads, tokens, dims]`, packed rows `[num_blocks, heads, 2 * tokens,
dims]`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch


def unpack_rows(rows: Any, layout: str, tokens: int, dims: int, permute: str) -> tuple[Any, Any]:
    """K and V `[num_rows, heads, tokens, dims]` of packed rows, as views where possible.

    `permute` names the method that reorders axes: `transpose` (numpy, jax) or `permute` (torch).
    """
    num_rows, heads = rows.shape[:2]
    regions = rows.reshape(num_rows, heads, 2, tokens * dims)
    k, v = regions[:, :, 0], regions[:, :, 1]
    if layout == "vec":
        k = getattr(k.reshape(num_rows, heads, dims, tokens), permute)(0, 1, 3, 2)
        return k, v.reshape(num_rows, heads, tokens, dims)
    k = k.reshape(num_rows, heads, tokens // 16, dims // 2, 16, 2)
    k = getattr(k, permute)(0, 1, 2, 4, 3, 5).reshape(num_rows, heads, tokens, dims)
    v = v.reshape(num_rows, heads, dims // 16, tokens // 2, 16, 2)
    v = getattr(v, permute)(0, 1, 3, 5, 2, 4).reshape(num_rows, heads, tokens, dims)
    return k, v


def pack_rows(blocks: Any, layout: str, permute: str, stack: Any) -> Any:
    """Packed rows of blocks `[num_rows, 2, heads, tokens, dims]`."""
    num_rows, _, heads, tokens, dims = blocks.shape
    k, v = blocks[:, 0], blocks[:, 1]
    if layout == "vec":
        k = getattr(k, permute)(0, 1, 3, 2)
    else:
        k = k.reshape(num_rows, heads, tokens // 16, 16, dims // 2, 2)
        k = getattr(k, permute)(0, 1, 2, 4, 3, 5)
        v = v.reshape(num_rows, heads, tokens // 2, 2, dims // 16, 16)
        v = getattr(v, permute)(0, 1, 4, 2, 5, 3)
    flat = [part.reshape(num_rows, heads, tokens * dims) for part in (k, v)]
    return stack(flat, 2).reshape(num_rows, heads, 2 * tokens, dims)


def numpy_upload(
    pool: np.ndarray, packed: np.ndarray, source: Any, target: Any, layout: str
) -> None:
    tokens, dims = pool.shape[3:]
    k, v = unpack_rows(packed[source], layout, tokens, dims, "transpose")
    pool[target, 0], pool[target, 1] = k, v


def torch_upload(
    pool: torch.Tensor, packed: torch.Tensor, source: Any, target: Any, layout: str
) -> None:
    """K of `amx` as pairs in 32 bits, which torch transposes twice as fast."""
    tokens, dims = pool.shape[3:]
    rows = packed.index_select(0, source)
    k, v = unpack_rows(rows, layout, tokens, dims, "permute")
    if layout == "amx":
        heads = rows.shape[1]
        regions = rows.view(torch.int32).view(len(source), heads, 2, tokens * dims // 2)
        pairs = regions[:, :, 0].view(len(source), heads, tokens // 16, dims // 2, 16)
        pairs = pairs.transpose(3, 4).reshape(len(source), heads, tokens, dims // 2)
        pool.view(torch.int32)[:, 0].index_copy_(0, target, pairs)
    else:
        pool[:, 0].index_copy_(0, target, k)
    pool[:, 1].index_copy_(0, target, v)


@partial(jax.jit, static_argnames="layout", donate_argnums=0)
def xla_upload(pool: Any, packed: Any, source: Any, target: Any, layout: str) -> Any:
    tokens, dims = pool.shape[3:]
    k, v = unpack_rows(packed[source], layout, tokens, dims, "transpose")
    return pool.at[target].set(jnp.stack([k, v], 1), unique_indices=True)


def numpy_pack(
    packed: np.ndarray, blocks: np.ndarray, source: Any, target: Any, layout: str
) -> None:
    packed[target] = pack_rows(blocks[source], layout, "transpose", np.stack)


def torch_pack(
    packed: torch.Tensor, blocks: torch.Tensor, source: Any, target: Any, layout: str
) -> None:
    rows = pack_rows(blocks.index_select(0, source), layout, "permute", torch.stack)
    packed.index_copy_(0, target, rows)


@partial(jax.jit, static_argnames="layout", donate_argnums=0)
def xla_pack(packed: Any, blocks: Any, source: Any, target: Any, layout: str) -> Any:
    rows = pack_rows(blocks[source], layout, "transpose", jnp.stack)
    return packed.at[target].set(rows, unique_indices=True)


@jax.jit
def xla_gather(pool: Any, source: Any) -> Any:
    return pool[source]


@partial(jax.jit, donate_argnums=0)
def xla_move(pool: Any, source: Any, target: Any) -> Any:
    return pool.at[target].set(pool[source], unique_indices=True)


def torch_scores(keys: torch.Tensor, queries: torch.Tensor, tokens: int) -> torch.Tensor:
    """Largest q.k of each block: a bf16 product with plain keys `[heads, tokens, dims]`."""
    scores = queries @ keys.transpose(1, 2)
    return scores.view(*scores.shape[:2], -1, tokens).amax(-1)
