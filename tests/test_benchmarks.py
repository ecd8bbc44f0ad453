"""Benchmark scripts run end to end on tiny sizes; nothing here looks at a time."""

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "benchmarks"


def test_kernels_benchmark_checks_every_answer_and_stores_every_sample(tmp_path):
    pytest.importorskip("torch")
    results = tmp_path / "kernels.json"
    command = [sys.executable, str(SCRIPTS / "kernels.py"), "--quick", "--json", str(results)]
    subprocess.run([*command, "--only", "B=32"], check=True, capture_output=True, cwd=tmp_path)
    document = json.loads(results.read_text())
    assert set(document["versions"]) >= {"jax", "numpy", "torch"}
    assert document["machine"]["simd"]
    jobs = {row["workload"].split(":")[0] for row in document["results"]}
    assert jobs >= {"upload", "pack", "gather", "block_move"}
    for row in document["results"]:
        assert row["samples_us"]
        assert row["bytes"] > 0
        assert row["median_us"] > 0


def test_kernels_benchmark_refuses_to_time_a_wrong_answer(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("kernels_benchmark", SCRIPTS / "kernels.py")
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    calls = {kernels.OURS: lambda _: [1, 2], "torch": lambda _: [1, 3]}
    with pytest.raises(SystemExit, match="torch gave other bytes; nothing was timed"):
        kernels.check_bytes(calls, "upload")


def test_the_guides_tables_of_quality_are_those_of_the_file(monkeypatch):
    """Every cell: all means of each setting, and each text's at the smallest budget."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    tables = importlib.import_module("quality_rows")
    guide = (SCRIPTS.parent / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    chapter = guide.partition("## Quality")[2].partition("\n## ")[0]
    found = [line for line in chapter.splitlines() if line.startswith("| ")]
    expected = []
    path = SCRIPTS / "results" / "quality.json"
    if not path.exists():
        pytest.skip("not a source checkout")
    results = json.loads(path.read_text())["results"]
    names = ("model", "dtype", "context_tokens")
    for setting in dict.fromkeys(tuple(row[name] for name in names) for row in results):
        rows = [row for row in results if tuple(row[name] for name in names) == setting]
        expected += tables.mean_table(rows)
        expected += tables.text_table(rows, min(row["budget"] for row in rows))
    assert found == expected


def test_planning_benchmark_refuses_to_time_a_wrong_answer(monkeypatch):
    """Every rival's answer is compared with a stable sort's, tied scores included."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    rivals = importlib.import_module("planning_rivals")
    workload = rivals.Workload(layers=2, blocks=40, wanted=9)
    for has_ties in (False, True):
        inputs = rivals.make_inputs(workload, has_ties=has_ties)
        answer = rivals.numpy_rank(workload, inputs)()
        rivals.check("numpy", answer, inputs.expected)
        answer[1, 0] += 1
        with pytest.raises(SystemExit, match="numpy gives a wrong answer, so nothing is timed"):
            rivals.check("numpy", answer, inputs.expected)


def test_planning_benchmark_notices_other_processes(monkeypatch):
    """A machine is shared where others took processor time; unknown where it cannot be read."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    load = importlib.import_module("planning_load")
    readings = iter([(0.0, 0.0, 0.0), (10.0, 9.0, 8.5), (0.0, 0.0, 0.0), (10.0, 9.0, 2.0)])
    monkeypatch.setattr(load, "_read", lambda: next(readings))
    assert load.Others().were_running() is False
    assert load.Others().were_running() is True
    readings = iter([None, None])
    assert load.Others().were_running() is None
