"""Scores and bounds of blocks straight from their keys, against float64 and exact bytes."""

import multiprocessing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockcompact_jax.kernels import (
    KernelCode,
    Layout,
    RowsAt,
    ScoreSequence,
    has_open_mp_threads,
    host_pool_score_blocks,
    host_pool_score_sequences_at,
    host_pool_summarize_blocks,
    pool_score_blocks,
    pool_summarize_blocks,
    raise_for_status,
    score_blocks,
    summarize_blocks,
)
from blockcompact_jax.kernels.block_scores_reference import (
    reference_score_blocks,
    reference_summarize_blocks,
)
from blockcompact_jax.scores import BlockReduction, HeadReduction, page_bounds, reduce_heads

from .attend_cases import BF16, F32, pools_of, random_sequence
from .helpers import as_bytes, assert_same_bytes, column
from .reference import pack_block

SCORES = {"host": host_pool_score_blocks, "jit": pool_score_blocks}
SUMMARIES = {"host": host_pool_summarize_blocks, "jit": pool_summarize_blocks}
REDUCTIONS = (
    None,
    BlockReduction.MAX,
    BlockReduction.MEAN,
    BlockReduction.SUM,
    BlockReduction.LOG_SUM_EXP,
)

CASES = [  # dtype, KV heads, group, queries, keys, B, D, place
    (BF16, 3, 3, 5, 1300, 32, 64, "amx"),
    (BF16, 1, 4, 1, 64, 64, 128, "amx"),
    (BF16, 1, 20, 3, 70, 32, 256, "amx"),
    (BF16, 2, 1, 2, 531, 8, 40, "sequence"),
    (BF16, 1, 2, 4, 600, 16, 72, "vec"),
    (BF16, 1, 1, 1, 33, 1, 7, "vec"),
    (BF16, 1, 2, 2, 200, 48, 32, "nhd"),
    (F32, 2, 3, 4, 1101, 32, 64, "amx"),
    (F32, 1, 2, 1, 1100, 544, 32, "amx"),
    (F32, 3, 1, 1, 517, 5, 33, "padded"),
    (F32, 1, 1, 2, 100, 16, 32, "hnd"),
]


