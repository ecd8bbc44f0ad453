"""A small project of its own: a document of contracts, tests that name them, and their run."""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest

DOCUMENT = """\
# Contracts

ABC-9 is mentioned here and defined nowhere.

## ABC — first things
- ABC-1 One thing, over
  two lines (see XYZ-1).
- ABC-2 Another thing.
- ABC-3 A third thing.
- ABC-4 A fourth thing.
- ABC-12 A twelfth thing.

## XYZ — last things
Prose about bytes. XYZ-1: never
a silent zero. XYZ-2: two results.

## Other
- XYZ-7 belongs to no family's section.
"""

TESTS = """\
import pytest

def test_ABC_1_in_the_name():
    pass

@pytest.mark.parametrize("value", [1, 2])
def test_in_the_docstring(value):
    '''ABC-2, XYZ-1: both.'''
    assert value == 1

@pytest.mark.gpu
def test_ABC_3_on_a_device():
    pytest.skip("no device here")

class TestGroup:
    def test_of_a_class(self):
        '''XYZ-2 … XYZ-5'''

# ABC-4 in a comment names nothing.
def test_without_a_number():
    '''See test_ABC12_x and ABC-45x.'''
"""


@pytest.fixture(scope="module")
def browser():
    """Not for longer: its event loop runs in this thread until it is closed, where others fail."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs the [dev] extra: playwright"
    )
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no Chromium is installed: not run")
    with playwright.sync_playwright() as driver:
        # Without its sandbox Chromium also starts as root, as in a container; the page is ours.
        started = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def open_html(browser, tmp_path):
    """Opens a page; every message of the console and every request is recorded."""
    contexts = []

    def opened(text, *, width=1200, scheme="light"):
        (tmp_path / "page.html").write_text(text, encoding="utf-8")
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.said, page.asked = [], []
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto((tmp_path / "page.html").as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture
def project(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "contracts.md").write_text(DOCUMENT, encoding="utf-8")
    (tmp_path / "tests" / "area").mkdir(parents=True)
    (tmp_path / "tests" / "area" / "test_things.py").write_text(TESTS)
    (tmp_path / "tests" / "conftest.py").write_text(
        "from blockcompact_jax.monitor.run_record import pytest_sessionstart\n"
    )
    (tmp_path / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\nmarkers = ["gpu: needs a device"]\n'
    )
    return tmp_path


@pytest.fixture
def run_tests(project):
    """Runs pytest on the project, or on some of it, and returns the JUnit XML."""

    def run(*arguments):
        results = project / f"results{len(list(project.glob('results*')))}.xml"
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        subprocess.run(
            [*command, f"--junit-xml={results}", *(arguments or ("tests",))],
            cwd=project,
            check=False,
            capture_output=True,
            env={**os.environ, "PYTEST_ADDOPTS": ""},
        )
        return results

    return run


@pytest.fixture
def write_test(project):
    def write(name, text):
        path = project / "tests" / "area" / name
        path.write_text(textwrap.dedent(text))
        return path

    return write
