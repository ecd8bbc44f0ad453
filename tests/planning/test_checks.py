"""The first check that fails, against a loop over checks and rows."""

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from blockcompact_jax.checks import Check, first_failing
from blockcompact_jax.errors import ResultCode
from blockcompact_jax.ids import HOLE

CODES = [ResultCode.DUPLICATE_BLOCK, ResultCode.BLOCK_OUT_OF_RANGE, ResultCode.POOL_EXHAUSTED]
LAYERS = np.int32([3, 5, 8, 13])


@jax.jit
def found(masks, blocks):
    checks = [Check(*check) for check in zip(masks, CODES, blocks, strict=True)]
    return first_failing(*checks, layer_by_row=LAYERS)


def looped(masks, blocks):
    for mask, code, named in zip(masks, CODES, blocks, strict=True):
        for row, is_faulty in enumerate(mask):
            if is_faulty:
                return int(code), int(LAYERS[row]), int(np.broadcast_to(named, LAYERS.shape)[row])
    return 0, HOLE, HOLE


@given(seed=st.integers(0, 2**31 - 1), density=st.sampled_from([0.0, 0.05, 0.3, 1.0]))
def test_DIF_7_the_earlier_check_then_the_lower_row_is_named(seed, density):
    """DIF-7: checks in their order, rows in theirs; one block for all rows or one for each."""
    rng = np.random.default_rng(seed)
    masks = [rng.random(len(LAYERS)) < density for _ in CODES]
    blocks = [rng.integers(-9, 9, len(LAYERS)).astype(np.int32) for _ in CODES[:-1]]
    blocks.append(np.int32(rng.integers(-9, 9)))
    result = found(masks, blocks)
    assert (int(result.code), int(result.layer), int(result.block)) == looped(masks, blocks)


def test_DIF_7_without_rows_nothing_fails():
    """DIF-7: a model without full-attention layers has no faulty row."""
    none = Check(np.zeros(0, bool), CODES[0], np.zeros(0, np.int32))
    assert bool(first_failing(none, layer_by_row=np.zeros(0, np.int32)).is_ok)
