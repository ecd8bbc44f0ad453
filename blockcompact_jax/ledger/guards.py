"""What each guard objects to. Which events it guards, and in which order, is in `tables`."""

# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from blockcompact_jax.errors import ResultCode
from blockcompact_jax.ids import HOLE

from .facts import Facts, look_up
from .kinds import Condition, EventKind, SlotState
from .rules import NO_STATE, Rules
from .state import Event, LedgerState
from .tables import GUARD_CODES, MISSING_CODES, NAMED_FIELDS, Guard


class Objection(NamedTuple):
    """Where a guard objects, with what code (None: its only one), and what the sentence names."""

    is_raised: Any
    value: Any
    code: Any = None


class _Case(NamedTuple):
    state: LedgerState
    event: Event
    facts: Facts
    rules: Rules
    xp: Any


_FIRST_CODES: Final = np.asarray([GUARD_CODES[guard][0] for guard in Guard], np.int32)[:, None]
_MISSING_CODES: Final = np.asarray([MISSING_CODES[each] for each in Condition], np.int32)
RANGED_FIELDS: Final = (
    "request",
    "slot",
    "rank",
    "condition",
    "operation_id",
    "num_slots",
    "has_side_buffer",
)
_IS_NAMED: Final = np.asarray(
    [[name in NAMED_FIELDS[kind] for kind in EventKind] for name in RANGED_FIELDS]
)
_LARGEST: Final = np.iinfo(np.int32).max
_CONDITIONS: Final = np.arange(len(Condition), dtype=np.int32)


def judge(state: LedgerState, event: Event, facts: Facts, rules: Rules, xp: Any) -> tuple[Any, Any]:
    """Asks the guards of each event in order.

    Returns:
        The code of the first objection, 0 where there is none, and what its sentence names.
    """
    case = _Case(state, event, facts, rules, xp)
    is_asked = xp.take(xp.asarray(rules.arrays.guarded), event.kind, axis=1, mode="clip")
    guards = list(Guard)
    if xp is np:
        # Under jit every guard is asked; here only those that some lane's event has.
        guards = [guard for guard in guards if is_asked[guard].any()] or [Guard.IN_RANGE]
    objections = [_OBJECTIONS[guard](case) for guard in guards]
    places = np.asarray(guards)
    is_raised = xp.stack([objection.is_raised for objection in objections]) & is_asked[places]
    order = np.arange(len(guards), dtype=np.int32)[:, None]
    is_first = (order == xp.argmax(is_raised, axis=0)) & is_raised
    values = xp.stack([objection.value for objection in objections])
    # A kind that does not exist has no guards of its own.
    is_unknown = (event.kind < 0) | (event.kind > EventKind.NONE)
    code = xp.sum(xp.where(is_first, _FIRST_CODES[places], np.int32(0)), axis=0, dtype=np.int32)
    for place, objection in enumerate(objections):
        if objection.code is not None:
            code = xp.where(is_first[place], objection.code, code)
    value = xp.sum(xp.where(is_first, values, np.int32(0)), axis=0, dtype=np.int32)
    value = xp.where(code == 0, np.int32(HOLE), value)
    code = xp.where(is_unknown, np.int32(ResultCode.EVENT_OUT_OF_RANGE), code)
    return code, xp.where(is_unknown, event.kind, value)


def _in_range(case: _Case) -> Objection:
    event, xp = case.event, case.xp
    is_named = xp.take(xp.asarray(_IS_NAMED), event.kind, axis=1, mode="clip")
    given = xp.stack([getattr(event, name) for name in RANGED_FIELDS])
    lowest = xp.where(event.kind == EventKind.RESERVE, np.int32(HOLE), np.int32(0))
    is_slot = np.asarray([name == "slot" for name in RANGED_FIELDS])[:, None]
    state = case.state
    ends = {
        "request": state.requests.state.shape[1],
        "slot": state.slots.state.shape[1],
        "rank": state.num_ranks,
        "condition": len(Condition),
        "num_slots": state.slots.state.shape[1] + 1,
        "has_side_buffer": 2,
    }
    end = np.asarray([ends.get(name, _LARGEST) for name in RANGED_FIELDS], np.int32)[:, None]
    # A side buffer travels with slots only.
    is_side = np.asarray([name == "has_side_buffer" for name in RANGED_FIELDS])[:, None]
    is_wrong = (given < xp.where(is_slot, lowest, np.int32(0))) | (given >= end)
    is_wrong = is_named & (is_wrong | (is_side & (given > 0) & (event.num_slots == 0)))
    order = np.arange(len(RANGED_FIELDS), dtype=np.int32)[:, None]
    is_first = is_wrong & (order == xp.argmax(is_wrong, axis=0))
    value = xp.sum(xp.where(is_first, given, np.int32(0)), axis=0, dtype=np.int32)
    return Objection(xp.any(is_wrong, axis=0), value)


