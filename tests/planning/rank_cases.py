"""What eight ranks must agree on. Run as a program: it needs its own process for eight devices.

Prints one JSON object, case name → "" or the traceback of what failed.
"""

import functools
import json
import os
import traceback

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from blockcompact_jax.errors import ResultCode
from blockcompact_jax.scores import HeadReduction, reduce_heads, reduce_over_ranks
from blockcompact_jax.selection import SelectionPolicy, select

from . import builders as b
from . import step_cases as cases

jax.config.update("jax_numpy_dtype_promotion", "strict")

NUM_DEVICES, NUM_HEADS = 8, 16
KIND = cases.KINDS["shared"]
HEAD_REDUCTION = HeadReduction.SUM


BY_RANK = P("rank")
BY_HEAD = P(None, "rank")


def on_ranks(function, num_ranks, in_specs, out_specs=BY_RANK):
    """`function` on a mesh of ranks, with every type check of `shard_map` on."""
    mesh = Mesh(np.asarray(jax.devices()[:num_ranks]), ("rank",))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def reduce_ranks(heads, num_ranks, head_reduction):
    """[row, head, block] with the heads split over ranks → [rank, row, block]."""

    def reduce(mine):
        scores = reduce_heads(mine, head_reduction=head_reduction)
        return reduce_over_ranks(scores, rank_axis="rank", head_reduction=head_reduction)[None]

    return np.asarray(on_ranks(reduce, num_ranks, BY_HEAD)(heads))


def halves(values):
    """Sums by pairwise halving in float32, over the first axis."""
    values = list(values)
    while len(values) > 1:
        half = (len(values) + 1) // 2
        pairs = [values[i] + values[half + i] for i in range(len(values) - half)]
        values = pairs + values[len(values) - half : half]
    return values[0]


def step_of_a_rank(mine, *rest):
    """A rank reduces its own heads, then over ranks, and plans and commits."""
    scores = reduce_heads(mine, head_reduction=HEAD_REDUCTION)
    scores = reduce_over_ranks(scores, rank_axis="rank", head_reduction=HEAD_REDUCTION)
    return cases.step(KIND)(scores, *rest)


@functools.cache
def rank_steps(num_ranks):
    """(heads, other arguments) → what each rank has, and what `shard_map` proves that all have."""

    def run(*arguments):
        trees = step_of_a_rank(*arguments)
        return jax.tree.map(lambda x: x[None], trees), trees

    return on_ranks(run, num_ranks, (BY_HEAD, *[P()] * 7), (BY_RANK, P()))


def steps_on_ranks(heads, num_ranks, arguments):
    return jax.tree.map(np.asarray, rank_steps(num_ranks)(heads, *arguments[1:]))


def heads_of(seed, case):
    """Per-head scores on few values, so that their sums tie often."""
    rng = np.random.default_rng(seed)
    shape = (len(case["helds"]), NUM_HEADS, cases.MAX_BLOCKS)
    return rng.integers(0, 2, shape).astype(np.float32)


def four_and_eight_ranks_plan_the_twins_bytes_on_ties():
    for num_ranks in (4, 8):
        for seed in range(8):
            case = cases.make(seed, KIND)
            heads = heads_of(seed, case)
            case["scores"] = heads.sum(1)
            (plans, done), proven = steps_on_ranks(heads, num_ranks, cases.inputs(case, KIND))
            cases.assert_is_twins(*proven, case, KIND)
            for rank in range(num_ranks):
                mine = cases.item(plans, rank), cases.item(done, rank)
                cases.assert_is_twins(*mine, case, KIND)
            alone = cases.step(KIND)(*cases.inputs(case, KIND))
            cases.assert_same_bytes(cases.item((plans, done), 0), alone)


def every_rank_gets_the_same_scores_in_one_order_of_addition():
    for num_blocks in (1, 24, 37):
        heads = np.random.default_rng(1).standard_normal((3, NUM_HEADS, num_blocks))
        heads = heads.astype(np.float32)
        for num_ranks in (1, 4, 8):
            local = NUM_HEADS // num_ranks
            by_rank = np.moveaxis(heads.reshape(3, num_ranks, local, num_blocks), (1, 2), (0, 1))
            for how in HeadReduction:
                got = reduce_ranks(heads, num_ranks, how)
                if how is HeadReduction.MAX:
                    expected = heads.max(1)
                else:
                    mean = how is HeadReduction.MEAN
                    one = [halves(h) * np.float32(1 / local if mean else 1) for h in by_rank]
                    expected = halves(one) * np.float32(1 / num_ranks if mean else 1)
                for rank in range(num_ranks):
                    assert got[rank].tobytes() == expected.tobytes(), (how, num_ranks, rank)


