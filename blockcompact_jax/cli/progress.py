"""Progress on stderr and generated text on stdout, for a terminal and for anything else."""

import sys
import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from .interrupts import unwind_from_now_on

_LINE_INTERVAL_SECONDS = 15.0


class ProgressObserver(Protocol):
    """What a command reports its stages to; a context manager that ends the last stage."""

    def on_stage(self, name: str, total: int | None) -> None:
        """A stage begins, and ends the one before."""
        ...

    def on_progress(self, done: int) -> None:
        """`done` steps of the current stage are complete."""
        ...

    def on_text(self, piece: str) -> None:
        """The next piece of generated text."""
        ...

    def __enter__(self) -> Self:
        """Begin to show."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop showing; the terminal is as before."""
        ...


def make_observer(*, is_text_shown: bool = False) -> ProgressObserver:
    """The observer that suits stderr: live bars on a terminal, sparse lines elsewhere.

    The work begins: Ctrl-C unwinds from here on.

    Args:
        is_text_shown: Whether generated text is written to stdout.
    """
    unwind_from_now_on()
    console = Console(stderr=True)
    return (
        LiveObserver(console, is_text_shown=is_text_shown)
        if console.is_terminal
        else LineObserver(is_text_shown=is_text_shown)
    )


class _TextWriter:
    """Writes generated text to stdout, and ends its line when something else follows."""

    def __init__(self, *, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._is_line_open = False

    def write(self, piece: str) -> None:
        if self._is_shown and piece:
            sys.stdout.write(piece)
            sys.stdout.flush()
            self._is_line_open = not piece.endswith("\n")

    def end_line(self) -> None:
        if self._is_line_open:
            self.write("\n")


class LiveObserver:
    """One live line on a terminal. While text streams there is none: they would overwrite it."""

    def __init__(self, console: Console, *, is_text_shown: bool) -> None:
        self._console = console
        self._text = _TextWriter(is_shown=is_text_shown)
        self._is_text_shown = is_text_shown
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._stage: tuple[str, int | None] = ("", None)
        self._start = 0.0

    def on_stage(self, name: str, total: int | None) -> None:
        """End the live line of the stage before and begin one."""
        self._end_stage()
        self._stage, self._start = (name, total), time.monotonic()
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            *((BarColumn(), TaskProgressColumn()) if total else ()),
            TimeElapsedColumn(),
            *((TextColumn("left"), TimeRemainingColumn()) if total else ()),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task(name, total=total)
        self._progress.start()

    def on_progress(self, done: int) -> None:
        """Move the bar."""
        if self._progress is not None:
            self._progress.update(self._task, completed=done)

    def on_text(self, piece: str) -> None:
        """Write the text, after taking the live line away."""
        if self._is_text_shown and self._progress is not None:
            self._progress.stop()
            self._progress = None
        self._text.write(piece)

    def _end_stage(self) -> None:
        self._text.end_line()
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        name, _ = self._stage
        if name:
            seconds = time.monotonic() - self._start
            self._console.print(
                f"{name}: {seconds:.1f} s", style="dim", markup=False, highlight=False
            )
        self._stage = ("", None)

    def __enter__(self) -> Self:
        """Nothing is shown before the first stage."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the last stage; after an error it counts as not done."""
        if error is not None:
            self._stage = ("", None)
        self._end_stage()


class LineObserver:
    """A plain line at the start of each stage, and now and then how far it is."""

    def __init__(self, *, is_text_shown: bool) -> None:
        self._text = _TextWriter(is_shown=is_text_shown)
        self._stage: tuple[str, int | None] = ("", None)
        self._start = 0.0
        self._last_line = 0.0

    def on_stage(self, name: str, total: int | None) -> None:
        """Say what begins."""
        self._text.end_line()
        self._stage, self._start = (name, total), time.monotonic()
        self._say(name)

    def on_progress(self, done: int) -> None:
        """Say how far it is and what is left, if the last line is long ago."""
        name, total = self._stage
        now = time.monotonic()
        if total and done and now - self._last_line >= _LINE_INTERVAL_SECONDS:
            left = (now - self._start) * (total - done) / done
            self._say(f"{name}: {done / total:.0%}, about {left:.0f} s left")

    def on_text(self, piece: str) -> None:
        """Write the text."""
        self._text.write(piece)

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        """Nothing is shown before the first stage."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End an open line of text."""
        self._text.end_line()
