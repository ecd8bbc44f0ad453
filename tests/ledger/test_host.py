"""COM: the host ledger, contract by contract."""

import dataclasses

import numpy as np
import pytest

from blockcompact_jax.errors import CompactionError, ResultCode
from blockcompact_jax.ledger import (
    Disposition,
    HeldSlot,
    LedgerError,
    OperationStage,
)

from .driving import (
    MOVING,
    REQUEST,
    SHAPE,
    bring,
    is_same,
    num_free,
    quiet,
    reach_all,
    refusal,
    stage,
)


def test_COM_1_bytes_go_through_every_stage(ledger):
    """COM-1: stage, reserve and lease, transfer, all ranks, commit, ACK; generation g+1."""
    ledger.admit(REQUEST)
    key = stage(ledger, 0, 2)
    assert ledger.stage_of(key) is OperationStage.STAGED
    held = ledger.reserve(key, num_slots=2)
    assert held == [HeldSlot(slot=0, generation=1), HeldSlot(slot=1, generation=1)]
    ledger.issue(key)
    reach_all(ledger, key)
    assert ledger.resident_slots(REQUEST) == []
    assert ledger.commit(key) is ResultCode.OK
    assert ledger.resident_slots(REQUEST) == held
    revisions = ledger.revisions(REQUEST)
    assert (revisions.pool_generation, revisions.map_revision) == (1, 1)
    assert revisions.selection_revision == 1
    assert ledger.acknowledge(key) is ResultCode.OK
    assert ledger.stage_of(key) is OperationStage.CLOSED


def test_COM_2_nothing_to_send_is_published(ledger):
    """COM-2: 0 bytes keep the generation, publish revision r and close by the ranks' ACKs."""
    ledger.admit(REQUEST)
    key, _ = bring(ledger, 0, 0)
    revisions = ledger.revisions(REQUEST)
    assert (revisions.pool_generation, revisions.map_revision) == (0, 0)
    assert revisions.selection_revision == 1
    assert ledger.acknowledge(key) is ResultCode.OK


def test_COM_3_acks_repeated_old_early_and_foreign(ledger):
    """COM-3: repeated is a no-op, older is ignored, early and conflicting are errors."""
    epoch = ledger.admit(REQUEST)
    key = stage(ledger, 0, 1)
    with refusal(ResultCode.ACK_EARLY):
        ledger.acknowledge(key)
    ledger.reserve(key, num_slots=1)
    ledger.issue(key)
    reach_all(ledger, key)
    ledger.commit(key)
    with refusal(ResultCode.OPERATION_KEY_CONFLICT):
        ledger.acknowledge(dataclasses.replace(key, pool_generation=1))
    with refusal(ResultCode.OPERATION_UNKNOWN):
        ledger.acknowledge(dataclasses.replace(key, operation_id=1))
    with refusal(ResultCode.EPOCH_FUTURE):
        ledger.acknowledge(dataclasses.replace(key, request_epoch=epoch + 1))
    assert ledger.acknowledge(key) is ResultCode.OK
    assert ledger.acknowledge(key) is ResultCode.EVENT_REPEATED
    ledger.preempt(REQUEST, epoch)
    ledger.admit(REQUEST)
    assert ledger.acknowledge(key) is ResultCode.EPOCH_STALE
    assert ledger.counts[Disposition.IGNORED] == 1
    assert ledger.counts[Disposition.REPEATED] == 1


def test_COM_4_a_retry_gets_the_stored_result(ledger):
    """COM-4: same body, same answer, nothing reserved twice; another body is a conflict."""
    ledger.admit(REQUEST)
    basis = ledger.revisions(REQUEST)
    options = {"body": b"body", "num_slots": 1}
    first = ledger.stage(REQUEST, basis, 0, **options)
    again = ledger.stage(REQUEST, basis, 0, **options)
    assert (first.is_repeated, again.is_repeated, again.result) == (False, True, None)
    assert again.key == first.key
    ledger.reserve(first.key, num_slots=1)
    ledger.issue(first.key)
    reach_all(ledger, first.key)
    ledger.commit(first.key, result=b"answer")
    assert ledger.stage(REQUEST, basis, 0, **options).result == b"answer"
    ledger.acknowledge(first.key)
    assert ledger.stage(REQUEST, basis, 0, **options).result == b"answer"
    with refusal(ResultCode.OPERATION_CONFLICT):
        ledger.stage(REQUEST, basis, 0, body=b"other", num_slots=1)
    assert num_free(ledger) == 5


