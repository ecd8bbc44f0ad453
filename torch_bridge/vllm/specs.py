"""Specifications of ours that stand for stock ones in their groups, and their managers."""

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
        kind: a class of specifications.
        spec: of a class that it extends, or that extends it.
        more: fields that `kind` has beyond it.
    """
    known = {f.name for f in fields(spec)} - set(more)
    given = {f.name: getattr(spec, f.name) for f in fields(kind) if f.init and f.name in known}
    return kind(**given, **more)


def check_kind(kind: Any, specs: Sequence[Any]) -> None:
    """Says whether layers may share a block table, as vLLM asks a specification's `merge`.

    Args:
        kind: class of specification that can be merged.
        specs: of the layers.

    Raises:
        AssertionError: for one of another kind; vLLM takes it for a no.
    """
    for spec in specs:
        if not isinstance(spec, kind):
            raise AssertionError(
                f"`specs` has a {type(spec).__name__}, expected {kind.__name__} alone; layers of "
                "other kinds belong in groups of their own"
            )


def merge_plain(specs: Sequence[Any]) -> FullAttentionSpec:
    """The one plain specification of full-attention layers that share a block table."""
    return FullAttentionSpec.merge([as_kind(FullAttentionSpec, spec) for spec in specs])


def register_manager(spec_class: Any, manager_class: Any, *, stands_for: Any) -> None:
    """Tells vLLM which manager serves a specification of ours.

    The specification's module does so when it is imported: a process that unpickles the
    specification must know the manager, or vLLM takes the stock one.

    Args:
        spec_class: of ours.
        manager_class: of its groups' blocks.
        stands_for: stock class of specifications, which it extends.
    """
    KVCacheSpecRegistry._ensure_registered()  # it registers its own only while there are none
    KVCacheSpecRegistry.register(
        spec_class, manager_class=manager_class, uniform_type_base_spec=stands_for
    )
