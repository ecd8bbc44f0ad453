"""What a selection keeps of a trace, against a study token by token in float64."""

from collections import Counter

import numpy as np
import pytest

from blockcompact_jax.budget import Budget, OptionError
from blockcompact_jax.errors import CompactionError
from blockcompact_jax.geometry import OwnershipGranularity
from blockcompact_jax.retention_path import RetentionPath
from blockcompact_jax.scores import BlockReduction, HeadReduction
from blockcompact_jax.selection import LayerBudget
from blockcompact_jax.traces.scores import (
    BlockScores,
    block_logits,
    causal_block_mass,
    page_bound_logits,
)
from blockcompact_jax.traces.study import (
    TRACE_POLICIES,
    StudyOptions,
    rounded,
    study_trace,
)
from blockcompact_jax.traces.trace import AttentionTrace

from . import trace_cases

PLAIN = {
    "block_tokens": 8,
    "policy": "attention",
    "top_tokens": 1,
    "head_reduction": "mean",
    "sink_blocks": 1,
    "recent_blocks": 1,
    "resident_margin": 0.0,
    "reselect_every_tokens": 8,
    "scored_queries": 4,
}


def options(*, budget_blocks, **changes):
    values = {**PLAIN, **changes}
    values["head_reduction"] = HeadReduction(values["head_reduction"])
    if "retention" in values:
        values["retention"] = RetentionPath(values["retention"])
    if "ownership" in values:
        values["ownership"] = OwnershipGranularity(values["ownership"])
    return StudyOptions(budget=Budget(blocks=budget_blocks), **values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block_tokens", [1, 8, 32])
def test_mass_and_scores_are_those_of_the_recorded_queries_and_keys(dtype, block_tokens):
    """SEL-2: mass covers the tokens up to the query; whole blocks alone have other scores."""
    given = trace_cases.parts(dtype=dtype)
    trace = AttentionTrace(**given)
    mass = causal_block_mass(trace, 1, block_tokens=block_tokens)
    logits = block_logits(trace, 1, block_tokens=block_tokens, block_reduction=BlockReduction.MAX)
    bounds = page_bound_logits(trace, 1, block_tokens=block_tokens)
    num_whole = 120 // block_tokens
    assert logits.shape == bounds.shape == (4, 38, num_whole)
    for query in (0, 7, 37):
        expected = trace_cases.block_mass(given, 1, query, block_tokens)
        np.testing.assert_allclose(mass[:, query], expected, atol=2e-6)
        for block in (0, num_whole - 1):
            for name, scores in (("logit_max", logits), ("page_bounds", bounds)):
                expected = trace_cases.block_score(
                    given, 1, query, block, policy=name, block_tokens=block_tokens
                )
                np.testing.assert_allclose(scores[:, query, block], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("budget_blocks", "changes"),
    [
        (4, {}),
        (4, {"policy": "logit_max", "head_reduction": "max"}),
        (5, {"policy": "logit_mean", "block_tokens": 7, "sink_blocks": 2, "recent_blocks": 2}),
        (3, {"policy": "logit_log_sum_exp", "reselect_every_tokens": 1}),
        (5, {"policy": "logit_top_mean", "top_tokens": 3}),
        (5, {"policy": "page_bounds", "reselect_every_tokens": 100}),
        (6, {"resident_margin": 0.05, "scored_queries": 1}),
        (3, {"sink_blocks": 0, "recent_blocks": 0}),
        (100, {"reselect_every_tokens": 3}),
    ],
)
def test_SEL_3_a_study_finds_what_a_walk_in_float64_finds(budget_blocks, changes):
    """SEL-1, SEL-2, SEL-3, SEL-9: selections, mass kept, recall, overlap and uploads."""
    check_study(trace_cases.parts(), budget_blocks, changes)


@pytest.mark.parametrize("head_reduction", ["max", "mean", "sum"])
@pytest.mark.parametrize("policy", ["attention", "logit_mean", "logit_max", "page_bounds"])
def test_SEL_2_only_queries_after_a_block_score_it(policy, head_reduction):
    """SEL-2: the newest queries reach far back where few are recorded; a score stays causal."""
    given = trace_cases.parts(every=4)
    chosen = {"policy": policy, "head_reduction": head_reduction, "scored_queries": 8}
    check_study(given, 5, chosen)


def test_a_candidate_that_no_scored_query_is_after_is_refused():
    scores = BlockScores(AttentionTrace(**trace_cases.parts(every=4)))
    with pytest.raises(CompactionError, match=r"`recent_blocks` is 0: at .* 98 logical block 11"):
        study_trace(scores, options(budget_blocks=4, recent_blocks=0))
    assert study_trace(scores, options(budget_blocks=4, recent_blocks=0, policy="recency"))


def check_study(given, budget_blocks, changes):
    expected, pool = trace_cases.study(given, budget_blocks=budget_blocks, **{**PLAIN, **changes})
    scores = BlockScores(AttentionTrace(**given))
    study = study_trace(scores, options(budget_blocks=budget_blocks, **changes))
    found = vars(study)
    for name, value in expected.items():
        assert found[name] == (None if value is None else pytest.approx(value, abs=1e-5)), name
    # A layer's block of float32: keys and values of two heads of eight elements.
    block_bytes = 2 * 2 * 8 * {**PLAIN, **changes}["block_tokens"] * 4
    path, booked = study.path, study.path.metrics
    assert study.upload_bytes == booked.h2d_bytes == pool.uploaded * block_bytes
    assert booked.resident_move_bytes == pool.moved * block_bytes
    assert booked.table_entries_written == pool.entries
    assert booked.physical_blocks_released == pool.released
    owned_bytes = block_bytes * (2 if changes.get("ownership") == "group" else 1)
    assert path.released_bytes == pool.released * owned_bytes
    assert path.pool_peak_bytes == pool.peak * owned_bytes
    assert path.resident_blocks == pytest.approx(np.mean(pool.held_counts))
    assert path.unwanted_blocks == pytest.approx(np.mean(pool.unwanted_counts))
    assert path.num_retentions == dict(Counter(pool.kinds))
    times = {name: value for name, value in booked.to_dict().items() if name.endswith("_us")}
    assert set(times.values()) == {None}
    return study


@pytest.mark.parametrize(
    "changes",
    [
        {"ownership": "group"},
        {"retention": "shared_table", "ownership": "group"},
        {"retention": "byte_move", "ownership": "group"},
        {"retention": "union", "ownership": "group"},
    ],
)
def test_OWN_4_each_retention_path_books_what_it_moves_and_frees(changes):
    """OWN-4, RET-2, RET-4, MET-1: exact counts of every path that exists, beside a twin's."""
    study = check_study(trace_cases.parts(), 6, {"reselect_every_tokens": 4, **changes})
    kinds = set(study.path.num_retentions)
    path = changes.get("retention", "layer_tables")
    assert path in kinds <= {"shared_table", path}
    assert (study.path.metrics.resident_move_bytes > 0) is (path == "byte_move")
    assert (study.path.unwanted_blocks > 0) is (path == "union")


def test_paths_differ_in_what_they_hold_move_and_release():
    """OWN-4, MET-1: what a path costs is its own; equal selections keep equal mass."""
    scores = BlockScores(AttentionTrace(**trace_cases.parts()))
    found = {
        (retention, ownership): study_trace(
            scores,
            options(
                budget_blocks=6,
                reselect_every_tokens=4,
                retention=retention,
                ownership=ownership,
            ),
        )
        for retention in ("shared_table", "layer_tables", "byte_move", "union")
        for ownership in ("layer", "group")
        if ownership == "group" or retention == "layer_tables"
    }
    own, group, moved, union, together = (
        found[key]
        for key in (
            ("layer_tables", "layer"),
            ("layer_tables", "group"),
            ("byte_move", "group"),
            ("union", "group"),
            ("shared_table", "group"),
        )
    )
    assert own.mass_kept == group.mass_kept == moved.mass_kept < union.mass_kept
    assert together.mass_kept != own.mass_kept
    assert group.path.pool_peak_bytes > own.path.pool_peak_bytes
    assert union.path.resident_blocks > own.path.resident_blocks
    assert moved.upload_bytes > own.upload_bytes  # padded to a common count
    assert together.path.num_retentions == {"shared_table": together.num_selections}


def test_all_blocks_keep_all_attention_and_every_policy_runs():
    scores = BlockScores(AttentionTrace(**trace_cases.parts()))
    for policy in TRACE_POLICIES:
        everything = study_trace(scores, options(budget_blocks=100, policy=policy))
        assert everything.mass_kept == pytest.approx(1, abs=1e-5)
        assert everything.oracle_recall == everything.attended_share == 1
        few = study_trace(scores, options(budget_blocks=4, policy=policy))
        assert few.mass_kept <= few.mass_kept_at_best + 1e-6 <= 1 + 2e-6
        assert few.mass_kept_worst_layer <= few.mass_kept < 1
        assert few.budget_blocks == 4


def test_the_controls_ignore_the_attention():
    """SEL-8: recency keeps the newest blocks; random draws the same with the same seed."""
    scores = BlockScores(AttentionTrace(**trace_cases.parts()))
    recency = study_trace(scores, options(budget_blocks=4, policy="recency"))
    assert recency.upload_blocks_per_selection == 0  # they come out of the tail
    draws = [
        study_trace(scores, options(budget_blocks=5, policy="random", seed=seed))
        for seed in (0, 0, 1)
    ]
    assert draws[0] == draws[1]
    assert draws[0].mass_kept != draws[2].mass_kept


def test_SEL_5_a_small_budget_is_applied_as_sink_and_recent_blocks():
    """SEL-5: the effective budget is recorded, and is what is kept."""
    scores = BlockScores(AttentionTrace(**trace_cases.parts()))
    found = study_trace(scores, options(budget_blocks=1, sink_blocks=2, recent_blocks=1))
    assert found.budget_blocks == 3
    assert found.first_upload_blocks == 2


@pytest.mark.parametrize("layer_budget", list(LayerBudget))
def test_layer_budgets_spread_the_same_number_of_blocks(layer_budget):
    scores = BlockScores(AttentionTrace(**trace_cases.parts()))
    chosen = StudyOptions(
        block_tokens=8, budget=Budget(blocks=6), layer_budget=layer_budget, scored_queries=4
    )
    found = study_trace(scores, chosen)
    assert found.budget_blocks == 6
    assert found.first_upload_blocks == 5


def test_a_margin_keeps_what_is_resident():
    scores = BlockScores(AttentionTrace(**trace_cases.parts()))
    free, bound = (
        study_trace(scores, options(budget_blocks=4, reselect_every_tokens=2, resident_margin=by))
        for by in (0.0, 100.0)
    )
    # What came out of the tail is resident too, and may win over what was selected before.
    assert free.selection_overlap < bound.selection_overlap <= 1
    assert bound.upload_blocks_per_selection == 0 < free.upload_blocks_per_selection


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_tokens": 0}, "`block_tokens` is 0"),
        ({"policy": "best"}, "`policy` is 'best'"),
        ({"top_tokens": 9}, "`top_tokens` is 9 with `block_tokens` 8"),
        ({"resident_margin": -1.0}, "`resident_margin` is -1.0"),
        ({"seed": -1}, "`seed` is -1"),
        ({"scored_queries": 9}, "the trace has 8 queries"),
        ({"block_tokens": 64}, "leave no block of the 90"),
    ],
)
def test_a_configuration_that_cannot_be_studied_is_refused(changes, said):
    scores = BlockScores(AttentionTrace(**trace_cases.parts()))
    with pytest.raises(CompactionError, match=said):
        study_trace(scores, options(budget_blocks=4, **changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"retention": "union"}, "`ownership` is 'layer' with `retention` 'union'.* 'group'"),
        ({"retention": "shared_table"}, "`ownership` is 'layer' with `retention` 'shared_table'"),
        ({"retention": "byte_move"}, "`ownership` is 'layer' with `retention` 'byte_move'"),
        (
            {
                "retention": "byte_move",
                "ownership": "group",
                "layer_budget": LayerBudget.PYRAMID,
            },
            "`layer_budget` is 'pyramid' with `retention` 'byte_move', expected 'uniform'",
        ),
    ],
)
def test_RET_2_a_path_that_does_not_exist_is_refused_by_name(changes, said):
    """RET-2: one table names blocks that span the layers, and as many for each of them."""
    with pytest.raises(OptionError, match=said):
        options(budget_blocks=6, **changes)


def test_stored_values_are_rounded():
    scores = BlockScores(AttentionTrace(**trace_cases.parts()))
    found = study_trace(scores, options(budget_blocks=4))
    stored = rounded(found, digits=2)
    assert stored["mass_kept"] == round(found.mass_kept, 2) != found.mass_kept
    assert stored["num_steps"] == 30
