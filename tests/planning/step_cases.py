"""Random steps with many ties, as inputs of the planning core and of its list twin."""

import dataclasses

import jax
import numpy as np

from blockcompact_jax.geometry import OwnershipGranularity, TableSupport
from blockcompact_jax.kernels import NativeOperations
from blockcompact_jax.operations import PURE_OPERATIONS, PlanOperations
from blockcompact_jax.ownership import Ownership
from blockcompact_jax.retention import RetentionKind, RetentionPolicy
from blockcompact_jax.selection import SelectionPolicy
from blockcompact_jax.step import StepPolicy, commit_step, plan_step
from blockcompact_jax.upload import SourceKind

from . import builders as b
from .reference import step as ref

MAX_BLOCKS, NUM_PHYSICAL, MAX_SLOTS, MAX_HELD = 24, 32, 16, 8
GEOMETRY = b.geometry(((0, 2), (1,), (3,)), windows={1: 8})


@dataclasses.dataclass(frozen=True)
class Kind:
    """One engine: what it reads, what owns its blocks, and what a transfer reads."""

    tables: TableSupport
    granularity: OwnershipGranularity
    source_kind: SourceKind
    max_tail: int
    operations: PlanOperations = PURE_OPERATIONS

    @property
    def policy(self):
        return StepPolicy(
            selection=SelectionPolicy(max_want=8, max_tail=self.max_tail),
            retention=RetentionPolicy(tables=self.tables),
            max_upload=12,
            source_kind=self.source_kind,
            operations=self.operations,
        )

    def facts(self, geometry):
        chosen = self.policy
        return {
            "layers": geometry.full_layers,
            "groups": geometry.group_by_row.tolist(),
            "group_places": geometry.group_place_by_row.tolist(),
            "owners": geometry.owner_by_row(self.granularity).tolist(),
            "sink": chosen.selection.sink_blocks,
            "recent": chosen.selection.recent_blocks,
            "max_want": chosen.selection.max_want,
            "max_tail": chosen.selection.max_tail,
            "max_upload": chosen.max_upload,
            "common": self.tables is TableSupport.SHARED,
            "is_copy": self.source_kind is SourceKind.CPU_COPY,
            "block_tokens": geometry.block_tokens,
        }


# Shared tables pad from a tail of all blocks; layer tables need none, so theirs is cut amid ties.
KINDS = {
    "shared": Kind(
        TableSupport.SHARED, OwnershipGranularity.GROUP, SourceKind.SOURCE_ONLY, MAX_BLOCKS
    ),
    "layer": Kind(TableSupport.LAYER, OwnershipGranularity.LAYER, SourceKind.CPU_COPY, 4),
}
KINDS |= {
    f"{name}, native": dataclasses.replace(kind, operations=NativeOperations())
    for name, kind in KINDS.items()
}


