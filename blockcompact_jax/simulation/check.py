"""Worlds against the ledger: the same events to both, every answer and state compared.

Worlds are independent, so many are stepped at once, one lane of the ledger each. What differs names
the seed of its world and the step; a world of that seed alone replays it exactly.
"""

# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from blockcompact_jax.errors import ResultCode
from blockcompact_jax.ledger.apply import apply_event
from blockcompact_jax.ledger.invariants import find_bad_steps, find_violations
from blockcompact_jax.ledger.kinds import EventKind
from blockcompact_jax.ledger.state import (
    EVENT_FIELDS,
    Event,
    LedgerState,
    Outcome,
    empty_state,
    event_of_rows,
)

from .world import World, WorldOptions

Apply = Callable[[LedgerState, Event], tuple[LedgerState, Outcome]]


@dataclass(frozen=True, kw_only=True)
class Violation:
    """One disagreement, invariant or breach; a world has at most one, its first.

    Attributes:
        seed: Seed of the world.
        step: Place of the event in it.
        event: What happened, for people.
        problem: What was wrong.
    """

    seed: int
    step: int
    event: str
    problem: str


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What worlds said and what the second ledger answered.

    Attributes:
        seeds: Seed of each world.
        rows: Events. int32 [step, lane, field].
        codes: Codes the ledger must give. int32 [step, lane].
        values: Values it must give. int32 [step, lane].
        snapshots: By step, the second ledger's state after it. int32 [lane, number].
        breaches: Breaches of the design, by world.
        num_invalid: Events that were wrong on purpose.
    """

    seeds: tuple[int, ...]
    rows: Int32[np.ndarray, "step lane field"]
    codes: Int32[np.ndarray, "step lane"]
    values: Int32[np.ndarray, "step lane"]
    snapshots: dict[int, Int32[np.ndarray, "lane number"]]
    breaches: tuple[Violation, ...]
    num_invalid: int


def record(
    seeds: tuple[int, ...],
    num_steps: int,
    options: WorldOptions,
    *,
    snapshot_every: int = 16,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Trace:
    """Runs worlds and writes down what they say.

    Args:
        seeds: One world each.
        num_steps: Events per world.
        options: What the worlds are like.
        snapshot_every: Steps between two full states.
        on_progress: Called with the number of worlds done.
    """
    shape = (num_steps, len(seeds))
    rows = np.zeros((*shape, len(EVENT_FIELDS)), np.int32)
    codes, values = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    steps = [*range(snapshot_every - 1, num_steps, snapshot_every), num_steps - 1]
    snapshots: dict[int, list[tuple[int, ...]]] = {step: [] for step in steps}
    breaches: list[Violation] = []
    num_invalid = 0
    for lane, seed in enumerate(seeds):
        world = World(seed, options)
        is_intact = True
        for step in range(num_steps):
            row, code, value = world.step()
            rows[step, lane], codes[step, lane], values[step, lane] = row, code, value
            if step in snapshots:
                snapshots[step].append(world.model.encode())
            if world.breaches and is_intact:
                is_intact = False
                breaches.append(
                    Violation(
                        seed=seed, step=step, event=describe_row(row), problem=world.breaches[0]
                    )
                )
        num_invalid += world.num_invalid
        on_progress(lane + 1)
    return Trace(
        seeds=seeds,
        rows=rows,
        codes=codes,
        values=values,
        snapshots={step: np.asarray(lanes, np.int32) for step, lanes in snapshots.items()},
        breaches=tuple(breaches),
        num_invalid=num_invalid,
    )


def check(
    trace: Trace,
    options: WorldOptions,
    *,
    apply: Apply = apply_event,
    stop_at_first: bool = False,
) -> tuple[tuple[Violation, ...], LedgerState]:
    """Gives recorded events to a ledger and compares all that it answers.

    Args:
        trace: What to replay.
        options: What the worlds were like.
        apply: The ledger; a broken one to see whether it is caught.
        stop_at_first: Return at the first violation of any world.

    Returns:
        The first violation of each world, in the order of steps, and the last state.
    """
    state = empty_state(options.shape, num_lanes=len(trace.seeds))
    found: dict[int, Violation] = {}
    for step in range(trace.rows.shape[0]):
        event = event_of_rows(trace.rows[step])
        after, outcome = apply(state, event)
        for lane, problem in _problems(trace, step, state, after, outcome).items():
            if lane not in found:
                found[lane] = Violation(
                    seed=trace.seeds[lane],
                    step=step,
                    event=describe_row(trace.rows[step, lane]),
                    problem=problem,
                )
        state = after
        if found and stop_at_first:
            break
    return tuple(found.values()), state


def _problems(
    trace: Trace, step: int, before: LedgerState, after: LedgerState, outcome: Outcome
) -> dict[int, str]:
    """Returns what is wrong after one event, by lane."""
    problems: dict[int, str] = {}
    code, value = np.asarray(outcome.code), np.asarray(outcome.value)
    expected_code, expected_value = trace.codes[step], trace.values[step]
    for lane in np.flatnonzero((code != expected_code) | (value != expected_value)):
        problems[int(lane)] = (
            f"the ledger answered {_answer(code[lane], value[lane])}, "
            f"expected {_answer(expected_code[lane], expected_value[lane])}"
        )
    if step in trace.snapshots:
        differs = (flatten_state(after) != trace.snapshots[step]).any(axis=1)
        for lane in np.flatnonzero(differs):
            problems.setdefault(int(lane), "the ledger's state differs from the second ledger's")
    event = event_of_rows(trace.rows[step])
    masks = find_violations(after) | find_bad_steps(before, event, after, outcome)
    for name, lanes in masks.items():
        for lane in np.flatnonzero(lanes):
            problems.setdefault(int(lane), f"the invariant {name} does not hold")
    return problems


def flatten_state(state: LedgerState) -> Int32[np.ndarray, "lane number"]:
    """Returns all that a ledger knows as one row of numbers per lane."""
    num_lanes = np.asarray(state.process_epoch).shape[0]
    scalars = (state.process_epoch, state.next_request_epoch, state.next_sequence)
    parts = [np.asarray(column)[:, None] for column in scalars]
    parts.append(np.asarray(state.counts))
    for table in (state.slots, state.operations, state.requests):
        columns = [np.asarray(column) for column in vars(table).values()]
        columns = [column[..., None] if column.ndim == 2 else column for column in columns]
        entries = np.concatenate(columns, axis=2)
        parts.append(entries.reshape(num_lanes, entries.shape[1] * entries.shape[2]))
    return np.concatenate(parts, axis=1).astype(np.int32)


def describe_row(row: Int32[np.ndarray, " field"] | tuple[int, ...]) -> str:
    """Returns an event for people: its kind and the fields that are not 0."""
    given = [
        f"{name}={int(value)}"
        for name, value in zip(EVENT_FIELDS[1:], row[1:], strict=True)
        if value != 0
    ]
    return f"{EventKind(int(row[0])).name}({', '.join(given)})"


def _answer(code: int, value: int) -> str:
    return f"{ResultCode(int(code)).name} ({int(value)})"
