"""What a ledger knows about the request, operation and slot that an event names."""

# pyright: reportUnknownMemberType=false

from typing import Any, Final, NamedTuple

import numpy as np

from blockcompact_jax.ids import HOLE

from .kinds import MAX_RANKS, EventKind, OperationStage, SlotState
from .state import Event, LedgerState

_LARGEST: Final = np.int32(np.iinfo(np.int32).max)


def _marks(*stages: OperationStage) -> np.ndarray:
    return np.asarray([stage in stages for stage in OperationStage])


_IS_PENDING: Final = _marks(OperationStage.STAGED, OperationStage.ISSUED)
_IS_OPEN: Final = _IS_PENDING | _marks(OperationStage.COMMITTED)
_IS_UNUSED: Final = _marks(OperationStage.EMPTY, OperationStage.CLOSED, OperationStage.ABORTED)


class RequestFacts(NamedTuple):
    """The event's request. Shape [lane]; see `Requests`."""

    state: Any
    request_epoch: Any
    pool_generation: Any
    map_revision: Any
    selection_revision: Any
    last_operation_id: Any


class OperationFacts(NamedTuple):
    """The event's operation, zeros if it is unknown. Shape [lane]; see `Operations`."""

    stage: Any
    pool_generation: Any
    map_revision: Any
    selection_revision: Any
    body_digest: Any
    num_slots: Any
    awaited: Any


class SlotFacts(NamedTuple):
    """The event's slot. Shape [lane]; see `Slots`."""

    state: Any
    generation: Any
    request: Any
    quiet_ranks: Any


class Facts(NamedTuple):
    """What the event names, looked up. Shape [lane] unless said otherwise.

    Attributes:
        request, operation, slot: Their columns.
        at_request: Marks the request. [lane, request].
        is_known: Whether the operation is remembered.
        place: Its place, or 0.
        at_place: Marks it, if known. [lane, operation].
        reached: Its conditions. [lane, condition].
        of_operation: Slots it holds. [lane, slot].
        num_reserved: How many.
        open_operation: ID of the request's open operation, or HOLE; open until acknowledged.
        pending_operation: The same, but open until committed.
        has_free_place: Whether a place for an operation is unused, or its operation ended.
        free_place: That place.
        at_free_place: Marks it. [lane, operation].
        slot_named: The slot it names; for RESERVE with HOLE the lowest free one.
        at_slot: Marks it. [lane, slot].
        has_free_slot: Whether any slot is free.
        rank: The rank it names, forced into the range of bits.
    """

    request: RequestFacts
    operation: OperationFacts
    slot: SlotFacts
    at_request: Any
    is_known: Any
    place: Any
    at_place: Any
    reached: Any
    of_operation: Any
    num_reserved: Any
    open_operation: Any
    pending_operation: Any
    has_free_place: Any
    free_place: Any
    at_free_place: Any
    slot_named: Any
    at_slot: Any
    has_free_slot: Any
    rank: Any


def look_up(table: np.ndarray, *places: Any, xp: Any) -> Any:
    """Returns table[places] of a constant table, for places in range."""
    flat = places[0]
    for place, extent in zip(places[1:], table.shape[1:], strict=True):
        flat = flat * np.int32(extent) + place
    return xp.take(xp.asarray(table.reshape(-1)), flat, mode="clip")


def gather_facts(state: LedgerState, event: Event, xp: Any) -> Facts:
    """Looks up what an event names; a guard refuses what is out of range."""
    requests, operations, slots = state.requests, state.operations, state.slots
    num_requests, num_places = requests.state.shape[1], operations.stage.shape[1]
    num_slots = slots.state.shape[1]
    places = np.arange(num_places, dtype=np.int32)

    at_request = np.arange(num_requests, dtype=np.int32) == event.request[:, None]
    of_request = operations.request == event.request[:, None]
    is_match = (
        of_request
        & (operations.request_epoch == event.request_epoch[:, None])
        & (operations.operation_id == event.operation_id[:, None])
    )
    is_known = xp.any(is_match, axis=1)
    place = xp.argmax(is_match, axis=1).astype(np.int32)
    of_operation = (slots.operation == place[:, None]) & is_known[:, None]

    def newest(marks: np.ndarray) -> Any:
        is_marked = of_request & look_up(marks, operations.stage, xp=xp)
        return xp.max(xp.where(is_marked, operations.operation_id, np.int32(HOLE)), axis=1)

    is_unused = look_up(_IS_UNUSED, operations.stage, xp=xp)
    age = xp.where(is_unused, operations.sequence, _LARGEST)
    free_place = xp.argmin(age, axis=1).astype(np.int32)

    is_free = slots.state == SlotState.FREE
    is_any_slot = (event.kind == EventKind.RESERVE) & (event.slot < 0)
    slot = xp.where(is_any_slot, xp.argmax(is_free, axis=1).astype(np.int32), event.slot)
    at_slot = np.arange(num_slots, dtype=np.int32) == slot[:, None]
    chosen_reached = xp.where(is_match[:, :, None], operations.reached, np.int32(0))
    return Facts(
        request=RequestFacts(*_select(requests, RequestFacts._fields, at_request, xp)),
        operation=OperationFacts(*_select(operations, OperationFacts._fields, is_match, xp)),
        slot=SlotFacts(*_select(slots, SlotFacts._fields, at_slot, xp)),
        at_request=at_request,
        is_known=is_known,
        place=place,
        at_place=is_match,
        reached=xp.sum(chosen_reached, axis=1, dtype=np.int32),
        of_operation=of_operation,
        num_reserved=xp.sum(of_operation, axis=1, dtype=np.int32),
        open_operation=newest(_IS_OPEN),
        pending_operation=newest(_IS_PENDING),
        has_free_place=xp.any(is_unused, axis=1),
        free_place=free_place,
        at_free_place=places == free_place[:, None],
        slot_named=slot,
        at_slot=at_slot,
        has_free_slot=xp.any(is_free, axis=1),
        rank=xp.minimum(xp.maximum(event.rank, np.int32(0)), np.int32(MAX_RANKS)),
    )


def _select(table: Any, names: tuple[str, ...], mask: Any, xp: Any) -> Any:
    """Returns the columns of the one marked entry, zeros where none is marked."""
    columns = xp.stack([getattr(table, name) for name in names])
    return xp.sum(xp.where(mask, columns, np.int32(0)), axis=2, dtype=np.int32)
