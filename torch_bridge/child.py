"""A child process that does not outlive what started it. Needs no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def child_process(
    command: Sequence[str], **options: Any
) -> Generator[subprocess.Popen[Any], None, None]:
    """Runs a command beside this process; at the end of the block it is over.

    A child that still runs then is terminated and waited for. So it is, without waiting, at a
    SIGTERM of this process, which ends as it would have without a child. That needs the main thread
    and a process that handles no SIGTERM by itself; elsewhere SIGTERM is left as it is.

    Args:
        command: the program and its arguments.
        **options: of `subprocess.Popen`.

    Yields:
        The child.
    """
    children: list[subprocess.Popen[Any]] = []

    def terminate() -> None:
        for child in children:
            child.terminate()  # nothing where it has ended

    with _before_sigterm(terminate):
        child: subprocess.Popen[Any] = subprocess.Popen(command, **options)
        children.append(child)
        try:
            yield child
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()


@contextmanager
def _before_sigterm(act: Callable[[], None]) -> Generator[None, None, None]:
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(signum: int, _: FrameType | None) -> None:
        act()
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
