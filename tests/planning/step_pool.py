"""A simulated pool of bytes, and one geometry for all tests of whole steps."""

import numpy as np

from blockcompact_jax.errors import raise_for_result
from blockcompact_jax.geometry import OwnershipGranularity, TableSupport
from blockcompact_jax.ownership import ReferenceKind, empty_ownership
from blockcompact_jax.residency import empty_residency
from blockcompact_jax.retention import RetentionPolicy
from blockcompact_jax.selection import SelectionPolicy
from blockcompact_jax.step import StepPolicy, commit_step, plan_step

from . import builders as b
from . import step_cases as cases

# One geometry and one set of capacities, so that tests share compiled functions.
GEOMETRY = cases.GEOMETRY
MAX_BLOCKS, NUM_PHYSICAL, MAX_SLOTS = cases.MAX_BLOCKS, cases.NUM_PHYSICAL, cases.MAX_SLOTS


def policy(tables, *, union=False, margin=0.0):
    return StepPolicy(
        selection=SelectionPolicy(max_want=8, max_tail=MAX_BLOCKS, resident_margin=margin),
        retention=RetentionPolicy(tables=tables, allow_union=union),
        max_upload=12,
    )


def start(granularity, request_epoch=0):
    return (
        empty_residency(GEOMETRY, max_slots=MAX_SLOTS, request_epoch=request_epoch),
        empty_ownership(GEOMETRY, granularity=granularity, num_physical_blocks=NUM_PHYSICAL),
    )


def plan_one(residency, ownership, scores, *, budget, num_candidates, chosen, force_full=False):
    return plan_step(
        np.asarray(scores, np.float32),
        np.int32(num_candidates),
        residency,
        ownership,
        budget_blocks=np.int32(budget),
        geometry=GEOMETRY,
        policy=chosen,
        force_full=np.bool_(force_full),
    )


def commit_one(plan, residency, ownership, *, chosen, is_due=True):
    return commit_step(
        plan,
        residency,
        ownership,
        geometry=GEOMETRY,
        policy=chosen,
        is_retention_due=np.bool_(is_due),
    )


def same(left, right):
    cases.assert_same_bytes(left, right)
    return True


class Pool:
    """Cells [row, physical]; each holds the (row, logical) whose bytes were last written there."""

    def __init__(self, num_rows):
        self.cells = [[None] * NUM_PHYSICAL for _ in range(num_rows)]

    def upload(self, plan):
        rows = zip(
            np.asarray(plan.layer_row).tolist(),
            np.asarray(plan.source_block).tolist(),
            np.asarray(plan.physical_block).tolist(),
            strict=True,
        )
        for row, source, physical in rows:
            if row >= 0:
                self.cells[row][physical] = (row, source)

    def move(self, retention):
        pairs = np.stack([np.asarray(retention.move_from), np.asarray(retention.move_to)], -1)
        for row, moves in enumerate(pairs):
            before = list(self.cells[row])
            for source, target in moves:
                if source >= 0:
                    self.cells[row][target] = before[source]

    def read(self, residency):
        logical = b.lists(residency.logical_by_slot, residency.num_valid)
        physical = b.lists(residency.physical_by_slot, residency.num_valid)
        for row, (blocks, table) in enumerate(zip(logical, physical, strict=True)):
            assert [self.cells[row][p] for p in table] == [(row, x) for x in blocks]
        return logical


def check_conservation(residencies, ownership, geometry):
    """A block has references exactly where some request's table reads it."""
    owner = geometry.owner_by_row(ownership.granularity)
    expected = np.zeros(ownership.references.shape[1:], np.int32)
    for residency in residencies:
        used = np.zeros(expected.shape, bool)
        for row, table in enumerate(b.lists(residency.physical_by_slot, residency.num_valid)):
            used[owner[row], table] = True
        expected += used
    references = np.asarray(ownership.references)
    assert references[ReferenceKind.REGULAR].tolist() == expected.tolist()
    assert not references[ReferenceKind.TRANSFER].any()


LAYER_TABLES = policy(TableSupport.LAYER)


def one_step(residency, ownership, scores, *, budget=5, num_candidates=20, chosen=LAYER_TABLES):
    return plan_one(
        residency, ownership, scores, budget=budget, num_candidates=num_candidates, chosen=chosen
    )


def committed():
    residency, ownership = start(OwnershipGranularity.GROUP)
    scores = np.random.default_rng(0).random((3, MAX_BLOCKS))
    plan, reserving = one_step(residency, ownership, scores)
    raise_for_result(plan.result)
    done = commit_one(plan, residency, reserving, chosen=LAYER_TABLES)
    raise_for_result(done.result)
    return scores, plan, done
