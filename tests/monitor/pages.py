"""Result files and checks to build a page from."""

import json

from blockcompact_jax.sweep.grid import expand
from blockcompact_jax.sweep.store import ResultFile
from blockcompact_jax.sweep.sweep import run_sweep

DOCUMENT = "## ABC — things\n- ABC-1 One `thing`.\n- ABC-2 Another.\n- ABC-3 </script>.\n"


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
        }


def write_sweep(path, *, budgets=(1, 5), seeds=(0,)):
    grid = {
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
