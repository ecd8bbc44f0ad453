"""Over which axes of a mesh arrays vary, inside `shard_map`; nothing outside of it.

Operands of a native call must vary over the same axes.
"""

# pyright: reportUnknownMemberType=false

from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import Array

_Tree = TypeVar("_Tree")


def varying_axes(tree: Any) -> frozenset[str]:
    """Returns the mesh axes that any array of a tree varies over."""
    kinds = (jax.typeof(leaf).manual_axis_type for leaf in jax.tree.leaves(tree))
    return frozenset[str]().union(*(kind.varying for kind in kinds))


def vary_over(tree: _Tree, axes: frozenset[str]) -> _Tree:
    """Lets every array of a tree vary over the given mesh axes; no value changes."""

    def vary(leaf: Any) -> Array:
        missing = axes - jax.typeof(leaf).manual_axis_type.varying
        cast_to = cast(Any, jax.lax.pcast)  # pyright: ignore[reportUnknownMemberType]
        return cast_to(leaf, tuple(sorted(missing)), to="varying") if missing else leaf

    return jax.tree.map(vary, tree)


def result_type(shape: tuple[int, ...], dtype: Any, axes: frozenset[str]) -> Any:
    """Returns what a native call's result is declared as."""
    if not axes:
        return jax.ShapeDtypeStruct(shape, dtype)
    return jax.typeof(vary_over(jnp.zeros(shape, dtype), axes))
