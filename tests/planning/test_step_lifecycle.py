"""What becomes of a planned step: resumed, late, aborted, half transferred, shared."""

import io

import jax
import numpy as np

from blockcompact_jax.errors import ResultCode, raise_for_result
from blockcompact_jax.geometry import OwnershipGranularity
from blockcompact_jax.ownership import ReferenceKind, acquire, release
from blockcompact_jax.step import abort_step
from blockcompact_jax.upload import check_upload_plan

from . import builders as b
from .step_pool import (
    GEOMETRY,
    LAYER_TABLES,
    MAX_BLOCKS,
    NUM_PHYSICAL,
    Pool,
    check_conservation,
    commit_one,
    committed,
    one_step,
    plan_one,
    same,
    start,
)

jit_acquire = jax.jit(acquire, static_argnames=("geometry", "kind"))
jit_release = jax.jit(release, static_argnames=("geometry", "kind"))


def packed(tree):
    """Leaves as one file's bytes, and back."""
    leaves, structure = jax.tree.flatten(tree)
    file = io.BytesIO()
    np.savez(file, *map(np.asarray, leaves))
    return file.getvalue(), structure


def unpacked(data, structure):
    loaded = np.load(io.BytesIO(data))
    return jax.tree.unflatten(structure, [loaded[name] for name in loaded.files])


def test_UPL_1_one_upload_plan_serves_verify_and_resume():
    """UPL-1, COM-5: a plan kept as bytes moves the same rows and commits the same state."""
    residency, ownership = start(OwnershipGranularity.GROUP)
    scores = np.random.default_rng(0).random((3, MAX_BLOCKS))
    plan, reserving = one_step(residency, ownership, scores)
    verified, resumed = Pool(GEOMETRY.num_rows), Pool(GEOMETRY.num_rows)
    verified.upload(plan.upload)
    again = unpacked(*packed(plan))
    assert same(again, plan)
    is_owned = np.asarray(reserving.references)[ReferenceKind.TRANSFER] > 0
    check_upload_plan(
        again.upload,
        GEOMETRY,
        num_source_blocks=MAX_BLOCKS,
        num_physical_blocks=NUM_PHYSICAL,
        is_owned=is_owned[GEOMETRY.owner_by_row(OwnershipGranularity.GROUP)],
    )
    resumed.upload(again.upload)
    assert int(plan.upload.num_rows) > 0
    assert resumed.cells == verified.cells
    done = commit_one(plan, residency, reserving, chosen=LAYER_TABLES)
    later = commit_one(again, residency, reserving, chosen=LAYER_TABLES)
    assert same(later, done)
    resumed.read(later.residency)


def test_UPL_1_a_resumed_request_uploads_what_it_had_selected():
    """UPL-1: from an empty residency one plan of the same type brings every block back."""
    scores, _, done = committed()
    readmitted, ownership = start(OwnershipGranularity.GROUP, request_epoch=1)
    plan, reserving = one_step(readmitted, ownership, scores)
    raise_for_result(plan.result)
    resumed = commit_one(plan, readmitted, reserving, chosen=LAYER_TABLES)
    raise_for_result(resumed.result)
    pool = Pool(GEOMETRY.num_rows)
    pool.upload(plan.upload)
    assert pool.read(resumed.residency) == b.lists(
        done.residency.logical_by_slot, done.residency.num_valid
    )


def in_flight():
    """A planned step whose transfer has not ended, and the ownership it reserved in."""
    residency, ownership = start(OwnershipGranularity.GROUP)
    scores = np.random.default_rng(0).random((3, MAX_BLOCKS))
    plan, reserving = one_step(residency, ownership, scores)
    raise_for_result(plan.result)
    return residency, scores, plan, reserving


def test_OWN_5_a_request_that_ended_before_its_commit_publishes_nothing():
    """OWN-5, COM-8: finish-after-enqueue: its blocks are free, and the late commit is refused."""
    residency, _, plan, reserving = in_flight()
    ownership, result = abort_step(plan, reserving, geometry=GEOMETRY)
    raise_for_result(result)
    assert bool(ownership.is_free.all())
    late = commit_one(plan, residency, ownership, chosen=LAYER_TABLES)
    assert int(late.result.code) == ResultCode.STALE_BLOCK
    assert same((late.residency, late.ownership), (residency, ownership))


