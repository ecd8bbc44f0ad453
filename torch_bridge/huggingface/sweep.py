"""Runs the configurations of a sweep; a model is loaded once for all of its own.

Those of transformers run in this process, each of vLLM's in one of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockcompact_jax.budget import OptionError, parse_budget
from blockcompact_jax.geometry import OwnershipGranularity
from blockcompact_jax.provenance import sha256_of_text
from blockcompact_jax.retention_path import RetentionPath
from blockcompact_jax.sweep.options import complete_configuration
from torch_bridge.huggingface.options import RunOptions
from torch_bridge.models.locate import check_model_name, find_model
from torch_bridge.models.progress import StageObserver
from torch_bridge.models.registry import MODELS
from torch_bridge.vllm import sweep as vllm

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

TRANSFORMERS = "transformers"
"""The engine of `blockcompact run`."""

ENGINES = (TRANSFORMERS, *vllm.ENGINES)
"""What `engine` may be."""

DEFAULT_GRID: dict[str, list[Any]] = {
    "context": [1024, 2048],
    "new_tokens": [64],
    "policy": ["attention", "recency", "random"],
    "budget": ["10%", "25%", "50%"],
}
"""What a sweep without options runs: what each policy accepts, and what that is worth."""


def complete(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of a configuration, defaults filled in, as plain values of the right types.

    `engine`, `retention` and `ownership` are among them; the last two follow from the first.

    Raises:
        OptionError: if a name is unknown, is none of the engine, or a value cannot be used.
    """
    given = dict(configuration)
    engine = given.pop("engine", TRANSFORMERS)
    if engine not in ENGINES:
        raise OptionError(f"`engine` is {engine!r}, expected one of {', '.join(ENGINES)}")
    path = {name: given.pop(name) for name in ("retention", "ownership") if name in given}
    _check_names(engine, given)
    if engine == TRANSFORMERS:
        plain = complete_configuration(given, names=OPTIONS, defaults=RunOptions())
        options_of(plain)
    else:
        plain = vllm.complete_vllm(engine, given)
    return {"engine": engine, **plain, **_path_of(engine, path)}


def _check_names(engine: str, given: Mapping[str, Any]) -> None:
    """Refuses options that another engine has, by name; unknown ones are refused later."""
    all_names = {TRANSFORMERS: OPTIONS} | {name: vllm.names_of(name) for name in vllm.ENGINES}
    for name in given:
        owners = [owner for owner, names in all_names.items() if name in names]
        if owners and engine not in owners:
            raise OptionError(
                f"`{name}` is given with `engine` {engine!r}, which has no such option "
                f"({', '.join(owners)} has); leave it out, or give engines [[grid]] tables of "
                "their own"
            )


def _path_of(engine: str, given: Mapping[str, Any]) -> dict[str, str]:
    """How an engine keeps what is selected; another value than its own is refused.

    Raises:
        OptionError: saying what it is.
    """
    is_ours = engine == TRANSFORMERS
    own = {
        "retention": str(RetentionPath.LAYER_TABLES if is_ours else vllm.ENGINES[engine].retention),
        "ownership": (OwnershipGranularity.LAYER if is_ours else vllm.OWNERSHIP).value,
    }
    for name, value in given.items():
        if value != own[name]:
            raise OptionError(
                f"`{name}` is {value!r} with `engine` {engine!r}, expected {own[name]!r}, which is "
                "all that it has; sweep a trace (`--trace`) to compare others"
            )
    return own


def options_of(configuration: Mapping[str, Any]) -> RunOptions:
    """The checked options of a complete configuration of transformers.

    Raises:
        OptionError: if a value cannot be used.
    """
    values = {OPTIONS[name]: value for name, value in configuration.items() if name in OPTIONS}
    values["budget"] = parse_budget(str(values["budget"]))
    return RunOptions(**values)


class LoadedRuns:
    """Runs configurations, and keeps the model of the last one for the next."""

    def __init__(self) -> None:
        """Nothing is loaded before the first run."""
        self._loaded: Any = None
        self._key: tuple[str, str] | None = None

    def run(self, configuration: Mapping[str, Any]) -> dict[str, Any]:
        """Runs the main job once, or vLLM in a process of its own.

        The peak memory of the process is left out of the report: in a process of many runs it
        belongs to none of them.

        Raises:
            OptionError: if the configuration does not fit the model.
            ModelError: if the model cannot be loaded.
            CompactionError: if vLLM's process gives no report.
        """
        engine = configuration["engine"]
        if engine != TRANSFORMERS:
            self._loaded, self._key = None, None  # its memory is vLLM's now
            names = vllm.names_of(engine)
            chosen = {name: value for name, value in configuration.items() if name in names}
            return vllm.run_vllm(vllm.options_of(engine, chosen))
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
        OptionError: if vLLM is to run one that it cannot read, or is of an untested version.
    """
    for model in dict.fromkeys(str(each["model"]) for each in configurations):
        check_model_name(model)
    for each in configurations:
        engine, model = each.get("engine", TRANSFORMERS), str(each["model"])
        if engine != TRANSFORMERS:
            vllm.check_installed_version()
        path = None if model in MODELS else find_model(model)
        if engine != TRANSFORMERS and path is not None and path.suffix == ".gguf":
            raise OptionError(
                f"`model` is {model!r} with `engine` {engine!r}, expected a name or a directory of "
                "safetensors: vLLM reads no .gguf file here"
            )


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
