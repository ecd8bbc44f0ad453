"""A host ledger that steps in numpy, and one that the compiled module steps."""

import pytest

from blockcompact_jax.kernels.ledger import NativeCell
from blockcompact_jax.ledger import CommitLedger
from blockcompact_jax.ledger.cell import NumpyCell
from blockcompact_jax.ledger.invariants import find_violations

from .driving import SHAPE


@pytest.fixture(params=[NumpyCell, NativeCell], ids=["numpy", "native"])
def ledger(request):
    ledger = CommitLedger(SHAPE, new_cell=request.param)
    yield ledger
    assert find_violations(ledger.state) == {}
