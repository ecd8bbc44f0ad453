"""Outcomes of kernel calls: codes, their sentences, and the exceptions the host raises."""

import enum
from typing import Any

import numpy as np

from blockcompact_jax.errors import CompactionError


class KernelCode(enum.IntEnum):
    """First element of a status array. The values are those of the native code."""

    OK = 0
    UNKNOWN_POOL = 1
    WRONG_POOL_KIND = 2
    SHAPE_MISMATCH = 3
    STALE_ORD = 4
    READ_ONLY_POOL = 5
    OVERLAPPING_POOLS = 6
    PARTIAL_HOLE = 7
    LAYER_OUT_OF_RANGE = 8
    FROM_BLOCK_OUT_OF_RANGE = 9
    TO_BLOCK_OUT_OF_RANGE = 10
    DUPLICATE_DESTINATION = 11
    VALID_TOKENS_OUT_OF_RANGE = 12
    NUM_KEYS_OUT_OF_RANGE = 13
    OPEN_TRANSFER = 14
    OTHER_DEVICE = 15

    @property
    def sentence(self) -> str:
        """What is wrong and how to put it right."""
        return _SENTENCES[self]


_SENTENCES = {
    KernelCode.OK: "The call completed.",
    KernelCode.UNKNOWN_POOL: (
        "A pool is closed or was never registered; register it again and trace with the new pool."
    ),
    KernelCode.WRONG_POOL_KIND: (
        "A packed pool was given where a plain one is needed, or the reverse; swap the pools."
    ),
    KernelCode.SHAPE_MISMATCH: (
        "The two pools differ in layers, heads, block_tokens, head_dim or element size; register "
        "both with one geometry."
    ),
    KernelCode.STALE_ORD: (
        "An `ord` is not the pool's current one: something wrote the pool since; pass on the `ord` "
        "that the last call returned, or start again from `pool.current_ord()`."
    ),
    KernelCode.READ_ONLY_POOL: (
        "The written pool was registered with `is_writable=False`; register it as writable."
    ),
    KernelCode.OVERLAPPING_POOLS: (
        "The two pools share memory; read from and write to separate allocations."
    ),
    KernelCode.PARTIAL_HOLE: (
        "A row has HOLE in one block column but not in the other; padding rows have it in both."
    ),
    KernelCode.LAYER_OUT_OF_RANGE: "A row's layer is outside [0, num_layers) of the pool.",
    KernelCode.FROM_BLOCK_OUT_OF_RANGE: (
        "A row's block to read is outside [0, num_blocks) of what it is read from."
    ),
    KernelCode.TO_BLOCK_OUT_OF_RANGE: (
        "A row's block to write is outside [0, num_blocks) of the pool."
    ),
    KernelCode.DUPLICATE_DESTINATION: (
        "A row writes the (layer, block) that an earlier row writes; give each destination once."
    ),
    KernelCode.VALID_TOKENS_OUT_OF_RANGE: ("A row's `valid_tokens` is outside [0, block_tokens]."),
    KernelCode.NUM_KEYS_OUT_OF_RANGE: (
        "A segment's `num_keys` is outside [0, num_entries * block_tokens], or all segments "
        "together hold fewer keys than there are queries; give a longer table or fewer queries."
    ),
    KernelCode.OPEN_TRANSFER: (
        "An asynchronous upload that is not done yet writes a block that the call would use, or "
        "reads one that it would write (without a row: through another pool over the same "
        "memory); wait for the upload's event, or use other blocks."
    ),
    KernelCode.OTHER_DEVICE: (
        "The pools lie in memories that no one call reaches: a plain pool on a device takes a "
        "packed one on that device or in pinned host memory (`RegisteredPool.pin`), a plain pool "
        "on the host one on the host."
    ),
}


class KernelStatusError(CompactionError):
    """A call was refused as a whole; nothing was moved.

    Attributes:
        code: Why.
        row: First faulty row, or None where no single row is at fault.
    """

    def __init__(self, code: KernelCode, row: int | None, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.row = row


class PoolCopiedError(RuntimeError):
    """A donated pool came back in another buffer: it was copied instead of written in place."""


def raise_for_status(status: Any, *, call: str = "", **columns: Any) -> None:
    """Raises where a kernel call was refused. Waits for the call.

    Args:
        status: int32 `[2]`: code and first faulty row (-1: none).
        call: Name of the call, put before the sentence.
        **columns: Row arrays of the call, each int32 `[num_rows]` or scalar; the faulty row's
            values are put into the message.

    Raises:
        KernelStatusError: Where the code is not `OK`.
        ValueError: Where `status` is not a status array.
    """
    values = np.asarray(status)
    if values.shape != (2,) or values.dtype != np.int32:
        raise ValueError(
            f"`status` is {values.dtype}{list(values.shape)}; expected the int32[2] that a kernel "
            "call returned"
        )
    code = KernelCode(int(values[0]))
    if code is KernelCode.OK:
        return
    row = int(values[1])
    message = f"{call}: {code.sentence}" if call else code.sentence
    if row >= 0:
        cells = [f"{name} = {_cell(column, row)}" for name, column in columns.items()]
        message += f" Row {row}" + (f" has {', '.join(cells)}." if cells else ".")
    message += " Nothing was moved."
    raise KernelStatusError(code, row if row >= 0 else None, message)


def _cell(column: Any, row: int) -> int:
    values = np.asarray(column)
    return int(values if values.ndim == 0 else values[row])
