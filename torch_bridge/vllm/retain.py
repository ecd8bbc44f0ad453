"""The *retain* policy: vLLM's block manager takes back the blocks that no layer attends to.

A cache specification of ours stands for full attention in its groups, and vLLM's registry gives it
a manager of ours. Freed places of a block table become vLLM's null block, as those behind a sliding
window do. Where there is host memory for them, blocks come back: into new blocks of vLLM's pool.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self
from weakref import WeakValueDictionary

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec

from torch_bridge.vllm.requests import RetainedRequests
from torch_bridge.vllm.specs import as_kind, check_kind, merge_plain, register_manager

_retained_by_engine: WeakValueDictionary[str, RetainedRequests] = WeakValueDictionary()
# A process may have several engines, and each numbers its physical blocks from 0.


def retained_of(engine: str) -> RetainedRequests:
    """Requests of one engine that gave blocks back; its workers and managers share and hold it.

    Args:
        engine: name of the engine, from the specification of its caches.
    """
    return _retained_by_engine.setdefault(engine, RetainedRequests())


@dataclass(frozen=True, kw_only=True)
class RetainedAttentionSpec(FullAttentionSpec):
    """Full attention over the blocks that a request retains.

    Attributes:
        engine: vLLM's name of the instance; workers and managers meet under it.
    """

    engine: str

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The one specification of layers that share a block table."""
        check_kind(cls, specs)
        (engine,) = {spec.engine for spec in specs}
        return as_kind(cls, merge_plain(specs), engine=engine)


def retained_spec(spec: Any, *, engine: str) -> Any:
    """The specification of a layer under the retain policy.

    Args:
        spec: as vLLM made it; what is not plain full attention is handed on.
        engine: vLLM's name of the instance.
    """
    if type(spec) is not FullAttentionSpec:
        return spec
    return as_kind(RetainedAttentionSpec, spec, engine=engine)


class RetainedAttentionManager(FullAttentionManager):
    """Owns the blocks of full-attention groups and frees those that were given back."""

    def __init__(self, kv_cache_spec: RetainedAttentionSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self._retained = retained_of(kv_cache_spec.engine)

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
        for logical_block in self._retained.dropped_blocks(blocks[0].block_id):
            if not blocks[logical_block].is_null:
                freed.append(blocks[logical_block])
                blocks[logical_block] = self._null_block
        if freed:
            self.block_pool.free_blocks(reversed(freed))

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        """As the stock manager, and for the blocks that come back to the request."""
        num_blocks = super().get_num_blocks_to_allocate(request_id, num_tokens, *args, **kwargs)
        return num_blocks + len(self._awaited(request_id))

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[Any]:
        """As the stock manager, after blocks of the pool took the places of those that come back.

        vLLM appends what it is told of to the worker's table. These have places in it already, so
        that the worker hears of them from us.
        """
        awaited = self._awaited(request_id)
        if awaited:
            blocks = self.req_to_blocks[request_id]
            new_blocks = self.block_pool.get_new_blocks(len(awaited))
            for logical_block, block in zip(awaited, new_blocks, strict=True):
                blocks[logical_block] = block
                self._retained.come_back(blocks[0].block_id, logical_block, block.block_id)
        return super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)

    def _awaited(self, request_id: str) -> list[int]:
        blocks = self.req_to_blocks.get(request_id)
        return self._retained.awaited_blocks(blocks[0].block_id) if blocks else []

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """As the stock manager; whatever the request had selected is forgotten with it."""
        blocks = super().pop_blocks_for_free(request_id)
        if blocks:
            self._retained.forget(blocks[0].block_id)
        return blocks


register_manager(RetainedAttentionSpec, RetainedAttentionManager, stands_for=FullAttentionSpec)