def test_COM_4_bodies_are_told_apart_by_all_of_their_digest(ledger):
    """COM-4: the state holds 31 bits of it; these two bodies agree in them."""
    ledger.admit(REQUEST)
    basis = ledger.revisions(REQUEST)
    ledger.stage(REQUEST, basis, 0, body=b"23033", num_slots=1)
    with refusal(ResultCode.OPERATION_CONFLICT):
        ledger.stage(REQUEST, basis, 0, body=b"57901", num_slots=1)
    assert ledger.counts[Disposition.REFUSED] == 1


def test_COM_4_the_store_is_bounded_and_forgets_the_oldest(ledger):
    """COM-4: as many results as places; an older ID is told apart from a new one."""
    ledger.admit(REQUEST)
    basis = ledger.revisions(REQUEST)
    for operation_id in range(SHAPE.max_operations + 1):
        key, _ = bring(ledger, operation_id, 0)
        ledger.acknowledge(key)
    with refusal(ResultCode.OPERATION_FORGOTTEN):
        ledger.stage(REQUEST, basis, 0, body=b"body", num_slots=0)
    assert ledger.stage(REQUEST, basis, 1, body=b"body", num_slots=0).result == b"answer"


def test_COM_5_UPL_1_a_resume_is_staged_like_any_upload(ledger):
    """COM-5, UPL-1: after a preemption the same stages bring the blocks back."""
    epoch = ledger.admit(REQUEST)
    key, _ = bring(ledger, 0, 2)
    ledger.acknowledge(key)
    ledger.preempt(REQUEST, epoch)
    assert ledger.resident_slots(REQUEST) == []
    quiet(ledger)
    ledger.admit(REQUEST)
    _, held = bring(ledger, 0, 2)
    assert [slot.generation for slot in held] == [2, 2]
    assert ledger.resident_slots(REQUEST) == held


def test_COM_6_ids_are_opaque(ledger):
    """COM-6: IDs that share parts are strangers; an ID is never taken apart."""
    names = ["a:1", "a"]
    epochs = [ledger.admit(name) for name in names]
    assert len(set(epochs)) == 2
    key, _ = bring(ledger, 0, 1, request_id="a:1")
    assert ledger.resident_slots("a") == []
    assert len(ledger.resident_slots("a:1")) == 1
    with refusal(ResultCode.EPOCH_FUTURE):
        ledger.acknowledge(dataclasses.replace(key, request_id="a:1:0", request_epoch=9))
    with pytest.raises(CompactionError, match="places for requests"):
        ledger.admit("a:1:0")


def test_COM_6_a_forgotten_request_is_of_the_past(ledger):
    """COM-6, COM-8: a finished request's place is used again; its late messages are ignored."""
    epoch = ledger.admit("first")
    key, _ = bring(ledger, 0, 1, request_id="first")
    ledger.admit("second")
    ledger.finish("first", epoch)
    with pytest.raises(CompactionError, match="places for requests"):
        ledger.admit("third")
    quiet(ledger)
    ledger.admit("third")
    assert ledger.acknowledge(key) is ResultCode.EPOCH_STALE
    assert ledger.finish("first", epoch) is ResultCode.EPOCH_STALE


@pytest.mark.parametrize("when", ["staged", "reserved", "issued", "landed", "completed"])
def test_COM_7_abort_returns_everything_and_changes_nothing_else(ledger, when):
    """COM-7, UPL-4: until the commit the old state is readable; then as if nothing had been."""
    ledger.admit(REQUEST)
    key, held = bring(ledger, 0, 2)
    ledger.acknowledge(key)
    before = ledger.revisions(REQUEST)
    key = stage(ledger, 1, 3)
    if when != "staged":
        ledger.reserve(key, num_slots=3)
    if when in {"issued", "landed", "completed"}:
        ledger.issue(key)
    if when in {"landed", "completed"}:
        reach_all(ledger, key, MOVING[:2] if when == "landed" else MOVING)
    assert ledger.resident_slots(REQUEST) == held
    assert ledger.abort(key, reason="timeout") is ResultCode.OK
    assert ledger.abort(key) is ResultCode.EVENT_REPEATED
    assert ledger.resident_slots(REQUEST) == held
    assert ledger.revisions(REQUEST) == before
    is_running = when in {"issued", "landed", "completed"}
    assert num_free(ledger) == (1 if is_running else 4)
    is_leased = bool(np.asarray(ledger.state.operations.is_leased).any())
    assert is_leased == (when == "issued")
    quiet(ledger)
    assert num_free(ledger) == 4
    assert not np.asarray(ledger.state.operations.is_leased).any()
    retried = ledger.stage(REQUEST, before, 1, body=b"body", num_slots=3)
    assert (retried.is_repeated, retried.failure) == (True, "timeout")


