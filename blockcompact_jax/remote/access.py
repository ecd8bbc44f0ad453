"""Who may talk to a server: a random bearer token in a file that only its user can read."""

from __future__ import annotations

import os
import secrets
import stat
import time
from pathlib import Path

from blockcompact_jax.errors import CompactionError

TOKEN_VARIABLE = "BLOCKCOMPACT_TOKEN"
_MIN_CHARACTERS = 32
_SERVER_REMEDY = "give `--token-file` with a new path, and the server makes one"
_CLIENT_REMEDY = "give `--token-file` with the file that `blockcompact serve` was started with"
_EPOCH_START_SECONDS = 1_767_225_600  # 2026-01-01: int32 lasts 17 years in quarters of a second.


def new_process_epoch() -> int:
    """Returns an epoch that no earlier start of a server had (CAP-4)."""
    return max(1, int((time.time() - _EPOCH_START_SECONDS) * 4))


def create_or_read_token(path: Path | None) -> str:
    """Returns the server's token: the file's, a new one in a new file, or the environment's.

    Raises:
        CompactionError: There is no file and no variable, others could read the file, or it
            cannot be made.
    """
    if path is None or path.exists():
        return _read(path, remedy=_SERVER_REMEDY)
    token = secrets.token_urlsafe(32)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise CompactionError(
            f"`token_file` {path} cannot be made ({error.strerror}); give a path in a folder that "
            "exists and is yours."
        ) from error
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(token + "\n")
    except OSError:
        path.unlink()  # On a full disk; half a token would be refused ever after.
        raise
    return token


def read_token(path: Path | None) -> str:
    """Returns a client's token: the one of the server's file, or of the environment without one.

    Raises:
        CompactionError: It is missing, too short, or others could read it.
    """
    if path is not None and not path.exists():
        raise CompactionError(
            f"`token_file` {path} does not exist; {_CLIENT_REMEDY}. It makes a missing one."
        )
    return _read(path, remedy=_CLIENT_REMEDY)


def _read(path: Path | None, *, remedy: str) -> str:
    if path is None:
        token = os.environ.get(TOKEN_VARIABLE, "")
        source = f"The variable {TOKEN_VARIABLE}"
    else:
        if not path.is_file():
            raise CompactionError(f"`token_file` {path} is no file; {remedy}.")
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise CompactionError(
                f"`token_file` {path} can be read by others; run `chmod 600` on it, or {remedy}."
            )
        token = path.read_text(encoding="utf-8", errors="replace").strip()
        source = f"`token_file` {path}"
    if len(token) < _MIN_CHARACTERS or not token.isascii() or not token.isprintable():
        raise CompactionError(
            f"{source} has no token of at least {_MIN_CHARACTERS} characters; {remedy}."
        )
    return token
