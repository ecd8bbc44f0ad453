"""Engines of a sweep: their options, what is refused before anything runs, and vLLM's process."""

import json
import os
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from blockcompact_jax.budget import OptionError
from blockcompact_jax.cli import errors
from blockcompact_jax.cli.app import app
from blockcompact_jax.errors import CompactionError
from torch_bridge.huggingface.sweep import ENGINES, check_models, complete
from torch_bridge.vllm import sweep as vllm
from torch_bridge.vllm.sweep import VllmRunOptions, options_of, run_vllm


def test_a_configuration_of_vllm_has_the_options_that_it_has():
    attend = complete({"engine": "vllm-attend", "budget": 0.1, "context": "300"})
    assert (attend["budget"], attend["context"], attend["policy"]) == ("10%", 300, "attention")
    assert {"layout", "reselect_every", "draft_tokens", "lookup_tokens"}.isdisjoint(attend)
    assert complete(attend) == attend
    lossless = complete({"engine": "vllm-lossless", "draft_tokens": "4"})
    assert set(lossless) == {*attend, "draft_tokens"}


@pytest.mark.parametrize(
    ("engine", "retention", "ownership"),
    [
        ("transformers", "layer_tables", "layer"),
        ("vllm-attend", "layer_tables", "group"),
        ("vllm-retain", "shared_table", "group"),
        ("vllm-lossless", "layer_tables", "group"),
    ],
)
def test_RET_2_an_engine_says_how_it_keeps_and_owns_and_refuses_other_ways(
    engine, retention, ownership
):
    """RET-2, OWN-1: the path and the ownership of a decoding run are those of its engine."""
    assert engine in ENGINES
    found = complete({"engine": engine})
    assert (found["retention"], found["ownership"]) == (retention, ownership)
    assert complete({"engine": engine, "retention": retention, "ownership": ownership}) == found
    with pytest.raises(OptionError, match=f"`retention` is 'union' .* expected '{retention}'"):
        complete({"engine": engine, "retention": "union"})
    other = {"layer": "group", "group": "layer"}[ownership]
    with pytest.raises(OptionError, match=f"`ownership` is '{other}' .* expected '{ownership}'"):
        complete({"engine": engine, "ownership": other})


@pytest.mark.parametrize(
    ("configuration", "said"),
    [
        ({"engine": "tensorrt"}, "`engine` is 'tensorrt', expected one of transformers, vllm-att"),
        ({"engine": "vllm-attend", "layout": "amx"}, "`layout` is given .* no such option"),
        ({"engine": "vllm-attend", "draft_tokens": 4}, "`draft_tokens` .*transformers, vllm-loss"),
        ({"engine": "transformers", "reselect_every_tokens": 8}, "`reselect_every_tokens` is gi"),
        ({"engine": "vllm-attend", "policy": "recency"}, "`policy` is 'recency' .* 'attention'"),
        ({"engine": "vllm-attend", "block_tokens": 16}, "`block_tokens` is 16 .* multiple of 32"),
        ({"engine": "vllm-attend", "reselect_every_tokens": 0}, "`reselect_every_tokens` is 0"),
        ({"engine": "vllm-attend", "dtype": "float16"}, "`dtype` is 'float16'"),
        ({"engine": "vllm-retain", "nothing": 1}, "`nothing` is no option of a sweep"),
    ],
)
def test_what_an_engine_lacks_is_refused_before_anything_runs(configuration, said):
    with pytest.raises(OptionError, match=said):
        complete(configuration)


