"""The `blockcompact` command."""

from .errors import error_boundary
from .interrupts import end_while_loading, keep_interrupts

__all__ = ["main"]


def main() -> None:
    """Run the command line. Ends the process."""
    end_while_loading()
    keep_interrupts()
    with error_boundary():
        from .app import run_command

        run_command()
