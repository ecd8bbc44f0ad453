"""Compiled calls that give each value out once: same leaves, fewer arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockcompact_jax.shared_results import jit_with_shared_results

HOLES = np.full(3, -1, np.int32)


@jit_with_shared_results(static_argnames=("factor",))
def results(first, second, *, factor):
    product = first["a"] * factor
    return {"product": product, "again": (product, second), "given": first["a"], "holes": HOLES}


def arguments():
    return {"a": jnp.arange(3, dtype=jnp.int32)}, jnp.float32(2)


def assert_right(got, factor, leading=()):
    expected = np.broadcast_to(np.arange(3, dtype=np.int32), (*leading, 3))
    np.testing.assert_array_equal(got["product"], expected * factor)
    np.testing.assert_array_equal(got["again"][0], expected * factor)
    np.testing.assert_array_equal(got["given"], expected)
    np.testing.assert_array_equal(got["holes"], np.broadcast_to(HOLES, (*leading, 3)))


def test_UPL_1_equal_results_are_one_array():
    """UPL-1: every leaf is where the function puts it; what is equal is one array."""
    first, second = arguments()
    for factor in (2, 3, 2):
        got = results(first, second, factor=factor)
        assert_right(got, factor)
        assert got["product"] is got["again"][0]
        assert got["given"] is first["a"]
        assert float(got["again"][1]) == 2
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(got))
    assert got["holes"] is results(first, second, factor=2)["holes"]


def test_UPL_1_numpy_arguments_come_back_as_arrays_of_their_own():
    """UPL-1: a result never is the caller's own NumPy memory, which may change."""
    first = {"a": np.arange(3, dtype=np.int32)}
    got = results(first, np.float32(2), factor=2)
    first["a"][:] = 9
    assert_right(got, 2)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(got))


@pytest.mark.parametrize("transform", ["jit", "vmap", "scan"])
def test_UPL_1_inside_other_transformations_the_values_are_the_same(transform):
    """UPL-1: sharing is of the outermost call alone."""
    first, second = arguments()

    def call(first):
        return results(first, second, factor=2)

    stacked = {"a": jnp.stack([first["a"]] * 4)}
    match transform:
        case "jit":
            assert_right(jax.jit(call)(first), 2)
        case "vmap":
            assert_right(jax.vmap(call)(stacked), 2, leading=(4,))
        case "scan":
            got = jax.lax.scan(lambda carry, one: (carry, call(one)), 0, stacked)[1]
            assert_right(got, 2, leading=(4,))


def test_SEL_3_new_values_do_not_retrace():
    """SEL-3: only new shapes, dtypes and static arguments do."""
    count = []

    @jit_with_shared_results(static_argnames=("factor",))
    def counted(value, *, factor):
        count.append(1)
        return value * factor, value

    for value in (1, 2, 3):
        counted(np.int32(value), factor=2)
    assert len(count) == 1
    counted(np.int32(1), factor=3)
    assert len(count) == 2
