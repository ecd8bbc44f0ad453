"""The one function that changes a ledger: pure, the same for numpy and under jit.

An event is judged by the guards in order; the first that objects decides its code, and then only
the counts change. Otherwise the tables say what becomes of slots, operations and requests. There
is no clock, random draw, I/O or exception, and no branch on data: every lane takes the same path.
"""

# pyright: reportUnknownMemberType=false

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from blockcompact_jax.errors import ResultCode
from blockcompact_jax.ids import HOLE

from .facts import Facts, gather_facts, look_up
from .guards import judge
from .kinds import Condition, Disposition, EventKind, OperationStage, SlotEvent, SlotState
from .rules import NO_STATE, RULES, Rules
from .state import Event, LedgerState, Operations, Outcome, Requests, Slots
from .tables import (
    AWAITED_ALWAYS,
    AWAITED_WITH_SIDE_BUFFER,
    AWAITED_WITH_SLOTS,
    DISPOSITIONS,
    bits_of,
)

_DISPOSITION_BY_CODE = np.asarray(
    [DISPOSITIONS.get(code, Disposition.REFUSED) for code in ResultCode], np.int32
)


class _Step(NamedTuple):
    """One event that was judged; `kind` is NONE where it was refused."""

    state: LedgerState
    event: Event
    facts: Facts
    kind: Any
    rules: Rules
    xp: Any


def apply_event(
    state: LedgerState, event: Event, *, rules: Rules = RULES, xp: Any = np
) -> tuple[LedgerState, Outcome]:
    """Applies one event to each lane.

    Args:
        state: What is known. Not changed.
        event: One event per lane; `EventKind.NONE` changes nothing in a lane.
        rules: The tables; a simulator gives broken ones.
        xp: `numpy` or `jax.numpy`. Under jit the latter, with the same result to the bit.

    Returns:
        The new state and what became of each event.
    """
    facts = gather_facts(state, event, xp)
    code, value = judge(state, event, facts, rules, xp)
    # A refused event becomes no event; nothing below asks again.
    kind = xp.where(code == 0, event.kind, np.int32(EventKind.NONE))
    step = _Step(state, event, facts, kind, rules, xp)
    slots = _move_slots(step)
    operations = _move_operations(step, slots)
    requests = _move_requests(step)
    is_event = event.kind != EventKind.NONE
    disposition = look_up(_DISPOSITION_BY_CODE, code, xp=xp)
    dispositions = np.arange(len(Disposition), dtype=np.int32)
    counted = (disposition[:, None] == dispositions) & is_event[:, None]
    after = LedgerState(
        slots=slots,
        operations=operations,
        requests=requests,
        process_epoch=xp.where(kind == EventKind.RESTART, event.process_epoch, state.process_epoch),
        next_request_epoch=state.next_request_epoch + _flag(kind == EventKind.ADMIT),
        next_sequence=state.next_sequence + _flag(kind == EventKind.STAGE),
        counts=state.counts + _flag(counted),
        num_ranks=state.num_ranks,
    )
    result = xp.where(kind == EventKind.ADMIT, state.next_request_epoch, np.int32(HOLE))
    result = xp.where(kind == EventKind.RESERVE, facts.slot_named, result)
    result = xp.where(kind == EventKind.STAGE, facts.free_place, result)
    return after, Outcome(code=code, value=xp.where(code == 0, result, value))


def _flag(is_set: Any) -> Any:
    return is_set.astype(np.int32)


def _move_slots(step: _Step) -> Slots:
    state, event, facts, kind, rules, xp = step
    slots = state.slots
    tables = rules.arrays
    kind_column, at_slot, of_operation = kind[:, None], facts.at_slot, facts.of_operation

    quiet_bit = xp.where(
        at_slot & (kind_column == EventKind.QUIESCE), _bit(facts.rank, xp)[:, None], np.int32(0)
    )
    quiet_ranks = slots.quiet_ranks | quiet_bit
    is_quiet = (quiet_bit != 0) & (quiet_ranks == state.all_ranks)
    happening = xp.where(
        _is_ending(step, slots.request),
        look_up(tables.slot_end, slots.state, xp=xp),
        np.int32(SlotEvent.NONE),
    )
    for is_here, event_kind, slot_event in (
        (at_slot, EventKind.RESERVE, SlotEvent.RESERVE),
        (of_operation, EventKind.ISSUE, SlotEvent.ISSUE),
        (of_operation, EventKind.COMMIT, SlotEvent.COMMIT),
        (of_operation, EventKind.ABORT, SlotEvent.ABORT),
        (at_slot, EventKind.EVICT, SlotEvent.EVICT),
        (is_quiet, EventKind.QUIESCE, SlotEvent.QUIESCE),
    ):
        happening = xp.where(is_here & (kind_column == event_kind), np.int32(slot_event), happening)
    reached = look_up(tables.slot_next, slots.state, happening, xp=xp)
    next_state = xp.where(reached == NO_STATE, slots.state, reached)
    is_free = next_state == SlotState.FREE
    is_reserved = happening == SlotEvent.RESERVE
    request = xp.where(is_reserved, event.request[:, None], slots.request)
    operation = xp.where(is_reserved, facts.place[:, None], slots.operation)
    is_published = (happening == SlotEvent.COMMIT) | is_free
    return Slots(
        state=next_state,
        generation=slots.generation + _flag(is_reserved),
        request=xp.where(is_free, np.int32(HOLE), request),
        operation=xp.where(is_published, np.int32(HOLE), operation),
        quiet_ranks=xp.where(next_state == SlotState.RETIRING, quiet_ranks, np.int32(0)),
    )


