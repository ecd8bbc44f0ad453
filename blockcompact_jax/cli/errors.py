"""Errors a user can act on, and the one place where they end."""

import errno
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130
INTERRUPTED = "\ninterrupted"
"""What stderr says at Ctrl-C; it begins a line, for the terminal has shown ^C."""

_OUR_PACKAGES = frozenset({"blockcompact_jax", "torch_bridge"})


class UserError(Exception):
    """A request that cannot be served as given. The message is one line and says the remedy."""


@contextmanager
def error_boundary() -> Generator[None]:
    """End the process with one clear line for an expected error, and quietly for Ctrl-C.

    Expected are `UserError`, this project's own kinds of `ValueError` and `ImportError` and a full
    disk; anything else is a fault of the program and keeps its traceback. With
    BLOCKCOMPACT_DEBUG=1 all tracebacks
    are shown.

    Raises:
        SystemExit: With `EXIT_REFUSED` or `EXIT_INTERRUPTED`.
    """
    try:
        yield
    except KeyboardInterrupt:
        if is_debug():
            raise
        print(INTERRUPTED, file=sys.stderr)
        raise SystemExit(EXIT_INTERRUPTED) from None
    except Exception as error:
        if not _is_expected(error) or is_debug():
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(EXIT_REFUSED) from None


def require_modules(command: str, modules: tuple[str, ...], *, extra: str) -> None:
    """Check that the modules a command needs are installed, without importing them.

    Args:
        command: The command for people, such as "blockcompact run".
        modules: Top-level import names.
        extra: The optional dependency group that installs them.

    Raises:
        UserError: Some are missing.
    """
    missing = [module for module in modules if find_spec(module) is None]
    if not missing:
        return
    names = ", ".join(missing[:-1]) + " and " + missing[-1] if len(missing) > 1 else missing[0]
    verb = "are" if len(missing) > 1 else "is"
    raise UserError(
        f"`{command}` needs {names}, which {verb} not installed; "
        f"install with: pip install 'blockcompact-jax[{extra}]'"
    )


def _is_expected(error: Exception) -> bool:
    if isinstance(error, UserError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOSPC
    return isinstance(error, ValueError | ImportError) and _package_of(error) in _OUR_PACKAGES


def _package_of(error: Exception) -> str:
    return type(error).__module__.partition(".")[0]


def is_debug() -> bool:
    """Whether tracebacks are asked for."""
    return os.environ.get("BLOCKCOMPACT_DEBUG", "") not in {"", "0"}
