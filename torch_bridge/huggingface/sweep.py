"""Runs the configurations of a sweep in one process; a model is loaded once for all of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockcompact_jax.budget import parse_budget
from blockcompact_jax.provenance import sha256_of_text
from blockcompact_jax.sweep.options import complete_configuration
from torch_bridge.huggingface.options import RunOptions
from torch_bridge.models.locate import check_model_name
from torch_bridge.models.progress import StageObserver
from torch_bridge.models.registry import MODELS

OPTIONS = {
    "model": "model",
    "dtype": "dtype",
    "context": "context_tokens",
    "new_tokens": "num_new_tokens",
    "block_tokens": "block_tokens",
    "layout": "layout",
    "attention": "attention",
    "policy": "policy",
    "budget": "budget",
    "draft_tokens": "num_draft_tokens",
    "lookup_tokens": "num_lookup_tokens",
    "reselect_every": "reselect_every_rounds",
    "reselect_online": "is_reselecting_online",
    "temperature": "temperature",
    "seed": "seed",
    "compare_full": "compare_full",
    "course": "has_course",
}
"""Names in a sweep, which are those of `blockcompact run`, and the fields of `RunOptions`.

`reselect_online` is its `--reselect-every auto`.
"""

DEFAULT_GRID: dict[str, list[Any]] = {
    "context": [1024, 2048],
    "new_tokens": [64],
    "policy": ["attention", "recency", "random"],
    "budget": ["10%", "25%", "50%"],
}
"""What a sweep without options runs: what each policy accepts, and what that is worth."""


def complete(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of a configuration, defaults filled in, as plain values of the right types.

    Raises:
        OptionError: if a name is unknown or a value cannot be used.
    """
    plain = complete_configuration(configuration, names=OPTIONS, defaults=RunOptions())
    options_of(plain)
    return plain


def options_of(configuration: Mapping[str, Any]) -> RunOptions:
    """The checked options of a complete configuration.

    Raises:
        OptionError: if a value cannot be used.
    """
    values = {OPTIONS[name]: value for name, value in configuration.items()}
    values["budget"] = parse_budget(str(values["budget"]))
    return RunOptions(**values)


class LoadedRuns:
    """Runs configurations, and keeps the model of the last one for the next."""

    def __init__(self) -> None:
        """Nothing is loaded before the first run."""
        self._loaded: Any = None
        self._key: tuple[str, str] | None = None

    def run(self, configuration: Mapping[str, Any]) -> dict[str, Any]:
        """Runs the main job once.

        The peak memory of the process is left out of the report: in a process of many runs it
        belongs to none of them.

        Raises:
            OptionError: if the configuration does not fit the model.
            ModelError: if the model cannot be loaded.
        """
        from torch_bridge.huggingface.identity import weights_name
        from torch_bridge.huggingface.run import DTYPES, run_decoding
        from torch_bridge.models.load import load_model

        options = options_of(configuration)
        key = (options.model, options.dtype)
        if key != self._key:
            self._loaded, self._key = None, None  # frees the memory of one before the next
            self._loaded = load_model(options.model, dtype=DTYPES[options.dtype])
            self._key = key
        report = run_decoding(options, loaded=self._loaded).to_dict()
        del report["memory_bytes"]["process_peak"]
        return {**report, "weights": weights_name(self._loaded.model)}


def check_models(configurations: list[dict[str, Any]]) -> None:
    """Refuses a model that cannot be had, and fetches none.

    Raises:
        UnknownModelError: if one is no short name, path or hub name.
    """
    for model in dict.fromkeys(str(each["model"]) for each in configurations):
        check_model_name(model)


def fetch_models(configurations: list[dict[str, Any]], observer: StageObserver) -> None:
    """Finds every model and fetches those with a short name; no run of the sweep waits for one.

    Raises:
        UnknownModelError: if one is no short name, path or hub name; before any is fetched.
        FetchError: if one cannot be fetched.
    """
    from torch_bridge.models.load import locate_model

    check_models(configurations)
    for model in dict.fromkeys(str(each["model"]) for each in configurations):
        locate_model(model, observer)


def model_digests(configurations: list[dict[str, Any]]) -> dict[str, str]:
    """A digest for each model whose name says nothing of its weights.

    Of a local file or directory it is one of the files' names, sizes and times, not of their
    gigabytes; of a hub name, the commit. A short name fixes its files.
    """
    digests: dict[str, str] = {}
    for model in dict.fromkeys(str(each["model"]) for each in configurations):
        if model in MODELS or not model.strip():
            continue
        path = Path(model).expanduser()
        digest = _digest_of_files(path) if path.exists() else _hub_revision(model)
        if digest is not None:
            digests[model] = digest
    return digests


def _digest_of_files(path: Path) -> str:
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    states = [(each, each.stat()) for each in files if each.is_file()]
    lines = [
        f"{each.relative_to(path).as_posix()} {state.st_size} {state.st_mtime_ns}"
        for each, state in states
    ]
    return sha256_of_text("\n".join(lines))


def _hub_revision(model: str) -> str | None:
    from torch_bridge.models.load import hub_revision

    return hub_revision(model)
