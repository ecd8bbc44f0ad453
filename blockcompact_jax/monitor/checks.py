"""The state of every contract, joined from the document, the test sources and the results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from blockcompact_jax.monitor.contracts import Contract, parse_contracts
from blockcompact_jax.monitor.named_tests import NamedTest, find_tests
from blockcompact_jax.monitor.outcomes import Outcome, Outcomes, State, read_outcomes
from blockcompact_jax.monitor.run_record import tested_files
from blockcompact_jax.provenance import now, sha256_of

SCHEMA = "blockcompact contract checks, version 2"
_CONTRACT_STATE = {State.FAILED: "failed", State.PASSED: "held", State.NOT_RUN: "not run"}


def check_contracts(
    *, document: Path, tests: Path, results: Sequence[Path], seed: int | None, command: list[str]
) -> dict[str, Any]:
    """Joins what is promised, what tests name it, and what these tests did.

    Args:
        document: the contracts.
        tests: folder of the tests; its parent is the root of all paths.
        results: JUnit XML files of runs of these tests.
        seed: seed of the run; None if it is not known.
        command: what was run; empty if the results were given.

    Returns:
        The contents of `contract_checks.json`, plain JSON values. A contract is "held" where a test
        that names it passed with the sources as they are now and none failed, "failed" where one
        failed, else "not run".

    Raises:
        CompactionError: if one of the files cannot be used.
    """
    root = tests.resolve().parent
    contracts = parse_contracts(document.read_text(encoding="utf-8"))
    named = find_tests(tests.resolve(), root=root)
    outcomes = read_outcomes(results, named, tested_files(tests))
    test_paths = sorted({root / test.path for test in named})
    sources = {_relative(path, root): sha256_of(path) for path in (document, *results, *test_paths)}
    return {
        "schema": SCHEMA,
        "created": now(),
        "seed": seed,
        "command": command,
        "sources": sources,
        "runs": outcomes.timestamps,
        "origins": {path: _origin(record) for path, record in outcomes.records.items()},
        "changed_after_the_run": list(outcomes.changed),
        "contracts": [_contract_row(contract, named, outcomes) for contract in contracts],
        "areas": _area_rows(named, outcomes),
        "tests": {
            test.label: _test_row(test, outcomes.by_label[test.label])
            for test in named
            if test.contracts
        },
        "unknown_numbers": _unknown_numbers(contracts, named),
        "unknown_results": list(outcomes.unknown),
    }


def count_states(checks: dict[str, Any]) -> dict[str, int]:
    """Counts contracts by state: held, failed, not run."""
    states = [contract["state"] for contract in checks["contracts"]]
    return {state: states.count(state) for state in ("held", "failed", "not run")}


def _contract_row(
    contract: Contract, named: Iterable[NamedTest], outcomes: Outcomes
) -> dict[str, Any]:
    labels = [test.label for test in named if contract.number in test.contracts]
    total = _sum(outcomes.by_label[label] for label in labels)
    by_state = {
        state.value: sum(outcomes.by_label[label].state is state for label in labels)
        for state in State
    }
    return {
        "number": contract.number,
        "family": contract.family,
        "family_title": contract.family_title,
        "text": contract.text,
        "state": _CONTRACT_STATE[total.state],
        "tests": labels,
        "num_tests": by_state,
        "num_cases": _cases(total),
        "reasons": total.reasons if labels else ["no test names it"],
    }


def _test_row(test: NamedTest, outcome: Outcome) -> dict[str, Any]:
    return {
        "contracts": list(test.contracts),
        "state": outcome.state.value,
        "num_cases": _cases(outcome),
        "seconds": round(outcome.seconds, 3),
        "reasons": outcome.reasons,
    }


def _area_rows(named: Sequence[NamedTest], outcomes: Outcomes) -> list[dict[str, Any]]:
    """What ran where: an area none of whose tests ran is not run, whatever the others did."""
    rows: list[dict[str, Any]] = []
    for area in dict.fromkeys(test.area for test in named):
        total = _sum(outcomes.by_label[test.label] for test in named if test.area == area)
        num_absent = sum(
            outcomes.by_label[test.label] == Outcome() for test in named if test.area == area
        )
        rows.append(
            {
                "area": area,
                "state": total.state.value,
                "num_tests_not_in_results": num_absent,
                "num_cases": _cases(total),
                "reasons": total.reasons,
            }
        )
    return rows


def _sum(outcomes: Iterable[Outcome]) -> Outcome:
    total = Outcome()
    for outcome in outcomes:
        total.num_passed += outcome.num_passed
        total.num_failed += outcome.num_failed
        total.num_skipped += outcome.num_skipped
        total.seconds += outcome.seconds
        total.reasons += [reason for reason in outcome.reasons if reason not in total.reasons]
    return total


def _cases(outcome: Outcome) -> dict[str, int]:
    return {
        "passed": outcome.num_passed,
        "failed": outcome.num_failed,
        "skipped": outcome.num_skipped,
    }


def _unknown_numbers(
    contracts: Iterable[Contract], named: Iterable[NamedTest]
) -> dict[str, list[str]]:
    """Numbers of a known family that tests name and the document does not hold."""
    known = {contract.number for contract in contracts}
    families = {contract.family for contract in contracts}
    unknown: dict[str, list[str]] = {}
    for test in named:
        for number in test.contracts:
            if number not in known and number.partition("-")[0] in families:
                unknown.setdefault(number, []).append(test.label)
    return unknown


def _origin(record: dict[str, Any] | None) -> dict[str, Any]:
    """Where a run says it was; all is null where it says nothing."""
    return {name: record and record[name] for name in ("machine", "versions", "sources")}


def _relative(path: Path, root: Path) -> str:
    whole = path.resolve()
    return whole.relative_to(root).as_posix() if whole.is_relative_to(root) else path.name
