"""Every interleaving of a small ledger: all states that any order of events can reach.

Requests stage operations in every way, on ranks that finish in every order, with aborts,
preemption, finish, eviction and, if asked for, a restart of the producer at every moment. Each
state is kept once. States are told apart by all their numbers but two: the counts of events, and
the conditions that ranks had reached of an operation that is no longer issued. No rule reads
either: a completion is looked at in the stage ISSUED alone, every other stage answers it by its
verdict. Ranks are not interchanged.
"""

# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from blockcompact_jax.ledger.batch import apply_event_jit
from blockcompact_jax.ledger.invariants import find_bad_steps, find_violations
from blockcompact_jax.ledger.kinds import Condition, EventKind, OperationStage, SlotState
from blockcompact_jax.ledger.rules import RULES, Rules
from blockcompact_jax.ledger.state import (
    EVENT_FIELDS,
    Event,
    LedgerShape,
    LedgerState,
    Outcome,
    empty_state,
)

from .check import flatten_state

_CHUNK_STATES = 2048
_SMALL = LedgerShape(max_requests=2, max_operations=3, max_slots=2, num_ranks=2)
_KEY = ("request", "request_epoch", "operation_id", "pool_generation", "map_revision")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is explored.

    Attributes:
        shape: Capacities of the ledger.
        slots_by_operation: Slots of the first, second, … operation that is staged, by whomever.
        max_admissions: Admissions in all.
        max_restarts: Restarts of the producer.
    """

    shape: LedgerShape = _SMALL
    slots_by_operation: tuple[int, ...] = (1, 1, 0)
    max_admissions: int = 2
    max_restarts: int = 0


@dataclass(frozen=True, kw_only=True)
class Exploration:
    """What was found.

    Attributes:
        num_states: States that can be reached.
        num_transitions: Events that lead from one to another, repeats between the same included.
        num_events: Events that were tried.
        problems: Names of violated invariants, with how many states or steps violate them.
    """

    num_states: int
    num_transitions: int
    num_events: int
    problems: dict[str, int]


def explore(
    scenario: Scenario,
    *,
    rules: Rules = RULES,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Exploration:
    """Visits every state that can be reached.

    Args:
        scenario: What is explored.
        rules: The tables; broken ones show that this can fail.
        on_progress: Called with the number of states visited so far.
    """
    start = empty_state(scenario.shape)
    known = _KnownStates(_identity(start))
    problems: dict[str, int] = {}
    frontier, num_states, num_transitions, num_events = start, 1, 0, 0
    while _num_lanes(frontier):
        found: list[LedgerState] = []
        for chunk in _chunks(frontier):
            _count(problems, _stuck(chunk, scenario, rules))
            for event in _events(chunk, scenario):
                is_event = np.asarray(event.kind) != EventKind.NONE
                if not is_event.any():
                    continue
                after, outcome = _apply(chunk, event, rules)
                lanes = np.flatnonzero((np.asarray(outcome.code) == 0) & is_event)
                num_events += int(np.count_nonzero(is_event))
                num_transitions += lanes.size
                _count(problems, find_bad_steps(chunk, event, after, outcome))
                reached = _take(after, lanes)
                _count(problems, find_violations(reached))
                found.append(_take(reached, np.flatnonzero(known.add(_identity(reached)))))
        frontier = _concatenate(found)
        num_states += _num_lanes(frontier)
        on_progress(num_states)
    return Exploration(
        num_states=num_states,
        num_transitions=num_transitions,
        num_events=num_events,
        problems=problems,
    )


def _apply(state: LedgerState, event: Event, rules: Rules) -> tuple[LedgerState, Outcome]:
    """Applies one event a lane, compiled once: lanes are filled up to the size of a chunk."""
    num_lanes = _num_lanes(state)
    missing = _CHUNK_STATES - num_lanes

    def fill(column: Any) -> Any:
        column = np.asarray(column)
        return np.pad(column, [(0, missing)] + [(0, 0)] * (column.ndim - 1))

    columns = {name: fill(getattr(event, name)) for name in EVENT_FIELDS}
    columns["kind"][num_lanes:] = EventKind.NONE
    filled = _map(state, lambda table, name: fill(_column(state, table, name)))
    after, outcome = apply_event_jit(filled, Event(**columns), rules=rules)
    outcome = Outcome(
        code=np.asarray(outcome.code)[:num_lanes], value=np.asarray(outcome.value)[:num_lanes]
    )
    return _take(after, slice(0, num_lanes)), outcome


class _KnownStates:
    """A set of rows; equal hashes are compared in full, so that none is taken for another."""

    def __init__(self, first: np.ndarray) -> None:
        generator = np.random.default_rng(0)
        self._factors: np.ndarray = (
            generator.integers(1, 2**63, first.shape[1], dtype=np.uint64) * 2 + 1
        )
        self._rows_by_hash: dict[int, bytes] = {}
        self.add(first)

    def add(self, rows: np.ndarray) -> np.ndarray:
        """Adds rows and returns which of them are new, each new one once."""
        is_new = np.zeros(rows.shape[0], bool)
        if not rows.shape[0]:
            return is_new
        hashes = np.matmul(rows.astype(np.uint64), self._factors)
        packed = np.ascontiguousarray(rows.astype(np.int8))
        for place, key in enumerate(map(int, hashes)):
            row = packed[place].tobytes()
            held = self._rows_by_hash.setdefault(key, row)
            if held is row:
                is_new[place] = True
            elif held != row:
                raise RuntimeError(
                    "two states have one hash; change the seed of the factors and explore again"
                )
        return is_new


def _events(state: LedgerState, scenario: Scenario) -> Iterator[Event]:
    """Gives every event that concerns anything known, right or wrong."""
    shape = scenario.shape
    num_lanes = _num_lanes(state)
    process_epoch = np.asarray(state.process_epoch)

    def event(kind: EventKind, is_possible: Any = True, **values: Any) -> Event:
        columns = {name: np.zeros(num_lanes, np.int32) for name in EVENT_FIELDS}
        columns["process_epoch"] = process_epoch
        for name, value in values.items():
            columns[name] = np.broadcast_to(np.asarray(value, np.int32), num_lanes)
        kinds = np.where(is_possible, np.int32(kind), np.int32(EventKind.NONE))
        columns["kind"] = np.broadcast_to(kinds, num_lanes)
        return Event(**columns)

    requests, operations, slots = state.requests, state.operations, state.slots
    may_admit = np.asarray(state.next_request_epoch) <= scenario.max_admissions
    sequence = np.asarray(state.next_sequence) - 1
    may_stage = sequence < len(scenario.slots_by_operation)
    num_slots = np.append(np.asarray(scenario.slots_by_operation), 0)[
        np.minimum(sequence, len(scenario.slots_by_operation))
    ]
    for number in range(shape.max_requests):
        of = {"request": number, "request_epoch": requests.request_epoch[:, number]}
        yield event(EventKind.ADMIT, may_admit, request=number)
        yield event(EventKind.PREEMPT, **of)
        yield event(EventKind.FINISH, **of)
        yield event(
            EventKind.STAGE,
            may_stage,
            **of,
            operation_id=requests.last_operation_id[:, number] + 1,
            pool_generation=requests.pool_generation[:, number],
            map_revision=requests.map_revision[:, number],
            selection_revision=requests.selection_revision[:, number] + 1,
            num_slots=num_slots,
        )
        for slot in range(shape.max_slots):
            yield event(EventKind.EVICT, **of, slot=slot, slot_generation=slots.generation[:, slot])
    for place in range(shape.max_operations):
        key = {name: getattr(operations, name)[:, place] for name in _KEY}
        is_used = np.asarray(operations.stage[:, place]) != OperationStage.EMPTY
        yield event(EventKind.RESERVE, is_used, **key, slot=-1)
        for kind in (EventKind.ISSUE, EventKind.COMMIT, EventKind.ACK, EventKind.ABORT):
            yield event(kind, is_used, **key)
        for rank in range(shape.num_ranks):
            for condition in Condition:
                yield event(EventKind.REACH, is_used, **key, rank=rank, condition=condition)
    for slot in range(shape.max_slots):
        for rank in range(shape.num_ranks):
            generation = slots.generation[:, slot]
            yield event(EventKind.QUIESCE, slot=slot, slot_generation=generation, rank=rank)
    if scenario.max_restarts:
        is_possible = process_epoch <= scenario.max_restarts
        yield event(EventKind.RESTART, is_possible, process_epoch=process_epoch + 1)


def _stuck(state: LedgerState, scenario: Scenario, rules: Rules) -> dict[str, np.ndarray]:
    """Marks states from which the end of all requests and quiet ranks leave something held."""
    last = state
    quick = replace(scenario, max_restarts=0)
    for event in _events(state, quick):
        if int(event.kind[0]) in (EventKind.FINISH, EventKind.QUIESCE):
            last, _ = _apply(last, event, rules)
    is_held: Any = np.asarray(last.slots.state != SlotState.FREE).any(axis=1)
    is_held |= np.asarray(last.operations.is_leased).any(axis=1)
    ended = (OperationStage.EMPTY, OperationStage.CLOSED, OperationStage.ABORTED)
    is_held |= ~np.isin(last.operations.stage, ended).all(axis=1)
    return {"everything_returns_at_the_end": is_held} if is_held.any() else {}


def _identity(state: LedgerState) -> np.ndarray:
    is_issued = np.asarray(state.operations.stage) == OperationStage.ISSUED
    reached = np.where(is_issued[:, :, None], state.operations.reached, 0)
    operations = replace(state.operations, reached=reached)
    return flatten_state(replace(state, operations=operations, counts=np.zeros_like(state.counts)))


def _num_lanes(state: LedgerState) -> int:
    return int(np.asarray(state.process_epoch).shape[0])


def _count(problems: dict[str, int], masks: dict[str, np.ndarray]) -> None:
    for name, lanes in masks.items():
        problems[name] = problems.get(name, 0) + int(np.count_nonzero(lanes))


def _map(state: LedgerState, change: Callable[[str, str], Any]) -> LedgerState:
    """Rebuilds a state with `change(table, column)` for every array of it."""
    tables = {
        table: type(getattr(state, table))(
            **{entry.name: change(table, entry.name) for entry in fields(getattr(state, table))}
        )
        for table in ("slots", "operations", "requests")
    }
    scalars = ("process_epoch", "next_request_epoch", "next_sequence", "counts")
    return replace(state, **tables, **{name: change("", name) for name in scalars})


def _column(state: LedgerState, table: str, name: str) -> np.ndarray:
    return np.asarray(getattr(getattr(state, table) if table else state, name))


def _take(state: LedgerState, lanes: Any) -> LedgerState:
    return _map(state, lambda table, name: _column(state, table, name)[lanes])


def _chunks(state: LedgerState) -> Iterator[LedgerState]:
    for first in range(0, _num_lanes(state), _CHUNK_STATES):
        yield _take(state, slice(first, first + _CHUNK_STATES))


def _concatenate(states: list[LedgerState]) -> LedgerState:
    return _map(
        states[0],
        lambda table, name: np.concatenate([_column(each, table, name) for each in states]),
    )
