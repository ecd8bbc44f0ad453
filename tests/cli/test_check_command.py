"""Wrong arguments of `blockcompact check` and `monitor`: refused by name."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from blockcompact_jax.cli.app import app
from blockcompact_jax.cli.errors import UserError


@pytest.mark.parametrize("command", [["check", "--results", "x.xml"], ["monitor"]])
def test_a_folder_in_place_of_the_contracts_is_refused(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [*command, "--docs", "."])
    assert isinstance(done.exception, UserError), done.exception
    assert "`docs` is '.', which is no file" in str(done.exception)


def test_pytest_arguments_with_an_open_quotation_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("hypothesis")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "contracts.md").write_text("")
    options = ["--docs", "contracts.md", "--tests", ".", "--run", "--pytest-args", '-k "unbalanced']
    done = CliRunner().invoke(app, ["check", *options])
    assert isinstance(done.exception, UserError), done.exception
    assert "`pytest-args`" in str(done.exception)
    assert "No closing quotation" in str(done.exception)
