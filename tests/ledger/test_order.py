"""OWN-3, OWN-5, UPL-4: the order of a commit, source leases, all-or-nothing calls."""

import numpy as np
import pytest

from blockcompact_jax.errors import CompactionError, ResultCode
from blockcompact_jax.ledger import Condition, HeldSlot, LedgerError

from .driving import REQUEST, SHAPE, bring, num_free, reach_all, refusal, stage

ORDER = [
    (Condition.READERS_DONE, ResultCode.MISSING_READERS, "last reader"),
    (Condition.LANDED, ResultCode.MISSING_TRANSFER, "transfer has landed"),
    (Condition.SIDE_LANDED, ResultCode.MISSING_SIDE_BUFFER, "side buffer"),
    (Condition.TABLES_WRITTEN, ResultCode.MISSING_TABLES, "tables and valid lengths"),
    (Condition.COMPLETED, ResultCode.MISSING_COMPLETION, "completion of rank"),
]


def test_OWN_3_a_commit_names_the_first_missing_condition(ledger):
    """OWN-3: readers, transfer, side buffer, tables, completions, each on every rank, in order."""
    ledger.admit(REQUEST)
    key = stage(ledger, 0, 1, has_side_buffer=True)
    with refusal(ResultCode.OPERATION_NOT_ISSUED):
        ledger.commit(key)
    with refusal(ResultCode.MISSING_RESERVATION):
        ledger.issue(key)
    ledger.reserve(key, num_slots=1)
    ledger.issue(key)
    for condition, code, words in ORDER:
        for rank in range(SHAPE.num_ranks):
            with pytest.raises(LedgerError, match=words) as raised:
                ledger.commit(key)
            assert (raised.value.code, raised.value.value) == (code, rank)
            assert f"ank {rank}" in str(raised.value)
            ledger.reach(key, rank=rank, condition=condition)
    assert ledger.commit(key) is ResultCode.OK


def test_OWN_3_a_rank_keeps_the_order_too(ledger):
    """OWN-3: tables after readers and bytes, completion after tables; on each rank for itself."""
    ledger.admit(REQUEST)
    key = stage(ledger, 0, 1)
    ledger.reserve(key, num_slots=1)
    ledger.issue(key)
    with refusal(ResultCode.MISSING_READERS):
        ledger.reach(key, rank=1, condition=Condition.TABLES_WRITTEN)
    ledger.reach(key, rank=1, condition=Condition.READERS_DONE)
    with refusal(ResultCode.MISSING_TRANSFER):
        ledger.reach(key, rank=1, condition=Condition.TABLES_WRITTEN)
    with refusal(ResultCode.MISSING_TABLES):
        ledger.reach(key, rank=1, condition=Condition.COMPLETED)


def test_OWN_3_one_change_at_a_time(ledger):
    """OWN-3: no second operation and no eviction while one is open; a new basis afterwards."""
    epoch = ledger.admit(REQUEST)
    key, held = bring(ledger, 0, 1)
    ledger.acknowledge(key)
    old = ledger.revisions(REQUEST)
    open_key = stage(ledger, 1, 1)
    with refusal(ResultCode.OPERATION_OPEN):
        stage(ledger, 2, 1)
    with refusal(ResultCode.OPERATION_OPEN):
        ledger.evict(REQUEST, epoch, held)
    ledger.abort(open_key)
    ledger.evict(REQUEST, epoch, held)
    with refusal(ResultCode.STALE_PLAN):
        ledger.stage(REQUEST, old, 2, body=b"", num_slots=1)


def test_UPL_4_the_source_is_held_until_the_last_rank_has_its_bytes(ledger):
    """UPL-4: from staging to the last landing, of the side buffer too."""
    ledger.admit(REQUEST)
    key = stage(ledger, 0, 1, has_side_buffer=True)

    def is_leased():
        return bool(np.asarray(ledger.state.operations.is_leased).any())

    assert is_leased()
    ledger.reserve(key, num_slots=1)
    ledger.issue(key)
    for condition in (Condition.LANDED, Condition.SIDE_LANDED):
        for rank in range(SHAPE.num_ranks):
            assert is_leased()
            ledger.reach(key, rank=rank, condition=condition)
    assert not is_leased()


def test_OWN_5_calls_are_all_or_nothing(ledger):
    """OWN-5: one bad slot refuses the whole call; nothing else of it happened."""
    epoch = ledger.admit(REQUEST)
    key = stage(ledger, 0, 4)
    with refusal(ResultCode.SLOT_STATE):
        ledger.reserve(key, slots=[5, 3, 5])
    assert num_free(ledger) == 6
    with refusal(ResultCode.RESERVATION_COMPLETE):
        ledger.reserve(key, num_slots=5)
    assert num_free(ledger) == 6
    held = ledger.reserve(key, slots=[5, 3]) + ledger.reserve(key, num_slots=2)
    assert [each.slot for each in held] == [5, 3, 0, 1]
    ledger.issue(key)
    reach_all(ledger, key)
    ledger.commit(key)
    with refusal(ResultCode.SLOT_STATE):
        ledger.evict(REQUEST, epoch, [held[0], held[1], held[0]])
    assert len(ledger.resident_slots(REQUEST)) == 4
    ledger.evict(REQUEST, epoch, held[:2])
    with refusal(ResultCode.SLOT_STALE):
        ledger.quiesce([held[0], HeldSlot(slot=3, generation=0)], rank=0)
    assert ledger.retiring_slots(0) == [held[1], held[0]]
    with pytest.raises(CompactionError, match="either `num_slots` or `slots`"):
        ledger.reserve(key)
    with pytest.raises(CompactionError, match="negative"):
        ledger.reserve(key, slots=[-1])
