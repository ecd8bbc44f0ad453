"""DLPack sharing: the same memory or a refusal, never a copy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from torch_bridge.dlpack import ALIGNMENT_BYTES, ZeroCopyError, aligned_zeros, to_jax, to_torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_import_shares_memory_and_values(dtype):
    tensor = aligned_zeros(3, 5, 7, dtype=dtype)
    tensor.copy_(torch.arange(105).view(3, 5, 7) % 2)
    array = to_jax(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert array.shape == (3, 5, 7)
    assert np.array_equal(np.asarray(array.astype(jnp.float32)), tensor.float().numpy())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_round_trip_keeps_the_pointer(dtype):
    tensor = aligned_zeros(64, dtype=dtype)
    assert to_torch(to_jax(tensor)).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: aligned_zeros(8, 8, dtype=torch.float32).t(), "strides"),
        (lambda: aligned_zeros(8, 8, dtype=torch.float32)[:, :2], "strides"),
        (lambda: aligned_zeros(77, 77, dtype=torch.float32).as_strided((3, 3), (1, 77)), "strides"),
        (lambda: aligned_zeros(65, dtype=torch.float32)[1:], "alignment"),
        (lambda: aligned_zeros(8, dtype=torch.int64), "int32"),
        (lambda: aligned_zeros(8, dtype=torch.float64), "float32"),
        (lambda: torch.nn.Parameter(aligned_zeros(8, dtype=torch.float32)), "grad"),
        (lambda: torch.empty(8, device="meta"), "meta"),
    ],
)
def test_import_refuses_what_would_be_copied(make, reason):
    with pytest.raises(ZeroCopyError, match=reason):
        to_jax(make())


def test_a_second_import_does_not_reuse_the_strides_of_the_first():
    parent = aligned_zeros(4, 16, dtype=torch.float32)
    parent.copy_(torch.arange(64).view(4, 16))
    assert to_jax(parent).shape == (4, 16)
    assert np.array_equal(to_jax(parent.view(16, 4)), parent.view(16, 4).numpy())
    with pytest.raises(ZeroCopyError, match="strides"):
        to_jax(parent.t())


def test_export_refuses_tracers_and_deleted_arrays():
    with pytest.raises(ZeroCopyError, match="traced"):
        jax.jit(lambda x: to_torch(x) is None)(jnp.zeros(4))
    array = jnp.zeros(4)
    array.delete()
    with pytest.raises(ZeroCopyError, match="deleted"):
        to_torch(array)


def test_export_shares_memory():
    array = jnp.arange(32, dtype=jnp.float32)
    tensor = to_torch(array)
    assert tensor.data_ptr() == array.unsafe_buffer_pointer()
    assert np.array_equal(tensor.numpy(), np.asarray(array))


@pytest.mark.parametrize("alignment_bytes", [0, 48, 2])
def test_aligned_zeros_refuses_impossible_alignments(alignment_bytes):
    with pytest.raises(ValueError, match="alignment_bytes"):
        aligned_zeros(4, dtype=torch.float32, alignment_bytes=alignment_bytes)


@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 0, 4)])
def test_aligned_zeros_is_aligned_and_contiguous(shape):
    tensor = aligned_zeros(*shape, dtype=torch.bfloat16)
    assert tensor.shape == shape
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % ALIGNMENT_BYTES == 0
