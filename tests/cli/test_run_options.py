"""Budgets and run options: what is read, what is refused, and with which words."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockcompact_jax.budget import Budget, OptionError, parse_budget
from torch_bridge.huggingface.options import RunOptions


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("25%", Budget(fraction=0.25)),
        (" 12.5% ", Budget(fraction=0.125)),
        ("100%", Budget(fraction=1.0)),
        ("0.25", Budget(fraction=0.25)),
        (".5", Budget(fraction=0.5)),
        ("1", Budget(fraction=1.0)),
        ("1.0", Budget(fraction=1.0)),
        ("2", Budget(blocks=2)),
        ("16", Budget(blocks=16)),
        ("16b", Budget(blocks=16)),
        ("1b", Budget(blocks=1)),
    ],
)
def test_budget_is_read_as_documented(text: str, expected: Budget):
    assert parse_budget(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "0", "0%", "0b", "0.0", "101%", "2.5", "1.5b", "-1", "-25%", "16 b", "b", "%"),
        *("1e2", "nan", "inf", "25%b", "1,5", "٣", "16B"),
    ],
)
def test_budget_that_cannot_be_used_is_refused_by_name(text: str):
    with pytest.raises(OptionError, match="`budget`"):
        parse_budget(text)


@given(st.integers(1, 100), st.integers(0, 5000))
def test_fraction_is_rounded_up_exactly(percent: int, num_whole_blocks: int):
    exact = math.ceil(Fraction(percent, 100) * num_whole_blocks)
    assert parse_budget(f"{percent}%").num_blocks(num_whole_blocks) == exact


@given(st.integers(1, 10_000), st.integers(0, 10_000))
def test_count_keeps_at_most_the_candidates(blocks: int, num_whole_blocks: int):
    kept = Budget(blocks=blocks).num_blocks(num_whole_blocks)
    assert kept == min(blocks, num_whole_blocks)


@given(
    st.one_of(st.integers(1, 10_000).map(lambda n: f"{n}b"), st.integers(1, 100).map("{}%".format))
)
def test_budget_text_reads_back_as_the_same_budget(text: str):
    assert str(parse_budget(text)) == text


@pytest.mark.parametrize("fields", [{}, {"fraction": 0.5, "blocks": 2}])
def test_budget_needs_exactly_one_unit(fields: dict[str, float]):
    with pytest.raises(OptionError, match="exactly one"):
        Budget(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "  "),
        ("context_tokens", 0),
        ("num_new_tokens", 0),
        ("block_tokens", 0),
        ("num_draft_tokens", 0),
        ("num_lookup_tokens", -1),
        ("reselect_every_rounds", 0),
        ("policy", "best"),
        ("dtype", "float16"),
        ("layout", "plain"),
        ("block_tokens", 20),
        ("budget", Budget(blocks=1)),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("seed", -1),
        ("seed", 2**63),
    ],
)
def test_option_out_of_range_is_refused_by_name(name: str, value: object):
    with pytest.raises(OptionError, match=f"`{name}`"):
        RunOptions(**{name: value})  # type: ignore[arg-type]


def test_reselect_every_is_a_number_of_rounds_or_auto():
    from blockcompact_jax.cli.errors import UserError
    from blockcompact_jax.cli.run_options import reselection_of

    assert reselection_of("7") == {"reselect_every_rounds": 7}
    assert reselection_of("auto") == {"is_reselecting_online": True}
    for text in ("0", "-1", "1.5", "Auto", "", "٣"):
        with pytest.raises(UserError, match=r"`reselect-every` is .* expected auto or a whole"):
            reselection_of(text)
