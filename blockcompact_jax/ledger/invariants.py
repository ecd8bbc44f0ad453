"""What is true of every ledger at every moment. Each function marks the lanes where it is not.

They look at a state alone, or at a state before and after one event, and know no transition table.
"""

# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Final

import numpy as np
from jaxtyping import Bool

from blockcompact_jax.ids import HOLE

from .kinds import Condition, EventKind, OperationStage, RequestState, SlotState
from .state import Event, LedgerState, Outcome

LaneMask = Bool[np.ndarray, " lane"]

_LANDINGS = (Condition.LANDED, Condition.SIDE_LANDED)
_HELD_STATES = {
    OperationStage.STAGED: SlotState.RESERVED,
    OperationStage.ISSUED: SlotState.IN_FLIGHT,
    OperationStage.DRAINING: SlotState.RETIRING,
}


def _is_held_by(state: LedgerState) -> Any:
    """Marks which operation holds which slot. [lane, operation, slot]."""
    places = np.arange(state.operations.stage.shape[1])
    return np.asarray(state.slots.operation)[:, None, :] == places[:, None]


def _column_of_lanes(column: np.ndarray) -> np.ndarray:
    return np.arange(column.shape[0], dtype=np.int32).reshape(-1, 1)


def free_slots_belong_to_nobody(state: LedgerState) -> LaneMask:
    """A slot is free exactly when it has no request; a free one has no operation either."""
    slots = state.slots
    is_free = np.asarray(slots.state == SlotState.FREE)
    is_wrong = is_free != np.asarray(slots.request == HOLE)
    is_wrong |= is_free & np.asarray(slots.operation != HOLE)
    is_wrong |= np.asarray(slots.state != SlotState.RETIRING) & np.asarray(slots.quiet_ranks != 0)
    is_wrong |= np.asarray(slots.quiet_ranks == state.all_ranks)
    return is_wrong.any(axis=1)


def slots_match_their_operation(state: LedgerState) -> LaneMask:
    """Reserved slots belong to staged operations, those in flight to issued, all of them."""
    slots, stage = state.slots, np.asarray(state.operations.stage)
    is_held = _is_held_by(state)
    slot_state = np.asarray(slots.state)[:, None, :]
    is_wrong = np.zeros(stage.shape, bool)
    for each in OperationStage:
        expected = _HELD_STATES.get(each)
        is_odd = is_held if expected is None else is_held & (slot_state != expected)
        is_wrong |= (stage == each) & is_odd.any(axis=2)
    num_held = is_held.sum(axis=2)
    num_slots = np.asarray(state.operations.num_slots)
    is_wrong |= (stage == OperationStage.STAGED) & (num_held > num_slots)
    is_wrong |= (stage == OperationStage.ISSUED) & (num_held != num_slots)
    is_wrong |= (stage == OperationStage.DRAINING) & (num_held == 0)
    is_owned = np.asarray(slots.operation != HOLE)
    needs_operation = np.isin(slots.state, (SlotState.RESERVED, SlotState.IN_FLIGHT))
    is_orphan = needs_operation & ~is_owned
    is_orphan |= np.asarray(slots.state == SlotState.RESIDENT) & is_owned
    owner = np.asarray(state.operations.request)[:, :, None]
    is_foreign = is_held & (owner != np.asarray(slots.request)[:, None, :])
    return is_wrong.any(axis=1) | is_orphan.any(axis=1) | is_foreign.any(axis=(1, 2))


def only_running_requests_hold_slots(state: LedgerState) -> LaneMask:
    """Resident, reserved and incoming slots belong to a request that runs. Nothing leaks."""
    is_running = np.asarray(state.requests.state == RequestState.RUNNING)
    holder = np.asarray(state.slots.request)
    lanes = _column_of_lanes(holder)
    holds = is_running[lanes, np.maximum(holder, 0)] & (holder != HOLE)
    is_live = np.isin(
        state.slots.state, (SlotState.RESERVED, SlotState.IN_FLIGHT, SlotState.RESIDENT)
    )
    return (is_live & ~holds).any(axis=1)


