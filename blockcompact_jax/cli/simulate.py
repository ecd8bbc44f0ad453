"""`blockcompact simulate`: try to break the commit ledger."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .errors import UserError
from .progress import ProgressObserver, make_observer

EXIT_VIOLATED = 1
_MAX_STEPS_PER_WORLD = 1000
_WORLDS_AT_ONCE = 500
_MUTANT_WORLDS = 64
_MUTANT_STEPS = 400
_MAX_SHOWN = 20
_USUAL_STATES = 553_519  # What the exploration last found; for the progress bar only.


def simulate(  # noqa: PLR0917  # options, in the order --help shows them
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first world.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Events in all.")] = 100_000,
    steps_per_world: Annotated[
        int, typer.Option(min=1, help="Events of one world; worlds have consecutive seeds.")
    ] = _MAX_STEPS_PER_WORLD,
    ranks: Annotated[int, typer.Option(min=1, max=30, help="Tensor-parallel ranks.")] = 2,
    faults: Annotated[
        str,
        typer.Option(
            help="Comma-separated: delay, drop, duplicate, reorder, crash, restart; all or none."
        ),
    ] = "all",
    has_mutants: Annotated[
        bool, typer.Option("--mutants", help="Also check that every broken ledger is caught.")
    ] = False,
    is_exhaustive: Annotated[
        bool,
        typer.Option(
            "--exhaustive",
            help="Also visit every state of a ledger with 2 ranks, 2 requests and 3 operations.",
        ),
    ] = False,
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Simulate a scheduler, ranks and a faulty network against the commit ledger.

    Every answer and state is compared with a second, independent ledger, and invariants are checked
    after every event. A violation names its seed; `--seed` with that seed and the same options
    replays it first. Ends with 1 if anything was violated, or a mutant was not caught.
    """
    chosen = parse_faults(faults)
    with make_observer() as observer:
        report = _simulate(
            observer,
            seed=seed,
            num_steps=steps,
            steps_per_world=min(steps, steps_per_world),
            num_ranks=ranks,
            faults=chosen,
        )
        if has_mutants:
            report["mutants"] = _hunt(observer, seed=seed, num_ranks=max(ranks, 2))
        if is_exhaustive:
            report |= _explore(observer)
    if is_json:
        typer.echo(json.dumps(report))
    else:
        _print(report)
    if not is_passed(report):
        raise typer.Exit(EXIT_VIOLATED)


def parse_faults(text: str) -> frozenset[str]:
    """Returns the faults that a comma-separated list names.

    Raises:
        UserError: One is unknown.
    """
    from blockcompact_jax.simulation.world import FAULTS

    if text in {"all", "none"}:
        return frozenset(FAULTS if text == "all" else ())
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in FAULTS]
    if unknown or not names:
        raise UserError(
            f"`faults` names {', '.join(unknown) or 'nothing'}; "
            f"give some of {', '.join(FAULTS)}, or all, or none"
        )
    return frozenset(names)


def is_passed(report: dict[str, Any]) -> bool:
    """Returns whether nothing was violated and every mutant was caught."""
    is_caught = all(caught is not None for caught in report.get("mutants", {}).values())
    return not report["violations"] and not report.get("exhaustive_problems") and is_caught


def _options(num_ranks: int, faults: frozenset[str]) -> Any:
    from blockcompact_jax.ledger.state import LedgerShape
    from blockcompact_jax.simulation.world import WorldOptions

    shape = LedgerShape(max_requests=3, max_operations=6, max_slots=8, num_ranks=num_ranks)
    return WorldOptions(shape=shape, faults=faults)


