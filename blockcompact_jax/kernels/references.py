"""What the kernels compute, in numpy: slow, plain, and without the compiled module.

Blocks are `[..., 2, num_kv_heads, block_tokens, head_dim]` here (`PLAIN_HND`).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockcompact_jax.ids import HOLE
from blockcompact_jax.kernels.layouts import Layout, packed_k_offsets, packed_v_offsets


def reference_pack(blocks: NDArray[Any], layout: Layout) -> NDArray[Any]:
    """Packed rows `[..., num_kv_heads, 2 * block_tokens, head_dim]` of plain blocks.

    Raises:
        UnsupportedLayoutError: Where `layout` cannot hold the blocks.
    """
    *lead, _, heads, tokens, dims = blocks.shape
    packed = np.empty((*lead, heads, 2, tokens * dims), blocks.dtype)
    for kv, offsets in enumerate(_offsets(layout, tokens, dims, blocks.dtype.itemsize)):
        packed[..., kv, offsets] = blocks[..., kv, :, :, :]
    return packed.reshape(*lead, heads, 2 * tokens, dims)


def reference_unpack(packed: NDArray[Any], layout: Layout) -> NDArray[Any]:
    """Plain blocks of packed rows; the inverse of `reference_pack`.

    Raises:
        UnsupportedLayoutError: Where `layout` cannot hold the rows.
    """
    *lead, heads, twice_tokens, dims = packed.shape
    tokens = twice_tokens // 2
    regions = packed.reshape(*lead, heads, 2, tokens * dims)
    blocks = np.empty((*lead, 2, heads, tokens, dims), packed.dtype)
    for kv, offsets in enumerate(_offsets(layout, tokens, dims, packed.dtype.itemsize)):
        blocks[..., kv, :, :, :] = regions[..., kv, offsets]
    return blocks


def reference_unpack_scatter(  # noqa: PLR0917
    pool: NDArray[Any],
    packed_source: NDArray[Any],
    layer: NDArray[np.int32],
    source_block: NDArray[np.int32],
    physical_block: NDArray[np.int32],
    valid_tokens: NDArray[np.int32],
    *,
    layout: Layout,
) -> NDArray[Any]:
    """The pool `[num_layers, num_blocks, 2, ...]` after an upload of valid rows."""
    result = pool.copy()
    blocks = reference_unpack(packed_source, layout)
    for row in np.flatnonzero(physical_block != HOLE):
        tokens = slice(valid_tokens[row])
        source = blocks[layer[row], source_block[row]]
        result[layer[row], physical_block[row], :, :, tokens] = source[:, :, tokens]
    return result


def reference_block_move(
    pool: NDArray[Any],
    layer: NDArray[np.int32],
    from_block: NDArray[np.int32],
    to_block: NDArray[np.int32],
) -> NDArray[Any]:
    """The pool `[num_layers, num_blocks, ...]` after valid rows: all reads, then all writes."""
    is_active = to_block != HOLE
    result = pool.copy()
    result[layer[is_active], to_block[is_active]] = pool[layer[is_active], from_block[is_active]]
    return result


def reference_gather(
    pool: NDArray[Any],
    layer: NDArray[np.int32],
    physical_block: NDArray[np.int32],
    *,
    is_token_contiguous: bool = False,
) -> NDArray[Any]:
    """Blocks of the pool `[num_layers, num_blocks, 2, ...]`; padding rows are zero."""
    is_active = physical_block != HOLE
    blocks = np.zeros((len(physical_block), *pool.shape[2:]), pool.dtype)
    blocks[is_active] = pool[layer[is_active], physical_block[is_active]]
    if not is_token_contiguous:
        return blocks
    heads, tokens, dims = pool.shape[3:]
    return np.moveaxis(blocks, 0, 2).reshape(2, heads, len(physical_block) * tokens, dims)


def _offsets(
    layout: Layout, tokens: int, dims: int, element_bytes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    shape = {"block_tokens": tokens, "head_dim": dims, "element_bytes": element_bytes}
    return packed_k_offsets(layout, **shape), packed_v_offsets(layout, **shape)
