"""The options of `blockcompact run`, as `--help` describes them; other commands share them."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import UserError

ModelOption = Annotated[
    str, typer.Option(help="Short name, directory, .gguf file or hub name (`owner/model`).")
]
PromptFileOption = Annotated[
    Path | None, typer.Option(help="UTF-8 file with the prompt.", show_default="built-in text")
]
PromptOption = Annotated[
    str | None, typer.Option(help="The prompt itself.", show_default="built-in text")
]
ContextOption = Annotated[
    int,
    typer.Option(
        min=1,
        help="Prompt tokens: a longer prompt is cut to its first tokens, a shorter one is used "
        "whole.",
    ),
]
NewTokensOption = Annotated[int, typer.Option(min=1, help="Tokens to generate.")]
BudgetOption = Annotated[
    str,
    typer.Option(
        help="Blocks that stay resident in each full-attention layer. With % or at most 1 it "
        "is a fraction (25%, 0.25), else a number of blocks (16b, 16)."
    ),
]
BlockTokensOption = Annotated[int, typer.Option(min=1, help="Tokens per block.")]
DraftTokensOption = Annotated[int, typer.Option(min=1, help="Tokens drafted per verification.")]
LookupTokensOption = Annotated[
    int,
    typer.Option(
        min=0, help="Tokens of a draft step that repetition in the text may suggest; 0 is off."
    ),
]
ReselectEveryOption = Annotated[int, typer.Option(min=1, help="Rounds between two selections.")]
ReselectOrAutoOption = Annotated[
    str,
    typer.Option(
        metavar="ROUNDS|auto",
        help="Rounds between two selections, or auto: measured costs decide each round.",
    ),
]
CostsOption = Annotated[
    Path | None,
    typer.Option(
        help="File of `blockcompact calibrate` that `--reselect-every auto` starts from.",
        show_default="measure during the run",
    ),
]
CourseOption = Annotated[
    bool,
    typer.Option(
        "--course", help="Record residency, rounds and decisions; --json has them as `course`."
    ),
]
ReportOption = Annotated[
    Path | None,
    typer.Option(
        help="HTML file to write: residency over time, decisions, costs and bytes of this run.",
        show_default="none",
    ),
]
PolicyOption = Annotated[str, typer.Option(help="Selection policy: attention, recency or random.")]
DtypeOption = Annotated[
    str, typer.Option(help="Data type of weights and KV cache: float32 or bfloat16.")
]
LayoutOption = Annotated[
    str,
    typer.Option(
        help="Packed layout of the full KV: amx (block and head size multiples of 32) or vec."
    ),
]
AttentionOption = Annotated[
    str,
    typer.Option(
        help="blocks attends to packed and resident blocks in place; gathered copies them "
        "together for stock attention: slower, bit for bit the stock results."
    ),
]
TemperatureOption = Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of all random choices.")]
CompareFullOption = Annotated[
    bool, typer.Option(help="Also decode with full attention and compare.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of text and tables.")
]
RemoteOption = Annotated[
    str | None,
    typer.Option(
        help="URL of a `blockcompact serve` that holds the full KV and verifies.",
        show_default="verify in this process",
    ),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        help="File with the server's bearer token, readable by you alone; `serve` makes a missing "
        "one.",
        show_default="the variable BLOCKCOMPACT_TOKEN",
    ),
]
RanksOption = Annotated[
    int,
    typer.Option(
        min=1,
        help="Tensor-parallel ranks with --remote, each a process that uploads its share of the KV "
        "heads.",
    ),
]
CopyFallbackOption = Annotated[
    bool,
    typer.Option(
        "--copy-fallback",
        help="With --remote: the server gathers blocks into its compaction area before each upload "
        "instead of their being read in place; needs `serve --copy-area`.",
    ),
]


def reselection_of(text: str) -> dict[str, Any]:
    """The fields of `RunOptions` that `--reselect-every` sets; auto keeps the default period.

    Raises:
        UserError: If it is neither a number of 1 or more nor auto.
    """
    if text == "auto":
        return {"is_reselecting_online": True}
    if text.isascii() and text.isdigit() and int(text) > 0:
        return {"reselect_every_rounds": int(text)}
    raise UserError(
        f"`reselect-every` is {text!r}, expected auto or a whole number of 1 or more (see "
        "`blockcompact run --help`)"
    )


def checked_options(command: str, *, budget: str, **values: Any) -> Any:
    """`RunOptions` of what was typed.

    Args:
        command: What to ask for help, as `blockcompact run`.
        budget: As typed.
        **values: The other fields.

    Raises:
        UserError: If an option cannot be used.
    """
    from blockcompact_jax.budget import OptionError, parse_budget
    from torch_bridge.huggingface.options import RunOptions

    try:
        return RunOptions(budget=parse_budget(budget), **values)
    except OptionError as error:
        raise UserError(f"{error} (see `{command} --help`)") from error
