"""What the bits of an attention row may not depend on."""

import multiprocessing
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockcompact_jax.kernels import (
    build_info,
    host_pool_attend,
    host_pool_score_blocks,
    host_pool_summarize_blocks,
    pool_attend,
)
from blockcompact_jax.kernels.native import load_native
from blockcompact_jax.scores import BlockReduction

from .attend_cases import BF16, F32, pools_of, random_sequence
from .helpers import assert_same_bytes

DTYPES = [BF16, F32]


def attend(sequence, parts, *, window=0, call=host_pool_attend, max_blocks=0, **options):
    with pools_of(np.random.default_rng(3), sequence, parts) as segments:
        result = call(
            sequence.queries,
            segments,
            scale=0.2,
            window_tokens=window,
            max_blocks=max_blocks,
            **options,
        )
        assert np.asarray(result.status).tolist() == [0, -1]
        return np.asarray(result.out), np.asarray(result.log_sum_exp), np.asarray(result.block_mass)


def assert_same_rows(got, expected):
    for mine, theirs in zip(got, expected, strict=True):
        assert_same_bytes(mine, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_and_places_give_the_same_bits(dtype, impl, rng):
    sequence = random_sequence(
        rng, dtype, kv_heads=2, group=3, num_queries=3, num_keys=1107, dims=64
    )
    expected = attend(sequence, [(1107, 32, "amx")], max_blocks=40)
    for place in ("vec", "nhd", "hnd", "sequence", "padded"):
        got = attend(sequence, [(1107, 32, place)], max_blocks=40)
        assert_same_rows(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_and_segments_give_the_same_bits(dtype, impl, rng):
    """Out and log-sum-exp; the columns of the mass are the blocks'."""
    sequence = random_sequence(
        rng, dtype, kv_heads=1, group=2, num_queries=2, num_keys=700, dims=32
    )
    expected = attend(sequence, [(700, 32, "amx")])[:2]
    for parts in (
        [(700, 1, "hnd")],
        [(700, 24, "vec")],
        [(700, 100, "nhd")],
        [(672, 32, "amx"), (28, 32, "hnd")],
        [(333, 32, "amx"), (367, 32, "amx")],
        [(5, 16, "vec"), (695, 16, "hnd")],
        [(0, 16, "vec"), (700, 16, "hnd")],
        [(700, 16, "vec"), (0, 16, "hnd")],
    ):
        assert_same_rows(attend(sequence, parts)[:2], expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 70, 600])
def test_a_row_does_not_depend_on_the_other_queries(dtype, window, impl, rng):
    """Each query asked alone, as the newest of a shorter sequence; so for the heads of a group."""
    sequence = random_sequence(
        rng, dtype, kv_heads=1, group=5, num_queries=9, num_keys=1030, dims=64
    )
    place = "amx"
    together = attend(sequence, [(1030, 32, place)], window=window, max_blocks=33)
    for query in range(9):
        num_keys = 1030 - 8 + query
        alone = type(sequence)(
            sequence.queries[:, query : query + 1],
            sequence.keys[:, :num_keys],
            sequence.values[:, :num_keys],
        )
        got = attend(alone, [(num_keys, 32, place)], window=window, max_blocks=33)
        assert_same_rows(got, [array[:, query : query + 1] for array in together])
    one_head = type(sequence)(sequence.queries[2:3], sequence.keys, sequence.values)
    got = attend(one_head, [(1030, 32, place)], window=window, max_blocks=33)
    assert_same_rows(got, [array[2:3] for array in together])


def test_a_query_ignores_what_comes_after_it(impl, rng):
    """NaN in the keys and values of later queries leaves earlier rows as they are, to the bit."""
    sequence = random_sequence(rng, BF16, kv_heads=1, group=3, num_queries=4, num_keys=90, dims=32)
    expected = attend(sequence, [(90, 32, "hnd")])
    sequence.keys[:, 88:] = np.nan
    sequence.values[:, 88:] = np.nan
    got = attend(sequence, [(90, 32, "hnd")])
    assert_same_rows([a[:, :2] for a in got[:2]], [a[:, :2] for a in expected[:2]])
    assert np.isnan(got[0][:, 2:].astype(np.float32)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_entry_points_give_the_same_bits(dtype, rng):
    sequence = random_sequence(
        rng, dtype, kv_heads=3, group=2, num_queries=5, num_keys=2300, dims=64
    )
    parts = [(2300, 32, "amx")]
    expected = attend(sequence, parts, max_blocks=72, num_threads=1)
    for count in (2, 5, None):
        for _ in range(3):
            assert_same_rows(attend(sequence, parts, max_blocks=72, num_threads=count), expected)
    traced = attend(sequence, parts, call=pool_attend, max_blocks=72)
    assert_same_rows(traced, expected)


def test_float32_has_the_same_bits_from_every_implementation(rng):
    """Every implementation keeps the order of the scalar one."""
    sequence = random_sequence(rng, F32, kv_heads=2, group=3, num_queries=4, num_keys=777, dims=48)
    results = []
    for name in build_info()["simd_available"]:
        load_native().force_impl(name)
        results.append(attend(sequence, [(777, 16, "vec")], window=600, max_blocks=50))
    load_native().force_impl("")
    for result in results[1:]:
        assert_same_rows(result, results[0])


@settings(max_examples=40, deadline=None)
@given(
    group=st.integers(1, 8),
    num_queries=st.integers(1, 9),
    num_keys=st.integers(9, 600),
    block_tokens=st.sampled_from([1, 2, 8, 16, 32]),
    dims=st.sampled_from([16, 32, 40]),
    window=st.sampled_from([0, 1, 17, 300]),
    dtype=st.sampled_from(DTYPES),
    cut=st.floats(0, 1),
)
def test_any_cut_into_two_segments_gives_the_same_bits(  # noqa: PLR0917
    group, num_queries, num_keys, block_tokens, dims, window, dtype, cut
):
    rng = np.random.default_rng(8)
    sequence = random_sequence(
        rng, dtype, kv_heads=1, group=group, num_queries=num_queries, num_keys=num_keys, dims=dims
    )
    first = int(cut * num_keys)
    whole = attend(sequence, [(num_keys, block_tokens, "hnd")], window=window)
    parts = [(first, block_tokens, "vec"), (num_keys - first, block_tokens, "nhd")]
    assert_same_rows(attend(sequence, parts, window=window)[:2], whole[:2])


@pytest.mark.parametrize("text", ["0", "-2", "two", "4x"])
def test_a_wrong_number_of_threads_is_refused(text):
    code = "from blockcompact_jax.kernels import num_threads; num_threads()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"BLOCKCOMPACT_NUM_THREADS": text},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert f"BLOCKCOMPACT_NUM_THREADS is '{text}'" in done.stderr


@pytest.mark.parametrize("count", [0, -1, 1025])
def test_a_call_refuses_a_wrong_number_of_threads(count, rng):
    sequence = random_sequence(rng, F32, kv_heads=1, group=1, num_queries=1, num_keys=32, dims=16)
    with pytest.raises(ValueError, match=f"`num_threads` is {count}; it must be in"):
        attend(sequence, [(32, 16, "hnd")], num_threads=count)
    with pools_of(rng, sequence, [(32, 16, "hnd")]) as (segment,):
        with pytest.raises(ValueError, match=f"`num_threads` is {count}"):
            host_pool_score_blocks(
                sequence.queries, segment, block_reduction=BlockReduction.MAX, num_threads=count
            )
        with pytest.raises(ValueError, match=f"`num_threads` is {count}"):
            host_pool_summarize_blocks(segment, num_threads=count)


@pytest.mark.parametrize("dtype", DTYPES)
def test_open_mp_threads_give_the_same_bits(dtype, rng):
    pytest.importorskip("torch")  # brings an OpenMP runtime along
    sequence = random_sequence(
        rng, dtype, kv_heads=3, group=2, num_queries=5, num_keys=2300, dims=64
    )
    parts = [(2300, 32, "amx")]
    expected = attend(sequence, parts, max_blocks=72, num_threads=1)
    for _ in range(3):
        assert_same_rows(attend(sequence, parts, max_blocks=72, is_on_open_mp=True), expected)
    with pytest.raises(ValueError, match="`num_threads` is 2 and `is_on_open_mp` is True"):
        attend(sequence, parts, num_threads=2, is_on_open_mp=True)


def test_the_variable_sets_the_default_number_of_threads():
    code = "from blockcompact_jax.kernels import num_threads; print(num_threads())"
    environment = os.environ | {"BLOCKCOMPACT_NUM_THREADS": "3"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "3"


def _attend_in_child(sequence, queue):
    queue.put(attend(sequence, [(2300, 32, "amx")], num_threads=2))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*fork.*:RuntimeWarning")
def test_a_forked_child_has_threads_of_its_own(rng):
    sequence = random_sequence(rng, F32, kv_heads=2, group=1, num_queries=1, num_keys=2300, dims=64)
    expected = attend(sequence, [(2300, 32, "amx")], num_threads=2)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_attend_in_child, args=(sequence, queue))
    child.start()
    try:
        got = queue.get(timeout=60)
        child.join(timeout=60)
    finally:
        if child.is_alive():
            child.kill()
    assert_same_rows(got, expected)
