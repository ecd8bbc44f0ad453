"""Specifications of ours that stand for full attention in its groups, and their managers."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry


def as_kind(kind: Any, spec: Any, **more: Any) -> Any:
    """A specification of another kind that says the same.

    Args:
        kind: FullAttentionSpec or a subclass.
        spec: of full attention.
        more: fields that `kind` has beyond it.
    """
    given = {f.name: getattr(spec, f.name) for f in fields(FullAttentionSpec) if f.init}
    return kind(**given, **more)


def merge_plain(specs: Sequence[Any]) -> FullAttentionSpec:
    """The one plain specification of layers that share a block table."""
    return FullAttentionSpec.merge([as_kind(FullAttentionSpec, spec) for spec in specs])


def register_manager(spec_class: Any, manager_class: Any) -> None:
    """Tells vLLM which manager serves a specification that stands for full attention.

    The specification's module does so when it is imported: a process that unpickles the
    specification must know the manager, or vLLM takes the stock one.

    Args:
        spec_class: a subclass of FullAttentionSpec.
        manager_class: of its groups' blocks.
    """
    KVCacheSpecRegistry._ensure_registered()  # it registers its own only while there are none
    KVCacheSpecRegistry.register(
        spec_class, manager_class=manager_class, uniform_type_base_spec=FullAttentionSpec
    )
