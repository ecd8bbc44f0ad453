"""What a test run says of itself in its JUnit XML: the sources it tested, and where it ran.

A `conftest.py` at the top of the tests imports `pytest_sessionstart` from here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree

from blockcompact_jax.provenance import origin, python_files, sha256_of
from blockcompact_jax.strict_json import parse_json

PROPERTY = "blockcompact run, version 1"
_NATIVE_FOLDERS = ("ffi", "custom_calls")
_NATIVE_SUFFIXES = frozenset({".cc", ".cu", ".h", ".inc"})


def pytest_sessionstart(session: Any) -> None:
    """Writes the record into the XML of a run that makes one; a hook of pytest."""
    from _pytest.junitxml import xml_key  # what the public fixture uses, which workers lack

    xml = session.config.stash.get(xml_key, None)
    if xml is not None:
        tests = session.config.rootpath / "tests"
        record = {**origin(), "files": tested_files(tests)}
        xml.add_global_property(PROPERTY, json.dumps(record))


def tested_files(tests: Path) -> dict[str, str]:
    """SHA-256 of each source file, by its path from the root.

    These are the test files, the Python files of the import packages wherever they are installed,
    and in a checkout the C++ sources. No compiled module is among them: each environment builds its
    own from the same sources.

    Args:
        tests: folder of the tests; its parent is the root.
    """
    root = tests.resolve().parent
    files = {path.relative_to(root).as_posix(): path for path in tests.resolve().rglob("*.py")}
    files |= python_files()
    for folder in _NATIVE_FOLDERS:
        for path in (root / folder).rglob("*"):
            if path.suffix in _NATIVE_SUFFIXES:
                files[path.relative_to(root).as_posix()] = path
    return {name: sha256_of(path) for name, path in sorted(files.items())}


def read_record(suite: ElementTree.Element | None) -> dict[str, Any] | None:
    """The record in a JUnit XML's suite; None where there is none that can be read."""
    for each in suite.iterfind("properties/property") if suite is not None else ():
        if each.get("name") == PROPERTY:
            try:
                record: Any = parse_json(each.get("value", ""))
            except ValueError:
                return None
            is_whole = isinstance(record, dict) and {"files", "machine", "versions", "sources"} <= (
                set(cast(dict[str, Any], record))
            )
            return cast(dict[str, Any], record) if is_whole else None
    return None


def changed_files(record: dict[str, Any] | None, now: dict[str, str]) -> tuple[str, ...] | None:
    """Files that differ from those that a run tested; None if it does not say."""
    if record is None:
        return None
    then: dict[str, str] = record["files"]
    return tuple(name for name in sorted({*then, *now}) if then.get(name) != now.get(name))
