"""Where errors of a command end: one line or a traceback, and the exit code."""

import subprocess
import sys

import pytest

from blockcompact_jax.cli.errors import UserError, error_boundary, require_modules
from torch_bridge.models.errors import FetchError


def test_user_error_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end, error_boundary():
        raise UserError("`x` is 3, expected 4; give 4")
    assert end.value.code == 2
    assert capsys.readouterr() == ("", "error: `x` is 3, expected 4; give 4\n")


def test_own_value_error_is_one_line(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end, error_boundary():
        raise FetchError("no network")
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: no network\n"


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, KeyError])
def test_a_fault_of_the_program_keeps_its_traceback(kind: type[Exception]):
    with pytest.raises(kind), error_boundary():
        raise kind("fault")


def test_debug_shows_tracebacks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BLOCKCOMPACT_DEBUG", "1")
    with pytest.raises(UserError), error_boundary():
        raise UserError("x")


def test_interrupt_exits_130_without_traceback(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end, error_boundary():
        raise KeyboardInterrupt
    assert end.value.code == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_missing_modules_are_named_with_the_extra():
    with pytest.raises(UserError) as caught:
        require_modules("blockcompact run", ("json", "no_such_a", "no_such_b"), extra="models")
    assert str(caught.value) == (
        "`blockcompact run` needs no_such_a and no_such_b, which are not installed; "
        "install with: pip install 'blockcompact-jax[models]'"
    )
    require_modules("blockcompact run", ("json",), extra="models")


_INTERRUPTED_IN_THE_COLLECTOR = """
import gc, signal, time
from blockcompact_jax.cli import app, interrupts, main

def interrupt(phase, info):
    gc.callbacks.remove(interrupt)
    signal.raise_signal(signal.SIGINT)

def command(**_):
    interrupts.unwind_from_now_on()
    gc.callbacks.append(interrupt)
    gc.collect()
    for _ in range(200):
        time.sleep(0.1)

signal.signal(signal.SIGINT, signal.default_int_handler)
app.app = command
main()
"""


def test_an_interrupt_in_a_callback_of_the_collector_ends_the_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-P", "-c", _INTERRUPTED_IN_THE_COLLECTOR],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (130, "\ninterrupted\n")
