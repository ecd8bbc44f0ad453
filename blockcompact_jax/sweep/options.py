"""Configurations completed and typed against the options of what they configure."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Any

from blockcompact_jax.budget import Budget, OptionError, parse_budget
from blockcompact_jax.sweep.grid import Configuration, Value

_MAX_INT = 2**63 - 1
_MAX_SHOWN = 60


def complete_configuration(
    configuration: Mapping[str, Any], *, names: Mapping[str, str], defaults: object
) -> Configuration:
    """Every option of a configuration, defaults filled in, as plain values of the right types.

    Args:
        configuration: Some of the options, typed or as text.
        names: Names of the options, and of the fields of `defaults` that they are.
        defaults: An object with the default of every field.

    Raises:
        OptionError: If a name is unknown or a value has another type.
    """
    unknown = sorted(set(configuration) - set(names))
    if unknown:
        raise OptionError(
            f"`{unknown[0]}` is no option of a sweep; expected one of {', '.join(names)}"
        )
    plain: Configuration = {}
    for name, field_name in names.items():
        default = getattr(defaults, field_name)
        plain[name] = _as_type_of(name, configuration.get(name, default), default)
    return plain


def _as_type_of(name: str, value: Any, default: Any) -> Value:
    """A value with the type of the default, from text or from TOML; nothing is rounded."""
    if isinstance(default, Budget):
        return str(parse_budget(str(value)))
    if isinstance(default, enum.Enum):
        return _as_member(name, value, type(default))
    if isinstance(default, bool):
        texts = {"true": True, "false": False}
        value = texts.get(value, value) if isinstance(value, str) else value
        if isinstance(value, bool):
            return value
    elif isinstance(default, str):
        if isinstance(value, str):
            return value
    else:
        number = _as_number(value, float if isinstance(default, float) else int)
        if number is not None:
            return number
    expected = {
        bool: "true or false",
        str: "a text",
        int: "a whole number of 64 bits",
        float: "a number",
    }
    raise OptionError(
        f"`{name}` is {_shown(value)} in the sweep, expected {expected[type(default)]}"
    )


def _as_number(value: Any, kind: type[int] | type[float]) -> int | float | None:
    """The same number as a whole one or a float; None where there is none."""
    if isinstance(value, bool):
        return None
    try:
        number = kind(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if isinstance(number, int) and not -_MAX_INT <= number <= _MAX_INT:
        return None
    is_same = not math.isnan(number) if isinstance(value, str) else number == value
    return number if is_same else None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def _as_member(name: str, value: Any, kind: type[enum.Enum]) -> str:
    """The text of an enumeration's member, from the member or its text."""
    known = {str(member.value) for member in kind}
    text = str(value.value) if isinstance(value, enum.Enum) else value
    if text not in known:
        raise OptionError(
            f"`{name}` is {value!r} in the sweep, expected one of {', '.join(sorted(known))}"
        )
    return str(text)
