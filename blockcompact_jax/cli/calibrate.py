"""`blockcompact calibrate`: what a retention takes and brings on this machine."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .errors import UserError, require_modules
from .outputs import check_writable, write_output
from .progress import make_observer
from .run import NEEDED_TO_RUN
from .run_options import (
    AttentionOption,
    BlockTokensOption,
    BudgetOption,
    ContextOption,
    DraftTokensOption,
    DtypeOption,
    JsonOption,
    LayoutOption,
    LookupTokensOption,
    ModelOption,
    PolicyOption,
    SeedOption,
    checked_options,
)


def calibrate(  # noqa: PLR0917  # options, in the order --help shows them
    model: ModelOption = "smollm2-135m",
    context: ContextOption = 2048,
    budget: BudgetOption = "25%",
    block_tokens: BlockTokensOption = 32,
    dtype: DtypeOption = "float32",
    layout: LayoutOption = "amx",
    attention: AttentionOption = "blocks",
    policy: PolicyOption = "attention",
    draft_tokens: DraftTokensOption = 8,
    lookup_tokens: LookupTokensOption = 7,
    rounds: Annotated[
        int,
        typer.Option(min=0, help="Rounds of decoding to measure, for `run --reselect-every auto`."),
    ] = 32,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each term.")] = 8,
    horizon: Annotated[int, typer.Option(min=0, help="Steps between two decisions.")] = 32,
    margin_us: Annotated[
        float, typer.Option(min=0, help="Microseconds a benefit must exceed its cost by.")
    ] = 0.0,
    seed: SeedOption = 0,
    out: Annotated[Path, typer.Option(help="File to write the terms to.")] = Path(
        "calibration.json"
    ),
    is_json: JsonOption = False,
) -> None:
    """Measure the terms of the decision whether to retain, and store them with the machine.

    Also measures rounds by the age of their selection, which `run --reselect-every auto --costs`
    decides by. What this engine does not measure stays unmeasured; a decision that needs it is
    open.
    """
    options = checked_options(
        "blockcompact calibrate",
        model=model,
        context_tokens=context,
        budget=budget,
        block_tokens=block_tokens,
        seed=seed,
        dtype=dtype,
        layout=layout,
        attention=attention,
        policy=policy,
        num_draft_tokens=draft_tokens,
        num_lookup_tokens=lookup_tokens,
    )
    check_writable("out", out)
    require_modules("blockcompact calibrate", NEEDED_TO_RUN, extra="models")
    document = _calibrate(options, samples, horizon, margin_us, rounds)
    text = json.dumps(document, indent=1)
    write_output("out", out, text + "\n")
    if is_json:
        typer.echo(text)
    else:
        _print(document)
        typer.echo(f"written to {out}")


def _calibrate(
    options: Any, samples: int, horizon: int, margin_us: float, rounds: int
) -> dict[str, Any]:
    from blockcompact_jax.provenance import origin
    from torch_bridge.huggingface.calibrate import calibrate as measure
    from torch_bridge.huggingface.calibrate import calibration_facts, num_positions
    from torch_bridge.huggingface.run import DTYPES
    from torch_bridge.models.load import load_model
    from torch_bridge.prompts import build_prompt

    with make_observer() as observer:
        loaded = load_model(options.model, dtype=DTYPES[options.dtype], observer=observer)
        prompt = build_prompt(loaded.tokenizer, context_tokens=options.context_tokens)
        num_needed = num_positions(options, prompt.num_tokens, samples, rounds)
        if loaded.max_positions is not None and num_needed > loaded.max_positions:
            raise UserError(
                f"`context` {prompt.num_tokens:,}, {rounds} rounds and {samples} samples need "
                f"{num_needed:,} positions; {loaded.name} has {loaded.max_positions:,}. Lower one "
                "of them"
            )
        found = measure(
            options,
            loaded,
            prompt.token_ids,
            num_samples=samples,
            horizon_steps=horizon,
            margin_us=margin_us,
            num_rounds=rounds,
            observer=observer,
        )
    return {
        **calibration_facts(options, prompt.num_tokens),
        "seed": options.seed,
        **found.to_dict(),
        **origin(),
    }


def _print(document: dict[str, Any]) -> None:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("term")
    table.add_column("microseconds", justify="right")
    for group in ("costs", "benefits"):
        for name, term in document[group].items():
            value = term["value_us"]
            table.add_row(name, term["source"] if value is None else f"{value:,.0f}")
    decision = document["decision"]
    says = {True: "retain", False: "do not retain", None: "open"}[decision["is_retained"]]
    missing = ", ".join(decision["unmeasured"])
    table.add_row("decision", f"{says}; unmeasured: {missing}" if missing else says)
    prediction = document["prediction"]
    if document["rounds"]:
        says = f"{prediction['period_rounds']} rounds" if prediction else "open"
        table.add_row("best period", says)
    Console(highlight=False, markup=False).print(table)
