"""Contracts, the tests that name them, and what became of them."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.monitor import run_record
from blockcompact_jax.monitor.checks import check_contracts, count_states
from blockcompact_jax.monitor.contracts import numbers_in, parse_contracts

from .conftest import DOCUMENT

OWN_DOCUMENT = Path(__file__).parents[2] / "docs" / "contracts.md"


def checks_of(project, *results):
    return check_contracts(
        document=project / "docs" / "contracts.md",
        tests=project / "tests",
        results=results,
        seed=3,
        command=[],
    )


def states_of(checks):
    return {contract["number"]: contract["state"] for contract in checks["contracts"]}


def test_MON_2_contracts_are_read_from_the_document():
    """MON-2: bullets and sentences define, mentions do not; text is joined over lines."""
    contracts = {contract.number: contract for contract in parse_contracts(DOCUMENT)}
    numbers = ["ABC-1", "ABC-2", "ABC-3", "ABC-4", "ABC-12", "XYZ-1", "XYZ-2"]
    assert list(contracts) == numbers
    assert contracts["ABC-1"].text == "One thing, over two lines (see XYZ-1)."
    assert contracts["XYZ-1"].text == "never a silent zero."
    assert contracts["XYZ-2"].family_title == "last things"


@pytest.mark.skipif(not OWN_DOCUMENT.exists(), reason="not a source checkout")
def test_MON_2_every_number_of_the_projects_own_document_is_found():
    """MON-2: none of this project's contracts is lost by the reader."""
    text = OWN_DOCUMENT.read_text(encoding="utf-8")
    mentioned = set(numbers_in(text))
    assert {contract.number for contract in parse_contracts(text)} == mentioned


def test_MON_2_plain_prose_in_a_section_defines_nothing():
    """MON-2: a paragraph or a bullet without a number is no contract and no fault."""
    document = (
        "## ABC — a\nPlain prose, as in ABC-1.\n\n- a plain bullet in UTF-8\n- ABC-1 One thing.\n"
    )
    assert [contract.text for contract in parse_contracts(document)] == ["One thing."]


def test_numbers_are_whole_words():
    found = numbers_in("SEL-3 test_DIF_4_x xSEL-5 SEL-6a SEL-77, (COM-8) SEL-3 USEL-1")
    assert found == ("SEL-3", "DIF-4", "SEL-77", "COM-8")


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("# nothing", "has no contract"),
        ("## ABC — a\n- ABC-1 x\n- ABC-1 y\n", "defines ABC-1 twice"),
        ("## ABC — a\n- XYZ-1 x\n", "in the section of ABC"),
        ("## ABC — a\n- ABC-1 x\n- **ABC-2** y\n", "names a number and defines none"),
        ("## ABC — a\n- ABC-1 x\n- ABC_2 y\n", "names a number and defines none"),
        ("## ABC — a\nPlain prose.\n", "has no contract"),
    ],
)
def test_a_broken_document_is_refused(document, said):
    with pytest.raises(CompactionError, match=said):
        parse_contracts(document)


def test_MON_2_a_contract_has_the_state_of_the_tests_that_name_it(project, run_tests):
    """MON-2, MON-3: held, failed, skipped and never named, each as what it is."""
    checks = checks_of(project, run_tests())
    assert states_of(checks) == {
        "ABC-1": "held",
        "ABC-2": "failed",
        "ABC-3": "not run",
        "ABC-4": "not run",
        "ABC-12": "not run",
        "XYZ-1": "failed",
        "XYZ-2": "held",
    }
    rows = {contract["number"]: contract for contract in checks["contracts"]}
    assert rows["ABC-1"]["tests"] == ["tests/area/test_things.py::test_ABC_1_in_the_name"]
    assert rows["ABC-2"]["num_cases"] == {"passed": 1, "failed": 1, "skipped": 0}
    assert rows["ABC-3"]["reasons"] == ["no device here"]
    assert rows["ABC-4"]["reasons"] == ["no test names it"]
    assert count_states(checks) == {"held": 2, "failed": 2, "not run": 3}
    assert checks["unknown_numbers"] == {
        "XYZ-5": ["tests/area/test_things.py::TestGroup::test_of_a_class"]
    }
    areas = {area["area"]: area["state"] for area in checks["areas"]}
    assert areas == {"area": "failed", "gpu": "not run"}


def test_MON_3_tests_that_the_run_left_out_are_not_passed(project, run_tests):
    """MON-3: a result file that does not mention a test says nothing about its contracts."""
    checks = checks_of(project, run_tests("tests", "-k", "ABC_1"))
    states = states_of(checks)
    assert states.pop("ABC-1") == "held"
    assert set(states.values()) == {"not run"}


def test_MON_3_one_environment_adds_to_another_and_hides_no_failure(project, run_tests):
    """MON-3: of two runs, the one with the device makes the contract held; a failure stays."""
    without = run_tests()
    path = project / "tests" / "area" / "test_things.py"
    path.write_text(path.read_text().replace('pytest.skip("no device here")', "pass"))
    checks = checks_of(project, without, run_tests("tests", "-k", "ABC_3"))
    assert (states_of(checks)["ABC-3"], states_of(checks)["ABC-2"]) == ("held", "failed")
    assert checks["changed_after_the_run"] == ["tests/area/test_things.py"]


