"""ID spaces as branded array types, and ``HOLE``.

Every integer array of a plan counts in exactly one space. Under a type checker each space is a
type of its own, so that passing resident slots where physical blocks are expected is an error; at
run time all of them are plain JAX or numpy arrays. Arithmetic drops the brand: put it back with the
``as_*`` functions, at a module's edge only.

=================  ================================================================================
brand              what it counts
=================  ================================================================================
`TokenPositions`   tokens of a sequence, 0 … seq_len - 1 (the RoPE position)
`LogicalBlocks`    blocks of a sequence: token position // block_tokens
`ResidentSlots`    places of one layer's ordered resident list
`PhysicalBlocks`   blocks of the accelerator pool
`SourceBlocks`     blocks of the CPU pool that hold a logical block
`DestinationBlocks`  blocks of the CPU pool's compaction area (copy path only)
`Layers`           decoder layer IDs
`LayerRows`        places of the active full-attention layers, in layer order
`Groups`           KV-cache group IDs
=================  ================================================================================
"""

from typing import TYPE_CHECKING, Final, NewType, cast

import numpy as np
from jax import Array

HOLE: Final = -1
"""Marks an unused place of an ID array. Take it out before any membership test, maximum or sort."""

AnyArray = Array | np.ndarray

if TYPE_CHECKING:
    TokenPositions = NewType("TokenPositions", Array)
    LogicalBlocks = NewType("LogicalBlocks", Array)
    ResidentSlots = NewType("ResidentSlots", Array)
    PhysicalBlocks = NewType("PhysicalBlocks", Array)
    SourceBlocks = NewType("SourceBlocks", Array)
    DestinationBlocks = NewType("DestinationBlocks", Array)
    Layers = NewType("Layers", Array)
    LayerRows = NewType("LayerRows", Array)
    Groups = NewType("Groups", Array)
else:
    TokenPositions = AnyArray
    LogicalBlocks = AnyArray
    ResidentSlots = AnyArray
    PhysicalBlocks = AnyArray
    SourceBlocks = AnyArray
    DestinationBlocks = AnyArray
    Layers = AnyArray
    LayerRows = AnyArray
    Groups = AnyArray


def as_logical_blocks(array: AnyArray) -> LogicalBlocks:
    """Brands an array as logical blocks. Returns the same object."""
    return cast(LogicalBlocks, array)


def as_resident_slots(array: AnyArray) -> ResidentSlots:
    """Brands an array as resident slots. Returns the same object."""
    return cast(ResidentSlots, array)


def as_physical_blocks(array: AnyArray) -> PhysicalBlocks:
    """Brands an array as physical blocks. Returns the same object."""
    return cast(PhysicalBlocks, array)


def as_source_blocks(array: AnyArray) -> SourceBlocks:
    """Brands an array as source blocks. Returns the same object."""
    return cast(SourceBlocks, array)


def as_destination_blocks(array: AnyArray) -> DestinationBlocks:
    """Brands an array as CPU destination blocks. Returns the same object."""
    return cast(DestinationBlocks, array)


def as_layers(array: AnyArray) -> Layers:
    """Brands an array as decoder layer IDs. Returns the same object."""
    return cast(Layers, array)


def as_layer_rows(array: AnyArray) -> LayerRows:
    """Brands an array as layer rows. Returns the same object."""
    return cast(LayerRows, array)


def as_groups(array: AnyArray) -> Groups:
    """Brands an array as KV-cache group IDs. Returns the same object."""
    return cast(Groups, array)
