"""Whether given blocks are the best: native, pure and brute force say the same."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockcompact_jax.kernels import NativeOperations
from blockcompact_jax.operations import PURE_OPERATIONS

from . import rank_twin as twin
from .test_rank import NON_FINITE, draw_scores, each_native

NATIVE = NativeOperations()
OPERATIONS = [NATIVE, PURE_OPERATIONS]
MAX_LISTED = 60
# Around the widths of vectors and mask words; over several counted chunks.
SIZES = [(2, 1), (3, 16), (2, 33), (2, 300), (1, 9000)]


@functools.cache
def checker(operations, num_sinks):
    def run(scores, listed, num_listed, num_candidates):
        return operations.are_best(
            scores, listed, num_listed, num_candidates=num_candidates, num_sinks=num_sinks
        )

    return jax.jit(run)


def twin_says(scores, listed, num_listed, num_candidates, num_sinks):
    capacity = scores.shape[1]
    best, bad = twin.rank(scores, num_listed, num_candidates, num_sinks, capacity)
    rows = zip(listed, best, num_listed, bad, strict=True)
    return all(
        fault == -1
        and 0 <= n <= len(mine)
        and sorted(mine[:n].tolist()) == sorted(expected[expected >= 0].tolist())
        for mine, expected, n, fault in rows
    )


def everywhere(scores, listed, num_listed, num_candidates, num_sinks):
    """What all say, which is one thing."""
    arguments = (scores, listed, np.asarray(num_listed, np.int32), np.int32(num_candidates))
    said = {bool(checker(PURE_OPERATIONS, num_sinks)(*arguments))}
    native = checker(NATIVE, num_sinks)
    said |= {bool(got) for _, got in each_native(lambda: native(*arguments))}
    said |= {got for _, got in each_native(lambda: on_host(*arguments, num_sinks))}
    assert len(said) == 1, said
    return said.pop()


def on_host(scores, listed, num_listed, num_candidates, num_sinks):
    """The same call without XLA, on NumPy's memory."""
    return NATIVE.are_best_on_host(
        scores,
        listed,
        num_listed,
        num_wanted=np.array(num_listed),
        num_candidates=int(num_candidates),
        num_sinks=num_sinks,
    )


def listed_best(scores, count, num_candidates, num_sinks, rng):
    """The best blocks of each row in any order, anything past them."""
    best, _ = twin.rank(scores, count, num_candidates, num_sinks, scores.shape[1])
    listed = rng.integers(-1, scores.shape[1] + 1, (len(scores), MAX_LISTED))
    for row, n in enumerate(count):
        listed[row, :n] = rng.permutation(best[row][:n])
    return listed.astype(np.int32)


