"""Self-speculative decoding inside of `generate()`, through its `custom_generate` argument.

    model.generate(**inputs, custom_generate=lossless_generate, budget="25%", max_new_tokens=64)

Every row is drafted on its resident blocks and verified on its full KV: greedy tokens are the full
model's own, sampled ones are drawn from its distribution.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from blockcompact_jax.budget import Budget, OptionError, check_budget, parse_budget
from blockcompact_jax.kernels import Layout
from blockcompact_jax.reselection import OnlineReselection
from torch_bridge.huggingface.options import (
    AttentionName,
    LayoutName,
    check_counts,
    check_names,
)
from torch_bridge.huggingface.padding import num_padding_tokens
from torch_bridge.huggingface.policies import score_source
from torch_bridge.huggingface.sampling import ProcessedSampler, Sampler
from torch_bridge.huggingface.session import CompactionSession, SessionLimits
from torch_bridge.huggingface.speculate import decode_speculative

_OF_ONE_TOKEN = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
"""Processors that look at one token's logits only, and not at the tokens before."""

_FIRST_ROUNDS = 4
"""Period where none is given, and the one that "auto" starts with."""

_HONOURED = ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep")
"""Keywords of the model's forward that a session's forwards take into account or do not need."""


def lossless_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    budget: Budget | str = "25%",
    num_draft_tokens: int = 8,
    num_lookup_tokens: int = 7,
    reselect_every_rounds: int | Literal["auto"] = _FIRST_ROUNDS,
    block_tokens: int = 32,
    layout: LayoutName = "amx",
    attention: AttentionName = "blocks",
    token_streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Decodes the rows of a batch one after the other; pass it to `generate(custom_generate=…)`.

    `generate()` itself gives the first five arguments and `model_kwargs`; all others are keywords
    of the call. It does not hand `streamer` on to such a function: use `token_streamer`.

    Args:
        model: a decoder-only model with stock SDPA attention, on the CPU.
        input_ids: [batch, num_tokens], prompts, padded on the left where they differ in length.
        logits_processor: temperature, top-k, top-p, min-p, typical, epsilon or eta; greedy
            decoding takes the best of what they leave.
        stopping_criteria: asked after every token, with the row's tokens and no scores. `max_time`
            counts from the call, for all rows together: a row begun after it gets one token.
        generation_config: greedy or sampling.
        budget: share or number of whole blocks that each layer of the draft keeps resident.
        num_draft_tokens: tokens drafted a round.
        num_lookup_tokens: tokens of one draft forward that repetition in the text may suggest.
        reselect_every_rounds: rounds between two selections; "auto" lets the costs measured along
            each row decide.
        block_tokens: tokens a block.
        layout: packed layout of the full KV.
        attention: "blocks", or "gathered" for the bits of stock attention.
        token_streamer: hears every row's tokens as they are confirmed; for a batch of one.
        **model_kwargs: what `generate()` prepared for the model's forward; a keyword that would
            change it and cannot be honoured is refused.

    Returns:
        As `generate()`: [batch, num_tokens + num_new], padded on the right.

    Raises:
        ValueError: for what self-speculation cannot honour, by name.
        OptionError: for an option that cannot be used.
        UnsupportedModelError: for an architecture or a dtype that is not supported.
    """
    period_rounds, online = _period(reselect_every_rounds)
    check_names(layout=layout, attention=attention)
    limits = SessionLimits(  # one size for all rows: planning is compiled once
        max_tokens=generation_config.max_length + num_draft_tokens,
        num_draft_tokens=num_draft_tokens,
        num_lookup_tokens=num_lookup_tokens,
        reselect_every_rounds=period_rounds,
        block_tokens=block_tokens,
        budget=parse_budget(budget) if isinstance(budget, str) else budget,
    )
    _check_limits(limits)
    _check(input_ids, logits_processor, generation_config, model_kwargs, token_streamer)
    contexts = _contexts(input_ids, model_kwargs)
    sampler = _sampler(generation_config, logits_processor)
    if token_streamer is not None:
        token_streamer.put(input_ids.cpu())
    rows = [_Row(prompt, stopping_criteria, token_streamer) for prompt in input_ids]
    packed = Layout[layout.upper()]
    for row, context in zip(rows, contexts, strict=True):
        source = score_source("attention", seed=0)
        with CompactionSession(
            model=model,
            limits=limits,
            score_source=source,
            layout=packed,
            attention=attention,
            online=online,
        ) as session:
            decode_speculative(
                session,
                context,
                first_token=sampler.choose(session.prefill(context)),
                num_tokens=generation_config.max_length - input_ids.shape[1],
                sampler=sampler,
                eos_token_ids=frozenset(),
                on_tokens=row.add,
            )
    if token_streamer is not None:
        token_streamer.end()
    sequences = _joined(input_ids, [row.new_tokens for row in rows], generation_config)
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
    return sequences


def _check_limits(limits: SessionLimits) -> None:
    check_budget(limits.budget)
    check_counts(
        num_draft_tokens=limits.num_draft_tokens,
        reselect_every_rounds=limits.reselect_every_rounds,
        block_tokens=limits.block_tokens,
    )
    check_counts(minimum=0, num_lookup_tokens=limits.num_lookup_tokens)


def _contexts(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> list[list[int]]:
    """Every row's prompt without its padding."""
    mask = model_kwargs.get("attention_mask")
    padding = num_padding_tokens(
        None if mask is None else mask.bool()[:, None, None], input_ids.shape[0]
    )
    return [prompt[first:].tolist() for prompt, first in zip(input_ids, padding, strict=True)]


