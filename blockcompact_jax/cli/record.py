"""`blockcompact record`: queries and keys of a model along a text, for sweeps without a model."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from .errors import UserError, require_modules
from .outputs import check_writable, refused_writes
from .progress import make_observer
from .run import NEEDED_TO_RUN
from .run_options import DtypeOption, JsonOption, ModelOption, PromptFileOption


def record(  # noqa: PLR0917  # options, in the order --help shows them
    out: Annotated[Path, typer.Argument(help="File to write, with a name that ends in .npz.")],
    model: ModelOption = "smollm2-135m",
    prompt_file: PromptFileOption = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of the context.")] = 1024,
    forced_tokens: Annotated[
        int,
        typer.Option(
            min=1, help="Tokens of the same text after it; selections are measured there."
        ),
    ] = 128,
    context_queries: Annotated[
        int, typer.Option(min=1, help="Newest context queries kept; the first selection's scores.")
    ] = 16,
    query_every: Annotated[
        int, typer.Option(min=1, help="Keep the query of every n-th forced token.")
    ] = 1,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Decoder layers to keep, as 0,5,11.", show_default="all of full attention"
        ),
    ] = None,
    dtype: DtypeOption = "float32",
    store_dtype: Annotated[
        str | None,
        typer.Option(
            help="Element type of the file: float32 or bfloat16 (half the size).",
            show_default="that of the model",
        ),
    ] = None,
    is_json: JsonOption = False,
) -> None:
    """Record a model's queries and keys along one text.

    `blockcompact sweep --trace FILE` then studies selections on them, without the model and
    without torch.
    """
    from blockcompact_jax.traces.store import check_trace_name, write_trace

    check_trace_name(out)
    check_writable("out", out)
    wanted = None if layers is None else _layers(layers)
    require_modules("blockcompact record", NEEDED_TO_RUN, extra="models")
    from blockcompact_jax.budget import OptionError
    from torch_bridge.huggingface.options import check_names
    from torch_bridge.huggingface.record import RecordOptions, record_trace
    from torch_bridge.huggingface.run import DTYPES
    from torch_bridge.models.load import load_model

    try:
        check_names(dtype=dtype)
        options = RecordOptions(
            prompt_file=prompt_file,
            context_tokens=context,
            forced_tokens=forced_tokens,
            context_queries=context_queries,
            query_every=query_every,
            layers=wanted,
            store_dtype=store_dtype,
        )
    except OptionError as error:
        raise UserError(f"{error} (see `blockcompact record --help`)") from error
    with make_observer() as observer:
        loaded = load_model(model, dtype=DTYPES[dtype], observer=observer)
        trace = record_trace(options, loaded, observer=observer)
        with refused_writes("out", out):
            write_trace(out, trace)
    _report(trace, out, is_json)


def _layers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UserError(f"`layers` is {text!r}; give decoder layer IDs, as 0,5,11")
    return tuple(int(part) for part in parts)


def _report(trace: Any, out: Path, is_json: bool) -> None:
    facts: dict[str, Any] = {
        "path": str(out),
        "size_bytes": out.stat().st_size,
        "model": trace.model,
        "weights": trace.weights,
        "dtype": trace.dtype,
        "layers": trace.layers.tolist(),
        "num_tokens": trace.num_tokens,
        "num_context_tokens": trace.num_context_tokens,
        "num_queries": int(trace.query_positions.size),
    }
    if is_json:
        typer.echo(json.dumps(facts))
        return
    typer.echo(
        f"{trace.num_rows} layers, {facts['num_queries']:,} queries, {trace.num_tokens:,} keys a "
        f"layer in {trace.dtype}: {decimal(facts['size_bytes'])} in {out}"
    )
    typer.echo(f"study it with: blockcompact sweep --trace {out}")
