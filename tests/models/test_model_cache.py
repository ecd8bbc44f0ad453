"""The model cache: its place, its manifest, and what counts as damaged."""

import hashlib
import json
from pathlib import Path

import pytest

from torch_bridge.models import cache
from torch_bridge.models.errors import DamagedModelError

NAME = "smollm2-135m"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BLOCKCOMPACT_CACHE", str(tmp_path))


def _write_model() -> Path:
    directory = cache.model_directory(NAME)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    cache.write_manifest(
        directory, name=NAME, requirements=("a==1",), gguf_sha256="0" * 64, licence="L"
    )
    return directory


def test_environment_moves_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert cache.model_directory(NAME) == tmp_path / "models" / NAME
    monkeypatch.delenv("BLOCKCOMPACT_CACHE")
    assert cache.cache_directory().name == "blockcompact"


def test_manifest_records_size_and_digest_of_every_file():
    _write_model()
    manifest = cache.verify_files(NAME)
    assert manifest.requirements == ("a==1",)
    assert manifest.files == {
        "config.json": cache.CachedFile(2, hashlib.sha256(b"{}").hexdigest()),
        "model.safetensors": cache.CachedFile(7, hashlib.sha256(b"weights").hexdigest()),
    }


def _cut_weights(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"weight")


def _remove_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def _remove_manifest(directory: Path) -> None:
    (directory / "manifest.json").unlink()


def _cut_manifest(directory: Path) -> None:
    (directory / "manifest.json").write_text("{")


def _replace_manifest(directory: Path) -> None:
    (directory / "manifest.json").write_text("[]")


def _other_format(directory: Path) -> None:
    path = directory / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_cut_weights, "`model.safetensors` has 6 bytes, expected 7"),
        (_remove_config, "`config.json` is missing"),
        (_remove_manifest, "`manifest.json` is missing"),
        (_cut_manifest, "`manifest.json` cannot be read"),
        (_replace_manifest, "`manifest.json` cannot be read"),
        (_other_format, "`manifest.json` has another format"),
    ],
)
def test_damage_is_found_on_every_load(damage, named: str):
    damage(_write_model())
    with pytest.raises(DamagedModelError, match=named) as caught:
        cache.read_manifest(NAME)
    assert "blockcompact models fetch smollm2-135m --force" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_changed_bytes_of_equal_size_are_found_by_verify():
    directory = _write_model()
    (directory / "model.safetensors").write_bytes(b"Weights")
    cache.read_manifest(NAME)
    with pytest.raises(DamagedModelError, match=r"`model.safetensors` has another SHA-256"):
        cache.verify_files(NAME)
