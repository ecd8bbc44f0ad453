"""The course of a run: what was resident after each selection, and what each round decided.

A runtime and a session fill it where somebody asks; otherwise nothing is recorded.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from jaxtyping import Bool, Int

from blockcompact_jax.costs import decision_row
from blockcompact_jax.errors import CompactionError
from blockcompact_jax.ids import HOLE
from blockcompact_jax.metrics import CompactionMetrics
from blockcompact_jax.reselection import RoundDecision
from blockcompact_jax.residency import Residency
from blockcompact_jax.upload import UploadPlan

SCHEMA = "blockcompact run course, version 1"
MAX_RESIDENCY_BYTES = 1 << 20
"""Text of residency maps that a course keeps; beyond it every second selection is left out."""


@dataclass(frozen=True, kw_only=True)
class SelectionRecord:
    """One selection as it was committed.

    Attributes:
        num_tokens: confirmed tokens.
        budget_blocks: blocks a layer that were asked for.
        resident_blocks: bool [row, candidate], whether a candidate is resident. Logical blocks from
            `candidate` on are the always-resident tail.
        num_uploaded: [row], blocks whose bytes were uploaded.
        num_kept: [row], blocks that were resident before and still are.
        num_dropped: [row], blocks that were resident before and are no longer.
        booked: the metrics of this selection alone.
    """

    num_tokens: int
    budget_blocks: int
    resident_blocks: Bool[np.ndarray, "row candidate"]
    num_uploaded: Int[np.ndarray, " row"]
    num_kept: Int[np.ndarray, " row"]
    num_dropped: Int[np.ndarray, " row"]
    booked: CompactionMetrics


def record_selection(
    before: Residency,
    after: Residency,
    upload: UploadPlan,
    *,
    num_tokens: int,
    num_candidate_blocks: int,
    budget_blocks: int,
    booked: CompactionMetrics,
) -> SelectionRecord:
    """What a selection changed, row by row.

    Args:
        before: what the previous selection left resident; blocks that left the tail since are not
            in it, so they are neither kept nor uploaded nor dropped.
        after: what is resident now.
        upload: the rows that were uploaded.
        num_tokens: confirmed tokens.
        num_candidate_blocks: whole confirmed blocks before the tail.
        budget_blocks: blocks a layer that were asked for.
        booked: the metrics of this selection alone.
    """
    was, now = (_is_resident(each, num_candidate_blocks) for each in (before, after))
    layer_rows = np.asarray(upload.layer_row)
    return SelectionRecord(
        num_tokens=num_tokens,
        budget_blocks=budget_blocks,
        resident_blocks=now,
        num_uploaded=np.bincount(layer_rows[layer_rows != HOLE], minlength=len(now)),
        num_kept=(was & now).sum(axis=1),
        num_dropped=(was & ~now).sum(axis=1),
        booked=booked,
    )


def _is_resident(residency: Residency, num_blocks: int) -> Bool[np.ndarray, "row block"]:
    logical = np.asarray(residency.logical_by_slot)
    row, slot = np.nonzero(logical != HOLE)
    is_resident = np.zeros((len(logical), num_blocks), bool)
    is_resident[row, logical[row, slot]] = True
    return is_resident


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One round of drafting and verification.

    Attributes:
        num_drafted: tokens drafted, those past the last wanted one left out.
        num_accepted: of these, tokens accepted.
        num_gained: tokens gained, the verifier's own one included.
        round_us: its time in microseconds.
        decision: whether it ended a cycle, and why.
    """

    num_drafted: int
    num_accepted: int
    num_gained: int
    round_us: float
    decision: RoundDecision


