"""Result codes as full sentences with the remedy, and the exceptions of the host side.

Code under ``jit`` cannot raise. Each stage returns a `Result` instead: the first fault in
(stage, layer row, block) order, or OK. `raise_for_result` turns it into an exception on the host.
"""

# pyright: reportUnknownMemberType=false

import enum
from dataclasses import dataclass
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int32

from .ids import HOLE, AnyArray
from .masks import choose, first_true


class ResultCode(enum.IntEnum):
    """What a stage found. OK is zero; every other code leaves the stage's output inert."""

    OK = 0
    NON_FINITE_SCORE = 1
    CANDIDATES_OUT_OF_RANGE = 2
    BUDGET_TOO_SMALL = 3
    WANT_EXCEEDS_CAPACITY = 4
    DUPLICATE_BLOCK = 5
    BLOCK_OUT_OF_RANGE = 6
    COUNT_OUT_OF_RANGE = 7
    UPLOAD_EXCEEDS_CAPACITY = 8
    PADDING_EXHAUSTED = 9
    RESIDENCY_FULL = 10
    POOL_EXHAUSTED = 11
    DOUBLE_RELEASE = 12
    NOT_OWNED = 13
    STALE_PLAN = 14
    SOURCE_MISSING = 15
    PIN_EXISTS = 16
    PIN_UNKNOWN = 17
    PINS_FULL = 18
    STALE_BLOCK = 19
    EVENT_OUT_OF_RANGE = 20
    PROCESS_EPOCH_MISMATCH = 21
    REQUEST_RUNNING = 22
    REQUEST_NOT_RUNNING = 23
    EPOCH_STALE = 24
    EPOCH_FUTURE = 25
    OPERATION_REPEATED = 26
    OPERATION_CONFLICT = 27
    OPERATION_FORGOTTEN = 28
    OPERATION_UNKNOWN = 29
    OPERATION_OPEN = 30
    OPERATIONS_FULL = 31
    OPERATION_KEY_CONFLICT = 32
    OPERATION_STAGE = 33
    OPERATION_NOT_ISSUED = 34
    OPERATION_COMMITTED = 35
    OPERATION_ABORTED = 36
    ACK_EARLY = 37
    EVENT_REPEATED = 38
    EVENT_LATE = 39
    RESERVATION_COMPLETE = 40
    SLOTS_EXHAUSTED = 41
    SLOT_STATE = 42
    SLOT_STALE = 43
    SLOT_OWNER = 44
    CONDITION_UNEXPECTED = 45
    MISSING_RESERVATION = 46
    MISSING_READERS = 47
    MISSING_TRANSFER = 48
    MISSING_SIDE_BUFFER = 49
    MISSING_TABLES = 50
    MISSING_COMPLETION = 51


