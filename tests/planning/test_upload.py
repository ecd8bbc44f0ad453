"""UPL-3, UPL-7: where rows read, and how a plan is checked before the first byte moves."""

import numpy as np
import pytest

from blockcompact_jax.diff import BlockDiffPlan
from blockcompact_jax.errors import CompactionError, ResultCode, ok_result
from blockcompact_jax.upload import SourceKind, UploadPlan, check_upload_plan, plan_upload

from . import builders as b

GEOMETRY = b.geometry(((0, 2), (1,)), windows={1: 8}, block_tokens=4)
HOLE_ROW = -1


def plan(**changes):
    columns = {
        "layer": [0, 0, HOLE_ROW, 2],
        "layer_row": [0, 0, HOLE_ROW, 1],
        "group": [0, 0, HOLE_ROW, 0],
        "logical_block": [3, 5, HOLE_ROW, 3],
        "source_block": [3, 5, HOLE_ROW, 3],
        "cpu_destination_block": [HOLE_ROW] * 4,
        "physical_block": [6, 7, HOLE_ROW, 6],
        "valid_tokens": [4, 4, 0, 1],
        "num_rows": 3,
    } | changes
    source_kind = columns.pop("source_kind", SourceKind.SOURCE_ONLY)
    arrays = {name: np.asarray(values, np.int32) for name, values in columns.items()}
    return UploadPlan(basis=b.revisions(), result=ok_result(), source_kind=source_kind, **arrays)


def check(upload, owned=((6, 7), (6, 7)), num_cpu_blocks=None):
    is_owned = np.zeros((2, 10), bool)
    for row, physical in enumerate(owned):
        is_owned[row, list(physical)] = True
    check_upload_plan(
        upload,
        GEOMETRY,
        num_source_blocks=8,
        num_physical_blocks=10,
        is_owned=is_owned,
        num_cpu_blocks=num_cpu_blocks,
    )


def test_UPL_7_a_sound_plan_passes():
    """UPL-7: the same destination in two layers is two cells; a partial block is allowed."""
    check(plan())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"physical_block": [6, 6, -1, 6]},
            r"Row 1 .*layer 0\) names physical block 6, which row 0",
        ),
        ({"physical_block": [6, 10, -1, 6]}, r"writes physical block 10, outside \[0, 10\)"),
        ({"physical_block": [6, -1, -1, 6]}, r"writes physical block -1, outside"),
        ({"physical_block": [6, 5, -1, 6]}, "physical block 5, which this operation has not"),
        ({"source_block": [3, 8, -1, 3]}, r"reads source block 8, outside \[0, 8\)"),
        ({"source_block": [3, -2, -1, 3]}, "reads source block -2"),
        ({"layer": [0, 0, -1, 1]}, r"Row 2 .*layer 1\) has layer row 1"),
        ({"layer": [0, 0, -1, 9]}, "layer 9"),
        ({"layer_row": [0, 1, -1, 1]}, "has layer row 1"),
        ({"group": [0, 1, -1, 0]}, "names group 1, but its layer belongs to group 0"),
        ({"valid_tokens": [4, 5, 0, 4]}, "has 5 valid tokens; give 1 … 4"),
        ({"valid_tokens": [4, 0, 0, 4]}, "has 0 valid tokens"),
        ({"logical_block": [3, -1, -1, 3]}, "moves logical block -1"),
        ({"cpu_destination_block": [-1, 9, -1, -1]}, "CPU destination block 9, but SOURCE_ONLY"),
        ({"num_rows": 4}, "`num_rows` is 4 but 3 rows are in use"),
    ],
)
def test_UPL_7_each_fault_names_its_row(changes, message):
    """UPL-7: out of range, duplicate destination, wrong owner, wrong layer or group."""
    with pytest.raises(CompactionError, match=message):
        check(plan(**changes))


def test_UPL_7_the_owner_is_the_layers_own():
    """UPL-7: a block that another layer reserved is not this layer's."""
    with pytest.raises(CompactionError, match=r"Row 2 .*has not reserved"):
        check(plan(), owned=((6, 7), (7,)))


def test_UPL_7_a_wrong_ownership_array_is_refused():
    """UPL-7: the check itself is not skipped by a wrong shape."""
    with pytest.raises(CompactionError, match="`is_owned` has shape"):
        check_upload_plan(
            plan(),
            GEOMETRY,
            num_source_blocks=8,
            num_physical_blocks=10,
            is_owned=np.ones((2, 9), bool),
        )


def test_UPL_7_copies_stay_in_the_compaction_area():
    """UPL-3, UPL-7: with cpu_copy each row gathers into a block of its own in [K, N)."""
    copying = {"source_kind": SourceKind.CPU_COPY}
    check(plan(cpu_destination_block=[8, 9, -1, 10], **copying), num_cpu_blocks=11)
    for columns, message in (
        ([8, 9, -1, 11], r"Row 2 .*copies to CPU destination block 11, outside .* \[8, 11\)"),
        ([8, 7, -1, 10], "Row 1 .*copies to CPU destination block 7, outside"),
        ([8, -1, -1, 10], "Row 1 .*copies to CPU destination block -1, outside"),
        ([8, 9, -1, 8], "Row 2 .*names CPU destination block 8, which row 0 writes too"),
    ):
        with pytest.raises(CompactionError, match=message):
            check(plan(cpu_destination_block=columns, **copying), num_cpu_blocks=11)
    with pytest.raises(CompactionError, match="`num_cpu_blocks` is None"):
        check(plan(cpu_destination_block=[8, 9, -1, 10], **copying))


def test_UPL_3_a_block_past_the_map_has_no_source():
    """UPL-3: blocks come from where the map says; one that the map does not reach is refused."""
    listed = np.array([[1, 4, -1], [0, 2, -1]], np.int32)
    counts = np.array([2, 1], np.int32)
    diff = BlockDiffPlan(
        basis=b.revisions(),
        is_full=np.bool_(False),
        upload_logical_blocks=listed,
        num_upload=counts,
        num_new=counts,
        num_pad=np.zeros_like(counts),
        num_truncated=np.zeros_like(counts),
        common_new_slots=np.array([2], np.int32),
        result=ok_result(),
    )
    destinations = np.array([[6, 7, -1], [6, -1, -1]], np.int32)
    sources = np.array([9, 8, 7, 6, 5], np.int32)
    for num_mapped, expected in ((5, [8, 5, -1, 9, -1, -1]), (4, [-1] * 6)):
        made = plan_upload(
            diff,
            destinations,
            geometry=GEOMETRY,
            source_kind=SourceKind.SOURCE_ONLY,
            source_by_logical=sources[:num_mapped],
        )
        assert np.asarray(made.source_block).tolist() == expected
        assert int(made.num_rows) == sum(source >= 0 for source in expected)
    assert b.fault(made.result) == (ResultCode.SOURCE_MISSING, 0, 4)
