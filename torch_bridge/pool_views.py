"""KV pools of engines under our axis order, and ours under theirs: views, never copies.

An engine's layout is declared, not guessed: "NHD" orders a block's axes (tokens, heads, dim), "HND"
(heads, tokens, dim), and `kv_axis` says whether keys and values are the outermost axis (0) or lie
inside of each block (1). Strides are read off the tensor at each call, so gaps between blocks,
layers in one slab and transposed storage are honoured; what no strides can express is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch

from blockcompact_jax.kernels.pools import PlainStrides, RegisteredPool
from torch_bridge.pools import owner_stream

PoolLayout = Literal["NHD", "HND"]
KVAxis = Literal[0, 1]


def layer_view(kv_cache: torch.Tensor, *, layout: PoolLayout, kv_axis: KVAxis = 1) -> torch.Tensor:
    """One layer's pool of an engine, in our axis order.

    Args:
        kv_cache: plain KV in the declared order: [num_blocks, 2, block_tokens, num_kv_heads,
            head_dim] for "NHD", [num_blocks, 2, num_kv_heads, block_tokens, head_dim] for "HND";
            with `kv_axis` 0 the axis of 2 stands first. Any strides with a contiguous last axis.
        layout: the order of a block's axes.
        kv_axis: where the axis of keys and values stands.

    Returns:
        [2, num_kv_heads, num_blocks, block_tokens, head_dim], a view.

    Raises:
        ValueError: if the tensor does not fit the declaration.
    """
    _check_declaration(layout, kv_axis)
    if kv_cache.dim() != 5 or kv_cache.shape[kv_axis] != 2:
        raise ValueError(
            f"`kv_cache` has shape {tuple(kv_cache.shape)}; expected five axes with 2 (keys and "
            f"values) on axis {kv_axis}. Packed pools are not plain: register them as packed."
        )
    if kv_cache.stride(4) != 1:
        raise ValueError(
            f"`kv_cache` has strides {kv_cache.stride()}; expected a contiguous last axis"
        )
    view = kv_cache.movedim(kv_axis, 0)  # [2, num_blocks, …]
    return view.permute(0, 3, 1, 2, 4) if layout == "NHD" else view.permute(0, 2, 1, 3, 4)


def engine_view(
    pool_row: torch.Tensor, *, block_tokens: int, layout: PoolLayout, kv_axis: KVAxis = 1
) -> torch.Tensor:
    """One row of a resident pool in an engine's axis order.

    Args:
        pool_row: [2, num_kv_heads, num_blocks * block_tokens, head_dim], a row of
            `ResidentKV.tensor`.
        block_tokens: tokens a block.
        layout: the order of a block's axes.
        kv_axis: where the axis of keys and values shall stand.

    Returns:
        A view as `layer_view` takes it. Its strides are not dense: it is for engines that follow
        strides.

    Raises:
        ValueError: if the row does not hold whole blocks, or cannot be viewed without a copy.
    """
    _check_declaration(layout, kv_axis)
    if pool_row.dim() != 4 or pool_row.shape[0] != 2 or pool_row.shape[2] % block_tokens:
        raise ValueError(
            f"`pool_row` has shape {tuple(pool_row.shape)}; expected [2, num_kv_heads, "
            f"num_blocks * {block_tokens}, head_dim]"
        )
    if pool_row.stride(3) != 1:
        raise ValueError(
            f"`pool_row` has strides {pool_row.stride()}; expected a contiguous last axis"
        )
    blocks = pool_row.unflatten(2, (-1, block_tokens))  # splitting an axis never copies
    inner = (2, 0, 3, 1, 4) if layout == "NHD" else (2, 0, 1, 3, 4)
    return blocks.permute(inner).movedim(1, kv_axis)


def register_layers(
    kv_caches: Sequence[torch.Tensor],
    *,
    layout: PoolLayout,
    kv_axis: KVAxis = 1,
    is_writable: bool = True,
) -> RegisteredPool:
    """Registers an engine's plain KV tensors, one a layer, with the native calls.

    Args:
        kv_caches: one tensor a layer, as `layer_view` takes them, alike in shape, dtype, strides
            and device, CPU or CUDA. Layers may be parts of one slab, at any distance. On CUDA calls
            come in the order of the stream that torch works on at registration.
        layout: the order of a block's axes.
        kv_axis: where the axis of keys and values stands.
        is_writable: False refuses every call that writes the blocks.

    Returns:
        A pool whose layer r is `kv_caches[r]`. It keeps the tensors alive until closed.

    Raises:
        ValueError: if a tensor does not fit the declaration, differs from the first, lies on
            another kind of device, or has strides that fold elements together; and for CUDA tensors
            without the CUDA component.
    """
    if not kv_caches:
        raise ValueError("`kv_caches` is empty; expected one tensor a layer")
    views = [layer_view(kv_cache, layout=layout, kv_axis=kv_axis) for kv_cache in kv_caches]
    first = views[0]
    for row, view in enumerate(views):
        if (view.shape, view.stride(), view.dtype) != (first.shape, first.stride(), first.dtype):
            raise ValueError(
                f"`kv_caches[{row}]` has shape {tuple(view.shape)}, strides {view.stride()} and "
                f"dtype {view.dtype} in our axis order; expected those of the first layer: "
                f"{tuple(first.shape)}, {first.stride()}, {first.dtype}. Register groups apart."
            )
        if view.device != first.device:
            raise ValueError(
                f"`kv_caches[{row}]` is on {view.device} and the first layer on {first.device}; "
                "register the layers of each device apart"
            )
    device, stream = owner_stream("kv_caches[0]", first)
    _, num_kv_heads, num_blocks, block_tokens, head_dim = first.shape
    kv, head, block, token, _ = first.stride()
    last = sum((size - 1) * step for size, step in zip(first.shape, first.stride(), strict=True))
    return RegisteredPool.register_plain(
        [view.data_ptr() for view in views],
        num_layers=len(views),
        num_blocks=num_blocks,
        num_kv_heads=num_kv_heads,
        block_tokens=block_tokens,
        head_dim=head_dim,
        element_bytes=first.element_size(),
        strides=PlainStrides(layer=0, kv=kv, block=block, head=head, token=token),
        size_bytes=(last + 1) * first.element_size(),
        keepalive=list(kv_caches),
        is_writable=is_writable,
        device=device,
        stream=stream,
    )


def _check_declaration(layout: str, kv_axis: int) -> None:
    if layout not in get_args(PoolLayout):
        raise ValueError(
            f"`layout` is {layout!r}; expected one of {', '.join(get_args(PoolLayout))}"
        )
    if kv_axis not in get_args(KVAxis):
        raise ValueError(f"`kv_axis` is {kv_axis}; expected 0 or 1")
