"""What a sweep may vary, and one sweep with a real model."""

import itertools
import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from blockcompact_jax.budget import OptionError
from blockcompact_jax.cli.app import app
from blockcompact_jax.sweep.grid import configuration_hash
from blockcompact_jax.sweep.store import SCHEMA, ResultFile
from torch_bridge.huggingface.options import RunOptions
from torch_bridge.huggingface.sweep import (
    DEFAULT_GRID,
    OPTIONS,
    complete,
    model_digests,
    options_of,
)
from torch_bridge.models.errors import UnknownModelError

PROGRAM = [sys.executable, "-P", "-c", "from blockcompact_jax.cli import main; main()", "sweep"]


def test_a_configuration_is_complete_and_typed():
    configuration = complete({"context": "300", "budget": 16, "compare_full": "false"})
    assert set(configuration) == {"engine", *OPTIONS, "retention", "ownership"}
    assert (configuration["context"], configuration["budget"]) == (300, "16b")
    assert configuration["compare_full"] is False
    assert complete(configuration) == configuration
    assert options_of(complete({})) == RunOptions()


def test_every_option_of_a_run_but_its_prompt_can_be_swept():
    files = {"prompt", "prompt_file", "costs_file"}
    assert set(OPTIONS.values()) == set(RunOptions.__dataclass_fields__) - files


@pytest.mark.parametrize(
    ("configuration", "said"),
    [
        ({"contexts": 1}, "`contexts` is no option"),
        ({"context": "many"}, "`context` is 'many' in the sweep, expected a whole number"),
        ({"context": 1.5}, "`context` is 1.5"),
        ({"context": True}, "`context` is True"),
        ({"seed": float("inf")}, "`seed` is inf in the sweep, expected a whole number"),
        ({"seed": float("nan")}, "`seed` is nan in the sweep, expected a whole number"),
        ({"seed": "1" + "0" * 400}, "`seed` is '10{58}… in the sweep, expected a whole number"),
        ({"seed": 10**400}, "`seed` is 10{59}… in the sweep, expected a whole number"),
        ({"seed": 2**63}, "`seed` is 9223372036854775808 .* of 64 bits"),
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


def test_MON_1_a_local_models_files_and_a_hub_models_commit_are_its_digest(tmp_path, monkeypatch):
    """MON-1: other weights under the same path or hub name are told from those before."""
    pytest.importorskip("transformers", reason="needs the [models] extra: transformers")
    weights = tmp_path / "model" / "weights.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"one")
    names = (str(weights.parent), str(weights), "smollm2-135m", "owner/model")
    configurations = [{"model": name} for name in names]
    monkeypatch.setattr("torch_bridge.models.load.hub_revision", {"owner/model": "c0ffee"}.get)
    before = model_digests(configurations)
    assert set(before) == {*names[:2], "owner/model"}
    assert before["owner/model"] == "c0ffee"
    assert model_digests(configurations) == before
    weights.write_bytes(b"other")
    after = model_digests(configurations)
    assert all(after[name] != before[name] for name in names[:2])


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


def test_a_difference_fits_a_terminal_of_80_columns(tmp_path):
    """What does not vary is said once; headings stand on one line, and so does a row."""
    report = {"metrics": {}, "token_ids": [1], "speedup_vs_full": 1.0, "tokens_per_second": 2.0}
    report["tokens_per_second_full"] = 3.0
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, speed in zip(paths, (1.0, 1.5), strict=True):
        results = ResultFile(path)
        for budget, context in itertools.product(("10%", "25%"), (1024, 2048)):
            configuration = complete({"budget": budget, "context": context})
            results.append(
                {
                    "schema": SCHEMA,
                    "configuration": configuration,
                    "configuration_hash": configuration_hash(configuration),
                    "state": "done",
                    "error": None,
                    "created": "2026-01-02T03:04:05+00:00",
                    "wall_seconds": 1.0,
                    "machine": {},
                    "versions": {},
                    "sources": {},
                    "report": {**report, "tokens_per_second": 2 * speed},
                }
            )
    arguments = ["sweep", "diff", *map(str, paths)]
    lines = CliRunner(env={"COLUMNS": "80"}).invoke(app, arguments).stdout.splitlines()
    shared = "in all: engine transformers, model smollm2-135m, dtype float32, policy attention"
    assert shared in lines
    headings = next(line for line in lines if "differs in" in line)
    cells = [cell.strip() for cell in headings.split("┃" if "┃" in headings else "│")]
    assert cells == ["context", "budget", "speedup", "tokens/s", "full tokens/s", "differs in"]
    for context, budget in (("1024", "10%"), ("2048", "10%"), ("1024", "25%"), ("2048", "25%")):
        row = [context, budget, "1.00", "1.50", "1.00"]
        assert any([cell.strip() for cell in line.split("│")][:5] == row for line in lines)


def test_a_dry_run_lists_the_default_grid(tmp_path):
    done = subprocess.run(
        [*PROGRAM, "--dry-run"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == len({json.dumps(row) for row in rows}) == 18
    assert {row["policy"] for row in rows} == set(DEFAULT_GRID["policy"])


@pytest.mark.parametrize(
    ("model", "said"),
    [("nosuch", "not a known model name"), ("./nosuch", "not a file or directory here")],
)
def test_a_dry_run_refuses_an_unknown_model_in_one_line(tmp_path, model, said):
    done = subprocess.run(
        [*PROGRAM, "--dry-run", "--set", f"model={model}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr


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
