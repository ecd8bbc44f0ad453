"""`blockcompact sweep`: many configurations, stored, resumable and comparable."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import UserError, require_modules
from .outputs import check_writable, refused_writes
from .progress import make_observer
from .sweep_kinds import SweepKind, run_kind, task_kind, trace_kind
from .sweep_options import DryRun, GridFile, OnRay, Out, Parquet, Settings, Tasks, Trace
from .sweep_tables import name_of, print_difference, print_rows

EXIT_FAILED = 1

sweep = typer.Typer(
    help="Run many configurations and store what each gave; `diff` compares two results.",
    invoke_without_command=True,
    no_args_is_help=False,
)


@sweep.callback()
def sweep_run(  # noqa: PLR0917  # options, in the order --help shows them
    context: typer.Context,
    settings: Settings = None,
    trace: Trace = None,
    file: GridFile = None,
    tasks: Tasks = None,
    out: Out = Path("sweep.jsonl"),
    parquet: Parquet = None,
    is_on_ray: OnRay = False,
    is_dry: DryRun = False,
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
    kind.require(configurations)
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
    print_rows(kind, results.rows, configurations)
    typer.echo(
        f"{summary.num_configurations} configurations, {summary.num_skipped} done before, "
        f"{len(summary.failures)} failed, {summary.seconds:.0f} s; results in {out}"
    )
    for configuration, error in summary.failures:
        typer.echo(f"failed: {name_of(configuration)}: {error}")
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
        print_difference(difference)


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