def _is_ending(step: _Step, request: Any) -> Any:
    """Marks what belongs to a request that ends; a restart of the producer ends all."""
    kind = step.kind[:, None]
    is_end = (kind == EventKind.PREEMPT) | (kind == EventKind.FINISH)
    return (kind == EventKind.RESTART) | (is_end & (request == step.event.request[:, None]))


def _move_operations(step: _Step, slots: Slots) -> Operations:
    state, event, facts, kind, rules, xp = step
    operations = _stage_operation(step)
    tables = rules.arrays
    kind_column, at_operation = kind[:, None], facts.at_place

    reached_stage = look_up(tables.operation_next, operations.stage, kind_column, xp=xp)
    moves = at_operation & (kind_column != EventKind.STAGE) & (reached_stage != NO_STATE)
    stage = xp.where(moves, reached_stage, operations.stage)
    is_ending = _is_ending(step, operations.request)
    stage = xp.where(is_ending, look_up(tables.operation_end, operations.stage, xp=xp), stage)

    places = np.arange(stage.shape[1], dtype=np.int32)
    holds_slot = xp.any(slots.operation[:, None, :] == places[None, :, None], axis=2)
    is_drained = (stage == OperationStage.DRAINING) & ~holds_slot
    stage = xp.where(is_drained, np.int32(OperationStage.ABORTED), stage)

    conditions = np.arange(len(Condition), dtype=np.int32)
    is_reaching = (kind_column == EventKind.REACH) & at_operation
    reaches = is_reaching[:, :, None] & (event.condition[:, None, None] == conditions)
    bits = xp.where(reaches, _bit(facts.rank, xp)[:, None, None], np.int32(0))
    reached = operations.reached | bits
    has_landed = _has_landed(reached, operations.awaited, state.all_ranks)
    is_leased = operations.is_leased & ~is_drained & ~(is_reaching & has_landed)
    return replace(operations, stage=stage, reached=reached, is_leased=is_leased)


def _has_landed(reached: Any, awaited: Any, all_ranks: int) -> Any:
    """Returns whether every rank has all that an operation brings, so its source may go."""
    has_landed = reached[:, :, Condition.LANDED] == all_ranks
    has_side = reached[:, :, Condition.SIDE_LANDED] == all_ranks
    is_side_awaited = (awaited & bits_of(AWAITED_WITH_SIDE_BUFFER)) != 0
    return has_landed & (has_side | ~is_side_awaited)


def _stage_operation(step: _Step) -> Operations:
    """Writes a staged operation over the place of the oldest ended one."""
    state, event, facts, kind, _, xp = step
    operations = state.operations
    is_staged = facts.at_free_place & (kind == EventKind.STAGE)[:, None]
    has_slots = event.num_slots > 0
    awaited = xp.where(has_slots, np.int32(bits_of(AWAITED_WITH_SLOTS)), np.int32(0))
    with_side = np.int32(bits_of(AWAITED_WITH_SIDE_BUFFER))
    awaited = awaited | xp.where(event.has_side_buffer != 0, with_side, np.int32(0))
    awaited = awaited | np.int32(bits_of(AWAITED_ALWAYS))

    def put(column: Any, value: Any) -> Any:
        return xp.where(is_staged, value[:, None], column)

    return Operations(
        stage=xp.where(is_staged, np.int32(OperationStage.STAGED), operations.stage),
        request=put(operations.request, event.request),
        request_epoch=put(operations.request_epoch, event.request_epoch),
        operation_id=put(operations.operation_id, event.operation_id),
        pool_generation=put(operations.pool_generation, event.pool_generation),
        map_revision=put(operations.map_revision, event.map_revision),
        selection_revision=put(operations.selection_revision, event.selection_revision),
        body_digest=put(operations.body_digest, event.body_digest),
        num_slots=put(operations.num_slots, event.num_slots),
        awaited=put(operations.awaited, awaited),
        reached=xp.where(is_staged[:, :, None], np.int32(0), operations.reached),
        is_leased=put(operations.is_leased, has_slots),
        sequence=put(operations.sequence, state.next_sequence),
    )


def _move_requests(step: _Step) -> Requests:
    state, event, facts, kind, rules, xp = step
    requests = state.requests
    kind_column = kind[:, None]
    at_request = facts.at_request
    reached = look_up(rules.arrays.request_next, requests.state, kind_column, xp=xp)
    next_state = xp.where(at_request & (reached != NO_STATE), reached, requests.state)
    is_admitted = at_request & (kind_column == EventKind.ADMIT)
    is_committed = at_request & (kind_column == EventKind.COMMIT)
    is_staged = at_request & (kind_column == EventKind.STAGE)
    brings = is_committed & (facts.operation.num_slots > 0)[:, None]
    last_operation_id = xp.where(is_staged, event.operation_id[:, None], requests.last_operation_id)
    return Requests(
        state=xp.where(kind_column == EventKind.RESTART, np.int32(0), next_state),
        request_epoch=xp.where(
            is_admitted, state.next_request_epoch[:, None], requests.request_epoch
        ),
        pool_generation=requests.pool_generation + _flag(brings),
        map_revision=requests.map_revision
        + _flag(brings | (at_request & (kind_column == EventKind.EVICT))),
        selection_revision=xp.where(
            is_committed, facts.operation.selection_revision[:, None], requests.selection_revision
        ),
        last_operation_id=xp.where(is_admitted, np.int32(HOLE), last_operation_id),
    )


def _bit(rank: Any, xp: Any) -> Any:
    return xp.left_shift(np.int32(1), rank)
