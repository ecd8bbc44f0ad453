"""A sweep whose configurations run elsewhere: the same results, written by the driver alone."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
from traces import trace_cases

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.sweep import ray_runs
from blockcompact_jax.sweep.store import ResultFile, read_rows
from blockcompact_jax.sweep.sweep import run_one, run_sweep
from blockcompact_jax.sweep.trace_runs import TraceRuns, complete_trace_run
from blockcompact_jax.traces.store import write_trace
from blockcompact_jax.traces.trace import AttentionTrace

BUDGETS = ("3b", "4b", "6b", "100000b")


class Quiet:
    def on_stage(self, name, total):
        pass

    def on_progress(self, done):
        pass


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "tiny.npz"
    write_trace(path, AttentionTrace(**trace_cases.parts()))
    return path


def sweep(path, trace, *, too_many=("4b",), **rest):
    configurations = [
        complete_trace_run(
            {
                "budget": budget,
                "block_tokens": 8,
                "scored_queries": 9 if budget in too_many else 4,
            },
            trace=trace,
        )
        for budget in BUDGETS
    ]
    return run_sweep(
        configurations,
        engine=TraceRuns(trace),
        results=ResultFile(path),
        observer=Quiet(),
        **rest,
    )


def what_is_the_same(path):
    names = ("configuration", "configuration_hash", "state", "error", "report", "sources")
    rows = [{name: row[name] for name in names} for row in read_rows(path)]
    return sorted(rows, key=lambda row: row["configuration_hash"])


def test_MON_1_rows_may_come_in_any_order_and_say_their_machine(trace, tmp_path):
    """MON-1: where and in what order configurations run changes no result."""

    def backwards(configurations, engine):
        for configuration in reversed(configurations):
            yield {**run_one(configuration, engine), "machine": {"processor": "other"}}

    sweep(tmp_path / "here.jsonl", trace)
    summary = sweep(tmp_path / "there.jsonl", trace, run_all=backwards)
    assert what_is_the_same(tmp_path / "there.jsonl") == what_is_the_same(tmp_path / "here.jsonl")
    rows = read_rows(tmp_path / "there.jsonl")
    assert [row["configuration"]["budget"] for row in rows] == list(reversed(BUDGETS))
    assert {row["machine"]["processor"] for row in rows} == {"other"}
    assert ["the trace has 8 queries" in error for _, error in summary.failures] == [True]
    again = sweep(tmp_path / "there.jsonl", trace, run_all=backwards)
    assert (again.num_skipped, len(again.failures)) == (3, 1)


@pytest.mark.skipif(find_spec("ray") is None, reason="needs the [ray] extra: ray")
def test_MON_1_a_sweep_on_ray_gives_the_same_rows(trace, tmp_path):
    """MON-1: the same sweep, distributed; every worker has the trace."""
    command = ["sweep", "--trace", trace.name, "--ray", "--out", "ray.jsonl"]
    budgets = f"budget={','.join(BUDGETS)}"
    for setting in (budgets, "policy=attention", "block_tokens=8", "scored_queries=4"):
        command += ["--set", setting]
    program = "from blockcompact_jax.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, *command],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=300,
    )
    assert (done.returncode, "Warning" in done.stderr) == (0, False), done.stderr
    sweep(tmp_path / "here.jsonl", trace, too_many=())
    assert what_is_the_same(tmp_path / "ray.jsonl") == what_is_the_same(tmp_path / "here.jsonl")


def test_a_worker_with_other_sources_is_refused():
    here = {"sources": {"a": "1"}, "versions": {"jax": "2"}}
    ray_runs._check_same(here, {**here, "machine": {}})
    with pytest.raises(CompactionError, match="a Ray worker has other versions"):
        ray_runs._check_same(here, {**here, "versions": {"jax": "3"}})
