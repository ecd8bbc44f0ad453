"""MET: each cost under its own name."""

import pytest

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.metrics import CompactionMetrics

COUNTERS = (
    "cpu_gather_bytes",
    "cpu_destination_blocks",
    "h2d_bytes",
    "unpack_bytes",
    "scatter_bytes",
    "resident_move_bytes",
    "table_entries_written",
    "metadata_elements",
    "physical_blocks_released",
)
TIMES = ("plan_us", "table_us", "metadata_us", "wait_us", "allocator_us", "move_us")


def test_MET_1_every_cost_has_its_own_name():
    """MET-1: the names are fixed, and none is derived from another."""
    assert tuple(CompactionMetrics().to_dict()) == COUNTERS + TIMES


@pytest.mark.parametrize("name", COUNTERS + TIMES)
def test_MET_1_a_zero_in_one_implies_nothing_in_another(name):
    """MET-1: setting one counter leaves every other one as it was."""
    blank = CompactionMetrics().to_dict()
    got = CompactionMetrics(**{name: 7}).to_dict()
    assert got == blank | {name: 7}


def test_MET_2_gather_and_resident_move_are_two_results():
    """MET-2: removing the CPU gather leaves the resident byte move on the bill, and back."""
    gather = CompactionMetrics(cpu_gather_bytes=0, resident_move_bytes=512)
    move = CompactionMetrics(cpu_gather_bytes=256, resident_move_bytes=0)
    total = gather.add(move)
    assert (total.cpu_gather_bytes, total.resident_move_bytes) == (256, 512)


def test_MET_1_unmeasured_times_stay_unmeasured():
    """MET-1: a time that nobody measured is None in a sum, never a silent 0."""
    left = CompactionMetrics(plan_us=2.0, wait_us=1.0)
    right = CompactionMetrics(plan_us=3.0)
    total = left.add(right)
    assert total.plan_us == 5.0
    assert total.wait_us is None
    assert total.move_us is None


def test_MET_1_negative_costs_are_refused():
    """MET-1: a cost below zero is a bug of the caller."""
    with pytest.raises(CompactionError, match="`h2d_bytes` is -1"):
        CompactionMetrics(h2d_bytes=-1)
