"""`compare_paths`: the same selections on three paths, and what each booked."""

import numpy as np
import pytest

from blockcompact_jax import paths
from blockcompact_jax.errors import CompactionError
from blockcompact_jax.geometry import ModelGeometry, OwnershipGranularity
from blockcompact_jax.kernels import Layout
from blockcompact_jax.paths import compare_paths
from blockcompact_jax.retention_path import RetentionPath
from blockcompact_jax.selection import SelectionPolicy
from blockcompact_jax.traces.planned_path import PlannedPath

ROWS, HEADS, TOKENS, DIM, BLOCKS, BUDGET = 3, 2, 32, 32, 16, 5


def geometry(dtype):
    return ModelGeometry.uniform(
        num_layers=4,
        num_query_heads=4,
        num_kv_heads=HEADS,
        head_dim=DIM,
        block_tokens=TOKENS,
        dtype=dtype,
        layout="amx",
        window_by_layer=[None, 64, None, None],
    )


def make_sides(dtype):
    rng = np.random.default_rng(3)
    kind = {"bfloat16": np.uint16, "float32": np.uint32}[dtype]
    shape = (ROWS, BLOCKS, HEADS, 2 * TOKENS, DIM)
    packed = rng.integers(0, np.iinfo(kind).max, shape, kind)
    scores = [rng.random((ROWS, BLOCKS), dtype=np.float32) for _ in range(4)]
    return {"packed": packed, "scores": scores, "geometry": geometry(dtype)}


@pytest.fixture
def sides():
    return make_sides("bfloat16")


def compared(sides, **changes):
    options = {"layout": Layout.AMX, "num_candidate_blocks": 14, "budget_blocks": BUDGET}
    return compare_paths(**{**sides, **options, **changes})


@pytest.mark.parametrize(
    ("name", "retention", "ownership"),
    [
        ("source_only", RetentionPath.LAYER_TABLES, OwnershipGranularity.LAYER),
        ("moved", RetentionPath.BYTE_MOVE, OwnershipGranularity.GROUP),
    ],
)
def test_MET_1_plans_without_bytes_count_what_paths_move(sides, name, retention, ownership):
    """MET-1: the counts of a study are those that a path with real pools books."""
    geometry = ModelGeometry.uniform(
        num_layers=ROWS,
        num_query_heads=4,
        num_kv_heads=HEADS,
        head_dim=DIM,
        block_tokens=TOKENS,
        dtype="bfloat16",
        layout="amx",
    )
    booked = getattr(compared({**sides, "geometry": geometry}), name)
    path = PlannedPath(
        geometry,
        SelectionPolicy(max_want=BUDGET, recent_blocks=0),
        max_blocks=BLOCKS,
        max_unselected_tokens=1,
        retention=retention,
        ownership=ownership,
    )
    for scores in sides["scores"]:
        path.select(scores, num_candidate_blocks=14, budget_blocks=BUDGET)
    counted = path.counts().metrics
    assert booked.h2d_bytes == counted.h2d_bytes > 0
    assert booked.resident_move_bytes == counted.resident_move_bytes
    assert booked.physical_blocks_released == counted.physical_blocks_released > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_CMP_1_all_paths_hold_the_same_bytes_of_one_selection(dtype):
    """CMP-1, RET-6: every layer, head and valid token, on both transports and both retentions."""
    sides = make_sides(dtype)
    before = sides["packed"].copy()
    found = compared(sides)
    assert found.is_equal
    assert len(found.transport) == len(found.retention) == found.num_selections == 4
    bytes_a_selection = ROWS * BUDGET * TOKENS * 2 * HEADS * DIM * sides["packed"].itemsize
    for each in (*found.transport, *found.retention):
        assert (each.num_compared_bytes, each.num_differing_bytes) == (bytes_a_selection, 0)
    assert "byte_move" in found.retention_kinds
    assert (sides["packed"] == before).all()


def test_MET_2_MET_3_each_saving_is_its_own_and_uploads_stay(sides):
    """MET-2, MET-3: no gather is one result, no move another; one selection, the same uploads."""
    found = compared(sides)
    source_only, copied, moved = found.source_only, found.copied, found.moved
    assert source_only.h2d_bytes == copied.h2d_bytes > 0
    assert copied.cpu_gather_bytes == copied.h2d_bytes
    assert source_only.cpu_gather_bytes == moved.cpu_gather_bytes == 0
    assert moved.resident_move_bytes > 0
    assert source_only.resident_move_bytes == copied.resident_move_bytes == 0
    assert source_only.plan_us is None


@pytest.mark.parametrize(("name", "is_transport"), [("_copy", True), ("_move", False)])
def test_CMP_4_a_fault_of_one_path_is_that_paths(sides, monkeypatch, name, is_transport):
    """CMP-1, CMP-4: a wrong byte of the copy or of the move is found, and blamed on no other."""
    right = getattr(paths._Path, name)

    def wrong(self, *arguments):
        result = right(self, *arguments)
        is_moved = self.policy.retention.tables is paths.TableSupport.SHARED
        if name == "_copy":
            self.store[1, BLOCKS:] ^= 1
        elif is_moved:
            self.memory[2] ^= 1
        return result

    monkeypatch.setattr(paths._Path, name, wrong)
    found = compared(sides)
    faulty, sound = found.transport, found.retention
    if not is_transport:
        faulty, sound = sound, faulty
    assert not all(each.is_equal for each in faulty)
    assert all(each.is_equal for each in sound)
    assert not found.is_equal
    layers = {place.layer for each in faulty for place in each.mismatches}
    assert layers == {2 if is_transport else 3}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"budget_blocks": 0}, "`budget_blocks` is 0"),
        ({"budget_blocks": 15}, "`budget_blocks` is 15"),
        ({"num_candidate_blocks": 17}, "`num_candidate_blocks` 17"),
        ({"packed": np.zeros((1, 2, 3))}, "`packed` is float64"),
        ({"scores": [np.zeros((1, 2), np.float32)]}, "`scores` has shape"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sides, changes, said):
    with pytest.raises(CompactionError, match=said):
        compared(sides, **changes)
