"""Share memory between torch and JAX through DLPack: zero-copy, or a refusal that says why.

Both importers of the frameworks copy without a word in some cases (a pointer that is not 64-byte
aligned, a 64-bit dtype with x64 switched off, strides with gaps). Here every import proves that the
pointer stayed the same. An import costs tens of microseconds: import once and keep the result.
"""

from __future__ import annotations

import jax
import numpy as np
import torch
from jax.core import Tracer

ALIGNMENT_BYTES = 64
"""XLA's CPU client takes only pointers of this alignment without copying."""

_NARROWED_WITHOUT_X64 = {
    torch.int64: "int32",
    torch.uint64: "uint32",
    torch.float64: "float32",
    torch.complex128: "complex64",
}


class ZeroCopyError(ValueError):
    """The two frameworks cannot share this memory; a copy would have been needed."""


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """Imports a torch tensor into JAX without copying a byte.

    Args:
        tensor: CPU tensor of any shape, contiguous, 64-byte aligned, without gradient. The caller
            must not write to it while JAX may still read the result (JAX arrays are immutable).

    Returns:
        A JAX array over the same memory; it keeps the tensor's storage alive.

    Raises:
        ZeroCopyError: if the import would copy, convert or detach, with the reason and the remedy.
    """
    _check_exportable(tensor)
    array = jax.dlpack.from_dlpack(tensor.detach(), copy=False)
    if tensor.numel() and array.unsafe_buffer_pointer() != tensor.data_ptr():
        raise ZeroCopyError(
            f"`tensor` of shape {tuple(tensor.shape)} and dtype {tensor.dtype} was copied on "
            f"import (0x{tensor.data_ptr():x} became 0x{array.unsafe_buffer_pointer():x}); "
            "expected the same memory. Allocate it with `torch_bridge.dlpack.aligned_zeros`."
        )
    return array


def to_torch(array: jax.Array) -> torch.Tensor:
    """Exports a JAX array to torch without copying a byte.

    Args:
        array: committed, single-device CPU array (not a tracer).

    Returns:
        A tensor over the same memory. JAX believes the array immutable: read it, never write it.

    Raises:
        ZeroCopyError: if the array is traced, sharded, deleted or would be copied.
    """
    if isinstance(array, Tracer):
        raise ZeroCopyError(
            "`array` is being traced by JAX and has no memory yet; expected a concrete array. "
            "Export it outside of `jax.jit`."
        )
    if array.is_deleted():
        raise ZeroCopyError(
            "`array` was deleted or donated; expected a live array. Export it before donating it."
        )
    if len(array.devices()) != 1:
        raise ZeroCopyError(
            f"`array` lies on {len(array.devices())} devices; expected one. "
            "Export `array.addressable_shards[i].data` instead."
        )
    tensor = torch.from_dlpack(array)
    if array.size and tensor.data_ptr() != array.unsafe_buffer_pointer():
        raise ZeroCopyError(
            f"`array` of shape {array.shape} and dtype {array.dtype} was copied on export; "
            "expected the same memory."
        )
    return tensor


def aligned_zeros(
    *shape: int, dtype: torch.dtype, alignment_bytes: int = ALIGNMENT_BYTES
) -> torch.Tensor:
    """Allocates a contiguous CPU tensor of zeros whose first element is aligned.

    Every page is written, so it takes its memory at once; an unwritten place is finite, as
    attention needs it.

    Args:
        *shape: sizes of each axis.
        dtype: element type.
        alignment_bytes: power of two the address must be a multiple of.

    Returns:
        Tensor of `shape`, a view into a storage at most `alignment_bytes` larger.

    Raises:
        ValueError: if `alignment_bytes` is not a power of two that the element size divides.
    """
    if alignment_bytes <= 0 or alignment_bytes & (alignment_bytes - 1):
        raise ValueError(f"`alignment_bytes` is {alignment_bytes}; expected a power of two.")
    if alignment_bytes % dtype.itemsize:
        raise ValueError(
            f"`alignment_bytes` is {alignment_bytes}; expected a multiple of the element size "
            f"{dtype.itemsize}."
        )
    num_elements = int(np.prod(shape, dtype=np.int64))
    storage = torch.zeros(num_elements + alignment_bytes // dtype.itemsize, dtype=dtype)
    skipped = -storage.data_ptr() % alignment_bytes // dtype.itemsize
    return storage[skipped : skipped + num_elements].view(*shape)


def _check_exportable(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise ZeroCopyError(
            f"`tensor` is on {tensor.device}; expected a CPU tensor. "
            "Use the JAX backend of that device."
        )
    if tensor.requires_grad:
        raise ZeroCopyError("`tensor` requires grad; expected one without. Call `.detach()` first.")
    if tensor.is_conj() or tensor.is_neg():
        raise ZeroCopyError("`tensor` is a lazy conjugate or negative; resolve it first.")
    if not tensor.is_contiguous():
        raise ZeroCopyError(
            f"`tensor` has shape {tuple(tensor.shape)} and strides {tensor.stride()}; expected it "
            "contiguous. Share the contiguous parent, or call `.contiguous()` to copy on purpose."
        )
    if tensor.dtype in _NARROWED_WITHOUT_X64 and not jax.config.read("jax_enable_x64"):
        raise ZeroCopyError(
            f"`tensor` has dtype {tensor.dtype}, which JAX would narrow to "
            f"{_NARROWED_WITHOUT_X64[tensor.dtype]} in a copy; expected a 32-bit dtype. Convert it "
            "on purpose, or enable `jax_enable_x64`."
        )
    if tensor.numel() and tensor.data_ptr() % ALIGNMENT_BYTES:
        raise ZeroCopyError(
            f"`tensor` starts at 0x{tensor.data_ptr():x}; expected {ALIGNMENT_BYTES}-byte "
            "alignment. Allocate it with `torch_bridge.dlpack.aligned_zeros`."
        )
