"""Random bytes and row columns shared by the kernel tests."""

import numpy as np


def column(*values):
    return np.array(values, np.int32)


def random_blocks(rng, shape, dtype):
    """Any bit patterns, NaN payloads included."""
    dtype = np.dtype(dtype)
    bits = rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    return bits.view(dtype)[..., 0].copy()


def as_bytes(array):
    """Contents to compare: NaN payloads and signed zeros count."""
    array = np.ascontiguousarray(np.asarray(array))
    return array.view(np.uint8)


def assert_same_bytes(got, expected):
    assert np.asarray(got).dtype == np.asarray(expected).dtype
    assert np.asarray(got).shape == np.asarray(expected).shape
    np.testing.assert_array_equal(as_bytes(got), as_bytes(expected))
