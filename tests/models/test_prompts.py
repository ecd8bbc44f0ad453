"""Prompts: what is taken, cut and refused. A stand-in tokenizer makes one token a word."""

import argparse
from pathlib import Path

import pytest

from torch_bridge.prompts import PromptError, build_prompt


def _tokenizer(text: str, verbose: bool = True) -> dict[str, list[int]]:
    return {"input_ids": [1, *(len(word) for word in text.split())]}


def test_given_text_is_cut_to_its_first_tokens():
    prompt = build_prompt(_tokenizer, context_tokens=3, prompt="a bb ccc dddd")
    assert prompt.token_ids == [1, 1, 2]
    assert prompt.num_available_tokens == 5
    assert prompt.is_cut


def test_short_text_is_used_whole():
    prompt = build_prompt(_tokenizer, context_tokens=100, prompt="a bb")
    assert prompt.token_ids == [1, 1, 2]
    assert prompt.num_tokens == 3
    assert not prompt.is_cut


def test_file_is_read_as_utf8(tmp_path: Path):
    path = tmp_path / "prompt.txt"
    path.write_bytes("\ufeffé ü".encode())
    prompt = build_prompt(_tokenizer, context_tokens=10, prompt_file=path)
    assert prompt.token_ids == [1, 1, 1]
    assert prompt.source == str(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b" \n", "empty"), (b"\xff\xfeabc", "UTF-8"), (b"a\0b", "NUL"), (None, "cannot be read")],
)
def test_unusable_file_is_refused(content: bytes | None, message: str, tmp_path: Path):
    path = tmp_path / "prompt.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PromptError, match=message):
        build_prompt(_tokenizer, context_tokens=10, prompt_file=path)


@pytest.mark.parametrize("text", ["", " \n\t"])
def test_empty_text_is_refused(text: str):
    with pytest.raises(PromptError, match="`prompt` is empty"):
        build_prompt(_tokenizer, context_tokens=10, prompt=text)


def test_two_sources_are_refused(tmp_path: Path):
    with pytest.raises(PromptError, match="at most one"):
        build_prompt(_tokenizer, context_tokens=10, prompt="a", prompt_file=tmp_path)


def test_built_in_prompt_fills_the_context_and_is_a_prefix_of_a_longer_one():
    short = build_prompt(_tokenizer, context_tokens=500)
    long = build_prompt(_tokenizer, context_tokens=60_000)
    assert short.num_tokens == 500
    assert long.num_tokens == 60_000
    assert long.token_ids[:500] == short.token_ids
    first_words = Path(argparse.__file__).read_text(encoding="utf-8").split()[:20]
    header = 8  # "# Module argparse of the Python standard library"
    assert short.token_ids[1 + header :][:20] == [len(word) for word in first_words]


def test_context_beyond_the_built_in_prompt_is_refused():
    with pytest.raises(PromptError, match="`context_tokens` is 100000000"):
        build_prompt(_tokenizer, context_tokens=100_000_000)
