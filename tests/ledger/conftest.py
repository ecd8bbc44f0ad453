"""A host ledger that steps in numpy, and one that steps in compiled chunks."""

import pytest

from blockcompact_jax.ledger import CommitLedger
from blockcompact_jax.ledger.invariants import find_violations

from .driving import SHAPE


@pytest.fixture(params=[False, True], ids=["numpy", "compiled"])
def ledger(request):
    ledger = CommitLedger(SHAPE, is_compiled=request.param)
    yield ledger
    assert find_violations(ledger.state) == {}
