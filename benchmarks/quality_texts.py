"""What `quality.py` predicts: texts of several kinds, and needles of several lengths and depths."""

from __future__ import annotations

import ast
import functools
import importlib.util
import itertools
import json
import random
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from torch_bridge.prompts import build_prompt
from torch_bridge.tasks import TaskText, make_case

NUM_TEXTS = 10
DEPTHS = 3
"""Needles of each length, at evenly spread depths."""

_DOCUMENTED = (
    *("argparse", "ast", "bisect", "calendar", "cmd", "codecs", "collections", "configparser"),
    *("contextlib", "copy", "csv", "dataclasses", "datetime", "difflib", "dis", "doctest", "enum"),
    *("fractions", "functools", "gettext", "heapq", "inspect", "ipaddress", "locale", "logging"),
    *(
        "mailbox",
        "optparse",
        "pdb",
        "pickle",
        "platform",
        "pprint",
        "random",
        "shutil",
        "statistics",
    ),
    *(
        "subprocess",
        "tarfile",
        "textwrap",
        "threading",
        "traceback",
        "typing",
        "unittest",
        "weakref",
    ),
)
_WORDS = (
    *("amber", "basalt", "cedar", "delta", "ember", "fjord", "garnet", "harbor", "indigo"),
    *("juniper", "kelp", "lagoon", "maple", "nectar", "onyx", "pebble", "quartz", "russet"),
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A context and the tokens that follow it."""

    name: str
    context: list[int]
    tokens: list[int]


def text_jobs(tokenizer: Any, *, context_tokens: int, num_tokens: int, num_texts: int) -> list[Job]:
    """The first `num_texts` of `NUM_TEXTS` texts.

    Sources, the manual and docstrings give two texts each, one behind the other; a table, a log and
    records, made from a seed, and the names of characters one each.
    """
    step = context_tokens + num_tokens
    num_characters = 16 * step
    kinds = {
        "code": (None, 2),
        "manual": ("\n\n".join(topics[name] for name in sorted(topics)), 2),
        "docstrings": (_docstrings(), 2),
        "table": (_text(_table(), num_characters), 1),
        "log": (_text(_log(), num_characters), 1),
        "records": (_text(_records(), num_characters), 1),
        "characters": (_text(_characters(), num_characters), 1),
    }
    jobs: list[Job] = []
    for kind, (text, num_each) in kinds.items():
        ids = build_prompt(tokenizer, context_tokens=num_each * step, prompt=text).token_ids
        for place in range(num_each):
            mine = ids[place * step :][:step]
            if len(mine) < step:
                raise SystemExit(f"the text {kind!r} is too short for {step} tokens; ask for fewer")
            job = Job(
                name=f"text {kind} {place}",
                context=mine[:context_tokens],
                tokens=mine[context_tokens:],
            )
            jobs.append(job)
    return jobs[:num_texts]


def needle_jobs(tokenizer: Any, *, lengths: list[int]) -> list[Job]:
    """Numbers hidden at `DEPTHS` depths of texts of each length, and asked for at their end."""
    text = TaskText(tokenizer)
    jobs = []
    for length in lengths:
        for place in range(DEPTHS):
            case = make_case(
                "needle", text, context_tokens=length, case=place, num_cases=DEPTHS, seed=length
            )
            name = f"needle {length} tokens, depth {case.depth:.2f}"
            jobs.append(Job(name=name, context=case.context, tokens=case.answer))
    return jobs


@functools.cache
def _docstrings() -> str:
    """What modules of the standard library say of themselves, without their code."""
    found = []
    for name in _DOCUMENTED:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) > 80:
                    found.append(f"{getattr(node, 'name', name)}: {text}")
    return "\n\n".join(found)


def _records() -> Iterator[str]:
    draw = random.Random("records")
    yield "Orders, one JSON object a line:"
    for number in itertools.count(1):
        item = draw.choice(_WORDS)
        count, price = draw.randrange(1, 20), _WORDS.index(item) + 3
        record = {"order": number, "item": item, "count": count, "sum": count * price}
        yield json.dumps({**record, "paid": draw.random() < 0.5})


def _table() -> Iterator[str]:
    draw = random.Random("table")
    yield "| city | year | rain | mean |\n| --- | --- | --- | --- |"
    totals: dict[str, list[int]] = {city: [] for city in _WORDS}
    for year in itertools.count(1900):
        for place, (city, own) in enumerate(totals.items()):
            own.append(40 * place + draw.randrange(100))
            yield f"| {city} | {year} | {own[-1]} | {sum(own) / len(own):.1f} |"


def _log() -> Iterator[str]:
    draw = random.Random("log")
    seconds, open_by_user = 0, {}
    while True:
        seconds += draw.randrange(1, 9)
        user = draw.choice(_WORDS)
        if user in open_by_user:
            what = f"closed session {open_by_user.pop(user)}"
        else:
            open_by_user[user] = draw.randrange(1000, 10_000)
            what = f"opened session {open_by_user[user]} from 10.0.{_WORDS.index(user)}.7"
        hours, minutes = seconds // 3600, seconds // 60 % 60
        yield f"{hours:02}:{minutes:02}:{seconds % 60:02} INFO server: user {user} {what}"


def _characters() -> Iterator[str]:
    """Numbers and names of characters, as Unicode has them."""
    for number in range(0xC0, 0x3000):
        name = unicodedata.name(chr(number), "")
        if name:
            yield f"U+{number:04X} {name}"


def _text(lines: Iterator[str], num_characters: int) -> str:
    """The first lines, at least so many characters if there are."""
    found, num_found = [], 0
    for line in lines:
        found.append(line)
        num_found += len(line) + 1
        if num_found > num_characters:
            break
    return "\n".join(found)
