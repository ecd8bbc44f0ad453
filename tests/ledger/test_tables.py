"""The rules as data: complete, consistent, and what the documentation shows."""

import importlib
import re
from pathlib import Path

import pytest

from blockcompact_jax.errors import ResultCode
from blockcompact_jax.ledger.kinds import (
    Condition,
    Disposition,
    EventKind,
    OperationStage,
    SlotEvent,
    SlotState,
)
from blockcompact_jax.ledger.tables import (
    DISPOSITIONS,
    GUARD_CODES,
    GUARDED_EVENTS,
    NAMED_FIELDS,
    OPERATION_END,
    OPERATION_VERDICTS,
    PREREQUISITES,
    SLOT_END,
    SLOT_TRANSITIONS,
    Guard,
)

ROOT = Path(__file__).parents[2]


def test_the_documentation_and_the_header_hold_these_tables(monkeypatch):
    """Both are what `scripts/ledger_tables.py --write` writes."""
    folder = ROOT / "scripts"
    if not folder.exists():
        pytest.skip("not a source checkout")
    monkeypatch.syspath_prepend(folder)
    rendered = importlib.import_module("ledger_tables").render()
    assert len(rendered) == 2
    for path, text in rendered.items():
        assert path.read_text() == text, path.name


def test_the_documentation_example_runs():
    """COM-1: docs/ledger.md shows an operation from staging to its ACK; every event is applied."""
    page = ROOT / "docs" / "ledger.md"
    if not page.exists():
        pytest.skip("not a source checkout")
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names = {}
    exec(compile(example, str(page), "exec"), names)
    counts = names["ledger"].counts
    assert counts.pop(Disposition.APPLIED) > 10
    assert not any(counts.values())


def test_every_stage_answers_every_event():
    """No hole in the operation table; a terminal stage is left by no event."""
    events = {event for event in EventKind if EventKind.RESERVE <= event <= EventKind.ABORT}
    assert set(OPERATION_VERDICTS) == set(OperationStage) - {OperationStage.EMPTY}
    for stage, verdicts in OPERATION_VERDICTS.items():
        assert set(verdicts) == events, stage
    for stage in (OperationStage.CLOSED, OperationStage.ABORTED):
        assert all(isinstance(each, ResultCode) for each in OPERATION_VERDICTS[stage].values())
        assert OPERATION_END[stage] is stage
    assert set(OPERATION_END) == set(OperationStage)


def test_OWN_1_a_slot_in_flight_never_becomes_free_at_once():
    """OWN-1: every way from IN_FLIGHT or RESIDENT to FREE goes through RETIRING."""
    to_free = {state for (state, _), reached in SLOT_TRANSITIONS.items() if reached == 0}
    assert to_free == {SlotState.RESERVED, SlotState.RETIRING}
    assert set(SLOT_END) == set(SlotState)
    for state, event in SLOT_END.items():
        assert event is SlotEvent.NONE or (state, event) in SLOT_TRANSITIONS


def test_OWN_3_prerequisites_come_earlier():
    """OWN-3: conditions are numbered in the order of a commit."""
    for condition, prerequisites in PREREQUISITES.items():
        assert all(each < condition for each in prerequisites)
    assert list(PREREQUISITES) == list(Condition)


def test_every_guard_has_events_and_codes():
    """Every event has a range check; every code of the ledger belongs to a guard."""
    assert set(GUARDED_EVENTS) == set(GUARD_CODES) == set(Guard)
    assert all(GUARDED_EVENTS.values())
    assert set(NAMED_FIELDS) == set(EventKind)
    given = {code for codes in GUARD_CODES.values() for code in codes}
    assert {code for code in ResultCode if code >= ResultCode.EVENT_OUT_OF_RANGE} <= given
    assert set(DISPOSITIONS) <= given | {ResultCode.OK}
