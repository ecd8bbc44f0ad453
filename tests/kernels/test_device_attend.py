"""Attention and scores of pools of a device, on the emulated one, against float64."""

import functools

import numpy as np
import pytest

from blockcompact_jax import kernels
from blockcompact_jax.kernels import KernelCode, RowsAt, ScoreSequence
from blockcompact_jax.kernels.native import load_native
from blockcompact_jax.scores import BlockReduction

from .attend_cases import BF16, F32, naive_attend, naive_mass, pools_of, random_sequence
from .helpers import column

TOKENS = 16
NUM_KEYS = 75


@pytest.fixture
def sequence(request, rng):
    return random_sequence(
        rng, request.param, kv_heads=2, group=2, num_queries=3, num_keys=NUM_KEYS, dims=24
    )


@pytest.fixture
def segment(sequence, rng, on_device):
    parts = [(NUM_KEYS, TOKENS, "nhd")]
    with pools_of(rng, sequence, parts, on_device) as segments:
        yield segments[0]


def rows_at(array):
    strides = [stride // array.itemsize for stride in array.strides[:2]]
    return RowsAt(load_native().address_of(array), *strides)


def attend(sequence, segments, **options):
    """The call, and what it writes into."""
    heads, num_queries, _ = sequence.queries.shape
    out = np.zeros_like(sequence.queries)
    mass = np.full((heads, num_queries, 7), 77, np.float32)
    log_sum_exp = np.full((heads, num_queries), 77, np.float32)
    status = kernels.host_pool_attend_at(
        rows_at(sequence.queries),
        segments,
        out=rows_at(out),
        num_query_heads=heads,
        num_queries=num_queries,
        scale=0.3,
        block_mass=rows_at(mass),
        max_blocks=7,
        log_sum_exp=load_native().address_of(log_sum_exp),
        **options,
    )
    return status, out, mass, log_sum_exp


def score(sequence, segment, table, scores):
    entry = ScoreSequence(table, NUM_KEYS, rows_at(sequence.queries), scores.ctypes.data)
    return kernels.host_pool_score_sequences_at(
        segment.pool,
        [entry],
        num_query_heads=sequence.queries.shape[0],
        num_queries=sequence.queries.shape[1],
        block_reduction=BlockReduction.MAX,
        row_stride=scores.shape[2],
    )


@pytest.mark.parametrize("sequence", [BF16, F32], indirect=True)
@pytest.mark.parametrize("window", [0, 20])
def test_attention_comes_in_the_stream_and_is_that_of_float64(sequence, segment, window, device):
    status, out, mass, log_sum_exp = attend(sequence, [segment], window_tokens=window)
    assert status == (KernelCode.OK, -1)
    assert not out.any()  # nobody has waited for the stream
    device.run_all()
    expected, weights, lse = naive_attend(
        sequence.queries, sequence.keys, sequence.values, scale=0.3, window=window
    )
    tolerance = 2e-2 if sequence.queries.dtype == BF16 else 1e-5
    np.testing.assert_allclose(out.astype(np.float64), expected, tolerance, tolerance)
    np.testing.assert_allclose(mass, naive_mass(weights, [NUM_KEYS], TOKENS, 7), 1e-4, 1e-5)
    np.testing.assert_allclose(log_sum_exp, lse, 1e-5, 1e-5)


@pytest.mark.parametrize("sequence", [BF16, F32], indirect=True)
def test_SEL_9_scores_come_in_the_stream_and_are_those_of_float64(sequence, segment, device):
    """SEL-9: the maximum of q·k over each block's valid tokens."""
    heads, num_queries, _ = sequence.queries.shape
    scores = np.full((heads, num_queries, 8), 77, np.float32)
    table = segment.block_table
    assert score(sequence, segment, table, scores) == (KernelCode.OK, -1)
    device.run_all()
    keys = np.repeat(sequence.keys.astype(np.float64), 2, axis=0)
    products = np.einsum("hqd,hkd->hqk", sequence.queries.astype(np.float64), keys)
    for entry in range(5):
        expected = products[..., entry * TOKENS : (entry + 1) * TOKENS].max(-1)
        np.testing.assert_allclose(scores[..., entry], expected, 1e-5, 1e-5)
    assert (scores[..., 5] == -np.inf).all()  # the entry past the last key
    assert (scores[..., 6:] == 77).all()


@pytest.mark.parametrize("sequence", [F32], indirect=True)
def test_UPL_7_faults_are_found_before_anything_is_enqueued(sequence, segment, device):
    """UPL-7: the statuses of the calls on the host."""
    faulty = segment.block_table.copy()
    faulty[2] = 99
    cases = [
        (segment._replace(block_table=faulty), (KernelCode.FROM_BLOCK_OUT_OF_RANGE, 2)),
        (segment._replace(layer=1), (KernelCode.LAYER_OUT_OF_RANGE, -1)),
        (segment._replace(num_keys=2), (KernelCode.NUM_KEYS_OUT_OF_RANGE, -1)),
        (segment._replace(num_keys=1000), (KernelCode.NUM_KEYS_OUT_OF_RANGE, -1)),
        (segment._replace(ord=np.array([5], np.uint32)), (KernelCode.STALE_ORD, -1)),
    ]
    for given, status in cases:
        assert attend(sequence, [given])[0] == status
    scores = np.zeros((4, 3, 6), np.float32)
    assert score(sequence, segment, faulty, scores) == (KernelCode.FROM_BLOCK_OUT_OF_RANGE, 2)
    assert device.num_pending() == 0


@pytest.mark.parametrize("sequence", [F32], indirect=True)
def test_UPL_4_blocks_that_an_upload_writes_are_not_attended(sequence, segment, rng, device):
    """UPL-4: the call is refused while the upload is open."""
    shape = segment.pool.shape
    staging = functools.partial(
        kernels.StagingBuffer,
        "uploads",
        layout=kernels.Layout.VEC,
        num_layers=1,
        num_blocks=1,
        num_kv_heads=shape.num_kv_heads,
        block_tokens=shape.block_tokens,
        head_dim=shape.head_dim,
        dtype=np.float32,
        is_pinned=True,
    )
    with staging() as rows:
        device.hold(True)
        event = kernels.start_pool_upload(
            rows.pool.current_ord(),
            segment.ord,
            0,
            column(0),
            segment.block_table[1:2].copy(),
            packed_pool=rows.pool,
            plain_pool=segment.pool,
        )
        given = segment._replace(ord=event.ord_plain)
        assert attend(sequence, [given])[0] == (KernelCode.OPEN_TRANSFER, 1)
        device.hold(False)
        event.wait()
        status, *results = attend(sequence, [given])
        assert status == (KernelCode.OK, -1)
        device.run_all()
        assert np.isfinite(results[2]).all()  # held until here: the device writes into them


@pytest.mark.parametrize("sequence", [F32], indirect=True)
def test_what_a_device_does_not_take_is_refused_in_a_sentence(sequence, segment):
    with pytest.raises(ValueError, match="takes neither"):
        attend(sequence, [segment], num_threads=2)
    with pytest.raises(ValueError, match="expected 1 for a pool on cuda:0"):
        attend(sequence, [segment, segment])
