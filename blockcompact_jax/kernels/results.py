"""What kernel calls return. Host calls return numpy arrays, jitted calls JAX arrays."""

from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

AnyArray: TypeAlias = jax.Array | np.ndarray[Any, Any]


class PoolPackResult(NamedTuple):
    """Of `pool_pack`: each pool's next `ord` (uint32 `[1]`) and the status (int32 `[2]`)."""

    ord_plain: AnyArray
    ord_packed: AnyArray
    status: AnyArray


class PoolUploadResult(NamedTuple):
    """Of `pool_upload`: each pool's next `ord` (uint32 `[1]`) and the status (int32 `[2]`)."""

    ord_packed: AnyArray
    ord_plain: AnyArray
    status: AnyArray


class PoolMoveResult(NamedTuple):
    """Of `pool_block_move`: the pool's next `ord` (uint32 `[1]`) and the status (int32 `[2]`)."""

    ord: AnyArray
    status: AnyArray


class PoolGatherResult(NamedTuple):
    """Of `pool_gather`: the blocks, the pool's `ord` (uint32 `[1]`), the status (int32 `[2]`)."""

    blocks: AnyArray
    ord: AnyArray
    status: AnyArray


class WriteResult(NamedTuple):
    """Of a call that writes a donated pool: the pool, in place, and the status (int32 `[2]`)."""

    pool: jax.Array
    status: jax.Array


class GatherResult(NamedTuple):
    """Of `gather`: the blocks and the status (int32 `[2]`)."""

    blocks: jax.Array
    status: jax.Array
