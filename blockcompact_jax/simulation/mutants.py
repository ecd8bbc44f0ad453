"""Ledgers that are broken in one named place each: canaries that a simulation must catch.

Three kinds: a guard left out (one for each guard), an entry of a table changed, an effect changed.
"""

# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from blockcompact_jax.ledger.apply import apply_event
from blockcompact_jax.ledger.kinds import (
    Condition,
    EventKind,
    OperationStage,
    RequestState,
    SlotEvent,
    SlotState,
)
from blockcompact_jax.ledger.rules import RULES, Rules
from blockcompact_jax.ledger.state import Event, LedgerState, Outcome
from blockcompact_jax.ledger.tables import Guard

from .check import Apply, Trace, check
from .world import WorldOptions

Hook = Callable[[LedgerState, Event, LedgerState], LedgerState]


@dataclass(frozen=True)
class CaughtMutant:
    """Where a mutant was caught.

    Attributes:
        seed: Seed of the world; None if it was not caught.
        step: Place of the event in it.
        problem: What was wrong.
    """

    seed: int | None
    step: int | None
    problem: str | None


def _put(table: tuple[tuple[Any, ...], ...], row: int, column: int, value: int) -> Any:
    changed = [list(entries) for entries in table]
    changed[row][column] = value
    return tuple(tuple(entries) for entries in changed)


def _without(guard: Guard) -> Rules:
    guarded = list(RULES.guarded)
    guarded[guard] = (False,) * len(EventKind)
    return replace(RULES, guarded=tuple(guarded))


def _slot(state: SlotState, event: SlotEvent, reached: SlotState) -> Rules:
    return replace(RULES, slot_next=_put(RULES.slot_next, state, event, reached))


def _operation(stage: OperationStage, event: EventKind, reached: OperationStage) -> Rules:
    """Lets an event through that has a code, or leads it elsewhere."""
    return replace(
        RULES,
        operation_next=_put(RULES.operation_next, stage, event, reached),
        operation_code=_put(RULES.operation_code, stage, event, 0),
    )


def _end(stage: OperationStage, reached: OperationStage) -> Rules:
    entries = list(RULES.operation_end)
    entries[stage] = int(reached)
    return replace(RULES, operation_end=tuple(entries))


def _slot_end(state: SlotState, event: SlotEvent) -> Rules:
    entries = list(RULES.slot_end)
    entries[state] = int(event)
    return replace(RULES, slot_end=tuple(entries))


def _free_prerequisites(condition: Condition) -> Rules:
    entries = list(RULES.prerequisites)
    entries[condition] = 0
    return replace(RULES, prerequisites=tuple(entries))


_STAGE = OperationStage

BROKEN_RULES: Mapping[str, Rules] = {
    **{f"without_{guard.name.lower()}": _without(guard) for guard in Guard},
    "abort_frees_slots_in_flight": _slot(SlotState.IN_FLIGHT, SlotEvent.ABORT, SlotState.FREE),
    "evict_frees_at_once": _slot(SlotState.RESIDENT, SlotEvent.EVICT, SlotState.FREE),
    "abort_keeps_reserved_slots": _slot(SlotState.RESERVED, SlotEvent.ABORT, SlotState.RESERVED),
    "commit_leaves_slots_in_flight": _slot(
        SlotState.IN_FLIGHT, SlotEvent.COMMIT, SlotState.IN_FLIGHT
    ),
    "abort_after_commit": _operation(_STAGE.COMMITTED, EventKind.ABORT, _STAGE.DRAINING),
    "ack_before_commit": _operation(_STAGE.ISSUED, EventKind.ACK, _STAGE.CLOSED),
    "commit_after_abort": _operation(_STAGE.DRAINING, EventKind.COMMIT, _STAGE.COMMITTED),
    "late_completion_revives": _operation(_STAGE.DRAINING, EventKind.REACH, _STAGE.ISSUED),
    "second_ack_reopens": _operation(_STAGE.CLOSED, EventKind.ACK, _STAGE.COMMITTED),
    "second_abort_drains_again": _operation(_STAGE.ABORTED, EventKind.ABORT, _STAGE.DRAINING),
    "finish_keeps_operations": _end(_STAGE.ISSUED, _STAGE.ISSUED),
    "finish_publishes_operations": _end(_STAGE.ISSUED, _STAGE.COMMITTED),
    "finish_waits_for_the_ack": _end(_STAGE.COMMITTED, _STAGE.COMMITTED),
    "finish_leaks_residents": _slot_end(SlotState.RESIDENT, SlotEvent.NONE),
    "finish_leaks_reservations": _slot_end(SlotState.RESERVED, SlotEvent.NONE),
    "finish_leaks_transfers": _slot_end(SlotState.IN_FLIGHT, SlotEvent.NONE),
    "tables_before_bytes": _free_prerequisites(Condition.TABLES_WRITTEN),
    "completion_before_tables": _free_prerequisites(Condition.COMPLETED),
    "admission_while_running": replace(
        RULES,
        request_next=_put(
            RULES.request_next, RequestState.RUNNING, EventKind.ADMIT, RequestState.RUNNING
        ),
    ),
    "staging_while_preempted": replace(
        RULES,
        request_next=_put(
            RULES.request_next, RequestState.PREEMPTED, EventKind.STAGE, RequestState.PREEMPTED
        ),
    ),
}


