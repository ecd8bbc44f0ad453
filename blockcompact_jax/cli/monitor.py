"""`blockcompact monitor`: contracts and results as one HTML page."""

import glob
from pathlib import Path
from typing import Annotated

import typer

from .errors import UserError
from .outputs import check_writable, write_output


def monitor(
    results: Annotated[
        list[str] | None,
        typer.Argument(help="Results of sweeps (.jsonl), `run --json` and benchmarks (.json)."),
    ] = None,
    checks: Annotated[
        Path | None,
        typer.Option(
            help="File of `blockcompact check`.",
            show_default="contract_checks.json where it exists; else all is shown as not run",
        ),
    ] = None,
    docs: Annotated[Path, typer.Option(help="The contracts.")] = Path("docs/contracts.md"),
    out: Annotated[Path, typer.Option(help="File to write the page to.")] = Path("monitor.html"),
    port: Annotated[
        int | None,
        typer.Option(
            "--serve",
            min=0,
            max=65535,
            help="Also serve the page on this loopback port (0: any), made anew at each load.",
            show_default="only write the file",
        ),
    ] = None,
) -> None:
    """Write one self-contained page: the board of contracts, runs, charts and benchmarks.

    All of it comes from files: what was not run is shown as not run.
    """
    from blockcompact_jax.monitor.page import build_page

    if not docs.is_file():
        raise UserError(f"`docs` is {str(docs)!r}, which is no file; run in a checkout")
    check_writable("out", out)
    paths = [Path(name) for pattern in results or () for name in _expand(pattern)]
    usual = Path("contract_checks.json")
    chosen = checks if checks is not None or not usual.exists() else usual

    def build() -> str:
        return build_page(document=docs, checks=chosen, results=paths)

    page = build()
    write_output("out", out, page)
    typer.echo(f"written to {out} ({len(page.encode()) / 1e6:.1f} MB)")
    if port is not None:
        from blockcompact_jax.monitor.serve import serve_page

        with serve_page(build, port=port) as server:
            typer.echo(f"http://127.0.0.1:{server.server_address[1]}/")
            server.serve_forever()


def _expand(pattern: str) -> list[str]:
    """A pattern that the shell left alone, as in quotes; a plain name stays as it is."""
    return sorted(glob.glob(pattern)) or [pattern]
