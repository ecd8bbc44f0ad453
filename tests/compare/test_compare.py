"""Comparisons, against loops that count by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockcompact_jax.compare import (
    TOLERANCES,
    Tolerance,
    comparable_positions,
    compare_kv,
    compare_logits,
    compare_selections,
)
from blockcompact_jax.errors import CompactionError

SHAPE = (2, 2, 3, 8, 4)  # row, K and V, head, token, dim


def _kv(dtype):
    bits = np.random.default_rng(0).integers(0, 256, np.prod(SHAPE) * np.dtype(dtype).itemsize)
    return bits.astype(np.uint8).view(dtype).reshape(SHAPE)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float16, np.float32])
def test_one_flipped_bit_is_found_and_named(dtype):
    """CMP-1, UPL-6: every layer, head and valid token counts, also where bits are NaN."""
    expected = _kv(dtype)
    valid = np.array([8, 5])
    itemsize = np.dtype(dtype).itemsize
    same = compare_kv(expected, expected.copy(), num_valid_tokens=valid, layer_by_row=[4, 9])
    assert same.is_equal
    assert same.num_compared_bytes == (8 + 5) * 2 * 3 * 4 * itemsize
    assert same.not_compared == ((9, 5, 8),)
    for row, kv, head, token in np.ndindex(SHAPE[:4]):
        actual = expected.copy()
        actual.view(np.uint8).reshape(*SHAPE[:4], -1)[row, kv, head, token, -1] ^= 1
        found = compare_kv(expected, actual, num_valid_tokens=valid, layer_by_row=[4, 9])
        if token >= valid[row]:
            assert found.is_equal
            continue
        assert found.num_differing_bytes == 1
        (mismatch,) = found.mismatches
        assert (mismatch.layer, mismatch.is_value) == ([4, 9][row], bool(kv))
        assert (mismatch.head, mismatch.token) == (head, token)


def test_many_mismatches_are_all_counted_and_the_first_listed():
    expected = np.zeros(SHAPE, np.uint16)
    found = compare_kv(
        expected, expected + 1, num_valid_tokens=np.array([8, 8]), layer_by_row=[0, 1]
    )
    assert found.num_differing_bytes == expected.size
    assert len(found.mismatches) == 16


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=12))
def test_positions_are_comparable_while_the_prefix_is_the_same(pairs):
    """CMP-3: draft positions j > 0 count as well, up to the first differing token."""
    left, right = (np.array([pair[side] for pair in pairs], int) for side in (0, 1))
    got = comparable_positions(left, right)
    for position in range(len(pairs)):
        assert got[position] == all(a == b for a, b in pairs[: position + 1])


def test_statistics_are_those_of_a_hand_written_loop():
    """CMP-2: errors, KL, moved mass, top-1 and violations over the compared positions only."""
    rng = np.random.default_rng(1)
    expected = rng.normal(size=(5, 7))
    actual = expected + rng.normal(size=(5, 7)) * 0.1
    mask = np.array([True, False, True, True, False])
    tolerance = Tolerance(absolute=0.05, relative=0.01)
    got = compare_logits(expected, actual, is_comparable=mask, tolerance=tolerance)
    kls, moved, errors, agreed, violated = [], [], [], 0, 0
    for position in (0, 2, 3):
        p, q = ([math.exp(x) for x in side[position]] for side in (expected, actual))
        p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
        kls.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
        moved.append(sum(max(a - b, 0) for a, b in zip(p, q, strict=True)))
        agreed += p.index(max(p)) == q.index(max(q))
        for a, b in zip(expected[position], actual[position], strict=True):
            errors.append(abs(a - b))
            violated += abs(a - b) > 0.05 + 0.01 * abs(a)
    assert got.num_compared_positions == 3
    assert got.not_compared_positions == (1, 4)
    assert got.max_error == max(errors)
    np.testing.assert_allclose(got.mean_error, np.mean(errors))
    np.testing.assert_allclose([got.mean_kl, got.max_kl], [np.mean(kls), max(kls)])
    np.testing.assert_allclose(got.mean_moved_mass, np.mean(moved))
    assert got.top1_agreement == agreed / 3
    np.testing.assert_allclose(got.violation_rate, violated / 21)


def test_the_same_best_token_hides_no_difference():
    """CMP-3: top-1 agreement alone says nothing about the distribution."""
    expected, actual = np.array([[5.0, 0.0, 0.0]]), np.array([[0.1, 0.0, 0.0]])
    got = compare_logits(
        expected, actual, is_comparable=np.array([True]), tolerance=TOLERANCES["bfloat16"]
    )
    assert got.top1_agreement == 1.0
    assert got.violation_rate > 0
    assert got.mean_kl > 0.5


def test_nothing_comparable_is_not_a_success():
    """CMP-2: without compared positions there is no number, least of all 0."""
    logits = np.zeros((2, 3))
    got = compare_logits(
        logits, logits, is_comparable=np.zeros(2, bool), tolerance=TOLERANCES["float32"]
    )
    assert got.not_compared_positions == (0, 1)
    for name in ("max_error", "mean_kl", "top1_agreement", "violation_rate"):
        assert math.isnan(getattr(got, name))


def test_what_two_policies_choose_differently_is_counted_and_no_fault():
    """SEL-8: blocks of both, and of one alone, for each row; a difference is never refused."""
    first = [np.array([0, 3, 5]), np.array([], np.int32)]
    second = [np.array([0, 4, 6, 5]), np.array([2])]
    policy = compare_selections(first, second)
    assert policy.num_common == (2, 0)
    assert policy.num_only_first == (1, 0)
    assert policy.num_only_second == (2, 1)


def test_bad_input_is_refused_by_name():
    kv = np.zeros(SHAPE, np.uint16)
    layers = {"layer_by_row": [0, 1]}
    with pytest.raises(CompactionError, match="`actual` uint8"):
        compare_kv(kv, kv.view(np.uint8), num_valid_tokens=np.array([1, 1]), **layers)
    with pytest.raises(CompactionError, match=r"`num_valid_tokens` is \[9, 1\]"):
        compare_kv(kv, kv, num_valid_tokens=np.array([9, 1]), **layers)
    with pytest.raises(CompactionError, match="`layer_by_row` names 1"):
        compare_kv(kv, kv, num_valid_tokens=np.array([1, 1]), layer_by_row=[0])
    logits, nan = np.zeros((2, 3)), np.full((2, 3), np.nan)
    mask, tolerance = np.array([False, True]), TOLERANCES["float32"]
    with pytest.raises(
        CompactionError, match="`actual` has a logit that is not finite at position 1"
    ):
        compare_logits(logits, nan, is_comparable=mask, tolerance=tolerance)
    with pytest.raises(CompactionError, match="`is_comparable` has shape"):
        compare_logits(logits, logits, is_comparable=mask[:1], tolerance=tolerance)
    with pytest.raises(CompactionError, match="give two"):
        compare_logits(logits, logits[:1], is_comparable=mask, tolerance=tolerance)
    with pytest.raises(CompactionError, match="give the same number"):
        comparable_positions(np.zeros(2, int), np.zeros(3, int))
