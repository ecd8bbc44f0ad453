"""Sessions on tiny models, as the tests make them."""

from blockcompact_jax.budget import Budget
from blockcompact_jax.kernels import Layout
from torch_bridge.huggingface.policies import score_source
from torch_bridge.huggingface.session import CompactionSession, SessionLimits


def make_session(
    model,
    *,
    budget=None,
    policy="attention",
    block_tokens=32,
    layout=Layout.AMX,
    **options,
):
    return CompactionSession(
        model=model,
        limits=SessionLimits(
            max_tokens=420,
            num_draft_tokens=3,
            num_lookup_tokens=2,
            reselect_every_rounds=2,
            block_tokens=block_tokens,
            budget=budget or Budget(fraction=0.5),
        ),
        score_source=score_source(policy, seed=5),
        layout=layout,
        **options,
    )
