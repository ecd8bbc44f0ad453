"""COM-6, COM-8: any host calls keep the ledger whole; a refused one changes nothing."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.kernels import NativeCell
from blockcompact_jax.ledger import CommitLedger, Condition, LedgerShape, OperationStage
from blockcompact_jax.ledger.cell import NumpyCell
from blockcompact_jax.ledger.invariants import find_violations

from .driving import is_same

SHAPE = LedgerShape(max_requests=2, max_operations=3, max_slots=4, num_ranks=2)
NAMES = ("a", "a:1", "b")
VERBS = (
    "admit",
    "preempt",
    "finish",
    "restart",
    "stage",
    "reserve",
    "issue",
    "reach",
    "finish_off",
)
VERBS += ("commit", "ack", "post_ack", "drain", "abort", "evict", "quiesce")

STEP = st.tuples(
    st.sampled_from(VERBS),
    st.sampled_from(NAMES),
    st.integers(0, 5),
    st.integers(0, 1),
    st.sampled_from(Condition),
)


class Driver:
    """Remembers epochs and keys as a scheduler does, old ones included."""

    def __init__(self, new_cell):
        self.ledger = CommitLedger(SHAPE, new_cell=new_cell)
        self.epochs = dict.fromkeys(NAMES, 0)
        self.keys = []

    def key(self, number):
        return self.keys[-1 - number % len(self.keys)] if self.keys else None

    def call(self, verb, name, number, rank, condition):
        ledger, key, epoch = self.ledger, self.key(number), self.epochs[name]
        if verb == "admit":
            self.epochs[name] = ledger.admit(name)
        elif verb in {"preempt", "finish"}:
            getattr(ledger, verb)(name, epoch)
        elif verb == "restart":
            ledger.restart(ledger.process_epoch + (number > 3))
        elif verb == "stage":
            basis = dataclasses.replace(ledger.revisions(name), request_epoch=epoch)
            body = bytes([number % 2])
            made = ledger.stage(name, basis, number, body=body, num_slots=number % 3)
            self.keys.append(made.key)
        elif verb == "drain":
            ledger.drain_acks()
        elif verb == "evict":
            ledger.evict(name, epoch, ledger.resident_slots(name))
        elif verb == "quiesce":
            ledger.quiesce(ledger.retiring_slots(rank), rank=rank)
        elif key is not None:
            self.call_with_key(verb, key, number, rank, condition)

    def call_with_key(self, verb, key, number, rank, condition):
        ledger = self.ledger
        if verb == "reserve":
            ledger.reserve(key, num_slots=1 + number % 2)
        elif verb == "reach":
            ledger.reach(key, rank=rank, condition=condition)
        elif verb == "finish_off":
            for each in (c for c in Condition if c is not Condition.SIDE_LANDED):
                for every_rank in range(SHAPE.num_ranks):
                    ledger.reach(key, rank=every_rank, condition=each)
        elif verb == "ack":
            ledger.acknowledge(key)
        elif verb == "abort":
            ledger.abort(key, reason="why")
        else:
            getattr(ledger, verb)(key)


@pytest.mark.parametrize("new_cell", [NumpyCell, NativeCell])
@given(steps=st.lists(STEP, min_size=10, max_size=60))
def test_COM_8_any_calls_keep_the_ledger_whole(new_cell, steps):
    """COM-6, COM-7, COM-8: invariants after every call, and an empty pool after the last end."""
    driver = Driver(new_cell)
    for step in steps:
        before = driver.ledger.state
        try:
            driver.call(*step)
        except CompactionError:
            after = driver.ledger.state
            if step[0] != "finish_off":
                assert is_same(after, before)
        assert find_violations(driver.ledger.state) == {}
        held = [slot for name in NAMES for slot in driver.ledger.resident_slots(name)]
        assert len(held) == len(set(held))
    ledger = driver.ledger
    ledger.restart(ledger.process_epoch + 1)
    for rank in range(SHAPE.num_ranks):
        ledger.quiesce(ledger.retiring_slots(rank), rank=rank)
    assert not np.asarray(ledger.state.slots.state).any()
    assert not np.asarray(ledger.state.operations.is_leased).any()
    ended = {OperationStage.CLOSED, OperationStage.ABORTED, None}
    assert {ledger.stage_of(key) for key in driver.keys} <= ended
