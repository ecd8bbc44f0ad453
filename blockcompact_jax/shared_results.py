"""`jax.jit` that gives equal results out as one array.

A compiled call writes every result to memory of its own, be it an argument, a constant or the same
value twice. Plans have many such leaves; here each value leaves the compiled call once at most.
"""

# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .typed_jit import typed_jit

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class _Layout:
    """Where the leaves of a result come from; one object a trace.

    Attributes:
        tree: structure of the result.
        places: of each leaf, among the computed values, the constants and the arguments' leaves.
        constants: values that depend on no argument.
        is_given: whether any leaf is an argument.
    """

    tree: Any
    places: tuple[int, ...]
    constants: tuple[Array, ...]
    is_given: bool


@partial(jax.tree_util.register_dataclass, data_fields=("values",), meta_fields=("layout",))
@dataclass(frozen=True)
class _Computed:
    values: tuple[Any, ...]
    layout: _Layout


def jit_with_shared_results(**options: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """`jax.jit` with `options`, for functions that give out the same value in several places.

    Leaves of the result that are one traced value become one array; those that are an argument with
    axes are that argument; NumPy arrays are constants, made once a trace. Inside another
    transformation all of this changes nothing.
    """

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        def compute(*args: P.args, **kwargs: P.kwargs) -> _Computed:
            return _lay_out(function(*args, **kwargs), jax.tree.leaves((args, kwargs)))

        compute_jit = typed_jit(**options)(wraps(function)(compute))

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            done = compute_jit(*args, **kwargs)
            layout = done.layout
            given = jax.tree.leaves((args, kwargs)) if layout.is_given else []
            sources = [*done.values, *layout.constants, *given]
            leaves = [_as_array(sources[place]) for place in layout.places]
            return jax.tree.unflatten(layout.tree, leaves)

        return call

    return wrap


def _lay_out(result: Any, given: list[Any]) -> _Computed:
    """Sorts the leaves of a result by where they come from."""
    leaves, tree = cast(tuple[list[Any], Any], jax.tree.flatten(result))
    # Not scalars: making an array of a NumPy one takes longer than a computed result does.
    is_given = {id(leaf) for leaf in given if getattr(leaf, "ndim", 0) > 0}
    values = _distinct(
        [leaf for leaf in leaves if not _is_constant(leaf) and id(leaf) not in is_given]
    )
    constants = _distinct([leaf for leaf in leaves if _is_constant(leaf)])
    place_by_id: dict[int, int] = {}
    for place, leaf in enumerate([*values, *constants, *given]):
        place_by_id.setdefault(id(leaf), place)
    with jax.ensure_compile_time_eval():
        arrays = tuple(jnp.asarray(constant) for constant in constants)
    layout = _Layout(
        tree=tree,
        places=tuple(place_by_id[id(leaf)] for leaf in leaves),
        constants=arrays,
        is_given=any(id(leaf) in is_given for leaf in leaves),
    )
    return _Computed(tuple(values), layout)


def _is_constant(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray)


def _distinct(leaves: list[Any]) -> list[Any]:
    return list({id(leaf): leaf for leaf in leaves}.values())


def _as_array(leaf: Any) -> Array:
    return leaf if isinstance(leaf, Array) else jnp.asarray(leaf)
