"""Measures the terms of a retention decision on this machine, with a real model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
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
from torch_bridge.huggingface.options import NullObserver, RunObserver, RunOptions
from torch_bridge.huggingface.policies import score_source
from torch_bridge.huggingface.session import CompactionSession, SessionLimits
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
        samples: every sample of each measured term, in microseconds.
    """

    costs: RetainCosts
    benefits: RetainBenefits
    decision: RetainDecision
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
    observer: RunObserver | None = None,
) -> Calibration:
    """Measures retentions and steps, one of each a sample, in turns.

    Args:
        options: block size, budget, layout and attention to calibrate for.
        loaded: the model of `options`, in their dtype.
        context: tokens to prefill; the newest ones are repeated to decode along.
        num_samples: samples of each term, at least 1.
        horizon_steps: steps between two decisions.
        margin_us: what a benefit must exceed the cost by.
        observer: hears of stages and progress.
    """
    watcher = observer or NullObserver()
    limits = SessionLimits(
        max_tokens=len(context) + num_samples + 2,
        num_draft_tokens=1,
        num_lookup_tokens=0,
        reselect_every_rounds=1,
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
    ) as session:
        watcher.on_stage("compiling the planning step", None)
        session.warm_up()
        watcher.on_stage(f"prefilling {len(context):,} tokens", None)
        session.prefill(context)
        watcher.on_stage("measuring retentions and steps", num_samples)
        for number in range(num_samples + 1):
            token = [context[number % len(context)]]
            after = _timed_us(lambda token=token: session.draft_step(token))
            session.forget_draft(1)
            before = _timed_us(lambda token=token: session.verify(token, is_scored=False))
            # The same token again, scored: what is timed above records no mass, as a draft does.
            session.verify(token, is_scored=True)
            session.confirm(1)
            earlier = session.runtime.metrics
            session.reselect()
            if number:  # the first of each pays for caches and compilation
                steps["attention_before"].append(before)
                steps["attention_after"].append(after)
                booked.append(_since(earlier, session.runtime.metrics))
            watcher.on_progress(number)
    return _calibration(booked, steps, horizon_steps=horizon_steps, margin_us=margin_us)


def _calibration(
    booked: list[CompactionMetrics],
    steps: dict[str, list[float]],
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
    return Calibration(costs=costs, benefits=benefits, decision=decision, samples=known | steps)


def _timed_us(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    with torch.inference_mode():
        call()
    return (time.perf_counter() - begin) * 1e6


def _since(earlier: CompactionMetrics, later: CompactionMetrics) -> CompactionMetrics:
    """The times of what was booked in between."""
    spans: dict[str, Any] = {}
    for name in _TIMES:
        begin, end = getattr(earlier, name), getattr(later, name)
        spans[name] = None if begin is None or end is None else end - begin
    return CompactionMetrics(**spans)


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value.value if isinstance(value, TermSource) else value for name, value in items}