def test_OWN_5_a_late_commit_or_abort_cannot_take_anothers_reservation():
    """OWN-5: blocks freed and reserved by a second request are no longer the first one's."""
    residency, scores, first, reserving = in_flight()
    ownership, _ = abort_step(first, reserving, geometry=GEOMETRY)
    second, reserving = one_step(residency, ownership, scores)
    assert np.array_equal(second.reserved, first.reserved)
    late = commit_one(first, residency, reserving, chosen=LAYER_TABLES)
    assert int(late.result.code) == ResultCode.STALE_BLOCK
    assert same(late.ownership, reserving)
    after, result = abort_step(first, reserving, geometry=GEOMETRY)
    assert int(result.code) == ResultCode.STALE_BLOCK
    assert same(after, reserving)
    done = commit_one(second, residency, reserving, chosen=LAYER_TABLES)
    raise_for_result(done.result)
    check_conservation([done.residency], done.ownership, GEOMETRY)


def test_OWN_5_a_transfer_that_ends_early_frees_its_tail_once():
    """OWN-5: two callers release what was not transferred; the second changes nothing."""
    _, _, plan, reserving = in_flight()
    tail = np.array(plan.reserved)
    tail[:, :2] = -1
    settings = {"geometry": GEOMETRY, "kind": ReferenceKind.TRANSFER}
    settings["generation"] = plan.reserved_generation
    once, retirement, result = jit_release(reserving, tail, **settings)
    raise_for_result(result)
    assert int(retirement.physical_blocks_released) == int((tail >= 0).sum()) > 0
    twice, retirement, result = jit_release(once, tail, **settings)
    assert int(result.code) == ResultCode.STALE_BLOCK
    assert int(retirement.physical_blocks_released) == 0
    assert same(twice, once)
    whole, result = abort_step(plan, once, geometry=GEOMETRY)
    assert int(result.code) == ResultCode.STALE_BLOCK
    assert same(whole, once)


def test_OWN_5_all_pools_of_a_step_commit_or_none():
    """OWN-5: one group's transfer is gone, so neither group's blocks are published."""
    residency, _, plan, reserving = in_flight()
    lost = np.array(plan.reserved)
    lost[0] = -1
    without, _, result = jit_release(
        reserving, lost, geometry=GEOMETRY, kind=ReferenceKind.TRANSFER
    )
    raise_for_result(result)
    done = commit_one(plan, residency, without, chosen=LAYER_TABLES)
    assert int(done.result.code) == ResultCode.STALE_BLOCK
    assert int(done.result.layer) == 3
    assert same((done.residency, done.ownership), (residency, without))


def test_OWN_2_a_step_leaves_a_prefix_shared_block_to_its_other_readers():
    """OWN-2: what the request drops stays while a prefix reader is left, and is then freed."""
    scores, _, done = committed()
    table = np.asarray(done.residency.physical_by_slot)[[0, 2]][:, :1]  # one row of each group
    settings = {"geometry": GEOMETRY, "kind": ReferenceKind.PREFIX}
    shared, result = jit_acquire(done.ownership, table, **settings)
    raise_for_result(result)
    plan, reserving = plan_one(
        done.residency,
        shared,
        scores,
        budget=5,
        num_candidates=20,
        chosen=LAYER_TABLES,
        force_full=True,
    )
    moved = commit_one(plan, done.residency, reserving, chosen=LAYER_TABLES)
    raise_for_result(moved.result)
    references = np.asarray(moved.ownership.references)
    for owner, block in enumerate(table[:, 0]):
        assert references[:, owner, block].tolist() == [0, 1, 0]
        assert not bool(moved.retirement.is_released[owner, block])
    _, retirement, result = jit_release(moved.ownership, table, **settings)
    raise_for_result(result)
    assert int(retirement.physical_blocks_released) == 2
