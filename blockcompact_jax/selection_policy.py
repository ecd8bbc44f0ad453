"""How blocks are chosen: the static choices of a selection."""

import enum
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from .errors import CompactionError
from .scores import BlockReduction, HeadReduction


class SmallBudget(enum.Enum):
    """What happens where sink and recent blocks alone exceed the budget."""

    ERROR = "error"
    EFFECTIVE = "effective"


class LayerBudget(enum.Enum):
    """How the budget is spread over layers; the sum over layers stays the same."""

    UNIFORM = "uniform"
    PYRAMID = "pyramid"
    SCORE_MASS = "score_mass"


@dataclass(frozen=True, kw_only=True)
class SelectionPolicy:
    """How blocks are chosen. Frozen and hashable: a static argument, recorded with each selection.

    The unit is whole blocks; a token selector is another policy, not another rounding of this one.

    Attributes:
        max_want: Static capacity of `Selection.want`, in blocks.
        max_tail: Static capacity of `Selection.ranked_tail`; 0 where nothing is padded.
        sink_blocks: First blocks of the sequence, always wanted.
        recent_blocks: Newest whole blocks, always resident outside the selected pool; they count
            towards the budget.
        on_small_budget: Error, or a recorded larger effective budget.
        layer_budget: Uniform; pyramid (lower layers more); or the best-scored blocks of all
            layers together, which needs scores that are comparable across layers.
        pyramid_percent: The first row's gain and the last row's loss under PYRAMID, 0 … 100.
        head_reduction: Over query heads and draft positions.
        block_reduction: Over the tokens of a block, where scores start as token scores.
        top_tokens: Tokens that BlockReduction.TOP_MEAN averages.
        resident_margin: Added to the score of resident blocks when ranking, so that a challenger
            must be better by more than this. 0 ranks by score alone.
    """

    max_want: int
    max_tail: int = 0
    sink_blocks: int = 1
    recent_blocks: int = 1
    on_small_budget: SmallBudget = SmallBudget.ERROR
    layer_budget: LayerBudget = LayerBudget.UNIFORM
    pyramid_percent: int = 50
    head_reduction: HeadReduction = HeadReduction.MAX
    block_reduction: BlockReduction = BlockReduction.SUM
    top_tokens: int = 1
    resident_margin: float = 0.0

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __hash__(self) -> int:
        # Static arguments are hashed on every dispatch, and each enum by a function of Python's.
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        # Without the hash: another process hashes enums and strings differently.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def is_by_score_alone(self) -> bool:
        """Whether a row's blocks are chosen by its own scores, as they are."""
        return self.resident_margin == 0.0 and self.layer_budget is not LayerBudget.SCORE_MASS

    def __post_init__(self) -> None:
        for name in ("max_want", "max_tail", "sink_blocks", "recent_blocks"):
            if getattr(self, name) < 0:
                raise CompactionError(f"`{name}` is {getattr(self, name)}; give at least 0.")
        if not 0 <= self.pyramid_percent <= 100:
            raise CompactionError(
                f"`pyramid_percent` is {self.pyramid_percent}; give a value in 0 … 100."
            )
        if not 0.0 <= self.resident_margin < float("inf"):
            raise CompactionError(
                f"`resident_margin` is {self.resident_margin}; give a finite value of at least 0."
            )
