"""Files that commands write: checked before the work, and no traceback where one fails after it."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from .errors import UserError


def check_writable(name: str, path: Path) -> None:
    """Refuse a path that no file can be written to, before the work. Changes nothing.

    Args:
        name: The option it was given with, such as "out".
        path: The file; it and its folders need not exist.

    Raises:
        UserError: It is a folder, or it or the folder that would hold it is not writable.
    """
    if path.is_dir():
        raise UserError(f"`{name}` is {str(path)!r}, which is a folder; give a file")
    existing = path.absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    is_there = existing == path.absolute()
    if not is_there and not existing.is_dir():
        raise UserError(
            f"`{name}` is {str(path)!r}, but {str(existing)!r} is no folder; give another path"
        )
    if not os.access(existing, os.W_OK if is_there else os.W_OK | os.X_OK):
        raise UserError(
            f"`{name}` is {str(path)!r}, but {str(existing)!r} cannot be written to; give another "
            "path"
        )


@contextmanager
def refused_writes(name: str, path: Path) -> Generator[None]:
    """Turn a failure to write a file into one clear line.

    Raises:
        UserError: An `OSError` was raised inside.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"`{name}` is {str(path)!r}, which cannot be written ({error.strerror or error}); give "
            "another path"
        ) from error


def write_output(name: str, path: Path, text: str) -> None:
    """Write a result to a file, and the folders to it.

    Args:
        name: The option it was given with.
        path: The file; what it held is replaced.
        text: All of its content.

    Raises:
        UserError: It cannot be written.
    """
    with refused_writes(name, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
