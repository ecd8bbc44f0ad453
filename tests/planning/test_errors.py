"""Result codes: sentences, order, and the host's exception."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockcompact_jax.errors import (
    PlanError,
    Result,
    ResultCode,
    describe_code,
    fault_at,
    fault_if,
    first_fault,
    ok_result,
    raise_for_result,
)

from . import builders as b


@pytest.mark.parametrize("code", [code for code in ResultCode if code is not ResultCode.OK])
def test_every_code_is_a_sentence_with_a_remedy(code):
    """Two sentences at least: what was found, and what to do."""
    text = describe_code(code, layer=7, block=41)
    assert text.endswith(".")
    assert text.count(". ") >= 1
    assert "{" not in text
    error = PlanError(code, layer=7, block=41)
    assert (error.code, error.layer, error.block) == (code, 7, 41)
    assert str(error) == text


def test_the_first_fault_wins():
    """Stage order decides; OK results are passed over."""
    first = fault_if(jnp.bool_(True), ResultCode.DUPLICATE_BLOCK, layer=1, block=2)
    second = fault_if(jnp.bool_(True), ResultCode.POOL_EXHAUSTED, layer=3, block=4)
    none = fault_if(jnp.bool_(False), ResultCode.STALE_PLAN, layer=5, block=6)
    assert b.fault(first_fault(none, first, second)) == (ResultCode.DUPLICATE_BLOCK, 1, 2)
    assert b.fault(first_fault(ok_result(), none)) == (ResultCode.OK, -1, -1)


@pytest.mark.parametrize("shape", [(3, 0), (0, 4), (0,)])
def test_empty_masks_hold_no_fault(shape):
    """A mask without places is OK."""
    result = fault_at(
        jnp.zeros(shape, bool),
        ResultCode.NOT_OWNED,
        layer_by_row=np.zeros(3),
        block=jnp.zeros(shape),
    )
    assert bool(result.is_ok)


def test_a_mask_names_its_first_place():
    """Row order first, then column order."""
    mask = np.zeros((3, 4), bool)
    mask[1, 3] = mask[2, 0] = True
    result = jax.jit(
        lambda m: fault_at(
            m, ResultCode.NOT_OWNED, layer_by_row=np.asarray([4, 5, 6]), block=jnp.arange(4)
        )
    )(mask)
    assert b.fault(result) == (ResultCode.NOT_OWNED, 5, 3)


def test_raise_names_the_faulty_request():
    """OK returns; a batch names its first faulty request."""
    raise_for_result(ok_result())
    batch = Result(
        code=jnp.asarray([0, int(ResultCode.RESIDENCY_FULL)]),
        layer=jnp.asarray([-1, 9]),
        block=jnp.asarray([-1, 33]),
    )
    with pytest.raises(PlanError, match="Layer 9 would hold 33 blocks") as caught:
        raise_for_result(batch)
    assert caught.value.__notes__ == ["Request 1 of 2 in this batch."]