def one_open_operation_per_request(state: LedgerState) -> LaneMask:
    """An open operation is of its request's present epoch, and its basis is what is published."""
    operations, requests = state.operations, state.requests
    stage = np.asarray(operations.stage)
    is_open = np.isin(
        stage, (OperationStage.STAGED, OperationStage.ISSUED, OperationStage.COMMITTED)
    )
    is_pending = is_open & (stage != OperationStage.COMMITTED)
    request = np.maximum(np.asarray(operations.request), 0)
    lanes = _column_of_lanes(stage)

    def of_request(column: Any) -> Any:
        return np.asarray(column)[lanes, request]

    is_wrong = is_open & (of_request(requests.state) != RequestState.RUNNING)
    is_wrong |= is_open & (of_request(requests.request_epoch) != operations.request_epoch)
    for column in ("pool_generation", "map_revision"):
        current, basis = of_request(getattr(requests, column)), getattr(operations, column)
        is_wrong |= is_pending & (current != basis)
    numbers = np.arange(requests.state.shape[1])
    is_mine = np.asarray(operations.request)[:, None, :] == numbers[:, None]
    num_open = (is_mine & is_open[:, None, :]).sum(axis=2)
    return is_wrong.any(axis=1) | (num_open > 1).any(axis=1)


def leases_end_with_the_transfer(state: LedgerState) -> LaneMask:
    """A source is held from staging until all its bytes have landed, or the last copy is quiet."""
    operations = state.operations
    stage, awaited = np.asarray(operations.stage), np.asarray(operations.awaited)
    has_landed = np.ones(stage.shape, bool)
    for condition in _LANDINGS:
        is_awaited = (awaited >> condition) & 1 != 0
        reached = np.asarray(operations.reached)[:, :, condition]
        has_landed &= ~is_awaited | (reached == state.all_ranks)
    is_moving = np.isin(
        stage, (OperationStage.STAGED, OperationStage.ISSUED, OperationStage.DRAINING)
    )
    expected = is_moving & np.asarray(operations.num_slots > 0) & ~has_landed
    return (expected != np.asarray(operations.is_leased)).any(axis=1)


def conditions_are_reached_in_order(state: LedgerState) -> LaneMask:
    """No rank wrote tables before its bytes, or completed before its tables; commits lack none."""
    operations = state.operations
    reached, awaited = np.asarray(operations.reached), np.asarray(operations.awaited)
    stage = np.asarray(operations.stage)
    all_ranks = state.all_ranks

    def ranks_at(condition: Condition) -> Any:
        is_awaited = (awaited >> condition) & 1 != 0
        return np.where(is_awaited, reached[:, :, condition], all_ranks)

    is_wrong = (reached & ~all_ranks != 0).any(axis=2)
    is_used = stage != OperationStage.EMPTY
    tables, completed = ranks_at(Condition.TABLES_WRITTEN), ranks_at(Condition.COMPLETED)
    has_tables = (awaited >> Condition.TABLES_WRITTEN) & 1 != 0
    is_committed = np.isin(stage, (OperationStage.COMMITTED, OperationStage.CLOSED))
    for condition in (Condition.READERS_DONE, *_LANDINGS):
        is_wrong |= has_tables & (tables & ~ranks_at(condition) != 0)
    is_wrong |= completed & ~tables != 0
    for condition in Condition:
        is_wrong |= is_committed & (ranks_at(condition) != all_ranks)
    return (is_wrong & is_used).any(axis=1)


def keys_are_unique(state: LedgerState) -> LaneMask:
    """No two remembered operations have one request, epoch and operation ID; nor two epochs."""
    operations, requests = state.operations, state.requests
    keys = np.stack([operations.request, operations.request_epoch, operations.operation_id], axis=2)
    is_equal = (keys[:, :, None] == keys[:, None, :]).all(axis=3)
    is_used = np.asarray(operations.stage != OperationStage.EMPTY)
    is_equal &= np.tri(keys.shape[1], k=-1, dtype=bool) & is_used[:, :, None] & is_used[:, None]
    epochs = np.asarray(requests.request_epoch)
    is_same = (epochs[:, :, None] == epochs[:, None]) & (epochs != 0)[:, :, None]
    is_same &= np.tri(epochs.shape[1], k=-1, dtype=bool)
    is_ahead = epochs >= np.asarray(state.next_request_epoch)[:, None]
    return is_equal.any(axis=(1, 2)) | is_same.any(axis=(1, 2)) | is_ahead.any(axis=1)


