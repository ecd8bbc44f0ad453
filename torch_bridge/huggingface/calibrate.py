"""Measures the terms of a retention decision on this machine, with a real model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import torch

from blockcompact_jax.costs import (
    RetainBenefits,
    RetainCosts,
    RetainDecision,
    TermSource,
    costs_from_metrics,
    decide_retention,
    measured,
)
from blockcompact_jax.kernels import Layout
from blockcompact_jax.metrics import CompactionMetrics
from blockcompact_jax.reselection import (
    OnlineReselection,
    PeriodPrediction,
    Reselection,
)
from blockcompact_jax.round_curves import RoundSample
from torch_bridge.huggingface.options import NullObserver, RunObserver, RunOptions
from torch_bridge.huggingface.policies import score_source
from torch_bridge.huggingface.sampling import Sampler
from torch_bridge.huggingface.session import CompactionSession, SessionLimits
from torch_bridge.huggingface.speculate import decode_speculative, warm_up
from torch_bridge.models.load import LoadedModel

_TIMES = ("plan_us", "table_us", "metadata_us", "wait_us", "allocator_us", "move_us")


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Terms of one retention, medians of several, and the decision that follows.

    Attributes:
        costs: what a retention takes; what this engine does not measure stays unmeasured.
        benefits: a step of one token over the full KV (before) and over the resident blocks
            (after). Both hold the same products over the weights, which cancel. Stalls for
            capacity and the cost of rejected tokens stay unmeasured here.
        decision: the decision of these terms, with every one of them.
        rounds: rounds of drafting and verification by the age of their selection.
        prediction: the best period by these rounds and the selections between them; None where no
            rounds were asked for.
        samples: every sample of each measured term, in microseconds.
    """

    costs: RetainCosts
    benefits: RetainBenefits
    decision: RetainDecision
    rounds: tuple[RoundSample, ...]
    prediction: PeriodPrediction | None
    samples: dict[str, list[float]]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values; the source of a term by its name."""
        return asdict(self, dict_factory=_plain)


def calibrate(
    options: RunOptions,
    loaded: LoadedModel,
    context: list[int],
    *,
    num_samples: int,
    horizon_steps: int,
    margin_us: float = 0.0,
    num_rounds: int = 0,
    observer: RunObserver | None = None,
) -> Calibration:
    """Measures rounds, then retentions and steps, one of each a sample, in turns.

    Args:
        options: block size, budget, layout, attention and drafting to calibrate for.
        loaded: the model of `options`, in their dtype.
        context: tokens to prefill; the newest ones are repeated to decode along.
        num_samples: samples of each term, at least 1.
        horizon_steps: steps between two decisions.
        margin_us: what a benefit must exceed the cost by.
        num_rounds: rounds of decoding to measure, in cycles of the longest period.
        observer: hears of stages and progress.
    """
    watcher = observer or NullObserver()
    limits = SessionLimits(
        max_tokens=num_positions(options, len(context), num_samples, num_rounds),
        num_draft_tokens=options.num_draft_tokens,
        num_lookup_tokens=options.num_lookup_tokens,
        reselect_every_rounds=OnlineReselection.max_period_rounds,
        block_tokens=options.block_tokens,
        budget=options.budget,
    )
    booked: list[CompactionMetrics] = []
    steps: dict[str, list[float]] = {"attention_before": [], "attention_after": []}
    with CompactionSession(
        model=loaded.model,
        limits=limits,
        score_source=score_source(options.policy, seed=options.seed),
        layout=Layout[options.layout.upper()],
        attention=options.attention,
        has_course=True,
    ) as session:
        watcher.on_stage("compiling the planning step", None)
        session.warm_up()
        watcher.on_stage(f"prefilling {len(context):,} tokens", None)
        logits = session.prefill(context)
        if num_rounds:
            _run_rounds(session, context, logits, num_rounds, watcher)
        watcher.on_stage("measuring retentions and steps", num_samples)
        for number in range(num_samples + 1):
            token = [context[number % len(context)]]
            after = _timed_us(lambda token=token: session.draft_step(token))
            session.forget_draft(1)
            before = _timed_us(lambda token=token: session.verify(token, is_scored=False))
            # The same token again, scored: what is timed above records no mass, as a draft does.
            session.verify(token, is_scored=True)
            session.confirm(1)
            session.reselect()
            if number:  # the first of each pays for caches and compilation
                steps["attention_before"].append(before)
                steps["attention_after"].append(after)
                booked.append(session.runtime.last_booked)
            watcher.on_progress(number)
    return _calibration(
        booked,
        steps,
        session.reselection,
        horizon_steps=horizon_steps,
        margin_us=margin_us,
    )


def num_positions(
    options: RunOptions, num_context_tokens: int, num_samples: int, num_rounds: int
) -> int:
    """Positions that a calibration needs at most."""
    num_decoded = num_rounds * (options.num_draft_tokens + 1) + options.num_draft_tokens
    return num_context_tokens + num_samples + 2 + num_decoded


def calibration_facts(options: RunOptions, num_context_tokens: int) -> dict[str, Any]:
    """What a calibration holds for, by the names of `blockcompact_jax.calibration.FACTS`."""
    return {
        "model": options.model,
        "dtype": options.dtype,
        "context_tokens": num_context_tokens,
        "budget": str(options.budget),
        "block_tokens": options.block_tokens,
        "layout": options.layout,
        "attention": options.attention,
        "policy": options.policy,
        "draft_tokens": options.num_draft_tokens,
        "lookup_tokens": options.num_lookup_tokens,
    }


def _run_rounds(
    session: CompactionSession,
    context: list[int],
    logits: torch.Tensor,
    num_rounds: int,
    watcher: RunObserver,
) -> None:
    """Decodes greedily for `num_rounds` rounds; the session books each by its age."""
    sampler = Sampler(temperature=0.0, seed=0)
    warm_up(sampler, session.limits.num_draft_tokens, logits.shape[-1])
    watcher.on_stage("measuring rounds", num_rounds)

    numbers = count()

    def is_last(_: list[int]) -> bool:  # called once before the first round
        num_done = next(numbers)
        watcher.on_progress(num_done)
        return num_done == num_rounds

    decode_speculative(
        session,
        context,
        first_token=sampler.choose(logits),
        num_tokens=session.limits.max_tokens,  # the rounds end it
        sampler=sampler,
        eos_token_ids=frozenset(),
        on_tokens=is_last,
    )


def _calibration(
    booked: list[CompactionMetrics],
    steps: dict[str, list[float]],
    reselection: Reselection,
    *,
    horizon_steps: int,
    margin_us: float,
) -> Calibration:
    times = {name: [getattr(each, name) for each in booked] for name in _TIMES}
    known = {name: values for name, values in times.items() if None not in values}
    medians: dict[str, Any] = {name: statistics.median(values) for name, values in known.items()}
    costs = costs_from_metrics(CompactionMetrics(**medians))
    benefits = RetainBenefits(
        **{name: measured(statistics.median(values)) for name, values in steps.items()}
    )
    decision = decide_retention(costs, benefits, horizon_steps=horizon_steps, margin_us=margin_us)
    return Calibration(
        costs=costs,
        benefits=benefits,
        decision=decision,
        rounds=reselection.rounds,
        prediction=reselection.predict(),
        samples=known | steps,
    )


def _timed_us(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    with torch.inference_mode():
        call()
    return (time.perf_counter() - begin) * 1e6


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value.value if isinstance(value, TermSource) else value for name, value in items}
