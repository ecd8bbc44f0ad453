"""What is compared with what: bytes, numbers and policies, three results apart.

Movement does no arithmetic, so its comparison has no tolerance. Numbers are compared only where
both sides saw the same prefix, against a tolerance fixed per dtype beforehand. That two policies
choose differently is neither a byte error nor a numeric one.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from blockcompact_jax.errors import CompactionError

MAX_LISTED_MISMATCHES = 16


@dataclass(frozen=True, kw_only=True)
class ByteMismatch:
    """One differing place of two KV stores.

    Attributes:
        layer: decoder layer ID.
        is_value: False for a key.
        head: KV head.
        token: place on the token axis (attention order, not token position).
    """

    layer: int
    is_value: bool
    head: int
    token: int


@dataclass(frozen=True, kw_only=True)
class BytesComparison:
    """Result of `compare_kv`.

    Attributes:
        num_compared_bytes: bytes of all valid ranges.
        num_differing_bytes: of these, bytes that differ.
        mismatches: the first differing tokens, at most `MAX_LISTED_MISMATCHES`.
        not_compared: (layer, first token, end) of every range that lies past the valid tokens.
    """

    num_compared_bytes: int
    num_differing_bytes: int
    mismatches: tuple[ByteMismatch, ...]
    not_compared: tuple[tuple[int, int, int], ...]

    @property
    def is_equal(self) -> bool:
        """Whether every compared byte is equal."""
        return self.num_differing_bytes == 0


def compare_kv(
    expected: Shaped[np.ndarray, "row 2 head token dim"],
    actual: Shaped[np.ndarray, "row 2 head token dim"],
    *,
    num_valid_tokens: Int[np.ndarray, " row"],
    layer_by_row: Sequence[int],
) -> BytesComparison:
    """Compares keys and values bytewise: every layer, head and valid token, for any dtype.

    Args:
        expected: keys and values of every full-attention layer, in attention order.
        actual: as `expected`, from the other path.
        num_valid_tokens: tokens of each row that hold KV; what lies behind is not compared.
        layer_by_row: decoder layer ID of each row.

    Raises:
        CompactionError: if the two differ in shape or dtype, or a count is out of range.
    """
    if expected.shape != actual.shape or expected.dtype != actual.dtype or expected.ndim != 5:
        raise CompactionError(
            f"`expected` is {expected.dtype}{list(expected.shape)} and `actual` "
            f"{actual.dtype}{list(actual.shape)}; give two [row, 2, head, token, dim] alike."
        )
    num_rows, _, _, num_tokens, _ = expected.shape
    valid = np.asarray(num_valid_tokens)
    if valid.shape != (num_rows,) or (valid < 0).any() or (valid > num_tokens).any():
        raise CompactionError(
            f"`num_valid_tokens` is {valid.tolist()}; give one count in 0 … {num_tokens} for each "
            f"of the {num_rows} rows."
        )
    if len(layer_by_row) != num_rows:
        raise CompactionError(
            f"`layer_by_row` names {len(layer_by_row)} layers; give one for each of the "
            f"{num_rows} rows."
        )
    is_valid = np.arange(num_tokens) < valid[:, None]
    differing = _as_bytes(expected) != _as_bytes(actual)
    differing &= is_valid[:, None, None, :, None]
    places: list[list[int]] = np.argwhere(differing.any(axis=-1))[:MAX_LISTED_MISMATCHES].tolist()
    bytes_per_token = expected[0, :, :, 0].nbytes if num_rows and num_tokens else 0
    return BytesComparison(
        num_compared_bytes=int(valid.sum()) * bytes_per_token,
        num_differing_bytes=int(differing.sum()),
        mismatches=tuple(
            ByteMismatch(layer=layer_by_row[row], is_value=bool(kv), head=head, token=token)
            for row, kv, head, token in places
        ),
        not_compared=tuple(
            (layer, int(count), num_tokens)
            for layer, count in zip(layer_by_row, valid, strict=True)
            if count < num_tokens
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """What two logits may differ by, fixed before anything is compared.

    Attributes:
        absolute: allowed difference of two logits.
        relative: allowed on top, times the expected logit's size.
    """

    absolute: float
    relative: float


TOLERANCES = {
    "float32": Tolerance(absolute=1e-3, relative=1e-4),
    "bfloat16": Tolerance(absolute=0.125, relative=2.0**-7),
    "float16": Tolerance(absolute=0.02, relative=2.0**-9),
}
"""By the dtype of weights and KV."""


@dataclass(frozen=True, kw_only=True)
class NumericComparison:
    """Result of `compare_logits`; statistics are over the compared positions, NaN if none.

    Attributes:
        num_compared_positions: positions compared.
        not_compared_positions: the others, by number.
        max_error: largest difference of two logits.
        mean_error: mean difference of two logits.
        mean_kl: mean KL divergence of `actual` from `expected`, in nats.
        max_kl: the largest.
        mean_moved_mass: mean probability that `actual` gives to other tokens than `expected` does
            (total variation distance).
        top1_agreement: share of positions where the best token is the same. It says nothing about
            the rest of the distribution.
        violation_rate: share of logits outside of the tolerance.
        tolerance: the tolerance.
    """

    num_compared_positions: int
    not_compared_positions: tuple[int, ...]
    max_error: float
    mean_error: float
    mean_kl: float
    max_kl: float
    mean_moved_mass: float
    top1_agreement: float
    violation_rate: float
    tolerance: Tolerance


def comparable_positions(
    expected_tokens: Int[np.ndarray, " position"], actual_tokens: Int[np.ndarray, " position"]
) -> Bool[np.ndarray, " position"]:
    """Positions whose logits followed the same prefix on both sides, draft positions j > 0 too.

    Args:
        expected_tokens: the token that each position's forward consumed.
        actual_tokens: as `expected_tokens`, of the other path.

    Returns:
        True up to the first differing token, that position left out.

    Raises:
        CompactionError: if the lengths differ.
    """
    if expected_tokens.shape != actual_tokens.shape:
        raise CompactionError(
            f"`expected_tokens` has {expected_tokens.size} positions and `actual_tokens` "
            f"{actual_tokens.size}; give the same number."
        )
    return np.logical_and.accumulate(expected_tokens == actual_tokens)


def compare_logits(
    expected: Float[np.ndarray, "position vocabulary"],
    actual: Float[np.ndarray, "position vocabulary"],
    *,
    is_comparable: Bool[np.ndarray, " position"],
    tolerance: Tolerance,
) -> NumericComparison:
    """Compares the logits of two paths that were forced along one text.

    Args:
        expected: logits of the full model.
        actual: logits of the other path.
        is_comparable: positions that saw the same prefix, from `comparable_positions`.
        tolerance: one of `TOLERANCES`.

    Raises:
        CompactionError: if shapes differ or a compared logit is not finite.
    """
    if expected.shape != actual.shape or expected.ndim != 2:
        raise CompactionError(
            f"`expected` has shape {expected.shape} and `actual` {actual.shape}; give two "
            "[position, vocabulary] alike."
        )
    if is_comparable.shape != expected.shape[:1]:
        raise CompactionError(
            f"`is_comparable` has shape {is_comparable.shape}; expected {expected.shape[:1]}."
        )
    left, right = (side[is_comparable].astype(np.float64) for side in (expected, actual))
    for name, side in (("expected", left), ("actual", right)):
        faulty = np.flatnonzero(~np.isfinite(side).all(axis=1))
        if faulty.size:
            position = int(np.flatnonzero(is_comparable)[faulty[0]])
            raise CompactionError(
                f"`{name}` has a logit that is not finite at position {position}; expected finite "
                "ones. Look for NaN in the weights or the KV of that side."
            )
    error = np.abs(left - right)
    left_log, right_log = _log_softmax(left), _log_softmax(right)
    kl = (np.exp(left_log) * (left_log - right_log)).sum(axis=1)
    moved = np.abs(np.exp(left_log) - np.exp(right_log)).sum(axis=1) / 2
    allowed = tolerance.absolute + tolerance.relative * np.abs(left)
    return NumericComparison(
        num_compared_positions=len(left),
        not_compared_positions=tuple(np.flatnonzero(~is_comparable).tolist()),
        max_error=_over(np.max, error),
        mean_error=_over(np.mean, error),
        mean_kl=_over(np.mean, kl),
        max_kl=_over(np.max, kl),
        mean_moved_mass=_over(np.mean, moved),
        top1_agreement=_over(np.mean, left.argmax(axis=1) == right.argmax(axis=1)),
        violation_rate=_over(np.mean, error > allowed),
        tolerance=tolerance,
    )


@dataclass(frozen=True, kw_only=True)
class PolicyDifference:
    """How two selections differ. Not an error of either.

    Attributes:
        num_common: blocks that both want, per layer row.
        num_only_first: blocks that only the first wants, per layer row.
        num_only_second: blocks that only the second wants, per layer row.
    """

    num_common: tuple[int, ...]
    num_only_first: tuple[int, ...]
    num_only_second: tuple[int, ...]


def compare_selections(
    first: Sequence[Int[np.ndarray, " block"]], second: Sequence[Int[np.ndarray, " block"]]
) -> PolicyDifference:
    """Compares what two policies want of each layer.

    Args:
        first: logical blocks of each layer row, without padding.
        second: as `first`, of the other policy.
    """
    pairs = [
        (set(map(int, left)), set(map(int, right)))
        for left, right in zip(first, second, strict=True)
    ]
    return PolicyDifference(
        num_common=tuple(len(left & right) for left, right in pairs),
        num_only_first=tuple(len(left - right) for left, right in pairs),
        num_only_second=tuple(len(right - left) for left, right in pairs),
    )


def _as_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array).view(np.uint8)


def _log_softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    shifted = logits - logits.max(axis=1, keepdims=True, initial=-np.inf)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _over(reduce: Any, values: Any) -> float:
    return float(reduce(values)) if values.size else float("nan")
