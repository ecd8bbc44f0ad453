"""Room for drafts: every request owns slots past the tokens that it computes in a step.

vLLM reserves none for proposers of the kind `custom_class`. A specification of ours stands for full
attention in its groups, and its manager asks for the slots with each step's own, as vLLM does for
the proposers that it knows.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec

from torch_bridge.vllm.specs import as_kind, merge_plain, register_manager


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
        ((num_lookahead_tokens, max_tokens),) = {
            (spec.num_lookahead_tokens, spec.max_tokens) for spec in specs
        }
        return as_kind(
            cls,
            merge_plain(specs),
            num_lookahead_tokens=num_lookahead_tokens,
            max_tokens=max_tokens,
        )


def lookahead_spec(spec: Any, *, num_lookahead_tokens: int, max_tokens: int) -> Any:
    """The specification of a layer whose requests have room for drafts.

    Args:
        spec: as vLLM made it; what is not plain full attention is handed on.
        num_lookahead_tokens: slots past the tokens of a step.
        max_tokens: longest sequence.
    """
    if type(spec) is not FullAttentionSpec:
        return spec
    return as_kind(
        LookaheadAttentionSpec,
        spec,
        num_lookahead_tokens=num_lookahead_tokens,
        max_tokens=max_tokens,
    )


class LookaheadAttentionManager(FullAttentionManager):
    """Owns the blocks of full-attention groups, those of drafts among them."""

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        """As the stock manager, for tokens and drafts."""
        num_tokens = self._with_lookahead(num_tokens)
        return super().get_num_blocks_to_allocate(request_id, num_tokens, *args, **kwargs)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[Any]:
        """As the stock manager, for tokens and drafts."""
        num_tokens = self._with_lookahead(num_tokens)
        return super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)

    def _with_lookahead(self, num_tokens: int) -> int:
        spec = self.kv_cache_spec
        return max(num_tokens, min(num_tokens + spec.num_lookahead_tokens, spec.max_tokens))


register_manager(LookaheadAttentionSpec, LookaheadAttentionManager)
