"""One real text forced through the stock model, the verifier and the draft: what differs, by kind.

The verifier attends to the full KV in packed blocks and must agree with the stock model within a
tolerance. The draft attends to resident blocks only: how far it is off is what the policy costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from blockcompact_jax.budget import OptionError
from blockcompact_jax.compare import (
    TOLERANCES,
    NumericComparison,
    PolicyDifference,
    Tolerance,
    comparable_positions,
    compare_logits,
    compare_selections,
)
from blockcompact_jax.kernels import Layout
from blockcompact_jax.paths import PathComparison, compare_paths
from torch_bridge.dlpack import to_jax
from torch_bridge.huggingface.attention import STOCK_ATTENTION
from torch_bridge.huggingface.baseline import StockPrefix
from torch_bridge.huggingface.options import NullObserver, RunObserver, RunOptions
from torch_bridge.huggingface.policies import score_source
from torch_bridge.huggingface.session import (
    CompactionSession,
    SessionLimits,
    effective_budget_blocks,
)
from torch_bridge.models.load import LoadedModel
from torch_bridge.prompts import build_forced_text

_UNSIGNED = {2: torch.uint16, 4: torch.uint32}


@dataclass(frozen=True, kw_only=True)
class ForcedComparison:
    """Four results side by side, none drawn from another.

    Attributes:
        paths: bytes on all transport and retention paths, with the model's own KV and scores.
        numeric: logits of the verifier against the stock model's.
        draft: logits of the draft against the stock model's: a policy result, held to nothing.
        selections: blocks that attention and recency would select, each selection.
        num_context_tokens: tokens that all sides prefilled alike.
        num_forced_tokens: tokens forced after them, several a forward.
    """

    paths: PathComparison
    numeric: NumericComparison
    draft: NumericComparison
    selections: tuple[PolicyDifference, ...]
    num_context_tokens: int
    num_forced_tokens: int

    @property
    def is_held(self) -> bool:
        """Whether no byte differs and no logit is out of tolerance, whatever the policy costs."""
        return self.paths.is_equal and self.numeric.violation_rate == 0

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return {**asdict(self), "is_held": self.is_held}


@dataclass
class _Side:
    """Logits of one side, and the tokens that its forwards consumed for them."""

    logits: list[torch.Tensor] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


@dataclass
class _Forced:
    """What the session gave along the text."""

    scores: list[np.ndarray[Any, Any]]
    verified: _Side = field(default_factory=_Side)
    drafted: _Side = field(default_factory=_Side)


def compare_forced(
    options: RunOptions, loaded: LoadedModel, *, observer: RunObserver | None = None
) -> ForcedComparison:
    """Compares the paths of one model along one text.

    Args:
        options: what to run; the prompt must be longer than `context_tokens` by `num_new_tokens`,
            which are the tokens forced.
        loaded: the model of `options`, in their dtype.
        observer: hears of stages and progress.

    Raises:
        OptionError: if the prompt is too short, or has too few whole blocks for the budget.
    """
    watcher = observer or NullObserver()
    context, forced = _tokens(options, loaded)
    num_draft_tokens = min(options.num_draft_tokens, len(forced) - 1) or 1
    limits = SessionLimits(
        max_tokens=len(context) + len(forced) + num_draft_tokens,
        num_draft_tokens=num_draft_tokens,
        num_lookup_tokens=0,
        reselect_every_rounds=options.reselect_every_rounds,
        block_tokens=options.block_tokens,
        budget=options.budget,
    )
    layout = Layout[options.layout.upper()]
    chunks = list(_chunks(forced, num_draft_tokens + 1))
    with CompactionSession(
        model=loaded.model,
        limits=limits,
        score_source=score_source("attention", seed=options.seed),
        layout=layout,
        attention=options.attention,
    ) as session:
        watcher.on_stage(f"prefilling {len(context):,} tokens", None)
        session.prefill(context)
        prefix = StockPrefix(session.cache)
        along = _force(session, chunks, options, watcher)
        loaded.model.set_attn_implementation(STOCK_ATTENTION)
        watcher.on_stage("forcing the text through the stock model", len(forced))
        expected = _force_stock(loaded, prefix, chunks, watcher)
        watcher.on_stage("comparing bytes on every path", None)
        paths = _compare_paths(session, along.scores, options, layout, len(context))
    tolerance = TOLERANCES[options.dtype]
    return ForcedComparison(
        paths=paths,
        numeric=_compare_sides(expected, along.verified, tolerance),
        draft=_compare_sides(expected, along.drafted, tolerance),
        selections=_selections(along.scores, _budget_blocks(options, len(context))),
        num_context_tokens=len(context),
        num_forced_tokens=len(forced),
    )


def _tokens(options: RunOptions, loaded: LoadedModel) -> tuple[list[int], list[int]]:
    prompt = build_forced_text(
        loaded,
        context_tokens=options.context_tokens,
        forced_tokens=options.num_new_tokens,
        prompt=options.prompt,
        prompt_file=options.prompt_file,
    )
    num_whole_blocks = options.context_tokens // options.block_tokens
    budget = _budget_blocks(options, options.context_tokens)
    if budget > num_whole_blocks:
        raise OptionError(
            f"`context` {options.context_tokens} has {num_whole_blocks} whole blocks, fewer than "
            f"the budget of {budget}. Give a longer context"
        )
    return prompt.token_ids[: options.context_tokens], prompt.token_ids[options.context_tokens :]


def _chunks(tokens: list[int], num_tokens: int) -> Iterator[list[int]]:
    for first in range(0, len(tokens), num_tokens):
        yield tokens[first : first + num_tokens]


def _force(
    session: CompactionSession, chunks: list[list[int]], options: RunOptions, watcher: RunObserver
) -> _Forced:
    """Drafts and verifies every chunk of the text; all its tokens are kept, whatever they cost."""
    along = _Forced(scores=[_block_scores(session)])
    num_done = 0
    watcher.on_stage("forcing the text through draft and verifier", sum(map(len, chunks)))
    for number, chunk in enumerate(chunks, start=1):
        # A step at a time, as drafts are made; the verifier takes all of them at once.
        with _consumed_tokens(session.model, along.drafted.tokens):
            along.drafted.logits += [session.draft_step([token]).clone() for token in chunk]
        is_scored = number % options.reselect_every_rounds == 0
        with _consumed_tokens(session.model, along.verified.tokens):
            along.verified.logits.append(session.verify(chunk, is_scored=is_scored).clone())
        session.confirm(len(chunk))
        if is_scored:
            along.scores.append(_block_scores(session))
            session.reselect()
        num_done += len(chunk)
        watcher.on_progress(num_done)
    return along


def _force_stock(
    loaded: LoadedModel, prefix: StockPrefix, chunks: list[list[int]], watcher: RunObserver
) -> _Side:
    stock = prefix.to_stock(loaded.model.config)
    side = _Side()
    num_done = 0
    with torch.inference_mode(), _consumed_tokens(loaded.model, side.tokens):
        for chunk in chunks:
            inputs = torch.tensor([chunk])
            out = loaded.model(inputs, past_key_values=stock, use_cache=True)
            side.logits.append(out.logits[0])
            num_done += len(chunk)
            watcher.on_progress(num_done)
    return side


@contextmanager
def _consumed_tokens(model: PreTrainedModel, tokens: list[int]) -> Iterator[None]:
    """Adds the tokens that reach the model's embedding, whatever the caller meant to give it."""

    def add(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        tokens.extend(inputs[0].flatten().tolist())

    handle = model.get_input_embeddings().register_forward_pre_hook(add)
    try:
        yield
    finally:
        handle.remove()


def _compare_sides(expected: _Side, actual: _Side, tolerance: Tolerance) -> NumericComparison:
    return compare_logits(
        _stacked(expected.logits),
        _stacked(actual.logits),
        is_comparable=comparable_positions(np.array(expected.tokens), np.array(actual.tokens)),
        tolerance=tolerance,
    )


def _block_scores(session: CompactionSession) -> np.ndarray[Any, Any]:
    """Mean attention mass of each block, [row, block]: heads and positions reduced."""
    mass = np.array(to_jax(session.blocks.mass))
    return mass.mean(axis=(1, 2), dtype=np.float32)


def _budget_blocks(options: RunOptions, num_context_tokens: int) -> int:
    return effective_budget_blocks(options.budget, num_context_tokens // options.block_tokens)


def _compare_paths(
    session: CompactionSession,
    scores: list[np.ndarray[Any, Any]],
    options: RunOptions,
    layout: Layout,
    num_context_tokens: int,
) -> PathComparison:
    packed = session.full.packed
    return compare_paths(
        packed.view(_UNSIGNED[packed.element_size()]).numpy(),
        scores,
        geometry=session.geometry,
        layout=layout,
        num_candidate_blocks=num_context_tokens // options.block_tokens,
        budget_blocks=_budget_blocks(options, num_context_tokens),
    )


def _selections(
    scores: list[np.ndarray[Any, Any]], budget_blocks: int
) -> tuple[PolicyDifference, ...]:
    """What attention would select against the newest blocks."""
    differences: list[PolicyDifference] = []
    for each in scores:
        num_blocks = int(np.flatnonzero(each.any(axis=0)).max(initial=0)) + 1
        best = np.argsort(-each[:, :num_blocks], axis=1, kind="stable")[:, :budget_blocks]
        newest = np.arange(max(num_blocks - budget_blocks, 0), num_blocks)
        differences.append(compare_selections(list(best), [newest] * len(best)))
    return tuple(differences)


def _stacked(logits: list[torch.Tensor]) -> np.ndarray[Any, Any]:
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in logits]).float().numpy()
