"""What an attend cache refuses before anything is changed."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from blockcompact_jax.budget import OptionError
from torch_bridge.held import EveryTokens
from torch_bridge.huggingface.attention import check_attention
from torch_bridge.huggingface.block_attention import BLOCK_ATTENTION_DTYPES
from torch_bridge.huggingface.layers import UnsupportedModelError
from torch_bridge.huggingface.options import SelectionName, check_names

FIRST_TOKENS = 4
"""Period where none is given, and that "auto" starts with."""


def check_model(model: PreTrainedModel) -> None:
    """Refuses a model that is not on the CPU, in another dtype, or without stock attention.

    Raises:
        UnsupportedModelError: saying which.
    """
    check_attention(model)
    if model.dtype not in BLOCK_ATTENTION_DTYPES:
        raise UnsupportedModelError(
            f"the model's dtype is {model.dtype}; expected one of "
            f"{', '.join(map(str, BLOCK_ATTENTION_DTYPES))}"
        )
    if model.device.type != "cpu":
        raise UnsupportedModelError(f"the model is on {model.device}; expected it on the CPU")


def period_of(
    select_by: SelectionName,
    reselect_every_tokens: EveryTokens | None,
    max_mass_lost: float | None,
    decision_log: Path | str | None,
) -> EveryTokens:
    """The period of selections by measured attention; estimates take nothing of it.

    Raises:
        OptionError: for an unknown `select_by`, and for what "estimate" does not take.
    """
    check_names(select_by=select_by)
    measured = {
        "reselect_every_tokens": reselect_every_tokens,
        "max_mass_lost": max_mass_lost,
        "decision_log": decision_log,
    }
    for name, value in measured.items():
        if select_by == "estimate" and value is not None:
            raise OptionError(
                f"`{name}` is {str(value)!r}, but `select_by` 'estimate' selects for every token "
                "and decides nothing; leave it out"
            )
    return FIRST_TOKENS if reselect_every_tokens is None else reselect_every_tokens
