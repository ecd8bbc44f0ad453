"""Calls on registered pools as JAX functions: usable alone, under `jit`, `scan` and `fori_loop`.

Pools are static; what changes is the `ord`. Every call returns the `ord` of each pool it takes:
pass these on, so that XLA keeps the order of calls, and use the status, so that XLA keeps the call.
A refused call (`raise_for_status`) has moved nothing and returns the `ord` arrays it was given.
Rows whose block columns are all HOLE (-1) are padding.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from blockcompact_jax.kernels._checks import check_column, check_ord, check_pair, check_plain
from blockcompact_jax.kernels.native import load_native
from blockcompact_jax.kernels.pools import RegisteredPool
from blockcompact_jax.kernels.results import (
    AnyArray,
    PoolGatherResult,
    PoolMoveResult,
    PoolPackResult,
    PoolUploadResult,
)
from blockcompact_jax.typed_jit import typed_jit

_ORD = jax.ShapeDtypeStruct((1,), np.uint32)
_STATUS = jax.ShapeDtypeStruct((2,), np.int32)


def pool_pack(
    ord_plain: AnyArray,
    ord_packed: AnyArray,
    layer: AnyArray | int,
    plain_block: AnyArray,
    source_block: AnyArray,
    *,
    plain_pool: RegisteredPool,
    packed_pool: RegisteredPool,
) -> PoolPackResult:
    """Packs whole plain blocks into packed rows.

    Args:
        ord_plain: uint32 `[1]` of `plain_pool`.
        ord_packed: uint32 `[1]` of `packed_pool`.
        layer: int32 `[num_rows]`, or one int for all rows; in [0, num_layers).
        plain_block: int32 `[num_rows]`, blocks of `plain_pool` (physical blocks) to read.
        source_block: int32 `[num_rows]`, rows of `packed_pool` (source blocks) to write.
        plain_pool: Read.
        packed_pool: Written.

    Raises:
        ValueError: For shapes, dtypes and pool kinds. Faults of values go into the status.
    """
    num_rows = check_column("plain_block", plain_block)
    check_column("source_block", source_block, num_rows)
    check_ord("ord_plain", ord_plain)
    check_ord("ord_packed", ord_packed)
    check_pair(plain_pool, packed_pool)
    load_native()
    return _pool_pack(
        ord_plain,
        ord_packed,
        layer_column(layer, num_rows),
        plain_block,
        source_block,
        plain_pool=plain_pool.pool_id,
        packed_pool=packed_pool.pool_id,
    )


def pool_upload(  # noqa: PLR0917
    ord_packed: AnyArray,
    ord_plain: AnyArray,
    layer: AnyArray | int,
    source_block: AnyArray,
    physical_block: AnyArray,
    valid_tokens: AnyArray | None = None,
    *,
    packed_pool: RegisteredPool,
    plain_pool: RegisteredPool,
) -> PoolUploadResult:
    """Unpacks packed rows straight into plain blocks.

    Only the first `valid_tokens` tokens of a block are written; all other bytes stay.

    Args:
        ord_packed: uint32 `[1]` of `packed_pool`.
        ord_plain: uint32 `[1]` of `plain_pool`.
        layer: int32 `[num_rows]`, or one int for all rows; in [0, num_layers).
        source_block: int32 `[num_rows]`, rows of `packed_pool` to read.
        physical_block: int32 `[num_rows]`, blocks of `plain_pool` to write.
        valid_tokens: int32 `[num_rows]`, each in [0, block_tokens]; None: all tokens.
        packed_pool: Read.
        plain_pool: Written.

    Raises:
        ValueError: For shapes, dtypes and pool kinds. Faults of values go into the status.
    """
    num_rows = check_column("source_block", source_block)
    check_column("physical_block", physical_block, num_rows)
    if valid_tokens is None:
        valid_tokens = np.full(num_rows, plain_pool.shape.block_tokens, np.int32)
    check_column("valid_tokens", valid_tokens, num_rows)
    check_ord("ord_packed", ord_packed)
    check_ord("ord_plain", ord_plain)
    check_pair(plain_pool, packed_pool)
    load_native()
    return _pool_upload(
        ord_packed,
        ord_plain,
        layer_column(layer, num_rows),
        source_block,
        physical_block,
        valid_tokens,
        packed_pool=packed_pool.pool_id,
        plain_pool=plain_pool.pool_id,
    )


def pool_block_move(
    ord: AnyArray,
    layer: AnyArray | int,
    from_block: AnyArray,
    to_block: AnyArray,
    *,
    pool: RegisteredPool,
) -> PoolMoveResult:
    """Copies blocks inside one pool, plain or packed, as if all were read before any is written.

    Args:
        ord: uint32 `[1]` of `pool`.
        layer: int32 `[num_rows]`, or one int for all rows; in [0, num_layers).
        from_block: int32 `[num_rows]`, physical (or source) blocks to read.
        to_block: int32 `[num_rows]`, distinct within a layer.
        pool: Read and written.

    Raises:
        ValueError: For shapes and dtypes. Faults of values go into the status.
    """
    num_rows = check_column("from_block", from_block)
    check_column("to_block", to_block, num_rows)
    check_ord("ord", ord)
    load_native()
    return _pool_block_move(
        ord, layer_column(layer, num_rows), from_block, to_block, pool=pool.pool_id
    )


def pool_gather(
    ord: AnyArray,
    layer: AnyArray | int,
    physical_block: AnyArray,
    *,
    pool: RegisteredPool,
    dtype: Any,
    is_token_contiguous: bool = False,
) -> PoolGatherResult:
    """Copies plain blocks out of a pool. Padding rows, and a refused call, give zeros.

    Args:
        ord: uint32 `[1]` of `pool`.
        layer: int32 `[num_rows]`, or one int for all rows; in [0, num_layers).
        physical_block: int32 `[num_rows]`, blocks to read; the same one may come more than once.
        pool: A plain pool.
        dtype: Of the result, of the pool's element size; the bytes are not changed.
        is_token_contiguous: False: blocks are `[num_rows, 2, num_kv_heads, block_tokens,
            head_dim]`. True: `[2, num_kv_heads, num_rows * block_tokens, head_dim]`, ready for
            attention.

    Raises:
        ValueError: For shapes, dtypes and pool kinds. Faults of values go into the status.
    """
    num_rows = check_column("physical_block", physical_block)
    check_ord("ord", ord)
    check_plain("pool", pool)
    shape = gathered_shape(pool, num_rows, is_token_contiguous)
    element_dtype = gathered_dtype(pool, dtype)
    load_native()
    return _pool_gather(
        ord,
        layer_column(layer, num_rows),
        physical_block,
        pool=pool.pool_id,
        shape=shape,
        dtype=element_dtype,
        is_token_contiguous=is_token_contiguous,
    )


def layer_column(layer: AnyArray | int, num_rows: int) -> AnyArray:
    """The layer of each row, int32 `[num_rows]`; one int serves all rows."""
    if isinstance(layer, int):
        return np.full(num_rows, layer, np.int32)
    check_column("layer", layer, num_rows)
    return layer


def gathered_shape(
    pool: RegisteredPool, num_rows: int, is_token_contiguous: bool
) -> tuple[int, ...]:
    """Shape of the blocks that a gather of `num_rows` rows returns."""
    heads, tokens = pool.shape.num_kv_heads, pool.shape.block_tokens
    if is_token_contiguous:
        return (2, heads, num_rows * tokens, pool.shape.head_dim)
    return (num_rows, 2, heads, tokens, pool.shape.head_dim)


def gathered_dtype(pool: RegisteredPool, dtype: Any) -> np.dtype[Any]:
    """`dtype`, refused where its size is not that of the pool's elements."""
    element_dtype = jnp.dtype(dtype)
    if element_dtype.itemsize != pool.shape.element_bytes:
        raise ValueError(
            f"`dtype` is {element_dtype} of {element_dtype.itemsize} bytes; the pool's elements "
            f"have {pool.shape.element_bytes}"
        )
    return element_dtype


