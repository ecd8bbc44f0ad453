"""Runs the configurations of a sweep in one process; a model is loaded once for all of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockcompact_jax.provenance import sha256_of_text
from torch_bridge.budget import Budget, OptionError, parse_budget
from torch_bridge.huggingface.options import RunOptions
from torch_bridge.models.progress import StageObserver

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
    unknown = sorted(set(configuration) - set(OPTIONS))
    if unknown:
        raise OptionError(
            f"`{unknown[0]}` is no option of a sweep; expected one of {', '.join(OPTIONS)}"
        )
    defaults = RunOptions()
    plain: dict[str, Any] = {}
    for name, field_name in OPTIONS.items():
        default = getattr(defaults, field_name)
        value = configuration.get(name, default)
        plain[name] = _as_type_of(name, value, default)
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


def _as_type_of(name: str, value: Any, default: Any) -> Any:
    """A value with the type of the default, from text or from TOML; nothing is rounded."""
    if isinstance(default, Budget):
        return str(parse_budget(str(value)))
    if isinstance(default, bool):
        texts = {"true": True, "false": False}
        value = texts.get(value, value) if isinstance(value, str) else value
        if isinstance(value, bool):
            return value
    elif isinstance(default, str):
        if isinstance(value, str):
            return value
    else:
        try:
            number = type(default)(value)
        except (TypeError, ValueError):
            number = None
        if number is not None and not isinstance(value, bool) and float(number) == float(value):
            return number
    expected = {bool: "true or false", str: "a text", int: "a whole number", float: "a number"}
    raise OptionError(f"`{name}` is {value!r} in the sweep, expected {expected[type(default)]}")


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
        return report


def fetch_models(configurations: list[dict[str, Any]], observer: StageObserver) -> None:
    """Finds every model and fetches those with a short name; no run of the sweep waits for one.

    Raises:
        UnknownModelError: if one is no short name, path or hub name; before any is fetched.
        FetchError: if one cannot be fetched.
    """
    from torch_bridge.models.load import locate_model
    from torch_bridge.models.registry import MODELS

    models = dict.fromkeys(str(each["model"]) for each in configurations)
    for model in sorted(models, key=lambda name: name in MODELS):  # short names are fetched last
        locate_model(model, observer)


def local_weights(configurations: list[dict[str, Any]]) -> dict[str, str]:
    """A digest for each model that is a local file or directory: its name says nothing of them.

    It is one of the files' names, sizes and times, not of their gigabytes. A short name fixes its
    files; those of a hub name lie in the hub's cache and are not looked at.
    """
    from torch_bridge.models.registry import MODELS

    digests: dict[str, str] = {}
    for model in dict.fromkeys(str(each["model"]) for each in configurations):
        path = Path(model).expanduser()
        if not model.strip() or model in MODELS or not path.exists():
            continue
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        states = [(each, each.stat()) for each in files if each.is_file()]
        lines = [
            f"{each.relative_to(path).as_posix()} {state.st_size} {state.st_mtime_ns}"
            for each, state in states
        ]
        digests[model] = sha256_of_text("\n".join(lines))
    return digests
