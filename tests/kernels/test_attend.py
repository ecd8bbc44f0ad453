"""Attention over blocks against float64, and its refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockcompact_jax.kernels import (
    HostAttendOutputs,
    KernelCode,
    RowsAt,
    host_pool_attend,
    host_pool_attend_at,
    pool_attend,
    pool_block_move,
    raise_for_status,
)
from blockcompact_jax.kernels.attend_reference import reference_attend, reference_block_mass

from .attend_cases import BF16, F32, naive_attend, naive_mass, pools_of, random_sequence
from .helpers import assert_same_bytes, column

KINDS = {"host": host_pool_attend, "jit": pool_attend}


def close(got, expected, dtype):
    # bf16: weights are rounded to 8 bits before they meet V, then the result is.
    tolerance = 3e-6 if dtype == F32 else 2e-2
    np.testing.assert_allclose(
        np.asarray(got, np.float64), expected, rtol=tolerance, atol=tolerance
    )


CASES = [  # dtype, KV heads, group, queries, keys per segment, B, D, places, window
    (BF16, 3, 3, 5, (1300,), 32, 64, ("amx",), 0),
    (BF16, 2, 2, 1, (64,), 32, 32, ("hnd",), 0),
    (BF16, 1, 8, 9, (700, 37), 32, 128, ("amx", "nhd"), 0),
    (BF16, 1, 1, 2, (96, 1), 32, 64, ("amx", "padded"), 40),
    (BF16, 2, 5, 3, (531,), 8, 40, ("sequence",), 0),
    (BF16, 1, 2, 4, (600,), 16, 72, ("vec",), 513),
    (BF16, 1, 1, 1, (33,), 1, 7, ("vec",), 0),
    (BF16, 1, 20, 3, (70, 20), 32, 256, ("amx", "amx"), 0),
    (BF16, 1, 1, 70, (70,), 16, 32, ("nhd",), 9),
    (F32, 2, 3, 4, (1100,), 32, 64, ("amx",), 0),
    (F32, 1, 4, 9, (130, 21), 16, 32, ("vec", "nhd"), 0),
    (F32, 3, 1, 1, (517,), 1, 33, ("hnd",), 0),
    (F32, 1, 7, 6, (45,), 8, 256, ("padded",), 13),
    (F32, 1, 2, 2, (50, 50), 32, 128, ("amx", "vec"), 60),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_results_against_float64(case, kind, impl, rng):
    """NaN lies in every block that no table names and behind the last key: none of it shows."""
    dtype, kv_heads, group, num_queries, segment_keys, block_tokens, dims, places, window = case
    sequence = random_sequence(
        rng,
        dtype,
        kv_heads=kv_heads,
        group=group,
        num_queries=num_queries,
        num_keys=sum(segment_keys),
        dims=dims,
    )
    scale, max_blocks = dims**-0.5, sum(segment_keys) // block_tokens + 3
    parts = [(n, block_tokens, place) for n, place in zip(segment_keys, places, strict=True)]
    with pools_of(rng, sequence, parts) as segments:
        result = KINDS[kind](
            sequence.queries, segments, scale=scale, window_tokens=window, max_blocks=max_blocks
        )
        raise_for_status(result.status)
        assert [int(after[0]) for after in result.ords] == [int(s.ord[0]) for s in segments]
        out, mass, log_sum_exp = (np.asarray(x) for x in result[:3])
    expected, weights, expected_lse = naive_attend(
        sequence.queries, sequence.keys, sequence.values, scale=scale, window=window
    )
    assert out.dtype == dtype
    close(out, expected, dtype)
    close(log_sum_exp, expected_lse, F32)
    close(mass, naive_mass(weights, segment_keys, block_tokens, max_blocks), F32)
    np.testing.assert_allclose(mass.sum(-1), 1.0, rtol=1e-5)


def test_the_numpy_reference_agrees_with_the_naive_model(rng):
    sequence = random_sequence(rng, F32, kv_heads=2, group=3, num_queries=4, num_keys=21, dims=8)
    expected, weights, log_sum_exp = naive_attend(
        sequence.queries, sequence.keys, sequence.values, scale=0.3, window=7
    )
    got = reference_attend(
        sequence.queries, sequence.keys, sequence.values, scale=0.3, window_tokens=7
    )
    np.testing.assert_allclose(got.out, expected, atol=1e-12)
    np.testing.assert_allclose(got.weights, weights, atol=1e-12)
    np.testing.assert_allclose(got.log_sum_exp, log_sum_exp, atol=1e-12)
    np.testing.assert_allclose(
        reference_block_mass(got.weights, block_tokens=4, max_blocks=5),
        naive_mass(weights, (21,), 4, 5),
        atol=1e-12,
    )


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("slope", [2**-6, -(2**-6), 0.5])  # scores are exact
@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_scores_that_rise_or_fall_with_the_keys(scale, slope, dtype, impl, rng):
    """The largest score so far grows with every step, or never; early sums fade, or stay."""
    sequence = random_sequence(
        rng, dtype, kv_heads=1, group=3, num_queries=6, num_keys=1100, dims=64
    )
    sequence.queries[...] = 1
    sequence.keys[...] = (slope * np.arange(1100)[None, :, None] / 64).astype(dtype)
    with pools_of(rng, sequence, [(1100, 32, "amx")]) as segments:
        result = host_pool_attend(sequence.queries, segments, scale=scale, max_blocks=35)
    out, weights, log_sum_exp = naive_attend(
        sequence.queries, sequence.keys, sequence.values, scale=scale
    )
    close(result.out, out, dtype)
    close(result.log_sum_exp, log_sum_exp, F32)
    np.testing.assert_allclose(
        result.block_mass, naive_mass(weights, (1100,), 32, 35), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_scale_of_zero_weighs_the_seen_keys_alike(dtype, impl, rng):
    """Also where a query sees nothing of the last chunk."""
    sequence = random_sequence(
        rng, dtype, kv_heads=1, group=2, num_queries=9, num_keys=1030, dims=32
    )
    with pools_of(rng, sequence, [(1030, 32, "amx")]) as segments:
        result = host_pool_attend(sequence.queries, segments, scale=0.0, window_tokens=10)
    out, _, log_sum_exp = naive_attend(
        sequence.queries, sequence.keys, sequence.values, scale=0.0, window=10
    )
    close(result.out, out, dtype)
    close(result.log_sum_exp, log_sum_exp, F32)


def test_extreme_scores_stay_finite(impl, rng):
    """Weights that underflow are zero; a single key takes all mass."""
    sequence = random_sequence(rng, F32, kv_heads=1, group=1, num_queries=2, num_keys=80, dims=32)
    with pools_of(rng, sequence, [(80, 16, "hnd")]) as segments:
        result = host_pool_attend(sequence.queries, segments, scale=1e4, max_blocks=5)
    expected = naive_attend(sequence.queries, sequence.keys, sequence.values, scale=1e4)
    close(result.out, expected[0], F32)
    close(result.block_mass, naive_mass(expected[1], (80,), 16, 5), F32)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_any_sign_of_the_scale(scale, dtype, impl, rng):
    """The largest score of a row is then the smallest product, or none is larger."""
    sequence = random_sequence(rng, dtype, kv_heads=1, group=3, num_queries=2, num_keys=90, dims=32)
    with pools_of(rng, sequence, [(90, 32, "amx")]) as segments:
        result = host_pool_attend(sequence.queries, segments, scale=scale, max_blocks=3)
    out, weights, log_sum_exp = naive_attend(
        sequence.queries, sequence.keys, sequence.values, scale=scale
    )
    close(result.out, out, dtype)
    close(result.log_sum_exp, log_sum_exp, F32)
    close(result.block_mass, naive_mass(weights, (90,), 32, 3), F32)


def test_max_blocks_keeps_the_first_entries_only(rng):
    sequence = random_sequence(rng, BF16, kv_heads=1, group=2, num_queries=2, num_keys=600, dims=32)
    with pools_of(rng, sequence, [(600, 32, "amx")]) as segments:
        full = host_pool_attend(sequence.queries, segments, scale=0.2, max_blocks=19)
        cut = host_pool_attend(sequence.queries, segments, scale=0.2, max_blocks=17)
    assert_same_bytes(cut.block_mass, full.block_mass[..., :17])
    assert_same_bytes(cut.out, full.out)


def test_strided_queries_and_outputs_are_used_in_place(rng):
    """What an engine hands out: heads and queries transposed, a row of a larger mass array."""
    sequence = random_sequence(rng, BF16, kv_heads=2, group=2, num_queries=3, num_keys=100, dims=64)
    by_query = np.ascontiguousarray(sequence.queries.transpose(1, 0, 2))
    out = np.zeros((3, 4, 64), BF16)
    mass = np.full((4, 5, 9), 7, np.float32)
    with pools_of(rng, sequence, [(100, 32, "amx")]) as segments:
        expected = host_pool_attend(sequence.queries, segments, scale=0.1, max_blocks=9)
        got = host_pool_attend(
            by_query.transpose(1, 0, 2),
            segments,
            scale=0.1,
            outputs=HostAttendOutputs(out.transpose(1, 0, 2), mass[:, 1:4]),
        )
        raise_for_status(got.status)
        assert_same_bytes(out.transpose(1, 0, 2), expected.out)
        assert_same_bytes(mass[:, 1:4], expected.block_mass)
        assert (mass[:, [0, 4]] == 7).all()
        out[:] = 0
        status = host_pool_attend_at(
            RowsAt(by_query.ctypes.data, 64, 4 * 64),
            segments,
            out=RowsAt(out.ctypes.data, 64, 4 * 64),
            num_query_heads=4,
            num_queries=3,
            scale=0.1,
        )
    assert status == (KernelCode.OK, -1)
    assert_same_bytes(out.transpose(1, 0, 2), expected.out)


FAULTS = [
    ({"layer": 1}, KernelCode.LAYER_OUT_OF_RANGE, -1),
    ({"layer": -1}, KernelCode.LAYER_OUT_OF_RANGE, -1),
    ({"block_table": column(0, 1, 99, -1)}, KernelCode.FROM_BLOCK_OUT_OF_RANGE, 4 + 2),
    ({"block_table": column(-1, 1, 0, -1)}, KernelCode.FROM_BLOCK_OUT_OF_RANGE, 4 + 0),
    ({"num_keys": 4 * 32 + 1}, KernelCode.NUM_KEYS_OUT_OF_RANGE, -1),
    ({"num_keys": -1}, KernelCode.NUM_KEYS_OUT_OF_RANGE, -1),
    ({"ord": np.array([9], np.uint32)}, KernelCode.STALE_ORD, -1),
]


@pytest.mark.parametrize(("fault", "code", "row"), FAULTS)
def test_a_refused_call_has_written_nothing(fault, code, row, rng):
    """The fault is in the second segment: the first is not computed either."""
    sequence = random_sequence(rng, F32, kv_heads=1, group=1, num_queries=2, num_keys=192, dims=32)
    with pools_of(rng, sequence, [(96, 32, "amx"), (96, 32, "hnd")]) as segments:
        segments[1] = segments[1]._replace(**fault)
        outputs = HostAttendOutputs(
            np.full(sequence.queries.shape, 3, np.float32),
            np.full((1, 2, 6), 4, np.float32),
            np.full((1, 2), 5, np.float32),
        )
        result = host_pool_attend(sequence.queries, segments, scale=1.0, outputs=outputs)
        assert result.status.tolist() == [code, row]
        assert (outputs.out == 3).all()
        assert (outputs.block_mass == 4).all()
        assert (outputs.log_sum_exp == 5).all()
        traced = pool_attend(sequence.queries, segments, scale=1.0, max_blocks=6)
        assert np.asarray(traced.status).tolist() == [code, row]
        assert not np.asarray(traced.out).any()
        assert not np.asarray(traced.block_mass).any()


def test_more_queries_than_keys_and_a_closed_pool_are_refused(rng):
    sequence = random_sequence(rng, F32, kv_heads=1, group=1, num_queries=4, num_keys=20, dims=32)
    with pools_of(rng, sequence, [(20, 16, "hnd")]) as segments:
        few = [segments[0]._replace(num_keys=3)]
        result = host_pool_attend(sequence.queries, few, scale=1.0)
        assert result.status.tolist() == [KernelCode.NUM_KEYS_OUT_OF_RANGE, -1]
    result = host_pool_attend(sequence.queries, segments, scale=1.0)
    assert result.status.tolist() == [KernelCode.UNKNOWN_POOL, -1]


def test_static_faults_name_the_argument(rng):
    sequence = random_sequence(rng, F32, kv_heads=2, group=1, num_queries=1, num_keys=20, dims=32)
    queries = sequence.queries
    with pools_of(rng, sequence, [(10, 16, "hnd"), (10, 32, "hnd")]) as segments:
        for call in KINDS.values():
            with pytest.raises(ValueError, match="`segments` has 0"):
                call(queries, [], scale=1.0)
            with pytest.raises(ValueError, match=r"`segments\[1\].pool` has block_tokens = 32"):
                call(queries, segments, scale=1.0)
            with pytest.raises(ValueError, match="expected head_dim = 32"):
                call(queries[..., :8], segments[:1], scale=1.0)
            with pytest.raises(ValueError, match="`queries` is bfloat16"):
                call(queries.astype(BF16), segments[:1], scale=1.0)
            with pytest.raises(ValueError, match="`window_tokens` is -1"):
                call(queries, segments[:1], scale=1.0, window_tokens=-1)
            wrong = segments[0]._replace(block_table=np.zeros(2, np.int64))
            with pytest.raises(ValueError, match=r"`segments\[0\].block_table`"):
                call(queries, [wrong], scale=1.0)
        one = segments[:1]
        with pytest.raises(ValueError, match="last axis"):
            host_pool_attend(queries[..., ::-1], one, scale=1.0)
        with pytest.raises(ValueError, match=r"`outputs\.out`"):
            host_pool_attend(
                queries, one, scale=1.0, outputs=HostAttendOutputs(queries.astype(BF16))
            )
        bad = HostAttendOutputs(queries.copy(), np.zeros((2, 1, 4)))
        with pytest.raises(ValueError, match=r"`outputs\.block_mass`"):
            host_pool_attend(queries, one, scale=1.0, outputs=bad)


def test_one_jit_reads_then_writes(rng):
    """The ord orders a later writer after the read; lengths and tables are traced values."""
    sequence = random_sequence(rng, BF16, kv_heads=1, group=2, num_queries=1, num_keys=64, dims=32)
    with pools_of(rng, sequence, [(64, 32, "hnd")]) as segments:
        (segment,) = segments
        expected = host_pool_attend(sequence.queries, segments, scale=0.2).out

        @jax.jit
        def step(queries, ord_now, layer, table, num_keys):
            read = segment._replace(ord=ord_now, layer=layer, block_table=table, num_keys=num_keys)
            result = pool_attend(queries, [read], scale=0.2)
            moved = pool_block_move(result.ords[0], 0, column(3), table[:1], pool=segment.pool)
            return result, moved

        result, moved = step(
            jnp.asarray(sequence.queries),
            segment.ord,
            column(0),
            segment.block_table,
            column(64),
        )
        raise_for_status(result.status)
        raise_for_status(moved.status)
        assert_same_bytes(np.asarray(result.out), expected)
