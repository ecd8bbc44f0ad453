"""The words of the ledger: states, stages, events and conditions. No rule is written here."""

import enum
from typing import Final


class SlotState(enum.IntEnum):
    """What a slot is doing. A slot is one physical block of the accelerator pool."""

    FREE = 0
    RESERVED = 1
    IN_FLIGHT = 2
    RESIDENT = 3
    RETIRING = 4


class SlotEvent(enum.IntEnum):
    """What happens to one slot. NONE leaves it as it is."""

    RESERVE = 0
    ISSUE = 1
    COMMIT = 2
    ABORT = 3
    EVICT = 4
    QUIESCE = 5
    NONE = 6


class OperationStage(enum.IntEnum):
    """How far an operation is. EMPTY marks an unused place; CLOSED and ABORTED are terminal."""

    EMPTY = 0
    STAGED = 1
    ISSUED = 2
    COMMITTED = 3
    DRAINING = 4
    CLOSED = 5
    ABORTED = 6


class RequestState(enum.IntEnum):
    """Whether a request may change its residency."""

    ABSENT = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


class EventKind(enum.IntEnum):
    """The events of the ledger. NONE is a place without an event; it changes nothing.

    ADMIT, PREEMPT, FINISH and RESTART (of the producer) concern requests; STAGE to ABORT one
    operation; EVICT and QUIESCE one slot.
    """

    ADMIT = 0
    PREEMPT = 1
    FINISH = 2
    RESTART = 3
    STAGE = 4
    RESERVE = 5
    ISSUE = 6
    REACH = 7
    COMMIT = 8
    ACK = 9
    ABORT = 10
    EVICT = 11
    QUIESCE = 12
    NONE = 13


class Condition(enum.IntEnum):
    """What each rank must reach before a commit, in the order in which a commit asks for it.

    READERS_DONE: the last reader of the old tables has ended. LANDED: the blocks' bytes are there.
    SIDE_LANDED: the side buffer (scales, a second pool) is there. TABLES_WRITTEN: all affected
    layer and group tables and valid lengths. COMPLETED: the rank's own completion.
    """

    READERS_DONE = 0
    LANDED = 1
    SIDE_LANDED = 2
    TABLES_WRITTEN = 3
    COMPLETED = 4


class Disposition(enum.IntEnum):
    """What became of an event; the ledger counts each.

    APPLIED changed the state. REPEATED had been applied before, IGNORED is of the past: both are
    harmless. REFUSED is an error of the caller.
    """

    APPLIED = 0
    REPEATED = 1
    IGNORED = 2
    REFUSED = 3


MAX_RANKS: Final = 30
"""Ranks are bits of an int32."""
