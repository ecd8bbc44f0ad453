"""Ranking and ID lists: native, pure and brute force give the same bytes."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockcompact_jax.kernels import NativeOperations, RankOrder, build_info, rank
from blockcompact_jax.kernels.native import load_native
from blockcompact_jax.operations import PURE_OPERATIONS, PureOperations

from . import rank_twin as twin

IMPLS = build_info()["simd_available"]
NATIVE = NativeOperations()
OPERATIONS = [NATIVE, PURE_OPERATIONS]
# Around the widths of vectors, of mask words, and of what is narrowed and sorted differently.
SIZES = [(2, 1, 1), (3, 16, 4), (2, 17, 20), (3, 65, 65), (2, 300, 70), (1, 2500, 1300)]

# Ties, signed zeros, denormals, extremes.
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-42, -1e-42, 2e-42, 3.4e38, -3.4e38, 1.0000001]
NON_FINITE = [np.nan, -np.nan, np.inf, -np.inf]


@functools.cache
def ranker(operations, num_sinks, capacity):
    def run(scores, count, num_candidates):
        return operations.rank(
            scores, count, num_candidates=num_candidates, num_sinks=num_sinks, capacity=capacity
        )

    return jax.jit(run)


@functools.cache
def lister(operations, max_ids, capacity):
    def run(lists, bound, distinct, is_taken, references):
        members = operations.find_members(*lists, bound=bound, max_ids=max_ids)
        ascending = operations.sort_ids(distinct, is_taken, max_ids=max_ids, capacity=capacity)
        return members, ascending, operations.list_free(references, capacity=capacity)

    return jax.jit(run)


def each_native(run):
    """What every implementation of this machine gives."""
    for impl in IMPLS:
        load_native().force_impl(impl)
        try:
            yield impl, run()
        finally:
            load_native().force_impl("")


def assert_same(got, expected, what):
    leaves = [[np.asarray(leaf) for leaf in jax.tree.leaves(tree)] for tree in (got, expected)]
    for mine, other in zip(*leaves, strict=True):
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape), what
        np.testing.assert_array_equal(mine, other, err_msg=what)


def draw_scores(rng, kind, shape):
    match kind:
        case "special":
            return rng.choice(np.float32(SPECIAL), shape)
        case "equal":
            return np.full(shape, rng.choice(np.float32(SPECIAL)))
        case "falling":
            return np.exp(-40.0 * rng.random(shape)).astype(np.float32)
        case "clustered":  # one far outlier, all others within a few bits
            scores = (1.0 + rng.integers(0, 40, shape) * 2.0**-23).astype(np.float32)
            scores[..., 0] = -3e38
            return scores
        case _:
            return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
@given(
    seed=st.integers(0, 2**31 - 1),
    kind=st.sampled_from(["special", "equal", "falling", "clustered", "normal"]),
    num_sinks=st.sampled_from([0, 3]),
    has_bad=st.booleans(),
)
def test_SEL_3_native_pure_and_twin_rank_alike(size, seed, kind, num_sinks, has_bad):
    """SEL-3, SEL-4, SEL-6: ties, zeros, denormals, non-finite places, any K; every SIMD width."""
    num_rows, num_blocks, capacity = size
    rng = np.random.default_rng(seed)
    scores = draw_scores(rng, kind, (num_rows, num_blocks))
    if has_bad:  # a candidate or not
        scores[rng.integers(num_rows), rng.integers(num_blocks)] = rng.choice(NON_FINITE)
    count = rng.choice([-1, 0, 1, num_blocks // 2, num_blocks, num_blocks + 1], num_rows)
    count = count.astype(np.int32)
    num_candidates = np.int32(rng.choice([0, 1, num_blocks // 2, num_blocks - 1, num_blocks]))
    expected = twin.rank(scores, count, num_candidates, num_sinks, capacity)
    arguments = (scores, count, num_candidates)
    assert_same(ranker(PURE_OPERATIONS, num_sinks, capacity)(*arguments), expected, "pure")
    native = ranker(NATIVE, num_sinks, capacity)
    for impl, got in each_native(lambda: native(*arguments)):
        assert_same(got, expected, impl)


@pytest.mark.parametrize("has_excluded", [False, True])
@given(seed=st.integers(0, 2**31 - 1), kind=st.sampled_from(["special", "normal"]))
def test_SEL_3_ascending_without_the_excluded(has_excluded, seed, kind):
    """SEL-3, DIF-1, DIF-2: excluded blocks take their place among the best, and are not listed."""
    rng = np.random.default_rng(seed)
    scores = draw_scores(rng, kind, (3, 150))
    count = rng.integers(0, 151, 3).astype(np.int32)
    is_excluded = rng.random((3, 150)) < 0.4 if has_excluded else None
    best, _ = twin.rank(scores, count, 150, 2, 150)
    skipped = is_excluded if has_excluded else np.zeros((3, 150), bool)
    listed = [sorted(b for b in row if b >= 0 and not skipped[r, b]) for r, row in enumerate(best)]
    expected = twin.padded(listed, 150)

    def run():
        order = RankOrder.BLOCK
        return rank(
            scores, count, capacity=150, num_sinks=2, order=order, is_excluded=is_excluded
        ).blocks

    for impl, got in each_native(run):
        assert_same(got, expected, impl)


@pytest.mark.parametrize("size", [(1, 1), (40, 7), (64, 64), (65, 200), (1000, 300)])
@given(seed=st.integers(0, 2**31 - 1))
def test_DIF_7_lists_and_masks_equal_the_twin(size, seed):
    """DIF-2, DIF-7: membership, first faults, ascending order, free ones; each implementation."""
    max_ids, capacity = size
    rng = np.random.default_rng(seed)
    low = -2 if seed % 2 else 0
    ids = rng.integers(low, max_ids + 2, (3, min(max_ids, 30))).astype(np.int32)
    others = rng.integers(low, max_ids + 2, (3, min(max_ids, 50))).astype(np.int32)
    if seed % 3 == 0:  # lists without a repeat
        ids = np.stack([rng.permutation(max_ids)[: ids.shape[1]] for _ in range(3)])
        ids = ids.astype(np.int32)
    distinct = np.stack([rng.permutation(max_ids + 2) - 1 for _ in range(3)])
    distinct = distinct[:, : max(max_ids // 2, 1)].astype(np.int32)
    filled, others_filled, taken = (
        rng.random(array.shape) < rng.choice([0.5, 1.0]) for array in (ids, others, distinct)
    )
    lists = (ids, filled, others, others_filled)
    references = rng.integers(0, 3, (2, 3, max_ids)) * (rng.random((2, 3, max_ids)) < rng.random())
    references = references.astype(np.int32)
    bound = np.int32(rng.integers(0, max_ids + 1))
    expected = (
        twin.find_members(*lists, bound, max_ids),
        twin.sort_ids(distinct, taken, max_ids, capacity),
        twin.list_free(references, capacity),
    )
    arguments = (lists, bound, distinct, taken, references)
    assert_same(lister(PURE_OPERATIONS, max_ids, capacity)(*arguments), expected, "pure")
    native = lister(NATIVE, max_ids, capacity)
    for impl, got in each_native(lambda: native(*arguments)):
        assert_same(got, expected, impl)


@pytest.mark.parametrize("operations", OPERATIONS, ids=lambda operations: operations.name)
def test_empty_shapes_list_nothing(operations):
    """No block, no place, no capacity, no row."""
    for rows, blocks, capacity in ((2, 0, 3), (2, 5, 0), (0, 5, 3)):
        got = operations.rank(
            np.ones((rows, blocks), np.float32),
            np.full(rows, 2, np.int32),
            num_candidates=np.int32(blocks),
            num_sinks=1,
            capacity=capacity,
        )
        assert (np.asarray(got.blocks) == -1).all()
        assert got.blocks.shape == (rows, capacity)
        assert (np.asarray(got.first_non_finite) == -1).all()
    none = np.zeros((2, 0), np.int32)
    some = np.array([[3, 3], [1, 2]], np.int32)
    lists = (none, none.astype(bool), some, np.ones(some.shape, bool))
    members = operations.find_members(*lists, bound=3, max_ids=4)
    assert members.is_member.shape == (2, 0)
    assert np.asarray(members.repeated_other).tolist() == [0, -1]
    assert np.asarray(members.outside_id).tolist() == [-1, -1]
    assert np.asarray(members.outside_other).tolist() == [0, -1]
    ascending = operations.sort_ids(none, none.astype(bool), max_ids=4, capacity=2)
    assert np.asarray(ascending).tolist() == [[-1, -1]] * 2
    for num_owners, num_blocks, capacity in ((2, 3, 0), (2, 0, 2), (0, 3, 2)):
        references = np.zeros((3, num_owners, num_blocks), np.int32)
        free = operations.list_free(references, capacity=capacity)
        assert free.blocks.shape == (num_owners, capacity)
        assert np.asarray(free.num_free).tolist() == [num_blocks] * num_owners


def large_case():
    rng = np.random.default_rng(3)
    scores = draw_scores(rng, "special", (64, 2048))
    scores[::2] = draw_scores(rng, "falling", (32, 2048))
    return scores, rng.integers(0, 700, 64).astype(np.int32), np.int32(2047)


def test_SEL_3_rows_on_many_threads_give_the_same_bytes():
    """SEL-3: rows are spread over threads, and every run gives the twin's bytes."""
    arguments = large_case()
    expected = twin.rank(*arguments, 1, 700)
    for _ in range(20):
        assert_same(ranker(NATIVE, 1, 700)(*arguments), expected, "threads")


