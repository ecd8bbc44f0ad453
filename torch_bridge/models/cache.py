"""The user's model cache: one directory a model, with a manifest of its files. Needs no torch."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import platformdirs

from blockcompact_jax.provenance import sha256_of
from torch_bridge.models.errors import DamagedModelError
from torch_bridge.models.progress import SilentObserver, StageObserver

MANIFEST_NAME = "manifest.json"
MANIFEST_FORMAT = 1
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class CachedFile:
    """Size and SHA-256 digest of one file of a cached model."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a cached model is, where it came from, and what each of its files must be.

    Attributes:
        name: Short name of the model.
        requirements: Packages it was made from, pinned.
        gguf_sha256: Digest of the GGUF file it was converted from.
        licence: Name of the licence or terms.
        files: Every file of the directory but the manifest, by name.
    """

    name: str
    requirements: tuple[str, ...]
    gguf_sha256: str
    licence: str
    files: dict[str, CachedFile]


def cache_directory() -> Path:
    """The cache's root: `BLOCKCOMPACT_CACHE` when set, else the platform's user cache."""
    override = os.environ.get("BLOCKCOMPACT_CACHE")
    if override:
        return Path(override).expanduser().absolute()
    return Path(platformdirs.user_cache_dir("blockcompact", appauthor=False))


def model_directory(name: str) -> Path:
    """Where the model with the short name `name` lies once fetched."""
    return cache_directory() / "models" / name


def is_fetched(name: str) -> bool:
    """Whether anything, whole or damaged, is cached for the short name `name`."""
    return model_directory(name).exists()


def write_manifest(directory: Path, **facts: Any) -> Manifest:
    """Describe every file of `directory` in its manifest.

    Args:
        directory: A complete model directory without a manifest.
        **facts: The fields of `Manifest` except `files`.

    Returns:
        The manifest written.
    """
    files = {
        path.name: CachedFile(size_bytes=path.stat().st_size, sha256=sha256_of(path))
        for path in sorted(directory.iterdir())
    }
    manifest = Manifest(files=files, **facts)
    content = {"format": MANIFEST_FORMAT, **asdict(manifest)}
    (directory / MANIFEST_NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return manifest


def read_manifest(name: str) -> Manifest:
    """Read the manifest of a cached model and compare the size of every file with it.

    Args:
        name: Short name of a model that is fetched.

    Returns:
        The manifest.

    Raises:
        DamagedModelError: The manifest is missing, unreadable or of another format, or a file is
            missing or has another size.
    """
    directory = model_directory(name)
    try:
        content = json.loads((directory / MANIFEST_NAME).read_text(encoding="utf-8"))
        if content.pop("format") != MANIFEST_FORMAT:
            raise _damaged(name, f"`{MANIFEST_NAME}` has another format")
        content["requirements"] = tuple(content["requirements"])
        content["files"] = {key: CachedFile(**value) for key, value in content["files"].items()}
        manifest = Manifest(**content)
    except FileNotFoundError:
        raise _damaged(name, f"`{MANIFEST_NAME}` is missing") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, DamagedModelError):
            raise
        raise _damaged(name, f"`{MANIFEST_NAME}` cannot be read") from error
    for file_name, expected in manifest.files.items():
        path = directory / file_name
        if not path.is_file():
            raise _damaged(name, f"`{file_name}` is missing")
        size_bytes = path.stat().st_size
        if size_bytes != expected.size_bytes:
            raise _damaged(
                name, f"`{file_name}` has {size_bytes} bytes, expected {expected.size_bytes}"
            )
    return manifest


def verify_files(name: str, observer: StageObserver | None = None) -> Manifest:
    """Compare the size and the SHA-256 digest of every file of a cached model with its manifest.

    Args:
        name: Short name of a model that is fetched.
        observer: Hears the progress, in bytes.

    Returns:
        The manifest.

    Raises:
        DamagedModelError: As `read_manifest`, or a digest differs.
    """
    observer = observer or SilentObserver()
    manifest = read_manifest(name)
    observer.on_stage(f"verifying {name}", sum(f.size_bytes for f in manifest.files.values()))
    done_bytes = 0
    for file_name, expected in manifest.files.items():
        digest = hashlib.sha256()
        with (model_directory(name) / file_name).open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                done_bytes += len(chunk)
                observer.on_progress(done_bytes)
        if digest.hexdigest() != expected.sha256:
            raise _damaged(name, f"`{file_name}` has another SHA-256 than when it was fetched")
    return manifest


def damaged_remedy(name: str) -> str:
    """What to do about a damaged cached model."""
    return f"fetch it again with `blockcompact models fetch {name} --force`"


def _damaged(name: str, what: str) -> DamagedModelError:
    return DamagedModelError(
        f"the cached model {name!r} in {model_directory(name)} is damaged: {what}; "
        f"{damaged_remedy(name)}"
    )
