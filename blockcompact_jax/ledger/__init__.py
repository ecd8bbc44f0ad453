"""The commit ledger: which slots, operations and requests are where, and what may happen next."""

from .apply import apply_event
from .batch import apply_event_jit, apply_events
from .handles import HeldSlot, LedgerError, OperationKey, RequestRevisions, Staging
from .host import CommitLedger
from .kinds import (
    Condition,
    Disposition,
    EventKind,
    OperationStage,
    RequestState,
    SlotEvent,
    SlotState,
)
from .state import Event, LedgerShape, LedgerState, Outcome, empty_state, make_event
from .tables import disposition_of

__all__ = [
    "CommitLedger",
    "Condition",
    "Disposition",
    "Event",
    "EventKind",
    "HeldSlot",
    "LedgerError",
    "LedgerShape",
    "LedgerState",
    "OperationKey",
    "OperationStage",
    "Outcome",
    "RequestRevisions",
    "RequestState",
    "SlotEvent",
    "SlotState",
    "Staging",
    "apply_event",
    "apply_event_jit",
    "apply_events",
    "disposition_of",
    "empty_state",
    "make_event",
]
