"""What a test run did, read from pytest's JUnit XML."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any
from xml.etree import ElementTree

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.monitor.named_tests import NamedTest
from blockcompact_jax.monitor.run_record import changed_files, read_record

_MAX_REASON_CHARACTERS = 300


class State(enum.Enum):
    """State of a test or a contract. A contract is held where a test has passed."""

    FAILED = "failed"
    PASSED = "passed"
    NOT_RUN = "not run"


@dataclass
class Outcome:
    """All cases of one test, of all its parameters and all result files.

    Attributes:
        num_passed: cases that passed.
        num_failed: cases that failed or had an error.
        num_skipped: cases that were skipped, failed as expected, or passed with other sources.
        seconds: time of all cases.
        reasons: why cases were skipped or failed, each once.
    """

    num_passed: int = 0
    num_failed: int = 0
    num_skipped: int = 0
    seconds: float = 0.0
    reasons: list[str] = field(default_factory=list[str])

    @property
    def state(self) -> State:
        """Failed if any case failed, passed if one passed, else not run."""
        if self.num_failed:
            return State.FAILED
        return State.PASSED if self.num_passed else State.NOT_RUN


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """Results of a set of tests.

    Attributes:
        by_label: outcome of every test, also of those that no file mentions.
        unknown: cases of the files that belong to no test.
        timestamps: when each result file's run began, by file; None where the file does not say.
        records: what each run recorded of its sources and machine, by file; None likewise.
        changed: files that differ from those that one of the runs tested.
    """

    by_label: dict[str, Outcome]
    unknown: tuple[str, ...]
    timestamps: dict[str, str | None]
    records: dict[str, dict[str, Any] | None]
    changed: tuple[str, ...]


def read_outcomes(
    paths: Iterable[Path], tests: Iterable[NamedTest], files: dict[str, str]
) -> Outcomes:
    """Reads result files and gives each test its cases.

    A module that could not be collected counts as a failure of each of its tests, one that was
    skipped whole as a skip of each. A pass with other sources than those of now, or with unknown
    ones, counts as a skip too: it says nothing about them. Another test module's change is no such
    difference. A failure stays one.

    Args:
        paths: JUnit XML files; several of one suite (other environments) add up.
        tests: the tests of the sources.
        files: the sources as they are now, from `tested_files`.

    Raises:
        CompactionError: if a file is missing, is no JUnit XML, holds no result, or a time in it is
            none.
    """
    known = list(tests)
    by_case = {(test.module, test.name): test.label for test in known}
    by_label = {test.label: Outcome() for test in known}
    unknown: list[str] = []
    timestamps: dict[str, str | None] = {}
    records: dict[str, dict[str, Any] | None] = {}
    changed: set[str] = set()
    path_of = {test.label: test.path for test in known}
    for path in paths:
        root = _read(path)
        suite = root if root.tag == "testsuite" else root.find("testsuite")
        timestamps[str(path)] = _timestamp(suite, path) if suite is not None else None
        records[str(path)] = read_record(suite)
        differing = changed_files(records[str(path)], files)
        changed |= set(differing or ())
        cases = list(root.iter("testcase"))
        if not cases:
            raise CompactionError(f"`results` is {str(path)!r}, which holds no test result.")
        for case in cases:
            labels = _labels_of(case, by_case, known)
            if not labels:
                unknown.append(f"{case.get('classname', '')}::{case.get('name', '')}")
            seconds = _seconds(case, path)
            for label in labels:
                _book(by_label[label], case, seconds, _why_stale(differing, path_of[label]))
    return Outcomes(
        by_label=by_label,
        unknown=tuple(unknown),
        timestamps=timestamps,
        records=records,
        changed=tuple(sorted(changed)),
    )


def _why_stale(changed: tuple[str, ...] | None, test_path: str) -> str | None:
    """Why a pass says nothing about the sources of now; None if it does."""
    if changed is None:
        return "passed, but the results do not say with what sources"
    mine = [
        name
        for name in changed
        if name == test_path or not PurePosixPath(name).name.startswith("test_")
    ]
    return f"passed, but {mine[0]} was another then ({len(mine)} files differ)" if mine else None


def _read(path: Path) -> ElementTree.Element:
    try:
        return ElementTree.parse(path).getroot()
    except OSError as error:
        raise CompactionError(
            f"`results` is {str(path)!r}, which cannot be read ({error.strerror}); make it with "
            "`pytest --junit-xml`."
        ) from error
    except ElementTree.ParseError as error:
        raise CompactionError(
            f"`results` is {str(path)!r}, which is no JUnit XML ({error}); make it with "
            "`pytest --junit-xml`."
        ) from error


def _labels_of(
    case: ElementTree.Element, by_case: dict[tuple[str, str], str], known: list[NamedTest]
) -> list[str]:
    classname, name = case.get("classname", ""), case.get("name", "").partition("[")[0]
    if not classname:  # a module or a folder as a whole
        return [test.label for test in known if f"{test.module}.".startswith(f"{name}.")]
    parts = classname.split(".")
    for cut in range(len(parts), 0, -1):
        label = by_case.get((".".join(parts[:cut]), ".".join([*parts[cut:], name])))
        if label is not None:
            return [label]
    return []


def _timestamp(suite: ElementTree.Element, path: Path) -> str | None:
    text = suite.get("timestamp")
    try:
        if text:
            datetime.fromisoformat(text)
    except ValueError as error:
        raise CompactionError(
            f"`results` is {str(path)!r}, whose timestamp is {text!r}, expected an ISO 8601 time; "
            "make it with `pytest --junit-xml`."
        ) from error
    return text


def _seconds(case: ElementTree.Element, path: Path) -> float:
    text = case.get("time", "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise CompactionError(
            f"`results` is {str(path)!r}, whose test {case.get('name', '')!r} took {text!r}, "
            "expected seconds; make it with `pytest --junit-xml`."
        )
    return seconds


def _book(
    outcome: Outcome, case: ElementTree.Element, seconds: float, why_stale: str | None
) -> None:
    outcome.seconds += seconds
    fault = case.find("failure")
    fault = case.find("error") if fault is None else fault
    skip = case.find("skipped")
    if fault is not None:
        outcome.num_failed += 1
    elif skip is not None or why_stale is not None:
        outcome.num_skipped += 1
    else:
        outcome.num_passed += 1
    reason = fault if fault is not None else skip
    text = _text_of(reason) if reason is not None else why_stale or ""
    if text and text[:_MAX_REASON_CHARACTERS] not in outcome.reasons:
        outcome.reasons.append(text[:_MAX_REASON_CHARACTERS])


def _text_of(reason: ElementTree.Element) -> str:
    """Why, on one line; of a module skipped whole, the reason and not only that it was."""
    message = reason.get("message") or ""
    if message == "collection skipped":
        message = (reason.text or message).rpartition("Skipped: ")[2].rstrip("')\" ")
    return " ".join(message.split())
