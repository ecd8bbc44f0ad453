"""What a sweep can run: decoding, a recorded trace, quality tasks; and how each is shown."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import require_modules
from .progress import ProgressObserver
from .run import NEEDED_TO_RUN
from .sweep_summary import Summary, summarize_runs, summarize_study, summarize_tasks

Open = Callable[[list[dict[str, Any]], ProgressObserver], tuple[Any, dict[str, str]]]
"""Fetches what configurations need; gives the engine and the digests of what it reads."""


@dataclass(frozen=True, kw_only=True)
class SweepKind:
    """One kind of sweep.

    Attributes:
        command: For people, whose `--help` names the options.
        options_help: Where the options are described.
        default_grid: Values of options where neither file nor settings are given.
        complete: Fills in and checks one configuration.
        order: What configurations that run after each other share.
        shown_options: Options that are said once where all configurations share them.
        columns: Titles of the measured columns, and their text of a report.
        path_columns: What is shown instead where `retention` or `ownership` vary.
        check_inputs: Refuses a model or a file that cannot be had, without fetching anything.
        open: Fetches what is needed; gives the engine and the digests of what it reads.
        summary: What the end says in plain words.
        extras: Import names of the extras that configurations need, by extra.
    """

    command: str
    options_help: str
    default_grid: Mapping[str, list[Any]]
    complete: Callable[[Mapping[str, Any]], dict[str, Any]]
    order: tuple[str, ...]
    shown_options: tuple[str, ...]
    columns: Mapping[str, Callable[[Mapping[str, Any]], str]]
    check_inputs: Callable[[list[dict[str, Any]]], None]
    open: Open
    summary: Summary
    path_columns: Mapping[str, Callable[[Mapping[str, Any]], str]] = field(
        default_factory=dict[str, Callable[[Mapping[str, Any]], str]]
    )
    extras: Callable[[list[dict[str, Any]]], Mapping[str, tuple[str, ...]]] = lambda _: {}

    def require(self, configurations: list[dict[str, Any]]) -> None:
        """Check that the extras that configurations need are installed.

        Raises:
            UserError: One is not.
        """
        for extra, modules in self.extras(configurations).items():
            require_modules(self.command, modules, extra=extra)


def number(value: float | None, form: str) -> str:
    """A measured value as text."""
    return "not measured" if value is None else form.format(value)


def run_kind() -> SweepKind:
    """Decoding runs of `blockcompact run`."""
    from torch_bridge.huggingface.sweep import (
        DEFAULT_GRID,
        TRANSFORMERS,
        LoadedRuns,
        check_models,
        complete,
    )

    def extras_of(configurations: list[dict[str, Any]]) -> Mapping[str, tuple[str, ...]]:
        is_vllm = any(each["engine"] != TRANSFORMERS for each in configurations)
        extras: dict[str, tuple[str, ...]] = {"models": NEEDED_TO_RUN}
        return extras | {"vllm": ("vllm",)} if is_vllm else extras

    is_same = {True: "yes", False: "no", None: "not compared"}
    return SweepKind(
        command="blockcompact sweep",
        options_help="blockcompact sweep --help",
        default_grid=DEFAULT_GRID,
        complete=complete,
        order=("engine", "model", "dtype"),
        shown_options=("engine", "model", "dtype", "context", "policy", "budget"),
        columns={
            "acceptance": lambda report: number(report["acceptance_rate"], "{:.1%}"),
            "tokens/round": lambda report: number(report["tokens_per_round"], "{:.2f}"),
            "speedup": lambda report: number(report["speedup_vs_full"], "{:.2f}"),
            "same tokens": lambda report: is_same[report["tokens_identical_to_full"]],
        },
        check_inputs=check_models,
        open=_open_with_models(LoadedRuns),
        summary=summarize_runs,
        extras=extras_of,
    )


def _open_with_models(make_engine: Callable[[], Any]) -> Open:
    def open_models(
        configurations: list[dict[str, Any]], observer: ProgressObserver
    ) -> tuple[Any, dict[str, str]]:
        from torch_bridge.huggingface.sweep import fetch_models, model_digests

        fetch_models(configurations, observer)
        return make_engine(), model_digests(configurations)

    return open_models


def trace_kind(path: Path) -> SweepKind:
    """Selections over a recorded trace."""
    from blockcompact_jax.sweep.trace_runs import DEFAULT_TRACE_GRID, TraceRuns, complete_trace_run

    engine = TraceRuns(path)

    def open_trace(*_: Any) -> tuple[Any, dict[str, str]]:
        engine.open()
        return engine, engine.digests()

    return SweepKind(
        command="blockcompact sweep --trace",
        options_help="docs/sweep.md",
        default_grid=DEFAULT_TRACE_GRID,
        complete=lambda configuration: complete_trace_run(configuration, trace=path),
        order=("block_tokens",),
        shown_options=("policy", "budget"),
        columns={
            "mass kept": _study_column("mass_kept", "{:.2%}"),
            "worst layer": _study_column("mass_kept_worst_layer", "{:.2%}"),
            "at best": _study_column("mass_kept_at_best", "{:.2%}"),
            "recall": _study_column("oracle_recall", "{:.1%}"),
            "overlap": _study_column("selection_overlap", "{:.1%}"),
            "uploads": _study_column("upload_blocks_per_selection", "{:.2f}"),
        },
        path_columns={
            "mass kept": _study_column("mass_kept", "{:.2%}"),
            "uploads": _study_column("upload_blocks_per_selection", "{:.2f}"),
            "moved MB": lambda report: _megabytes(report["metrics"]["resident_move_bytes"]),
            "freed MB": lambda report: _megabytes(report["study"]["path"]["released_bytes"]),
            "pool MB": lambda report: _megabytes(report["study"]["path"]["pool_peak_bytes"]),
        },
        check_inputs=lambda _: engine.open() and None,
        open=open_trace,
        summary=summarize_study,
    )


def _study_column(name: str, form: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda report: number(report["study"][name], form)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f}"


def task_kind(tasks: str) -> SweepKind:
    """Quality tasks, answered with all and with selected blocks."""
    from torch_bridge.huggingface.sweep import check_models
    from torch_bridge.huggingface.task_runs import DEFAULT_TASK_GRID, TaskRuns, complete_task_run
    from torch_bridge.tasks import parse_tasks

    return SweepKind(
        command="blockcompact sweep --task",
        options_help="docs/sweep.md",
        default_grid=DEFAULT_TASK_GRID,
        complete=lambda configuration: complete_task_run({"tasks": tasks, **configuration}),
        order=("model", "dtype"),
        shown_options=("model", "context", "budget"),
        columns={
            **{name: _task_column(name) for name in parse_tasks(tasks)},
            "ms/token": _pair_of_ms,
        },
        check_inputs=check_models,
        open=_open_with_models(TaskRuns),
        summary=summarize_tasks,
        extras=lambda _: {"models": NEEDED_TO_RUN},
    )


def _pair_of_ms(report: Mapping[str, Any]) -> str:
    """Milliseconds a decoded token, and behind them those of full attention."""
    rates = (report["tokens_per_second"], report["tokens_per_second_full"])
    return " / ".join(f"{1e3 / rate:.1f}" for rate in rates)


def _task_column(task: str) -> Callable[[Mapping[str, Any]], str]:
    """Share of the answers' tokens found, and behind it that of full attention."""

    def text_of(report: Mapping[str, Any]) -> str:
        found = report["tasks"].get(task)
        if found is None:
            return ""
        return f"{found['token_accuracy']:.0%} / {found['token_accuracy_full']:.0%}"

    return text_of
