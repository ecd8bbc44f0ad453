"""How an engine selects blocks."""

from blockcompact_jax.budget import RECENT_BLOCKS, SINK_BLOCKS
from blockcompact_jax.scores import HeadReduction
from blockcompact_jax.selection import SelectionPolicy, SmallBudget


def selection_policy(*, max_want: int) -> SelectionPolicy:
    """First block, newest whole block, and the best by mean attention mass.

    A growing sequence may meet a fractional budget that is still below sink + recent; the policy
    then keeps those and records the effective budget.

    Args:
        max_want: most blocks of a layer that are ever selected.
    """
    return SelectionPolicy(
        max_want=max_want,
        sink_blocks=SINK_BLOCKS,
        recent_blocks=RECENT_BLOCKS,
        on_small_budget=SmallBudget.EFFECTIVE,
        head_reduction=HeadReduction.MEAN,
    )
