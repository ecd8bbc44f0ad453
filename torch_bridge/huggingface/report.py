"""What one decoding run measured, as an object, a JSON text and tables for people."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from blockcompact_jax.budget import effective_budget_blocks
from blockcompact_jax.course import RunCourse
from blockcompact_jax.reselection import Reselection
from torch_bridge.huggingface.baseline import Divergence, FullDecode
from torch_bridge.huggingface.options import RunOptions
from torch_bridge.huggingface.session import CompactionSession
from torch_bridge.huggingface.speculate import SpeculativeDecode
from torch_bridge.models.load import LoadedModel


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Result of `run_decoding`.

    Attributes:
        model: short name, path or hub name of the model.
        context_tokens: prefilled prompt tokens.
        new_tokens: tokens generated.
        budget: the budget as given ("25%", "16b").
        budget_blocks: blocks a layer that the budget came to, sink and recent included.
        block_tokens: tokens a block.
        dtype: data type of weights and KV.
        layout: packed layout of the CPU store.
        attention: "blocks" or "gathered".
        policy: selection policy.
        seed: seed of all random draws.
        temperature: 0 for greedy decoding.
        token_ids: the new tokens.
        text: the new tokens, decoded.
        tokens_identical_to_full: whether plain full-KV decoding gave the same tokens; None if it
            did not run or tokens were sampled.
        first_divergence: the first differing token and how near a tie it was; None if none.
        num_rounds: draft-and-verify rounds.
        acceptance_rate: share of drafted tokens that were accepted; None if none was drafted.
        tokens_per_round: tokens gained a round; None if there was no round.
        tokens_per_draft_forward: tokens drafted a forward; above 1 where the lookup guessed right.
        num_selections: selections made, the one after the prefill included.
        reselection: `is_online`, the fixed `period_rounds`, `num_rounds` by what decided them, and
            the `predicted_period_rounds` of an online choice (None while a cost is unmeasured).
        seconds: load, compile, prefill, full_decode (None if not run), compacted_decode, and its
            parts draft, verify and reselect.
        tokens_per_second: rate of compacted decoding, without the first token, which the prefill
            gave; None if there was only that.
        tokens_per_second_full: the same of plain decoding; None if it did not run.
        speedup_vs_full: ratio of the two rates; None if not compared.
        metrics: every metric of the MET contracts under its own name.
        memory_bytes: weights, full_kv_packed, full_kv_newest, resident_pool, scratch, and
            process_peak (the peak resident set of the process up to the end of decoding).
        course: residency, rounds and decisions; None where they were not recorded.
    """

    model: str
    context_tokens: int
    new_tokens: int
    budget: str
    budget_blocks: int
    block_tokens: int
    dtype: str
    layout: str
    attention: str
    policy: str
    seed: int
    temperature: float
    token_ids: list[int]
    text: str
    tokens_identical_to_full: bool | None
    first_divergence: Divergence | None
    num_rounds: int
    acceptance_rate: float | None
    tokens_per_round: float | None
    tokens_per_draft_forward: float | None
    num_selections: int
    reselection: dict[str, Any]
    seconds: dict[str, float | None]
    tokens_per_second: float | None
    tokens_per_second_full: float | None
    speedup_vs_full: float | None
    metrics: dict[str, int | float | None]
    memory_bytes: dict[str, int] = field(default_factory=dict)
    course: RunCourse | None = None

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values; a divergence becomes {position, logit_margin}.

        A course stands in it where one was recorded.
        """
        plain = {name: value for name, value in vars(self).items() if name != "course"}
        if self.course is not None:
            plain["course"] = self.course.to_dict()
        if self.first_divergence is not None:
            plain["first_divergence"] = {
                "position": self.first_divergence.token_position,
                "logit_margin": self.first_divergence.logit_margin,
            }
        return plain


def make_report(
    *,
    options: RunOptions,
    loaded: LoadedModel,
    session: CompactionSession,
    num_context_tokens: int,
    compile_seconds: float,
    prefill_seconds: float,
    compacted: SpeculativeDecode,
    compacted_seconds: float,
    full: FullDecode | None,
    peak_bytes: int,
) -> RunReport:
    """Joins what a run measured.

    Args:
        options: what was run.
        loaded: the model.
        session: the session after decoding.
        num_context_tokens: prefilled tokens.
        compile_seconds: time of compiling the planning step.
        prefill_seconds: time of prefill, packing and the first selection.
        compacted: the self-speculative decoding.
        compacted_seconds: its time.
        full: the plain decoding, None if it did not run.
        peak_bytes: peak resident set of the process up to the end of the compacted decoding.
    """
    seconds = {
        "load": loaded.load_seconds,
        "compile": compile_seconds,
        "prefill": prefill_seconds,
        "full_decode": full.seconds if full is not None else None,
        "compacted_decode": compacted_seconds,
        **vars(session.seconds),
    }
    rate, full_rate = _rate_of(len(compacted.tokens), compacted_seconds), _full_rate(full)
    return RunReport(
        model=loaded.name,
        context_tokens=num_context_tokens,
        new_tokens=len(compacted.tokens),
        budget=str(options.budget),
        budget_blocks=effective_budget_blocks(
            options.budget, num_context_tokens // options.block_tokens
        ),
        block_tokens=options.block_tokens,
        dtype=options.dtype,
        layout=session.layout.label,
        attention=session.attention,
        policy=options.policy,
        seed=options.seed,
        temperature=options.temperature,
        token_ids=compacted.tokens,
        text=loaded.tokenizer.decode(compacted.tokens),
        tokens_identical_to_full=_is_identical(compacted, full)
        if options.temperature == 0
        else None,
        first_divergence=full.divergence if full is not None else None,
        num_rounds=compacted.num_rounds,
        acceptance_rate=compacted.acceptance_rate,
        tokens_per_round=_ratio(compacted.num_gained, compacted.num_rounds),
        tokens_per_draft_forward=_ratio(compacted.num_drafted, compacted.num_draft_forwards),
        num_selections=session.runtime.num_selections,
        reselection=_reselection(session.reselection),
        seconds=seconds,
        tokens_per_second=rate,
        tokens_per_second_full=full_rate,
        speedup_vs_full=_ratio(rate or 0, full_rate or 0),
        metrics=session.runtime.metrics.to_dict(),
        memory_bytes=_memory_bytes(loaded, session, peak_bytes),
        course=session.course,
    )


def _rate_of(num_tokens: int, seconds: float) -> float | None:
    """Tokens a second, without the first one, which the prefill gave."""
    return _ratio(num_tokens - 1, seconds)


def _is_identical(compacted: SpeculativeDecode, full: FullDecode | None) -> bool | None:
    return None if full is None else full.tokens == compacted.tokens


def _full_rate(full: FullDecode | None) -> float | None:
    return None if full is None else _rate_of(len(full.tokens), full.seconds)


def _reselection(reselection: Reselection) -> dict[str, Any]:
    prediction = reselection.predict() if reselection.online else None
    return {
        "is_online": reselection.online is not None,
        "period_rounds": reselection.period_rounds,
        "predicted_period_rounds": prediction.period_rounds if prediction else None,
        "num_rounds": {
            basis.value: num_rounds for basis, num_rounds in reselection.num_rounds_by_basis.items()
        },
    }


def _memory_bytes(
    loaded: LoadedModel, session: CompactionSession, peak_bytes: int
) -> dict[str, int]:
    return {
        "weights": loaded.weights_bytes,
        **session.memory_bytes(),
        "process_peak": peak_bytes,
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if part > 0 and whole > 0 else None


def to_json(report: RunReport) -> str:
    """One JSON object on one line."""
    return json.dumps(report.to_dict())


def render(report: RunReport, console: Console) -> None:
    """Prints the tables that end a run."""
    console.print(_decoding_table(report))
    console.print(_memory_table(report))
    console.print(_metrics_table(report))


def _decoding_table(report: RunReport) -> Table:
    table = _two_columns(
        f"{report.model}, {report.dtype}: {report.context_tokens:,} tokens of context, "
        f"budget {report.budget} ({report.budget_blocks} blocks of {report.block_tokens})",
        "decoding",
    )
    num_tokens = report.new_tokens
    compacted = report.seconds["compacted_decode"]
    full = report.seconds["full_decode"]
    table.add_row("new tokens", f"{num_tokens:,}")
    table.add_row("rounds", f"{report.num_rounds:,}")
    table.add_row("acceptance rate", _number(report.acceptance_rate, "{:.1%}"))
    table.add_row("tokens per round", _number(report.tokens_per_round, "{:.2f}"))
    table.add_row("drafted per forward", _number(report.tokens_per_draft_forward, "{:.2f}"))
    table.add_row("selections", f"{report.num_selections:,}")
    table.add_row("selected anew", _reselected(report))
    table.add_row("load", _seconds(report.seconds["load"]))
    table.add_row("compile", _seconds(report.seconds["compile"]))
    table.add_row("prefill", _seconds(report.seconds["prefill"]))
    table.add_row("full decoding", _rate(full, report.tokens_per_second_full))
    table.add_row("compacted decoding", _rate(compacted, report.tokens_per_second))
    for part in ("draft", "verify", "reselect"):
        table.add_row(f"  {part}", _seconds(report.seconds[part]))
    table.add_row("speedup over full", _number(report.speedup_vs_full, "{:.2f} times"))
    table.add_row("same tokens as full", _identity(report))
    return table


def _memory_table(report: RunReport) -> Table:
    table = _two_columns("Memory", "held by")
    names = {
        "weights": "weights",
        "full_kv_packed": f"full KV, packed ({report.layout})",
        "full_kv_newest": "full KV, newest tokens",
        "resident_pool": "resident pool",
        "scratch": "scratch (scores, one plain layer)",
        "process_peak": "peak of the process",
    }
    for key, label in names.items():
        table.add_row(label, f"{report.memory_bytes[key] / 1e6:,.1f} MB")
    return table


def _metrics_table(report: RunReport) -> Table:
    table = _two_columns("Metrics", "metric")
    for name, value in report.metrics.items():
        table.add_row(name, _number(value, "{:,.0f}"))
    return table


def _two_columns(title: str, first: str) -> Table:
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    table.add_column(first)
    table.add_column("value", justify="right")
    return table


def _number(value: float | None, form: str) -> str:
    return "not measured" if value is None else form.format(value)


def _seconds(value: float | None) -> str:
    return _number(value, "{:.2f} s")


def _rate(seconds: float | None, tokens_per_second: float | None) -> str:
    if seconds is None or tokens_per_second is None:
        return "not run"
    return f"{seconds:.2f} s, {tokens_per_second:.1f} tokens/s"


def _reselected(report: RunReport) -> str:
    """The period, or what decided the rounds; what was unmeasured is said."""
    reselection = report.reselection
    if not reselection["is_online"]:
        return f"every {reselection['period_rounds']} rounds"
    return ", ".join(
        f"{name} in {num_rounds:,} rounds" for name, num_rounds in reselection["num_rounds"].items()
    )


def _identity(report: RunReport) -> str:
    if report.tokens_identical_to_full is None:
        return "not compared"
    if report.first_divergence is None:
        return "yes"
    return (
        f"until position {report.first_divergence.token_position} "
        f"(logit margin {report.first_divergence.logit_margin:.3g})"
    )
