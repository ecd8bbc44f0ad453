"""Signals and closed pipes in real processes: one line at most, never a traceback."""

import os
import signal
import subprocess
import sys

import pytest

# Sends the signal as the import of a module begins, so that no time has to be guessed.
PROGRAM = """
import os, signal, sys

class AtImport:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["AT_IMPORT"]:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.Signals[os.environ["SIGNAL"]])

sys.meta_path.insert(0, AtImport())
from blockcompact_jax.cli import main
main()
"""


def start(*arguments, tmp_path, name="SIGINT", at_import="", **options):
    return subprocess.Popen(
        # Where the tests run in the background of a shell, children ignore Ctrl-C.
        ["env", "--default-signal=INT", sys.executable, "-P", "-c", PROGRAM, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "SIGNAL": name, "AT_IMPORT": at_import},
        **options,
    )


@pytest.mark.parametrize("module", ["typer", "jax", "jaxlib.xla_client", "jax._src.core"])
@pytest.mark.parametrize(
    ("name", "code", "said"),
    [("SIGINT", 130, "\ninterrupted\n"), ("SIGTERM", -signal.SIGTERM, "")],
)
def test_a_signal_while_libraries_load_ends_the_command(module, name, code, said, tmp_path):
    process = start("simulate", "--steps", "1", tmp_path=tmp_path, name=name, at_import=module)
    assert process.communicate(timeout=120)[1] == said
    assert process.returncode == code


def test_an_interrupt_while_an_engine_loads_ends_the_command(tmp_path):
    pytest.importorskip("transformers")
    process = start("run", tmp_path=tmp_path, at_import="torch")
    assert process.communicate(timeout=120)[1] == "\ninterrupted\n"
    assert process.returncode == 130


def test_an_ignored_ctrl_c_stays_ignored(tmp_path):
    """So does `nohup` and a shell's background."""
    process = subprocess.Popen(
        ["env", "--ignore-signal=INT", sys.executable, "-P", "-c", PROGRAM, "--version"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "SIGNAL": "SIGINT", "AT_IMPORT": "typer"},
    )
    assert process.communicate(timeout=120)[0].startswith("blockcompact-jax ")
    assert process.returncode == 0


@pytest.mark.parametrize(
    "arguments", [("--help",), ("info",), ("simulate", "--steps", "1000", "--json")]
)
def test_a_closed_pipe_ends_the_command_quietly(arguments, tmp_path):
    process = start(*arguments, tmp_path=tmp_path, stdout=subprocess.PIPE)
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait(timeout=120) == 1
    assert said in {"", "simulating 1 worlds\n"}


def test_the_command_line_does_not_wait_for_jax(tmp_path):
    """JAX takes a second to import; help, versions and refusals need none of it."""
    for arguments in (("--help",), ("run", "--help"), ("models", "list"), ("run", "--no-option")):
        process = start(*arguments, tmp_path=tmp_path, at_import="jax", stdout=subprocess.DEVNULL)
        said = process.communicate(timeout=120)[1]
        assert process.returncode in {0, 2}, said