_SENTENCES: Final[dict[ResultCode, str]] = {
    ResultCode.NON_FINITE_SCORE: (
        "The score of logical block {block} in layer {layer} is NaN or infinite, so nothing was "
        "selected. Check the attention that produced it for overflow or an unmasked empty row."
    ),
    ResultCode.CANDIDATES_OUT_OF_RANGE: (
        "`num_candidate_blocks` is {block}, outside 0 … max_blocks. Give the number of whole, "
        "confirmed blocks before the recent tail, or raise the scores' block capacity."
    ),
    ResultCode.BUDGET_TOO_SMALL: (
        "`budget_blocks` is {block} in layer {layer}, less than sink_blocks + recent_blocks. Raise "
        "the budget, lower the sink or the recent tail, or set on_small_budget to EFFECTIVE."
    ),
    ResultCode.WANT_EXCEEDS_CAPACITY: (
        "Layer {layer} wants {block} blocks, more than `max_want`. "
        "Raise `max_want` in the selection policy or lower the budget."
    ),
    ResultCode.DUPLICATE_BLOCK: (
        "Logical block {block} is listed more than once in layer {layer}. "
        "Each block may be wanted, ranked or held once; rebuild the list."
    ),
    ResultCode.BLOCK_OUT_OF_RANGE: (
        "Block {block} in layer {layer} is negative or past the last block. "
        "Only IDs in [0, num_blocks) are allowed in the counted part of a list."
    ),
    ResultCode.COUNT_OUT_OF_RANGE: (
        "A list of layer {layer} counts {block} entries, outside 0 … its capacity. "
        "Give the number of filled places."
    ),
    ResultCode.UPLOAD_EXCEEDS_CAPACITY: (
        "Layer {layer} has {block} blocks to upload, more than `max_upload`. Raise `max_upload`; "
        "a wanted block is never dropped silently."
    ),
    ResultCode.PADDING_EXHAUSTED: (
        "Layer {layer} cannot be padded to the common {block} blocks from its ranked tail, even "
        "in a full plan. Raise `max_tail`, or use per-layer tables, which need no padding."
    ),
    ResultCode.RESIDENCY_FULL: (
        "Layer {layer} would hold {block} blocks, more than its resident slots. "
        "Create the residency with more slots, or retain before uploading."
    ),
    ResultCode.POOL_EXHAUSTED: (
        "The pool that owns layer {layer} has {block} free blocks, fewer than the plan needs. "
        "Enlarge the pool, lower the budget, or retain before uploading. Nothing was reserved."
    ),
    ResultCode.DOUBLE_RELEASE: (
        "Physical block {block} of the pool that owns layer {layer} is released more often than it "
        "is referenced. Nothing was released; find the second caller."
    ),
    ResultCode.NOT_OWNED: (
        "Physical block {block} of the pool that owns layer {layer} is not owned by this request "
        "or operation. Only reserve, acquire or commit blocks through the ownership."
    ),
    ResultCode.STALE_PLAN: (
        "The plan was made for another residency (its first differing revision is {block}). "
        "Make the plan again from the residency that is current now."
    ),
    ResultCode.SOURCE_MISSING: (
        "Logical block {block} of layer {layer} has no source block in the CPU pool. "
        "Write it to the CPU pool before it is selected, or leave it out of the candidates."
    ),
    ResultCode.PIN_EXISTS: (
        "Operation {block} of this holder has pinned blocks already. "
        "Give every operation an ID of its own, or unpin the first one."
    ),
    ResultCode.PIN_UNKNOWN: (
        "Operation {block} of this holder has no pinned blocks, so nothing was released. "
        "Unpin once, with the holder and operation that pinned."
    ),
    ResultCode.PINS_FULL: (
        "All {block} places for pins are taken. Create the pins with more places, or wait for an "
        "operation to end."
    ),
    ResultCode.STALE_BLOCK: (
        "Physical block {block} of the pool that owns layer {layer} was freed since its generation "
        "was read, so its bytes are another's. Nothing changed; look the block up again."
    ),
    ResultCode.EVENT_OUT_OF_RANGE: (
        "A field of the event has the value {block}, outside the ledger's capacities. Give a "
        "request, slot, rank, condition and count that the ledger was created for."
    ),
    ResultCode.PROCESS_EPOCH_MISMATCH: (
        "The event names process epoch {block}, which is not the one that may speak now. Shake "
        "hands again and send everything anew; nothing of another process is taken over."
    ),
    ResultCode.REQUEST_RUNNING: (
        "The request runs already, in epoch {block}. Finish or preempt it first."
    ),
    ResultCode.REQUEST_NOT_RUNNING: (
        "The request of epoch {block} is not running, so the event does not fit. Admit it first, "
        "or drop the event with the request that is gone."
    ),
    ResultCode.EPOCH_STALE: (
        "The event is of an earlier epoch of its request, {block}, and was ignored. Nothing is to "
        "be done; that epoch was aborted when it ended."
    ),
    ResultCode.EPOCH_FUTURE: (
        "The event names request epoch {block}, which was not given out yet. Use the epoch that "
        "admitting the request returned."
    ),
    ResultCode.OPERATION_REPEATED: (
        "Operation {block} was staged before with the same body, so nothing was staged again. "
        "Answer with its stored result."
    ),
    ResultCode.OPERATION_CONFLICT: (
        "Operation {block} was staged before with another body. Send the first body again, or use "
        "a new operation ID; the first operation is untouched."
    ),
    ResultCode.OPERATION_FORGOTTEN: (
        "Operation {block} is older than what the ledger remembers. It ended long ago; use a new, "
        "larger operation ID."
    ),
    ResultCode.OPERATION_UNKNOWN: (
        "Operation {block} was never staged in this epoch. Stage it first."
    ),
    ResultCode.OPERATION_OPEN: (
        "Operation {block} of this request is still open. Wait for its acknowledgement, or abort "
        "it, before the next change of the same request."
    ),
    ResultCode.OPERATIONS_FULL: (
        "All {block} places for operations are taken. Create the ledger with more places, or wait "
        "until an operation has ended."
    ),
    ResultCode.OPERATION_KEY_CONFLICT: (
        "The event names operation {block} with another pool generation or map revision than it "
        "was staged with. Send the key that staging returned."
    ),
    ResultCode.OPERATION_STAGE: (
        "Operation {block} is past the stage in which this event is possible. Stage a new "
        "operation for what is still to be done."
    ),
    ResultCode.OPERATION_NOT_ISSUED: (
        "Operation {block} was not issued to the ranks yet. Reserve its slots and issue it first."
    ),
    ResultCode.OPERATION_COMMITTED: (
        "Operation {block} is committed and cannot be aborted any more. Evict what it brought."
    ),
    ResultCode.OPERATION_ABORTED: (
        "Operation {block} was aborted, so it can neither continue nor commit. Stage a new one."
    ),
    ResultCode.ACK_EARLY: (
        "Operation {block} is acknowledged before it was committed. Acknowledge a commit after it "
        "happened, with the key that it was staged with."
    ),
    ResultCode.EVENT_REPEATED: (
        "The event happened before (operation or slot {block}), so nothing changed. Nothing is to "
        "be done; a repeated message is harmless."
    ),
    ResultCode.EVENT_LATE: (
        "The event came after operation {block} was aborted; it was ignored and counted. Nothing "
        "is to be done; the slots return once every rank is quiet."
    ),
    ResultCode.RESERVATION_COMPLETE: (
        "Operation {block} has reserved all the slots it was staged for. Stage it with the number "
        "of slots that it needs."
    ),
    ResultCode.SLOTS_EXHAUSTED: (
        "None of the {block} slots is free. Wait until retiring slots are quiet, evict residents, "
        "or create a larger pool."
    ),
    ResultCode.SLOT_STATE: (
        "Slot {block} is in a state in which this is not possible: only a free slot is reserved, a "
        "resident one evicted, a retiring one quiesced. Look at its state again."
    ),
    ResultCode.SLOT_STALE: (
        "Slot {block} was reserved again since its generation was read. Nothing changed; look the "
        "slot up again."
    ),
    ResultCode.SLOT_OWNER: (
        "Slot {block} belongs to another request. Only a request's own slots can be evicted by it."
    ),
    ResultCode.CONDITION_UNEXPECTED: (
        "Operation {block} does not wait for this condition. Stage it with slots or a side buffer "
        "if it moves any."
    ),
    ResultCode.MISSING_RESERVATION: (
        "Only {block} slots are reserved, fewer than the operation was staged for. Reserve the "
        "rest before issuing it."
    ),
    ResultCode.MISSING_READERS: (
        "Rank {block} has not said that the last reader of the old tables is done. Wait for its "
        "event; the next step is no proof of completion."
    ),
    ResultCode.MISSING_TRANSFER: (
        "Rank {block} has not said that the transfer has landed. Wait for its event; the next step "
        "is no proof of completion."
    ),
    ResultCode.MISSING_SIDE_BUFFER: (
        "Rank {block} has not said that the side buffer has landed. The blocks and their side "
        "buffer are committed together; wait for both."
    ),
    ResultCode.MISSING_TABLES: (
        "Rank {block} has not written all affected tables and valid lengths. Write them before the "
        "rank completes."
    ),
    ResultCode.MISSING_COMPLETION: (
        "The completion of rank {block} is missing. Wait for every rank, or abort; another rank's "
        "second completion does not count for it."
    ),
}


