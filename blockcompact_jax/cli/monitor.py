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
        typer.Argument(
            help="Results of sweeps (.jsonl); of `run --json`, `compare --out`, benchmarks (.json)."
        ),
    ] = None,
    checks: Annotated[
        Path | None,
        typer.Option(
            help="File of `blockcompact check`.",
            show_default="contract_checks.json where it exists; else all is shown as not run",
        ),
    ] = None,
    docs: Annotated[
        Path | None,
        typer.Option(
            help="The contracts.",
            show_default="docs/contracts.md where it exists; else the page has no board of them",
        ),
    ] = None,
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

    document = _document(docs, is_needed=not results or checks is not None)
    check_writable("out", out)
    paths = [Path(name) for pattern in results or () for name in _expand(pattern)]
    usual = Path("contract_checks.json")
    if checks is None and document is not None and usual.exists():
        checks = usual

    def build() -> str:
        return build_page(document=document, checks=checks, results=paths)

    page = build()
    write_output("out", out, page)
    typer.echo(f"written to {out} ({len(page.encode()) / 1e6:.1f} MB)")
    if port is not None:
        from blockcompact_jax.monitor.serve import serve_page

        with serve_page(build, port=port) as server:
            typer.echo(f"http://127.0.0.1:{server.server_address[1]}/")
            server.serve_forever()


_USUAL_DOCUMENT = Path("docs/contracts.md")


def _document(given: Path | None, *, is_needed: bool) -> Path | None:
    """The contracts; None outside of a checkout, where there are results to show without them."""
    document = _USUAL_DOCUMENT if given is None else given
    if document.is_file():
        return document
    if given is None and not is_needed:
        return None
    raise UserError(
        f"`docs` is {str(document)!r}, which is no file; run in a checkout, or name results to "
        "show without the contracts"
    )


def _expand(name: str) -> list[str]:
    """A pattern that the shell left alone, as in quotes; the name of a file stays as it is."""
    return [name] if Path(name).exists() else sorted(glob.glob(name)) or [name]
