"""`blockcompact check`: the state of every contract, from the tests that name it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .errors import UserError, require_modules
from .interrupts import unwind_from_now_on
from .outputs import check_writable, refused_writes, write_output

EXIT_FAILED = 1
_PYTEST_RAN = frozenset({0, 1})
"""Exit codes of a pytest that ran its tests: all passed, or some failed."""


def check(  # noqa: PLR0917  # options, in the order --help shows them
    results: Annotated[
        list[Path] | None,
        typer.Option(help="JUnit XML of a test run; repeat it for runs in other environments."),
    ] = None,
    is_run: Annotated[
        bool, typer.Option("--run", help="Run pytest on the tests first, and use its results too.")
    ] = False,
    pytest_args: Annotated[
        str, typer.Option(help="Further arguments of that pytest, such as '-m \"not slow\"'.")
    ] = "",
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of that pytest's Hypothesis (--hypothesis-seed).")
    ] = 0,
    docs: Annotated[Path, typer.Option(help="The contracts.")] = Path("docs/contracts.md"),
    tests: Annotated[Path, typer.Option(help="Folder of the tests.")] = Path("tests"),
    json_path: Annotated[Path, typer.Option("--json", help="File to write the checks to.")] = Path(
        "contract_checks.json"
    ),
) -> None:
    """Say of each contract whether tests that name it passed, failed, or did not run.

    A test names a contract where its number stands in the test's name or docstring. Ends with 1 if
    a contract failed. Contracts that did not run are shown as such and are no failure.
    """
    from blockcompact_jax.monitor.checks import check_contracts

    if not docs.is_file():
        raise UserError(f"`docs` is {str(docs)!r}, which is no file; run in a checkout")
    if not tests.exists():
        raise UserError(f"`tests` is {str(tests)!r}, which does not exist; run in a checkout")
    if not results and not is_run:
        raise UserError("no `results` are given; add --results FILE, or --run to run the tests")
    check_writable("json", json_path)
    found, command = list(results or ()), list[str]()
    if is_run:
        own = json_path.with_suffix(".junit.xml")
        command = _run_pytest(tests, own, seed=seed, pytest_args=pytest_args)
        found.append(own)
    checks = check_contracts(
        document=docs,
        tests=tests,
        results=found,
        seed=seed if is_run and not results else None,
        command=command,
    )
    text = json.dumps(checks, indent=1, ensure_ascii=False)
    write_output("json", json_path, text + "\n")
    _print(checks, json_path)
    if any(contract["state"] == "failed" for contract in checks["contracts"]):
        raise typer.Exit(EXIT_FAILED)


def _run_pytest(tests: Path, junit: Path, *, seed: int, pytest_args: str) -> list[str]:
    import shlex

    require_modules("blockcompact check --run", ("pytest", "hypothesis"), extra="dev")
    try:
        further = shlex.split(pytest_args)
    except ValueError as error:
        raise UserError(
            f"`pytest-args` is {pytest_args!r}, which cannot be split into words ({error}); close "
            "the quotation"
        ) from error
    with refused_writes("json", junit):
        junit.parent.mkdir(parents=True, exist_ok=True)
    options = [f"--junit-xml={junit.resolve()}", f"--hypothesis-seed={seed}"]
    options += further
    unwind_from_now_on()  # pytest is to end first
    # -P: the working folder may hold sources that would hide the installed package.
    command = [sys.executable, "-P", "-m", "pytest", str(tests), *options]
    done = subprocess.run(command, check=False, stdout=sys.stderr, env=os.environ)
    if done.returncode not in _PYTEST_RAN:
        raise UserError(f"pytest did not run its tests (exit code {done.returncode}); see above")
    return ["python", "-P", "-m", "pytest", str(tests), f"--hypothesis-seed={seed}", *options[2:]]


def _print(checks: dict[str, Any], json_path: Path) -> None:
    from blockcompact_jax.monitor.checks import count_states

    console = Console(highlight=False, markup=False)
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("contract", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("tests", justify="right", no_wrap=True)
    table.add_column("why not, or what did not run", overflow="fold")
    styles = {"held": "green", "failed": "bold red", "not run": "yellow"}
    for contract in checks["contracts"]:
        table.add_row(
            contract["number"],
            contract["state"],
            str(len(contract["tests"])),
            "; ".join(contract["reasons"][:2]) if contract["state"] != "held" else "",
            style=styles[contract["state"]] if contract["state"] != "held" else None,
        )
    console.print(table)
    areas = [area for area in checks["areas"] if area["state"] == "not run"]
    for area in areas:
        why = "; ".join(area["reasons"][:2]) or "no result"
        console.print(f"tests not run: {area['area']} ({why})")
    for number, labels in checks["unknown_numbers"].items():
        console.print(f"not in the document: {number}, named by {labels[0]}")
    if checks["changed_after_the_run"]:
        console.print(
            f"changed after the run: {len(checks['changed_after_the_run'])} files; run again"
        )
    counts = ", ".join(f"{number} {state}" for state, number in count_states(checks).items())
    console.print(f"{counts}; written to {json_path}")
