"""The same sweep on a Ray cluster: workers run configurations, the driver alone writes rows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.provenance import machine, origin
from blockcompact_jax.sweep.grid import Configuration
from blockcompact_jax.sweep.sweep import Engine, run_one


class _Worker:
    """One process of the cluster, with an engine of its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def origin(self) -> dict[str, object]:
        """Machine, versions and source hashes of this worker."""
        return origin()

    def run(self, configuration: Configuration) -> dict[str, Any]:
        """The row of one configuration, and the machine it ran on."""
        return {**run_one(configuration, self._engine), "machine": machine()}


def run_on_ray(configurations: Sequence[Configuration], engine: Engine) -> Iterator[dict[str, Any]]:
    """Runs configurations on as many workers as the cluster has processors. Needs the [ray] extra.

    The cluster is that of the variable RAY_ADDRESS, or one that lives in this machine for as long
    as the sweep.

    Args:
        configurations: What to run, each once; they are independent.
        engine: What runs one; every worker gets a copy.

    Yields:
        Rows, as they end.

    Raises:
        CompactionError: If the cluster cannot be reached, or a worker has other sources or versions
            than this process, or is lost.
    """
    ray: Any = import_module("ray")
    is_ours = not ray.is_initialized()
    if is_ours:
        _connect(ray)
    try:
        yield from _run(ray, configurations, engine)
    except ray.exceptions.RayError as error:
        raise CompactionError(
            f"a Ray worker was lost ({type(error).__name__}); what is done is stored, run the same "
            "sweep again for the others."
        ) from error
    finally:
        if is_ours:
            ray.shutdown()


def _connect(ray: Any) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a sweep reports to nobody
    address = os.environ.get("RAY_ADDRESS")
    try:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError) as error:
        named = "not set" if address is None else repr(address)
        reason = " ".join(str(error).split())
        raise CompactionError(
            f"`RAY_ADDRESS` is {named}, and no Ray cluster could be used ({reason}); give the "
            "address of one that runs, or unset it for one in this machine."
        ) from error


def _run(
    ray: Any, configurations: Sequence[Configuration], engine: Engine
) -> Iterator[dict[str, Any]]:
    num_workers = max(1, min(len(configurations), int(ray.cluster_resources().get("CPU", 1))))
    shared = ray.put(engine)
    remote = ray.remote(num_cpus=1)(_Worker)
    workers = [remote.remote(shared) for _ in range(num_workers)]
    try:
        here = origin()
        for there in ray.get([worker.origin.remote() for worker in workers]):
            _check_same(here, there)
        waiting = iter(configurations)
        running: dict[Any, Any] = {}
        for worker in workers:
            _start_next(worker, waiting, running)
        while running:
            (done,), _ = ray.wait(list(running), num_returns=1)
            worker = running.pop(done)
            _start_next(worker, waiting, running)
            yield ray.get(done)
    finally:
        for worker in workers:
            ray.kill(worker)


def _start_next(worker: Any, waiting: Iterator[Configuration], running: dict[Any, Any]) -> None:
    configuration = next(waiting, None)
    if configuration is not None:
        running[worker.run.remote(configuration)] = worker


def _check_same(here: dict[str, object], there: dict[str, object]) -> None:
    for name in ("sources", "versions"):
        if here[name] != there[name]:
            raise CompactionError(
                f"a Ray worker has other {name} of this package or its dependencies ({there[name]}"
                f"; expected {here[name]}); install the same on every machine of the cluster."
            )
