"""Checks of rows: what may be wrong, and the first that is."""

# pyright: reportUnknownMemberType=false

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int32

from .errors import Result, ResultCode, ok_result
from .ids import HOLE, AnyArray


class Check(NamedTuple):
    """What may be wrong with each row.

    Attributes:
        is_faulty: rows where it is.
        code: the fault.
        block: the block or count that the fault's sentence names. Shape () or [row].
    """

    is_faulty: Bool[AnyArray, " row"]
    code: ResultCode
    block: AnyArray | int


def first_failing(*checks: Check, layer_by_row: AnyArray) -> Result:
    """Returns the fault of the first check that fails in any row, for its first row.

    All are found together: one fault after the other takes several kernels for each.

    Args:
        checks: The earlier goes before the later.
        layer_by_row: Decoder layer ID of each row. Shape [row].
    """
    num_rows = layer_by_row.shape[0]
    if num_rows == 0:
        return ok_result()
    end = len(checks) * num_rows
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    places, blocks = jnp.full(num_rows, end, jnp.int32), jnp.full(num_rows, HOLE, jnp.int32)
    for number, check in reversed(list(enumerate(checks))):
        places = jnp.where(check.is_faulty, number * num_rows + rows, places)
        blocks = jnp.where(check.is_faulty, check.block, blocks)
    first = jnp.min(places)
    is_found, place = first < end, jnp.minimum(first, end - 1)
    row = place % num_rows
    codes = np.asarray([check.code for check in checks], np.int32)
    return Result(
        code=jnp.where(is_found, _at(codes, place // num_rows), 0),
        layer=jnp.where(is_found, _at(layer_by_row, row), HOLE),
        block=jnp.where(is_found, _at(blocks, row), HOLE),
    )


def _at(values: AnyArray, place: Array) -> Int32[Array, ""]:
    """Returns values[place], which is in range."""
    return jnp.asarray(values, jnp.int32).at[place].get(mode="promise_in_bounds")
