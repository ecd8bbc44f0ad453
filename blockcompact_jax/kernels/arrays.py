"""Calls on arrays that JAX owns: packing, and pools that are donated and written in place.

A pool stays in its buffer only where it is donated. Called with concrete arrays, the writers donate
the pool themselves and check that it came back in the same buffer. Inside `jax.jit` the caller
donates (`donate_argnums`), and a result that was read from the pool has to be handed to the writer
as `after=(...)`: without that dependence XLA may copy the whole pool before it is read.

Rows whose block columns are all HOLE (-1) are padding.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from blockcompact_jax.kernels._checks import (
    check_column,
    check_packed_layout,
    check_plain_layout,
    describe,
)
from blockcompact_jax.kernels.layouts import Layout, check_layout
from blockcompact_jax.kernels.native import load_native
from blockcompact_jax.kernels.results import AnyArray, GatherResult, WriteResult
from blockcompact_jax.kernels.status import PoolCopiedError
from blockcompact_jax.typed_jit import typed_jit

_STATUS = jax.ShapeDtypeStruct((2,), np.int32)


def pack(plain: AnyArray, *, layout: Layout, plain_layout: Layout) -> jax.Array:
    """Packs plain blocks into packed rows.

    Args:
        plain: `[num_rows, 2, ...]` in `plain_layout`, or with a leading layer axis; 1, 2 or 4 bytes
            an element.
        layout: Packed layout of the result.
        plain_layout: Plain layout of `plain`.

    Returns:
        `[num_rows, num_kv_heads, 2 * block_tokens, head_dim]` of the same dtype, with the layer
        axis where `plain` has it.

    Raises:
        ValueError: For shapes, dtypes and layouts.
    """
    heads, tokens, dim = _plain_block_shape("plain", plain, plain_layout)
    _check_packed(layout, tokens, dim, plain)
    shape = (*plain.shape[:-4], heads, 2 * tokens, dim)
    load_native()
    return _pack(plain, shape=shape, layout=int(layout), order=int(plain_layout))


def unpack(packed: AnyArray, *, layout: Layout, plain_layout: Layout) -> jax.Array:
    """Unpacks packed rows into plain blocks; the inverse of `pack`.

    Args:
        packed: `[num_rows, num_kv_heads, 2 * block_tokens, head_dim]`, or with a leading layer
            axis.
        layout: Packed layout of `packed`.
        plain_layout: Plain layout of the result.

    Returns:
        `[num_rows, 2, ...]` in `plain_layout`, of the same dtype.

    Raises:
        ValueError: For shapes, dtypes and layouts.
    """
    heads, tokens, dim = _packed_block_shape("packed", packed, layout)
    check_plain_layout("plain_layout", plain_layout)
    block = (heads, tokens) if plain_layout is Layout.PLAIN_HND else (tokens, heads)
    shape = (*packed.shape[:-3], 2, *block, dim)
    load_native()
    return _unpack(packed, shape=shape, layout=int(layout), order=int(plain_layout))


def unpack_scatter(
    pool: jax.Array,
    packed_source: AnyArray,
    source_block: AnyArray,
    physical_block: AnyArray,
    valid_tokens: AnyArray | None = None,
    *,
    layout: Layout,
    pool_layout: Layout,
    layer: AnyArray | None = None,
    after: Sequence[AnyArray] = (),
) -> WriteResult:
    """Unpacks packed rows straight into blocks of a donated pool.

    Args:
        pool: `[num_blocks, 2, ...]` in `pool_layout`; with `layer`, stacked
            `[num_layers, num_blocks, 2, ...]`. Donated.
        packed_source: `[num_source_blocks, num_kv_heads, 2 * block_tokens, head_dim]`, or with a
            leading layer axis; without that axis all layers read the same rows.
        source_block: int32 `[num_rows]`, rows of `packed_source` to read.
        physical_block: int32 `[num_rows]`, blocks of the pool to write, distinct within a layer.
        valid_tokens: int32 `[num_rows]`, each in [0, block_tokens]; only these first tokens are
            written. None: all tokens.
        layout: Packed layout of `packed_source`.
        pool_layout: Plain layout of `pool`.
        layer: int32 `[num_rows]`, places on the layer axis.
        after: Results that were read from the pool and must be computed first.

    Returns:
        The pool and the status. A fault of values leaves the pool as it was.

    Raises:
        ValueError: For shapes, dtypes and layouts.
        PoolCopiedError: Outside jit, where the pool was copied instead of written in place.
    """
    num_rows = check_column("source_block", source_block)
    check_column("physical_block", physical_block, num_rows)
    heads, tokens, dim = _plain_block_shape("pool", pool, pool_layout)
    _check_rank("pool", pool, 5 if layer is None else 6)
    source_shape = _packed_block_shape("packed_source", packed_source, layout)
    if source_shape != (heads, tokens, dim) or packed_source.dtype != pool.dtype:
        raise ValueError(
            f"`packed_source` is {describe(packed_source)} and `pool` {describe(pool)}; heads, "
            "block_tokens, head_dim and dtype must be equal"
        )
    if packed_source.ndim == 5 and packed_source.shape[0] != (
        1 if layer is None else pool.shape[0]
    ):
        raise ValueError(
            f"`packed_source` has {packed_source.shape[0]} layers; expected those of `pool`, with "
            "`layer` given, or no layer axis"
        )
    if valid_tokens is None:
        valid_tokens = np.full(num_rows, tokens, np.int32)
    check_column("valid_tokens", valid_tokens, num_rows)
    return _write_in_place(
        "unpack_scatter",
        functools.partial(_unpack_scatter, layout=int(layout), order=int(pool_layout)),
        pool,
        packed_source,
        _layer_column(layer, num_rows),
        source_block,
        physical_block,
        valid_tokens,
        *after,
    )


def block_move(
    pool: jax.Array,
    from_block: AnyArray,
    to_block: AnyArray,
    *,
    layer: AnyArray | None = None,
    after: Sequence[AnyArray] = (),
) -> WriteResult:
    """Copies blocks inside a donated pool, as if all were read before any is written.

    Args:
        pool: `[num_blocks, ...]`, plain or packed; with `layer`, stacked `[num_layers, num_blocks,
            ...]`. Donated.
        from_block: int32 `[num_rows]`, blocks to read.
        to_block: int32 `[num_rows]`, blocks to write, distinct within a layer.
        layer: int32 `[num_rows]`, places on the layer axis.
        after: Results that were read from the pool and must be computed first.

    Returns:
        The pool and the status. A fault of values leaves the pool as it was.

    Raises:
        ValueError: For shapes and dtypes.
        PoolCopiedError: Outside jit, where the pool was copied instead of written in place.
    """
    num_rows = check_column("from_block", from_block)
    check_column("to_block", to_block, num_rows)
    if pool.ndim < (2 if layer is None else 3):
        raise ValueError(f"`pool` is {describe(pool)}; expected a block axis and the block's axes")
    return _write_in_place(
        "block_move",
        functools.partial(_block_move, has_layer_axis=layer is not None),
        pool,
        _layer_column(layer, num_rows),
        from_block,
        to_block,
        *after,
    )


def gather(
    pool: AnyArray,
    physical_block: AnyArray,
    *,
    pool_layout: Layout,
    layer: AnyArray | None = None,
    is_token_contiguous: bool = False,
) -> GatherResult:
    """Copies blocks out of a pool. Padding rows, and a refused call, give zeros.

    Args:
        pool: `[num_blocks, 2, ...]` in `pool_layout`; with `layer`, stacked
            `[num_layers, num_blocks, 2, ...]`.
        physical_block: int32 `[num_rows]`, blocks to read; the same one may come more than once.
        pool_layout: Plain layout of `pool`.
        layer: int32 `[num_rows]`, places on the layer axis.
        is_token_contiguous: False: blocks are `[num_rows, 2, ...]` in `pool_layout`. True:
            `[2, num_kv_heads, num_rows * block_tokens, head_dim]`, ready for attention.

    Raises:
        ValueError: For shapes, dtypes and layouts. Faults of values go into the status.
    """
    num_rows = check_column("physical_block", physical_block)
    heads, tokens, dim = _plain_block_shape("pool", pool, pool_layout)
    _check_rank("pool", pool, 5 if layer is None else 6)
    shape = (num_rows, *pool.shape[-4:])
    if is_token_contiguous:
        shape = (2, heads, num_rows * tokens, dim)
    load_native()
    return _gather(
        pool,
        _layer_column(layer, num_rows),
        physical_block,
        shape=shape,
        order=int(pool_layout),
        is_token_contiguous=is_token_contiguous,
    )


def _plain_block_shape(name: str, array: AnyArray, layout: Layout) -> tuple[int, int, int]:
    """(num_kv_heads, block_tokens, head_dim) of a plain array."""
    check_plain_layout(f"layout of `{name}`", layout)
    if array.ndim not in (5, 6) or array.shape[-4] != 2:
        inner = (
            "num_kv_heads, block_tokens"
            if layout is Layout.PLAIN_HND
            else ("block_tokens, num_kv_heads")
        )
        raise ValueError(
            f"`{name}` is {describe(array)}; expected [num_blocks, 2, {inner}, head_dim], or this "
            "with a leading layer axis"
        )
    heads, tokens = array.shape[-3], array.shape[-2]
    if layout is Layout.PLAIN_NHD:
        heads, tokens = tokens, heads
    dim = array.shape[-1]
    check_layout(layout, block_tokens=tokens, head_dim=dim, element_bytes=array.dtype.itemsize)
    return heads, tokens, dim


def _packed_block_shape(name: str, array: AnyArray, layout: Layout) -> tuple[int, int, int]:
    """(num_kv_heads, block_tokens, head_dim) of packed rows."""
    if array.ndim not in (4, 5) or array.shape[-2] % 2 != 0:
        raise ValueError(
            f"`{name}` is {describe(array)}; expected [num_rows, num_kv_heads, 2 * block_tokens, "
            "head_dim], or this with a leading layer axis"
        )
    heads, tokens, dim = array.shape[-3], array.shape[-2] // 2, array.shape[-1]
    _check_packed(layout, tokens, dim, array)
    return heads, tokens, dim


def _check_packed(layout: Layout, block_tokens: int, head_dim: int, array: AnyArray) -> None:
    check_packed_layout(layout)
    check_layout(
        layout,
        block_tokens=block_tokens,
        head_dim=head_dim,
        element_bytes=array.dtype.itemsize,
    )


def _check_rank(name: str, array: AnyArray, rank: int) -> None:
    if array.ndim != rank:
        raise ValueError(
            f"`{name}` has rank {array.ndim}; expected {rank}: a stacked pool has a leading layer "
            "axis and needs `layer`, a single layer's pool has neither"
        )


def _layer_column(layer: AnyArray | None, num_rows: int) -> AnyArray:
    if layer is None:
        return np.zeros(num_rows, np.int32)
    check_column("layer", layer, num_rows)
    return layer


def _write_in_place(
    call: str, write: Callable[..., WriteResult], pool: jax.Array, *operands: AnyArray
) -> WriteResult:
    """Runs a donating writer and, outside a trace, checks that the pool stayed where it was."""
    load_native()
    if isinstance(pool, Tracer):
        return write(pool, *operands)
    if any(isinstance(operand, Tracer) for operand in operands):
        raise ValueError(
            f"{call}: `pool` is a constant of the traced function and cannot be donated; make it "
            "an argument and donate it"
        )
    if not isinstance(pool, jax.Array):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{call}: `pool` is {describe(pool)} of numpy; expected a jax.Array")
    address = pool.unsafe_buffer_pointer()
    result = write(pool, *operands)
    if result.pool.unsafe_buffer_pointer() != address:
        raise PoolCopiedError(
            f"{call}: the pool came back at another address: it was copied, not written in place. "
            "Drop other references and views of it (DLPack, numpy), or register memory that "
            "another library owns as a RegisteredPool"
        )
    return result


@typed_jit(static_argnames=("shape", "layout", "order"))
def _pack(plain: Any, *, shape: tuple[int, ...], layout: int, order: int) -> jax.Array:
    call = jax.ffi.ffi_call("blockcompact_pack", jax.ShapeDtypeStruct(shape, plain.dtype))
    return call(plain, layout=np.int64(layout), order=np.int64(order))


@typed_jit(static_argnames=("shape", "layout", "order"))
def _unpack(packed: Any, *, shape: tuple[int, ...], layout: int, order: int) -> jax.Array:
    call = jax.ffi.ffi_call("blockcompact_unpack", jax.ShapeDtypeStruct(shape, packed.dtype))
    return call(packed, layout=np.int64(layout), order=np.int64(order))


@typed_jit(static_argnames=("layout", "order"), donate_argnums=0)
def _unpack_scatter(pool: Any, *operands: Any, layout: int, order: int) -> WriteResult:
    call = jax.ffi.ffi_call(
        "blockcompact_unpack_scatter",
        (jax.ShapeDtypeStruct(pool.shape, pool.dtype), _STATUS),
        input_output_aliases={0: 0},
    )
    return WriteResult(*call(pool, *operands, layout=np.int64(layout), order=np.int64(order)))


@typed_jit(static_argnames=("has_layer_axis",), donate_argnums=0)
def _block_move(pool: Any, *operands: Any, has_layer_axis: bool) -> WriteResult:
    call = jax.ffi.ffi_call(
        "blockcompact_block_move",
        (jax.ShapeDtypeStruct(pool.shape, pool.dtype), _STATUS),
        input_output_aliases={0: 0},
    )
    return WriteResult(*call(pool, *operands, has_layer_axis=has_layer_axis))


@typed_jit(static_argnames=("shape", "order", "is_token_contiguous"))
def _gather(
    pool: Any,
    layer: Any,
    physical_block: Any,
    *,
    shape: tuple[int, ...],
    order: int,
    is_token_contiguous: bool,
) -> GatherResult:
    call = jax.ffi.ffi_call(
        "blockcompact_gather", (jax.ShapeDtypeStruct(shape, pool.dtype), _STATUS)
    )
    results = call(
        pool,
        layer,
        physical_block,
        order=np.int64(order),
        is_token_contiguous=is_token_contiguous,
    )
    return GatherResult(*results)
