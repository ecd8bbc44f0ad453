"""Options of a decoding run, their checks, and the observer a run reports to. Needs no torch."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, get_args

from blockcompact_jax.budget import Budget, OptionError, check_budget
from blockcompact_jax.kernels import Layout, UnsupportedLayoutError, check_layout
from torch_bridge.models.progress import SilentObserver, StageObserver

DType = Literal["float32", "bfloat16"]
PolicyName = Literal["attention", "recency", "random"]
LayoutName = Literal["amx", "vec"]
AttentionName = Literal["blocks", "gathered"]
SelectionName = Literal["attention", "estimate"]

DTYPES: tuple[DType, ...] = get_args(DType)
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
LAYOUTS: tuple[LayoutName, ...] = get_args(LayoutName)
ATTENTIONS: tuple[AttentionName, ...] = get_args(AttentionName)
SELECTIONS: tuple[SelectionName, ...] = get_args(SelectionName)


_KNOWN_NAMES = {
    "policy": POLICIES,
    "dtype": DTYPES,
    "layout": LAYOUTS,
    "attention": ATTENTIONS,
    "select_by": SELECTIONS,
}


def check_counts(*, minimum: int = 1, **counts: int) -> None:
    """Refuses counts below a minimum.

    Raises:
        OptionError: naming the first such count.
    """
    for name, value in counts.items():
        if value < minimum:
            raise OptionError(f"`{name}` is {value}, expected {minimum} or more")


def check_names(**names: str) -> None:
    """Refuses unknown names of a policy, dtype, layout, attention or selection, by keyword.

    Raises:
        OptionError: naming the first such option and what is known.
    """
    for name, value in names.items():
        known = _KNOWN_NAMES[name]
        if value not in known:
            raise OptionError(f"`{name}` is {value!r}, expected one of {', '.join(known)}")


def check_block_layout(layout: LayoutName, block_tokens: int) -> None:
    """Refuses a block size that a layout cannot hold, whatever the model.

    Raises:
        OptionError: saying which layout can.
    """
    try:
        # The head size is the model's and is checked with it; here a size that fits stands for it.
        check_layout(
            Layout[layout.upper()], block_tokens=block_tokens, head_dim=32, element_bytes=2
        )
    except UnsupportedLayoutError as error:
        raise OptionError(str(error)) from error


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
        is_reselecting_online: Whether costs decide when blocks are selected anew;
            `reselect_every_rounds` is kept where a cost is unmeasured.
        costs_file: Calibrated costs to decide by; None to measure them during the run.
        has_course: Whether residency, rounds and decisions are recorded.
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
    budget: Budget = field(default_factory=lambda: Budget(fraction=0.25))
    block_tokens: int = 32
    num_draft_tokens: int = 8
    num_lookup_tokens: int = 7
    reselect_every_rounds: int = 4
    is_reselecting_online: bool = False
    costs_file: Path | None = None
    has_course: bool = False
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
        if self.costs_file is not None and not self.is_reselecting_online:
            raise OptionError(
                "`costs` is given with a fixed `reselect-every`, expected `reselect-every auto`"
            )
        check_counts(
            context_tokens=self.context_tokens,
            num_new_tokens=self.num_new_tokens,
            block_tokens=self.block_tokens,
            num_draft_tokens=self.num_draft_tokens,
            reselect_every_rounds=self.reselect_every_rounds,
        )
        check_counts(minimum=0, num_lookup_tokens=self.num_lookup_tokens)
        check_names(
            policy=self.policy, dtype=self.dtype, layout=self.layout, attention=self.attention
        )
        check_budget(self.budget)
        check_block_layout(self.layout, self.block_tokens)
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise OptionError(
                f"`temperature` is {self.temperature}, expected a finite number, 0 or more"
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
