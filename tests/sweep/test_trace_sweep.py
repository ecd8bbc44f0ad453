"""A sweep over a recorded trace: no model, no torch, the same rows."""

import json
import os
import subprocess
import sys

import pytest
from traces import trace_cases
from typer.testing import CliRunner

from blockcompact_jax.budget import Budget, OptionError
from blockcompact_jax.cli.app import app
from blockcompact_jax.errors import CompactionError
from blockcompact_jax.monitor.results import read_results
from blockcompact_jax.provenance import sha256_of
from blockcompact_jax.sweep.difference import compare_sweeps
from blockcompact_jax.sweep.store import ResultFile, read_rows
from blockcompact_jax.sweep.sweep import run_sweep
from blockcompact_jax.sweep.trace_runs import TRACE_OPTIONS, TraceRuns, complete_trace_run
from blockcompact_jax.traces.scores import BlockScores
from blockcompact_jax.traces.store import write_trace
from blockcompact_jax.traces.study import StudyOptions, rounded, study_trace
from blockcompact_jax.traces.trace import AttentionTrace

SETTINGS = ["block_tokens=8", "scored_queries=4", "reselect_every_tokens=8", "budget=4b,6b"]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "tiny.npz"
    write_trace(path, AttentionTrace(**trace_cases.parts()))
    return path


def command(trace, *more):
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    return ["sweep", "--trace", str(trace), *settings, "--set", "policy=attention,recency", *more]


def test_MON_1_a_trace_is_swept_stored_and_resumed_without_torch(trace, tmp_path):
    """MON-1: rows with seed, configuration, sources, machine and the trace's hash; resumable."""
    refuse = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in {'torch', 'transformers'}:\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from blockcompact_jax.cli import main; main()"
    )
    for said in ("4 configurations, 0 done before, 0 failed", "4 configurations, 4 done before"):
        done = subprocess.run(
            [sys.executable, "-P", "-c", refuse, *command(trace)],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "120"},
            timeout=300,
        )
        assert said in done.stdout, done.stderr
    rows = read_rows(tmp_path / "sweep.jsonl")
    assert len(rows) == 4
    assert {row["weights"] for row in rows} == {sha256_of(trace)}
    for row in rows:
        options = dict(row["configuration"])
        assert set(options) == {"trace", *TRACE_OPTIONS}
        assert options["trace"] == "tiny.npz"
        chosen = StudyOptions(
            block_tokens=8,
            scored_queries=4,
            reselect_every_tokens=8,
            budget=Budget(blocks=int(options["budget"][:-1])),
            policy=options["policy"],
        )
        scores = BlockScores(AttentionTrace(**trace_cases.parts()))
        assert row["report"]["study"] == rounded(study_trace(scores, chosen))
        assert (row["report"]["model"], row["report"]["weights"]) == ("tiny", "llama@00")


def test_MON_1_rows_of_a_trace_are_compared_and_shown(trace, tmp_path):
    """MON-1, MON-2: `sweep diff` names what a trace gave otherwise; the monitor has its columns."""
    out = tmp_path / "a.jsonl"
    shown = CliRunner(env={"COLUMNS": "120"}).invoke(app, command(trace, "--out", str(out)))
    assert shown.exit_code == 0, shown.output
    assert "mass kept" in shown.stdout
    rows = read_rows(out)
    changed = json.loads(json.dumps(rows))
    changed[1]["report"]["study"]["mass_kept"] = 0.5
    difference = compare_sweeps(rows, changed)
    assert [list(row["changed"]) for row in difference["rows"]] == [
        [],
        ["study.mass_kept"],
        [],
        [],
    ]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))
    told = CliRunner(env={"COLUMNS": "120"}).invoke(
        app, ["sweep", "diff", str(out), str(tmp_path / "b.jsonl")]
    )
    assert told.exit_code == 0, told.output
    assert "study.mass_kept" in told.stdout
    runs = read_results(out).runs
    assert [run["study.mass_kept"] for run in runs] == [
        row["report"]["study"]["mass_kept"] for row in rows
    ]
    assert runs[0]["budget_share"] == pytest.approx(4 * 8 / 90)
    costs = [value for name, value in runs[0].items() if name.startswith("cost.")]
    assert costs  # nothing was moved: unmeasured, not 0
    assert not any(costs)
    assert 0 not in costs


def test_MON_1_results_of_another_trace_of_that_name_are_not_mixed(trace, tmp_path):
    """MON-1: the hash of the file is part of what a row says of itself."""
    out = tmp_path / "a.jsonl"
    assert CliRunner().invoke(app, command(trace, "--out", str(out))).exit_code == 0
    write_trace(trace, AttentionTrace(**trace_cases.parts(forced=29)))
    done = CliRunner().invoke(app, command(trace, "--out", str(out)))
    assert isinstance(done.exception, CompactionError)
    assert "other files of the model or trace" in str(done.exception)


@pytest.mark.parametrize(
    ("configuration", "said"),
    [
        ({"context": 9}, "`context` is no option of a sweep"),
        ({"policy": "best"}, "`policy` is 'best'"),
        ({"block_tokens": "1.5"}, "`block_tokens` is '1.5' in the sweep, expected a whole number"),
        ({"head_reduction": "median"}, "`head_reduction` is 'median' .* max, mean, sum"),
        ({"layer_budget": "none"}, "`layer_budget` is 'none' .* pyramid, score_mass, uniform"),
        ({"sink_blocks": -1}, "`sink_blocks` is -1"),
        ({"budget": "0b"}, "`budget` got 0 blocks"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_runs(tmp_path, configuration, said):
    with pytest.raises(OptionError, match=said):
        complete_trace_run(configuration, trace=tmp_path / "t.npz")


def test_a_configuration_is_complete_and_typed(tmp_path):
    path = tmp_path / "t.npz"
    found = complete_trace_run({"budget": 0.5, "resident_margin": "1"}, trace=path)
    options = {name: found[name] for name in TRACE_OPTIONS}
    assert found == {"trace": "t.npz", **options} == complete_trace_run(options, trace=path)
    assert (found["budget"], found["resident_margin"]) == ("50%", 1.0)
    assert (found["head_reduction"], found["layer_budget"]) == ("mean", "uniform")


def test_a_trace_that_cannot_be_read_is_refused_before_anything_is_written(tmp_path):
    out = tmp_path / "a.jsonl"
    for more in ([], ["--dry-run"]):
        done = CliRunner().invoke(app, command(tmp_path / "no.npz", "--out", str(out), *more))
        assert isinstance(done.exception, CompactionError)
        assert "cannot be read" in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_that_does_not_fit_the_trace_fails_alone(trace, tmp_path):
    """MON-1: its row says why; the others ran."""

    class Quiet:
        def on_stage(self, name, total):
            pass

        def on_progress(self, done):
            pass

    configurations = [
        complete_trace_run({"block_tokens": 8, "scored_queries": scored}, trace=trace)
        for scored in (4, 9)
    ]
    results = ResultFile(tmp_path / "a.jsonl")
    summary = run_sweep(configurations, engine=TraceRuns(trace), results=results, observer=Quiet())
    ((failed, error),) = summary.failures
    assert failed["scored_queries"] == 9
    assert "the trace has 8 queries" in error