def _simulate(
    observer: ProgressObserver,
    *,
    seed: int,
    num_steps: int,
    steps_per_world: int,
    num_ranks: int,
    faults: frozenset[str],
) -> dict[str, Any]:
    from blockcompact_jax.ledger.batch import count_dispositions
    from blockcompact_jax.ledger.kinds import Disposition
    from blockcompact_jax.simulation.check import check, record

    options = _options(num_ranks, faults)
    num_worlds = -(-num_steps // steps_per_world)
    counts = [0] * len(Disposition)
    num_invalid = 0
    violations: list[dict[str, Any]] = []
    observer.on_stage(f"simulating {num_worlds} worlds", num_worlds)
    for first in range(0, num_worlds, _WORLDS_AT_ONCE):
        last = min(first + _WORLDS_AT_ONCE, num_worlds)
        trace = record(
            tuple(range(seed + first, seed + last)),
            steps_per_world,
            options,
            on_progress=lambda done, first=first: observer.on_progress(first + done),
        )
        found, state = check(trace, options)
        violations += [vars(violation) for violation in (*trace.breaches, *found)]
        for disposition, count in enumerate(count_dispositions(state).tolist()):
            counts[disposition] += count
        num_invalid += trace.num_invalid
    return {
        "seed": seed,
        "events": num_worlds * steps_per_world,
        "invalid_events": num_invalid,
        "worlds": num_worlds,
        "steps_per_world": steps_per_world,
        "ranks": num_ranks,
        "faults": sorted(faults),
        "dispositions": {each.name.lower(): counts[each] for each in Disposition},
        "violations": violations,
    }


def _hunt(observer: ProgressObserver, *, seed: int, num_ranks: int) -> dict[str, int | None]:
    """Returns the seed that caught each mutant. All faults and two ranks: some need them."""
    from blockcompact_jax.simulation.check import record
    from blockcompact_jax.simulation.mutants import MUTANTS, hunt

    options = _options(num_ranks, parse_faults("all"))
    observer.on_stage(f"hunting {len(MUTANTS)} mutants", len(MUTANTS))
    trace = record(tuple(range(seed, seed + _MUTANT_WORLDS)), _MUTANT_STEPS, options)
    caught = hunt(trace, options, on_progress=observer.on_progress)
    return {name: mutant.seed for name, mutant in caught.items()}


def _explore(observer: ProgressObserver) -> dict[str, Any]:
    from blockcompact_jax.simulation.explore import Scenario, explore

    observer.on_stage("exploring every interleaving", _USUAL_STATES)
    found = explore(Scenario(), on_progress=observer.on_progress)
    return {
        "states_explored": found.num_states,
        "transitions_explored": found.num_transitions,
        "events_tried": found.num_events,
        "exhaustive_problems": found.problems,
    }


def _print(report: dict[str, Any]) -> None:
    table = Table(show_header=False, show_edge=False, pad_edge=False, box=None)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    first, num_worlds = report["seed"], report["worlds"]
    table.add_row("events", f"{report['events']:,} in {num_worlds} worlds from seed {first}")
    table.add_row("  wrong on purpose", f"{report['invalid_events']:,}")
    table.add_row("faults", ", ".join(report["faults"]) or "none")
    for name, count in report["dispositions"].items():
        table.add_row(f"  {name}", f"{count:,}")
    table.add_row("violations", str(len(report["violations"])))
    if "mutants" in report:
        missed = [name for name, caught in report["mutants"].items() if caught is None]
        num_caught = len(report["mutants"]) - len(missed)
        table.add_row("mutants caught", f"{num_caught} of {len(report['mutants'])}")
        for name, caught in report["mutants"].items():
            table.add_row(f"  {name}", "NOT CAUGHT" if caught is None else f"by seed {caught}")
    if "states_explored" in report:
        table.add_row("states explored", f"{report['states_explored']:,}")
        table.add_row("transitions", f"{report['transitions_explored']:,}")
        for name, count in report["exhaustive_problems"].items():
            table.add_row(f"  {name}", f"violated {count} times")
    Console(highlight=False, markup=False).print(table)
    for violation in report["violations"][:_MAX_SHOWN]:
        typer.echo(
            f"seed {violation['seed']}, step {violation['step']}, {violation['event']}: "
            f"{violation['problem']}"
        )
        typer.echo(
            f"  replay: blockcompact simulate --seed {violation['seed']} "
            f"--steps {report['steps_per_world']} --ranks {report['ranks']} "
            f"--faults {','.join(report['faults']) or 'none'}"
        )
    num_hidden = len(report["violations"]) - _MAX_SHOWN
    if num_hidden > 0:
        typer.echo(f"and {num_hidden} more; --json lists all")
