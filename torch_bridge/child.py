"""Child processes that do not outlive what started them. Needs no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_GRACE_SECONDS = 10.0


class _SignalledError(BaseException):
    """Unwinds a block of `Children`; no `except Exception` on the way takes it for a fault."""


class Children:
    """A block whose child processes end with it, and at a SIGTERM or SIGHUP of this process.

    Such a signal unwinds the block from where it waits for a child, so that temporary folders
    inside it are removed; then this process ends by the signal, as it would have without a child.
    That needs the main thread, and a signal with its default action; elsewhere signals are left as
    they are. Nothing can be done at a SIGKILL of this process: its children and folders stay.
    """

    def __init__(self) -> None:
        """Nothing is changed before the block begins."""
        self._children: list[subprocess.Popen[Any]] = []
        self._ours: list[signal.Signals] = []
        self._received: int | None = None
        self._is_waiting = False

    def __enter__(self) -> Children:
        """Begins to hear the signals."""
        if threading.current_thread() is threading.main_thread():
            self._ours = [each for each in _SIGNALS if signal.getsignal(each) is signal.SIG_DFL]
        for each in self._ours:
            signal.signal(each, self._hear)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends what still runs, then this process if it was told to end."""
        self._is_waiting = False
        for child in self._children:
            _end(child)
        for each in self._ours:
            signal.signal(each, signal.SIG_DFL)
        if self._received is not None:
            os.kill(os.getpid(), self._received)

    @contextmanager
    def start(
        self, command: Sequence[str], **options: Any
    ) -> Generator[subprocess.Popen[Any], None, None]:
        """Runs a command beside this process; at the end of the block it is over.

        A child that still runs then is terminated, and killed where it does not end soon.

        Args:
            command: the program and its arguments.
            **options: of `subprocess.Popen`.

        Yields:
            The child.
        """
        # A signal that comes before the child is known could not end it: it waits until then.
        child: subprocess.Popen[Any] = subprocess.Popen(command, **options)
        self._children.append(child)
        try:
            self._is_waiting = True
            if self._received is not None:
                raise _SignalledError
            yield child
        finally:
            self._is_waiting = False
            _end(child)

    def _hear(self, signum: int, _: FrameType | None) -> None:
        self._received = signum
        if self._is_waiting:
            self._is_waiting = False  # another signal does not disturb the unwinding
            raise _SignalledError


def _end(child: subprocess.Popen[Any]) -> None:
    """Terminates and waits, for a limited time and at most until a KeyboardInterrupt."""
    if child.poll() is not None:
        return
    child.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_SECONDS)
    finally:
        child.kill()  # nothing where it has ended
        child.wait()