@pytest.mark.parametrize("size", SIZES)
@given(
    seed=st.integers(0, 2**31 - 1),
    kind=st.sampled_from(["special", "equal", "falling", "clustered", "normal"]),
    num_sinks=st.sampled_from([0, 3]),
    change=st.sampled_from(["none", "swap", "repeat", "outside", "fewer", "more", "bad"]),
)
def test_SEL_3_native_pure_and_twin_agree_on_the_best(size, seed, kind, num_sinks, change):
    """SEL-3, SEL-4: the best themselves, and lists that differ from them in one place."""
    num_rows, num_blocks = size
    rng = np.random.default_rng(seed)
    scores = draw_scores(rng, kind, size)
    num_candidates = int(rng.choice([1, num_blocks // 2, num_blocks - 1, num_blocks]))
    most = min(num_candidates, 40)
    count = rng.integers(0, most + 1, num_rows).astype(np.int32)
    listed = listed_best(scores, count, num_candidates, num_sinks, rng)
    assert everywhere(scores, listed, count, num_candidates, num_sinks)
    row = rng.integers(num_rows)
    place = rng.integers(max(int(count[row]), 1))
    match change:
        case "swap":
            listed[row, place] = rng.integers(num_blocks)
        case "repeat":
            listed[row, place] = listed[row, 0]
        case "outside":
            listed[row, place] = rng.choice([-1, num_candidates, num_blocks, 2**31 - 1, -(2**31)])
        case "fewer":
            count[row] -= 1
        case "more":
            count[row] += rng.integers(1, 4)
        case "bad":
            scores[row, rng.integers(num_blocks)] = rng.choice(NON_FINITE)
    expected = twin_says(scores, listed, count, num_candidates, num_sinks)
    assert everywhere(scores, listed, count, num_candidates, num_sinks) == expected


@pytest.mark.parametrize("num_sinks", [0, 2])
def test_SEL_3_every_set_of_a_small_row(num_sinks):
    """SEL-3: of all subsets of five blocks exactly one of each size is the best."""
    scores = np.float32([[1.0, 0.0, 1.0, -0.0, 1e-42]])
    best = 0
    for bits in range(32):
        blocks = [block for block in range(5) if bits >> block & 1]
        listed = np.full((1, 5), -1, np.int32)
        listed[0, : len(blocks)] = blocks
        is_best = everywhere(scores, listed, [len(blocks)], 5, num_sinks)
        assert is_best == twin_says(scores, listed, [len(blocks)], 5, num_sinks)
        best += is_best
    assert best == 6


@pytest.mark.parametrize("bad", NON_FINITE)
@pytest.mark.parametrize("place", [0, 1, 4095, 4096, 8190])
def test_SEL_4_a_non_finite_candidate_makes_nothing_best(bad, place):
    """SEL-4: a sink, a listed or another candidate; past the candidates anything may stand."""
    scores = np.zeros((1, 9000), np.float32)
    scores[0, 8000:8192] = 1.0
    listed = np.arange(8000, 8191, dtype=np.int32)[None]
    listed = np.concatenate([np.zeros((1, 1), np.int32), listed], axis=1)
    assert everywhere(scores, listed, [192], 8191, 1)
    scores[0, 8191] = bad
    assert everywhere(scores, listed, [192], 8191, 1)
    scores[0, place] = bad
    assert not everywhere(scores, listed, [192], 8191, 1)


@pytest.mark.parametrize("operations", OPERATIONS, ids=lambda operations: operations.name)
def test_nothing_listed_is_the_best_of_nothing(operations):
    """No row, no block, no place."""
    for num_rows, num_blocks, num_places in ((0, 5, 3), (2, 0, 3), (2, 5, 0)):
        for num_listed in (0, 1):
            got = checker(operations, 1)(
                np.ones((num_rows, num_blocks), np.float32),
                np.zeros((num_rows, num_places), np.int32),
                np.full(num_rows, num_listed, np.int32),
                np.int32(num_blocks),
            )
            assert bool(got) == (num_rows == 0 or num_listed == 0)


def test_SEL_3_vmap_is_one_call_with_an_answer_for_each_request():
    """SEL-3: one differing row settles its own request and no other, on many threads."""
    rng = np.random.default_rng(4)
    scores = draw_scores(rng, "normal", (6, 4, 20000))
    count = np.full(4, 50, np.int32)
    listed = np.stack([listed_best(part, count, 20000, 1, rng) for part in scores])
    for request in (1, 4):
        listed[request, 3, 7] = np.argmin(scores[request, 3])
    one = checker(NATIVE, 1)
    batched = jax.jit(jax.vmap(one, in_axes=(0, 0, None, None)))
    arguments = (scores, listed, count, np.int32(20000))
    assert batched.lower(*arguments).as_text().count("@blockcompact_are_best") == 1
    for _ in range(5):
        assert np.asarray(batched(*arguments)).tolist() == [True, False, True, True, False, True]
    alone = [
        bool(one(s, mine, count, np.int32(20000))) for s, mine in zip(*arguments[:2], strict=True)
    ]
    assert alone == [True, False, True, True, False, True]


def test_wrong_operands_are_refused_by_name():
    """Shapes and dtypes are checked when the call is traced."""
    scores, listed = np.zeros((2, 3), np.float32), np.zeros((2, 2), np.int32)
    with pytest.raises(ValueError, match=r"`listed` is int32\[1, 2\]"):
        NATIVE.are_best(
            scores, listed[:1], np.zeros(2, np.int32), num_candidates=np.int32(3), num_sinks=0
        )
    with pytest.raises(ValueError, match="`num_listed` is int64"):
        NATIVE.are_best(
            scores, listed, np.zeros(2, np.int64), num_candidates=np.int32(3), num_sinks=0
        )


def test_SEL_3_on_the_host_arrays_of_jax_are_read_where_they_lie():
    """SEL-3: results that are still being computed are waited for; many rows, many threads."""
    rng = np.random.default_rng(5)
    scores = draw_scores(rng, "normal", (8, 20000))
    count = np.full(8, 50, np.int32)
    listed = listed_best(scores, count, 20000, 1, rng)
    arrays = [jax.numpy.asarray(array) for array in (scores, listed, count)]
    doubled = jax.jit(lambda scores: scores * 2)(arrays[0])
    assert on_host(doubled, *arrays[1:], 20000, 1)
    assert not on_host(-doubled, *arrays[1:], 20000, 1)
    assert not on_host(*arrays, 19999 - int(np.argmax(scores[0, ::-1])), 1)


def test_SEL_5_on_the_host_other_counts_than_wanted_are_not_the_best():
    """SEL-5: three blocks are not the best four."""
    scores = np.arange(8, dtype=np.float32)[None]
    listed, count = np.int32([[7, 6, 5, 4]]), np.int32([3])
    facts = {"num_candidates": 8, "num_sinks": 0}
    for wanted, expected in ((3, True), (4, False)):
        got = NATIVE.are_best_on_host(scores, listed, count, num_wanted=np.int32([wanted]), **facts)
        assert got == expected


@pytest.mark.parametrize("name", ["scores", "listed", "num_listed", "num_wanted"])
def test_on_the_host_what_cannot_be_read_in_place_is_not_answered(name):
    """Nothing is cast or copied: another dtype, axis, row count or stride gives None."""
    right = {
        "scores": np.zeros((2, 8), np.float32),
        "listed": np.zeros((2, 4), np.int32),
        "num_listed": np.ones(2, np.int32),
        "num_wanted": np.ones(2, np.int32),
    }
    facts = {"num_candidates": 8, "num_sinks": 0}
    assert NATIVE.are_best_on_host(**right, **facts) is True
    array = right[name]
    others = [array.astype(dtype) for dtype in (np.float64, np.int64, np.uint32, np.float16)]
    strided = np.repeat(array, 2, axis=-1)[..., ::2]
    more = np.concatenate([array, array])
    for wrong in (*others, array[None], strided, more, array.tolist(), None):
        assert NATIVE.are_best_on_host(**(right | {name: wrong}), **facts) is None
    traced = []
    jax.make_jaxpr(
        lambda array: traced.append(NATIVE.are_best_on_host(**(right | {name: array}), **facts))
    )(array)
    assert traced == [None]


def test_SEL_2_on_the_host_more_candidates_than_blocks_are_not_the_best():
    """SEL-2: a count that `select` refuses."""
    scores, listed = np.zeros((1, 8), np.float32), np.int32([[0, 1]])
    for num_candidates, expected in ((8, True), (9, False), (-1, False)):
        got = NATIVE.are_best_on_host(
            scores,
            listed,
            np.int32([2]),
            num_wanted=np.int32([2]),
            num_candidates=num_candidates,
            num_sinks=0,
        )
        assert got is expected
