"""Runs the configurations of a sweep over one recorded trace. Needs no model and no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockcompact_jax.budget import OptionError, parse_budget
from blockcompact_jax.errors import CompactionError
from blockcompact_jax.geometry import OwnershipGranularity
from blockcompact_jax.provenance import sha256_of
from blockcompact_jax.retention_path import RetentionPath
from blockcompact_jax.scores import HeadReduction
from blockcompact_jax.selection import LayerBudget
from blockcompact_jax.sweep.grid import Configuration
from blockcompact_jax.sweep.options import complete_configuration
from blockcompact_jax.traces.scores import BlockScores
from blockcompact_jax.traces.store import read_trace
from blockcompact_jax.traces.study import StudyOptions, rounded, study_trace

TRACE_OPTIONS = tuple(StudyOptions.__dataclass_fields__)
"""Names in a sweep over a trace: the fields of `StudyOptions`."""

DEFAULT_TRACE_GRID: dict[str, list[Any]] = {
    "policy": ["attention", "page_bounds", "recency", "random"],
    "budget": ["10%", "25%", "50%"],
}
"""What a sweep over a trace runs without options: what each way of scoring keeps."""


def complete_trace_run(configuration: Mapping[str, Any], *, trace: Path) -> Configuration:
    """Every option of a configuration, and the trace it is for.

    Args:
        configuration: Some of `TRACE_OPTIONS`.
        trace: The file of the trace; its name is part of the configuration.

    Raises:
        OptionError: If a name is unknown or a value cannot be used.
    """
    names = {name: name for name in TRACE_OPTIONS}
    plain = complete_configuration(configuration, names=names, defaults=StudyOptions())
    _options_of(plain)
    return {"trace": trace.name, **plain}


class TraceRuns:
    """Runs configurations over a trace; it is read, and scored, once for all of them."""

    def __init__(self, path: Path) -> None:
        """Reads nothing before the first run.

        Args:
            path: The trace.
        """
        self._path = path
        self._scores: BlockScores | None = None

    def digests(self) -> dict[str, str]:
        """SHA-256 of the file, by the name it has in configurations.

        Raises:
            CompactionError: If it cannot be read.
        """
        try:
            return {self._path.name: sha256_of(self._path)}
        except OSError as error:
            raise CompactionError(
                f"`trace` is {str(self._path)!r}, which cannot be read ({error.strerror})."
            ) from error

    def open(self) -> BlockScores:
        """The trace, read at the first call, and the scores of its blocks.

        Raises:
            CompactionError: If it cannot be used.
        """
        if self._scores is None:
            self._scores = BlockScores(read_trace(self._path))
        return self._scores

    def run(self, configuration: Mapping[str, Any]) -> dict[str, Any]:
        """What one configuration keeps of the trace's attention.

        Raises:
            OptionError: If a value cannot be used.
            CompactionError: If the trace cannot be read, or the configuration does not fit it.
        """
        scores = self.open()
        options = _options_of({name: configuration[name] for name in TRACE_OPTIONS})
        study, trace = study_trace(scores, options), scores.trace
        return {
            "model": trace.model,
            "weights": trace.weights,
            "dtype": trace.dtype,
            "context_tokens": trace.num_context_tokens,
            "block_tokens": options.block_tokens,
            "budget_blocks": study.budget_blocks,
            "num_layers": trace.num_rows,
            "metrics": study.path.metrics.to_dict(),  # of plans: nothing was moved or timed
            "study": rounded(study),
        }


def _options_of(configuration: Mapping[str, Any]) -> StudyOptions:
    values = dict(configuration)
    budget = parse_budget(str(values.pop("budget")))
    reduction = HeadReduction(values.pop("head_reduction"))
    layer_budget = LayerBudget(values.pop("layer_budget"))
    retention = RetentionPath(values.pop("retention"))
    ownership = OwnershipGranularity(values.pop("ownership"))
    try:
        return StudyOptions(
            budget=budget,
            head_reduction=reduction,
            layer_budget=layer_budget,
            retention=retention,
            ownership=ownership,
            **values,
        )
    except CompactionError as error:
        raise OptionError(str(error)) from error
