"""Torch's pools of a CUDA device, as far as a machine without one shows them.

`cuda` lets CPU tensors pass as those of an emulated device; torch itself does nothing there.
"""

import types

import numpy as np
import pytest
import torch

from blockcompact_jax.kernels import Layout, host_pool_gather, start_pool_upload
from blockcompact_jax.kernels.native import load_native
from torch_bridge import pool_views, pools
from torch_bridge.dlpack import aligned_zeros
from torch_bridge.pool_views import register_layers
from torch_bridge.pools import KVShape, owner_stream

N, B, H, D = 5, 4, 3, 8
SHAPE = KVShape(num_rows=2, num_kv_heads=H, block_tokens=B, head_dim=D, dtype=torch.float16)


@pytest.fixture
def cuda(monkeypatch):
    """Registers tensors as memory of emulated device 0, whose owner works on stream 77."""
    native = load_native()
    device = native.EmulatedDevice()
    before = native.set_device_runtime(device.runtime)
    tensors = []

    def adopt(*shape):
        tensor = aligned_zeros(*shape, dtype=torch.float16).normal_()
        device.add_memory(tensor.data_ptr(), tensor.nbytes, 0)
        tensors.append(tensor)
        return tensor

    for module in (pool_views, pools):
        monkeypatch.setattr(
            module,
            "owner_stream",
            lambda _, tensor: (0, 77) if any(tensor is t for t in tensors) else (None, 0),
        )
    monkeypatch.setattr(pool_views, "layer_view", _same_view(tensors))
    yield types.SimpleNamespace(adopt=adopt, device=device)
    for tensor in tensors:
        device.remove_memory(tensor.data_ptr())
    native.set_device_runtime(before)


def _same_view(tensors):
    """`layer_view`, whose views count as the tensors they show."""
    make = pool_views.layer_view

    def layer_view(kv_cache, **declaration):
        view = make(kv_cache, **declaration)
        if any(kv_cache is tensor for tensor in tensors):
            tensors.append(view)
        return view

    return layer_view


def test_one_row_that_stands_for_several_is_pinned_once(cuda):
    layers = [cuda.adopt(N, 2, B, H, D) for _ in range(2)]
    store = torch.zeros(1, N, H, 2 * B, D, dtype=torch.float16).normal_()
    with register_layers(layers, layout="NHD") as pool:
        for _ in range(2):  # closing the pool has unpinned it
            with SHAPE.register_packed(store, N, Layout.VEC) as packed:
                packed.pin()
                start_pool_upload(
                    packed.current_ord(),
                    pool.current_ord(),
                    np.array([0, 1], np.int32),
                    np.array([4, 2], np.int32),
                    np.array([1, 3], np.int32),
                    packed_pool=packed,
                    plain_pool=pool,
                ).wait()
    for layer, source, target in ((0, 4, 1), (1, 2, 3)):
        values = store[0, source, :, B:]
        assert torch.equal(layers[layer][target, 1], values.view(H, B, D).transpose(0, 1))


def test_UPL_6_an_engines_layers_on_a_device_are_written_where_they_lie(cuda):
    """UPL-6: one upload to layers that are tensors of their own, in the engine's order."""
    layers = [cuda.adopt(N, 2, B, H, D) for _ in range(2)]
    before = [layer.clone() for layer in layers]
    store = torch.zeros(2, N, H, 2 * B, D, dtype=torch.float16).normal_()
    pool = register_layers(layers, layout="NHD")
    packed = SHAPE.register_packed(store, N, Layout.VEC)
    packed.pin()
    assert pool.device == 0
    assert packed.device is None
    event = start_pool_upload(
        packed.current_ord(),
        pool.current_ord(),
        np.array([0, 1], np.int32),
        np.array([4, 2], np.int32),
        np.array([1, 3], np.int32),
        packed_pool=packed,
        plain_pool=pool,
    )
    event.wait_in_stream()
    event.wait()
    for row, (layer, source, target) in enumerate(((0, 4, 1), (1, 2, 3))):
        values = store[layer, source, :, B:]  # of `vec`, V is plain
        assert torch.equal(layers[layer][target, 1], values.view(H, B, D).transpose(0, 1))
        keys = store[layer, source, :, :B].reshape(H, D, B)
        assert torch.equal(layers[layer][target, 0], keys.permute(2, 0, 1))
        untouched = [block for block in range(N) if block != target]
        assert torch.equal(layers[layer][untouched], before[layer][untouched])
        gathered = host_pool_gather(
            event.ord_plain, row, np.array([target], np.int32), pool=pool, dtype=np.float16
        ).blocks
        assert np.array_equal(gathered[0, 1], values.view(H, B, D).numpy())
    pool.close()
    packed.close()


def test_a_resident_tensor_on_a_device_keeps_its_device_and_stream(cuda):
    tensor = cuda.adopt(2, 2, H, N * B, D)
    pool = SHAPE.register_plain(tensor, N)
    assert pool.device == 0
    pool.close()


def test_the_stream_is_the_one_torch_works_on(monkeypatch):
    device = torch.device("cuda", 3)
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda of: types.SimpleNamespace(cuda_stream=1000 + of.index),
    )
    assert owner_stream("tensor", types.SimpleNamespace(device=device)) == (3, 1003)
    assert owner_stream("tensor", torch.zeros(1)) == (None, 0)


def test_tensors_of_other_places_and_shapes_are_refused_in_one_line():
    on_meta = torch.zeros(N, 2, B, H, D, device="meta", dtype=torch.float16)
    on_cpu = torch.zeros(N, 2, B, H, D, dtype=torch.float16)
    with pytest.raises(ValueError, match="on meta; expected a CPU or CUDA tensor"):
        register_layers([on_meta], layout="NHD")
    with pytest.raises(ValueError, match=r"`kv_caches\[1\]` is on meta and the first layer on cpu"):
        register_layers([on_cpu, on_meta], layout="NHD")
    with pytest.raises(ValueError, match="4 bytes; expected 2 bytes an element"):
        SHAPE.register_plain(torch.zeros(2, 2, H, N * B, D), N)
    rows = torch.zeros(2, 2, H, N * B, 2 * D, dtype=torch.float16)
    with pytest.raises(ValueError, match="contiguous last axis"):
        SHAPE.register_plain(rows[..., ::2], N)
    packed = torch.zeros(N, 2, H, 2 * B, D, dtype=torch.float16).transpose(0, 1)
    with pytest.raises(ValueError, match="expected it contiguous"):
        SHAPE.register_packed(packed, N, Layout.VEC)


def test_a_device_tensor_without_the_cuda_component_is_refused(monkeypatch):
    monkeypatch.setattr(pools, "owner_stream", lambda *_: (0, 0))
    native = load_native()
    before = native.set_device_runtime(None)
    try:
        with pytest.raises(ValueError, match="BLOCKCOMPACT_CUDA=ON"):
            SHAPE.register_plain(aligned_zeros(2, 2, H, N * B, D, dtype=torch.float16), N)
    finally:
        native.set_device_runtime(before)
