"""The command line as a user runs it, in processes of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Refuses the import of the optional packages, as if they were not installed.
_WITHOUT_EXTRAS = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "gguf", "vllm"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
import importlib.util
real = importlib.util.find_spec
def find_spec(name, package=None):
    try:
        return real(name, package)
    except ModuleNotFoundError:
        return None
importlib.util.find_spec = find_spec
"""


def _blockcompact(
    *arguments: str, cache: Path, prelude: str = ""
) -> subprocess.CompletedProcess[str]:
    program = f"{prelude}\nfrom blockcompact_jax.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "BLOCKCOMPACT_CACHE": str(cache), "COLUMNS": "100"},
    )


def _one_error_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("models", "list"), ("info",)])
def test_works_without_the_optional_packages(arguments: tuple[str, ...], tmp_path: Path):
    done = _blockcompact(*arguments, cache=tmp_path, prelude=_WITHOUT_EXTRAS)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "--contxt", "3"), "No such option: --contxt"),
        (("run", "--context", "abc"), "'--context': Input should be a valid integer"),
        (("run", "--context", "abc"), ", got 'abc' (see"),
        (("run", "--ranks", "0"), ", got '0' (see"),
        (("serve", "--port", "70000"), ", got '70000' (see"),
        (("bogus",), "No such command 'bogus'"),
        (("models", "fetch"), "Missing argument"),
        (("sweep", "--set"), "requires an argument (see `blockcompact sweep --help`)"),
        (("run", "--context"), "requires an argument (see `blockcompact run --help`)"),
        (("sweep", "diff", "a", "--jso"), "No such option: --jso"),
    ],
)
def test_a_wrong_option_is_one_line_that_names_the_help(
    arguments: tuple[str, ...], said: str, tmp_path: Path
):
    line = _one_error_line(_blockcompact(*arguments, cache=tmp_path))
    assert said in line
    assert "--help`)" in line


@pytest.mark.parametrize("arguments", [(), ("models",)])
def test_no_command_shows_the_help(arguments: tuple[str, ...], tmp_path: Path):
    done = _blockcompact(*arguments, cache=tmp_path)
    assert done.returncode == 2
    assert "Usage:" in done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [("run",), ("models", "fetch", "smollm2-135m")])
def test_missing_extra_is_one_line_with_the_remedy(arguments: tuple[str, ...], tmp_path: Path):
    line = _one_error_line(_blockcompact(*arguments, cache=tmp_path, prelude=_WITHOUT_EXTRAS))
    assert "torch" in line
    assert "pip install 'blockcompact-jax[models]'" in line


def test_help_does_not_import_torch(tmp_path: Path):
    prelude = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules))"
    done = _blockcompact("--help", cache=tmp_path, prelude=prelude)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("run", "--budget", "0"), "`budget`"),
        (("run", "--policy", "best"), "`policy`"),
        (("run", "--dtype", "int8"), "`dtype`"),
        (("run", "--prompt", ""), "`prompt` is empty"),
        (("run", "--prompt", "a", "--prompt-file", "b"), "`prompt_file`"),
        (("run", "--prompt-file", "no-such-file"), "cannot be read"),
        (("models", "fetch", "smollm2"), "did you mean 'smollm2-135m'"),
    ],
)
def test_bad_request_is_one_line(arguments: tuple[str, ...], named: str, tmp_path: Path):
    assert named in _one_error_line(_blockcompact(*arguments, cache=tmp_path))


@pytest.mark.parametrize("option", ["--context", "--new-tokens", "--block-tokens", "--seed"])
def test_number_out_of_range_names_the_option(option: str, tmp_path: Path):
    done = _blockcompact("run", option, "-1", cache=tmp_path)
    assert done.returncode == 2
    assert option in done.stderr


def test_info_json_is_one_object_with_every_part(tmp_path: Path):
    done = _blockcompact("info", "--json", cache=tmp_path)
    facts = json.loads(done.stdout)
    assert set(facts) == {"versions", "native", "cuda", "jax_devices", "engines", "cache"}
    assert facts["versions"]["jax"]
    assert facts["cache"]["directory"] == str(tmp_path)
    assert {model["state"] for model in facts["cache"]["models"]} == {"not fetched"}


def test_models_list_shows_a_damaged_model_with_the_remedy(tmp_path: Path):
    (tmp_path / "models" / "smollm2-135m").mkdir(parents=True)
    done = _blockcompact("models", "list", "--json", cache=tmp_path)
    states = {state["name"]: state for state in json.loads(done.stdout)}
    assert states["smollm2-135m"]["state"] == "damaged"
    assert "blockcompact models fetch smollm2-135m --force" in states["smollm2-135m"]["problem"]
    assert states["gemma3-270m"]["state"] == "not fetched"


def test_fetch_of_a_damaged_model_is_refused_with_the_remedy(tmp_path: Path):
    pytest.importorskip("transformers")
    (tmp_path / "models" / "smollm2-135m").mkdir(parents=True)
    line = _one_error_line(_blockcompact("models", "fetch", "smollm2-135m", cache=tmp_path))
    assert "blockcompact models fetch smollm2-135m --force" in line


def test_a_native_module_that_does_not_load_is_one_line(tmp_path: Path):
    program = (
        "from blockcompact_jax.cli import app, main\n"
        "from blockcompact_jax.kernels.native import load_native\n"
        "app.app = lambda **_: load_native()\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "BLOCKCOMPACT_NUM_THREADS": "foo"},
        cwd=tmp_path,
    )
    assert "BLOCKCOMPACT_NUM_THREADS is 'foo'" in _one_error_line(done)
