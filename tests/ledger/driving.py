"""Short ways to drive a host ledger in tests."""

from contextlib import contextmanager

import jax
import numpy as np
import pytest

from blockcompact_jax.ledger import Condition, LedgerError, LedgerShape

SHAPE = LedgerShape(max_requests=2, max_operations=4, max_slots=6, num_ranks=2)
MOVING = (Condition.READERS_DONE, Condition.LANDED, Condition.TABLES_WRITTEN, Condition.COMPLETED)
REQUEST = "request/7:a"


def stage(ledger, operation_id, num_slots, *, body=b"body", request_id=REQUEST, **options):
    basis = ledger.revisions(request_id)
    return ledger.stage(
        request_id, basis, operation_id, body=body, num_slots=num_slots, **options
    ).key


def reach_all(ledger, key, conditions=MOVING):
    for condition in conditions:
        for rank in range(SHAPE.num_ranks):
            ledger.reach(key, rank=rank, condition=condition)


def bring(ledger, operation_id, num_slots, **options):
    """Stages, reserves, issues, completes and commits; returns the key and the slots."""
    key = stage(ledger, operation_id, num_slots, **options)
    held = ledger.reserve(key, num_slots=num_slots)
    ledger.issue(key)
    reach_all(ledger, key, MOVING if num_slots else (Condition.COMPLETED,))
    ledger.commit(key, result=b"answer")
    return key, held


def quiet(ledger):
    for rank in range(SHAPE.num_ranks):
        ledger.quiesce(ledger.retiring_slots(rank), rank=rank)


def is_same(left, right):
    """Whether two states are equal to the bit."""
    leaves = zip(*map(jax.tree.leaves, (left, right)), strict=True)
    return all(one.tobytes() == other.tobytes() for one, other in leaves)


def num_free(ledger):
    return int(np.count_nonzero(np.asarray(ledger.state.slots.state) == 0))


@contextmanager
def refusal(code):
    """Expects that the ledger refuses with this code."""
    with pytest.raises(LedgerError) as raised:
        yield
    assert raised.value.code is code
