"""Room for drafts: every request owns slots past the tokens that it computes in a step.

vLLM reserves none for proposers of the kind `custom_class`. Specifications of ours stand for full
and sliding-window attention in their groups, and their managers ask for the slots with each step's
own, as vLLM does for the proposers that it knows.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from torch_bridge.vllm.specs import as_kind, check_kind, merge_plain, register_manager


@dataclass(frozen=True, kw_only=True)
class LookaheadAttentionSpec(FullAttentionSpec):
    """Full attention with room for drafts.

    Attributes:
        num_lookahead_tokens: slots past the tokens of a step.
        max_tokens: longest sequence; there are no slots past it.
    """

    num_lookahead_tokens: int
    max_tokens: int

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The one specification of layers that share a block table."""
        check_kind(cls, specs)
        ((num_lookahead_tokens, max_tokens),) = {
            (spec.num_lookahead_tokens, spec.max_tokens) for spec in specs
        }
        return as_kind(
            cls,
            merge_plain(specs),
            num_lookahead_tokens=num_lookahead_tokens,
            max_tokens=max_tokens,
        )


@dataclass(frozen=True, kw_only=True)
class LookaheadWindowSpec(SlidingWindowSpec):
    """Sliding-window attention with room for drafts.

    Attributes:
        num_lookahead_tokens: slots past the tokens of a step.
        max_tokens: longest sequence; there are no slots past it.
    """

    num_lookahead_tokens: int
    max_tokens: int

    def max_admission_blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int
    ) -> int:
        """As the stock specification; drafts are in flight too."""
        return super().max_admission_blocks_per_request(
            max_in_flight_tokens + self.num_lookahead_tokens, max_model_len
        )


_WITH_LOOKAHEAD = {
    FullAttentionSpec: LookaheadAttentionSpec,
    SlidingWindowSpec: LookaheadWindowSpec,
}


def lookahead_spec(
    spec: Any, *, num_lookahead_tokens: int, max_tokens: int, has_window_groups: bool
) -> Any:
    """The specification of a layer whose requests have room for drafts.

    Args:
        spec: as vLLM made it; what is not plain attention is handed on.
        num_lookahead_tokens: slots past the tokens of a step.
        max_tokens: longest sequence.
        has_window_groups: whether sliding-window layers have groups of their own; where they have
            not, vLLM converts their stock specification.
    """
    kind = _WITH_LOOKAHEAD.get(type(spec))
    if kind is None or (kind is LookaheadWindowSpec and not has_window_groups):
        return spec
    return as_kind(
        kind,
        spec,
        num_lookahead_tokens=num_lookahead_tokens,
        max_tokens=max_tokens,
    )


class _WithLookahead:
    """What a manager does for the slots of drafts; before the stock manager among the bases."""

    kv_cache_spec: Any

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        """As the stock manager, for tokens and drafts."""
        num_tokens = self._with_lookahead(num_tokens)
        stock: Any = super()
        return stock.get_num_blocks_to_allocate(request_id, num_tokens, *args, **kwargs)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[Any]:
        """As the stock manager, for tokens and drafts."""
        num_tokens = self._with_lookahead(num_tokens)
        stock: Any = super()
        return stock.allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)

    def _with_lookahead(self, num_tokens: int) -> int:
        spec = self.kv_cache_spec
        return max(num_tokens, min(num_tokens + spec.num_lookahead_tokens, spec.max_tokens))


class LookaheadAttentionManager(_WithLookahead, FullAttentionManager):
    """Owns the blocks of full-attention groups, those of drafts among them."""


class LookaheadWindowManager(_WithLookahead, SlidingWindowManager):
    """Owns the blocks of sliding-window groups, those of drafts among them."""


register_manager(LookaheadAttentionSpec, LookaheadAttentionManager, stands_for=FullAttentionSpec)
register_manager(LookaheadWindowSpec, LookaheadWindowManager, stands_for=SlidingWindowSpec)
