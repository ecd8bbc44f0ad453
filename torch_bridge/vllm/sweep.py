"""vLLM as an engine of a sweep: its options, and a process of its own for each configuration.

A process that has had one vLLM engine is not the same again, so each configuration gets a fresh
one. Imports no vllm.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockcompact_jax.budget import Budget, OptionError, parse_budget
from blockcompact_jax.errors import CompactionError
from blockcompact_jax.geometry import OwnershipGranularity
from blockcompact_jax.retention_path import RetentionPath
from blockcompact_jax.strict_json import parse_json
from blockcompact_jax.sweep.options import complete_configuration
from torch_bridge.child import Children
from torch_bridge.huggingface.options import RunOptions, check_counts
from torch_bridge.versions import UntestedVersionError, check_version
from torch_bridge.vllm.config import DEFAULT_EVERY_TOKENS, PolicyName

_PROGRAM = "torch_bridge.vllm.measured"
_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR"}
"""What a user's own environment may say otherwise; a report tells what held."""
_BLOCK_MULTIPLE_TOKENS = 32
"""What the packed layouts of vLLM's CPU attention need."""


@dataclass(frozen=True)
class VllmEngine:
    """One policy of vLLM, as a sweep names it.

    Attributes:
        policy: of `additional_config`.
        retention: what it does with what is selected.
    """

    policy: PolicyName
    retention: RetentionPath


ENGINES = {
    "vllm-attend": VllmEngine("attend", RetentionPath.LAYER_TABLES),
    "vllm-retain": VllmEngine("retain", RetentionPath.SHARED_TABLE),
    "vllm-lossless": VllmEngine("lossless", RetentionPath.LAYER_TABLES),
}
"""Names of the engines. vLLM's physical blocks span the layers of a group under each of them."""

OWNERSHIP = OwnershipGranularity.GROUP

OPTIONS = {
    "model": "model",
    "dtype": "dtype",
    "context": "context_tokens",
    "new_tokens": "num_new_tokens",
    "block_tokens": "block_tokens",
    "policy": "selection",
    "budget": "budget",
    "reselect_every_tokens": "reselect_every_tokens",
    "seed": "seed",
    "compare_full": "compare_full",
}
"""Names in a sweep, and the fields of `VllmRunOptions`."""

DRAFT_OPTIONS = {"draft_tokens": "num_draft_tokens"}
"""What "vllm-lossless" has besides."""


@dataclass(frozen=True, kw_only=True)
class VllmRunOptions:
    """What one configuration runs. Checked when constructed.

    Attributes:
        engine: one of `ENGINES`.
        model: as of `RunOptions`, as are the fields of equal names; no .gguf file.
        dtype: data type of weights and KV.
        context_tokens: prompt tokens; the prompt is that of a run with transformers.
        num_new_tokens: tokens to generate.
        block_tokens: tokens per block, a multiple of 32.
        selection: "attention", the only selection policy that vLLM's policies have.
        budget: whole blocks that a layer attends to.
        reselect_every_tokens: most generated tokens between two selections.
        num_draft_tokens: tokens drafted a step, under "vllm-lossless".
        seed: vLLM's.
        compare_full: also decode with stock attention, in the same process, and compare.
    """

    engine: str
    model: str = "smollm2-135m"
    dtype: str = "float32"
    context_tokens: int = 2048
    num_new_tokens: int = 128
    block_tokens: int = 32
    selection: str = "attention"
    budget: Budget = field(default_factory=lambda: Budget(fraction=0.25))
    reselect_every_tokens: int = DEFAULT_EVERY_TOKENS
    num_draft_tokens: int = 8
    seed: int = 0
    compare_full: bool = True

    def __post_init__(self) -> None:
        values: Any = {
            name: getattr(self, name)
            for name in (
                *("model", "dtype", "context_tokens", "num_new_tokens", "block_tokens", "budget"),
                *("num_draft_tokens", "seed"),
            )
        }
        RunOptions(layout="vec", **values)
        check_counts(reselect_every_tokens=self.reselect_every_tokens)
        if self.selection != "attention":
            raise OptionError(
                f"`policy` is {self.selection!r} with `engine` {self.engine!r}, expected "
                "'attention': vLLM's policies select by attention alone"
            )
        if self.block_tokens % _BLOCK_MULTIPLE_TOKENS:
            raise OptionError(
                f"`block_tokens` is {self.block_tokens} with `engine` {self.engine!r}, expected a "
                f"multiple of {_BLOCK_MULTIPLE_TOKENS}, as vLLM's packed KV needs"
            )


def names_of(engine: str) -> dict[str, str]:
    """Names of the options of an engine, and their fields."""
    return OPTIONS | (DRAFT_OPTIONS if ENGINES[engine].policy == "lossless" else {})


def complete_vllm(engine: str, configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of one engine's configuration, as plain values.

    Args:
        engine: one of `ENGINES`.
        configuration: some of the options that it has.

    Raises:
        OptionError: if a name is unknown or a value cannot be used.
    """
    plain = complete_configuration(
        configuration, names=names_of(engine), defaults=VllmRunOptions(engine=engine)
    )
    options_of(engine, plain)
    return plain


def options_of(engine: str, configuration: Mapping[str, Any]) -> VllmRunOptions:
    """The checked options of a complete configuration.

    Raises:
        OptionError: if a value cannot be used.
    """
    names = names_of(engine)
    values = {names[name]: value for name, value in configuration.items()}
    values["budget"] = parse_budget(str(values["budget"]))
    return VllmRunOptions(engine=engine, **values)


def check_installed_version() -> None:
    """Refuses a version of vLLM that was not tested; nothing where none is installed.

    Raises:
        OptionError: for another version.
    """
    try:
        check_version("vLLM")
    except UntestedVersionError as error:
        raise OptionError(f"`engine` needs another vLLM: {error}") from error


def run_vllm(options: VllmRunOptions) -> dict[str, Any]:
    """Runs one configuration in a process of its own, which ends with this one (see `Children`).

    Args:
        options: what to run.

    Returns:
        The report, as plain JSON values.

    Raises:
        CompactionError: with what the process said, if it gives no report.
    """
    request = {**vars(options), "budget": str(options.budget)}
    # In the caller's folder, so that relative paths mean what they mean here, but not looking for
    # modules there: one named as a package of vLLM's would hide it, in processes of its own too.
    fixed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONSAFEPATH": "1"}
    environment = {**_ENVIRONMENT, **os.environ, **fixed}
    with (
        Children() as children,
        tempfile.TemporaryDirectory(prefix="blockcompact-vllm-") as folder,
    ):
        answer, log = Path(folder, "answer.json"), Path(folder, "log")
        command = [sys.executable, "-m", _PROGRAM, json.dumps(request), str(answer)]
        with (
            log.open("wb") as said,
            children.start(command, stdout=said, stderr=said, env=environment) as child,
        ):
            code = child.wait()
        if answer.exists():
            found: Any = parse_json(answer.read_text(encoding="utf-8"))
            if "error" not in found:
                return found
            raise CompactionError(f"`engine` {options.engine!r}: {found['error']}")
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise CompactionError(
            f"`engine` {options.engine!r}: its process ended with {code} and no report "
            f"({lines[-1] if lines else 'no output'})."
        )