def test_MON_3_a_pass_with_other_sources_holds_nothing(project, run_tests, monkeypatch):
    """MON-3: what passed is another program's evidence once a source or the test has changed."""
    results = run_tests()
    assert states_of(checks_of(project, results))["ABC-1"] == "held"
    other = project / "tests" / "area" / "test_other.py"
    other.write_text("def test_nothing(): pass\n")
    checks = checks_of(project, results)
    assert states_of(checks)["ABC-1"] == "held"
    assert checks["changed_after_the_run"] == ["tests/area/test_other.py"]
    (project / "ffi").mkdir()
    (project / "ffi" / "x.cc").write_text("int x;")
    checks = checks_of(project, results)
    rows = {contract["number"]: contract for contract in checks["contracts"]}
    assert (rows["ABC-1"]["state"], rows["ABC-2"]["state"]) == ("not run", "failed")
    assert rows["ABC-1"]["reasons"] == ["passed, but ffi/x.cc was another then (1 files differ)"]
    (project / "ffi" / "x.cc").unlink()
    module = project / "module.py"
    module.write_text("x = 1\n")
    known = run_record.python_files()
    monkeypatch.setattr(
        run_record, "python_files", lambda: {**known, "blockcompact_jax/new.py": module}
    )
    checks = checks_of(project, results)
    assert states_of(checks)["ABC-1"] == "not run"
    assert "blockcompact_jax/new.py" in checks["changed_after_the_run"]


def test_MON_3_results_that_do_not_say_what_they_tested_hold_nothing(project, run_tests):
    """MON-3: an XML of any age, without a record, is no evidence for these sources."""
    (project / "tests" / "conftest.py").write_text("")
    results = run_tests()
    checks = checks_of(project, results)
    assert "held" not in states_of(checks).values()
    assert states_of(checks)["ABC-2"] == "failed"
    assert checks["origins"][str(results)] == {"machine": None, "versions": None, "sources": None}


def test_MON_3_a_module_that_cannot_be_imported_fails_its_contracts(project, run_tests, write_test):
    """MON-3: no test of a broken module ran, and the board does not hide why."""
    write_test("test_broken.py", "import absent_module\ndef test_ABC_4(): pass\n")
    write_test(
        "test_skipped.py",
        """
        import pytest
        pytest.importorskip("absent_module", reason="needs absent_module")
        def test_ABC_12_x(): pass
        """,
    )
    checks = checks_of(project, run_tests("tests", "--continue-on-collection-errors"))
    assert states_of(checks)["ABC-4"] == "failed"
    rows = {contract["number"]: contract for contract in checks["contracts"]}
    assert (rows["ABC-12"]["state"], rows["ABC-12"]["reasons"]) == (
        "not run",
        ["needs absent_module"],
    )


def test_MON_3_an_expected_failure_holds_nothing(project, run_tests, write_test):
    """MON-3: xfail is not a pass."""
    write_test(
        "test_expected.py",
        """
        import pytest
        @pytest.mark.xfail(reason="known")
        def test_ABC_4_x(): assert False
        """,
    )
    assert states_of(checks_of(project, run_tests()))["ABC-4"] == "not run"


def test_MON_2_every_source_is_there_with_its_hash(project, run_tests):
    """MON-2: document, test files and result files can be told from any other."""
    results = run_tests()
    checks = checks_of(project, results)
    for name in ("docs/contracts.md", "tests/area/test_things.py", results.name):
        expected = hashlib.sha256((project / name).read_bytes()).hexdigest()
        assert checks["sources"][name] == expected
    assert checks["changed_after_the_run"] == []
    ((path, origin),) = checks["origins"].items()
    assert path == str(results)
    assert set(origin["sources"]) == {"blockcompact_jax", "torch_bridge"}
    assert origin["machine"]["num_cpus"] >= 1
    assert origin["versions"]["python"]
    assert checks["seed"] == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [("no xml", "no JUnit XML"), ("<testsuites/>", "holds no test result"), (None, "cannot be")],
)
def test_unusable_results_are_refused(project, text, said):
    results = project / "results.xml"
    if text is not None:
        results.write_text(text)
    with pytest.raises(CompactionError, match=said):
        checks_of(project, results)


def command(project, *arguments):
    program = "from blockcompact_jax.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-P", "-c", program, "check", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=project,
        timeout=120,
    )


def test_MON_2_the_command_runs_the_tests_and_writes_the_file(project):
    """MON-2: one command from a checkout; a failed contract ends with 1."""
    done = command(project, "--run", "--pytest-args", "-q")
    assert done.returncode == 1, done.stderr
    checks = json.loads((project / "contract_checks.json").read_text())
    assert states_of(checks)["ABC-1"] == "held"
    assert checks["sources"]["contract_checks.junit.xml"]
    assert "2 held, 2 failed, 3 not run" in done.stdout


def test_the_command_says_what_it_needs(project):
    done = command(project)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--run" in done.stderr
