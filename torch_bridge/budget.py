"""How much of a sequence stays resident: the names of `blockcompact_jax.budget`, for engines."""

from blockcompact_jax.budget import (
    RECENT_BLOCKS,
    SINK_BLOCKS,
    Budget,
    OptionError,
    check_budget,
    effective_budget_blocks,
    parse_budget,
)

__all__ = [
    "RECENT_BLOCKS",
    "SINK_BLOCKS",
    "Budget",
    "OptionError",
    "check_budget",
    "effective_budget_blocks",
    "parse_budget",
]
