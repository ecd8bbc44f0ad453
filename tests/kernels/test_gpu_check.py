"""The device check itself, with a made-up and an emulated device: time on a real one is dear."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from blockcompact_jax.kernels import Layout
from blockcompact_jax.kernels.native import load_native

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


@pytest.fixture
def gpu_check(monkeypatch):
    """The script, without its work on pools: no test but one waits for that."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.gpu_pools, "SMALL_CASES", [])
    monkeypatch.setattr(module.gpu_pools, "timings", lambda _: {})
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
    status, report = run(gpu_check, monkeypatch, capsys, MadeUpDevice(), "--json", str(out))
    assert status == 0
    assert report == json.loads(out.read_text())
    assert report["device"] == "made up"
    assert report["machine"]["num_cpus"] > 0
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


def emulated_memory(device, spoil=None):
    """The component's class for memory of a device, of numpy memory of the emulated one.

    `spoil`: what happens to the bytes that are read.
    """

    class DeviceMemory:
        def __init__(self, num_bytes):
            self.array = np.zeros(num_bytes, np.uint8)
            self.address = self.array.ctypes.data
            device.add_memory(self.address, num_bytes, 0)

        def __del__(self):
            device.remove_memory(self.address)

        def write(self, array):
            self.array[: array.nbytes] = array.reshape(-1)

        def read(self, array):
            device.run_all()
            array.reshape(-1)[:] = self.array[: array.nbytes]
            if spoil is not None:
                spoil(array.reshape(-1))

    return DeviceMemory


@pytest.fixture
def pool_checks(gpu_check, monkeypatch):
    """The work on pools, on sizes for the emulated device."""
    module = importlib.reload(gpu_check.gpu_pools)
    monkeypatch.setattr(module, "LARGE_CASE", module.PoolCase(Layout.AMX, 3, 4, 1, 32, 32))
    monkeypatch.setattr(module, "NUM_RUNS", 2)
    return module


def test_all_pool_checks_pass_on_the_emulated_device(
    gpu_check, pool_checks, device, monkeypatch, capsys
):
    made_up = MadeUpDevice()
    made_up.DeviceMemory = emulated_memory(device)
    status, report = run(gpu_check, monkeypatch, capsys, made_up)
    assert report["unequal_pools"] == []
    assert status == 0
    pools = report["pools"]
    jobs = {result["job"]: result for result in pools["results"]}
    assert {"pinned_memcpy", "start_pool_upload", "both at once"} < set(jobs)
    assert sum(job.startswith(("attend", "score")) for job in jobs) == 4
    assert all(len(result["samples_us"]) == 2 for result in jobs.values())
    assert all(result["bytes"] > 0 for result in jobs.values())
    assert pools["case"]["layout"] == "amx"
    assert np.isfinite(pools["hidden_share_of_the_shorter"])
    assert load_native().num_pools() == 0


def test_pools_with_wrong_bytes_are_status_1(gpu_check, pool_checks, device, monkeypatch, capsys):
    def spoil(read):
        read[-1] ^= 64  # an exponent

    made_up = MadeUpDevice()
    made_up.DeviceMemory = emulated_memory(device, spoil)
    monkeypatch.setattr(pool_checks, "timings", lambda _: {})
    monkeypatch.setattr(pool_checks, "SMALL_CASES", pool_checks.SMALL_CASES[1:2])
    status, report = run(gpu_check, monkeypatch, capsys, made_up)
    assert status == 1
    assert report["is_correct"] is False
    calls = report["unequal_pools"][0]["calls"]
    assert {"upload", "start_pool_upload", "block_move", "attend_blocks", "score_blocks"} <= set(
        calls
    )
