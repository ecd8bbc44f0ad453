"""Tensor-parallel ranks: every rank selects, uploads and retains the same, to the byte.

The cases are `rank_cases`; they run together in one process of their own, with eight CPU devices.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcomes():
    done = subprocess.run(
        [sys.executable, "-m", f"{__package__}.rank_cases"],
        cwd=Path(__file__).parents[__package__.count(".") + 1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_SEL_3_four_and_eight_ranks_plan_the_same_bytes_on_ties(outcomes):
    """SEL-3: shard_map on 4 and 8 ranks, one device and the list twin agree on tied scores.

    The type checks of `shard_map` also prove that no plan varies over ranks.
    """
    assert not outcomes["four_and_eight_ranks_plan_the_twins_bytes_on_ties"]


def test_SEL_9_ranks_reduce_in_one_order(outcomes):
    """SEL-9, SEL-3: scores over ranks have the same bits on every rank, also where sums round."""
    assert not outcomes["every_rank_gets_the_same_scores_in_one_order_of_addition"]


@pytest.mark.parametrize(
    "case", ["one_ranks_nan_is_refused_by_all", "max_over_ranks_is_refused_with_a_nan_too"]
)
def test_SEL_4_one_ranks_nan_is_refused_by_all(outcomes, case):
    """SEL-4: no rank goes on alone; all name the same layer and block."""
    assert not outcomes[case]


def test_SEL_3_requests_split_over_eight_devices(outcomes):
    """SEL-3: the batch split over devices gives each request the bytes it has alone."""
    assert not outcomes["requests_split_over_devices_equal_the_twin"]


def test_SEL_3_thousands_of_equal_scores_on_ranks(outcomes):
    """SEL-3: 4,096 equal scores give the lowest IDs on every rank."""
    assert not outcomes["thousands_of_equal_scores_give_the_lowest_blocks"]


@pytest.mark.parametrize(
    "case",
    [
        "native_operations_plan_the_same_bytes_on_ranks",
        "native_operands_may_vary_over_some_axes_only",
    ],
)
def test_SEL_3_native_operations_under_shard_map(outcomes, case):
    """SEL-3: native calls keep the type checks of `shard_map` and give the twin's bytes."""
    assert not outcomes[case]
