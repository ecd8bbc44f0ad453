"""Ctrl-C: ends the process at once while libraries load; unwinds it once work is done."""

import _thread
import os
import signal
import sys
import threading
from types import FrameType

from .errors import EXIT_INTERRUPTED, INTERRUPTED, is_debug

_AGAIN_SECONDS = 0.02


def end_while_loading() -> None:
    """End the process at once on Ctrl-C, until `unwind_from_now_on`.

    Nothing needs tidying while libraries load, and an exception that lands in the start of a native
    one is dropped, or aborts the process.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler and not is_debug():
        signal.signal(signal.SIGINT, _end)


def unwind_from_now_on() -> None:
    """Make Ctrl-C a `KeyboardInterrupt` again: there is something to tidy now."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(signum: int, frame: FrameType | None) -> None:
    os.write(2, f"{INTERRUPTED}\n".encode())  # print may be at work below this very frame
    os._exit(EXIT_INTERRUPTED)


def keep_interrupts() -> None:
    """Deliver a Ctrl-C again that Python drops, until it ends the command.

    It is dropped, with a message, where it lands in a callback of the garbage collector, as JAX
    has one, or in a destructor.
    """
    show = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            show(unraisable)
            return
        # From a thread and later: raised here, it would be dropped once more.
        again = threading.Timer(_AGAIN_SECONDS, _thread.interrupt_main)
        again.daemon = True
        again.start()

    sys.unraisablehook = hook
