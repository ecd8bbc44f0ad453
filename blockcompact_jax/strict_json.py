"""JSON as its standard has it: no NaN, no infinity, neither read nor written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from blockcompact_jax.errors import CompactionError


def parse_json(text: str) -> Any:
    """Parses one JSON value.

    Raises:
        ValueError: if it is no JSON, or holds NaN, an infinity or a number beyond float64. The
            message says so and names no file.
    """
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def read_object(path: Path, *, argument: str) -> dict[str, Any]:
    """Reads a file with one JSON object.

    Raises:
        CompactionError: if it cannot be read or holds something else.
    """
    try:
        document: Any = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CompactionError(
            f"`{argument}` is {str(path)!r}, which cannot be read ({error.strerror}); give a file "
            "that is there and yours to read."
        ) from error
    except ValueError as error:
        raise CompactionError(
            f"`{argument}` is {str(path)!r}, which is no JSON ({error}); give the file as a "
            "command wrote it."
        ) from error
    if not isinstance(document, dict):
        raise CompactionError(
            f"`{argument}` is {str(path)!r}, which holds no JSON object; give the file as a "
            "command wrote it."
        )
    return cast(dict[str, Any], document)


def check_finite(value: object, name: str) -> None:
    """Refuses a value with NaN or an infinity anywhere inside.

    Args:
        value: plain JSON values.
        name: what it is, for the error.

    Raises:
        CompactionError: naming the first one.
    """
    if isinstance(value, float):
        if not math.isfinite(value):
            raise CompactionError(
                f"`{name}` is {value}, which JSON cannot hold; expected a finite number, or None "
                "where nothing was measured."
            )
    elif isinstance(value, Mapping):
        for key, part in cast(Mapping[object, object], value).items():
            check_finite(part, f"{name}.{key}")
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for place, part in enumerate(cast(Sequence[object], value)):
            check_finite(part, f"{name}[{place}]")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is beyond the range of float64")
    return number


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")
