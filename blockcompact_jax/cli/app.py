"""The commands of `blockcompact`, put together."""

from importlib.metadata import version
from typing import Annotated

import typer

from .errors import error_boundary
from .info import info
from .models import models
from .run import run
from .simulate import simulate

app = typer.Typer(
    name="blockcompact",
    help="Block-native KV-cache compaction for long-context language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"blockcompact-jax {version('blockcompact-jax')}")
        raise typer.Exit


@app.callback()
def _root(  # pyright: ignore[reportUnusedFunction]  # typer calls it
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Block-native KV-cache compaction for long-context language models."""


app.command()(run)
app.add_typer(models, name="models")
app.command()(info)
app.command()(simulate)


def main() -> None:
    """Run the command line. Ends the process."""
    with error_boundary():
        app()
