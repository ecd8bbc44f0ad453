"""Paths that cannot be written: refused before the work, by name, and never with a traceback."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from blockcompact_jax.cli.app import app
from blockcompact_jax.cli.errors import UserError
from blockcompact_jax.cli.outputs import check_writable, refused_writes, write_output

WORK = {
    "calibrate": "blockcompact_jax.cli.calibrate._calibrate",
    "compare": "blockcompact_jax.cli.compare._compare",
    "monitor": "blockcompact_jax.monitor.page.build_page",
    "check": "blockcompact_jax.monitor.checks.check_contracts",
    "sweep": "blockcompact_jax.sweep.sweep.run_sweep",
}


@pytest.fixture
def not_to_be_made(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "x" / "out.json"


@pytest.mark.parametrize(
    ("command", "option"),
    [
        *(("calibrate", "out"), ("compare", "out"), ("monitor", "out"), ("check", "json")),
        *(("sweep", "out"), ("sweep", "parquet")),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    command: str,
    option: str,
    not_to_be_made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    if command in {"calibrate", "compare", "sweep"}:
        pytest.importorskip("transformers", reason="needs the [models] extra: transformers")
    if option == "parquet":
        pytest.importorskip("pyarrow", reason="needs the [sweep] extra: pyarrow")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "contracts.md").write_text("")
    further = {
        "monitor": ["--docs", "contracts.md"],
        "check": ["--docs", "contracts.md", "--tests", ".", "--results", "x.xml"],
    }.get(command, [])

    def work(*_: object, **__: object) -> None:
        raise AssertionError("the work began")

    monkeypatch.setattr(WORK[command], work)
    monkeypatch.setattr("torch_bridge.huggingface.sweep.fetch_models", work)
    for path in (tmp_path, not_to_be_made):
        done = CliRunner().invoke(app, [command, f"--{option}", str(path), *further])
        assert isinstance(done.exception, UserError), done.exception
        assert f"`{option}` is {str(path)!r}" in str(done.exception)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_place_without_permission_is_refused(
    is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "out.json" if is_there else tmp_path / "a" / "b" / "out.json"
    if is_there:
        path.write_text("old")
    closed = path if is_there else tmp_path
    monkeypatch.setattr(os, "access", lambda given, _: Path(given) != closed)  # root may write all
    with pytest.raises(UserError, match=r"`out` is .*cannot be written to"):
        check_writable("out", path)
    assert not (tmp_path / "a").exists()


def test_a_new_path_is_fine_and_is_not_made_by_the_check(tmp_path: Path):
    path = tmp_path / "a" / "b" / "out.json"
    check_writable("out", path)
    assert not (tmp_path / "a").exists()
    write_output("out", path, "text\n")
    assert path.read_text() == "text\n"
    check_writable("out", path)


def test_a_write_that_fails_after_the_work_is_one_line(not_to_be_made: Path):
    with pytest.raises(UserError, match=r"`out` is .*which cannot be written"):
        write_output("out", not_to_be_made, "text")
    denied = pytest.raises(UserError, match=r"`out` is .*Permission denied")
    with denied, refused_writes("out", not_to_be_made):
        raise PermissionError(13, "Permission denied")