def test_SEL_3_one_thread_gives_the_same_bytes(tmp_path):
    """SEL-3: XLA with one thread, in a process of its own."""
    # The sources come last on the path: they must not hide an installed package.
    program = (
        f"import sys; sys.path.append({str(Path(__file__).parents[2])!r})\n"
        "import json, numpy as np, jax\n"
        "from tests.kernels import test_rank as t\n"
        "got = t.ranker(t.NATIVE, 1, 700)(*t.large_case())\n"
        "print(json.dumps([np.asarray(x).tolist() for x in got]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={
            **os.environ,
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = twin.rank(*large_case(), 1, 700)
    assert json.loads(done.stdout) == [part.tolist() for part in expected]


def test_SEL_3_vmap_is_one_call_and_scan_repeats_it():
    """SEL-3: a batch under vmap, and a scan, give the bytes of single calls."""
    rng = np.random.default_rng(4)
    scores = draw_scores(rng, "special", (5, 3, 40))
    count = rng.integers(0, 12, (5, 3)).astype(np.int32)
    one = ranker(NATIVE, 1, 12)
    expected = [one(s, c, np.int32(33)) for s, c in zip(scores, count, strict=True)]
    expected = jax.tree.map(lambda *parts: np.stack(parts), *expected)
    batched = jax.jit(jax.vmap(one, in_axes=(0, 0, None)))
    assert_same(batched(scores, count, np.int32(33)), expected, "vmap")
    assert batched.lower(scores, count, np.int32(33)).as_text().count("@blockcompact_rank") == 1

    def body(carry, xs):
        return carry, one(*xs, np.int32(33))

    assert_same(jax.lax.scan(body, 0, (scores, count))[1], expected, "scan")
    with_shared = jax.vmap(one, in_axes=(0, None, None))(scores, count[0], np.int32(33))
    assert_same(one(scores[4], count[0], np.int32(33)).blocks, with_shared.blocks[4], "shared")


def test_wrong_operands_are_refused_by_name():
    """Shapes and dtypes are checked when the call is traced."""
    with pytest.raises(ValueError, match="`scores` is float64"):
        rank(np.zeros((2, 3)), np.zeros(2, np.int32), capacity=1)
    with pytest.raises(ValueError, match=r"`count` is int32\[3\]; expected int32 \[2\]"):
        rank(np.zeros((2, 3), np.float32), np.zeros(3, np.int32), capacity=1)
    with pytest.raises(ValueError, match=r"`is_excluded` is bool\[2, 2\]"):
        rank(
            np.zeros((2, 3), np.float32),
            np.zeros(2, np.int32),
            capacity=1,
            is_excluded=np.zeros((2, 2), bool),
        )
    with pytest.raises(ValueError, match="`others` is int64"):
        NATIVE.find_members(
            np.zeros((1, 2), np.int32),
            np.ones((1, 2), bool),
            np.zeros((1, 2), np.int64),
            np.ones((1, 2), bool),
            bound=3,
            max_ids=3,
        )


def test_operations_are_static_arguments():
    """Equal by value and hashable, so that a policy holding them never retraces."""
    assert NativeOperations() == NATIVE
    assert PureOperations() == PURE_OPERATIONS != NATIVE
    assert len({NATIVE, NativeOperations(), PURE_OPERATIONS}) == 2
    assert (NATIVE.name, PURE_OPERATIONS.name) == ("native", "pure")
