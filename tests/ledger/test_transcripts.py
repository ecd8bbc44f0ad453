"""Golden transcripts: one per reported race, by numpy, jit, the module and the second ledger.

Each file holds the events, the code and value of every one, and what is left at the end, in words.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from blockcompact_jax.errors import ResultCode
from blockcompact_jax.kernels.ledger import NativeCell
from blockcompact_jax.ledger import apply_event, apply_events, empty_state, make_event
from blockcompact_jax.ledger.invariants import find_bad_steps, find_violations
from blockcompact_jax.ledger.kinds import (
    Condition,
    EventKind,
    OperationStage,
    RequestState,
    SlotState,
)
from blockcompact_jax.ledger.state import LedgerShape, event_of_rows
from blockcompact_jax.simulation.model import ModelLedger

FILES = sorted((Path(__file__).parent / "transcripts").glob("row_*.json"))
NUM_STEPS = 40  # One compilation for all of them.


def read(path):
    transcript = json.loads(path.read_text())
    rows = []
    for event in transcript["events"]:
        fields = {k: v for k, v in event.items() if k not in {"kind", "code", "value"}}
        if "condition" in fields:
            fields["condition"] = Condition[fields["condition"]]
        rows.append(make_event(EventKind[event["kind"]], **fields))
    return transcript, LedgerShape(**transcript["shape"]), rows


def expected_answers(transcript):
    return [(int(ResultCode[e["code"]]), e["value"]) for e in transcript["events"]]


def words(numbers, kind):
    return [kind(int(number)).name.lower().replace("_", " ") for number in numbers]


def check_end(state, end):
    assert words(state.slots.state[0], SlotState) == end["slots"]
    used = np.asarray(state.operations.stage[0]) != OperationStage.EMPTY
    assert words(np.asarray(state.operations.stage[0])[used], OperationStage) == end["operations"]
    assert np.asarray(state.operations.is_leased[0])[used].tolist() == end["has_source"]
    requests = state.requests
    for number, request in enumerate(end["requests"]):
        assert words([requests.state[0, number]], RequestState) == [request.pop("state")]
        for name, value in request.items():
            assert int(getattr(requests, name)[0, number]) == value, name
    assert np.asarray(state.counts[0]).tolist() == end["counts"]


def test_every_race_has_a_transcript():
    """The rows of the fault list that concern slots, leases and operations."""
    assert [json.loads(path.read_text())["row"] for path in FILES] == list(range(1, 24))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_numpy_replays_a_transcript(path):
    """COM-1, COM-2, COM-3, COM-4, COM-7, COM-8, OWN-1, OWN-3, OWN-5, UPL-4, UPL-7, CAP-4."""
    transcript, shape, rows = read(path)
    state = empty_state(shape)
    for row, expected in zip(rows, expected_answers(transcript), strict=True):
        event = event_of_rows(np.asarray([row], np.int32))
        after, outcome = apply_event(state, event)
        assert (int(outcome.code[0]), int(outcome.value[0])) == expected
        assert find_violations(after) | find_bad_steps(state, event, after, outcome) == {}
        state = after
    check_end(state, transcript["end"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_compiled_call_replays_a_transcript(path):
    """The same, in one compiled call for the whole transcript."""
    transcript, shape, rows = read(path)
    table = np.asarray(rows + [make_event(EventKind.NONE)] * (NUM_STEPS - len(rows)), np.int32)
    state, outcome = apply_events(empty_state(shape), table[:, None])
    answers = np.stack([outcome.code, outcome.value], axis=-1)[: len(rows), 0]
    assert [tuple(answer) for answer in answers.tolist()] == expected_answers(transcript)
    check_end(state, transcript["end"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_compiled_module_replays_a_transcript(path):
    """The same, by the tables of the generated header."""
    transcript, shape, rows = read(path)
    cell = NativeCell(shape, process_epoch=1)
    assert cell.apply(rows) == expected_answers(transcript)
    check_end(cell.state, transcript["end"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_second_ledger_replays_a_transcript(path):
    """The independent model gives the same answers."""
    transcript, shape, rows = read(path)
    model = ModelLedger(shape)
    answers = [(int(code), value) for code, value in map(model.apply, rows)]
    assert answers == expected_answers(transcript)
    assert [slot.state for slot in model.slots] == transcript["end"]["slots"]