INVARIANTS: Final[Mapping[str, Callable[[LedgerState], LaneMask]]] = {
    function.__name__: function
    for function in (
        free_slots_belong_to_nobody,
        slots_match_their_operation,
        only_running_requests_hold_slots,
        one_open_operation_per_request,
        leases_end_with_the_transfer,
        conditions_are_reached_in_order,
        keys_are_unique,
    )
}


def counters_never_fall(before: LedgerState, after: LedgerState) -> LaneMask:
    """Epochs, generations and revisions grow or stay; a generation by at most one an event."""
    is_wrong = np.asarray(after.process_epoch < before.process_epoch)
    old, new = before.requests, after.requests
    for fallen in (
        new.request_epoch < old.request_epoch,
        new.pool_generation < old.pool_generation,
        new.map_revision < old.map_revision,
        new.selection_revision < old.selection_revision,
    ):
        is_wrong = is_wrong | np.asarray(fallen).any(axis=1)
    is_newly_reserved = np.asarray(before.slots.state == SlotState.FREE) & np.asarray(
        after.slots.state != SlotState.FREE
    )
    grown = np.asarray(after.slots.generation) - np.asarray(before.slots.generation)
    return is_wrong | (grown != is_newly_reserved).any(axis=1)


def refused_events_change_nothing(
    before: LedgerState, after: LedgerState, outcome: Outcome
) -> LaneMask:
    """An event with a code other than OK changes the counts and nothing else."""
    is_changed = np.zeros(np.asarray(outcome.code).shape, bool)
    for old, new in (
        (before.slots, after.slots),
        (before.operations, after.operations),
        (before.requests, after.requests),
    ):
        for column in (entry.name for entry in fields(old)):
            differs = np.asarray(getattr(old, column)) != np.asarray(getattr(new, column))
            is_changed |= differs.reshape(differs.shape[0], -1).any(axis=1)
    return is_changed & (np.asarray(outcome.code) != 0)


_CHANGES_RESIDENTS = (
    EventKind.COMMIT,
    EventKind.EVICT,
    EventKind.PREEMPT,
    EventKind.FINISH,
    EventKind.RESTART,
)


def residents_stay_until_a_commit(
    before: LedgerState, event: Event, after: LedgerState
) -> LaneMask:
    """What can be read, and its revisions, change by a commit, an eviction or an end alone."""
    was, is_now = (np.asarray(s.slots.state == SlotState.RESIDENT) for s in (before, after))
    differs = (was != is_now).any(axis=1)
    for column in ("pool_generation", "map_revision", "selection_revision"):
        old, new = (np.asarray(getattr(s.requests, column)) for s in (before, after))
        differs |= (old != new).any(axis=1)
    return differs & ~np.isin(event.kind, _CHANGES_RESIDENTS)


def find_violations(state: LedgerState) -> dict[str, LaneMask]:
    """Returns, by the name of each violated invariant, the lanes that violate it."""
    found = {name: invariant(state) for name, invariant in INVARIANTS.items()}
    return {name: lanes for name, lanes in found.items() if lanes.any()}


def find_bad_steps(
    before: LedgerState, event: Event, after: LedgerState, outcome: Outcome
) -> dict[str, LaneMask]:
    """Returns the same for what is true of every step from one state to the next."""
    found = {
        counters_never_fall.__name__: counters_never_fall(before, after),
        refused_events_change_nothing.__name__: refused_events_change_nothing(
            before, after, outcome
        ),
        residents_stay_until_a_commit.__name__: residents_stay_until_a_commit(before, event, after),
    }
    return {name: lanes for name, lanes in found.items() if lanes.any()}