def make(seed, kind, geometry=GEOMETRY, num_candidates=None):
    """One random state: scores from five values, unequal budgets, anything held."""
    rng = np.random.default_rng(seed)
    owners = geometry.owner_by_row(kind.granularity)
    num_rows, num_owners = geometry.num_rows, geometry.num_owners(kind.granularity)
    if num_candidates is None:
        num_candidates = int(rng.integers(0, MAX_BLOCKS + 1))
    scores = rng.choice(np.float32([0.0, -0.0, 1.0, -1.0, 1e-42]), (num_rows, MAX_BLOCKS))
    budgets = rng.integers(2, 9, num_rows)
    most = min(MAX_HELD, num_candidates)
    helds = [rng.permutation(num_candidates)[: rng.integers(0, most + 1)] for _ in range(num_rows)]
    tables = [rng.permutation(NUM_PHYSICAL // 2)[: len(held)] for held in helds]
    if rng.random() < 0.5:  # layers that agree, so that shared tables occur
        scores[:], budgets[:] = scores[0], budgets[0]
        helds, tables = [helds[0]] * num_rows, [tables[0]] * num_rows
    references = np.zeros((3, num_owners, NUM_PHYSICAL), np.int32)
    for row, table in enumerate(tables):
        references[0, owners[row], table] = 1
    return {
        "scores": scores,
        "num_candidates": num_candidates,
        "budgets": budgets.tolist(),
        "helds": [held.tolist() for held in helds],
        "tables": [table.tolist() for table in tables],
        "references": references,
        "generation": rng.integers(0, 3, (num_owners, NUM_PHYSICAL)).astype(np.int32),
        "revisions": tuple(rng.integers(0, 9, 4).tolist()),
        "sources": rng.permutation(MAX_BLOCKS).tolist(),
        "first_copy": int(rng.integers(0, 50)),
        "force_full": bool(rng.random() < 0.25),
    }


def inputs(case, kind, geometry=GEOMETRY):
    """The case as NumPy arguments of `step`."""
    names = ("request_epoch", "pool_generation", "map_revision", "selection_revision")
    residency = b.residency(
        case["helds"],
        case["tables"],
        max_slots=MAX_SLOTS,
        block_tokens=geometry.block_tokens,
        **dict(zip(names, case["revisions"], strict=True)),
    )
    return (
        case["scores"],
        np.int32(case["num_candidates"]),
        jax.tree.map(np.asarray, residency),
        Ownership(
            references=case["references"],
            generation=case["generation"],
            granularity=kind.granularity,
        ),
        np.asarray(case["budgets"], np.int32),
        np.asarray(case["sources"], np.int32),
        np.int32(case["first_copy"]),
        np.bool_(case["force_full"]),
    )


def step(kind, geometry=GEOMETRY):
    """Returns the function (inputs) → (plan, commit) for one kind."""

    def run(*arguments):
        scores, num_candidates, residency, ownership, budgets, *rest = arguments
        sources, first_copy, force_full = rest
        plan, reserving = plan_step(
            scores,
            num_candidates,
            residency,
            ownership,
            budget_blocks=budgets,
            geometry=geometry,
            policy=kind.policy,
            source_by_logical=sources,
            first_cpu_destination=first_copy,
            force_full=force_full,
        )
        done = commit_step(plan, residency, reserving, geometry=geometry, policy=kind.policy)
        return plan, done

    return run


def stack(cases):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *cases)


def item(tree, place):
    return jax.tree.map(lambda x: np.asarray(x)[place], tree)


def named(tree):
    """Leaves as NumPy arrays by their dotted path; the twin's are named already."""
    if isinstance(tree, dict):
        return tree
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path).lstrip("."): np.asarray(leaf) for path, leaf in leaves}


def assert_same_bytes(left, right):
    left, right = named(left), named(right)
    assert left.keys() == right.keys()
    for name, values in left.items():
        other = right[name]
        assert (values.dtype, values.shape) == (other.dtype, other.shape), name
        assert values.tobytes() == other.tobytes(), name


def assert_is_twins(plan, done, case, kind, geometry=GEOMETRY):
    """Every byte of the plan, and the lists, kinds and counts of its commit, are the twin's."""
    facts = kind.facts(geometry)
    assert_same_bytes(plan, ref.plan(case, facts))
    kept, references = ref.commit(case, facts, layer_tables=kind.tables is TableSupport.LAYER)
    assert int(done.result.code) == 0
    assert b.lists(done.residency.logical_by_slot, done.residency.num_valid) == kept["logical"]
    assert b.lists(done.residency.physical_by_slot, done.residency.num_valid) == kept["tables"]
    kinds = [RetentionKind(int(kind)).name for kind in np.asarray(done.retention.kind)]
    assert kinds == [kept["kinds"][place] for place in sorted(kept["kinds"])]
    assert np.asarray(done.ownership.references).tolist() == references.tolist()
    was_free = (case["references"] == 0).all(0)
    for owner, blocks in enumerate(np.asarray(plan.reserved)):
        was_free[owner, blocks[blocks >= 0]] = False
    is_freed = ~was_free & (references == 0).all(0)
    assert (
        np.asarray(done.ownership.generation).tolist() == (case["generation"] + is_freed).tolist()
    )