def test_a_gguf_file_is_refused_for_vllm(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    check_models([{"engine": "transformers", "model": str(path)}])
    with pytest.raises(OptionError, match=r"vLLM reads no \.gguf file"):
        check_models([{"engine": "vllm-attend", "model": str(path)}])


def test_without_vllm_nothing_runs_and_the_extra_is_named(tmp_path, monkeypatch):
    """What is missing is said before a model is fetched or a file is written."""
    pytest.importorskip("transformers", reason="needs the [models] extra: transformers")
    find = errors.find_spec
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "vllm" else find(name))
    monkeypatch.chdir(tmp_path)
    engines = "engine=transformers,vllm-attend"
    done = CliRunner().invoke(app, ["sweep", "--set", engines, "--set", "policy=attention"])
    assert isinstance(done.exception, errors.UserError), done.exception
    assert "needs vllm, which is not installed" in str(done.exception)
    assert "pip install 'blockcompact-jax[vllm]'" in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def fake_program(tmp_path, monkeypatch, body):
    """A module in the place of the one that runs vLLM."""
    (tmp_path / "fake_measured.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(vllm, "_PROGRAM", "fake_measured")


def test_a_configuration_runs_in_a_process_of_its_own(tmp_path, monkeypatch):
    fake_program(
        tmp_path,
        monkeypatch,
        "import json, os, sys\n"
        "found = {'pid': os.getpid(), 'mode': os.environ['VLLM_ENABLE_V1_MULTIPROCESSING']}\n"
        "open(sys.argv[2], 'w').write(json.dumps({**found, 'asked': json.loads(sys.argv[1])}))\n",
    )
    configuration = complete({"engine": "vllm-lossless", "budget": "4b", "context": 100})
    names = vllm.names_of("vllm-lossless")
    chosen = {name: value for name, value in configuration.items() if name in names}
    first, second = (run_vllm(options_of("vllm-lossless", chosen)) for _ in range(2))
    assert len({first["pid"], second["pid"], os.getpid()}) == 3
    assert first["mode"] == "0"
    asked = first["asked"]
    assert (asked["budget"], asked["context_tokens"], asked["num_draft_tokens"]) == ("4b", 100, 8)


def test_relative_paths_mean_the_same_in_that_process(tmp_path, monkeypatch):
    """A local folder that reads like a hub name stays local, a relative PYTHONPATH holds.

    A module of the caller's folder hides none, in that process or in one that it starts.
    """
    (tmp_path / "owner" / "model").mkdir(parents=True)
    (tmp_path / "owner" / "model" / "config.json").write_text("{}")
    (tmp_path / "modules").mkdir()
    (tmp_path / "colorsys.py").write_text("raise ImportError('hidden')")
    body = (
        "import colorsys, json, subprocess, sys\n"
        "from torch_bridge.models.locate import find_model\n"
        "subprocess.run([sys.executable, '-c', 'import colorsys'], check=True)\n"
        "path = find_model(json.loads(sys.argv[1])['model'])\n"
        "found = {'path': path and str(path.resolve())}\n"
        "open(sys.argv[2], 'w').write(json.dumps(found))\n"
    )
    fake_program(tmp_path / "modules", monkeypatch, body)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "modules")
    found = run_vllm(VllmRunOptions(engine="vllm-attend", model="owner/model"))
    assert found["path"] == str((tmp_path / "owner" / "model").resolve())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import sys\nopen(sys.argv[2], 'w').write('{\"error\": \"too long\"}')", "too long"),
        ("import sys\nprint('out of memory')\nsys.exit(9)", r"ended with 9 .*out of memory"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "ended with -9 .*no output"),
    ],
)
def test_a_fault_of_that_process_is_the_rows(tmp_path, monkeypatch, body, said):
    fake_program(tmp_path, monkeypatch, body)
    with pytest.raises(CompactionError, match=said):
        run_vllm(VllmRunOptions(engine="vllm-attend"))


def test_sigterm_ends_that_process_too_and_removes_its_folder(tmp_path, monkeypatch):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    fake_program(
        tmp_path,
        monkeypatch,
        f"import time\nout = open({str(fifo)!r}, 'w')\nout.write('x\\n')\nout.flush()\n"
        "time.sleep(600)\n",
    )
    program = (
        "from torch_bridge.vllm import sweep\n"
        "sweep._PROGRAM = 'fake_measured'\n"
        "sweep.run_vllm(sweep.VllmRunOptions(engine='vllm-attend'))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", program],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    with fifo.open() as pipe:
        pipe.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == -signal.SIGTERM
        assert pipe.read() == ""
    assert list(tmp_path.glob("blockcompact-vllm-*")) == []


def test_a_dry_run_lists_engines_side_by_side(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "g.toml").write_text(
        'context = 512\n[[grid]]\nengine = "transformers"\ndraft-tokens = [4, 8]\n'
        '[[grid]]\nengine = ["vllm-attend", "vllm-retain"]\nreselect-every-tokens = 8\n'
    )
    done = CliRunner().invoke(app, ["sweep", "--file", "g.toml", "--dry-run"])
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["engine"] for row in rows] == [
        "transformers",
        "transformers",
        "vllm-attend",
        "vllm-retain",
    ]
    assert [row.get("reselect_every_tokens") for row in rows] == [None, None, 8, 8]
