"""A session's selections as operations of the ledger."""

import dataclasses

import numpy as np
import pytest

from blockcompact_jax.ledger import Disposition, OperationStage
from blockcompact_jax.ledger.invariants import find_violations
from torch_bridge.huggingface.policies import score_source
from torch_bridge.tables import TablesBusyError


def any_violation(ledger):
    return [name for name, lanes in find_violations(ledger.state).items() if lanes.any()]


def test_COM_2_COM_5_a_local_session_commits_through_the_ledger(session, token_ids):
    """COM-1, COM-2, COM-5, faults 19 and 20: closed without a further call; the same plan is empty.

    The ledger sees every selection, its generation counts those that brought blocks.
    """
    session.prefill(token_ids[:200])
    ledger = session.runtime.ledger
    first = ledger.revisions("local")
    assert (first.pool_generation, first.selection_revision) == (1, 1)
    session.draft_step(token_ids[200:201])  # A loop that only decodes.
    session.forget_draft(1)
    assert ledger.state.operations.stage.max() == OperationStage.CLOSED
    moved, held = session.runtime.metrics.h2d_bytes, ledger.resident_slots("local")
    session.reselect()
    assert session.runtime.metrics.h2d_bytes == moved
    again = ledger.revisions("local")
    assert again == dataclasses.replace(first, selection_revision=2)
    assert ledger.resident_slots("local") == held
    session.score_source = score_source("random", seed=11)
    session.reselect()
    assert session.runtime.metrics.h2d_bytes > moved
    assert ledger.revisions("local").pool_generation == 2
    assert len(ledger.resident_slots("local")) == 1
    assert ledger.counts[Disposition.REFUSED] == 0
    assert not any_violation(ledger)


def test_COM_7_a_refused_local_selection_leaves_the_ledger_as_it_was(session, token_ids):
    """COM-7, OWN-3: busy tables abort the operation; the next selection is a new one."""
    session.prefill(token_ids[:200])
    session.score_source = score_source("random", seed=11)
    ledger = session.runtime.ledger
    revisions, held = ledger.revisions("local"), ledger.resident_slots("local")
    with session.resident.tables.reading(), pytest.raises(TablesBusyError):
        session.reselect()
    assert ledger.revisions("local") == revisions
    assert ledger.resident_slots("local") == held
    assert np.count_nonzero(ledger.state.slots.state) == 1
    assert not ledger.state.operations.is_leased.any()
    session.reselect()
    assert ledger.revisions("local").selection_revision == revisions.selection_revision + 1
    assert not any_violation(ledger)
