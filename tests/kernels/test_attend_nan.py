"""Attention over keys that are NaN or minus infinity: they show in every result that sees them."""

import numpy as np
import pytest

from blockcompact_jax.kernels import host_pool_attend, raise_for_status

from .attend_cases import BF16, F32, naive_attend, naive_mass, pools_of, random_sequence

BLOCK_TOKENS = 32


def attend(sequence, rng, **options):
    max_blocks = -(-sequence.num_keys // BLOCK_TOKENS)
    with pools_of(rng, sequence, [(sequence.num_keys, BLOCK_TOKENS, "amx")]) as segments:
        result = host_pool_attend(
            sequence.queries, segments, **({"scale": 0.125, "max_blocks": max_blocks} | options)
        )
    raise_for_status(result.status)
    return [np.asarray(array, np.float32) for array in result[:3]]


@pytest.mark.parametrize("scale", [0.125, -0.125])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(
    "case",
    [
        (513, slice(512, 513)),  # all of the last chunk
        (520, slice(512, 513)),
        (513, slice(3, 4)),
        (1024, slice(512, 1024)),  # a whole chunk
        (1536, slice(512, 1024)),
        (1024, slice(0, 512)),
        (512, slice(0, 128)),  # a step
        (40, slice(0, 40)),
    ],
)
def test_a_key_that_is_nan_shows(case, dtype, scale, impl, rng):
    """Also where it is all that a chunk holds, which has no maximum then."""
    num_keys, nan_keys = case
    sequence = random_sequence(
        rng, dtype, kv_heads=1, group=2, num_queries=1, num_keys=num_keys, dims=64
    )
    sequence.keys[:, nan_keys] = np.nan
    for max_blocks in (0, -(-num_keys // BLOCK_TOKENS)):
        for result in attend(sequence, rng, scale=scale, max_blocks=max_blocks):
            assert np.isnan(result).all()


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_query_that_does_not_see_the_nan_is_finite(dtype, impl, rng):
    sequence = random_sequence(
        rng, dtype, kv_heads=1, group=2, num_queries=3, num_keys=513, dims=64
    )
    sequence.keys[:, 512] = np.nan
    for result in attend(sequence, rng):
        assert np.isfinite(result[:, :2]).all()
        assert np.isnan(result[:, 2]).all()


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("low_keys", [slice(512, 1024), slice(0, 512), slice(0, 300)])
def test_scores_of_minus_infinity_weigh_nothing(low_keys, dtype, impl, rng):
    """Also where a chunk has no other score: it is not taken for NaN."""
    sequence = random_sequence(
        rng, dtype, kv_heads=1, group=2, num_queries=1, num_keys=1024, dims=64
    )
    sequence.queries[..., 0] = 1
    sequence.keys[:, low_keys, 0] = -np.inf
    out, weights, log_sum_exp = naive_attend(
        sequence.queries, sequence.keys, sequence.values, scale=0.125
    )
    got_out, got_mass, got_log_sum_exp = attend(sequence, rng)
    tolerance = 2e-2 if dtype == BF16 else 1e-5
    np.testing.assert_allclose(got_out, out, tolerance, tolerance)
    np.testing.assert_allclose(got_mass, naive_mass(weights, [1024], BLOCK_TOKENS, 32), 1e-4, 1e-5)
    np.testing.assert_allclose(got_log_sum_exp, log_sum_exp, 1e-5, 1e-5)