def _keep(table: str, column: str, kind: EventKind) -> Hook:
    """An event of this kind does not change this column."""

    def hook(before: LedgerState, event: Event, after: LedgerState) -> LedgerState:
        old, new = (np.asarray(getattr(getattr(s, table), column)) for s in (before, after))
        is_kind = np.asarray(event.kind == kind).reshape(-1, *([1] * (new.ndim - 1)))
        kept = np.where(is_kind, old, new)
        return replace(after, **{table: replace(getattr(after, table), **{column: kept})})

    return hook


def _count_ranks(before: LedgerState, event: Event, after: LedgerState) -> LedgerState:
    """A countdown instead of a set of ranks: a second word of rank 0 stands in for rank 1."""
    full = after.all_ranks
    old = np.asarray(before.operations.reached)
    conditions = np.arange(len(Condition))
    is_said = (
        (np.asarray(event.kind) == EventKind.REACH)[:, None, None]
        & (before.operations.stage == OperationStage.ISSUED)[:, :, None]
        & (before.operations.request == np.asarray(event.request)[:, None])[:, :, None]
        & (conditions == np.asarray(event.condition)[:, None, None])
    )
    is_repeated = is_said & (old == after.operations.reached) & (old != 0)
    reached = np.where(is_repeated, np.int32(full), after.operations.reached)
    return replace(after, operations=replace(after.operations, reached=reached))


def _quiet_at_first_rank(before: LedgerState, event: Event, after: LedgerState) -> LedgerState:
    slots = after.slots
    is_heard = np.asarray(slots.quiet_ranks) != 0
    return replace(
        after,
        slots=replace(
            slots,
            state=np.where(is_heard, np.int32(SlotState.FREE), slots.state),
            request=np.where(is_heard, np.int32(-1), slots.request),
            operation=np.where(is_heard, np.int32(-1), slots.operation),
            quiet_ranks=np.where(is_heard, np.int32(0), slots.quiet_ranks),
        ),
    )


def _leak_leases(before: LedgerState, event: Event, after: LedgerState) -> LedgerState:
    is_staged = np.asarray(event.kind == EventKind.STAGE)[:, None]
    kept = np.where(
        is_staged,
        after.operations.is_leased,
        np.asarray(after.operations.is_leased) | np.asarray(before.operations.is_leased),
    )
    return replace(after, operations=replace(after.operations, is_leased=kept))


def _lease_ends_at_abort(before: LedgerState, event: Event, after: LedgerState) -> LedgerState:
    is_draining = np.asarray(after.operations.stage) == OperationStage.DRAINING
    leased = np.asarray(after.operations.is_leased) & ~is_draining
    return replace(after, operations=replace(after.operations, is_leased=leased))


