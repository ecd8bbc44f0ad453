"""A whole selection pipeline under `jax.jit`: score, plan, commit, for all layers at once.

Run it with `python examples/jit_pipeline.py`. No model is needed: random queries and keys stand in
for attention, and the transfer is skipped. What it shows is the shape of the loop: immutable plans
in, immutable state out, one compilation for the whole run.
"""

import jax
import jax.numpy as jnp
import numpy as np

from blockcompact_jax import (
    ModelGeometry,
    OwnershipGranularity,
    RetentionPolicy,
    SelectionPolicy,
    StepPolicy,
    TableSupport,
    commit_step,
    empty_ownership,
    empty_residency,
    num_candidate_blocks,
    plan_step,
    raise_for_result,
)
from blockcompact_jax.scores import page_bound_scores, page_bounds

NUM_LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 8, 9, 3, 64
BLOCK_TOKENS, MAX_TOKENS = 32, 2048
BUDGET_BLOCKS, RECENT_BLOCKS = 12, 2

geometry = ModelGeometry.uniform(
    num_layers=NUM_LAYERS,
    num_query_heads=QUERY_HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    block_tokens=BLOCK_TOKENS,
    dtype="float32",
    layout="vec",
)
policy = StepPolicy(
    selection=SelectionPolicy(max_want=BUDGET_BLOCKS, recent_blocks=RECENT_BLOCKS),
    retention=RetentionPolicy(tables=TableSupport.LAYER),
    max_upload=BUDGET_BLOCKS,
)


def main() -> None:
    """Drives five rounds over a growing sequence."""
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((NUM_LAYERS, KV_HEADS, MAX_TOKENS, HEAD_DIM)).astype(np.float32)
    bounds = jax.jit(page_bounds, static_argnames="block_tokens")
    min_keys, max_keys = bounds(keys, block_tokens=BLOCK_TOKENS)
    score = jax.jit(page_bound_scores)

    residency = empty_residency(geometry, max_slots=2 * BUDGET_BLOCKS)
    ownership = empty_ownership(
        geometry,
        granularity=OwnershipGranularity.LAYER,
        num_physical_blocks=2 * BUDGET_BLOCKS,
    )
    query = rng.standard_normal((NUM_LAYERS, QUERY_HEADS, 1, HEAD_DIM)).astype(np.float32)
    for num_tokens in range(1500, 2000, 100):
        query = query + 0.3 * rng.standard_normal(query.shape).astype(np.float32)
        candidates = num_candidate_blocks(num_tokens, BLOCK_TOKENS, RECENT_BLOCKS)
        plan, reserving = plan_step(
            score(query, min_keys, max_keys),
            jnp.int32(candidates),
            residency,
            ownership,
            budget_blocks=jnp.int32(BUDGET_BLOCKS),
            geometry=geometry,
            policy=policy,
        )
        raise_for_result(plan.result)
        # Here the bytes of `plan.upload` would move; `abort_step` undoes a transfer that failed.
        done = commit_step(plan, residency, reserving, geometry=geometry, policy=policy)
        raise_for_result(done.result)
        residency, ownership = done.residency, done.ownership
        print(
            f"{num_tokens} tokens: {int(plan.upload.num_rows)} of "
            f"{int(np.asarray(residency.num_valid).sum())} resident blocks uploaded, "
            f"{int(done.retirement.physical_blocks_released)} physical blocks released"
        )


if __name__ == "__main__":
    main()
