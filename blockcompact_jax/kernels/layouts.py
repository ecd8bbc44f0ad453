"""Element orders of one KV block, and which block shapes each order can hold."""

import enum

import numpy as np
from numpy.typing import NDArray

from blockcompact_jax.errors import CompactionError

_AMX_TILE = 16
_AMX_MULTIPLE = 32


class Layout(enum.IntEnum):
    """Order of the elements of one block. The values are those of the native code.

    A packed row is `[num_kv_heads, 2 * block_tokens, head_dim]`: for each head its K region, then
    its V region. Plain blocks hold K before V: `[2, ...]`.
    """

    AMX = 0
    """VNNI pair order in tiles of 16 tokens (K) and 16 dims (V)."""
    VEC = 1
    """K transposed to `[head_dim, block_tokens]`, V in token order."""
    PLAIN_NHD = 2
    """`[2, block_tokens, num_kv_heads, head_dim]`."""
    PLAIN_HND = 3
    """`[2, num_kv_heads, block_tokens, head_dim]`."""

    @property
    def is_packed(self) -> bool:
        """Whether rows of this layout are packed rows."""
        return self in (Layout.AMX, Layout.VEC)

    @property
    def label(self) -> str:
        """Lower-case name as written in configurations and messages."""
        return self.name.lower()


class UnsupportedLayoutError(CompactionError):
    """A layout cannot hold the asked block shape."""


def check_layout(layout: Layout, *, block_tokens: int, head_dim: int, element_bytes: int) -> None:
    """Refuses, by name, a block shape that `layout` cannot hold.

    Args:
        layout: The layout to hold the block.
        block_tokens: Tokens of a block.
        head_dim: Elements of one head of one token.
        element_bytes: Bytes of one element.

    Raises:
        UnsupportedLayoutError: Where the shape does not fit; the message says which layout does.
    """
    for name, value in (("block_tokens", block_tokens), ("head_dim", head_dim)):
        if value <= 0:
            raise UnsupportedLayoutError(f"`{name}` is {value}; it must be positive")
    if element_bytes not in (1, 2, 4):
        raise UnsupportedLayoutError(f"`element_bytes` is {element_bytes}; it must be 1, 2 or 4")
    if layout is not Layout.AMX:
        return
    if element_bytes == 1:
        raise UnsupportedLayoutError(
            "layout `amx` has no order for `element_bytes` = 1; use layout `vec`"
        )
    for name, value in (("block_tokens", block_tokens), ("head_dim", head_dim)):
        if value % _AMX_MULTIPLE != 0:
            raise UnsupportedLayoutError(
                f"layout `amx` needs `{name}` to be a multiple of {_AMX_MULTIPLE}, got {value}; "
                "use layout `vec`"
            )


def pair_elements(element_bytes: int) -> int:
    """Elements that one VNNI pair joins: 2 for 16-bit types, 1 for 32-bit ones."""
    return 2 if element_bytes == 2 else 1


def packed_k_offsets(
    layout: Layout, *, block_tokens: int, head_dim: int, element_bytes: int
) -> NDArray[np.int64]:
    """Element offsets inside the K region of one head.

    Args:
        layout: A packed layout.
        block_tokens: Tokens of a block.
        head_dim: Elements of one head of one token.
        element_bytes: Bytes of one element.

    Returns:
        `[block_tokens, head_dim]`, a permutation of `0 ... block_tokens * head_dim - 1`.

    Raises:
        UnsupportedLayoutError: Where `layout` is plain or cannot hold the shape.
    """
    token, dim = _token_and_dim(layout, block_tokens, head_dim, element_bytes)
    if layout is Layout.VEC:
        return dim * block_tokens + token
    pair = pair_elements(element_bytes)
    return (
        (token // _AMX_TILE) * _AMX_TILE * head_dim
        + (dim // pair) * _AMX_TILE * pair
        + (token % _AMX_TILE) * pair
        + dim % pair
    )


def packed_v_offsets(
    layout: Layout, *, block_tokens: int, head_dim: int, element_bytes: int
) -> NDArray[np.int64]:
    """Element offsets inside the V region of one head; see `packed_k_offsets`."""
    token, dim = _token_and_dim(layout, block_tokens, head_dim, element_bytes)
    if layout is Layout.VEC:
        return token * head_dim + dim
    pair = pair_elements(element_bytes)
    return (
        (dim // _AMX_TILE) * block_tokens * _AMX_TILE
        + (token // pair) * _AMX_TILE * pair
        + (dim % _AMX_TILE) * pair
        + token % pair
    )


def _token_and_dim(
    layout: Layout, block_tokens: int, head_dim: int, element_bytes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if not layout.is_packed:
        raise UnsupportedLayoutError(
            f"layout `{layout.label}` is plain and has no packed order; give `amx` or `vec`"
        )
    check_layout(layout, block_tokens=block_tokens, head_dim=head_dim, element_bytes=element_bytes)
    token = np.arange(block_tokens, dtype=np.int64)[:, None]
    dim = np.arange(head_dim, dtype=np.int64)[None, :]
    return token, dim
