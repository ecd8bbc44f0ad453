"""`blockcompact sweep`: many configurations of `run`, stored, resumable and comparable."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .errors import UserError, require_modules
from .outputs import check_writable, refused_writes
from .progress import make_observer
from .run import NEEDED_TO_RUN

EXIT_FAILED = 1
_MAX_SHOWN = 40
_SHOWN_OPTIONS = ("model", "dtype", "context", "policy", "budget")

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
            help="Values of one option of `run`; repeat it for a grid (budget=10%,25%).",
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with options, lists of values and [[grid]] tables.",
            show_default="a short grid of contexts, policies and budgets",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="JSONL file of results; what it holds already is skipped.")
    ] = Path("sweep.jsonl"),
    parquet: Annotated[
        Path | None, typer.Option(help="Also write all results as one flat Parquet file.")
    ] = None,
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
    from blockcompact_jax.sweep.store import ResultFile, write_parquet
    from blockcompact_jax.sweep.sweep import run_sweep

    configurations = _configurations(settings or [], file)
    if is_dry:
        for configuration in configurations:
            typer.echo(json.dumps(configuration))
        return
    require_modules("blockcompact sweep", NEEDED_TO_RUN, extra="models")
    if parquet is not None:
        require_modules("blockcompact sweep --parquet", ("pyarrow",), extra="sweep")
        check_writable("parquet", parquet)
    check_writable("out", out)
    results = ResultFile(out)
    with make_observer() as observer:
        from torch_bridge.huggingface.sweep import LoadedRuns, fetch_models, local_weights

        fetch_models(configurations, observer)
        with refused_writes("out", out):
            summary = run_sweep(
                configurations,
                engine=LoadedRuns(),
                results=results,
                observer=observer,
                weights=local_weights(configurations),
            )
    if parquet is not None:
        with refused_writes("parquet", parquet):
            write_parquet(results.rows, parquet)
    _print_rows(results, configurations)
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
    the second to the first.
    """
    from blockcompact_jax.sweep.difference import compare_sweeps
    from blockcompact_jax.sweep.store import read_rows

    difference = compare_sweeps(read_rows(first), read_rows(second))
    if is_json:
        typer.echo(json.dumps(difference))
    else:
        _print_difference(difference)


def _configurations(settings: list[str], file: Path | None) -> list[dict[str, Any]]:
    """Complete, checked configurations, those of one model and data type together."""
    from blockcompact_jax.sweep.grid import expand, parse_setting, read_grids
    from torch_bridge.budget import OptionError
    from torch_bridge.huggingface.sweep import DEFAULT_GRID, complete

    chosen = dict(map(parse_setting, settings))
    grids = [DEFAULT_GRID] if file is None else read_grids(file)
    try:
        raw = expand([{**grid, **chosen} for grid in grids])
        found = {json.dumps(each): each for each in map(complete, raw)}
    except OptionError as error:
        raise UserError(f"{error} (see `blockcompact run --help`)") from error
    return sorted(found.values(), key=lambda each: (each["model"], each["dtype"]))


def _named(configuration: dict[str, Any]) -> str:
    return ", ".join(str(configuration[name]) for name in _SHOWN_OPTIONS)


def _print_rows(results: Any, configurations: list[dict[str, Any]]) -> None:
    from blockcompact_jax.sweep.grid import configuration_hash
    from blockcompact_jax.sweep.store import latest_rows

    latest = latest_rows(results.rows)
    table = Table(show_edge=False, pad_edge=False)
    for name in _SHOWN_OPTIONS:
        table.add_column(name.replace("_", " "))
    for name in ("acceptance", "tokens/round", "speedup", "same tokens"):
        table.add_column(name, justify="right")
    for configuration in configurations[:_MAX_SHOWN]:
        row = latest.get(configuration_hash(configuration))
        if row is None or row["report"] is None:
            continue
        report = row["report"]
        is_same = {True: "yes", False: "no", None: "not compared"}
        table.add_row(
            *(str(configuration[name]) for name in _SHOWN_OPTIONS),
            _number(report["acceptance_rate"], "{:.1%}"),
            _number(report["tokens_per_round"], "{:.2f}"),
            _number(report["speedup_vs_full"], "{:.2f}"),
            is_same[report["tokens_identical_to_full"]],
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
        said = [f"{name} {first[name]}" for name in _SHOWN_OPTIONS if name not in varied]
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
        ratios = [_number(ratio, "{:.2f}") for ratio in row["ratios"].values()]
        changed = ", ".join(row["changed"])
        table.add_row(*(str(row["configuration"][name]) for name in varied), *ratios, changed)
    console.print(table)
    for side in ("first", "second"):
        for configuration in difference[f"only_{side}"]:
            console.print(f"only in the {side}: {_named(configuration)}")
    num_changed = sum(bool(row["changed"]) for row in difference["rows"])
    console.print(f"{len(difference['rows'])} in both, {num_changed} of them not the same")


def _varied(configurations: list[dict[str, Any]]) -> list[str]:
    """Options that have more than one value, in the order of a configuration."""
    first = configurations[0] if configurations else {}
    return [name for name in first if any(each[name] != first[name] for each in configurations)]


def _number(value: float | None, form: str) -> str:
    return "not measured" if value is None else form.format(value)
