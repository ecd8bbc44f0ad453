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


def test_the_guides_table_of_quality_is_that_of_the_file():
    """Every cell of the table, and the tokens kept beside each: equal budgets keep unequal ones."""
    guide = (SCRIPTS.parent / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    lines = guide.partition("## Quality")[2].partition("\n## ")[0].splitlines()
    table = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][2:]
    results = json.loads((SCRIPTS / "results" / "quality.json").read_text())["results"]
    expected = {}
    for row in sorted(results, key=lambda row: row["budget"]):
        cells = expected.setdefault(row["method"], [])
        median_digits = 4 if row["budget"] == 0.5 else 3
        cells += [f"{row['num_kept_tokens']:,.0f}", f"{row['kl']:.3f}"]
        cells.append(f"{row['kl_median']:.{median_digits}f}")
        cells += [f"{row['top1']:.2f}", f"{row['needle_recall']:.2f}"]
    assert {name: cells for name, *cells in table} == expected


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
