"""`blockcompact info`: what is installed, compiled and cached."""

import json
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from .models import model_states


def info(
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show versions, compiled components, engines and the model cache."""
    facts = collect_info()
    if is_json:
        typer.echo(json.dumps(facts))
    else:
        _print(facts)


def collect_info() -> dict[str, Any]:
    """Everything `blockcompact info` shows, as plain JSON values; None where not installed."""
    from blockcompact_jax.provenance import package_versions
    from torch_bridge.models.cache import cache_directory

    native = _native()
    return {
        "versions": package_versions(),
        "native": native,
        "cuda": _cuda(native),
        "jax_devices": _jax_devices(),
        "engines": _engines(),
        "cache": {"directory": str(cache_directory()), "models": model_states()},
    }


def _native() -> dict[str, Any]:
    """The compiled component's own account, or why there is none under "error"."""
    try:
        from blockcompact_jax import _native as native  # pyright: ignore
    except ImportError as error:
        return {"error": f"the compiled component cannot be imported ({error}); reinstall"}
    return dict(native.build_info())  # pyright: ignore


def _cuda(native: dict[str, Any]) -> dict[str, Any]:
    if "error" in native:
        return {"is_built": False, "reason": "the compiled component is missing"}
    account: str = native["cuda"]
    return {"is_built": account.startswith("compiled"), "reason": account}


def _jax_devices() -> list[str]:
    import jax

    untyped_jax: Any = jax
    try:
        return [
            f"{device.platform}:{device.id} {device.device_kind}"
            for device in untyped_jax.devices()
        ]
    except RuntimeError as error:
        return [f"none: {' '.join(str(error).split())}"]


def _engines() -> dict[str, dict[str, Any]]:
    needed = {"transformers": ("torch", "transformers"), "vllm": ("torch", "vllm")}
    extras = {"transformers": "models", "vllm": "vllm"}
    engines: dict[str, dict[str, Any]] = {}
    for engine, modules in needed.items():
        missing = [module for module in modules if find_spec(module) is None]
        hint = f"pip install 'blockcompact-jax[{extras[engine]}]'"
        reason = f"{' and '.join(missing)} not installed; {hint}" if missing else None
        engines[engine] = {"is_found": not missing, "reason": reason}
    return engines


def _print(facts: dict[str, Any]) -> None:
    table = Table(show_header=False, show_edge=False, pad_edge=False, box=None)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for package, installed in facts["versions"].items():
        table.add_row(package, installed or "not installed")
    native = facts["native"]
    if "error" in native:
        table.add_row("native", native["error"])
    else:
        table.add_row("native", f"{native['version']}, {native['compiler']}")
        for title in ("compiled", "available", "chosen"):
            table.add_row(f"SIMD {title}", _listed(native[f"simd_{title}"]))
    table.add_row("CUDA", facts["cuda"]["reason"])
    table.add_row("JAX devices", _listed(facts["jax_devices"]))
    for engine, found in facts["engines"].items():
        table.add_row(f"engine {engine}", found["reason"] or "found")
    table.add_row("model cache", facts["cache"]["directory"])
    for model in facts["cache"]["models"]:
        size = f", {decimal(model['size_bytes'])}" if model["size_bytes"] else ""
        table.add_row(f"  {model['name']}", (model["problem"] or model["state"]) + size)
    Console(highlight=False, markup=False).print(table)


def _listed(value: Any) -> str:
    return value if isinstance(value, str) else ", ".join(value)
