"""The device check's own judgement, with a made-up device: time on a real one is dear."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


@pytest.fixture
def gpu_check():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class MadeUpDevice:
    """Answers every check; `slow` and `wrong` name the jobs that are not as they should be."""

    def __init__(self, *, slow=(), wrong=(), is_refusing=True):
        self.slow, self.wrong, self.is_refusing = slow, wrong, is_refusing
        self.num_checks = 0

    def num_devices(self):
        return 1

    def device_name(self):
        return "made up"

    def DeviceCheck(self, **case):
        assert 2 <= case["num_rows"] <= case["num_layers"] * case["num_blocks"]
        return case

    def answer(self, name, case):
        self.num_checks += 1
        heads, tokens, dims, element_bytes = case["shape"]
        num_bytes = case["num_rows"] * 2 * heads * tokens * dims * element_bytes
        kernel_us = 200.0 if name in self.slow else 100.0
        num_runs = case.get("num_runs", 1)
        return name not in self.wrong, num_bytes, [kernel_us] * num_runs, [100.0] * num_runs

    def check_reload(self, case):
        return self.answer("reload", case)

    def check_gather(self, case):
        return self.answer("gather", case)

    def check_move(self, case):
        return self.answer("move", case)

    def check_refusal(self, case):
        return self.is_refusing


def run(gpu_check, monkeypatch, capsys, device, *arguments):
    monkeypatch.setattr(gpu_check, "load_cuda", lambda: device)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *arguments])
    status = gpu_check.main()
    return status, json.loads(capsys.readouterr().out)


def test_all_good_is_status_0_with_every_sample(gpu_check, monkeypatch, capsys, tmp_path):
    out = tmp_path / "results.json"
    status, report = run(gpu_check, monkeypatch, capsys, MadeUpDevice(), "--out", str(out))
    assert status == 0
    assert report == json.loads(out.read_text())
    assert report["device"] == "made up"
    assert report["is_correct"] is report["is_fast_enough"] is True
    timings = report["timings"]
    assert {timing["kernel"] for timing in timings} == {
        "reload_pinned",
        "reload_device",
        "gather",
        "block_move",
    }
    assert all(len(timing["kernel_us"]) == gpu_check.NUM_RUNS for timing in timings)
    assert {timing["row_bytes"] for timing in timings} >= {16 << 10, 64 << 10, 512 << 10}


@pytest.mark.parametrize("job", ["reload", "gather", "move"])
def test_wrong_bytes_are_status_1(job, gpu_check, monkeypatch, capsys):
    status, report = run(gpu_check, monkeypatch, capsys, MadeUpDevice(wrong=(job,)))
    assert status == 1
    assert report["is_correct"] is False
    assert report["unequal_cases"]


def test_a_duplicate_that_is_not_refused_is_status_1(gpu_check, monkeypatch, capsys):
    status, report = run(gpu_check, monkeypatch, capsys, MadeUpDevice(is_refusing=False))
    assert status == 1
    assert report["is_correct"] is False


def test_only_the_reload_of_large_pinned_rows_has_a_limit(gpu_check, monkeypatch, capsys):
    assert run(gpu_check, monkeypatch, capsys, MadeUpDevice(slow=("gather", "move")))[0] == 0
    status, report = run(gpu_check, monkeypatch, capsys, MadeUpDevice(slow=("reload",)))
    assert status == 1
    assert report["is_correct"] is True
    slow = [timing for timing in report["timings"] if not timing["is_fast_enough"]]
    assert {timing["kernel"] for timing in slow} == {"reload_pinned"}
    assert min(timing["row_bytes"] for timing in slow) == 64 << 10
