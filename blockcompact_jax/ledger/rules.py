"""The tables as nested tuples and arrays: what `apply_event` is given, and mutants change."""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from jaxtyping import Bool, Int32

from blockcompact_jax.errors import ResultCode

from .kinds import Condition, EventKind, OperationStage, RequestState, SlotEvent, SlotState
from .tables import (
    GUARDED_EVENTS,
    OPERATION_END,
    OPERATION_VERDICTS,
    PREREQUISITES,
    REQUEST_TRANSITIONS,
    SLOT_END,
    SLOT_TRANSITIONS,
    Guard,
    bits_of,
)

NO_STATE: Final = -1
"""Marks a transition that does not exist."""


@dataclass(frozen=True)
class Rules:
    """What `apply_event` reads, as nested tuples: hashable, so that a compiled call can hold them.

    Attributes:
        slot_next: `SlotState` value, or NO_STATE. [SlotState, SlotEvent].
        slot_end: `SlotEvent` of a slot whose request ends. [SlotState].
        request_next: `RequestState` value, or NO_STATE. [RequestState, EventKind].
        operation_next: `OperationStage` value, or NO_STATE. [OperationStage, EventKind].
        operation_code: `ResultCode` value. [OperationStage, EventKind].
        operation_end: `OperationStage` of an operation whose request ends. [OperationStage].
        prerequisites: bit set of conditions. [Condition].
        guarded: whether a guard checks an event. [Guard, EventKind].
    """

    slot_next: tuple[tuple[int, ...], ...]
    slot_end: tuple[int, ...]
    request_next: tuple[tuple[int, ...], ...]
    operation_next: tuple[tuple[int, ...], ...]
    operation_code: tuple[tuple[int, ...], ...]
    operation_end: tuple[int, ...]
    prerequisites: tuple[int, ...]
    guarded: tuple[tuple[bool, ...], ...]

    @cached_property
    def arrays(self) -> "RuleArrays":
        """The same tables as arrays, made once."""
        return RuleArrays(
            slot_next=np.asarray(self.slot_next, np.int32),
            slot_end=np.asarray(self.slot_end, np.int32),
            request_next=np.asarray(self.request_next, np.int32),
            operation_next=np.asarray(self.operation_next, np.int32),
            operation_code=np.asarray(self.operation_code, np.int32),
            operation_end=np.asarray(self.operation_end, np.int32),
            guarded=np.asarray(self.guarded, bool),
        )


@dataclass(frozen=True)
class RuleArrays:
    """The tables of `Rules` as arrays; the same names, the same values."""

    slot_next: Int32[np.ndarray, "state event"]
    slot_end: Int32[np.ndarray, " state"]
    request_next: Int32[np.ndarray, "state event"]
    operation_next: Int32[np.ndarray, "stage event"]
    operation_code: Int32[np.ndarray, "stage event"]
    operation_end: Int32[np.ndarray, " stage"]
    guarded: Bool[np.ndarray, "guard event"]


def _make_rules() -> Rules:
    def next_stage(stage: OperationStage, event: EventKind) -> int:
        verdict = OPERATION_VERDICTS.get(stage, {}).get(event)
        return int(verdict) if isinstance(verdict, OperationStage) else NO_STATE

    def code(stage: OperationStage, event: EventKind) -> int:
        verdict = OPERATION_VERDICTS.get(stage, {}).get(event)
        return int(verdict) if isinstance(verdict, ResultCode) else int(ResultCode.OK)

    return Rules(
        slot_next=tuple(
            tuple(int(SLOT_TRANSITIONS.get((state, event), NO_STATE)) for event in SlotEvent)
            for state in SlotState
        ),
        slot_end=tuple(int(SLOT_END[state]) for state in SlotState),
        request_next=tuple(
            tuple(int(REQUEST_TRANSITIONS.get((state, event), NO_STATE)) for event in EventKind)
            for state in RequestState
        ),
        operation_next=tuple(
            tuple(next_stage(stage, event) for event in EventKind) for stage in OperationStage
        ),
        operation_code=tuple(
            tuple(code(stage, event) for event in EventKind) for stage in OperationStage
        ),
        operation_end=tuple(int(OPERATION_END[stage]) for stage in OperationStage),
        prerequisites=tuple(bits_of(PREREQUISITES[condition]) for condition in Condition),
        guarded=tuple(
            tuple(event in GUARDED_EVENTS[guard] for event in EventKind) for guard in Guard
        ),
    )


RULES: Final = _make_rules()
"""The rules as they are."""
