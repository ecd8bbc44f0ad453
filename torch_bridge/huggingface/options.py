"""Options of a decoding run, their checks, and the observer a run reports to. Needs no torch."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, cast, get_args

from torch_bridge.models.progress import SilentObserver, StageObserver

DType = Literal["float32", "bfloat16"]
PolicyName = Literal["attention", "recency", "random"]
LayoutName = Literal["amx", "vec"]
AttentionName = Literal["blocks", "gathered"]

DTYPES: tuple[DType, ...] = get_args(DType)
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
LAYOUTS: tuple[LayoutName, ...] = get_args(LayoutName)
ATTENTIONS: tuple[AttentionName, ...] = get_args(AttentionName)


class OptionError(ValueError):
    """An option of a run has a value that cannot be used."""


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


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What `blockcompact run` does. Checked when constructed.

    Attributes:
        model: Short model name, a local directory, a .gguf file, or a hub name.
        prompt: Prompt text; None for the built-in long prompt. Not together with `prompt_file`.
        prompt_file: UTF-8 file that holds the prompt.
        context_tokens: Prompt tokens to prefill. A longer prompt is cut to its first
            `context_tokens` tokens; a shorter one is used whole.
        num_new_tokens: Tokens to generate, at least 1.
        budget: Whole blocks each full-attention layer keeps resident.
        block_tokens: Tokens per block, at least 1.
        num_draft_tokens: Tokens drafted against the resident pool per verification, at least 1.
        num_lookup_tokens: Tokens of one draft forward that repetition in the text may suggest; 0
            drafts token by token. The drafted tokens are the same either way.
        reselect_every_rounds: Verification rounds between two selections, at least 1.
        policy: Name of the selection policy.
        dtype: Data type of weights and KV cache.
        layout: Packed layout of the full KV; "amx" needs `block_tokens` and the head size to be
            multiples of 32, "vec" takes any.
        attention: "blocks" attends in place, over packed and resident blocks; "gathered" copies
            them together for stock attention, slower and bit for bit the stock results.
        temperature: Sampling temperature; 0 decodes greedily.
        seed: Seed of every random choice (sampling, the random policy), in [0, 2**63).
        compare_full: Also decode with full attention and compare.
    """

    model: str = "smollm2-135m"
    prompt: str | None = None
    prompt_file: Path | None = None
    context_tokens: int = 2048
    num_new_tokens: int = 128
    budget: Budget = Budget(fraction=0.25)
    block_tokens: int = 32
    num_draft_tokens: int = 8
    num_lookup_tokens: int = 7
    reselect_every_rounds: int = 4
    policy: PolicyName = "attention"
    dtype: DType = "float32"
    layout: LayoutName = "amx"
    attention: AttentionName = "blocks"
    temperature: float = 0.0
    seed: int = 0
    compare_full: bool = True

    def __post_init__(self) -> None:
        if not self.model.strip():
            raise OptionError("`model` is empty, expected a model name or a path")
        if self.prompt is not None and self.prompt_file is not None:
            raise OptionError("`prompt` and `prompt_file` are both given, expected at most one")
        for name in (
            "context_tokens",
            "num_new_tokens",
            "block_tokens",
            "num_draft_tokens",
            "reselect_every_rounds",
        ):
            value = getattr(self, name)
            if value < 1:
                raise OptionError(f"`{name}` is {value}, expected 1 or more")
        for name, known in (
            ("policy", POLICIES),
            ("dtype", DTYPES),
            ("layout", LAYOUTS),
            ("attention", ATTENTIONS),
        ):
            value = getattr(self, name)
            if value not in known:
                raise OptionError(f"`{name}` is {value!r}, expected one of {', '.join(known)}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise OptionError(
                f"`temperature` is {self.temperature}, expected a finite number, 0 or more"
            )
        if self.num_lookup_tokens < 0:
            raise OptionError(
                f"`num_lookup_tokens` is {self.num_lookup_tokens}, expected 0 or more"
            )
        if not 0 <= self.seed < 2**63:
            raise OptionError(f"`seed` is {self.seed}, expected 0 or more and below 2**63")


class RunObserver(StageObserver, Protocol):
    """Hears how a run goes. A run calls it from one thread, in order."""

    def on_text(self, piece: str) -> None:
        """The next piece of generated text, to be shown right after the earlier pieces."""
        ...


class NullObserver(SilentObserver):
    """A `RunObserver` that shows nothing."""

    def on_text(self, piece: str) -> None:
        """Ignore the text."""
