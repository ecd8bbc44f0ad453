"""The commands of `blockcompact`, put together."""

import sys
from importlib.metadata import version
from itertools import takewhile
from typing import Annotated, Any

import typer

from .calibrate import calibrate
from .check import check
from .compare import compare
from .errors import EXIT_INTERRUPTED, EXIT_REFUSED, UserError
from .info import info
from .models import models
from .monitor import monitor
from .record import record
from .run import run
from .serve import serve
from .simulate import simulate
from .sweep import sweep

app = typer.Typer(
    name="blockcompact",
    help="Block-native KV-cache compaction for long-context language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""The base of typer's usage errors, which it does not export."""


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
app.command()(serve)
app.add_typer(models, name="models")
app.add_typer(sweep, name="sweep")
app.command()(check)
app.command()(compare)
app.command()(record)
app.command()(calibrate)
app.command()(monitor)
app.command()(info)
app.command()(simulate)


def run_command() -> None:
    """Run the command that the arguments of this process name.

    Raises:
        UserError: An option or an argument is wrong.
        KeyboardInterrupt: Ctrl-C ended the command.
        SystemExit: Otherwise, with its exit code.
    """
    try:
        exit_code = app(standalone_mode=False)
    except _USAGE_ERROR as error:
        raise _one_line(error) from None
    if exit_code == EXIT_INTERRUPTED:  # what typer makes of Ctrl-C
        raise KeyboardInterrupt
    raise SystemExit(exit_code)


def _one_line(error: Any) -> UserError | SystemExit:
    """A wrong option or argument as this program's other errors look; no command is a question."""
    message: str = error.format_message()
    # The parser of options names no command: the words before the first option do.
    command = error.ctx.command_path if error.ctx else _asked_command(sys.argv[1:])
    if "\n" in message or not message:  # no command was given: the message is the help
        error.show()
        return SystemExit(EXIT_REFUSED)
    return UserError(f"{message.rstrip('.')}{_given(error)} (see `{command} --help`)")


def _asked_command(arguments: list[str]) -> str:
    """The command that arguments name, as far as they do."""
    words = list(takewhile(lambda word: not word.startswith("-"), arguments))
    groups = {group.name for group in app.registered_groups}
    return " ".join(("blockcompact", *words[: 2 if words[:1] and words[0] in groups else 1]))


def _given(error: Exception) -> str:
    """What a wrong value was, where the message leaves it out."""
    details: Any = getattr(error.__cause__, "errors", None)  # pydantic's, which typer checks with
    return f", got {details()[0]['input']!r}" if details is not None else ""
