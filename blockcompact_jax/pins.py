"""Who pinned which blocks for an operation in flight, so that each pin is released once.

Reference counts alone cannot tell a second release by one holder from the first by another. A pin
is known by (holder, operation); it takes TRANSFER references and gives back exactly those.
"""

# pyright: reportUnknownMemberType=false

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32

from .errors import Result, ResultCode, fault_if, first_fault
from .geometry import ModelGeometry
from .ids import HOLE, AnyArray, PhysicalBlocks, as_physical_blocks
from .masks import choose
from .ownership import Ownership, ReferenceKind, Retirement, acquire, release


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Pins:
    """The pins of one pool.

    Attributes:
        holder: Who pinned: a request's number, at least 0; HOLE in unused places.
        operation_id: For which operation; HOLE in unused places.
        physical_blocks: The pinned blocks per owner, HOLE padded.
    """

    holder: Int32[Array, " pin"]
    operation_id: Int32[Array, " pin"]
    physical_blocks: Int32[PhysicalBlocks, "pin owner place"]


def empty_pins(ownership: Ownership, *, max_pins: int, max_blocks: int) -> Pins:
    """Returns pins that hold nothing.

    Args:
        ownership: The pool's reference counts, for the number of owners.
        max_pins: Static number of operations that may pin at once.
        max_blocks: Static number of blocks per owner that one operation may pin.
    """
    num_owners = ownership.references.shape[1]
    holes = jnp.full((max_pins,), HOLE, jnp.int32)
    blocks = jnp.full((max_pins, num_owners, max_blocks), HOLE, jnp.int32)
    return Pins(holder=holes, operation_id=holes, physical_blocks=as_physical_blocks(blocks))


def pin(
    ownership: Ownership,
    pins: Pins,
    holder: AnyArray | int,
    operation_id: AnyArray | int,
    physical_blocks: Int32[PhysicalBlocks, "owner place"],
    *,
    geometry: ModelGeometry,
) -> tuple[Ownership, Pins, Result]:
    """Pins blocks that an operation reads or writes until it is terminal.

    Args:
        ownership: Current counts.
        pins: Current pins.
        holder: Number of the request that pins. Shape ().
        operation_id: Its operation. Shape ().
        physical_blocks: Blocks per owner, HOLE in unused places; none may be free.
        geometry: Static facts.

    Returns:
        New counts and pins and the first fault: the operation pins already, no place is left, or a
        block is free, repeated or out of range. On a fault both are the ones given.
    """
    is_free_place = pins.holder == HOLE
    place = jnp.argmax(is_free_place)
    taken, acquired = acquire(
        ownership, physical_blocks, geometry=geometry, kind=ReferenceKind.TRANSFER
    )
    result = first_fault(
        fault_if(
            jnp.any(_is_pin(pins, holder, operation_id)), ResultCode.PIN_EXISTS, block=operation_id
        ),
        fault_if(~jnp.any(is_free_place), ResultCode.PINS_FULL, block=pins.holder.shape[0]),
        acquired,
    )
    added = Pins(
        holder=jnp.asarray(pins.holder).at[place].set(jnp.asarray(holder, jnp.int32)),
        operation_id=jnp.asarray(pins.operation_id)
        .at[place]
        .set(jnp.asarray(operation_id, jnp.int32)),
        physical_blocks=as_physical_blocks(
            jnp.asarray(pins.physical_blocks).at[place].set(physical_blocks)
        ),
    )
    new_ownership, new_pins = choose(result.is_ok, (taken, added), (ownership, pins))
    return new_ownership, new_pins, result


def unpin(
    ownership: Ownership,
    pins: Pins,
    holder: AnyArray | int,
    operation_id: AnyArray | int,
    *,
    geometry: ModelGeometry,
) -> tuple[Ownership, Pins, Retirement, Result]:
    """Releases what an operation pinned, once.

    Args:
        ownership: Current counts.
        pins: Current pins.
        holder: Number of the request that pinned. Shape ().
        operation_id: Its operation. Shape ().
        geometry: Static facts.

    Returns:
        New counts and pins, what was freed, and the first fault: an unknown or repeated unpin.
    """
    is_pin = _is_pin(pins, holder, operation_id)
    is_known = jnp.any(is_pin)
    blocks = jnp.where(is_known, pins.physical_blocks[jnp.argmax(is_pin)], HOLE)
    released, retirement, release_result = release(
        ownership, as_physical_blocks(blocks), geometry=geometry, kind=ReferenceKind.TRANSFER
    )
    result = first_fault(
        fault_if(~is_known, ResultCode.PIN_UNKNOWN, block=operation_id), release_result
    )
    is_removed = is_pin & result.is_ok
    remaining = Pins(
        holder=jnp.where(is_removed, HOLE, pins.holder),
        operation_id=jnp.where(is_removed, HOLE, pins.operation_id),
        physical_blocks=as_physical_blocks(
            jnp.where(is_removed[:, None, None], HOLE, pins.physical_blocks)
        ),
    )
    return released, remaining, retirement, result


def _is_pin(
    pins: Pins, holder: AnyArray | int, operation_id: AnyArray | int
) -> Bool[Array, " pin"]:
    return (pins.holder != HOLE) & (pins.holder == holder) & (pins.operation_id == operation_id)
