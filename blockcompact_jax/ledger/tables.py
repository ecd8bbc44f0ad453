"""The rules of the ledger as data: transitions, verdicts, conditions, and which guard guards what.

`rules` makes arrays of them, and `apply` reads nothing else. The documentation's tables are checked
against these, and most mutants of the simulator are one entry of them changed.
"""

import enum
from collections.abc import Mapping
from typing import Final

from blockcompact_jax.errors import ResultCode

from .kinds import (
    Condition,
    Disposition,
    EventKind,
    OperationStage,
    RequestState,
    SlotEvent,
    SlotState,
)

SLOT_TRANSITIONS: Final[Mapping[tuple[SlotState, SlotEvent], SlotState]] = {
    (SlotState.FREE, SlotEvent.RESERVE): SlotState.RESERVED,
    (SlotState.RESERVED, SlotEvent.ISSUE): SlotState.IN_FLIGHT,
    (SlotState.RESERVED, SlotEvent.ABORT): SlotState.FREE,
    (SlotState.IN_FLIGHT, SlotEvent.COMMIT): SlotState.RESIDENT,
    # Not FREE: the copy may still land.
    (SlotState.IN_FLIGHT, SlotEvent.ABORT): SlotState.RETIRING,
    (SlotState.RESIDENT, SlotEvent.EVICT): SlotState.RETIRING,
    (SlotState.RETIRING, SlotEvent.QUIESCE): SlotState.FREE,
}

SLOT_END: Final[Mapping[SlotState, SlotEvent]] = {
    SlotState.FREE: SlotEvent.NONE,
    SlotState.RESERVED: SlotEvent.ABORT,
    SlotState.IN_FLIGHT: SlotEvent.ABORT,
    SlotState.RESIDENT: SlotEvent.EVICT,
    SlotState.RETIRING: SlotEvent.NONE,
}
"""What happens to each slot of a request that ends."""

REQUEST_TRANSITIONS: Final[Mapping[tuple[RequestState, EventKind], RequestState]] = {
    (RequestState.ABSENT, EventKind.ADMIT): RequestState.RUNNING,
    (RequestState.PREEMPTED, EventKind.ADMIT): RequestState.RUNNING,
    (RequestState.FINISHED, EventKind.ADMIT): RequestState.RUNNING,
    (RequestState.RUNNING, EventKind.STAGE): RequestState.RUNNING,
    (RequestState.RUNNING, EventKind.EVICT): RequestState.RUNNING,
    (RequestState.RUNNING, EventKind.PREEMPT): RequestState.PREEMPTED,
    (RequestState.RUNNING, EventKind.FINISH): RequestState.FINISHED,
    (RequestState.PREEMPTED, EventKind.FINISH): RequestState.FINISHED,
}

_CODE = ResultCode
_STAGE = OperationStage

OPERATION_VERDICTS: Final[
    Mapping[OperationStage, Mapping[EventKind, OperationStage | ResultCode]]
] = {
    _STAGE.STAGED: {
        EventKind.RESERVE: _STAGE.STAGED,
        EventKind.ISSUE: _STAGE.ISSUED,
        EventKind.REACH: _CODE.OPERATION_NOT_ISSUED,
        EventKind.COMMIT: _CODE.OPERATION_NOT_ISSUED,
        EventKind.ACK: _CODE.ACK_EARLY,
        EventKind.ABORT: _STAGE.DRAINING,
    },
    _STAGE.ISSUED: {
        EventKind.RESERVE: _CODE.OPERATION_STAGE,
        EventKind.ISSUE: _CODE.EVENT_REPEATED,
        EventKind.REACH: _STAGE.ISSUED,
        EventKind.COMMIT: _STAGE.COMMITTED,
        EventKind.ACK: _CODE.ACK_EARLY,
        EventKind.ABORT: _STAGE.DRAINING,
    },
    _STAGE.COMMITTED: {
        EventKind.RESERVE: _CODE.OPERATION_STAGE,
        EventKind.ISSUE: _CODE.EVENT_REPEATED,
        EventKind.REACH: _CODE.EVENT_REPEATED,
        EventKind.COMMIT: _CODE.EVENT_REPEATED,
        EventKind.ACK: _STAGE.CLOSED,
        EventKind.ABORT: _CODE.OPERATION_COMMITTED,
    },
    _STAGE.DRAINING: {
        EventKind.RESERVE: _CODE.OPERATION_ABORTED,
        EventKind.ISSUE: _CODE.OPERATION_ABORTED,
        EventKind.REACH: _CODE.EVENT_LATE,
        EventKind.COMMIT: _CODE.OPERATION_ABORTED,
        EventKind.ACK: _CODE.EVENT_LATE,
        EventKind.ABORT: _CODE.EVENT_REPEATED,
    },
    _STAGE.CLOSED: {
        EventKind.RESERVE: _CODE.OPERATION_STAGE,
        EventKind.ISSUE: _CODE.EVENT_REPEATED,
        EventKind.REACH: _CODE.EVENT_REPEATED,
        EventKind.COMMIT: _CODE.EVENT_REPEATED,
        EventKind.ACK: _CODE.EVENT_REPEATED,
        EventKind.ABORT: _CODE.OPERATION_COMMITTED,
    },
    _STAGE.ABORTED: {
        EventKind.RESERVE: _CODE.OPERATION_ABORTED,
        EventKind.ISSUE: _CODE.OPERATION_ABORTED,
        EventKind.REACH: _CODE.EVENT_LATE,
        EventKind.COMMIT: _CODE.OPERATION_ABORTED,
        EventKind.ACK: _CODE.EVENT_LATE,
        EventKind.ABORT: _CODE.EVENT_REPEATED,
    },
}
"""Per stage, what an event of the operation leads to: the next stage, or a code. A DRAINING
operation without a slot left is ABORTED at once."""

