"""Engine pools under our axis order and ours under theirs: the same elements, or a refusal."""

import numpy as np
import pytest
import torch

from blockcompact_jax.kernels import host_pool_gather
from torch_bridge.dlpack import aligned_zeros
from torch_bridge.pool_views import engine_view, layer_view, register_layers

N, B, H, D = 5, 4, 3, 8
SHAPES = {
    ("NHD", 1): (N, 2, B, H, D),
    ("NHD", 0): (2, N, B, H, D),
    ("HND", 1): (N, 2, H, B, D),
    ("HND", 0): (2, N, H, B, D),
}
DECLARATIONS = pytest.mark.parametrize(("layout", "kv_axis"), list(SHAPES))


def element(kv_cache, layout, kv_axis, place):
    """One token of one head, by the declared order alone."""
    kv, block, token, head = place
    inner = (token, head) if layout == "NHD" else (head, token)
    return kv_cache[(kv, block, *inner) if kv_axis == 0 else (block, kv, *inner)]


def filled(shape):
    values = torch.arange(int(np.prod(shape)), dtype=torch.float32) + 1
    return aligned_zeros(*shape, dtype=torch.float32).copy_(values.view(shape))


@DECLARATIONS
def test_a_view_is_the_same_memory_element_by_element(layout, kv_axis):
    kv_cache = filled(SHAPES[layout, kv_axis])
    view = layer_view(kv_cache, layout=layout, kv_axis=kv_axis)
    assert view.shape == (2, H, N, B, D)
    assert view.data_ptr() == kv_cache.data_ptr()
    for place in np.ndindex(2, N, B, H):
        kv, block, token, head = place
        expected = element(kv_cache, layout, kv_axis, place)
        assert torch.equal(view[kv, head, block, token], expected)


@DECLARATIONS
def test_our_pool_is_seen_in_an_engines_order_and_back(layout, kv_axis):
    row = filled((2, H, N * B, D))
    seen = engine_view(row, block_tokens=B, layout=layout, kv_axis=kv_axis)
    assert seen.shape == SHAPES[layout, kv_axis]
    assert seen.data_ptr() == row.data_ptr()
    for kv, block, token, head in np.ndindex(2, N, B, H):
        found = element(seen, layout, kv_axis, (kv, block, token, head))
        assert torch.equal(found, row[kv, head, block * B + token])
    back = layer_view(seen, layout=layout, kv_axis=kv_axis)
    assert back.stride() == row.unflatten(2, (N, B)).stride()


@DECLARATIONS
@pytest.mark.parametrize("gap", [0, 16])
def test_native_calls_read_registered_layers_where_they_lie(layout, kv_axis, gap):
    """Row 37: layers of one slab, with gaps between them and between blocks."""
    shape = SHAPES[layout, kv_axis]
    slab = filled((3, shape[0], int(np.prod(shape[1:])) + gap))
    inner = slab[0, 0, : slab.shape[2] - gap].view(shape[1:]).stride()
    layers = [
        slab[layer].as_strided(shape, (slab.stride(1), *inner), slab[layer].storage_offset())
        for layer in (2, 0)
    ]
    pool = register_layers(layers, layout=layout, kv_axis=kv_axis)
    blocks = np.array([4, 1], np.int32)
    for row, kv_cache in enumerate(layers):
        gathered = host_pool_gather(
            pool.current_ord(), row, blocks, pool=pool, dtype=np.float32
        ).blocks
        for entry, kv, token, head in np.ndindex(2, 2, B, H):
            place = (kv, int(blocks[entry]), token, head)
            expected = element(kv_cache, layout, kv_axis, place)
            assert np.array_equal(gathered[entry, kv, head, token], expected.numpy())
    pool.close()


def test_a_second_view_has_the_strides_of_its_own_tensor():
    """Row 30: nothing of an earlier call is kept."""
    dense = filled(SHAPES["NHD", 1])
    strided = filled((N, 2, B, H + 2, D))[:, :, :, :H]
    assert layer_view(dense, layout="NHD").stride() != layer_view(strided, layout="NHD").stride()
    found = layer_view(strided, layout="NHD")
    assert torch.equal(found[1, 2, 3, 1], strided[3, 1, 1, 2])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: filled(SHAPES["NHD", 0]), "on axis 1"),
        (lambda: filled((N, H, B, 2 * D)), "Packed pools are not plain"),  # row 29
        (lambda: filled((N, 2, B, D, H)).transpose(3, 4), "contiguous last axis"),  # row 31
        (lambda: filled((N, 2, B, H, 2 * D))[..., ::2], "contiguous last axis"),
    ],
)
def test_tensors_that_do_not_fit_the_declaration_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        register_layers([make()], layout="NHD")


def test_unlike_layers_folded_strides_and_unknown_names_are_refused():
    kv_cache = filled(SHAPES["NHD", 1])
    other = filled((N, 2, B, H + 2, D))[:, :, :, :H]
    with pytest.raises(ValueError, match=r"`kv_caches\[1\]` has shape"):
        register_layers([kv_cache, other], layout="NHD")
    with pytest.raises(ValueError, match="overlap"):
        register_layers([kv_cache[:1].expand(N, -1, -1, -1, -1)], layout="NHD")
    with pytest.raises(ValueError, match="`layout` is 'NDH'"):
        layer_view(kv_cache, layout="NDH")
    with pytest.raises(ValueError, match="`kv_axis` is 2"):
        layer_view(kv_cache, layout="NHD", kv_axis=2)
    with pytest.raises(ValueError, match="one tensor a layer"):
        register_layers([], layout="NHD")
    with pytest.raises(ValueError, match="`pool_row` has shape"):
        engine_view(torch.zeros(2, H, N * B + 1, D), block_tokens=B, layout="NHD")
