"""Reads the numbered contracts out of their document."""

from __future__ import annotations

import re
from dataclasses import dataclass

from blockcompact_jax.errors import CompactionError

CONTRACT_NUMBER = re.compile(r"(?<![A-Za-z0-9])([A-Z]{3})[-_](\d+)(?![A-Za-z0-9])")
"""A contract's number in prose (SEL-3) or in a name (SEL_3)."""

_HEADING = re.compile(r"^##\s+([A-Z]{3})\s+—\s+(.*)$")
_OTHER_HEADING = re.compile(r"^#{1,6}\s")
_BULLET = re.compile(r"^-\s+([A-Z]{3}-\d+)\s+(.*)$")
_IN_PROSE = re.compile(r"(?:^|(?<=\s))([A-Z]{3}-\d+):\s")


@dataclass(frozen=True, kw_only=True)
class Contract:
    """One contract.

    Attributes:
        number: such as "SEL-3".
        family: its three letters.
        family_title: what its section is about.
        text: what must hold.
    """

    number: str
    family: str
    family_title: str
    text: str


def numbers_in(text: str) -> tuple[str, ...]:
    """Contract numbers that stand literally in a text, in order, each once."""
    return tuple(
        dict.fromkeys(f"{match[1]}-{match[2]}" for match in CONTRACT_NUMBER.finditer(text))
    )


def parse_contracts(document: str) -> tuple[Contract, ...]:
    """Finds the contracts of a Markdown document, in its order.

    A contract stands in the section of its family, `## SEL — title`: as a bullet `- SEL-3 text`, or
    within a paragraph as `MET-1: text`. A number mentioned anywhere else defines nothing.

    Raises:
        CompactionError: if a number is defined twice, a bullet stands in another family's section,
            a bullet there names a number and defines none, or the document has no contract.
    """
    found: list[Contract] = []
    family, title = "", ""
    for paragraph in _paragraphs(document):
        heading = _HEADING.match(paragraph)
        if heading is not None:
            family, title = heading[1], heading[2].strip()
        elif _OTHER_HEADING.match(paragraph):
            family, title = "", ""
        elif family:
            for number, text in _defined_in(paragraph, family):
                if not number.startswith(f"{family}-"):
                    raise CompactionError(
                        f"`document` defines {number} in the section of {family}; move it to "
                        "the section of its own family."
                    )
                contract = Contract(number=number, family=family, family_title=title, text=text)
                found.append(contract)
    numbers = [contract.number for contract in found]
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    if twice:
        raise CompactionError(f"`document` defines {', '.join(twice)} twice; give each one text.")
    if not found:
        raise CompactionError(
            "`document` has no contract; expected sections `## SEL — title` with bullets "
            "`- SEL-1 text`."
        )
    return tuple(found)


def _paragraphs(document: str) -> list[str]:
    """Headings, bullets and paragraphs, each on one line."""
    parts: list[str] = []
    is_open = False
    for raw in document.splitlines():
        line = raw.strip()
        is_heading = _OTHER_HEADING.match(line) is not None
        if is_open and line and not is_heading and not line.startswith("- "):
            parts[-1] += f" {line}"
        elif line:
            parts.append(line)
        is_open = bool(line) and not is_heading
    return parts


def _defined_in(paragraph: str, family: str) -> list[tuple[str, str]]:
    bullet = _BULLET.match(paragraph)
    if bullet is not None:
        return [(bullet[1], bullet[2])]
    starts = list(_IN_PROSE.finditer(paragraph))
    if not starts:
        # Of this family alone: UTF-8 and SHA-256 look like numbers of others.
        if paragraph.startswith("- ") and any(n[:3] == family for n in numbers_in(paragraph)):
            raise CompactionError(
                f"`document` has the bullet {paragraph[:60]!r}, which names a number and defines "
                "none; begin it `- SEL-3 text`, or write it as a sentence."
            )
        return []
    ends = [start.start() for start in starts[1:]] + [len(paragraph)]
    return [
        (start[1], paragraph[start.end() : end].strip())
        for start, end in zip(starts, ends, strict=True)
    ]
