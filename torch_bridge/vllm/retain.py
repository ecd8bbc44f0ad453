"""The *retain* policy: vLLM's block manager takes back the blocks that no layer attends to.

A cache specification of ours stands for full attention in its groups, and vLLM's registry gives it
a manager of ours. Freed places of a block table become vLLM's null block, as those behind a sliding
window do.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from torch_bridge.vllm.requests import RetainedRequests

RETAINED = RetainedRequests()
"""Requests of this process's engine that gave blocks back; workers and managers share it."""


@dataclass(frozen=True, kw_only=True)
class RetainedAttentionSpec(FullAttentionSpec):
    """Full attention over the blocks that a request retains."""


def retained_spec(spec: Any) -> Any:
    """The specification of a layer under the retain policy.

    Args:
        spec: as vLLM made it; what is not plain full attention is handed on.
    """
    if type(spec) is not FullAttentionSpec:
        return spec
    return RetainedAttentionSpec(**{f.name: getattr(spec, f.name) for f in fields(spec)})


class RetainedAttentionManager(FullAttentionManager):
    """Owns the blocks of full-attention groups and frees those that were given back."""

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Frees what the request gave back; vLLM calls it before it allocates for a step."""
        blocks = self.req_to_blocks.get(request_id)
        if not blocks:
            return
        freed: list[Any] = []
        for logical_block in RETAINED.dropped_blocks(blocks[0].block_id):
            if not blocks[logical_block].is_null:
                freed.append(blocks[logical_block])
                blocks[logical_block] = self._null_block
        if freed:
            self.block_pool.free_blocks(reversed(freed))

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """As the stock manager; whatever the request had selected is forgotten with it."""
        blocks = super().pop_blocks_for_free(request_id)
        if blocks:
            RETAINED.forget(blocks[0].block_id)
        return blocks


def register() -> None:
    """Tells vLLM which manager serves the specification."""
    KVCacheSpecRegistry._ensure_registered()  # it registers its own only while there are none
    KVCacheSpecRegistry.register(
        RetainedAttentionSpec,
        manager_class=RetainedAttentionManager,
        uniform_type_base_spec=FullAttentionSpec,
    )
