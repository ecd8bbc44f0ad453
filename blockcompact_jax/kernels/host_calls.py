"""Calls on registered pools without JAX dispatch: numpy out, done on return.

The same native functions serve these and `pool_calls`; arguments, results and refusals are those
documented there. JAX arrays are accepted and waited for. The calls run on the calling thread and
release the GIL.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockcompact_jax.kernels._checks import (
    check_column,
    check_ord,
    check_pair,
    check_plain,
    describe,
)
from blockcompact_jax.kernels.native import load_native
from blockcompact_jax.kernels.pool_calls import gathered_dtype, gathered_shape, layer_column
from blockcompact_jax.kernels.pools import RegisteredPool
from blockcompact_jax.kernels.results import (
    AnyArray,
    PoolGatherResult,
    PoolMoveResult,
    PoolPackResult,
    PoolUploadResult,
)


def host_pool_pack(
    ord_plain: AnyArray,
    ord_packed: AnyArray,
    layer: AnyArray | int,
    plain_block: AnyArray,
    source_block: AnyArray,
    *,
    plain_pool: RegisteredPool,
    packed_pool: RegisteredPool,
) -> PoolPackResult:
    """`pool_pack` on the host."""
    num_rows = check_column("plain_block", plain_block)
    check_column("source_block", source_block, num_rows)
    check_ord("ord_plain", ord_plain)
    check_ord("ord_packed", ord_packed)
    check_pair(plain_pool, packed_pool)
    next_ord, status = load_native().pool_pack(
        plain_pool.pool_id,
        int(ord_plain[0]),
        packed_pool.pool_id,
        int(ord_packed[0]),
        *_dense(layer_column(layer, num_rows), plain_block, source_block),
    )
    return PoolPackResult(np.array(ord_plain), ord_array(next_ord), status)


def host_pool_upload(  # noqa: PLR0917
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
    """`pool_upload` on the host."""
    columns = upload_columns(
        ord_packed,
        ord_plain,
        layer,
        source_block,
        physical_block,
        valid_tokens,
        packed_pool=packed_pool,
        plain_pool=plain_pool,
    )
    next_ord, status = load_native().pool_upload(
        packed_pool.pool_id,
        int(ord_packed[0]),
        plain_pool.pool_id,
        int(ord_plain[0]),
        *columns.values(),
    )
    return PoolUploadResult(np.array(ord_packed), ord_array(next_ord), status)


def upload_columns(  # noqa: PLR0917
    ord_packed: AnyArray,
    ord_plain: AnyArray,
    layer: AnyArray | int,
    source_block: AnyArray,
    physical_block: AnyArray,
    valid_tokens: AnyArray | None,
    *,
    packed_pool: RegisteredPool,
    plain_pool: RegisteredPool,
) -> dict[str, NDArray[np.int32]]:
    """Checks the arguments of an upload and returns its columns by name, dense, in native order."""
    num_rows = check_column("source_block", source_block)
    check_column("physical_block", physical_block, num_rows)
    if valid_tokens is None:
        valid_tokens = np.full(num_rows, plain_pool.shape.block_tokens, np.int32)
    check_column("valid_tokens", valid_tokens, num_rows)
    check_ord("ord_packed", ord_packed)
    check_ord("ord_plain", ord_plain)
    check_pair(plain_pool, packed_pool)
    names = ("layer", "source_block", "physical_block", "valid_tokens")
    columns = _dense(layer_column(layer, num_rows), source_block, physical_block, valid_tokens)
    return dict(zip(names, columns, strict=True))


def host_pool_block_move(
    ord: AnyArray,
    layer: AnyArray | int,
    from_block: AnyArray,
    to_block: AnyArray,
    *,
    pool: RegisteredPool,
) -> PoolMoveResult:
    """`pool_block_move` on the host."""
    num_rows = check_column("from_block", from_block)
    check_column("to_block", to_block, num_rows)
    check_ord("ord", ord)
    next_ord, status = load_native().pool_block_move(
        pool.pool_id, int(ord[0]), *_dense(layer_column(layer, num_rows), from_block, to_block)
    )
    return PoolMoveResult(ord_array(next_ord), status)


def host_pool_gather(
    ord: AnyArray,
    layer: AnyArray | int,
    physical_block: AnyArray,
    *,
    pool: RegisteredPool,
    dtype: Any,
    is_token_contiguous: bool = False,
    out: NDArray[Any] | None = None,
) -> PoolGatherResult:
    """`pool_gather` on the host.

    `out`, where given, is written instead of a new array: dense, of the result's shape and dtype. A
    refused call leaves it as it is.
    """
    num_rows = check_column("physical_block", physical_block)
    check_ord("ord", ord)
    check_plain("pool", pool)
    shape = gathered_shape(pool, num_rows, is_token_contiguous)
    wanted = gathered_dtype(pool, dtype)
    blocks = np.zeros(shape, wanted) if out is None else out
    if blocks.shape != shape or blocks.dtype != wanted or not _is_dense_and_writable(blocks):
        raise ValueError(
            f"`out` is {describe(blocks)}; expected a dense writable {wanted}{list(shape)}"
        )
    unsigned = np.dtype(f"uint{8 * pool.shape.element_bytes}")
    status = load_native().pool_gather(
        pool.pool_id,
        int(ord[0]),
        *_dense(layer_column(layer, num_rows), physical_block),
        blocks.view(unsigned),
        is_token_contiguous,
    )
    return PoolGatherResult(blocks, np.array(ord), status)


def ord_array(value: int) -> NDArray[np.uint32]:
    """An `ord` as calls take it."""
    return np.array([value], np.uint32)


def _is_dense_and_writable(array: NDArray[Any]) -> bool:
    return array.flags.c_contiguous and array.flags.writeable


def _dense(*columns: AnyArray) -> list[NDArray[np.int32]]:
    return [np.ascontiguousarray(np.asarray(column)) for column in columns]
