"""What a sweep may vary, and one sweep with a real model."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from blockcompact_jax.cli.app import app
from torch_bridge.budget import OptionError
from torch_bridge.huggingface.options import RunOptions
from torch_bridge.huggingface.sweep import DEFAULT_GRID, OPTIONS, complete, options_of
from torch_bridge.models.errors import UnknownModelError

PROGRAM = [sys.executable, "-P", "-c", "from blockcompact_jax.cli import main; main()", "sweep"]


def test_a_configuration_is_complete_and_typed():
    configuration = complete({"context": "300", "budget": 16, "compare_full": "false"})
    assert set(configuration) == set(OPTIONS)
    assert (configuration["context"], configuration["budget"]) == (300, "16b")
    assert configuration["compare_full"] is False
    assert complete(configuration) == configuration
    assert options_of(complete({})) == RunOptions()


def test_every_option_of_a_run_but_its_prompt_can_be_swept():
    assert set(OPTIONS.values()) == set(RunOptions.__dataclass_fields__) - {"prompt", "prompt_file"}


@pytest.mark.parametrize(
    ("configuration", "said"),
    [
        ({"contexts": 1}, "`contexts` is no option"),
        ({"context": "many"}, "`context` is 'many' in the sweep, expected a whole number"),
        ({"context": 1.5}, "`context` is 1.5"),
        ({"context": True}, "`context` is True"),
        ({"policy": "best"}, "`policy` is 'best'"),
        ({"budget": "0%"}, "`budget`"),
        ({"budget": "1b"}, "`budget` 1b is less than 1 sink and 1 recent block"),
        ({"layout": "amx", "block_tokens": 20}, "`block_tokens` to be a multiple of 32, got 20"),
        ({"compare_full": "perhaps"}, "`compare_full` is 'perhaps'"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_runs(configuration, said):
    with pytest.raises(OptionError, match=said):
        complete(configuration)


def test_an_unknown_model_is_refused_before_anything_is_fetched(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="needs the [models] extra: transformers")

    def fetch(*_, **__):
        raise AssertionError("a model was fetched")

    monkeypatch.setattr("torch_bridge.models.load.fetch_model", fetch)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["sweep", "--set", "model=smollm2-135m,nosuch"])
    assert isinstance(done.exception, UnknownModelError), done.exception
    assert "'nosuch'" in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_lists_the_default_grid(tmp_path):
    done = subprocess.run(
        [*PROGRAM, "--dry-run"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == len({json.dumps(row) for row in rows}) == 18
    assert {row["policy"] for row in rows} == set(DEFAULT_GRID["policy"])


@pytest.mark.models
@pytest.mark.slow
def test_MON_1_a_sweep_with_a_real_model_is_stored_and_resumed(tmp_path):
    """MON-1: the command runs its grid with one loaded model, and a second call runs nothing."""
    pytest.importorskip("transformers")
    command = [*PROGRAM, "--set", "context=200", "--set", "new_tokens=4"]
    command += ["--set", "budget=4b,100000b", "--set", "policy=attention,recency"]
    for said in ("4 configurations, 0 done before, 0 failed", "4 configurations, 4 done before"):
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=tmp_path, timeout=600
        )
        assert said in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "sweep.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    assert len({tuple(row["report"]["token_ids"]) for row in rows}) == 1
    assert all(row["report"]["tokens_identical_to_full"] for row in rows)
    assert all("process_peak" not in row["report"]["memory_bytes"] for row in rows)
