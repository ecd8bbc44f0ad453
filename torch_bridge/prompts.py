"""Prompts of a decoding run: what the user gave, or a long text that every machine has."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from blockcompact_jax.budget import OptionError

# Long, pure Python modules of the standard library, in a fixed order: over a million characters.
_MODULES = (
    *("argparse", "inspect", "typing", "tarfile", "doctest", "pydoc", "pickletools", "locale"),
    *("_pydecimal", "subprocess", "threading", "mailbox", "difflib", "statistics", "imaplib"),
    *("ssl", "optparse", "fractions", "pdb", "shutil", "ftplib", "smtplib", "socket", "plistlib"),
)


class PromptError(ValueError):
    """A prompt is empty, unreadable, not text, or too long to build."""


@dataclass(frozen=True)
class Prompt:
    """The tokens a run prefills.

    Attributes:
        token_ids: Vocabulary IDs of token positions 0 … num_tokens-1, with BOS where the tokenizer
            adds it.
        source: Where the text came from, for people.
        num_available_tokens: Tokens of the whole text; more than `num_tokens` when it was cut.
    """

    token_ids: list[int]
    source: str
    num_available_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.token_ids)

    @property
    def is_cut(self) -> bool:
        """Whether the text was longer than the context asked for."""
        return self.num_tokens < self.num_available_tokens


def build_prompt(
    tokenizer: Any,
    *,
    context_tokens: int,
    prompt: str | None = None,
    prompt_file: Path | None = None,
) -> Prompt:
    """Tokenize the prompt of a run.

    A text longer than `context_tokens` is cut to its first `context_tokens` tokens. A given text
    that is shorter is used whole, and the run's context is then `num_tokens`. Without a given
    text the sources of fixed standard library modules serve: the same on every machine with the
    same Python release.

    Args:
        tokenizer: A transformers tokenizer; special tokens are added as it is configured.
        context_tokens: Tokens wanted, at least 1.
        prompt: The text itself.
        prompt_file: A UTF-8 file with the text; not together with `prompt`.

    Returns:
        At least one and at most `context_tokens` tokens.

    Raises:
        PromptError: The text is empty, the file cannot be read or is not UTF-8 text, both are
            given, or the standard library's sources do not suffice.
    """
    if context_tokens < 1:
        raise PromptError(f"`context_tokens` is {context_tokens}, expected 1 or more")
    text = read_prompt(prompt, prompt_file)
    if text is None:
        return _standard_library_prompt(tokenizer, context_tokens)
    source = "given text" if prompt_file is None else str(prompt_file)
    return _cut(_encode(tokenizer, text), source, context_tokens)


class PositionedModel(Protocol):
    """What a text is built for; `LoadedModel` is one."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    @property
    def tokenizer(self) -> Any:
        """A transformers tokenizer."""
        ...

    @property
    def max_positions(self) -> int | None:
        """Positions that the model has; None if it does not say."""
        ...


def build_forced_text(
    loaded: PositionedModel,
    *,
    context_tokens: int,
    forced_tokens: int,
    prompt: str | None = None,
    prompt_file: Path | None = None,
) -> Prompt:
    """Tokenize a context and the tokens of the same text that are forced after it.

    Args:
        loaded: The model that reads them.
        context_tokens: Tokens of the context, at least 1.
        forced_tokens: Tokens after it.
        prompt: As `build_prompt`.
        prompt_file: As `build_prompt`.

    Returns:
        Exactly so many tokens together.

    Raises:
        OptionError: The model has too few positions, or the text too few tokens.
        PromptError: As `build_prompt`.
    """
    num_wanted = context_tokens + forced_tokens
    both = f"`context` {context_tokens:,} and {forced_tokens:,} forced tokens"
    if loaded.max_positions is not None and num_wanted > loaded.max_positions:
        raise OptionError(
            f"{both} exceed the {loaded.max_positions:,} positions of {loaded.name}; lower one of "
            "them"
        )
    text = build_prompt(
        loaded.tokenizer, context_tokens=num_wanted, prompt=prompt, prompt_file=prompt_file
    )
    if text.num_tokens < num_wanted:
        raise OptionError(
            f"{both} need a text of {num_wanted:,}; it has {text.num_tokens:,}. Lower one of them"
        )
    return text


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str | None:
    """The text the user gave, checked; None where neither argument is given.

    Args:
        prompt: The text itself.
        prompt_file: A UTF-8 file with the text; not together with `prompt`.

    Raises:
        PromptError: The text is empty, the file cannot be read or is not UTF-8 text, or both are
            given.
    """
    if prompt is not None and prompt_file is not None:
        raise PromptError("`prompt` and `prompt_file` are both given, expected at most one")
    text = prompt if prompt_file is None else _read_file(prompt_file)
    if text is not None and not text.strip():
        name = "prompt" if prompt_file is None else "prompt_file"
        raise PromptError(f"`{name}` is empty, expected text; leave it out for the built-in prompt")
    return text


def _read_file(path: Path) -> str:
    """The text of a UTF-8 file."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise PromptError(
            f"`prompt_file` {str(path)!r} cannot be read ({error.strerror}); give a text file"
        ) from error
    except UnicodeDecodeError as error:
        raise PromptError(
            f"`prompt_file` {str(path)!r} is not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from error
    if "\0" in text:
        raise PromptError(f"`prompt_file` {str(path)!r} holds NUL bytes, expected a text file")
    return text


def _standard_library_prompt(tokenizer: Any, context_tokens: int) -> Prompt:
    """The first `context_tokens` tokens of the standard library's sources."""
    text = ""
    token_ids: list[int] = []
    used: list[str] = []
    for name in _MODULES:
        source_text = _module_source(name)
        if source_text is None:
            continue
        text += f"# Module {name} of the Python standard library\n\n{source_text}\n\n"
        used.append(name)
        # No vocabulary averages fewer than two characters a token here: skip needless encoding.
        if len(text) >= 2 * context_tokens:
            token_ids = _encode(tokenizer, text)
            if len(token_ids) >= context_tokens:
                source = f"standard library sources ({', '.join(used)})"
                return _cut(token_ids, source, context_tokens)
    raise PromptError(
        f"`context_tokens` is {context_tokens}, but the built-in prompt has only "
        f"{len(token_ids or _encode(tokenizer, text))} tokens on this machine; ask for fewer or "
        "give `prompt_file`"
    )


def _module_source(name: str) -> str | None:
    """The source text of a standard library module, or None where this Python has it not."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        return Path(spec.origin).read_text(encoding="utf-8")
    except OSError:
        return None


def _encode(tokenizer: Any, text: str) -> list[int]:
    """Vocabulary IDs of the whole text, whatever length the tokenizer thinks models have."""
    return list(tokenizer(text, verbose=False)["input_ids"])


def _cut(token_ids: list[int], source: str, context_tokens: int) -> Prompt:
    """The first `context_tokens` of `token_ids`."""
    return Prompt(token_ids[:context_tokens], source, len(token_ids))
