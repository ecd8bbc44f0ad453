"""`jax.jit` under a strict type checker."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import jax

P = ParamSpec("P")
R = TypeVar("R")


def typed_jit(**options: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """`jax.jit` with `options`, keeping the signature of the function it wraps."""

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        jit = cast(Any, jax.jit)  # pyright: ignore[reportUnknownMemberType]
        return cast(Callable[P, R], jit(function, **options))

    return wrap
