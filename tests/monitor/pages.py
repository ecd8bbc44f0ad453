"""Result files and checks to build a page from."""

import json
from dataclasses import fields

import numpy as np

from blockcompact_jax.costs import RetainBenefits, RetainCosts, assumed, decide_retention, measured
from blockcompact_jax.course import RoundRecord, RunCourse, SelectionRecord
from blockcompact_jax.decision_log import DecisionLog
from blockcompact_jax.metrics import CompactionMetrics
from blockcompact_jax.reselection import Basis, RoundDecision
from blockcompact_jax.sweep.grid import expand
from blockcompact_jax.sweep.store import ResultFile
from blockcompact_jax.sweep.sweep import run_sweep

DOCUMENT = "## ABC — things\n- ABC-1 One `thing`.\n- ABC-2 Another.\n- ABC-3 </script>.\n"


def write_decisions(path):
    """Two decisions of an engine."""
    log = DecisionLog(path, engine="made up", policy="attend")
    for age, lost in ((4, 0.25), (8, 0.5)):
        log.add({"age_tokens": age, "mass_lost": lost, "max_mass_lost": None})
    return path


class FixedStudy:
    """A study's report, computed from its configuration."""

    def run(self, configuration):
        kept = 0.5 + configuration["budget"] / 100
        return {
            "context_tokens": 100,
            "block_tokens": 10,
            "budget_blocks": configuration["budget"],
            "metrics": {},
            "study": {"mass_kept": kept, "mass_kept_worst_layer": kept / 2},
        }


def write_study(path):
    """A sweep over a trace: selections alone, no decoding."""
    configurations = expand([{"trace": ["t.npz"], "policy": ["attention"], "budget": [2, 5]}])
    run_sweep(
        configurations, engine=FixedStudy(), results=ResultFile(path), observer=Quiet(), digests={}
    )
    return path


def write_comparison(path, *, budget="4b", kl=0.25):
    """As `compare --out` stores it, in part."""
    numbers = {"mean_kl": kl, "top1_agreement": 0.75, "tolerance": {"absolute": 0.1}}
    options = {
        "model": "m",
        "dtype": "float32",
        "budget": budget,
        "policy": "attention",
        "seed": 0,
        "block_tokens": 10,
        "layout": "vec",
        "attention": "blocks",
        "num_draft_tokens": 8,
        "reselect_every_rounds": 4,
        "prompt_file": None,
    }
    document = {
        "configuration": options,
        "num_context_tokens": 100,
        "num_forced_tokens": 9,
        "paths": {"source_only": {"h2d_bytes": 11, "plan_us": None}, "num_selections": 2},
        "numeric": {**numbers, "mean_kl": 0.0},
        "draft": numbers,
        "selections": [{"num_common": [3]}],
        "is_held": True,
        "machine": {"processor": "p"},
    }
    path.write_text(json.dumps(document))
    return path


class FixedPaths:
    """Rows of several engines and retention paths, each with options of its own."""

    def run(self, configuration):
        is_engine = "engine" in configuration
        moved = 1000 * configuration["budget"]
        return {
            "context_tokens": 100,
            "block_tokens": 10,
            "budget_blocks": configuration["budget"],
            **({"speedup_vs_full": 1.5, "attended_share_of_keys": 0.25} if is_engine else {}),
            "metrics": {
                "h2d_bytes": moved,
                "resident_move_bytes": 10,
                "physical_blocks_released": 3,
            },
            **({} if is_engine else {"study": {"path": {"pool_peak_bytes": 7 * moved}}}),
        }


def write_paths(path):
    """A sweep with engines, and studies of retention paths."""
    grids = [
        {"engine": ["vllm-lossless"], "draft_tokens": [8], "model": ["m"], "budget": [2]},
        {"engine": ["vllm-attend"], "model": ["m"], "budget": [2]},
        {"trace": ["t.npz"], "retention": ["byte_move", "union"], "budget": [2, 5]},
    ]
    configurations = [each for grid in grids for each in expand([grid])]
    run_sweep(configurations, engine=FixedPaths(), results=ResultFile(path), observer=Quiet())
    return path


class Quiet:
    def on_stage(self, name, total):
        pass

    def on_progress(self, done):
        pass


class FixedEngine:
    """What a run reports, computed from its configuration."""

    def run(self, configuration):
        budget, seed = configuration["budget"], configuration["seed"]
        if budget == 99:
            raise ValueError("too large")
        return {
            "token_ids": [1],
            "text": "<b>text</b>",
            "model": configuration["model"],
            "policy": configuration["policy"],
            "context_tokens": 100,
            "block_tokens": 10,
            "budget_blocks": budget,
            "acceptance_rate": budget / 10,
            "speedup_vs_full": 1.5 + seed,
            "seconds": {"draft": 2.0, "full_decode": None},
            "metrics": {
                "h2d_bytes": 1000 * budget,
                "resident_move_bytes": 0,
                "physical_blocks_released": budget,
                "plan_us": 5.0,
                "table_us": 0.0,
                "metadata_us": None,
            },
            "memory_bytes": {"weights": 7},
            **({"course": make_course().to_dict()} if configuration.get("course") else {}),
        }


