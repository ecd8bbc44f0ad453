"""`blockcompact sweep`: many configurations, stored, resumable and comparable."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .errors import UserError, require_modules
from .outputs import check_writable, refused_writes
from .progress import make_observer
from .sweep_kinds import SweepKind, number, run_kind, task_kind, trace_kind

EXIT_FAILED = 1
_MAX_SHOWN = 40
_NAMING_OPTIONS = ("model", "dtype", "trace", "tasks", "context", "policy", "budget")
"""What names a configuration of any kind, where it has them."""

sweep = typer.Typer(
    help="Run many configurations and store what each gave; `diff` compares two results.",
    invoke_without_command=True,
    no_args_is_help=False,
)


@sweep.callback()
def sweep_run(  # noqa: PLR0917  # options, in the order --help shows them
    context: typer.Context,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="OPTION=VALUE,…",
            help="Values of one option of `run`, or of the study of a trace; repeat it for a grid "
            "(budget=10%,25%).",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Study selections on this trace of `blockcompact record`: no model, no torch.",
            show_default="decode with a model",
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with options, lists of values and [[grid]] tables.",
            show_default="a short grid of contexts, policies and budgets",
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            "--task",
            help="Answer questions with full attention and with selected blocks: needle, "
            "key-value, variables, code, parted by commas.",
            show_default="decode a text",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="JSONL file of results; what it holds already is skipped.")
    ] = Path("sweep.jsonl"),
    parquet: Annotated[
        Path | None, typer.Option(help="Also write all results as one flat Parquet file.")
    ] = None,
    is_on_ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            help="Run on the Ray cluster of RAY_ADDRESS, or on one in this machine; speeds are "
            "then those of configurations side by side.",
        ),
    ] = False,
    is_dry: Annotated[
        bool, typer.Option("--dry-run", help="List the configurations and run nothing.")
    ] = False,
) -> None:
    """Run every configuration of a grid and store each result as it comes.

    An interrupted sweep is resumed by the same command. Ends with 1 if a configuration failed; the
    next sweep tries it again.
    """
    if context.invoked_subcommand is not None:
        return
    from blockcompact_jax.sweep.ray_runs import run_on_ray
    from blockcompact_jax.sweep.store import ResultFile, write_parquet
    from blockcompact_jax.sweep.sweep import run_sweep

    kind = _kind(trace, tasks)
    configurations = _configurations(kind, settings or [], file)
    if is_dry:
        kind.check_inputs(configurations)
        for configuration in configurations:
            typer.echo(json.dumps(configuration))
        return
    kind.require()
    if parquet is not None:
        require_modules("blockcompact sweep --parquet", ("pyarrow",), extra="sweep")
        check_writable("parquet", parquet)
    if is_on_ray:
        require_modules("blockcompact sweep --ray", ("ray",), extra="ray")
    check_writable("out", out)
    results = ResultFile(out)
    with make_observer() as observer:
        engine, digests = kind.open(configurations, observer)
        summary = run_sweep(
            configurations,
            engine=engine,
            results=results,
            observer=observer,
            digests=digests,
            run_all=run_on_ray if is_on_ray else None,
        )
    if parquet is not None:
        with refused_writes("parquet", parquet):
            write_parquet(results.rows, parquet)
    _print_rows(kind, results, configurations)
    typer.echo(
        f"{summary.num_configurations} configurations, {summary.num_skipped} done before, "
        f"{len(summary.failures)} failed, {summary.seconds:.0f} s; results in {out}"
    )
    for configuration, error in summary.failures:
        typer.echo(f"failed: {_named(configuration)}: {error}")
    if summary.failures:
        raise typer.Exit(EXIT_FAILED)


@sweep.command("diff")
def sweep_diff(
    first: Annotated[Path, typer.Argument(help="Results of one sweep.")],
    second: Annotated[Path, typer.Argument(help="Results of another.")],
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare two results, configuration by configuration.

    Tokens, counts and sizes must be equal and are listed where they differ; speeds are ratios of
    the second to the first. With reselect_online, counts follow measured times and may differ.
    """
    from blockcompact_jax.sweep.difference import compare_sweeps
    from blockcompact_jax.sweep.store import read_rows

    difference = compare_sweeps(read_rows(first), read_rows(second))
    if is_json:
        typer.echo(json.dumps(difference))
    else:
        _print_difference(difference)