def _lease_ends_at_first_rank(before: LedgerState, event: Event, after: LedgerState) -> LedgerState:
    has_any = np.asarray(after.operations.reached)[:, :, Condition.LANDED] != 0
    leased = np.asarray(after.operations.is_leased) & ~has_any
    return replace(after, operations=replace(after.operations, is_leased=leased))


def _advance_without_bytes(before: LedgerState, event: Event, after: LedgerState) -> LedgerState:
    requests = after.requests
    is_published = np.asarray(requests.selection_revision != before.requests.selection_revision)
    generation = np.where(
        is_published, np.asarray(before.requests.pool_generation) + 1, requests.pool_generation
    ).astype(np.int32)
    return replace(after, requests=replace(requests, pool_generation=generation))


def _restart_keeps_requests(before: LedgerState, event: Event, after: LedgerState) -> LedgerState:
    is_restart = np.asarray(event.kind == EventKind.RESTART)[:, None]
    kept = np.where(is_restart, before.requests.state, after.requests.state)
    return replace(after, requests=replace(after.requests, state=kept))


def _reuse_epochs(before: LedgerState, event: Event, after: LedgerState) -> LedgerState:
    return replace(after, next_request_epoch=before.next_request_epoch)


def _forget_side_buffer(before: LedgerState, event: Event, after: LedgerState) -> LedgerState:
    awaited = np.asarray(after.operations.awaited) & ~np.int32(1 << Condition.SIDE_LANDED)
    return replace(after, operations=replace(after.operations, awaited=awaited))


BROKEN_EFFECTS: Mapping[str, Hook] = {
    "reservation_keeps_generation": _keep("slots", "generation", EventKind.RESERVE),
    "commit_publishes_no_selection": _keep("requests", "selection_revision", EventKind.COMMIT),
    "commit_keeps_generation": _keep("requests", "pool_generation", EventKind.COMMIT),
    "evict_keeps_map_revision": _keep("requests", "map_revision", EventKind.EVICT),
    "commit_keeps_slots_with_operation": _keep("slots", "operation", EventKind.COMMIT),
    "restart_keeps_operations": _keep("operations", "stage", EventKind.RESTART),
    "restart_keeps_requests": _restart_keeps_requests,
    "ranks_are_counted": _count_ranks,
    "quiet_at_first_rank": _quiet_at_first_rank,
    "leases_leak": _leak_leases,
    "lease_ends_at_abort": _lease_ends_at_abort,
    "lease_ends_at_first_rank": _lease_ends_at_first_rank,
    "generation_grows_without_bytes": _advance_without_bytes,
    "epochs_are_reused": _reuse_epochs,
    "side_buffer_is_forgotten": _forget_side_buffer,
}


def _with_hook(hook: Hook) -> Apply:
    def apply(state: LedgerState, event: Event) -> tuple[LedgerState, Outcome]:
        after, outcome = apply_event(state, event)
        return hook(state, event, after), outcome

    return apply


MUTANTS: Mapping[str, Apply] = {
    **{name: partial(apply_event, rules=rules) for name, rules in BROKEN_RULES.items()},
    **{name: _with_hook(hook) for name, hook in BROKEN_EFFECTS.items()},
}
"""Every mutant by name."""


def hunt(
    trace: Trace,
    options: WorldOptions,
    *,
    on_progress: Callable[[int], None] = lambda done: None,
) -> dict[str, CaughtMutant]:
    """Gives recorded worlds to every mutant and says where each was caught.

    Args:
        trace: Worlds that the true ledger passes.
        options: What they were like.
        on_progress: Called with the number of mutants done.
    """
    caught: dict[str, CaughtMutant] = {}
    for number, (name, apply) in enumerate(MUTANTS.items()):
        violations, _ = check(trace, options, apply=apply, stop_at_first=True)
        first = violations[0] if violations else None
        caught[name] = CaughtMutant(
            seed=first.seed if first else None,
            step=first.step if first else None,
            problem=first.problem if first else None,
        )
        on_progress(number + 1)
    return caught