def _process_epoch(case: _Case) -> Objection:
    given = case.event.process_epoch
    return Objection(given != case.state.process_epoch, given)


def _new_process_epoch(case: _Case) -> Objection:
    given = case.event.process_epoch
    return Objection(given <= case.state.process_epoch, given)


def _request_state(case: _Case) -> Objection:
    table = case.rules.arrays.request_next
    reached = look_up(table, case.facts.request.state, case.event.kind, xp=case.xp)
    return Objection(reached == NO_STATE, case.facts.request.request_epoch)


def _not_of_the_past(case: _Case) -> Objection:
    given = case.event.request_epoch
    return Objection(given < case.facts.request.request_epoch, given)


def _not_of_the_future(case: _Case) -> Objection:
    given = case.event.request_epoch
    return Objection(given > case.facts.request.request_epoch, given)


def _same_body(case: _Case) -> Objection:
    differs = case.event.body_digest != case.facts.operation.body_digest
    return Objection(case.facts.is_known & differs, case.event.operation_id)


def _staged_once(case: _Case) -> Objection:
    return Objection(case.facts.is_known, case.event.operation_id)


def _remembered(case: _Case) -> Objection:
    given = case.event.operation_id
    return Objection(~case.facts.is_known & (given <= case.facts.request.last_operation_id), given)


def _known(case: _Case) -> Objection:
    return Objection(~case.facts.is_known, case.event.operation_id)


def _same_key(case: _Case) -> Objection:
    event, facts = case.event, case.facts
    differs = event.pool_generation != facts.operation.pool_generation
    differs = differs | (event.map_revision != facts.operation.map_revision)
    return Objection(differs, event.operation_id)


def _no_open_operation(case: _Case) -> Objection:
    found = case.facts.open_operation
    return Objection(found >= 0, found)


def _no_pending_operation(case: _Case) -> Objection:
    found = case.facts.pending_operation
    return Objection(found >= 0, found)


def _current_basis(case: _Case) -> Objection:
    event, facts, xp = case.event, case.facts, case.xp
    pairs = (
        (event.pool_generation, facts.request.pool_generation),
        (event.map_revision, facts.request.map_revision),
        (event.selection_revision, facts.request.selection_revision + 1),
    )
    is_raised, value = event.kind < 0, event.pool_generation
    for given, current in pairs:
        differs = given != current
        value = xp.where(differs & ~is_raised, given, value)
        is_raised = is_raised | differs
    return Objection(is_raised, value)


def _has_place(case: _Case) -> Objection:
    num_places = case.state.operations.stage.shape[1]
    return Objection(~case.facts.has_free_place, case.xp.full_like(case.event.kind, num_places))


def _fitting_stage(case: _Case) -> Objection:
    table = case.rules.arrays.operation_code
    code = look_up(table, case.facts.operation.stage, case.event.kind, xp=case.xp)
    return Objection(code != 0, case.event.operation_id, code)


def _reserves_no_more(case: _Case) -> Objection:
    facts = case.facts
    return Objection(facts.num_reserved >= facts.operation.num_slots, case.event.operation_id)


def _has_free_slot(case: _Case) -> Objection:
    num_slots = case.state.slots.state.shape[1]
    is_any = case.event.slot < 0
    return Objection(
        is_any & ~case.facts.has_free_slot, case.xp.full_like(case.event.kind, num_slots)
    )


def _free_slot(case: _Case) -> Objection:
    is_taken = case.facts.slot.state != SlotState.FREE
    return Objection((case.event.slot >= 0) & is_taken, case.event.slot)


def _all_reserved(case: _Case) -> Objection:
    facts = case.facts
    return Objection(facts.num_reserved < facts.operation.num_slots, facts.num_reserved)


def _awaited(case: _Case) -> Objection:
    is_awaited = _bit(case.facts.operation.awaited, case.event.condition, case.xp)
    return Objection(is_awaited == 0, case.event.operation_id)


def _reached_once(case: _Case) -> Objection:
    is_condition = case.event.condition[:, None] == _CONDITIONS
    has_reached = _reached_by(case) & is_condition
    return Objection(case.xp.any(has_reached, axis=1), case.event.operation_id)