def _kind(trace: Path | None, tasks: str | None) -> SweepKind:
    from blockcompact_jax.budget import OptionError

    if trace is not None and tasks is not None:
        raise UserError("`--trace` and `--task` are both given; give at most one of them")
    if trace is not None:
        return trace_kind(trace)
    try:
        return run_kind() if tasks is None else task_kind(tasks)
    except OptionError as error:
        raise UserError(f"{error} (see `blockcompact sweep --help`)") from error


def _configurations(
    kind: SweepKind, settings: list[str], file: Path | None
) -> list[dict[str, Any]]:
    """Complete, checked configurations; those that share what is loaded stand together."""
    from blockcompact_jax.budget import OptionError
    from blockcompact_jax.sweep.grid import expand, parse_setting, read_grids

    chosen = dict(map(parse_setting, settings))
    grids = [kind.default_grid] if file is None else read_grids(file)
    try:
        raw = expand([{**grid, **chosen} for grid in grids])
        found = {json.dumps(each): each for each in map(kind.complete, raw)}
    except OptionError as error:
        raise UserError(f"{error} (see `{kind.options_help}`)") from error
    return sorted(found.values(), key=lambda each: tuple(each[name] for name in kind.order))


def _named(configuration: dict[str, Any]) -> str:
    names = [name for name in _NAMING_OPTIONS if name in configuration]
    return ", ".join(str(configuration[name]) for name in names)


def _print_rows(kind: SweepKind, results: Any, configurations: list[dict[str, Any]]) -> None:
    from blockcompact_jax.sweep.grid import configuration_hash
    from blockcompact_jax.sweep.store import latest_rows

    latest = latest_rows(results.rows)
    names = list(dict.fromkeys((*kind.shown_options, *_varied(configurations))))
    table = Table(show_edge=False, pad_edge=False)
    for name in names:
        table.add_column(name.replace("_", " "), overflow="fold")
    for name in kind.columns:
        table.add_column(name, justify="right")
    for configuration in configurations[:_MAX_SHOWN]:
        row = latest.get(configuration_hash(configuration))
        if row is None or row["report"] is None:
            continue
        table.add_row(
            *(str(configuration[name]) for name in names),
            *(text_of(row["report"]) for text_of in kind.columns.values()),
        )
    Console(highlight=False, markup=False).print(table)
    if len(configurations) > _MAX_SHOWN:
        typer.echo(f"and {len(configurations) - _MAX_SHOWN} more; see the file")


def _print_difference(difference: dict[str, Any]) -> None:
    console = Console(highlight=False, markup=False)
    for name, (one, two) in difference["origins"].items():
        console.print(f"{name}: {one} → {two}")
    rows = difference["rows"]
    varied = _varied([row["configuration"] for row in rows])
    if rows:
        first = rows[0]["configuration"]
        shared = [name for name in _NAMING_OPTIONS if name in first and name not in varied]
        said = [f"{name} {first[name]}" for name in shared]
        if said:
            console.print(f"in all: {', '.join(said)}")
        console.print("speeds are ratios, second / first")
    table = Table(show_edge=False, pad_edge=False)
    for name in varied:
        table.add_column(name.replace("_", " "))
    for name in ("speedup", "tokens/s", "full tokens/s"):
        table.add_column(name, justify="right", min_width=len(name))
    table.add_column("differs in", overflow="fold", min_width=len("differs in"))
    for row in rows:
        ratios = [number(ratio, "{:.2f}") for ratio in row["ratios"].values()]
        changed = ", ".join(row["changed"])
        values = (str(row["configuration"].get(name, "")) for name in varied)
        table.add_row(*values, *ratios, changed)
    console.print(table)
    for side in ("first", "second"):
        for configuration in difference[f"only_{side}"]:
            console.print(f"only in the {side}: {_named(configuration)}")
    num_timed = sum(not row["are_counts_compared"] for row in rows)
    if num_timed:
        console.print(
            f"{num_timed} with reselect_online: selections follow measured times, so rounds and "
            "metrics are not compared"
        )
    num_changed = sum(bool(row["changed"]) for row in difference["rows"])
    console.print(f"{len(difference['rows'])} in both, {num_changed} of them not the same")


def _varied(configurations: list[dict[str, Any]]) -> list[str]:
    """Options that have more than one value, in the order of the configurations."""
    first = configurations[0] if configurations else {}
    names = dict.fromkeys(name for each in configurations for name in each)
    return [
        name for name in names if any(each.get(name) != first.get(name) for each in configurations)
    ]