def one_ranks_nan_is_refused_by_all():
    for bad in (np.nan, np.inf, -np.inf):
        case = cases.make(3, KIND, num_candidates=20)
        heads = heads_of(3, case)
        heads[1, 9, 5] = bad
        (plans, done), _ = steps_on_ranks(heads, 8, cases.inputs(case, KIND))
        layer = cases.GEOMETRY.full_layers[1]
        for rank in range(8):
            for tree in (plans, done):
                found = b.fault(cases.item(tree, rank).result)
                assert found == (ResultCode.NON_FINITE_SCORE, layer, 5), found


def max_over_ranks_is_refused_with_a_nan_too():
    heads = np.zeros((1, NUM_HEADS, 9), np.float32)
    heads[0, 11, 4] = np.nan
    got = reduce_ranks(heads, 8, HeadReduction.MAX)
    assert np.isnan(got[:, 0, 4]).all()
    assert (np.delete(got[:, 0], 4, axis=1) == 0).all()


def requests_split_over_devices_equal_the_twin():
    batch = [cases.make((9, place), KIND) for place in range(NUM_DEVICES * 4)]
    stacked = cases.stack([cases.inputs(case, KIND) for case in batch])
    split = on_ranks(jax.vmap(cases.step(KIND)), NUM_DEVICES, BY_RANK)
    plans, done = jax.tree.map(np.asarray, split(*stacked))
    for place, case in enumerate(batch):
        cases.assert_is_twins(cases.item(plans, place), cases.item(done, place), case, KIND)


def native_operations_plan_the_same_bytes_on_ranks():
    native = cases.KINDS["shared, native"]
    batch = [cases.make((11, place), native) for place in range(NUM_DEVICES * 2)]
    stacked = cases.stack([cases.inputs(case, native) for case in batch])
    split = on_ranks(jax.vmap(cases.step(native)), NUM_DEVICES, BY_RANK)
    plans, done = jax.tree.map(np.asarray, split(*stacked))
    for place, case in enumerate(batch):
        cases.assert_is_twins(cases.item(plans, place), cases.item(done, place), case, native)


def native_operands_may_vary_over_some_axes_only():
    rng = np.random.default_rng(2)
    ids = rng.integers(0, 50, (NUM_DEVICES, 3, 20)).astype(np.int32)
    others = rng.integers(0, 50, (3, 30)).astype(np.int32)

    def run(mine, shared):
        found = native_operations.find_members(
            mine[0],
            np.ones(mine[0].shape, bool),
            shared,
            np.ones(shared.shape, bool),
            bound=50,
            max_ids=50,
        )
        return found.is_member[None]

    native_operations = cases.KINDS["shared, native"].operations
    got = np.asarray(on_ranks(run, NUM_DEVICES, (BY_RANK, P()))(ids, others))
    for rank, mine in enumerate(ids):
        expected = [np.isin(row, other) for row, other in zip(mine, others, strict=True)]
        assert np.array_equal(got[rank], expected), rank


def thousands_of_equal_scores_give_the_lowest_blocks():
    policy = SelectionPolicy(max_want=100, sink_blocks=0, recent_blocks=0)

    def run(mine):
        scores = reduce_heads(mine, head_reduction=HEAD_REDUCTION)
        scores = reduce_over_ranks(scores, rank_axis="rank", head_reduction=HEAD_REDUCTION)
        selection = select(
            scores,
            np.int32(4096),
            budget_blocks=np.int32(100),
            selection_revision=np.int32(1),
            geometry=cases.GEOMETRY,
            policy=policy,
        )
        return selection.want[None]

    heads = np.full((3, NUM_HEADS, 4096), 0.25, np.float32)
    wants = np.asarray(on_ranks(run, 4, BY_HEAD)(heads))
    assert wants.tolist() == [[list(range(100))] * 3] * 4


CASES = (
    four_and_eight_ranks_plan_the_twins_bytes_on_ties,
    every_rank_gets_the_same_scores_in_one_order_of_addition,
    one_ranks_nan_is_refused_by_all,
    max_over_ranks_is_refused_with_a_nan_too,
    requests_split_over_devices_equal_the_twin,
    native_operations_plan_the_same_bytes_on_ranks,
    native_operands_may_vary_over_some_axes_only,
    thousands_of_equal_scores_give_the_lowest_blocks,
)


def main():
    assert len(jax.devices()) == NUM_DEVICES
    found = {}
    for case in CASES:
        try:
            case()
            found[case.__name__] = ""
        except Exception:
            found[case.__name__] = traceback.format_exc()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