class RunCourse:
    """Collects selections and rounds in order.

    Residency maps are kept as bits up to `max_residency_bytes` of text; beyond it only every second
    selection stays, then every fourth, and so on. Rounds all stay.
    """

    def __init__(
        self,
        *,
        layers: tuple[int, ...],
        block_tokens: int,
        max_residency_bytes: int = MAX_RESIDENCY_BYTES,
    ) -> None:
        """Starts empty.

        Args:
            layers: decoder layer ID of each row.
            block_tokens: tokens a block.
            max_residency_bytes: text that all residency maps may take together.
        """
        self._layers = layers
        self._block_tokens = block_tokens
        self._max_residency_bytes = max_residency_bytes
        self._selections: list[dict[str, Any]] = []
        self._num_selections = 0
        self._stride = 1
        self._rounds: list[RoundRecord] = []

    def add_selection(self, record: SelectionRecord) -> None:
        """Takes the next selection."""
        number = self._num_selections
        self._num_selections += 1
        if number % self._stride:
            return
        self._selections.append(
            {
                "number": number,
                "after_round": len(self._rounds),
                "num_tokens": record.num_tokens,
                "num_candidate_blocks": record.resident_blocks.shape[1],
                "budget_blocks": record.budget_blocks,
                "resident": [_bits(row) for row in record.resident_blocks],
                "num_uploaded": record.num_uploaded.tolist(),
                "num_kept": record.num_kept.tolist(),
                "num_dropped": record.num_dropped.tolist(),
                "metrics": record.booked.to_dict(),
            }
        )
        while self._residency_bytes() > self._max_residency_bytes and len(self._selections) > 1:
            self._stride *= 2
            self._selections = [
                each for each in self._selections if each["number"] % self._stride == 0
            ]

    def add_round(self, record: RoundRecord) -> None:
        """Takes the next round."""
        self._rounds.append(record)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values.

        A residency map is base64 of a bit for each candidate block, the lowest bit of a byte first.
        A term without a value is null and named in `unmeasured`; an assumed one in `assumed`.
        """
        rows = [_round_row(number, each) for number, each in enumerate(self._rounds, start=1)]
        columns = list(rows[0]) if rows else []
        return {
            "schema": SCHEMA,
            "layers": list(self._layers),
            "block_tokens": self._block_tokens,
            "num_selections": self._num_selections,
            "selection_stride": self._stride,
            "selections": self._selections,
            "rounds": {"columns": columns, "rows": [list(row.values()) for row in rows]},
        }

    def _residency_bytes(self) -> int:
        return sum(len(row) for each in self._selections for row in each["resident"])


def _bits(row: Bool[np.ndarray, " block"]) -> str:
    return base64.b64encode(np.packbits(row, bitorder="little").tobytes()).decode("ascii")


def _round_row(number: int, record: RoundRecord) -> dict[str, Any]:
    decision = record.decision
    row: dict[str, Any] = {
        "round": number,
        "age_rounds": decision.age_rounds,
        "action": "select anew" if decision.is_reselecting else "go on",
        "basis": decision.basis.value,
        "num_drafted": record.num_drafted,
        "num_accepted": record.num_accepted,
        "num_gained": record.num_gained,
        "round_us": record.round_us,
    }
    return row if decision.retention is None else row | decision_row(decision.retention)


_COURSE_FIELDS = {
    "layers": list,
    "block_tokens": int,
    "num_selections": int,
    "selection_stride": int,
    "selections": list,
    "rounds": dict,
}
_ROW_FIELDS = {"resident": str, "num_uploaded": int, "num_kept": int, "num_dropped": int}
_SELECTION_FIELDS = {
    **dict.fromkeys(("number", "after_round", "num_tokens", "num_candidate_blocks"), int),
    "metrics": dict,
    **dict.fromkeys(_ROW_FIELDS, list),
}
_ROUND_FIELDS = {"columns": list, "rows": list}
_ROUND_COLUMNS = ("round", "num_drafted", "num_accepted", "num_gained", "action", "basis")


def check_course(document: Any) -> dict[str, Any]:
    """Refuses what is not the course of a run as `RunCourse.to_dict` gives it.

    Returns:
        The document.

    Raises:
        CompactionError: naming what is missing or does not fit.
    """
    if not isinstance(document, dict) or cast(dict[str, Any], document).get("schema") != SCHEMA:
        raise CompactionError(f"`course` is none of a run; expected `schema` {SCHEMA!r}.")
    course = cast(dict[str, Any], document)
    _check_fields(course, _COURSE_FIELDS, where="")
    for place, selection in enumerate(course["selections"]):
        _check_selection(selection, len(course["layers"]), where=f" in `selections[{place}]`")
    _check_rounds(course["rounds"])
    return course


def _check_fields(given: Any, kinds: dict[str, type], *, where: str) -> None:
    fields = cast(dict[str, Any], given) if isinstance(given, dict) else {}
    for name, kind in kinds.items():
        if not isinstance(fields.get(name), kind):
            raise CompactionError(
                f"`course` has no usable `{name}`{where}; expected a {kind.__name__}."
            )


def _check_selection(selection: Any, num_rows: int, *, where: str) -> None:
    _check_fields(selection, _SELECTION_FIELDS, where=where)
    for name, kind in _ROW_FIELDS.items():
        rows = selection[name]
        if len(rows) != num_rows:
            raise CompactionError(
                f"`course` has {len(rows)} rows of `{name}`{where}; expected one for each of "
                f"{num_rows} layers."
            )
        if not all(isinstance(row, kind) for row in rows):
            raise CompactionError(
                f"`course` has a row of `{name}`{where} that is no {kind.__name__}."
            )


def _check_rounds(rounds: Any) -> None:
    _check_fields(rounds, _ROUND_FIELDS, where=" in `rounds`")
    columns, rows = rounds["columns"], rounds["rows"]
    missing = [name for name in _ROUND_COLUMNS if rows and name not in columns]
    if missing:
        raise CompactionError(f"`course` has rounds without `{missing[0]}`.")
    for place, row in enumerate(rows):
        if not isinstance(row, list) or len(cast(list[Any], row)) != len(columns):
            raise CompactionError(
                f"`course` has no usable `rows[{place}]` in `rounds`; expected a list of "
                f"{len(columns)} values, one for each column."
            )
