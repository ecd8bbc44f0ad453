"""Wrong arguments of `blockcompact check` and `monitor`: refused by name."""

import json
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


@pytest.mark.parametrize("options", [[], ["--checks", "c.json", "p.jsonl"]])
def test_without_the_contracts_there_must_be_something_else_to_show(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["monitor", *options])
    assert isinstance(done.exception, UserError), done.exception
    assert "`docs` is 'docs/contracts.md', which is no file; run in a checkout" in str(
        done.exception
    )
    assert list(tmp_path.iterdir()) == []


def test_results_are_shown_outside_of_a_checkout_and_their_names_are_no_patterns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A file whose name looks like a pattern is that file, even where the pattern names another."""
    monkeypatch.chdir(tmp_path)
    for name in ("b[1].json", "b1.json"):
        rows = [{"job": name, "median_us": 1.0}]
        (tmp_path / name).write_text(json.dumps({"machine": {"processor": "p"}, "results": rows}))
    done = CliRunner().invoke(app, ["monitor", "b[1].json"])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "monitor.html").read_text()
    assert '"job"' in page
    assert "b[1].json" in page
    assert "b1.json" not in page
    assert CliRunner().invoke(app, ["monitor", "b?.json"]).exit_code == 0
    assert "b1.json" in (tmp_path / "monitor.html").read_text()


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
