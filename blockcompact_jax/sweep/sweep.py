"""Runs every configuration that is not done yet, one after another, and stores what each gave."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.provenance import now, origin
from blockcompact_jax.strict_json import check_finite
from blockcompact_jax.sweep.grid import Configuration, configuration_hash
from blockcompact_jax.sweep.store import SCHEMA, ResultFile


class Engine(Protocol):
    """What runs one configuration."""

    def run(self, configuration: Configuration) -> dict[str, Any]:
        """Returns what was measured, as plain JSON values."""
        ...


RunAll: TypeAlias = Callable[[Sequence[Configuration], Engine], Iterator[dict[str, Any]]]
"""Gives a row for each configuration, in any order; a row may say what machine it is of."""


class SweepObserver(Protocol):
    """Hears how a sweep goes."""

    def on_stage(self, name: str, total: int | None) -> None:
        """A stage of `total` steps begins."""
        ...

    def on_progress(self, done: int) -> None:
        """`done` steps of it are complete."""
        ...


@dataclass(frozen=True, kw_only=True)
class SweepSummary:
    """What a sweep did.

    Attributes:
        num_configurations: configurations asked for.
        num_skipped: of these, done before.
        failures: (configuration, error) of those that failed now.
        seconds: time of this sweep.
    """

    num_configurations: int
    num_skipped: int
    failures: tuple[tuple[Configuration, str], ...]
    seconds: float


def run_sweep(
    configurations: Sequence[Configuration],
    *,
    engine: Engine,
    results: ResultFile,
    observer: SweepObserver,
    digests: Mapping[str, str] | None = None,
    run_all: RunAll | None = None,
) -> SweepSummary:
    """Runs all configurations whose result is not stored yet.

    A configuration that fails is stored as failed and tried again by the next sweep; the others
    go on.

    Args:
        configurations: complete configurations, in the order to run them.
        engine: runs one.
        results: where rows are stored, and which are done.
        observer: hears of progress.
        digests: digest of the files that configurations read, by their `trace` or else `model`,
            where the name does not fix them.
        run_all: where configurations run; None for one after another in this process.

    Raises:
        CompactionError: if `results` were made by other sources, other versions of packages or
            other weights: they would be mixed silently; or if a row cannot be written.
    """
    here, known = origin(), digests or {}
    _check_same_origin(results, here, known)
    completed = results.completed()
    open_ones = [each for each in configurations if configuration_hash(each) not in completed]
    if open_ones:
        results.check_appendable()
    failures: list[tuple[Configuration, str]] = []
    begin = time.perf_counter()
    observer.on_stage(f"sweeping {len(open_ones)} configurations", max(len(open_ones), 1))
    for number, row in enumerate((run_all or _run_here)(open_ones, engine), start=1):
        configuration = row["configuration"]
        facts = {name: row.get(name, value) for name, value in here.items()}
        results.append({**row, "weights": known.get(_read_by(configuration)), **facts})
        if row["error"] is not None:
            failures.append((configuration, row["error"]))
        observer.on_progress(number)
    return SweepSummary(
        num_configurations=len(configurations),
        num_skipped=len(configurations) - len(open_ones),
        failures=tuple(failures),
        seconds=time.perf_counter() - begin,
    )


def _read_by(configuration: Mapping[str, Any]) -> str:
    """What names the files that a configuration reads."""
    return str(configuration.get("trace", configuration.get("model")))


def _check_same_origin(
    results: ResultFile, here: Mapping[str, object], digests: Mapping[str, str]
) -> None:
    for row in results.rows:
        others = {
            "sources of this package": row["sources"] != here["sources"],
            "versions of its packages": row["versions"] != here["versions"],
            "files of the model or trace": row.get("weights")
            != digests.get(_read_by(row["configuration"]), row.get("weights")),
        }
        differing = [name for name, is_other in others.items() if is_other]
        if differing:
            raise CompactionError(
                f"`out` is {str(results.path)!r}, whose results were made by other {differing[0]}; "
                "give another file, and compare the two with `blockcompact sweep diff`."
            )


def _run_here(configurations: Sequence[Configuration], engine: Engine) -> Iterator[dict[str, Any]]:
    for configuration in configurations:
        yield run_one(configuration, engine)


def run_one(configuration: Configuration, engine: Engine) -> dict[str, Any]:
    """Runs one configuration; its fault is part of the row.

    Args:
        configuration: what to run.
        engine: what runs it.

    Returns:
        The row, without what it says of its origin.
    """
    created, begin = now(), time.perf_counter()
    report: dict[str, Any] | None = None
    error = None
    try:
        measured = engine.run(configuration)
        check_finite(measured, "report")
        report = measured
    except Exception as fault:  # one bad configuration must not end a sweep of hours
        error = " ".join(f"{type(fault).__name__}: {fault}".split())
    return {
        "schema": SCHEMA,
        "configuration_hash": configuration_hash(configuration),
        "configuration": configuration,
        "seed": configuration.get("seed"),
        "state": "done" if error is None else "failed",
        "error": error,
        "created": created,
        "wall_seconds": time.perf_counter() - begin,
        "report": report,
    }
