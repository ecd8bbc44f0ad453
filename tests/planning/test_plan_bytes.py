"""One input, one plan: the same bytes from every way to run, and from a twin of Python lists."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockcompact_jax.errors import raise_for_result
from blockcompact_jax.geometry import num_candidate_blocks

from . import builders as b
from . import step_cases as cases

BATCH = 64
vmapped = {name: jax.jit(jax.vmap(cases.step(kind))) for name, kind in cases.KINDS.items()}


@pytest.mark.parametrize("name", list(cases.KINDS))
@given(seed=st.integers(0, 2**31 - 1))
def test_SEL_3_whole_plans_equal_the_list_twin(name, seed):
    """SEL-3, SEL-6, DIF-1, DIF-2, DIF-3, DIF-5, UPL-2, UPL-3, RET-1, RET-2, OWN-1: every byte."""
    kind = cases.KINDS[name]
    batch = [cases.make((seed, place), kind) for place in range(BATCH)]
    plans, done = vmapped[name](*cases.stack([cases.inputs(case, kind) for case in batch]))
    raise_for_result(done.result)
    plans, done = jax.tree.map(np.asarray, (plans, done))
    for place, case in enumerate(batch):
        cases.assert_is_twins(cases.item(plans, place), cases.item(done, place), case, kind)


@pytest.mark.parametrize("name", list(cases.KINDS))
def test_SEL_3_numpy_eager_and_jit_give_the_same_bytes(name):
    """SEL-3: on the host from NumPy arrays, op by op, jitted, and in a batch under vmap."""
    kind = cases.KINDS[name]
    step = cases.step(kind)
    batch = [cases.make((5, place), kind) for place in range(BATCH)]
    stacked = cases.stack([cases.inputs(case, kind) for case in batch])
    all_at_once = vmapped[name](*stacked)
    for place in range(8):
        jitted = step(*cases.inputs(batch[place], kind))
        cases.assert_same_bytes(jitted, cases.item(all_at_once, place))
    arguments = cases.inputs(batch[7], kind)
    with jax.disable_jit():
        from_numpy = step(*arguments)
        eager = step(*jax.tree.map(jax.numpy.asarray, arguments))
    cases.assert_same_bytes(from_numpy, jitted)
    cases.assert_same_bytes(eager, jitted)


LAYOUTS = {
    "full only": (((0, 1, 2),), {}),
    "sliding and full": (((1, 3), (0, 2)), {0: 8, 2: 16}),
    "several full groups": (((0, 3), (1,), (2,)), {}),
}


@pytest.mark.parametrize(
    ("block_tokens", "layout"),
    [(1, "sliding and full"), (2, "several full groups"), (32, "full only"), (64, "full only")],
)
def test_UPL_2_every_block_size_and_layout(block_tokens, layout):
    """SEL-2, UPL-2: B = 1, 2, 32, 64; sequences of B - 1, B, B + 1 and many tokens; each layout."""
    groups, windows = LAYOUTS[layout]
    geometry = b.geometry(groups, windows, block_tokens)
    kind = cases.KINDS["shared"]
    step = cases.step(kind, geometry)
    for extra in (-1, 0, 1, 20 * block_tokens):
        count = num_candidate_blocks(block_tokens + extra, block_tokens, recent_blocks=1)
        case = cases.make((7, block_tokens + extra), kind, geometry, num_candidates=count)
        plan, done = jax.tree.map(np.asarray, step(*cases.inputs(case, kind, geometry)))
        cases.assert_is_twins(plan, done, case, kind, geometry)
