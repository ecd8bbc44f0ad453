"""A sweep whose configurations run elsewhere: the same results, written by the driver alone."""

import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from traces import trace_cases
from typer.testing import CliRunner

from blockcompact_jax.cli.app import app
from blockcompact_jax.errors import CompactionError
from blockcompact_jax.sweep import ray_runs
from blockcompact_jax.sweep.store import ResultFile, read_rows
from blockcompact_jax.sweep.sweep import run_one, run_sweep
from blockcompact_jax.sweep.trace_runs import TraceRuns, complete_trace_run
from blockcompact_jax.traces.store import write_trace
from blockcompact_jax.traces.trace import AttentionTrace

BUDGETS = ("3b", "4b", "6b", "100000b")

_RAY = find_spec("ray")
HAS_RAY = _RAY is not None and _RAY.origin is not None  # a bare folder of that name is none


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


@pytest.mark.skipif(not HAS_RAY, reason="needs the [ray] extra: ray")
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


@pytest.mark.parametrize(
    ("address", "said"), [("10.0.0.9:6379", "is '10.0.0.9:6379'"), (None, "is not set")]
)
def test_a_cluster_that_cannot_be_reached_is_no_unwritable_output(
    trace, tmp_path, monkeypatch, address, said
):
    def init(**_):
        raise ConnectionError("no route\nto it")

    fake = SimpleNamespace(init=init, is_initialized=lambda: False)
    monkeypatch.setattr(ray_runs, "import_module", lambda _: fake)
    monkeypatch.setattr("blockcompact_jax.cli.sweep.require_modules", lambda *_, **__: None)
    if address is None:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
    else:
        monkeypatch.setenv("RAY_ADDRESS", address)
    out = tmp_path / "a.jsonl"
    command = ["sweep", "--trace", str(trace), "--ray", "--out", str(out)]
    done = CliRunner().invoke(app, [*command, "--set", "block_tokens=8", "--set", "policy=recency"])
    assert isinstance(done.exception, CompactionError), done.exception
    assert f"`RAY_ADDRESS` {said}" in str(done.exception)
    assert "(no route to it)" in str(done.exception)
    assert not out.exists()


def test_a_worker_with_other_sources_is_refused():
    here = {"sources": {"a": "1"}, "versions": {"jax": "2"}}
    ray_runs._check_same(here, {**here, "machine": {}})
    with pytest.raises(CompactionError, match="a Ray worker has other versions"):
        ray_runs._check_same(here, {**here, "versions": {"jax": "3"}})
