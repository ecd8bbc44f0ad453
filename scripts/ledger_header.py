"""The ledger's tables as a C++ header, from the data that the ledger itself reads."""

import enum
from collections.abc import Iterable
from dataclasses import fields

from blockcompact_jax.errors import ResultCode
from blockcompact_jax.ledger.kinds import (
    Condition,
    Disposition,
    EventKind,
    OperationStage,
    RequestState,
    SlotEvent,
    SlotState,
)
from blockcompact_jax.ledger.rules import NO_STATE, RULES
from blockcompact_jax.ledger.state import EVENT_FIELDS, LedgerState, Operations, Requests, Slots
from blockcompact_jax.ledger.tables import (
    AWAITED_ALWAYS,
    AWAITED_WITH_SIDE_BUFFER,
    AWAITED_WITH_SLOTS,
    GUARD_CODES,
    MISSING_CODES,
    NAMED_FIELDS,
    Guard,
    bits_of,
    disposition_of,
)

_LINE = 100


def _pascal(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _wrapped(head: str, parts: Iterable[str], tail: str) -> str:
    """Returns a list in braces, on one line where it fits."""
    values = list(parts)
    line = f"{head}{', '.join(values)}{tail}"
    if len(line) <= _LINE:
        return line
    lines, indent = [head], "    "
    for value in values:
        part = f"{value}, "
        if len(lines[-1]) + len(part.rstrip()) > _LINE or lines[-1] == head:
            lines.append(indent)
        lines[-1] += part
    lines[-1] = lines[-1].removesuffix(", ") + tail
    return "\n".join(line.rstrip() for line in lines)


def _enum(kind: type[enum.IntEnum], name: str | None = None) -> str:
    members = (f"k{_pascal(each.name)} = {int(each)}" for each in kind)
    return _wrapped(f"enum class {name or kind.__name__} : int32_t {{", members, "};")


def _vector(name: str, values: Iterable[int]) -> str:
    numbers = [str(int(value)) for value in values]
    return _wrapped(f"constexpr int32_t {name}[{len(numbers)}] = {{", numbers, "};")


def _matrix(name: str, rows: Iterable[Iterable[int]]) -> str:
    lines = ["{" + ", ".join(str(int(value)) for value in row) + "}" for row in rows]
    width = lines[0].count(",") + 1
    body = ",\n".join(f"    {line}" for line in lines)
    return f"constexpr int32_t {name}[{len(lines)}][{width}] = {{\n{body}}};"


def _columns() -> str:
    names: list[str] = []
    parts = {"slots": Slots, "operations": Operations, "requests": Requests}
    for entry in fields(LedgerState):
        if entry.metadata.get("static"):
            continue
        part = parts.get(entry.name)
        inner = [f"_{each.name}" for each in fields(part)] if part else [""]
        names += [f"k{_pascal(entry.name + name)}" for name in inner]
    return _wrapped("enum class Column : int32_t {", [*names, "kCount"], "};")


def render() -> str:
    """Returns the header."""
    named = [[name in NAMED_FIELDS[kind] for name in EVENT_FIELDS] for kind in EventKind]
    sections = [
        "// The rules of the commit ledger. Written by scripts/ledger_tables.py; do not edit.\n"
        "#pragma once",
        "// clang-format off",
        "#include <cstdint>",
        "namespace blockcompact::ledger {",
        f"constexpr int32_t kNoState = {NO_STATE};\n"
        f"constexpr int32_t kNumConditions = {len(Condition)};",
        *map(_enum, (SlotState, SlotEvent, OperationStage, RequestState, EventKind, Condition)),
        *map(_enum, (Disposition, Guard, ResultCode)),
        "// Columns of an event, in order.\n"
        "struct Event {\n" + "\n".join(f"  int32_t {name};" for name in EVENT_FIELDS) + "\n};",
        f"// Columns of a state, in order.\n{_columns()}",
        "// [SlotState][SlotEvent]\n" + _matrix("kSlotNext", RULES.slot_next),
        _vector("kSlotEnd", RULES.slot_end),
        "// [RequestState][EventKind]\n" + _matrix("kRequestNext", RULES.request_next),
        "// [OperationStage][EventKind]\n" + _matrix("kOperationNext", RULES.operation_next),
        "// [OperationStage][EventKind]\n" + _matrix("kOperationCode", RULES.operation_code),
        _vector("kOperationEnd", RULES.operation_end),
        _vector("kPrerequisites", RULES.prerequisites),
        _vector("kMissingCode", (MISSING_CODES[each] for each in Condition)),
        "// [Guard][EventKind]\n" + _matrix("kGuarded", RULES.guarded),
        _vector("kGuardCode", (GUARD_CODES[guard][0] for guard in Guard)),
        "// [EventKind][column of an event]\n" + _matrix("kNamed", named),
        _vector("kDisposition", (disposition_of(code) for code in ResultCode)),
        "\n".join(
            f"constexpr int32_t {name} = {bits_of(conditions)};"
            for name, conditions in (
                ("kAwaitedAlways", AWAITED_ALWAYS),
                ("kAwaitedWithSlots", AWAITED_WITH_SLOTS),
                ("kAwaitedWithSideBuffer", AWAITED_WITH_SIDE_BUFFER),
            )
        ),
        "}  // namespace blockcompact::ledger",
        "// clang-format on",
    ]
    return "\n\n".join(sections) + "\n"
