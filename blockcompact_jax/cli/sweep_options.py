"""Options of `blockcompact sweep`, as `--help` describes them."""

from pathlib import Path
from typing import Annotated

import typer

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="OPTION=VALUE,…",
        help="Values of one option of `run`, of engine=transformers,vllm-attend,vllm-retain,"
        "vllm-lossless, or of the study of a trace; repeat it for a grid (budget=10%,25%).",
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        help="Study selections on this trace of `blockcompact record`: no model, no torch.",
        show_default="decode with a model",
    ),
]
GridFile = Annotated[
    Path | None,
    typer.Option(
        help="TOML file with options, lists of values and [[grid]] tables.",
        show_default="a short grid of contexts, policies and budgets",
    ),
]
Tasks = Annotated[
    str | None,
    typer.Option(
        "--task",
        help="Answer questions with full attention and with selected blocks: needle, "
        "key-value, variables, code, parted by commas.",
        show_default="decode a text",
    ),
]
Out = Annotated[Path, typer.Option(help="JSONL file of results; what it holds already is skipped.")]
Parquet = Annotated[
    Path | None, typer.Option(help="Also write all results as one flat Parquet file.")
]
OnRay = Annotated[
    bool,
    typer.Option(
        "--ray",
        help="Run on the Ray cluster of RAY_ADDRESS, or on one in this machine; speeds are "
        "then those of configurations side by side.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="List the configurations and run nothing.")]