class _Row:
    """Takes a row's tokens one by one, until a stopping criterion is met."""

    def __init__(
        self,
        prompt: torch.Tensor,
        stopping_criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None,
    ) -> None:
        self._input_ids = prompt[None]
        self._stopping_criteria = stopping_criteria
        self._streamer = streamer
        self.new_tokens: list[int] = []

    def add(self, tokens: list[int]) -> bool:
        """Returns True where the row ends; tokens after its end are left out."""
        for token in tokens:
            self.new_tokens.append(token)
            newest = torch.tensor([[token]])
            self._input_ids = torch.cat([self._input_ids, newest], dim=1)
            if self._streamer is not None:
                self._streamer.put(newest[0])
            if bool(self._stopping_criteria(self._input_ids, None).all()):  # type: ignore[arg-type]
                return True
        return False


def _sampler(config: GenerationConfig, processors: LogitsProcessorList) -> Sampler:
    """A sampler whose draws follow torch's own seed."""
    if not config.do_sample:
        return ProcessedSampler(processors, seed=0, is_greedy=True)
    return ProcessedSampler(processors, seed=int(torch.randint(2**62, (1,))))


def _joined(
    input_ids: torch.Tensor, rows: list[list[int]], config: GenerationConfig
) -> torch.Tensor:
    padding = config._pad_token_tensor
    longest = max(len(row) for row in rows)
    new = torch.full((len(rows), longest), 0 if padding is None else int(padding))
    for place, row in enumerate(rows):
        new[place, : len(row)] = torch.tensor(row)
    return torch.cat([input_ids, new.to(input_ids.dtype)], dim=1)


def _period(reselect_every_rounds: Any) -> tuple[int, OnlineReselection | None]:
    """The fixed period, and how an online choice starts; None where there is none."""
    if reselect_every_rounds == "auto":
        return _FIRST_ROUNDS, OnlineReselection()
    if not isinstance(reselect_every_rounds, int) or isinstance(reselect_every_rounds, bool):
        raise OptionError(
            f"`reselect_every_rounds` is {reselect_every_rounds!r}, expected a whole number of 1 "
            "or more, or 'auto'"
        )
    return reselect_every_rounds, None


def _check(
    input_ids: torch.Tensor,
    processors: LogitsProcessorList,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    streamer: BaseStreamer | None,
) -> None:
    """Refuses what would be ignored or change the output."""
    for processor in processors:
        if type(processor) not in _OF_ONE_TOKEN:  # a subclass may look at the tokens before
            raise ValueError(
                f"`logits_processor` has a {type(processor).__name__}; expected only "
                f"{', '.join(kind.__name__ for kind in _OF_ONE_TOKEN)}: drafts are verified "
                "together, so a token's logits may not depend on the tokens before. Leave it out."
            )
    if config.num_beams and config.num_beams > 1:
        raise ValueError(f"`num_beams` is {config.num_beams}; expected 1: beams are not supported")
    if config.prefill_chunk_size is not None:
        raise ValueError("`prefill_chunk_size` is set; the prompt is prefilled in one forward")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise ValueError(f"`{name}` is set; only the tokens are returned. Leave it out.")
    _check_model_kwargs(input_ids, model_kwargs)
    if streamer is not None and input_ids.shape[0] > 1:
        raise OptionError(
            f"`token_streamer` is given for a batch of {input_ids.shape[0]}; expected one row"
        )


def _check_model_kwargs(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> None:
    """Refuses keywords of the model's forward that a session's forwards would not hand on."""
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length():
        raise ValueError(
            f"`past_key_values` holds {cache.get_seq_length()} tokens; expected no cache or an "
            "empty one, as the prompt is prefilled anew"
        )
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("`inputs_embeds` is given; expected `input_ids`")
    mask = model_kwargs.get("attention_mask")
    if mask is None:
        mask = torch.ones_like(input_ids)
    positions = model_kwargs.get("position_ids")
    is_visible = mask.bool()
    expected = mask.long().cumsum(-1) - 1
    if positions is not None and (
        positions.shape[-1:] != expected.shape[-1:]
        or not bool(((positions == expected) | ~is_visible).all())
    ):
        raise ValueError(
            "`position_ids` are given; expected those that `attention_mask` implies, 0 for a row's "
            "first token and one more for each next. Leave them out."
        )
    for name, value in model_kwargs.items():
        if name not in _HONOURED and value is not None and value is not False:
            raise ValueError(
                f"`{name}` is given for the model's forward; expected only "
                f"{', '.join(_HONOURED)}: drafts and verifications would run without. Leave it out."
            )
