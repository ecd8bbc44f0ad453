"""`blockcompact run`: decode with a compacted KV cache and report what it saved."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from .errors import UserError, require_modules
from .outputs import check_writable, write_output
from .progress import make_observer
from .run_options import (
    AttentionOption,
    BlockTokensOption,
    BudgetOption,
    CompareFullOption,
    ContextOption,
    CopyFallbackOption,
    CostsOption,
    CourseOption,
    DraftTokensOption,
    DtypeOption,
    JsonOption,
    LayoutOption,
    LookupTokensOption,
    ModelOption,
    NewTokensOption,
    PolicyOption,
    PromptFileOption,
    PromptOption,
    RanksOption,
    RemoteOption,
    ReportOption,
    ReselectOrAutoOption,
    SeedOption,
    TemperatureOption,
    TokenFileOption,
    checked_options,
    reselection_of,
)

NEEDED_TO_RUN = ("torch", "transformers", "gguf", "safetensors", "filelock")


def run(  # noqa: PLR0917  # options, in the order --help shows them
    model: ModelOption = "smollm2-135m",
    prompt_file: PromptFileOption = None,
    prompt: PromptOption = None,
    context: ContextOption = 2048,
    new_tokens: NewTokensOption = 128,
    budget: BudgetOption = "25%",
    block_tokens: BlockTokensOption = 32,
    draft_tokens: DraftTokensOption = 8,
    lookup_tokens: LookupTokensOption = 7,
    reselect_every: ReselectOrAutoOption = "4",
    costs: CostsOption = None,
    policy: PolicyOption = "attention",
    dtype: DtypeOption = "float32",
    layout: LayoutOption = "amx",
    attention: AttentionOption = "blocks",
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    compare_full: CompareFullOption = True,
    remote: RemoteOption = None,
    token_file: TokenFileOption = None,
    ranks: RanksOption = 1,
    copy_fallback: CopyFallbackOption = False,
    report: ReportOption = None,
    has_course: CourseOption = False,
    is_json: JsonOption = False,
) -> None:
    """Decode with a compacted KV cache, checked against the full one, and report the savings.

    A model with a short name is fetched on first use. Generated text goes to stdout, progress to
    stderr.
    """
    from blockcompact_jax.strict_json import read_object
    from torch_bridge.prompts import read_prompt

    options = checked_options(
        "blockcompact run",
        model=model,
        prompt=prompt,
        prompt_file=prompt_file,
        context_tokens=context,
        num_new_tokens=new_tokens,
        budget=budget,
        block_tokens=block_tokens,
        num_draft_tokens=draft_tokens,
        num_lookup_tokens=lookup_tokens,
        **reselection_of(reselect_every),
        costs_file=costs,
        has_course=has_course or report is not None,
        temperature=temperature,
        seed=seed,
        compare_full=compare_full,
        policy=policy,
        dtype=dtype,
        layout=layout,
        attention=attention,
    )
    if remote is None and (ranks > 1 or copy_fallback):
        given = "`--copy-fallback`" if copy_fallback else f"`--ranks {ranks}`"
        raise UserError(f"{given} needs a server; name one with `--remote`")
    if report is not None:
        check_writable("report", report)
    if costs is not None:
        read_object(costs, argument="costs")  # So is a file that cannot be read.
    read_prompt(prompt, prompt_file)  # A bad prompt is refused before anything is fetched.
    client = None if remote is None else _client_of(remote, token_file)
    require_modules("blockcompact run", NEEDED_TO_RUN, extra="models")

    from blockcompact_jax.monitor.page import build_run_page
    from torch_bridge.huggingface.report import render, to_json
    from torch_bridge.huggingface.run import run_decoding

    connection = None if client is None else _connect(client, ranks, copy_fallback)
    with make_observer(is_text_shown=not is_json) as observer:
        found = run_decoding(options, observer=observer, remote=connection)
    if report is not None:
        write_output("report", report, build_run_page(found.to_dict()))
    if is_json:
        typer.echo(to_json(found if has_course else replace(found, course=None)))
        return
    typer.echo()
    render(found, Console())
    if report is not None:
        typer.echo(f"written to {report}")


def _client_of(url: str, token_file: Path | None) -> Any:
    """Checks the address and the token; connects to nothing yet, and imports no torch."""
    require_modules("blockcompact run --remote", ("pydantic",), extra="remote")
    from blockcompact_jax.remote.access import read_token
    from blockcompact_jax.remote.client import RemoteClient, check_url

    check_url(url)
    return RemoteClient(url, token=read_token(token_file))


def _connect(client: Any, num_ranks: int, is_copying: bool) -> Any:
    from torch_bridge.huggingface.remote import RemoteOptions

    return RemoteOptions(client=client, num_ranks=num_ranks, is_copying=is_copying)
