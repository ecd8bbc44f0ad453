"""Real processes that are killed, or that the kernel refuses memory: nothing is left of them."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from blockcompact_jax.remote.errors import RemoteRefusedError
from torch_bridge.huggingface.remote import RemoteSession

from .test_remote_session import client_of, sides
from .tiny import serving, tiny_model

pytestmark = pytest.mark.slow


def wait_until(is_so, *, seconds=60):
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_so()


def is_running(pid):
    """Whether a process exists and is no zombie."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def limited(folder, *, max_file_bytes):
    """Returns a Python that may write no file, nor memory that is one, beyond a size."""
    path = folder / "python"
    blocks = max_file_bytes // 1024  # What `ulimit -f` counts in bash.
    path.write_text(f'#!/bin/bash\nulimit -f {blocks}\nexec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return path


def test_COM_8_a_killed_client_leaves_no_rank_request_or_memory():
    """COM-8: kill -9 of the engine: its ranks end by themselves, the server lets go of the rest."""
    with serving("llama", lease_seconds=3.0) as server:
        command = [sys.executable, "-P", str(Path(__file__).with_name("vanishing.py")), server.url]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
        engine = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            ranks = json.loads(engine.stdout.readline())["ranks"]
            assert len(ranks) == 2
            assert all(map(is_running, ranks))
            assert server.segments() != []
        finally:
            engine.send_signal(signal.SIGKILL)
            engine.wait()
            engine.stdout.close()
        assert wait_until(lambda: not any(map(is_running, ranks)))
        assert wait_until(lambda: server.segments() == [])
        with RemoteSession(**sides(tiny_model("llama")), client=client_of(server)) as session:
            session.prefill(list(range(90)))  # The server goes on.


def test_COM_8_memory_that_the_kernel_refuses_is_one_clear_line(monkeypatch, tmp_path):
    """COM-8: a limit of file sizes stands for full memory: a clear line, and the server goes on."""
    model = tiny_model("llama")
    monkeypatch.setattr(sys, "executable", str(limited(tmp_path, max_file_bytes=100_000)))
    with serving("llama") as server:
        monkeypatch.undo()
        session = RemoteSession(**sides(model), client=client_of(server))
        for _ in range(2):
            with pytest.raises(RemoteRefusedError, match=r"memory is full: .*File too large"):
                session.prefill(list(range(90)))
            assert server.segments() == []
        session.close()


def test_a_disk_that_the_kernel_refuses_leaves_no_half_token(tmp_path):
    """A real process that may write no byte: it fails, and the next start finds no token file."""
    path = tmp_path / "token"
    code = (
        "import pathlib, sys; from blockcompact_jax.remote.access import create_or_read_token; "
        "create_or_read_token(pathlib.Path(sys.argv[1]))"
    )

    command = [str(limited(tmp_path, max_file_bytes=0)), "-P", "-B", "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode != 0
    assert "File too large" in done.stderr
    assert not path.exists()