def _in_order(case: _Case) -> Objection:
    """A rank reaches a condition only after those before it."""
    event, facts, xp = case.event, case.facts, case.xp
    before = look_up(np.asarray(case.rules.prerequisites, np.int32), event.condition, xp=xp)
    needed = _bit((before & facts.operation.awaited)[:, None], _CONDITIONS, xp)
    is_missing = (needed != 0) & ~_reached_by(case)
    first = xp.argmax(is_missing, axis=1).astype(np.int32)
    code = look_up(_MISSING_CODES, first, xp=xp)
    return Objection(xp.any(is_missing, axis=1), event.rank, code)


def _all_ranks_ready(case: _Case) -> Objection:
    """A commit names the first missing condition and the lowest rank that lacks it."""
    facts, xp = case.facts, case.xp
    is_awaited = _bit(facts.operation.awaited[:, None], _CONDITIONS, xp) != 0
    is_missing = is_awaited & (facts.reached != case.state.all_ranks)
    first = xp.argmax(is_missing, axis=1).astype(np.int32)
    is_first = first[:, None] == _CONDITIONS
    reached = xp.sum(xp.where(is_first, facts.reached, np.int32(0)), axis=1, dtype=np.int32)
    ranks = np.arange(case.state.num_ranks, dtype=np.int32)
    lacking_rank = xp.argmax(_bit(reached[:, None], ranks, xp) == 0, axis=1).astype(np.int32)
    code = look_up(_MISSING_CODES, first, xp=xp)
    return Objection(xp.any(is_missing, axis=1), lacking_rank, code)


def _slot_generation(case: _Case) -> Objection:
    is_stale = case.event.slot_generation != case.facts.slot.generation
    return Objection(is_stale, case.event.slot)


def _own_slot(case: _Case) -> Objection:
    is_other = case.facts.slot.request != case.event.request
    is_free = case.facts.slot.state == SlotState.FREE
    return Objection(is_other & ~is_free, case.event.slot)


def _resident_slot(case: _Case) -> Objection:
    return Objection(case.facts.slot.state != SlotState.RESIDENT, case.event.slot)


def _retiring_slot(case: _Case) -> Objection:
    return Objection(case.facts.slot.state != SlotState.RETIRING, case.event.slot)


def _quiet_once(case: _Case) -> Objection:
    is_quiet = _bit(case.facts.slot.quiet_ranks, case.facts.rank, case.xp) != 0
    return Objection(is_quiet, case.event.slot)


def _reached_by(case: _Case) -> Any:
    """Returns which conditions the event's rank has reached. [lane, condition]."""
    return _bit(case.facts.reached, case.facts.rank[:, None], case.xp) != 0


def _bit(bits: Any, place: Any, xp: Any) -> Any:
    return xp.right_shift(bits, place) & np.int32(1)


_OBJECTIONS: Final[dict[Guard, Callable[[_Case], Objection]]] = {
    Guard.IN_RANGE: _in_range,
    Guard.PROCESS_EPOCH: _process_epoch,
    Guard.NEW_PROCESS_EPOCH: _new_process_epoch,
    Guard.NOT_RUNNING_YET: _request_state,
    Guard.NOT_OF_THE_PAST: _not_of_the_past,
    Guard.NOT_OF_THE_FUTURE: _not_of_the_future,
    Guard.STILL_RUNNING: _request_state,
    Guard.SAME_BODY: _same_body,
    Guard.STAGED_ONCE: _staged_once,
    Guard.REMEMBERED: _remembered,
    Guard.KNOWN: _known,
    Guard.SAME_KEY: _same_key,
    Guard.NO_OPEN_OPERATION: _no_open_operation,
    Guard.CURRENT_BASIS: _current_basis,
    Guard.HAS_PLACE: _has_place,
    Guard.FITTING_STAGE: _fitting_stage,
    Guard.RESERVES_NO_MORE: _reserves_no_more,
    Guard.HAS_FREE_SLOT: _has_free_slot,
    Guard.FREE_SLOT: _free_slot,
    Guard.ALL_RESERVED: _all_reserved,
    Guard.AWAITED: _awaited,
    Guard.REACHED_ONCE: _reached_once,
    Guard.IN_ORDER: _in_order,
    Guard.ALL_RANKS_READY: _all_ranks_ready,
    Guard.SLOT_GENERATION: _slot_generation,
    Guard.OWN_SLOT: _own_slot,
    Guard.RESIDENT_SLOT: _resident_slot,
    Guard.NO_PENDING_OPERATION: _no_pending_operation,
    Guard.RETIRING_SLOT: _retiring_slot,
    Guard.QUIET_ONCE: _quiet_once,
}
