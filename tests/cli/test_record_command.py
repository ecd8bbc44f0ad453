"""`blockcompact record` and the kinds of `sweep`: what is refused, in one line, before any work."""

import re

import pytest
from typer.testing import CliRunner

from blockcompact_jax.cli.app import app
from blockcompact_jax.cli.errors import UserError
from blockcompact_jax.errors import CompactionError
from torch_bridge.models.errors import ModelError


def refusal(*arguments):
    done = CliRunner().invoke(app, list(arguments))
    assert isinstance(done.exception, UserError | CompactionError | ModelError), done.exception
    assert "\n" not in str(done.exception)
    return str(done.exception)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="needs the [models] extra: transformers")
    monkeypatch.chdir(tmp_path)

    def load(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("torch_bridge.models.load.load_model", load)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["t.json"], "`trace` is 't.json'; give a file whose name ends in .npz"),
        (["t.npz", "--layers", "0,x"], "`layers` is '0,x'; give decoder layer IDs"),
        (["t.npz", "--layers", ""], "`layers` is ''"),
        (["t.npz", "--dtype", "int8"], "`dtype` is 'int8'"),
        (["t.npz", "--store-dtype", "int8"], "`store_dtype` is 'int8'"),
        (["t.npz", "--context", "8"], "`context_queries` is 16, expected at most the 8"),
        (["file/t.npz"], "'file/t.npz', but .*file' is no folder"),
    ],
)
def test_a_wrong_option_is_refused_before_a_model_is_loaded(folder, arguments, said):
    (folder / "file").write_text("")
    assert re.search(said, refusal("record", *arguments))
    assert [each.name for each in folder.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--trace", "t.npz", "--task", "code"], "`--trace` and `--task` are both given"),
        (["--task", "haystack"], "`tasks` is 'haystack'.*blockcompact sweep --help"),
        (["--task", "code", "--set", "policy=random"], "`policy` is no option.*docs/sweep.md"),
        (["--trace", "t.npz", "--set", "context=9"], "`context` is no option.*docs/sweep.md"),
        (["--task", "code", "--set", "model=nosuch", "--dry-run"], "not a known model name"),
    ],
)
def test_a_sweep_of_another_kind_is_refused_before_anything_runs(folder, arguments, said):
    assert re.search(said, refusal("sweep", *arguments))
    assert list(folder.iterdir()) == []


def test_a_dry_run_of_tasks_lists_its_configurations():
    done = CliRunner().invoke(app, ["sweep", "--task", "code,needle", "--dry-run"])
    assert done.exit_code == 0, done.output
    assert done.stdout.count('"tasks": "needle,code"') == 3
