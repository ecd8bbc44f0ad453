"""How much of a sequence stays resident, as a person writes it."""

import math
import re
from dataclasses import dataclass
from typing import cast

SINK_BLOCKS = 1
"""First blocks of a sequence that every budget holds."""

RECENT_BLOCKS = 1
"""Newest whole blocks of a sequence that every budget holds."""


class OptionError(ValueError):
    """An option has a value that cannot be used."""


@dataclass(frozen=True)
class Budget:
    """How many whole blocks of a layer stay resident, as a count or as a fraction.

    The first block and the newest whole block are among them; the partial block and draft tokens
    come on top.

    Exactly one of the two fields is set.

    Attributes:
        fraction: Share of the sequence's whole blocks, in (0, 1].
        blocks: Number of blocks, at least 1.
    """

    fraction: float | None = None
    blocks: int | None = None

    def __post_init__(self) -> None:
        if (self.fraction is None) == (self.blocks is None):
            raise OptionError(
                f"`budget` got fraction={self.fraction} and blocks={self.blocks}, expected exactly "
                "one of the two; leave the other one out"
            )
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise OptionError(
                f"`budget` got the fraction {self.fraction}, expected more than 0 and at most 1 "
                "(100%); to count blocks write for example 16b"
            )
        if self.blocks is not None and self.blocks < 1:
            raise OptionError(f"`budget` got {self.blocks} blocks, expected at least 1")

    def num_blocks(self, num_whole_blocks: int) -> int:
        """Blocks to keep of a layer that has `num_whole_blocks` whole, confirmed blocks.

        A fraction is rounded up, so that a positive budget never selects nothing while there is a
        candidate. A count larger than the number of candidates keeps them all.

        Args:
            num_whole_blocks: Logical blocks the selection may choose from, at least 0.

        Returns:
            A count in [0, num_whole_blocks].
        """
        if num_whole_blocks < 0:
            raise OptionError(f"`num_whole_blocks` is {num_whole_blocks}, expected 0 or more")
        if self.blocks is not None:
            return min(self.blocks, num_whole_blocks)
        fraction = cast(float, self.fraction)
        # 0.1 * 30 is 3.0000000000000004: rounding error must not add a block.
        return min(math.ceil(round(fraction * num_whole_blocks, 9)), num_whole_blocks)

    def __str__(self) -> str:
        """The shortest text that `parse_budget` reads as this budget."""
        if self.blocks is not None:
            return f"{self.blocks}b"
        return f"{cast(float, self.fraction) * 100:.6g}%"


def effective_budget_blocks(budget: Budget, num_whole_blocks: int) -> int:
    """Blocks a layer that a budget comes to; a small one still holds sink and recent blocks."""
    return max(budget.num_blocks(num_whole_blocks), SINK_BLOCKS + RECENT_BLOCKS)


def check_budget(budget: Budget) -> None:
    """Refuses a count that is too small for sink and recent blocks.

    A fraction is not refused: a growing sequence may meet it, and until then the budget that is
    applied holds these blocks.

    Raises:
        OptionError: if it is.
    """
    smallest = SINK_BLOCKS + RECENT_BLOCKS
    if budget.blocks is not None and budget.blocks < smallest:
        raise OptionError(
            f"`budget` {budget} is less than {SINK_BLOCKS} sink and {RECENT_BLOCKS} recent block; "
            f"give at least {smallest}b, or a fraction"
        )


_BUDGET = re.compile(r"(?P<number>\d+(?:\.\d*)?|\.\d+)(?P<unit>%|b)?", re.ASCII)


def parse_budget(text: str) -> Budget:
    """Read a budget as a person writes it.

    A value with `%`, or of at most 1, is a fraction of the whole blocks: `25%`, `0.25`, `1`
    (all of them). A value with `b`, or an integer of at least 2, is a number of blocks: `16b`,
    `16`, `1b` (one block).

    Args:
        text: What was written; surrounding blanks are ignored.

    Returns:
        The budget.

    Raises:
        OptionError: `text` is none of the above, or names an empty or impossible budget.
    """
    match = _BUDGET.fullmatch(text.strip())
    if match is None:
        raise OptionError(
            f"`budget` got {text!r}, expected a fraction (0.25 or 25%) or a number of blocks "
            "(16b or 16)"
        )
    number, unit = match["number"], match["unit"]
    value = float(number)
    if unit == "%":
        return Budget(fraction=value / 100)
    if unit is None and value <= 1:
        return Budget(fraction=value)
    if not number.isdigit():
        raise OptionError(
            f"`budget` got {text!r}: blocks are counted in whole numbers and a fraction is at "
            "most 1; write 25%, 0.25 or 16b"
        )
    return Budget(blocks=int(number))
