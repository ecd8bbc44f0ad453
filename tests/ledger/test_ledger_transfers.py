"""What surrounds a transfer: every step of the ledger, in order, and the way back from each."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from blockcompact_jax.errors import ResultCode
from blockcompact_jax.ledger import Disposition, LedgerError, OperationStage, SlotState
from blockcompact_jax.ledger.invariants import find_violations
from blockcompact_jax.ledger_transfers import LedgerTransfers

from .driving import is_same, refusal

NAME = "request/7:a"
NUM_RANKS = 2


def plan(num_rows=3):
    blocks = np.arange(num_rows, dtype=np.int32)
    return SimpleNamespace(
        num_rows=np.int32(num_rows),
        layer_row=blocks,
        source_block=blocks,
        physical_block=blocks,
        valid_tokens=blocks,
    )


class FakeProducer:
    """Writes down what it hears, and raises where it is told to."""

    def __init__(self):
        self.heard = []
        self.failing = None
        self.look = lambda: None

    def _hear(self, *words):
        self.look()
        self.heard.append(words)
        if words[0] == self.failing:
            raise ConnectionError(f"{words[0]} failed")

    def hold(self, key, upload, *, num_tokens, selection_revision):
        self._hear("hold", key, num_tokens, selection_revision)

    def acknowledge(self, key):
        self._hear("acknowledge", key)

    def abort(self, key, *, reason):
        self._hear("abort", key, reason)


@pytest.fixture
def producer():
    return FakeProducer()


@pytest.fixture
def transfers(producer):
    made = LedgerTransfers(NAME, process_epoch=5, num_ranks=NUM_RANKS, producer=producer)
    yield made
    assert find_violations(made.ledger.state) == {}


def land(transfers):
    for rank in range(NUM_RANKS):
        transfers.landed(rank, transfers.open_key)


def during(transfers, work, *, num_rows=3):
    """Does some work within a transaction; returns its key."""
    with transfers.transaction(plan(num_rows), 100):
        work()
        return transfers.open_key


def move(transfers, num_rows=3):
    return during(transfers, lambda: land(transfers), num_rows=num_rows)


def states(transfers):
    return [SlotState(int(state)) for state in transfers.ledger.state.slots.state[0]]


def stage_of(transfers, key):
    return transfers.ledger.stage_of(key)


def is_leased(transfers):
    return bool(transfers.ledger.state.operations.is_leased.any())


def test_COM_1_UPL_4_a_transfer_goes_through_every_step(transfers, producer):
    """COM-1, UPL-4: lease, issue, bytes, tables, commit; the ACK closes it."""
    seen = []

    def look():
        (place,) = np.flatnonzero(transfers.ledger.state.operations.stage[0])[-1:]
        seen.append(OperationStage(int(transfers.ledger.state.operations.stage[0, place])))

    producer.look = look
    with transfers.transaction(plan(), 100):
        key = transfers.open_key
        assert stage_of(transfers, key) is OperationStage.ISSUED
        assert is_leased(transfers)
        assert states(transfers)[0] is SlotState.IN_FLIGHT
        land(transfers)
        assert not is_leased(transfers)
        assert states(transfers)[0] is SlotState.IN_FLIGHT  # Tables are still to be written.
        with refusal(ResultCode.MISSING_TABLES):
            transfers.ledger.commit(key)
    assert stage_of(transfers, key) is OperationStage.COMMITTED
    assert states(transfers)[0] is SlotState.RESIDENT
    transfers.acknowledge()
    transfers.acknowledge()
    assert stage_of(transfers, key) is OperationStage.CLOSED
    assert producer.heard == [("hold", key, 100, 1), ("acknowledge", key)]
    assert seen == [OperationStage.STAGED, OperationStage.COMMITTED]
    with pytest.raises(RuntimeError, match="no transfer is open"):
        _ = transfers.open_key


def test_COM_7_no_commit_without_the_last_rank(transfers, producer):
    """COM-7, OWN-3, fault 13: rank 0 twice is not rank 1; the refusal names rank 1."""
    move(transfers)
    revisions = transfers.ledger.revisions(NAME)

    def say_it_twice():
        transfers.landed(0, transfers.open_key)
        transfers.landed(0, transfers.open_key)

    with pytest.raises(LedgerError) as caught:
        during(transfers, say_it_twice)
    assert (caught.value.code, caught.value.value) == (ResultCode.MISSING_READERS, 1)
    assert transfers.ledger.revisions(NAME) == revisions
    assert states(transfers) == [SlotState.RESIDENT, SlotState.FREE]
    assert [words[0] for words in producer.heard] == ["hold", "acknowledge", "hold", "abort"]


@pytest.mark.parametrize("num_rows", [0, 3])
def test_COM_7_no_tables_before_the_last_rank(transfers, num_rows):
    """COM-7: the check names the rank that has not landed, and changes nothing itself."""
    with transfers.transaction(plan(num_rows), 100) as check_landed:
        key = transfers.open_key
        transfers.landed(0, key)
        before = transfers.ledger.state
        with pytest.raises(LedgerError) as caught:
            check_landed()
        expected = ResultCode.MISSING_READERS if num_rows else ResultCode.MISSING_COMPLETION
        assert (caught.value.code, caught.value.value) == (expected, 1)
        assert is_same(transfers.ledger.state, before)
        transfers.landed(1, key)
        before = transfers.ledger.state
        check_landed()
        assert is_same(transfers.ledger.state, before)
        assert stage_of(transfers, key) is OperationStage.ISSUED
    assert stage_of(transfers, key) is OperationStage.COMMITTED


@pytest.mark.parametrize("failing", ["hold", "transfer", "tables"])
@pytest.mark.parametrize("num_rows", [0, 3])
def test_COM_7_whatever_fails_before_the_commit_changes_nothing(
    transfers, producer, failing, num_rows
):
    """COM-7, faults 15 and 17: lease refused, half a transfer, tables busy; then the next one."""
    first = move(transfers)
    revisions, held = transfers.ledger.revisions(NAME), transfers.ledger.resident_slots(NAME)
    producer.failing = failing

    def fail():
        if failing == "tables":
            land(transfers)
        raise ConnectionError(f"{failing} failed")

    with pytest.raises(ConnectionError, match=failing):
        during(transfers, fail, num_rows=num_rows)
    assert transfers.ledger.revisions(NAME) == revisions
    assert transfers.ledger.resident_slots(NAME) == held
    assert SlotState.RETIRING not in states(transfers)
    assert not is_leased(transfers)
    (key, reason) = producer.heard[-1][1:]
    assert producer.heard[-1][0] == "abort"
    assert reason == f"ConnectionError: {failing} failed"
    assert stage_of(transfers, key) is OperationStage.ABORTED
    assert stage_of(transfers, first) is OperationStage.CLOSED
    producer.failing = None
    after = move(transfers)
    assert after.operation_id > key.operation_id
    assert stage_of(transfers, after) is OperationStage.COMMITTED


def test_COM_2_nothing_to_send_is_published(transfers, producer):
    """COM-2, faults 18 and 19: the same plan again moves nothing and is published."""
    move(transfers)
    before, held = transfers.ledger.revisions(NAME), transfers.ledger.resident_slots(NAME)
    move(transfers, num_rows=0)
    after = transfers.ledger.revisions(NAME)
    assert after == dataclasses.replace(before, selection_revision=before.selection_revision + 1)
    transfers.acknowledge()
    assert transfers.ledger.resident_slots(NAME) == held
    assert [words[0] for words in producer.heard] == ["hold", "acknowledge"] * 2


def test_COM_8_what_a_selection_replaced_is_free_after_its_ack(transfers):
    """COM-8, OWN-1: until the ACK old and new are both resident; never more than that."""
    for number in range(6):
        move(transfers)
        resident = states(transfers).count(SlotState.RESIDENT)
        assert resident == (1 if number == 0 else 2)
        transfers.acknowledge()
        assert sorted(states(transfers)) == [SlotState.FREE, SlotState.RESIDENT]


def test_COM_1_an_unheard_ack_is_sent_again_by_the_next_transfer(transfers, producer):
    """COM-1: the commit stands; nothing is staged before its ACK was heard."""
    key = move(transfers)
    producer.failing = "acknowledge"
    for act in (transfers.acknowledge, lambda: move(transfers)):
        with pytest.raises(ConnectionError):
            act()
        assert stage_of(transfers, key) is OperationStage.COMMITTED
        assert states(transfers)[0] is SlotState.RESIDENT
    producer.failing = None
    move(transfers)
    assert stage_of(transfers, key) is OperationStage.CLOSED


@pytest.mark.parametrize("process_epoch", [5, 6])
def test_CAP_4_a_restart_forgets_everything(transfers, producer, process_epoch):
    """CAP-4, COM-8, fault 16: with a commit unacknowledged; the old key is of the past."""
    old = move(transfers)
    transfers.restart(process_epoch)
    assert set(states(transfers)) == {SlotState.FREE}
    before = transfers.ledger.state
    if process_epoch == 5:
        transfers.landed(0, old)  # Late, and of an epoch that ended: ignored.
    else:
        with pytest.raises(LedgerError, match="Shake hands again"):
            transfers.landed(0, old)
    assert is_same(transfers.ledger.state.slots, before.slots)
    new = move(transfers)
    assert (new.process_epoch, new.operation_id) == (process_epoch, 0)
    assert new.request_epoch > old.request_epoch
    assert [words[0] for words in producer.heard] == ["hold", "hold"]  # Nobody is told of the old.


def test_COM_3_acks_without_a_producer_wait_for_nothing():
    """COM-3, fault 20: in one process a commit is closed at once, whatever is called next."""
    transfers = LedgerTransfers(NAME)
    for number in range(5):
        with transfers.transaction(plan(), 100):
            key = transfers.open_key
            transfers.landed(0, key)
        assert transfers.ledger.stage_of(key) is OperationStage.CLOSED
        assert key.operation_id == number
        assert len(transfers.ledger.resident_slots(NAME)) == 1
    assert transfers.ledger.counts[Disposition.REFUSED] == 0


def test_COM_3_a_word_of_another_operation_does_not_count(transfers):
    """COM-3: a rank that speaks of the operation before has not done this one."""
    old = move(transfers)

    def speak_of_the_old():
        transfers.landed(0, transfers.open_key)
        transfers.landed(1, old)

    with pytest.raises(LedgerError) as caught:
        during(transfers, speak_of_the_old)
    assert (caught.value.code, caught.value.value) == (ResultCode.MISSING_READERS, 1)

    def speak_of_the_future():
        transfers.landed(0, dataclasses.replace(transfers.open_key, operation_id=99))

    with pytest.raises(LedgerError) as caught:
        during(transfers, speak_of_the_future)
    assert caught.value.code is ResultCode.OPERATION_UNKNOWN


@pytest.mark.parametrize(("num_rows", "num_tokens"), [(3, 101), (2, 100)])
def test_COM_4_one_id_for_two_uploads_is_refused(transfers, monkeypatch, num_rows, num_tokens):
    """COM-4: other rows or another number of tokens are another upload, whatever its ID says."""
    monkeypatch.setattr(transfers, "new_operation_id", lambda: 0)
    move(transfers)
    before = transfers.ledger.revisions(NAME)
    with pytest.raises(LedgerError) as refused, transfers.transaction(plan(num_rows), num_tokens):
        pytest.fail("nothing may be moved")
    assert refused.value.code is ResultCode.OPERATION_CONFLICT
    assert transfers.ledger.revisions(NAME) == before