OPERATION_END: Final[Mapping[OperationStage, OperationStage]] = {
    _STAGE.EMPTY: _STAGE.EMPTY,
    _STAGE.STAGED: _STAGE.DRAINING,
    _STAGE.ISSUED: _STAGE.DRAINING,
    _STAGE.COMMITTED: _STAGE.CLOSED,
    _STAGE.DRAINING: _STAGE.DRAINING,
    _STAGE.CLOSED: _STAGE.CLOSED,
    _STAGE.ABORTED: _STAGE.ABORTED,
}
"""What happens to each operation of a request that ends."""

AWAITED_ALWAYS: Final = frozenset({Condition.COMPLETED})
AWAITED_WITH_SLOTS: Final = frozenset(
    {Condition.READERS_DONE, Condition.LANDED, Condition.TABLES_WRITTEN}
)
AWAITED_WITH_SIDE_BUFFER: Final = frozenset({Condition.SIDE_LANDED})
"""What a commit waits for: an operation without slots only for the ranks' completions."""

PREREQUISITES: Final[Mapping[Condition, frozenset[Condition]]] = {
    Condition.READERS_DONE: frozenset(),
    Condition.LANDED: frozenset(),
    Condition.SIDE_LANDED: frozenset(),
    Condition.TABLES_WRITTEN: frozenset(
        {Condition.READERS_DONE, Condition.LANDED, Condition.SIDE_LANDED}
    ),
    Condition.COMPLETED: frozenset({Condition.TABLES_WRITTEN}),
}
"""What a rank must have reached before, as far as the operation waits for it at all."""

MISSING_CODES: Final[Mapping[Condition, ResultCode]] = {
    Condition.READERS_DONE: _CODE.MISSING_READERS,
    Condition.LANDED: _CODE.MISSING_TRANSFER,
    Condition.SIDE_LANDED: _CODE.MISSING_SIDE_BUFFER,
    Condition.TABLES_WRITTEN: _CODE.MISSING_TABLES,
    Condition.COMPLETED: _CODE.MISSING_COMPLETION,
}


class Guard(enum.IntEnum):
    """Checks before an event is applied, in the order in which they are made; the first decides."""

    IN_RANGE = 0
    PROCESS_EPOCH = 1
    NEW_PROCESS_EPOCH = 2
    NOT_RUNNING_YET = 3
    NOT_OF_THE_PAST = 4
    NOT_OF_THE_FUTURE = 5
    STILL_RUNNING = 6
    SAME_BODY = 7
    STAGED_ONCE = 8
    REMEMBERED = 9
    KNOWN = 10
    SAME_KEY = 11
    NO_OPEN_OPERATION = 12
    CURRENT_BASIS = 13
    HAS_PLACE = 14
    FITTING_STAGE = 15
    RESERVES_NO_MORE = 16
    HAS_FREE_SLOT = 17
    FREE_SLOT = 18
    ALL_RESERVED = 19
    AWAITED = 20
    REACHED_ONCE = 21
    IN_ORDER = 22
    ALL_RANKS_READY = 23
    SLOT_GENERATION = 24
    OWN_SLOT = 25
    RESIDENT_SLOT = 26
    NO_PENDING_OPERATION = 27
    RETIRING_SLOT = 28
    QUIET_ONCE = 29