@pytest.mark.parametrize("end", ["finish", "preempt", "restart"])
@pytest.mark.parametrize("when", ["reserved", "issued", "committed"])
def test_COM_8_CAP_4_nothing_leaks(ledger, end, when):
    """COM-8, CAP-4: finish after enqueue, of the last request, preempt, restart: all returns."""
    epoch = ledger.admit(REQUEST)
    key = stage(ledger, 0, 2)
    ledger.reserve(key, num_slots=2)
    if when != "reserved":
        ledger.issue(key)
    if when == "committed":
        reach_all(ledger, key)
        ledger.commit(key)
    if end == "restart":
        ledger.post_ack(key)
        ledger.restart(2)
        assert ledger.drain_acks() == []  # Of a process that is gone.
        with refusal(ResultCode.PROCESS_EPOCH_MISMATCH):
            ledger.commit(key)
        with refusal(ResultCode.PROCESS_EPOCH_MISMATCH):
            ledger.restart(2)
    else:
        getattr(ledger, end)(REQUEST, epoch)
        if when != "committed":
            with refusal(ResultCode.OPERATION_ABORTED):
                ledger.commit(key)
    assert ledger.resident_slots(REQUEST) == []
    quiet(ledger)
    assert num_free(ledger) == SHAPE.max_slots
    assert not np.asarray(ledger.state.operations.is_leased).any()
    assert ledger.stage_of(key) in (OperationStage.ABORTED, OperationStage.CLOSED)


def test_COM_3_acks_are_drained_by_a_loop_that_only_decodes(ledger):
    """COM-3: queued ACKs need no other event; one bad ACK stops no other; the queue is bounded."""
    ledger.admit(REQUEST)
    key, _ = bring(ledger, 0, 1)
    bad = dataclasses.replace(key, operation_id=9)
    for each in (key, bad, key):
        ledger.post_ack(each)
    codes = [code for _, code in ledger.drain_acks()]
    assert codes == [ResultCode.OK, ResultCode.OPERATION_UNKNOWN, ResultCode.EVENT_REPEATED]
    assert ledger.drain_acks() == []
    stage(ledger, 1, 0)
    for _ in range(4 * SHAPE.max_operations):
        ledger.post_ack(key)
    with pytest.raises(CompactionError, match="`drain_acks`"):
        ledger.post_ack(key)


def test_COM_3_decisions_of_the_past_are_refused(ledger):
    """COM-3: who still acts on an old epoch is told; only messages are ignored in silence."""
    epoch = ledger.admit(REQUEST)
    old = ledger.revisions(REQUEST)
    key, held = bring(ledger, 0, 1)
    ledger.preempt(REQUEST, epoch)
    ledger.admit(REQUEST)
    before = ledger.state
    for decide in (
        lambda: ledger.reserve(key, num_slots=1),
        lambda: ledger.issue(key),
        lambda: ledger.commit(key),
        lambda: ledger.evict(REQUEST, epoch, held),
        lambda: ledger.stage(REQUEST, old, 1, body=b"", num_slots=0),
    ):
        with refusal(ResultCode.EPOCH_STALE):
            decide()
    assert is_same(ledger.state, before)
    assert ledger.counts[Disposition.IGNORED] == 5
    assert ledger.finish(REQUEST, epoch) is ResultCode.EPOCH_STALE
    assert ledger.abort(key) is ResultCode.EPOCH_STALE


def test_a_refusal_is_a_sentence_and_is_counted(ledger):
    """Errors say the remedy; every event is counted once, by what became of it."""
    ledger.admit(REQUEST)
    with pytest.raises(LedgerError, match="Finish or preempt it first"):
        ledger.admit(REQUEST)
    with pytest.raises(CompactionError, match="'nobody' is not known"):
        ledger.revisions("nobody")
    assert ledger.counts[Disposition.APPLIED] == 1
    assert ledger.counts[Disposition.REFUSED] == 1
