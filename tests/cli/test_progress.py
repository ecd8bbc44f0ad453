"""What a run shows: text on stdout, progress on stderr, nothing mixed."""

import io

import pytest
from rich.console import Console

from blockcompact_jax.cli import progress
from blockcompact_jax.cli.progress import LineObserver, LiveObserver, make_observer


def test_lines_away_from_a_terminal(capsys: pytest.CaptureFixture[str]):
    with LineObserver(is_text_shown=True) as observer:
        observer.on_stage("prefill", 100)
        observer.on_progress(50)
        observer.on_stage("decode", None)
        observer.on_text("Hello")
        observer.on_text(" world")
    out, err = capsys.readouterr()
    assert out == "Hello world\n"
    assert err == "prefill\ndecode\n"


def test_a_long_stage_says_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    observer = LineObserver(is_text_shown=True)
    observer.on_stage("prefill", 200)
    observer.on_progress(50)
    assert capsys.readouterr().err == "prefill\nprefill: 25%, about 120 s left\n"


@pytest.mark.parametrize("is_live", [False, True])
def test_no_text_on_stdout_when_it_is_not_to_be_shown(
    is_live: bool, capsys: pytest.CaptureFixture[str]
):
    console = Console(file=io.StringIO(), force_terminal=True)
    observer = (
        LiveObserver(console, is_text_shown=False) if is_live else LineObserver(is_text_shown=False)
    )
    with observer:
        observer.on_stage("decode", 2)
        observer.on_text("Hello")
        observer.on_progress(1)
    assert capsys.readouterr().out == ""


def test_live_line_goes_away_before_text(capsys: pytest.CaptureFixture[str]):
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=80)
    with LiveObserver(console, is_text_shown=True) as observer:
        observer.on_stage("decode [x]", 2)
        observer.on_text("Hello")
        shown = terminal.getvalue()
        observer.on_progress(1)
        observer.on_text(" [b]")
        assert terminal.getvalue() == shown
    assert capsys.readouterr().out == "Hello [b]\n"
    assert "decode [x]: 0." in terminal.getvalue()


def test_failed_stage_is_not_reported_as_done():
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=80)
    observer = LiveObserver(console, is_text_shown=True)
    observer.on_stage("prefill", None)
    observer.__exit__(ValueError, ValueError(), None)
    assert "prefill: " not in terminal.getvalue()


def test_observer_suits_stderr():
    assert isinstance(make_observer(), LineObserver)
