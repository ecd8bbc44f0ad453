"""A recorded trace and quality tasks of a real model, briefly, by the commands themselves."""

import json
import subprocess
import sys

import pytest

from blockcompact_jax.sweep.store import read_rows

pytestmark = pytest.mark.models

PROGRAM = [sys.executable, "-P", "-c", "from blockcompact_jax.cli import main; main()"]


def run(folder, *arguments):
    done = subprocess.run(
        [*PROGRAM, *arguments], capture_output=True, text=True, check=False, cwd=folder, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_MON_1_a_real_model_is_recorded_and_its_trace_swept(tmp_path):
    """MON-1: one command records, another sweeps; attention to all blocks keeps all of it."""
    pytest.importorskip("transformers", reason="needs the [models] extra: transformers")
    sizes = ["--context", "160", "--forced-tokens", "8", "--layers", "0,29"]
    facts = json.loads(run(tmp_path, "record", "t.npz", *sizes, "--json"))
    assert (facts["layers"], facts["num_tokens"], facts["num_queries"]) == ([0, 29], 168, 24)
    settings = ["--set", "budget=2b,3b,100%", "--set", "policy=attention"]
    run(tmp_path, "sweep", "--trace", "t.npz", *settings)
    kept = [row["report"]["study"]["mass_kept"] for row in read_rows(tmp_path / "sweep.jsonl")]
    assert kept == sorted(kept)
    assert kept[0] < kept[2] == pytest.approx(1, abs=1e-4)


def test_MON_1_a_real_model_answers_tasks_with_all_and_with_selected_blocks(tmp_path):
    """MON-1: with every block an answer is that of full attention; tasks are columns of a row."""
    pytest.importorskip("transformers", reason="needs the [models] extra: transformers")
    settings = ["--set", "budget=100%", "--set", "context=192", "--set", "cases=1"]
    shown = run(tmp_path, "sweep", "--task", "needle,code", *settings)
    assert "1 configurations, 0 done before, 0 failed" in shown
    (row,) = read_rows(tmp_path / "sweep.jsonl")
    tasks = row["report"]["tasks"]
    assert list(tasks) == ["needle", "code"]
    assert tasks["needle"]["token_accuracy_full"] > 0.5
    assert {tasks[name]["agreement"] for name in tasks} == {1.0}
