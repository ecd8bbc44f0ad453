"""`blockcompact compare`: bytes, numbers and policies of every path, on a real model."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .errors import require_modules
from .outputs import check_writable, write_output
from .progress import make_observer
from .run import NEEDED_TO_RUN
from .run_options import (
    AttentionOption,
    BlockTokensOption,
    BudgetOption,
    DraftTokensOption,
    DtypeOption,
    JsonOption,
    LayoutOption,
    ModelOption,
    PromptFileOption,
    ReselectEveryOption,
    SeedOption,
    checked_options,
)

EXIT_FAILED = 1


def compare(  # noqa: PLR0917  # options, in the order --help shows them
    model: ModelOption = "smollm2-135m",
    prompt_file: PromptFileOption = None,
    context: Annotated[int, typer.Option(min=1, help="Prompt tokens that are prefilled.")] = 1024,
    forced_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of the same text that are forced after them.")
    ] = 64,
    budget: BudgetOption = "25%",
    block_tokens: BlockTokensOption = 32,
    draft_tokens: DraftTokensOption = 8,
    reselect_every: ReselectEveryOption = 2,
    dtype: DtypeOption = "float32",
    layout: LayoutOption = "amx",
    attention: AttentionOption = "blocks",
    seed: SeedOption = 0,
    out: Annotated[
        Path | None, typer.Option(help="Also write the JSON object to this file.")
    ] = None,
    is_json: JsonOption = False,
) -> None:
    """Compare every path with its counterpart along one text.

    Bytes: source-only reload against copy and reload, table remap against byte move, for the same
    selections. Numbers: the verifier's logits against the stock model's, within a tolerance fixed
    for the data type. Policy: what drafting on the resident blocks costs, which is no error. Ends
    with 1 if a byte differs or a logit is out of tolerance.
    """
    options = checked_options(
        "blockcompact compare",
        model=model,
        prompt_file=prompt_file,
        context_tokens=context,
        num_new_tokens=forced_tokens,
        budget=budget,
        block_tokens=block_tokens,
        num_draft_tokens=draft_tokens,
        reselect_every_rounds=reselect_every,
        seed=seed,
        dtype=dtype,
        layout=layout,
        attention=attention,
    )
    if out is not None:
        check_writable("out", out)
    require_modules("blockcompact compare", NEEDED_TO_RUN, extra="models")
    document = _compare(options)
    text = json.dumps(document)
    if out is not None:
        write_output("out", out, text + "\n")
    if is_json:
        typer.echo(text)
    else:
        _print(document)
    if not document["is_held"]:
        raise typer.Exit(EXIT_FAILED)


def _compare(options: Any) -> dict[str, Any]:
    from blockcompact_jax.provenance import origin
    from torch_bridge.huggingface.forced import compare_forced
    from torch_bridge.huggingface.run import DTYPES
    from torch_bridge.models.load import load_model

    with make_observer() as observer:
        loaded = load_model(options.model, dtype=DTYPES[options.dtype], observer=observer)
        found = compare_forced(options, loaded, observer=observer)
    texts = {"budget": str(options.budget), "prompt_file": str(options.prompt_file or "") or None}
    return {
        "configuration": {**vars(options), **texts},
        "seed": options.seed,
        **found.to_dict(),
        **origin(),
    }


def _print(document: dict[str, Any]) -> None:
    table = Table(show_edge=False, pad_edge=False)
    for column in ("result", "of what", "found"):
        table.add_column(column, overflow="fold")
    paths = document["paths"]
    for name, label in (("transport", "source only / copied"), ("retention", "remapped / moved")):
        compared = sum(each["num_compared_bytes"] for each in paths[name])
        differing = sum(each["num_differing_bytes"] for each in paths[name])
        found = f"{compared:,} bytes compared, {differing:,} differ"
        table.add_row("bytes", f"{label}, {paths['num_selections']} selections", found)
    table.add_row("", "retentions of the moving path", ", ".join(paths["retention_kinds"]))
    num_positions = document["numeric"]["num_compared_positions"]
    for kind, name, label in (
        ("numbers", "numeric", "verifier / stock model"),
        ("policy", "draft", "draft on resident blocks / stock model"),
    ):
        each = document[name]
        found = (
            f"KL {each['mean_kl']:.2e} (max {each['max_kl']:.2e}), mass moved "
            f"{each['mean_moved_mass']:.2e}, same best token {each['top1_agreement']:.1%}, "
            f"largest error {each['max_error']:.2e}"
        )
        if kind == "numbers":
            found += f", out of tolerance {each['violation_rate']:.2%}"
        table.add_row(kind, f"{label}, {num_positions} positions", found)
    last = document["selections"][-1]
    shared = sum(last["num_common"]) / max(sum(last["num_common"]) + sum(last["num_only_first"]), 1)
    table.add_row("policy", "attention / newest blocks, last selection", f"{shared:.0%} the same")
    Console(highlight=False, markup=False).print(table)
