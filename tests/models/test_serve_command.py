"""`blockcompact serve` as a user runs it, with a tiny model file, and `run --remote` against it."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

httpx = pytest.importorskip("httpx", reason="needs the [dev] extra: httpx")
pytest.importorskip("fastapi", reason="needs the [remote] extra: fastapi")
pytest.importorskip("transformers", reason="needs the [models] extra: transformers")

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-P", "-c", "from blockcompact_jax.cli import main; main()"]
SIDES = ["--layout", "vec", "--block-tokens", "16"]


@contextmanager
def serving(model, token_file, *options):
    """Starts the command; yields the process and what it printed when it was ready."""
    command = [*COMMAND, "serve", "--model", str(model), "--token-file", str(token_file)]
    process = subprocess.Popen(
        [*command, *SIDES, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def segments_of(pid):
    links = (f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd"))
    return [link for link in links if "blockcompact-" in os.readlink(link)]


def run(model, token_file, url, *options):
    command = [*COMMAND, "run", "--model", str(model), "--token-file", str(token_file), *SIDES]
    command += ["--remote", url, "--prompt", "a b c " * 20, "--context", "80", "--json"]
    command += ["--new-tokens", "12", "--budget", "2b", "--no-compare-full"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *options],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )


def test_a_server_starts_answers_and_ends_clean(write_tiny_gguf, tmp_path):
    """COM-8: SIGTERM with a request open: exit 0, no traceback, nothing left; then a clear line."""
    model, token_file = write_tiny_gguf(), tmp_path / "token"
    with serving(model, token_file, "--copy-area", "64") as (process, ready):
        assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
        headers = {"authorization": f"Bearer {token_file.read_text().strip()}"}
        with httpx.Client(base_url=ready["url"], headers=headers, trust_env=False) as http:
            health = http.get("/v1/health").json()
            assert health["process_epoch"] == ready["process_epoch"]
            message = {
                "process_epoch": ready["process_epoch"],
                "request_id": "r",
                "request_epoch": 1,
                "operation_id": 0,
                "token_ids": list(range(3, 40)),
                "max_tokens": 100,
                "num_draft_tokens": 4,
            }
            assert http.post("/v1/prefill", json=message, timeout=60).status_code == 200
            assert len(segments_of(process.pid)) > 0
            metrics = http.get("/metrics").text
            assert "blockcompact_requests 1.0" in metrics
            assert 'blockcompact_messages_total{path="/v1/prefill",status="200"} 1.0' in metrics
        direct = run(model, token_file, ready["url"])
        assert direct.returncode == 0, direct.stderr
        ranked = run(model, token_file, ready["url"], "--ranks", "2", "--copy-fallback")
        assert ranked.returncode == 0, ranked.stderr
        reports = [json.loads(done.stdout) for done in (direct, ranked)]
        assert reports[0]["token_ids"] == reports[1]["token_ids"]
        assert reports[0]["metrics"]["cpu_gather_bytes"] == 0
        assert reports[1]["metrics"]["cpu_gather_bytes"] > 0
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode in {0, -signal.SIGTERM}
        assert "Traceback" not in stderr
    begin = time.monotonic()
    lost = run(model, token_file, ready["url"])
    assert lost.returncode == 2
    assert lost.stderr.splitlines()[-1].startswith("error: The verifier at ")
    assert time.monotonic() - begin < 120


def test_options_that_cannot_be_met_are_one_line(write_tiny_gguf, tmp_path):
    model = write_tiny_gguf()
    for options, words in (
        (["--ranks", "2"], "`--ranks 2` needs a server"),
        (["--copy-fallback"], "`--copy-fallback` needs a server"),
    ):
        done = subprocess.run(
            [*COMMAND, "run", "--model", str(model), *options],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert words in done.stderr
