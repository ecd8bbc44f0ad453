"""`blockcompact serve`: the CPU verifier as a process of its own."""

import json
from typing import Annotated, Any

import typer

from .errors import require_modules
from .progress import make_observer
from .run_options import (
    AttentionOption,
    BlockTokensOption,
    DtypeOption,
    LayoutOption,
    ModelOption,
    TokenFileOption,
)

_NEEDED_TO_SERVE = ("torch", "transformers", "gguf", "safetensors", "filelock")
_NEEDED_FOR_HTTP = ("fastapi", "uvicorn", "prometheus_client")


def serve(  # noqa: PLR0917  # options, in the order --help shows them
    model: ModelOption = "smollm2-135m",
    host: Annotated[str, typer.Option(help="Loopback address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port; 0 takes any free one and prints it.")
    ] = 0,
    token_file: TokenFileOption = None,
    block_tokens: BlockTokensOption = 32,
    dtype: DtypeOption = "float32",
    layout: LayoutOption = "amx",
    attention: AttentionOption = "blocks",
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Longest sequence, drafts included.")
    ] = 131_072,
    max_requests: Annotated[int, typer.Option(min=1, help="Requests open at once.")] = 64,
    memory_limit: Annotated[
        int, typer.Option(min=1, help="MiB of shared memory of all requests together.")
    ] = 8192,
    lease: Annotated[
        float,
        typer.Option(min=1, max=86_400, help="Seconds of silence after which a client is lost."),
    ] = 60.0,
    copy_area: Annotated[
        int,
        typer.Option(
            min=0,
            help="Largest compaction area of a request, in blocks, for `run --copy-fallback`; "
            "without one, blocks are only read in place.",
        ),
    ] = 0,
) -> None:
    """Hold full KV caches and verify drafts for `blockcompact run --remote`.

    The engine's process reads the packed blocks straight from this process' memory, so both run on
    one machine as one user. Prints one line of JSON with the URL when it is ready; Ctrl-C ends it.
    """
    require_modules("blockcompact serve", _NEEDED_TO_SERVE, extra="models")
    require_modules("blockcompact serve", _NEEDED_FOR_HTTP, extra="remote")

    from blockcompact_jax.remote.access import create_or_read_token, new_process_epoch
    from blockcompact_jax.remote.app import create_app
    from blockcompact_jax.remote.listen import listen, run_until_stopped, url_of
    from blockcompact_jax.remote.service import ServiceLimits, VerifierService
    from torch_bridge.huggingface.options import RunOptions

    checked: Any = {"dtype": dtype, "layout": layout, "attention": attention}
    RunOptions(model=model, block_tokens=block_tokens, **checked)
    listening = listen(host, port)
    token = create_or_read_token(token_file)
    with make_observer() as observer:
        engine = _load_engine(model, block_tokens, max_tokens, checked, observer)
    limits = ServiceLimits(
        max_requests=max_requests,
        memory_bytes=memory_limit << 20,
        lease_seconds=lease,
        max_copy_blocks=copy_area,
    )
    process_epoch = new_process_epoch()
    service = VerifierService(engine, limits, process_epoch=process_epoch)
    url = url_of(listening)
    typer.echo(json.dumps({"url": url, "process_epoch": process_epoch}))
    run_until_stopped(create_app(service, token=token), listening)


def _load_engine(
    model: str, block_tokens: int, max_tokens: int, checked: dict[str, Any], observer: Any
) -> Any:
    from blockcompact_jax.kernels import Layout
    from torch_bridge.huggingface.run import DTYPES
    from torch_bridge.huggingface.serve import ModelEngine
    from torch_bridge.models.load import load_model

    loaded = load_model(model, dtype=DTYPES[checked["dtype"]], observer=observer)
    return ModelEngine(
        model=loaded.model,
        block_tokens=block_tokens,
        layout=Layout[checked["layout"].upper()],
        attention=checked["attention"],
        max_tokens=min(max_tokens, loaded.max_positions or max_tokens),
    )