class CompactionError(ValueError):
    """A refused input or an inconsistent call. The message says the remedy."""


class PlanError(CompactionError):
    """A stage's `Result` that is not OK.

    Attributes:
        code: The result code.
        layer: Decoder layer ID, or HOLE where no layer is concerned.
        block: The block or count the sentence names, or HOLE.
    """

    def __init__(self, code: ResultCode, *, layer: int, block: int) -> None:
        self.code = code
        self.layer = layer
        self.block = block
        super().__init__(describe_code(code, layer=layer, block=block))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Result:
    """What a stage found, as arrays that travel through jit, vmap and scan.

    Attributes:
        code: `ResultCode` value, 0 is OK. Shape ().
        layer: Decoder layer ID of the first fault, or HOLE. Shape ().
        block: Block ID or count that the code's sentence names, or HOLE. Shape ().
    """

    code: Int32[Array, ""]
    layer: Int32[Array, ""]
    block: Int32[Array, ""]

    @property
    def is_ok(self) -> Bool[Array, ""]:
        """True where no fault was found."""
        return self.code == 0


def ok_result() -> Result:
    """Returns the result without a fault."""
    hole = jnp.int32(HOLE)
    return Result(code=jnp.int32(0), layer=hole, block=hole)


def fault_if(
    condition: AnyArray, code: ResultCode, *, layer: AnyArray | int = HOLE, block: AnyArray | int
) -> Result:
    """Returns the fault `code` where the scalar `condition` holds, otherwise OK."""
    return Result(
        code=jnp.where(condition, jnp.int32(code), jnp.int32(0)),
        layer=jnp.where(condition, jnp.asarray(layer, jnp.int32), jnp.int32(HOLE)),
        block=jnp.where(condition, jnp.asarray(block, jnp.int32), jnp.int32(HOLE)),
    )


