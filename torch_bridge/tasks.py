"""Quality tasks made on the spot: a context, and an answer that a good model finds in it.

Every case is drawn from a seed and needs no download: numbers and names are random, the text around
them is that of the standard library. A case of depth 0 has its fact at the beginning of the
context, one of depth 1 at its end. Needs no torch.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from blockcompact_jax.budget import OptionError
from torch_bridge.prompts import build_prompt

_NUM_CODE_TOKENS = 32
_NUM_CHAINS = 3
_NUM_HOPS = 2
_LETTERS = "abcdefghijkmnopqrstuvwxyz"


@dataclass(frozen=True, kw_only=True)
class TaskCase:
    """One question.

    Attributes:
        task: Name of the task.
        depth: Where in the context the fact is that answers it, in [0, 1]; None where everywhere.
        context: Vocabulary IDs up to where the answer begins, the question included.
        answer: Vocabulary IDs of the answer.
    """

    task: str
    depth: float | None
    context: list[int]
    answer: list[int]


class TaskText:
    """A tokenizer, and the text that fills contexts."""

    def __init__(self, tokenizer: Any) -> None:
        """Tokenizes nothing yet.

        Args:
            tokenizer: A transformers tokenizer.
        """
        self._tokenizer = tokenizer
        self.start: list[int] = list(tokenizer("")["input_ids"])
        """What the tokenizer puts before every text, as a BOS token."""

    def encode(self, text: str) -> list[int]:
        """Vocabulary IDs of a piece of text inside of a context."""
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def ask(self, question: str, answer: str) -> tuple[list[int], list[int]]:
        """Vocabulary IDs of a question and of the answer after it, parted as text is tokenized.

        Args:
            question: Without a blank at its end.
            answer: Without a blank at its beginning.
        """
        asked, whole = self.encode(question), self.encode(f"{question} {answer}")
        num_common = 0
        while num_common < len(asked) and asked[num_common] == whole[num_common]:
            num_common += 1
        return whole[:num_common], whole[num_common:]

    def filler(self, num_tokens: int) -> list[int]:
        """The first tokens of the standard library's sources, without `start`.

        Raises:
            PromptError: If it has not so many.
        """
        num_start = len(self.start)
        prompt = build_prompt(self._tokenizer, context_tokens=num_tokens + num_start)
        return prompt.token_ids[num_start:]


def make_case(
    task: str, text: TaskText, *, context_tokens: int, case: int, num_cases: int, seed: int
) -> TaskCase:
    """Makes one case of a task; the same arguments give the same case.

    Args:
        task: One of `TASKS`.
        text: Tokenizer and text.
        context_tokens: Tokens of the context, the question included.
        case: Which, in 0 … num_cases - 1; their facts lie at evenly spread depths.
        num_cases: Cases of the task.
        seed: Seed of numbers and names.

    Raises:
        OptionError: If the context has no room for the task.
    """
    draw = random.Random(f"{seed} {task} {case}")
    made = TASKS[task](text, draw, context_tokens, case, num_cases)
    if len(made.context) != context_tokens or not made.answer:
        raise OptionError(
            f"`context` is {context_tokens} tokens, too few for a case of the task {task!r}; give "
            "a longer one"
        )
    return made


def _needle(
    text: TaskText, draw: random.Random, context_tokens: int, case: int, num_cases: int
) -> TaskCase:
    """A number hidden in a text, asked for at its end."""
    number = draw.randrange(1_000_000, 10_000_000)
    hidden = text.encode(f"\n\n# The secret number of the library is {number}.\n\n")
    asked, answer = text.ask(
        "\n\n# Question: what is the secret number of the library?\n# Answer: it is", f"{number}."
    )
    depth = (case + 0.5) / num_cases
    context = _hide(text, [(depth, hidden)], asked, context_tokens)
    return TaskCase(task="needle", depth=depth, context=context, answer=answer)


def _key_value(
    text: TaskText, draw: random.Random, context_tokens: int, case: int, num_cases: int
) -> TaskCase:
    """A context full of keys and values, one of which is asked for."""
    depth = (case + 0.5) / num_cases
    head = text.encode("The registry of all keys:\n")
    num_room = context_tokens - len(text.start) - len(head)
    lines: list[tuple[str, str, list[int]]] = []
    known: set[str] = set()
    asked_room = 2 * len(text.encode("\nIn this registry, the key abcdef holds 99999.\n"))
    while sum(len(line) for _, _, line in lines) < num_room - asked_room:
        key = _new_name(draw, known)
        value = str(draw.randrange(10_000, 100_000))
        lines.append((key, value, text.encode(f"The key {key} holds {value}.\n")))
    if not lines:
        return TaskCase(task="key-value", depth=depth, context=[], answer=[])
    key, value, _ = lines[int(depth * len(lines))]
    asked, answer = text.ask(f"\nIn this registry, the key {key} holds", f"{value}.")
    listed = [token for _, _, line in lines for token in line]
    num_missing = num_room - len(listed) - len(asked)
    filler = text.filler(num_missing) if num_missing > 0 else []
    context = [*text.start, *filler, *head, *listed, *asked]
    return TaskCase(task="key-value", depth=depth, context=context, answer=answer)


def _variables(
    text: TaskText, draw: random.Random, context_tokens: int, case: int, num_cases: int
) -> TaskCase:
    """Variables that take each other's values; the value of one chain's last is asked for."""
    known: set[str] = set()
    depth = (case + 0.5) / num_cases
    facts: list[tuple[float, list[int]]] = []
    chains: list[tuple[str, str]] = []
    for chain in range(_NUM_CHAINS):
        value = str(draw.randrange(10_000, 100_000))
        names = [f"variable_{_new_name(draw, known)}" for _ in range(_NUM_HOPS)]
        # The chain that is asked for begins at `depth`; all go on towards the end.
        first = depth if chain == 0 else draw.random()
        for hop, (name, source) in enumerate(zip(names, [value, *names[:-1]], strict=True)):
            place = first + (1 - first) * hop / _NUM_HOPS
            facts.append((place, text.encode(f"\n\n{name} = {source}\n\n")))
        chains.append((names[-1], value))
    last, value = chains[0]
    asked, answer = text.ask(f"\n\n# The value of {last} is now", f"{value}.")
    context = _hide(text, sorted(facts), asked, context_tokens)
    return TaskCase(task="variables", depth=depth, context=context, answer=answer)


def _code(
    text: TaskText, draw: random.Random, context_tokens: int, case: int, num_cases: int
) -> TaskCase:
    """A source of the standard library, cut off: how does it go on?"""
    num_before = context_tokens - len(text.start)
    step = num_before + _NUM_CODE_TOKENS
    tokens = text.filler(num_cases * step)[case * step :] if num_before > 0 else []
    return TaskCase(
        task="code",
        depth=None,
        context=[*text.start, *tokens[:num_before]],
        answer=tokens[num_before : num_before + _NUM_CODE_TOKENS],
    )


TASKS: dict[str, Callable[[TaskText, random.Random, int, int, int], TaskCase]] = {
    "needle": _needle,
    "key-value": _key_value,
    "variables": _variables,
    "code": _code,
}
"""Makers of cases, by the names of tasks."""


def parse_tasks(text: str) -> tuple[str, ...]:
    """Reads names of tasks, parted by commas; each once, in the order of `TASKS`.

    Raises:
        OptionError: If one is unknown or there is none.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in TASKS]
    if unknown or not names:
        raise OptionError(
            f"`tasks` is {text!r}, expected some of {', '.join(TASKS)}, parted by commas"
        )
    return tuple(name for name in TASKS if name in names)


def _hide(
    text: TaskText, facts: list[tuple[float, list[int]]], asked: list[int], context_tokens: int
) -> list[int]:
    """A text with facts at their depths, ascending, and the question at its end."""
    num_hidden = sum(len(tokens) for _, tokens in facts)
    num_filler = context_tokens - len(text.start) - num_hidden - len(asked)
    if num_filler < 1:
        return []
    filler = text.filler(num_filler)
    context, before = list(text.start), 0
    for depth, tokens in facts:
        place = int(depth * num_filler)
        context += [*filler[before:place], *tokens]
        before = place
    return [*context, *filler[before:], *asked]


def _new_name(draw: random.Random, known: set[str]) -> str:
    while (name := "".join(draw.choices(_LETTERS, k=6))) in known:
        pass
    known.add(name)
    return name
