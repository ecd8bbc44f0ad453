"""Static checks shared by the wrappers: shapes and dtypes, never values."""

from typing import Any

import jax
import numpy as np

from blockcompact_jax.kernels.layouts import Layout
from blockcompact_jax.kernels.pools import RegisteredPool


def check_column(name: str, column: Any, num_rows: int | None = None) -> int:
    """Checks one row array and returns its length."""
    if not _is_array(column) or column.dtype != np.int32 or column.ndim != 1:
        raise ValueError(f"`{name}` is {describe(column)}; expected an int32 array [num_rows]")
    if num_rows is not None and column.shape[0] != num_rows:
        raise ValueError(
            f"`{name}` has {column.shape[0]} rows and the other row arrays {num_rows}; give equal "
            "lengths and pad with HOLE"
        )
    return column.shape[0]


def check_ord(name: str, value: Any) -> None:
    """Checks an `ord` array."""
    if not _is_array(value) or value.dtype != np.uint32 or value.shape != (1,):
        raise ValueError(
            f"`{name}` is {describe(value)}; expected the uint32[1] of `current_ord()` or of the "
            "last call"
        )


def check_pair(plain: RegisteredPool, packed: RegisteredPool) -> None:
    """Checks that a plain and a packed pool hold blocks of one shape."""
    check_plain("plain_pool", plain)
    if packed.layout is None:
        raise ValueError("`packed_pool` is a plain pool; register it with `register_packed`")
    for name in ("num_layers", "num_kv_heads", "block_tokens", "head_dim", "element_bytes"):
        ours, theirs = getattr(plain.shape, name), getattr(packed.shape, name)
        if ours != theirs:
            raise ValueError(
                f"`plain_pool` has {name} = {ours} and `packed_pool` {theirs}; register both with "
                "one geometry"
            )


def check_plain(name: str, pool: RegisteredPool) -> None:
    """Checks that a pool is plain."""
    if pool.layout is not None:
        raise ValueError(
            f"`{name}` is a packed pool ({pool.layout.label}); register it with `register_plain`"
        )


def check_on_host(name: str, pool: RegisteredPool) -> None:
    """Checks that a pool is the host's."""
    if pool.device is not None:
        raise ValueError(
            f"`{name}` is on cuda:{pool.device}; this call reads pools of the host. Give addresses "
            "on the device to `host_pool_attend_at` or `host_pool_score_sequences_at`"
        )


def check_device_call(num_threads: int | None, *, is_on_open_mp: bool) -> None:
    """Checks that a call on a pool of a device names no threads of the host."""
    if num_threads is not None or is_on_open_mp:
        raise ValueError(
            f"`num_threads` is {num_threads} and `is_on_open_mp` {is_on_open_mp}; a pool on a "
            "device takes neither"
        )


def check_packed_layout(layout: Layout) -> None:
    """Checks that a layout is a packed one."""
    if not layout.is_packed:
        raise ValueError(f"`layout` is `{layout.label}`; expected `amx` or `vec`")


def check_plain_layout(name: str, layout: Layout) -> None:
    """Checks that a layout is a plain one."""
    if layout.is_packed:
        raise ValueError(f"`{name}` is `{layout.label}`; expected `plain_nhd` or `plain_hnd`")


def describe(value: Any) -> str:
    """Type, dtype and shape for an error message."""
    if _is_array(value):
        return f"{value.dtype}{list(value.shape)}"
    return type(value).__name__


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | jax.Array)  # numpy first: the other check is slow