_REQUEST_EVENTS = frozenset({EventKind.PREEMPT, EventKind.FINISH})
_OPERATION_EVENTS = frozenset(
    {
        EventKind.RESERVE,
        EventKind.ISSUE,
        EventKind.REACH,
        EventKind.COMMIT,
        EventKind.ACK,
        EventKind.ABORT,
    }
)
_EPOCH_EVENTS = _REQUEST_EVENTS | _OPERATION_EVENTS | {EventKind.STAGE, EventKind.EVICT}
_ALL_EVENTS = frozenset(EventKind) - {EventKind.NONE}

GUARDED_EVENTS: Final[Mapping[Guard, frozenset[EventKind]]] = {
    Guard.IN_RANGE: _ALL_EVENTS,
    # A slot's quiet is a fact of the pool, not a message of the producer: its generation decides.
    Guard.PROCESS_EPOCH: _ALL_EVENTS - {EventKind.RESTART, EventKind.QUIESCE},
    Guard.NEW_PROCESS_EPOCH: frozenset({EventKind.RESTART}),
    Guard.NOT_RUNNING_YET: frozenset({EventKind.ADMIT}),
    Guard.NOT_OF_THE_PAST: _EPOCH_EVENTS,
    Guard.NOT_OF_THE_FUTURE: _EPOCH_EVENTS,
    Guard.STILL_RUNNING: _REQUEST_EVENTS | {EventKind.STAGE, EventKind.EVICT},
    Guard.SAME_BODY: frozenset({EventKind.STAGE}),
    Guard.STAGED_ONCE: frozenset({EventKind.STAGE}),
    Guard.REMEMBERED: _OPERATION_EVENTS | {EventKind.STAGE},
    Guard.KNOWN: _OPERATION_EVENTS,
    Guard.SAME_KEY: _OPERATION_EVENTS,
    Guard.NO_OPEN_OPERATION: frozenset({EventKind.STAGE}),
    Guard.CURRENT_BASIS: frozenset({EventKind.STAGE}),
    Guard.HAS_PLACE: frozenset({EventKind.STAGE}),
    Guard.FITTING_STAGE: _OPERATION_EVENTS,
    Guard.RESERVES_NO_MORE: frozenset({EventKind.RESERVE}),
    Guard.HAS_FREE_SLOT: frozenset({EventKind.RESERVE}),
    Guard.FREE_SLOT: frozenset({EventKind.RESERVE}),
    Guard.ALL_RESERVED: frozenset({EventKind.ISSUE}),
    Guard.AWAITED: frozenset({EventKind.REACH}),
    Guard.REACHED_ONCE: frozenset({EventKind.REACH}),
    Guard.IN_ORDER: frozenset({EventKind.REACH}),
    Guard.ALL_RANKS_READY: frozenset({EventKind.COMMIT}),
    Guard.SLOT_GENERATION: frozenset({EventKind.EVICT, EventKind.QUIESCE}),
    Guard.OWN_SLOT: frozenset({EventKind.EVICT}),
    Guard.RESIDENT_SLOT: frozenset({EventKind.EVICT}),
    Guard.NO_PENDING_OPERATION: frozenset({EventKind.EVICT}),
    Guard.RETIRING_SLOT: frozenset({EventKind.QUIESCE}),
    Guard.QUIET_ONCE: frozenset({EventKind.QUIESCE}),
}

_RANGED_BY_OPERATION = frozenset({"request", "operation_id"})

NAMED_FIELDS: Final[Mapping[EventKind, frozenset[str]]] = {
    EventKind.ADMIT: frozenset({"request"}),
    EventKind.PREEMPT: frozenset({"request"}),
    EventKind.FINISH: frozenset({"request"}),
    EventKind.RESTART: frozenset(),
    EventKind.STAGE: _RANGED_BY_OPERATION | {"num_slots", "has_side_buffer"},
    EventKind.RESERVE: _RANGED_BY_OPERATION | {"slot"},
    EventKind.ISSUE: _RANGED_BY_OPERATION,
    EventKind.REACH: _RANGED_BY_OPERATION | {"rank", "condition"},
    EventKind.COMMIT: _RANGED_BY_OPERATION,
    EventKind.ACK: _RANGED_BY_OPERATION,
    EventKind.ABORT: _RANGED_BY_OPERATION,
    EventKind.EVICT: frozenset({"request", "slot"}),
    EventKind.QUIESCE: frozenset({"slot", "rank"}),
    EventKind.NONE: frozenset(),
}
"""Fields of each event that have a range to be checked."""

