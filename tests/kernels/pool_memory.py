"""Memory for pool tests, and its registration."""

import numpy as np

from blockcompact_jax import kernels
from blockcompact_jax.kernels import PlainStrides, RegisteredPool

CALLS = ("host", "jit")
PLACES = ("nhd", "hnd", "sequence", "padded")


def call(kind, name):
    """The host twin or the JAX function of a pool call."""
    return getattr(kernels, f"host_{name}" if kind == "host" else name)


def plain_memory(blocks, place):
    """Memory that holds [layers, blocks, 2, H, B, D] at `place`, and the view onto it."""
    layers, num_blocks, _, heads, tokens, dims = blocks.shape
    if place == "nhd":
        memory = np.zeros((layers, num_blocks, 2, tokens, heads, dims), blocks.dtype)
        view = memory.transpose(0, 1, 2, 4, 3, 5)
    elif place == "hnd":
        memory = np.zeros(blocks.shape, blocks.dtype)
        view = memory
    elif place == "sequence":
        memory = np.zeros((layers, 2, heads, num_blocks, tokens, dims), blocks.dtype)
        view = memory.transpose(0, 3, 1, 2, 4, 5)
    else:  # gaps everywhere
        memory = np.full(
            (layers, num_blocks + 1, 2, heads + 1, tokens + 2, dims + 3), 77, np.uint8
        ).astype(blocks.dtype)
        view = memory[:, :num_blocks, :, :heads, :tokens, :dims]
    view[...] = blocks
    return memory, view


def register_plain(memory, view, **options):
    layers, num_blocks, _, heads, tokens, dims = view.shape
    layer, block, kv, head, token, _ = (stride // view.itemsize for stride in view.strides)
    return RegisteredPool.register_plain(
        memory.ctypes.data,
        num_layers=layers,
        num_blocks=num_blocks,
        num_kv_heads=heads,
        block_tokens=tokens,
        head_dim=dims,
        element_bytes=view.itemsize,
        strides=PlainStrides(layer=layer, kv=kv, block=block, head=head, token=token),
        size_bytes=memory.nbytes,
        **({"keepalive": memory} | options),
    )


def register_packed(memory, layout, **options):
    layers, num_blocks, heads, twice_tokens, dims = memory.shape
    return RegisteredPool.register_packed(
        memory.ctypes.data,
        layout=layout,
        num_layers=layers,
        num_blocks=num_blocks,
        num_kv_heads=heads,
        block_tokens=twice_tokens // 2,
        head_dim=dims,
        element_bytes=memory.itemsize,
        size_bytes=memory.nbytes,
        keepalive=memory,
        **options,
    )