@typed_jit(static_argnames=("plain_pool", "packed_pool"))
def _pool_pack(
    ord_plain: Any,
    ord_packed: Any,
    layer: Any,
    plain_block: Any,
    source_block: Any,
    *,
    plain_pool: int,
    packed_pool: int,
) -> PoolPackResult:
    call = jax.ffi.ffi_call("blockcompact_pool_pack", (_ORD, _ORD, _STATUS))
    results = call(
        ord_plain,
        ord_packed,
        layer,
        plain_block,
        source_block,
        plain_pool=np.int64(plain_pool),
        packed_pool=np.int64(packed_pool),
    )
    return PoolPackResult(*results)


@typed_jit(static_argnames=("packed_pool", "plain_pool"))
def _pool_upload(  # noqa: PLR0917
    ord_packed: Any,
    ord_plain: Any,
    layer: Any,
    source_block: Any,
    physical_block: Any,
    valid_tokens: Any,
    *,
    packed_pool: int,
    plain_pool: int,
) -> PoolUploadResult:
    call = jax.ffi.ffi_call("blockcompact_pool_upload", (_ORD, _ORD, _STATUS))
    results = call(
        ord_packed,
        ord_plain,
        layer,
        source_block,
        physical_block,
        valid_tokens,
        packed_pool=np.int64(packed_pool),
        plain_pool=np.int64(plain_pool),
    )
    return PoolUploadResult(*results)


@typed_jit(static_argnames=("pool",))
def _pool_block_move(
    ord: Any, layer: Any, from_block: Any, to_block: Any, *, pool: int
) -> PoolMoveResult:
    call = jax.ffi.ffi_call("blockcompact_pool_block_move", (_ORD, _STATUS))
    return PoolMoveResult(*call(ord, layer, from_block, to_block, pool=np.int64(pool)))


@typed_jit(static_argnames=("pool", "shape", "dtype", "is_token_contiguous"))
def _pool_gather(
    ord: Any,
    layer: Any,
    physical_block: Any,
    *,
    pool: int,
    shape: tuple[int, ...],
    dtype: Any,
    is_token_contiguous: bool,
) -> PoolGatherResult:
    blocks = jax.ShapeDtypeStruct(shape, dtype)
    call = jax.ffi.ffi_call("blockcompact_pool_gather", (blocks, _ORD, _STATUS))
    results = call(
        ord,
        layer,
        physical_block,
        pool=np.int64(pool),
        is_token_contiguous=is_token_contiguous,
    )
    return PoolGatherResult(*results)