GUARD_CODES: Final[Mapping[Guard, tuple[ResultCode, ...]]] = {
    Guard.IN_RANGE: (_CODE.EVENT_OUT_OF_RANGE,),
    Guard.PROCESS_EPOCH: (_CODE.PROCESS_EPOCH_MISMATCH,),
    Guard.NEW_PROCESS_EPOCH: (_CODE.PROCESS_EPOCH_MISMATCH,),
    Guard.NOT_RUNNING_YET: (_CODE.REQUEST_RUNNING,),
    Guard.NOT_OF_THE_PAST: (_CODE.EPOCH_STALE,),
    Guard.NOT_OF_THE_FUTURE: (_CODE.EPOCH_FUTURE,),
    Guard.STILL_RUNNING: (_CODE.REQUEST_NOT_RUNNING,),
    Guard.SAME_BODY: (_CODE.OPERATION_CONFLICT,),
    Guard.STAGED_ONCE: (_CODE.OPERATION_REPEATED,),
    Guard.REMEMBERED: (_CODE.OPERATION_FORGOTTEN,),
    Guard.KNOWN: (_CODE.OPERATION_UNKNOWN,),
    Guard.SAME_KEY: (_CODE.OPERATION_KEY_CONFLICT,),
    Guard.NO_OPEN_OPERATION: (_CODE.OPERATION_OPEN,),
    Guard.CURRENT_BASIS: (_CODE.STALE_PLAN,),
    Guard.HAS_PLACE: (_CODE.OPERATIONS_FULL,),
    Guard.FITTING_STAGE: (
        _CODE.OPERATION_STAGE,
        _CODE.OPERATION_NOT_ISSUED,
        _CODE.OPERATION_COMMITTED,
        _CODE.OPERATION_ABORTED,
        _CODE.ACK_EARLY,
        _CODE.EVENT_REPEATED,
        _CODE.EVENT_LATE,
    ),
    Guard.RESERVES_NO_MORE: (_CODE.RESERVATION_COMPLETE,),
    Guard.HAS_FREE_SLOT: (_CODE.SLOTS_EXHAUSTED,),
    Guard.FREE_SLOT: (_CODE.SLOT_STATE,),
    Guard.ALL_RESERVED: (_CODE.MISSING_RESERVATION,),
    Guard.AWAITED: (_CODE.CONDITION_UNEXPECTED,),
    Guard.REACHED_ONCE: (_CODE.EVENT_REPEATED,),
    Guard.IN_ORDER: tuple(MISSING_CODES.values()),
    Guard.ALL_RANKS_READY: tuple(MISSING_CODES.values()),
    Guard.SLOT_GENERATION: (_CODE.SLOT_STALE,),
    Guard.OWN_SLOT: (_CODE.SLOT_OWNER,),
    Guard.RESIDENT_SLOT: (_CODE.SLOT_STATE,),
    Guard.NO_PENDING_OPERATION: (_CODE.OPERATION_OPEN,),
    Guard.RETIRING_SLOT: (_CODE.SLOT_STATE,),
    Guard.QUIET_ONCE: (_CODE.EVENT_REPEATED,),
}

DISPOSITIONS: Final[Mapping[ResultCode, Disposition]] = {
    _CODE.OK: Disposition.APPLIED,
    _CODE.EVENT_REPEATED: Disposition.REPEATED,
    _CODE.OPERATION_REPEATED: Disposition.REPEATED,
    _CODE.EVENT_LATE: Disposition.IGNORED,
    _CODE.EPOCH_STALE: Disposition.IGNORED,
    _CODE.OPERATION_FORGOTTEN: Disposition.IGNORED,
}
"""Every other code is REFUSED."""


def disposition_of(code: ResultCode) -> Disposition:
    """Returns what a code means for the event: applied, repeated, ignored or refused."""
    return DISPOSITIONS.get(code, Disposition.REFUSED)


def bits_of(conditions: frozenset[Condition]) -> int:
    """Returns a set of conditions as a bit set."""
    return sum(1 << condition for condition in conditions)
