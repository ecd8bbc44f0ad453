"""The ledger's tables for docs/ledger.md, from the data that the ledger itself reads."""

import re

from blockcompact_jax.errors import ResultCode
from blockcompact_jax.ledger.kinds import EventKind, OperationStage, SlotEvent, SlotState
from blockcompact_jax.ledger.tables import (
    AWAITED_ALWAYS,
    AWAITED_WITH_SIDE_BUFFER,
    AWAITED_WITH_SLOTS,
    GUARD_CODES,
    GUARDED_EVENTS,
    MISSING_CODES,
    OPERATION_END,
    OPERATION_VERDICTS,
    PREREQUISITES,
    REQUEST_TRANSITIONS,
    SLOT_END,
    SLOT_TRANSITIONS,
    disposition_of,
)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _names(members) -> str:
    ordered = sorted(members)
    return ", ".join(member.name for member in ordered) if ordered else "none"


def slots() -> str:
    """Slot transitions."""
    events = [event for event in SlotEvent if event is not SlotEvent.NONE]
    rows = []
    for state in SlotState:
        found = [SLOT_TRANSITIONS.get((state, event)) for event in events]
        cells = [reached.name if reached is not None else "" for reached in found]
        end = SLOT_END[state]
        rows.append([state.name, *cells, "" if end is SlotEvent.NONE else f"as {end.name}"])
    return _table(["slot", *(event.name for event in events), "its request ends"], rows)


def slot_diagram() -> str:
    """Slot transitions as a state diagram."""
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> FREE"]
    for (state, event), reached in SLOT_TRANSITIONS.items():
        lines.append(f"    {state.name} --> {reached.name}: {event.name}")
    return "\n".join([*lines, "```"])


def operation_diagram() -> str:
    """Operation stages as a state diagram."""
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> STAGED: STAGE"]
    for stage, verdicts in OPERATION_VERDICTS.items():
        for event, verdict in verdicts.items():
            if isinstance(verdict, OperationStage):
                lines.append(f"    {stage.name} --> {verdict.name}: {event.name}")
    lines.append("    DRAINING --> ABORTED: holds no slot")
    return "\n".join([*lines, "```"])


def operations() -> str:
    """What every stage answers to every event."""
    events = [event for event in EventKind if EventKind.RESERVE <= event <= EventKind.ABORT]
    rows = []
    for stage, verdicts in OPERATION_VERDICTS.items():
        cells = []
        for event in events:
            verdict = verdicts[event]
            is_stage = isinstance(verdict, OperationStage)
            cells.append(f"**{verdict.name}**" if is_stage else verdict.name)
        rows.append([stage.name, *cells, OPERATION_END[stage].name])
    return _table(["stage", *(event.name for event in events), "its request ends"], rows)


def requests() -> str:
    """Request transitions."""
    rows = [
        [state.name, event.name, reached.name]
        for (state, event), reached in REQUEST_TRANSITIONS.items()
    ]
    return _table(["request", "event", "becomes"], rows)


def conditions() -> str:
    """What a commit waits for."""
    rows = []
    for condition, prerequisites in PREREQUISITES.items():
        when = "always"
        if condition in AWAITED_WITH_SLOTS:
            when = "with slots"
        elif condition in AWAITED_WITH_SIDE_BUFFER:
            when = "with a side buffer"
        elif condition not in AWAITED_ALWAYS:
            when = "never"
        missing = MISSING_CODES[condition].name
        rows.append([condition.name, when, _names(prerequisites), missing])
    return _table(["condition", "awaited", "after", "if missing"], rows)


def guards() -> str:
    """Which guard is asked of which event."""
    every = frozenset(EventKind) - {EventKind.NONE}
    rows = []
    for guard, events in GUARDED_EVENTS.items():
        others = every - events
        asked = _names(events)
        if not others:
            asked = "every event"
        elif len(others) < 4:
            asked = f"every event but {_names(others)}"
        rows.append([str(int(guard) + 1), guard.name, asked, _names(GUARD_CODES[guard])])
    return _table(["", "guard", "asked of", "otherwise"], rows)


def dispositions() -> str:
    """What each code means for its event."""
    codes = [code for guard in GUARD_CODES.values() for code in guard]
    by_disposition: dict[str, set[ResultCode]] = {}
    for code in (ResultCode.OK, *codes):
        by_disposition.setdefault(disposition_of(code).name, set()).add(code)
    return _table(
        ["disposition", "codes"], [[name, _names(each)] for name, each in by_disposition.items()]
    )


SECTIONS = {
    function.__name__: function
    for function in (
        slot_diagram,
        slots,
        operation_diagram,
        operations,
        requests,
        conditions,
        guards,
        dispositions,
    )
}


def fill(page: str) -> str:
    """Returns the page with every section between its markers written anew."""
    for name, render in SECTIONS.items():
        pattern = rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)"
        page, count = re.subn(pattern, rf"\g<1>{render()}\n\g<2>", page, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"docs/ledger.md has {count} sections `{name}`; expected one")
    return page
