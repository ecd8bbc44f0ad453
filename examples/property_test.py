"""Property test of a rule: a pure function beside its brute-force twin.

Run it with `pytest examples/property_test.py`. Every stage of the package is a pure function of
arrays, so testing a policy of your own needs no model, no pool and no engine.
"""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from blockcompact_jax import ModelGeometry, SelectionPolicy, raise_for_result, select

GEOMETRY = ModelGeometry.uniform(
    num_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=64,
    block_tokens=32,
    dtype="bfloat16",
    layout="vec",
)
POLICY = SelectionPolicy(max_want=8, sink_blocks=1, recent_blocks=2)
MAX_BLOCKS = 32
jit_select = jax.jit(select, static_argnames=("geometry", "policy"))


def brute_force(scores: np.ndarray, num_candidates: int, budget: int) -> list[list[int]]:
    """Sorts every candidate by (-score, block) after the sink block."""
    wanted: list[list[int]] = []
    for row in scores:
        others = sorted(range(1, num_candidates), key=lambda block: (-row[block], block))
        order = [0, *others] if num_candidates else []
        wanted.append(order[: budget - POLICY.recent_blocks])
    return wanted


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_candidates=st.integers(0, MAX_BLOCKS),
    budget=st.integers(3, 10),
)
def test_selection_equals_its_twin(seed: int, num_candidates: int, budget: int) -> None:
    scores = np.random.default_rng(seed).integers(0, 5, (2, MAX_BLOCKS)).astype(np.float32)
    selection = jit_select(
        scores,
        np.int32(num_candidates),
        budget_blocks=np.int32(budget),
        selection_revision=np.int32(1),
        geometry=GEOMETRY,
        policy=POLICY,
    )
    raise_for_result(selection.result)
    counts = np.asarray(selection.num_want)
    wanted = [row[:n].tolist() for row, n in zip(np.asarray(selection.want), counts, strict=True)]
    assert wanted == brute_force(scores, num_candidates, budget)