def fault_at(
    mask: AnyArray, code: ResultCode, *, layer_by_row: AnyArray, block: AnyArray
) -> Result:
    """Returns the first fault of a mask in (row, column) order.

    Args:
        mask: Where the fault is. Shape [row] or [row, column].
        code: The fault.
        layer_by_row: Decoder layer ID of each row. Shape [row].
        block: The block or count to name at each place. Broadcasts to the mask's shape.
    """
    if mask.size == 0:
        return ok_result()
    columns = first_true(jnp.reshape(mask, (mask.shape[0], -1)))
    first_row = first_true((columns != HOLE)[None, :])[0]
    row = jnp.maximum(first_row, 0)
    place = (row, jnp.maximum(columns[row], 0))[: mask.ndim]
    layer = jnp.asarray(layer_by_row, jnp.int32)[row]
    named = jnp.broadcast_to(block, mask.shape)[place]
    return fault_if(first_row != HOLE, code, layer=layer, block=named)


def first_fault(*results: Result) -> Result:
    """Returns the first of the given results that is not OK, otherwise OK."""
    found = results[-1]
    for result in reversed(results[:-1]):
        found = choose(result.is_ok, found, result)
    return found


def describe_code(code: ResultCode, *, layer: int, block: int) -> str:
    """Returns the sentence of a result code, with the layer and block it names."""
    if code is ResultCode.OK:
        return "No fault was found."
    return _SENTENCES[code].format(layer=layer, block=block)


def raise_for_result(result: Result) -> None:
    """Raises `PlanError` for the first fault of a result; returns when all are OK.

    Args:
        result: A stage's result. With a leading request axis, the first faulty request is named.

    Raises:
        PlanError: If any code is not OK.
    """
    codes = np.asarray(result.code)
    faulty = np.flatnonzero(codes)
    if faulty.size == 0:
        return
    first = int(faulty[0])
    error = PlanError(
        ResultCode(int(codes.reshape(-1)[first])),
        layer=int(np.asarray(result.layer).reshape(-1)[first]),
        block=int(np.asarray(result.block).reshape(-1)[first]),
    )
    if codes.ndim > 0:
        error.add_note(f"Request {first} of {codes.size} in this batch.")
    raise error
