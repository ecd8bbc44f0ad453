"""Our packed layouts against the engine that reads them: vLLM's CPU packer, byte for byte.

vLLM keeps a block as `[num_kv_heads, 2 * block_tokens, head_dim]`, K before V, in the order of an
instruction set (`isa`). Its packer runs without the hardware of that set; only attention needs it.
"""

import jax
import numpy as np
import pytest

from blockcompact_jax import kernels
from blockcompact_jax.kernels import Layout, UnsupportedLayoutError, check_layout

torch = pytest.importorskip("torch", reason="vllm, and with it torch, is not installed")

NUM_BLOCKS = 4
DTYPES = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}
AMX_SHAPES = [(1, 32, 32), (2, 32, 64), (3, 64, 96), (1, 96, 128), (2, 128, 256)]
VEC_SHAPES = [*AMX_SHAPES, (2, 16, 64), (1, 8, 32), (5, 16, 128), (2, 48, 64)]


def as_torch(array, dtype):
    """The same bits as a torch tensor of `dtype`."""
    signed = np.dtype(f"int{8 * array.itemsize}")
    return torch.from_numpy(np.ascontiguousarray(array).view(signed)).view(dtype)


def random_bits(rng, shape, unsigned):
    """Any bit patterns, NaN payloads included."""
    return rng.integers(0, np.iinfo(unsigned).max, shape, unsigned, endpoint=True)


def tokens_of(blocks):
    """Tokens `[2, num_blocks * block_tokens, num_kv_heads, head_dim]` of `PLAIN_HND` blocks."""
    num_blocks, _, heads, block_tokens, dims = blocks.shape
    return blocks.transpose(1, 0, 3, 2, 4).reshape(2, num_blocks * block_tokens, heads, dims)


def our_pack(blocks, layout):
    packed = kernels.pack(jax.numpy.asarray(blocks), layout=layout, plain_layout=Layout.PLAIN_HND)
    return np.array(packed)


def write_with_vllm(packer, cache, tokens, token_places, *, isa, dtype, cache_dtype="auto"):
    """vLLM writes `tokens[:, i]` to place `token_places[i]` = block * block_tokens + offset."""
    signed = np.dtype(f"int{8 * cache.itemsize}")
    memory = torch.from_numpy(cache.view(signed))
    key_cache, value_cache = memory.view(dtype if cache_dtype == "auto" else torch.uint8).chunk(
        2, dim=2
    )
    key, value = as_torch(tokens, dtype).unbind(0)
    places = torch.from_numpy(token_places.astype(np.int64))
    packer(key, value, key_cache, value_cache, places, isa, 1.0, 1.0, cache_dtype)


def packer_cases():
    for isa, shapes in (("amx", AMX_SHAPES), ("vec", VEC_SHAPES)):
        for shape in shapes:
            for dtype in DTYPES:
                name = "-".join([isa, dtype, "x".join(map(str, shape))])
                yield pytest.param(isa, dtype, shape, id=name)


@pytest.mark.parametrize(("isa", "dtype", "block"), list(packer_cases()))
def test_UPL_5_vllm_writes_the_bytes_that_we_pack(vllm_packer, isa, dtype, block):
    """UPL-5, UPL-6: tokens written in any order, blocks left partly unwritten, every byte equal."""
    heads, block_tokens, dims = block
    rng = np.random.default_rng(block_tokens * dims + heads)
    layout = Layout.AMX if isa == "amx" else Layout.VEC
    shape = (NUM_BLOCKS, 2, heads, block_tokens, dims)
    blocks = random_bits(rng, shape, DTYPES[dtype])
    written = random_bits(rng, shape, DTYPES[dtype])
    cache = our_pack(blocks, layout)
    num_tokens = NUM_BLOCKS * block_tokens
    places = rng.permutation(num_tokens)[: num_tokens * 2 // 3]
    tokens = tokens_of(written)[:, places]

    write_with_vllm(vllm_packer, cache, tokens, places, isa=isa, dtype=getattr(torch, dtype))

    blocks[places // block_tokens, :, :, places % block_tokens] = written[
        places // block_tokens, :, :, places % block_tokens
    ]
    np.testing.assert_array_equal(cache, our_pack(blocks, layout))
    unpacked = kernels.unpack(
        jax.numpy.asarray(cache), layout=layout, plain_layout=Layout.PLAIN_HND
    )
    np.testing.assert_array_equal(np.asarray(unpacked), blocks)


@pytest.mark.parametrize("cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize(("heads", "block_tokens", "dims"), VEC_SHAPES)
def test_UPL_5_vllm_writes_the_fp8_bytes_that_we_pack(
    vllm_packer, cache_dtype, heads, block_tokens, dims
):
    """UPL-5: values that the 8-bit type holds exactly, so that only the order is compared."""
    rng = np.random.default_rng(dims)
    eight_bits = getattr(torch, "float8_e5m2" if cache_dtype == "fp8_e5m2" else "float8_e4m3fn")
    shape = (NUM_BLOCKS, 2, heads, block_tokens, dims)
    values = torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(dims)).bfloat16()
    blocks = values.to(eight_bits).view(torch.uint8).numpy()
    cache = random_bits(rng, (NUM_BLOCKS, heads, 2 * block_tokens, dims), np.uint8)
    tokens = tokens_of(values.view(torch.int16).numpy())

    write_with_vllm(
        vllm_packer,
        cache,
        tokens,
        np.arange(NUM_BLOCKS * block_tokens),
        isa="vec",
        dtype=torch.bfloat16,
        cache_dtype=cache_dtype,
    )

    np.testing.assert_array_equal(cache, our_pack(blocks, Layout.VEC))


def test_UPL_5_vllms_amx_order_of_fp8_has_no_layout_of_ours():
    """UPL-5: vLLM pairs 8-bit elements in AMX order as it does 16-bit ones; refused by name."""
    with pytest.raises(UnsupportedLayoutError, match="amx"):
        check_layout(Layout.AMX, block_tokens=32, head_dim=64, element_bytes=1)


@pytest.mark.parametrize(("block_tokens", "dims"), [(16, 64), (32, 80)])
def test_UPL_5_what_vllm_does_not_pack_in_amx_order_is_refused(vllm_packer, block_tokens, dims):
    """UPL-5: vLLM fails, or silently takes its `vec` order; ours is refused by name."""
    with pytest.raises(UnsupportedLayoutError, match="amx"):
        check_layout(Layout.AMX, block_tokens=block_tokens, head_dim=dims, element_bytes=2)
    blocks = random_bits(np.random.default_rng(1), (2, 2, 1, block_tokens, dims), np.uint16)
    cache = np.zeros((2, 1, 2 * block_tokens, dims), np.uint16)
    places = np.arange(2 * block_tokens)
    write = {"isa": "amx", "dtype": torch.bfloat16}
    if block_tokens % 32:
        with pytest.raises(RuntimeError, match="block_size"):
            write_with_vllm(vllm_packer, cache, tokens_of(blocks), places, **write)
    else:
        write_with_vllm(vllm_packer, cache, tokens_of(blocks), places, **write)
        np.testing.assert_array_equal(cache, our_pack(blocks, Layout.VEC))