def make_course():
    """Two layers, three selections of 10 candidate blocks and more, six rounds of three kinds."""
    course = RunCourse(layers=(0, 3), block_tokens=10)
    residents = [({0, 1, 2}, {0, 5, 6}), ({0, 1, 7}, {0, 5, 6}), ({0, 1, 11}, {0, 5, 10})]
    before = [set(), set()]
    bases = [Basis.UNMEASURED, Basis.DECIDED, Basis.MEASURING]
    for number, (now, basis) in enumerate(zip(residents, bases, strict=True)):
        num_candidates = 10 + number
        course.add_selection(
            SelectionRecord(
                num_tokens=10 * num_candidates + 15,
                budget_blocks=3,
                resident_blocks=np.array(
                    [[b in row for b in range(num_candidates)] for row in now]
                ),
                num_uploaded=np.array([len(a - b) for a, b in zip(now, before, strict=True)]),
                num_kept=np.array([len(a & b) for a, b in zip(now, before, strict=True)]),
                num_dropped=np.array([len(b - a) for a, b in zip(now, before, strict=True)]),
                booked=CompactionMetrics(physical_blocks_released=number),
            )
        )
        before = now
        for age in range(2):
            is_open = basis is Basis.UNMEASURED
            costs = {each.name: measured(3.0) for each in fields(RetainCosts)}
            benefits = RetainBenefits(
                attention_before=measured(20.0 + age),
                attention_after=measured(10.0),
                avoided_stall=assumed(0.0),
                output_penalty=measured(-5.0 if age else 5.0),
            )
            course.add_round(
                RoundRecord(
                    num_drafted=8,
                    num_accepted=4 * age + number,
                    num_gained=4 * age + number + 1,
                    round_us=1000.0 + number,
                    decision=RoundDecision(
                        age_rounds=age,
                        is_reselecting=age == 1,
                        basis=basis,
                        retention=decide_retention(
                            RetainCosts(**costs),
                            RetainBenefits() if is_open else benefits,
                            horizon_steps=age + 1,
                            margin_us=1.0,
                        ),
                    ),
                )
            )
    return course


def make_report():
    """A report of one run with its course."""
    configuration = {"model": "<m>", "policy": "attention", "budget": 5, "seed": 0, "course": True}
    return FixedEngine().run(configuration)


def write_sweep(path, *, budgets=(1, 5), seeds=(0,), has_course=False):
    grid = {
        **({"course": [True]} if has_course else {}),
        "model": ["m"],
        "policy": ["attention"],
        "budget": list(budgets),
        "seed": list(seeds),
        "draft_tokens": [8],
    }
    run_sweep(expand([grid]), engine=FixedEngine(), results=ResultFile(path), observer=Quiet())
    return path


def write_benchmark(path):
    rows = [{"job": "pack", "median_us": 3.5, "samples": [1, 2]}, {"job": "gather"}]
    path.write_text(json.dumps({"machine": {"processor": "p"}, "results": rows}))
    return path


def write_document(path):
    path.write_text(DOCUMENT, encoding="utf-8")
    return path


def write_checks(path, *, states=("held", "failed", "not run")):
    label = "tests/area/test_things.py::test_one"
    contracts = [
        {
            "number": f"ABC-{number}",
            "family": "ABC",
            "family_title": "things",
            "text": text,
            "state": state,
            "tests": [label] if state != "not run" else [],
            "num_tests": {
                "passed": int(state == "held"),
                "failed": int(state == "failed"),
                "not run": 0,
            },
            "num_cases": {"passed": 1, "failed": 0, "skipped": 0},
            "reasons": [] if state == "held" else ["why not"],
        }
        for number, (state, text) in enumerate(
            zip(states, ("One `thing`.", "Another.", "</script>."), strict=True), start=1
        )
    ]
    checks = {
        "schema": "blockcompact contract checks, version 2",
        "created": "2026-01-02T03:04:05+00:00",
        "seed": 3,
        "runs": {"results.xml": "2026-01-02T03:00:00"},
        "sources": {"tests/area/test_things.py": "a" * 64},
        "changed_after_the_run": [],
        "contracts": contracts,
        "areas": [
            {
                "area": "gpu",
                "state": "not run",
                "num_tests_not_in_results": 0,
                "num_cases": {"passed": 0, "failed": 0, "skipped": 2},
                "reasons": ["no device here"],
            }
        ],
        "tests": {
            label: {
                "contracts": ["ABC-1", "ABC-2"],
                "state": "passed",
                "num_cases": {"passed": 1, "failed": 0, "skipped": 0},
                "seconds": 0.5,
                "reasons": [],
            }
        },
    }
    path.write_text(json.dumps(checks))
    return path
