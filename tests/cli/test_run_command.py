"""`blockcompact run` with the default model, as a user runs it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("transformers")
pytestmark = [pytest.mark.models, pytest.mark.slow]

COMMAND = [sys.executable, "-c", "from blockcompact_jax.cli import main; main()", "run"]
SMALL = ["--context", "200", "--new-tokens", "6", "--budget", "4b"]


def test_json_is_all_there_is_on_stdout():
    done = subprocess.run(
        [*COMMAND, *SMALL, "--json"], capture_output=True, text=True, check=True, timeout=300
    )
    report = json.loads(done.stdout)
    assert len(report["token_ids"]) == 6
    assert report["context_tokens"] == 200
    assert report["budget"] == "4b"
    assert "loading smollm2-135m" in done.stderr
    assert "prefilling 200 tokens" in done.stderr


def test_a_given_text_that_is_cut_is_said_to_be():
    options = ["--context", "40", "--new-tokens", "1", "--budget", "2b", "--no-compare-full"]
    done = subprocess.run(
        [*COMMAND, *options, "--prompt", "one two three " * 30],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert "prefilling the first 40 of 9" in done.stderr  # the 90 words and a token or two


def test_text_streams_to_stdout_and_equals_the_report():
    options = [*COMMAND, *SMALL, "--no-compare-full"]
    shown = subprocess.run(options, capture_output=True, text=True, check=True, timeout=300)
    report = json.loads(
        subprocess.run([*options, "--json"], capture_output=True, check=True, timeout=300).stdout
    )
    assert shown.stdout.startswith(report["text"])


def test_a_report_is_a_page_and_the_course_is_in_the_json_only_where_asked(tmp_path):
    page = tmp_path / "folder" / "run.html"
    options = [*COMMAND, *SMALL, "--no-compare-full", "--reselect-every", "auto"]
    options += ["--report", str(page), "--json"]
    for course in ([], ["--course"]):
        done = subprocess.run(
            [*options, *course], capture_output=True, text=True, check=True, timeout=300
        )
        report = json.loads(done.stdout)
        assert ("course" in report) == bool(course)
        assert report["reselection"]["is_online"] is True
        assert report["reselection"]["num_rounds"] == {
            "unmeasured: fixed period kept": report["num_rounds"]
        }
    assert len(report["course"]["rounds"]["rows"]) == report["num_rounds"]
    assert len(report["course"]["selections"]) == report["num_selections"]
    assert "blockcompact run course" in page.read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--report", "/"], "`report` is '/', which is a folder"),
        (["--costs", "absent.json"], "`reselect-every auto`"),
        (["--costs", "absent.json", "--reselect-every", "auto"], "`costs` is 'absent.json'"),
        (["--reselect-every", "often"], "`reselect-every` is 'often'"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_loaded(options, said):
    done = subprocess.run([*COMMAND, *options], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr


def test_interrupt_ends_a_run_cleanly():
    process = subprocess.Popen(
        # Where the tests run in the background of a shell, children ignore Ctrl-C.
        ["env", "--default-signal=INT", *COMMAND, "--context", "6000"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("loading"):
            break
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(timeout=60) == 130
    assert "Traceback" not in rest