def naive_scores(queries, keys, *, scale):
    """float64 `[heads, queries, keys]`."""
    group = queries.shape[0] // keys.shape[0]
    scores = np.zeros((*queries.shape[:2], keys.shape[1]))
    for head in range(queries.shape[0]):
        for query in range(queries.shape[1]):
            row = queries[head, query].astype(np.float64)
            scores[head, query] = scale * (keys[head // group].astype(np.float64) @ row)
    return scores


def naive_blocks(scores, block_tokens, num_entries, reduction):
    """Reduces token scores block by block; -inf where there is no key."""
    if reduction is None:
        out = np.full((*scores.shape[:2], num_entries * block_tokens), -np.inf)
        out[..., : scores.shape[2]] = scores
        return out
    out = np.full((*scores.shape[:2], num_entries), -np.inf)
    reduce = {
        "max": np.max,
        "mean": np.mean,
        "sum": np.sum,
        "log_sum_exp": np.logaddexp.reduce,
    }[reduction.value]
    for entry in range(num_entries):
        tokens = scores[..., entry * block_tokens : (entry + 1) * block_tokens]
        if tokens.shape[-1] > 0:
            out[..., entry] = reduce(tokens, axis=-1)
    return out


def sequence_of(rng, case):
    dtype, kv_heads, group, num_queries, num_keys, _, dims, _ = case
    return random_sequence(
        rng,
        dtype,
        kv_heads=kv_heads,
        group=group,
        num_queries=num_queries,
        num_keys=num_keys,
        dims=dims,
    )


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("case", CASES)
def test_SEL_9_scores_against_float64(case, kind, impl, rng):
    """SEL-9: every block reduction; NaN lies behind the last key and in blocks no table names."""
    block_tokens, place = case[5], case[7]
    sequence = sequence_of(rng, case)
    expected = naive_scores(sequence.queries, sequence.keys, scale=0.25)
    magnitude = np.abs(expected).max()
    with pools_of(rng, sequence, [(sequence.num_keys, block_tokens, place)]) as (segment,):
        for reduction in REDUCTIONS:
            result = SCORES[kind](sequence.queries, segment, block_reduction=reduction, scale=0.25)
            raise_for_status(result.status)
            assert np.asarray(result.ord).tolist() == segment.ord.tolist()
            want = naive_blocks(expected, block_tokens, len(segment.block_table), reduction)
            tokens = block_tokens if reduction is BlockReduction.SUM else 1
            np.testing.assert_allclose(
                np.asarray(result.scores, np.float64),
                want,
                rtol=1e-5,
                atol=1e-6 * magnitude * tokens,
            )


@pytest.mark.parametrize("kind", SUMMARIES)
@pytest.mark.parametrize("case", CASES)
def test_summaries_are_exact(case, kind, impl, rng):
    block_tokens, place = case[5], case[7]
    sequence = sequence_of(rng, case)
    with pools_of(rng, sequence, [(sequence.num_keys, block_tokens, place)]) as (segment,):
        result = SUMMARIES[kind](segment)
        raise_for_status(result.status)
        num_entries = len(segment.block_table)
    for got, reduce in ((result.min_keys, np.min), (result.max_keys, np.max)):
        expected = np.zeros((sequence.keys.shape[0], num_entries, case[6]), case[0])
        for entry in range(-(-sequence.num_keys // block_tokens)):
            tokens = sequence.keys[:, entry * block_tokens : (entry + 1) * block_tokens]
            expected[:, entry] = reduce(tokens.astype(np.float32), axis=1).astype(case[0])
        assert_same_bytes(np.asarray(got), expected)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_arrays_score_and_summarize_as_pools_do(layout, dtype, rng):
    """On JAX arrays, stacked by layer, inside one jit; against the pure-JAX references."""
    blocks = rng.standard_normal((2, 5, 2, 2, 32, 64)).astype(dtype)
    queries = rng.standard_normal((4, 3, 64)).astype(dtype)
    unsigned = np.dtype(f"uint{8 * np.dtype(dtype).itemsize}")
    if layout.is_packed:
        bits = blocks.view(unsigned)
        stored = np.stack([[pack_block(b, layout.label) for b in layer] for layer in bits])
        stored = stored.view(dtype)
    else:
        stored = blocks if layout is Layout.PLAIN_HND else blocks.transpose(0, 1, 2, 4, 3, 5)
    table, num_keys = column(4, 0, 3, 1), 70

    @jax.jit
    def run(queries, stored, table, num_keys, layer):
        scored = score_blocks(
            queries,
            stored,
            table,
            num_keys,
            layout=layout,
            block_reduction=BlockReduction.MEAN,
            layer=layer,
        )
        return scored, summarize_blocks(stored, table, num_keys, layout=layout, layer=layer)

    stored = jnp.asarray(np.ascontiguousarray(stored))
    scored, bounds = run(queries, stored, table, column(num_keys), column(1))
    raise_for_status(scored.status)
    raise_for_status(bounds.status)
    keys = blocks[1, table, 0].transpose(1, 0, 2, 3).reshape(2, -1, 64)
    expected = reference_score_blocks(
        queries,
        keys[:, :num_keys],
        block_tokens=32,
        num_entries=4,
        block_reduction=BlockReduction.MEAN,
    )
    np.testing.assert_allclose(scored.scores, expected, rtol=2e-5, atol=2e-5)
    low, high = reference_summarize_blocks(keys[:, :num_keys], block_tokens=32, num_entries=4)
    assert_same_bytes(bounds.min_keys, low)
    assert_same_bytes(bounds.max_keys, high)
    whole_low, whole_high = page_bounds(jnp.asarray(keys)[None], block_tokens=32)
    assert_same_bytes(bounds.min_keys[:, :2], whole_low[0, :, :2])
    assert_same_bytes(bounds.max_keys[:, :2], whole_high[0, :, :2])
    reduced = reduce_heads(scored.scores[None], head_reduction=HeadReduction.MAX)
    np.testing.assert_array_equal(reduced[0], np.asarray(scored.scores).max((0, 1)))


@pytest.mark.parametrize(("block", "place"), [(32, 8), (544, 3), (544, 300), (544, 543)])
def test_SEL_4_a_nan_key_shows_in_its_block_alone(impl, rng, block, place):
    """SEL-4: a NaN must reach the selection, which refuses it; no reduction may hide it."""
    sequence = random_sequence(
        rng, BF16, kv_heads=1, group=2, num_queries=2, num_keys=3 * block, dims=32
    )
    sequence.keys[0, block + place, 3] = np.nan
    with pools_of(rng, sequence, [(3 * block, block, "amx")]) as (segment,):
        for reduction in REDUCTIONS[1:]:
            result = host_pool_score_blocks(sequence.queries, segment, block_reduction=reduction)
            assert np.isnan(result.scores[..., 1]).all()
            assert np.isfinite(result.scores[..., [0, 2]]).all()
        bounds = host_pool_summarize_blocks(segment)
    for bound in (bounds.min_keys, bounds.max_keys):
        assert np.argwhere(np.isnan(bound.astype(np.float32))).tolist() == [[0, 1, 3]]


def test_infinities_and_signed_zeros_bound_in_order(impl, rng):
    sequence = random_sequence(rng, F32, kv_heads=1, group=1, num_queries=1, num_keys=32, dims=32)
    sequence.keys[:] = 0.0
    sequence.keys[0, 5, 0], sequence.keys[0, 7, 0] = np.inf, -np.inf
    sequence.keys[0, 9, 1] = -0.0
    with pools_of(rng, sequence, [(32, 32, "amx")]) as (segment,):
        bounds = host_pool_summarize_blocks(segment)
    assert bounds.min_keys[0, 0, 0] == -np.inf
    assert bounds.max_keys[0, 0, 0] == np.inf
    assert not np.isnan(bounds.min_keys).any()
    assert (bounds.max_keys[0, 0, 1:] == 0.0).all()


def test_bits_depend_on_neither_threads_nor_other_queries(rng):
    sequence = random_sequence(
        rng, BF16, kv_heads=2, group=2, num_queries=40, num_keys=1500, dims=64
    )
    with pools_of(rng, sequence, [(1500, 32, "amx")]) as (segment,):

        def score(queries, count):
            return host_pool_score_blocks(
                queries, segment, block_reduction=BlockReduction.SUM, num_threads=count
            )

        one = score(sequence.queries, 1)
        few = score(np.ascontiguousarray(sequence.queries[:, 7:9]), 1)
        many = score(sequence.queries, 3)
    np.testing.assert_array_equal(as_bytes(one.scores), as_bytes(many.scores))
    np.testing.assert_array_equal(as_bytes(one.scores[:, 7:9]), as_bytes(few.scores))


def score_together(segment, cases, *, row_stride, is_on_open_mp=False):
    """Status, and scores [sequence, head, query, row_stride] that were 7 before."""
    _, num_queries, dims = cases[0][0].shape
    shape = (len(cases), len(cases[0][0]), num_queries, row_stride)
    scores = np.full(shape, 7.0, np.float32)
    sequences = [
        ScoreSequence(
            table,
            num_keys,
            RowsAt(queries.ctypes.data, num_queries * dims, dims),
            scores[place].ctypes.data,
        )
        for place, (queries, table, num_keys) in enumerate(cases)
    ]
    status = host_pool_score_sequences_at(
        segment.pool,
        sequences,
        num_query_heads=shape[1],
        num_queries=num_queries,
        block_reduction=BlockReduction.LOG_SUM_EXP,
        row_stride=row_stride,
        scale=0.25,
        is_on_open_mp=is_on_open_mp,
    )
    return status, scores


def _may_use_open_mp(queue):
    queue.put(has_open_mp_threads())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*fork.*:RuntimeWarning")
def test_a_forked_child_leaves_the_open_mp_threads_alone(rng):
    """Its runtime has lost them: a call that used them would wait for ever."""
    pytest.importorskip("torch")
    sequence = random_sequence(
        rng, BF16, kv_heads=2, group=3, num_queries=2, num_keys=1300, dims=64
    )
    with pools_of(rng, sequence, [(sequence.num_keys, 32, "amx")]) as (segment,):
        cases = sequences_of_one_pool(rng, segment, sequence)
        score_together(segment, cases, row_stride=60, is_on_open_mp=True)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_may_use_open_mp, args=(queue,))
    child.start()
    assert queue.get(timeout=60) is False
    child.join(timeout=60)


def sequences_of_one_pool(rng, segment, sequence):
    """(queries, table, number of keys): one long, one short, one without keys."""
    tables = [np.array(segment.block_table), segment.block_table[[2, 0]].copy()]
    tables.append(segment.block_table[:1].copy())
    queries = [rng.standard_normal(sequence.queries.shape).astype(BF16) for _ in tables]
    return list(zip(queries, tables, (sequence.num_keys, 41, 0), strict=True))


@pytest.mark.parametrize("threads", ["ours", "open_mp"])
def test_sequences_score_together_as_they_do_alone(threads, impl, rng):
    """Bit for bit, on threads of ours or of OpenMP; columns past a table are left alone."""
    sequence = random_sequence(
        rng, BF16, kv_heads=2, group=3, num_queries=2, num_keys=1300, dims=64
    )
    if threads == "open_mp":
        pytest.importorskip("torch")  # brings an OpenMP runtime along
        assert has_open_mp_threads()
    with pools_of(rng, sequence, [(sequence.num_keys, 32, "amx")]) as (segment,):
        cases = sequences_of_one_pool(rng, segment, sequence)
        status, scores = score_together(
            segment, cases, row_stride=60, is_on_open_mp=threads == "open_mp"
        )
        raise_for_status(np.array(status, np.int32))
        for (queries, table, num_keys), got in zip(cases, scores, strict=True):
            alone = host_pool_score_blocks(
                queries,
                segment._replace(block_table=table, num_keys=num_keys),
                block_reduction=BlockReduction.LOG_SUM_EXP,
                scale=0.25,
            )
            assert_same_bytes(got[..., : table.size], alone.scores)
            assert (got[..., table.size :] == 7.0).all()


def test_UPL_7_a_fault_of_one_sequence_refuses_all(rng):
    """UPL-7: the faulty entry counts over all tables; nothing is written."""
    sequence = random_sequence(rng, BF16, kv_heads=2, group=1, num_queries=1, num_keys=96, dims=32)
    with pools_of(rng, sequence, [(96, 32, "amx")]) as (segment,):
        cases = sequences_of_one_pool(rng, segment, sequence)
        cases[1][1][1] = 99
        status, scores = score_together(segment, cases, row_stride=8)
        num_before = cases[0][1].size
        assert status == (KernelCode.FROM_BLOCK_OUT_OF_RANGE, num_before + 1)
        assert (scores == 7.0).all()
        with pytest.raises(ValueError, match=f"`row_stride` is 1; expected {num_before}"):
            score_together(segment, cases, row_stride=1)


FAULTS = [
    ({"layer": 1}, KernelCode.LAYER_OUT_OF_RANGE, -1),
    ({"block_table": column(0, 1, 99, -1)}, KernelCode.FROM_BLOCK_OUT_OF_RANGE, 2),
    ({"block_table": column(-1, 1, 0, -1)}, KernelCode.FROM_BLOCK_OUT_OF_RANGE, 0),
    ({"num_keys": 4 * 32 + 1}, KernelCode.NUM_KEYS_OUT_OF_RANGE, -1),
    ({"num_keys": -1}, KernelCode.NUM_KEYS_OUT_OF_RANGE, -1),
    ({"ord": np.array([9], np.uint32)}, KernelCode.STALE_ORD, -1),
]


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize(("fault", "code", "row"), FAULTS)
def test_a_refused_call_gives_zeros(fault, code, row, kind, rng):
    sequence = random_sequence(rng, F32, kv_heads=1, group=1, num_queries=2, num_keys=96, dims=32)
    with pools_of(rng, sequence, [(96, 32, "amx")]) as (segment,):
        wrong = segment._replace(**fault)
        scored = SCORES[kind](sequence.queries, wrong, block_reduction=BlockReduction.MAX)
        bounds = SUMMARIES[kind](wrong)
        for result in (scored, bounds):
            assert np.asarray(result.status).tolist() == [code, row]
        for array in (scored.scores, bounds.min_keys, bounds.max_keys):
            assert not np.asarray(array).any()
    closed = SCORES[kind](sequence.queries, segment, block_reduction=BlockReduction.MAX)
    assert np.asarray(closed.status).tolist() == [KernelCode.UNKNOWN_POOL, -1]


def test_static_faults_name_the_argument(rng):
    sequence = random_sequence(rng, F32, kv_heads=2, group=1, num_queries=1, num_keys=20, dims=32)
    queries = sequence.queries
    with pools_of(rng, sequence, [(20, 16, "hnd")]) as (segment,):
        for call in SCORES.values():
            with pytest.raises(ValueError, match=r"`block_reduction` is BlockReduction\.TOP_MEAN"):
                call(queries, segment, block_reduction=BlockReduction.TOP_MEAN)
            with pytest.raises(ValueError, match="`queries` is bfloat16"):
                call(queries.astype(BF16), segment, block_reduction=None)
            with pytest.raises(ValueError, match="expected head_dim = 32"):
                call(queries[..., :8], segment, block_reduction=None)
            wrong = segment._replace(block_table=np.zeros(2, np.int64))
            with pytest.raises(ValueError, match=r"`segment\.block_table`"):
                call(queries, wrong, block_reduction=None)
        with pytest.raises(ValueError, match="not dense"):
            host_pool_score_blocks(queries[..., ::-1], segment, block_reduction=None)
    with pytest.raises(ValueError, match="`blocks` is uint16"):
        summarize_blocks(np.zeros((3, 2, 64, 32), np.uint16), column(0), 1, layout=Layout.AMX)
    with pytest.raises(ValueError, match=r"`blocks` is float32.*layout `amx`"):
        summarize_blocks(np.zeros((2, 64, 32), np.float32), column(0), 1, layout=Layout.AMX)
