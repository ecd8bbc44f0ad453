"""`blockcompact run`: decode with a compacted KV cache and report what it saved."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .errors import UserError, require_modules
from .progress import make_observer

_NEEDED_TO_RUN = ("torch", "transformers", "gguf", "safetensors", "filelock")


def run(  # noqa: PLR0917  # options, in the order --help shows them
    model: Annotated[
        str, typer.Option(help="Short name, directory, .gguf file or hub name (`owner/model`).")
    ] = "smollm2-135m",
    prompt_file: Annotated[
        Path | None, typer.Option(help="UTF-8 file with the prompt.", show_default="built-in text")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="The prompt itself.", show_default="built-in text")
    ] = None,
    context: Annotated[
        int,
        typer.Option(
            min=1,
            help="Prompt tokens: a longer prompt is cut to its first tokens, a shorter one is used "
            "whole.",
        ),
    ] = 2048,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 128,
    budget: Annotated[
        str,
        typer.Option(
            help="Blocks that stay resident in each full-attention layer. With % or at most 1 it "
            "is a fraction (25%, 0.25), else a number of blocks (16b, 16)."
        ),
    ] = "25%",
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens per block.")] = 32,
    draft_tokens: Annotated[int, typer.Option(min=1, help="Tokens drafted per verification.")] = 8,
    lookup_tokens: Annotated[
        int,
        typer.Option(
            min=0, help="Tokens of a draft step that repetition in the text may suggest; 0 is off."
        ),
    ] = 7,
    reselect_every: Annotated[int, typer.Option(min=1, help="Rounds between two selections.")] = 4,
    policy: Annotated[
        str, typer.Option(help="Selection policy: attention, recency or random.")
    ] = "attention",
    dtype: Annotated[
        str, typer.Option(help="Data type of weights and KV cache: float32 or bfloat16.")
    ] = "float32",
    layout: Annotated[
        str,
        typer.Option(
            help="Packed layout of the full KV: amx (block and head size multiples of 32) or vec."
        ),
    ] = "amx",
    attention: Annotated[
        str,
        typer.Option(
            help="blocks attends to packed and resident blocks in place; gathered copies them "
            "together for stock attention: slower, bit for bit the stock results."
        ),
    ] = "blocks",
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random choices.")] = 0,
    compare_full: Annotated[
        bool, typer.Option(help="Also decode with full attention and compare.")
    ] = True,
    is_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of text and tables.")
    ] = False,
) -> None:
    """Decode with a compacted KV cache, checked against the full one, and report the savings.

    A model with a short name is fetched on first use. Generated text goes to stdout, progress to
    stderr.
    """
    from torch_bridge.huggingface.options import OptionError, RunOptions, parse_budget
    from torch_bridge.prompts import read_prompt

    checked: dict[str, Any] = {
        "policy": policy,
        "dtype": dtype,
        "layout": layout,
        "attention": attention,
    }
    try:
        options = RunOptions(
            model=model,
            prompt=prompt,
            prompt_file=prompt_file,
            context_tokens=context,
            num_new_tokens=new_tokens,
            budget=parse_budget(budget),
            block_tokens=block_tokens,
            num_draft_tokens=draft_tokens,
            num_lookup_tokens=lookup_tokens,
            reselect_every_rounds=reselect_every,
            temperature=temperature,
            seed=seed,
            compare_full=compare_full,
            **checked,
        )
    except OptionError as error:
        raise UserError(f"{error} (see `blockcompact run --help`)") from error
    read_prompt(prompt, prompt_file)  # A bad prompt is refused before anything is fetched.
    require_modules("blockcompact run", _NEEDED_TO_RUN, extra="models")

    from torch_bridge.huggingface.report import render, to_json
    from torch_bridge.huggingface.run import run_decoding

    with make_observer(is_text_shown=not is_json) as observer:
        report = run_decoding(options, observer=observer)
    if is_json:
        typer.echo(to_json(report))
    else:
        typer.echo()
        render(report, Console())
