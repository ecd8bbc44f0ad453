"""Child processes end with what started them, in real processes; a named pipe tells that they did.

Each child holds the pipe open, so its end is read as the end of the pipe.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from torch_bridge import child as child_module
from torch_bridge.child import Children

CHILD = ["/bin/sh", "-c", "exec 5>fifo; echo $$ >&5; exec sleep 600"]
DEAF = ["/bin/sh", "-c", "trap '' TERM HUP; exec 5>fifo; echo $$ >&5; exec sleep 600"]

WAITING = """
import json, sys, tempfile
from torch_bridge.child import Children

with Children() as children, tempfile.TemporaryDirectory(dir=".", prefix="scratch-"):
    with children.start(json.loads(sys.argv[1])) as child:
        child.wait()
"""

# The signal comes as soon as the child runs, before anything here knows of it.
STARTING = """
import signal, subprocess, sys

class Signalled(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        open("fifo").readline()
        signal.raise_signal(signal.Signals[sys.argv[2]])

subprocess.Popen = Signalled
"""


def start(program, command, *arguments, cwd):
    os.mkfifo(cwd / "fifo")
    text = "[" + ", ".join(f'"{word}"' for word in command) + "]"
    return subprocess.Popen(
        [
            *("env", "--default-signal=HUP,INT,TERM", sys.executable, "-P", "-c", program),
            *(text, *arguments),
        ],
        cwd=cwd,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_ends_a_waiting_process_its_child_and_its_folder(tmp_path, name):
    process = start(WAITING, CHILD, cwd=tmp_path)
    with (tmp_path / "fifo").open() as pipe:
        pipe.readline()
        assert len(list(tmp_path.glob("scratch-*"))) == 1
        process.send_signal(signal.Signals[name])
        assert process.communicate(timeout=60)[1] == ""
        assert process.returncode == -signal.Signals[name]
        assert pipe.read() == ""
    assert list(tmp_path.glob("scratch-*")) == []


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_while_a_child_starts_ends_it_too(tmp_path, name):
    process = start(STARTING + WAITING, CHILD, name, cwd=tmp_path)
    with (tmp_path / "fifo").open() as pipe:
        assert process.communicate(timeout=60)[1] == ""
        assert process.returncode == -signal.Signals[name]
        assert pipe.read() == ""
    assert list(tmp_path.glob("scratch-*")) == []


def test_a_deaf_child_is_killed(tmp_path, monkeypatch):
    """The end of a block does not wait for it without a limit."""
    monkeypatch.setattr(child_module, "_GRACE_SECONDS", 0.1)
    os.mkfifo(tmp_path / "fifo")
    with Children() as children, children.start(DEAF, cwd=tmp_path) as child:
        (tmp_path / "fifo").open().readline()
    assert child.returncode == -signal.SIGKILL


def test_signals_that_are_ignored_are_left():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Children():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_no_child_runs_when_an_error_leaves_the_block(tmp_path):
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.raises(ValueError, match="anything"),
        Children() as children,
        children.start(["sleep", "600"], cwd=Path(folder)) as child,
    ):
        raise ValueError("anything")
    assert child.returncode == -signal.SIGTERM
